from __future__ import annotations

import pytest
import torch

from openengine.errors import InvalidArgument
from openengine.ops.kv_cache import KvCache, KvSpec

SPEC = KvSpec(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.float32, device=torch.device("cpu"))
LAYOUTS = pytest.mark.parametrize("heads_first", [False, True], ids=["tokens_first", "heads_first"])


def filled(heads_first: bool, *, seed: int = 0) -> KvCache:
    kv = KvCache(SPEC, 6, 4, heads_first=heads_first)
    generator = torch.Generator().manual_seed(seed)
    for layer in range(SPEC.num_layers):
        kv.key(layer).normal_(generator=generator)
        kv.value(layer).normal_(generator=generator)
    return kv


@LAYOUTS
def test_bytes_per_block_is_what_the_cache_takes(heads_first):
    kv = KvCache(SPEC, 6, 4, heads_first=heads_first)
    views = [view(layer) for view in (kv.key, kv.value) for layer in range(SPEC.num_layers)]
    assert sum(view.nbytes for view in views) == 6 * KvCache.bytes_per_block(SPEC, 4)


@LAYOUTS
def test_copied_blocks_equal_their_sources_in_every_layer(heads_first):
    kv = filled(heads_first)
    before = kv.export_blocks(range(6))
    kv.copy_blocks([(0, 3), (2, 5)])
    assert torch.equal(kv.export_blocks([3, 5]), before[:, :, [0, 2]])
    assert torch.equal(kv.export_blocks([0, 1, 2, 4]), before[:, :, [0, 1, 2, 4]])


def test_a_copy_reads_all_sources_before_it_writes():
    kv = filled(False)
    before = kv.export_blocks([0, 1])
    kv.copy_blocks([(0, 1), (1, 2)])
    assert torch.equal(kv.export_blocks([1, 2]), before)


def test_copying_no_blocks_changes_nothing():
    kv = filled(False)
    before = kv.export_blocks(range(6))
    kv.copy_blocks([])
    assert torch.equal(kv.export_blocks(range(6)), before)


@LAYOUTS
def test_exported_blocks_are_layer_kind_block_token_head_dim(heads_first):
    kv = filled(heads_first)
    exported = kv.export_blocks([4, 1])
    assert exported.shape == (3, 2, 2, 4, 2, 8)
    token = kv.value(2)[1, 1, 3] if heads_first else kv.value(2)[1, 3, 1]  # layer 2, block 1, token 3, head 1
    assert torch.equal(exported[2, 1, 1, 3, 1], token)
    assert exported.is_contiguous()


@pytest.mark.parametrize("source", [False, True])
@LAYOUTS
def test_blocks_survive_the_way_between_unlike_layouts(source, heads_first):
    blocks = filled(source).export_blocks([4, 1, 0])
    kv = filled(heads_first, seed=1)
    untouched = kv.export_blocks([1, 3, 4])
    kv.import_blocks([2, 5, 0], blocks)
    assert torch.equal(kv.export_blocks([2, 5, 0]), blocks)
    assert torch.equal(kv.export_blocks([1, 3, 4]), untouched)


def test_an_exported_block_is_a_copy():
    kv = filled(False)
    blocks = kv.export_blocks([0])
    kept = blocks.clone()
    kv.key(0).zero_()
    assert torch.equal(blocks, kept)


@pytest.mark.parametrize("blocks", [torch.zeros(3, 2, 1, 8, 2, 8), torch.zeros(3, 2, 1, 4, 2, 8, dtype=torch.float16)])
def test_blocks_of_another_shape_or_dtype_are_refused(blocks):
    with pytest.raises(InvalidArgument, match="same model, dtype and block_size"):
        filled(False).import_blocks([0], blocks)


@pytest.mark.parametrize(("num_blocks", "block_size", "name"), [(0, 4, "num_blocks"), (6, 0, "block_size")])
def test_an_empty_cache_is_refused(num_blocks, block_size, name):
    with pytest.raises(InvalidArgument, match=name):
        KvCache(SPEC, num_blocks, block_size)


def test_a_cache_made_in_inference_mode_can_be_written_outside():
    with torch.inference_mode():
        kv = KvCache(SPEC, 2, 4)
        blocks = torch.ones(3, 2, 1, 4, 2, 8)
    kv.import_blocks([1], blocks)
    kv.key(0)[0].zero_()
    kv.copy_blocks([(1, 0)])
    assert torch.equal(kv.export_blocks([0]), blocks)
