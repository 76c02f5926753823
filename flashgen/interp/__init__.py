"""Interpreters: the meaning of the IR in NumPy. `tile` runs loop nests, `machine` runs and checks lowered kernels."""
