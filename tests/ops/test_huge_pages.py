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
def test_memory_of_any_size_can_be_written(num_bytes):
    zeros = HugePages(16 * MIB).zeros(num_bytes)
    assert not zeros.any()
    for tensor in (zeros, huge_pages.empty(num_bytes)):
        assert tensor.dtype == torch.uint8 and tensor.shape == (num_bytes,) and tensor.device.type == "cpu"
        assert (tensor.fill_(7) == 7).all()


def test_tensors_of_a_region_share_no_byte_and_begin_at_lines():
    pages = HugePages(4 * MIB)
    sizes = [4 * size for size in (1, 63, 64, 65, 1000, 100_000, 200_000, 250_000, 5, 262_144, 300_000)] * 3
    with ThreadPoolExecutor(4) as pool:
        tensors = list(pool.map(pages.zeros, sizes))
    for value, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(value)
    for value, (size, tensor) in enumerate(zip(sizes, tensors)):
        assert tensor.shape == (size,) and (tensor == value).all()


@pytest.mark.skipif(not _GRANTED, reason="the system has no huge pages to ask for")
def test_the_system_is_asked_for_huge_pages():
    for tensor in (huge_pages.empty(8 * MIB), HugePages().zeros(1000)):
        tensor.fill_(1)
        regions = _REGION.findall(Path("/proc/self/smaps").read_text())
        (flags,) = (flags for start, end, flags in regions if int(start, 16) <= tensor.data_ptr() < int(end, 16))
        assert "hg" in flags.split()


@pytest.fixture
def regions(monkeypatch):
    """Weak references to the regions that are mapped; None for each that could not be."""
    made, map_region = [], huge_pages._map

    def watched(num_bytes):
        region = map_region(num_bytes)
        made.append(region and weakref.ref(region))
        return region

    monkeypatch.setattr(huge_pages, "_map", watched)
    return made


@pytest.mark.skipif(not _GRANTED, reason="the system has no huge pages to ask for")
def test_a_region_is_freed_with_its_last_tensor(regions):
    pages = HugePages(4 * MIB)
    first, second = pages.zeros(1000), pages.zeros(1000)
    del first
    gc.collect()
    assert len(regions) == 1 and regions[0]() is not None
    del second
    gc.collect()
    assert regions[0]() is None
    assert not pages.zeros(1000).any() and len(regions) == 2


@pytest.mark.skipif(not _GRANTED, reason="the system has no huge pages to ask for")
def test_a_region_that_cannot_be_had_leaves_the_one_before_alone(regions, monkeypatch):
    pages = HugePages(4 * MIB)
    kept = [pages.zeros(MIB).fill_(value) for value in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(huge_pages.mmap, "mmap", _no_memory)
        kept.append(pages.zeros(MIB).fill_(4))
    kept += [pages.zeros(MIB).fill_(value) for value in (5, 6)]
    assert len(regions) == 3 and regions[1] is None
    assert all((tensor == value).all() for value, tensor in enumerate(kept))


@pytest.mark.parametrize("fault", ["no such advice", "no such pages", "no such memory"])
def test_without_huge_pages_memory_is_plain(monkeypatch, fault):
    if fault == "no such advice":
        monkeypatch.setattr(huge_pages, "_ADVICE", None)
    elif fault == "no such pages":
        monkeypatch.setattr(huge_pages, "_ADVICE", 1 << 20)  # which no system knows
    else:
        monkeypatch.setattr(huge_pages.mmap, "mmap", _no_memory)
    assert huge_pages._map(8 * MIB) is None
    huge_pages.empty(8 * MIB).fill_(1)
    assert not HugePages().zeros(1000).any()


def _no_memory(*_args, **_options):
    raise OSError(12, "no memory")
