"""Memory in large pages, for weights: every step reads them from end to end, as fast as memory allows.

Within a page the hardware foresees what is read next, and 4 KiB last it for no more than a moment: products of few rows
take a tenth less time with pages of 2 MiB. Layers are smaller than that or end within one, so they share regions.
"""

from __future__ import annotations

import mmap
import threading
import weakref

import torch
from torch import Tensor

__all__ = ["zeros"]

_PAGE_BYTES = 2 << 20
_REGION_BYTES = 32 << 20  # what nobody touches of it takes no memory
_ALIGNMENT = 64

_lock = threading.Lock()
_open: weakref.ref[mmap.mmap] | None = None  # the region that the next tensors come from, for as long as others do
_used = 0


def zeros(num_bytes: int) -> Tensor:
    """u8[num_bytes] zeros, in large pages where the system has them; given back once no tensor of its region is left."""
    global _open, _used
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_bytes, dtype=torch.uint8)
    with _lock:
        region = None if _open is None else _open()
        if region is None or _used + num_bytes > len(region):
            region = _new_region(num_bytes)
            _open, _used = weakref.ref(region), _aligned_start(region)
        start = _used
        _used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return torch.frombuffer(region, dtype=torch.uint8, count=num_bytes, offset=start)


def _new_region(num_bytes: int) -> mmap.mmap:
    size = max(_REGION_BYTES, -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES) + _PAGE_BYTES
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        region.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a system without them
    return region


def _aligned_start(region: mmap.mmap) -> int:
    address = torch.frombuffer(region, dtype=torch.uint8).data_ptr()
    return -address % _PAGE_BYTES
