"""The C library's heap: freed memory is used again.

A training step and a loader free many tensors at once. By default glibc then returns the top of the heap to the system,
and each page of it costs a fault when it is written again: some 8,000 in a step of ragged packs whose sizes change.
"""

import ctypes
import os
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_PIECE = 2**25
"""Larger ones still come from the system and go back there; the largest limit that older versions take."""
KEPT = 2**30
"""Bytes at the top of the heap that may be free and stay with the process."""
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Let the C library use freed memory again in place of returning it to the system.

    Args:
        environ: a user who has set one of `VARIABLES` decides.

    Returns:
        Whether it was changed: only glibc has such limits.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in environ for name in VARIABLES):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGEST_PIECE)) and bool(mallopt(_M_TRIM_THRESHOLD, KEPT))
