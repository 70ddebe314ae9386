"""Memory in huge pages: zeros of their own, given back with the last tensor, plain where there are no such pages."""

from __future__ import annotations

import gc
import mmap
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from openengine.ops import huge_pages
from openengine.ops.huge_pages import HugePages

MIB = 1 << 20
_REGION = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags:(.*?)$", re.MULTILINE | re.DOTALL)  # of smaps
_GRANTED = hasattr(mmap, "MADV_HUGEPAGE") and Path("/sys/kernel/mm/transparent_hugepage").exists()


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4 * MIB - 1, 4 * MIB, 9 * MIB + 3])
def test_zeros_of_any_size_can_be_written(num_bytes):
    for tensor in (huge_pages.zeros(num_bytes), HugePages(16 * MIB).zeros(num_bytes)):
        assert tensor.dtype == torch.uint8 and tensor.shape == (num_bytes,)
        assert not tensor.any()
        assert (tensor.fill_(7) == 7).all()


def test_tensors_of_a_region_share_no_byte_and_begin_at_lines():
    pages = HugePages(MIB)
    sizes = [1, 63, 64, 65, 1000, 100_000, 200_000, 250_000, 5, 262_144, 300_000] * 3  # of several regions
    with ThreadPoolExecutor(4) as pool:
        tensors = list(pool.map(pages.zeros, sizes))
    for value, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(value)
    for value, (size, tensor) in enumerate(zip(sizes, tensors)):
        assert tensor.shape == (size,) and (tensor == value).all()


@pytest.mark.skipif(not _GRANTED, reason="the system has no huge pages to ask for")
def test_the_system_is_asked_for_huge_pages():
    for tensor in (huge_pages.zeros(8 * MIB), HugePages().zeros(1000)):
        tensor.fill_(1)
        regions = _REGION.findall(Path("/proc/self/smaps").read_text())
        (flags,) = (flags for start, end, flags in regions if int(start, 16) <= tensor.data_ptr() < int(end, 16))
        assert "hg" in flags.split()


@pytest.mark.skipif(not _GRANTED, reason="the system has no huge pages to ask for")
def test_a_region_is_freed_with_its_last_tensor(monkeypatch):
    regions = []
    map_region = huge_pages._map

    def watched(num_bytes):
        region = map_region(num_bytes)
        regions.append(weakref.ref(region))
        return region

    monkeypatch.setattr(huge_pages, "_map", watched)
    pages = HugePages(MIB)
    first, second = pages.zeros(1000), pages.zeros(1000)
    del first
    gc.collect()
    assert len(regions) == 1 and regions[0]() is not None
    del second
    gc.collect()
    assert regions[0]() is None
    assert not pages.zeros(1000).any() and len(regions) == 2


@pytest.mark.parametrize("fault", ["no such advice", "no such pages", "no such memory"])
def test_without_huge_pages_memory_is_plain(monkeypatch, fault):
    if fault == "no such advice":
        monkeypatch.setattr(huge_pages, "_ADVICE", None)
    elif fault == "no such pages":
        monkeypatch.setattr(huge_pages, "_ADVICE", 1 << 20)  # which no system knows
    else:
        monkeypatch.setattr(huge_pages.mmap, "mmap", lambda *_, **__: (_ for _ in ()).throw(OSError(12, "no memory")))
    assert huge_pages._map(8 * MIB) is None
    for tensor in (huge_pages.zeros(8 * MIB), HugePages().zeros(1000)):
        assert not tensor.any()
        tensor.fill_(1)
