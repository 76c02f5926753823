"""From MACHINE IR to CUDA text."""
