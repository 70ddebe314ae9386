"""Memory in large pages: zeros, apart from each other, given back with the last tensor of a region."""

from __future__ import annotations

import gc
import mmap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from openengine.ops import large_pages

needs_large_pages = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="a system without large pages")


def test_tensors_are_zeros_and_do_not_overlap():
    with ThreadPoolExecutor(4) as pool:
        tensors = list(pool.map(large_pages.zeros, [1, 63, 64, 65, 1000, 3 << 20, 40 << 20, 7, 31 << 20, 2 << 20] * 2))
    for index, tensor in enumerate(tensors):
        assert tensor.dtype == torch.uint8 and tensor.data_ptr() % 64 == 0 and not tensor.any()
        tensor.fill_(index + 1)
    assert all((tensor == index + 1).all() for index, tensor in enumerate(tensors))


@needs_large_pages
def test_small_tensors_share_a_region_that_goes_with_the_last_of_them():
    gc.collect()
    first = large_pages.zeros(large_pages._REGION_BYTES)  # what is open now has no room for it
    assert first.data_ptr() % large_pages._PAGE_BYTES == 0
    large_pages.zeros(large_pages._REGION_BYTES)
    assert large_pages._open() is None, "nobody holds the second"
    small = [large_pages.zeros(100) for _ in range(3)]
    assert small[2].data_ptr() - small[0].data_ptr() == 256 and small[0].data_ptr() % large_pages._PAGE_BYTES == 0
    first_of_them = small.pop(0)
    del small
    assert large_pages._open() is not None and not first_of_them.any()
    del first_of_them
    assert large_pages._open() is None


def test_where_the_system_has_none_memory_is_as_any(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert torch.equal(large_pages.zeros(10), torch.zeros(10, dtype=torch.uint8))
