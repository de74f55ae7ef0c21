"""Giving a model's memory back to the system, not only to the allocator.

glibc keeps what is freed at the top of a thread's arena, up to twice the size of the largest array that was ever freed
(64 MiB), and `malloc_trim` does not look there. So while a model is freed it keeps next to nothing; in between as much
as it would have come to by itself, so that the arrays of a step are not fetched anew each time. Other allocators are
left alone.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LEAST_KEPT_BYTES, _MOST_KEPT_BYTES, _MOST_IN_HEAP_BYTES = 128 * 2**10, 64 * 2**20, 32 * 2**20
_LIBC = ctypes.CDLL(None)
_IS_GLIBC = hasattr(_LIBC, "gnu_get_libc_version")


@contextmanager
def returning_memory() -> Iterator[None]:
    """What is freed within the block goes back to the system."""
    _keep(_LEAST_KEPT_BYTES)
    try:
        yield
    finally:
        _keep(_MOST_KEPT_BYTES)


def collect() -> None:
    """Free what is left of a model, and give back what is free. Loading has put all that lived then out of the garbage
    collector's sight."""
    with returning_memory():
        gc.unfreeze()
        gc.collect()
        if _IS_GLIBC:
            _LIBC.malloc_trim(0)


def _keep(kept_bytes: int) -> None:
    if _IS_GLIBC:
        # Either one alone would leave the other where it happens to be.
        _LIBC.mallopt(_MMAP_THRESHOLD, _MOST_IN_HEAP_BYTES)
        _LIBC.mallopt(_TRIM_THRESHOLD, kept_bytes)
