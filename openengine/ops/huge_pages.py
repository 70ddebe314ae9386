"""Memory in huge pages, for what is read through once a step: weights and the KV cache.

With pages of 4 KiB the hardware stops to look one up every 64 lines, and stops to read ahead there. Where the system
grants huge pages on request (Linux, unless its administrator turned them off) streams are read a fifth faster; elsewhere
this is plain memory.
"""

from __future__ import annotations

import mmap
import threading
import weakref

import torch
from torch import Tensor

__all__ = ["HugePages", "zeros"]

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
_LEAST = 4 << 20  # bytes; two huge pages, of which one at least is whole wherever the memory begins
_ALIGNMENT = 64  # bytes, a line of the cache


def zeros(num_bytes: int) -> Tensor:
    """Zeros u8[num_bytes], of which memory is taken when they are first written."""
    memory = _map(num_bytes) if num_bytes >= _LEAST else None
    return torch.zeros(num_bytes, dtype=torch.uint8) if memory is None else torch.frombuffer(memory, dtype=torch.uint8)


class HugePages:
    """Lays many small tensors side by side. It keeps no memory alive: a region is freed with its last tensor."""

    def __init__(self, region_bytes: int = 64 << 20) -> None:
        self._region_bytes = region_bytes
        self._lock = threading.Lock()
        self._region = lambda: None  # a weak reference to the region that is being filled
        self._used = 0

    def zeros(self, num_bytes: int) -> Tensor:
        """Zeros u8[num_bytes], aligned to a line of the cache."""
        if num_bytes == 0 or num_bytes * 4 > self._region_bytes:
            return zeros(num_bytes)
        with self._lock:
            region = self._region()
            if region is None or self._used + num_bytes > self._region_bytes:
                region, self._used = _map(self._region_bytes), 0
                if region is None:
                    return zeros(num_bytes)
                self._region = weakref.ref(region)
            tensor = torch.frombuffer(region, dtype=torch.uint8, offset=self._used, count=num_bytes)
            self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return tensor


def _map(num_bytes: int) -> mmap.mmap | None:
    if _ADVICE is None:
        return None
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(_ADVICE)
    except OSError:  # no such pages in this kernel, or no such amount of memory
        return None
    return memory
