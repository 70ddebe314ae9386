"""Memory in huge pages, for what is read through once a step: weights and the KV cache.

With pages of 4 KiB the hardware stops to look one up every 64 lines, and stops to read ahead there. Where the system
grants huge pages on request (Linux, unless its administrator turned them off) streams are read a fifth faster; elsewhere
this is plain memory.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["HugePages", "empty"]

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
_LEAST = 4 << 20  # bytes; two huge pages, of which one at least is whole wherever the memory begins
_ALIGNMENT = 64  # bytes, a line of the cache


def empty(num_bytes: int) -> Tensor:
    """Memory u8[num_bytes] on the CPU, uninitialized; the system gives pages as they are first written."""
    memory = _map(num_bytes)
    if memory is None:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(memory, dtype=torch.uint8)


class HugePages:
    """Lays many small tensors side by side. It keeps no memory alive: a region is freed with its last tensor."""

    def __init__(self, region_bytes: int = 64 << 20) -> None:
        self._region_bytes = region_bytes
        self._lock = threading.Lock()
        self._region: Callable[[], mmap.mmap | None] = lambda: None  # a weak reference to what is being filled
        self._used = 0

    def zeros(self, num_bytes: int) -> Tensor:
        """Zeros u8[num_bytes] on the CPU, which begin at a line of the cache."""
        memory, offset = self._place(num_bytes)
        if memory is None:
            return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=num_bytes)

    def _place(self, num_bytes: int) -> tuple[mmap.mmap | None, int]:
        if num_bytes == 0 or num_bytes * 4 > self._region_bytes:
            return _map(num_bytes), 0  # too large to share a region
        with self._lock:
            region, offset = self._region(), self._used
            if region is None or offset + num_bytes > self._region_bytes:
                region, offset = _map(self._region_bytes), 0
                if region is None:
                    return None, 0
                self._region = weakref.ref(region)
            self._used = offset + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            return region, offset


def _map(num_bytes: int) -> mmap.mmap | None:
    if _ADVICE is None or num_bytes < _LEAST:
        return None
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(_ADVICE)
    except OSError:  # no such pages in this kernel, or no such amount of memory
        return None
    return memory
