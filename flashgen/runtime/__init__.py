"""Compiling, caching and launching: from CUDA text to results in arrays."""
