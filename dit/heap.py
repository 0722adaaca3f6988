"""Settings of the C library's heap, so that freed memory is reused.

A training step and a data loader free many tensors at once. By default glibc then returns the top of the heap to the
system, and each page costs a page fault when it is written again: about 8,000 in a step of ragged packs of varying
size.
"""

import ctypes
import os
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_PIECE = 2**25
"""Larger allocations are still returned to the system; this is the largest limit of older glibc versions."""
MOST_KEPT_FREE = 2**30
"""Free bytes at the top of the heap that the process keeps."""
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Make glibc reuse freed memory, unless one of `VARIABLES` is set; return whether the limits were changed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in environ for name in VARIABLES):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGEST_PIECE)) and bool(mallopt(_M_TRIM_THRESHOLD, MOST_KEPT_FREE))
