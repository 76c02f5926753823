"""The CUDA driver, and CuPy's bindings of driver and runtime: each found once in a process, when it is first needed."""

from __future__ import annotations

import ctypes
import importlib
import sys
from functools import cache
from typing import Any


@cache
def libcuda() -> ctypes.CDLL:
    """The CUDA driver itself: for what CuPy does not bind, or is not imported for. Raises OSError where it is not."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@cache
def driver() -> Any:
    """CuPy's binding of the driver. This and the others raise ImportError without CuPy."""
    return _cupy("cupy_backends.cuda.api.driver")


@cache
def runtime() -> Any:
    """CuPy's binding of the runtime."""
    return _cupy("cupy_backends.cuda.api.runtime")


@cache
def modules() -> Any:
    """CuPy's module of loaded cubins."""
    return _cupy("cupy.cuda.function")


def _cupy(name: str) -> Any:
    """A module of CuPy, after CuPy itself, which finds the CUDA libraries."""
    try:
        importlib.import_module("cupy")
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"launching a kernel needs CuPy ({error}); pip install 'flashgen[cuda]'") from None
