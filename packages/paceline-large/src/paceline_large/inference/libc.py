"""Calls of Linux's C library about the memory pages of this process, which Python's standard library lacks."""

from __future__ import annotations

import ctypes
import sys
from functools import cache


@cache
def libc() -> ctypes.CDLL | None:
    """Returns the C library with `madvise` and `mincore`, whose calls let other threads run; None where it is not Linux's."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    return library
