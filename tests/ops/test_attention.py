from __future__ import annotations

import random
import re
import sys

import pytest
import torch

from openengine.errors import InvalidArgument, UnsupportedFeature
from openengine.ops.attention import select_backend
from openengine.ops.attention_torch import TorchAttention
from openengine.ops.kv_cache import KvSpec
from openengine.ops.native import native_library
from tests.ops.ragged import Sequences, make_batch
from tests.reference import naive_attention

CPU = torch.device("cpu")
# Query and context lengths: decodes, fresh prompts, a prompt with a cached prefix.
RAGGED = ([1, 1, 1, 1, 5, 40, 33], [1, 77, 300, 16, 5, 40, 150])
LONG = ([1, 1, 1, 300, 200], [700, 129, 1, 300, 650])
BACKENDS = [pytest.param(False, id="products"), pytest.param(True, id="fused")]


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("fused", BACKENDS)
@pytest.mark.parametrize("lens", [RAGGED, LONG])
@pytest.mark.parametrize("window", [None, 1, 7, 64, 129])
def test_a_ragged_batch_matches_the_oracle(fused, lens, window):
    case = Sequences(*lens, window=window)
    assert_near(case.attend(TorchAttention(fused=fused), 32), case.expected())


@pytest.mark.parametrize("head_dim", [32, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (8, 2), (16, 1)])
def test_head_sizes_and_groups_match_the_oracle(head_dim, num_heads, num_kv_heads):
    case = Sequences(*RAGGED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, window=50)
    assert_near(case.attend(TorchAttention(), 16), case.expected())


@pytest.mark.parametrize("fused", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 16, 48, 64, 128])
def test_lengths_at_block_boundaries_match_the_oracle(fused, block_size):
    ends = [block_size - 1, block_size, block_size + 1, 2 * block_size]
    decodes = [n for n in ends if n > 0]
    case = Sequences([1] * len(decodes) + [2] * 2 + [ends[3]], decodes + [ends[3], ends[3] + 1, ends[3]])
    assert_near(case.attend(TorchAttention(fused=fused), block_size), case.expected())


@pytest.mark.parametrize("fused", BACKENDS)
@pytest.mark.parametrize("window", [2, 31, 128])
def test_lengths_at_the_edge_of_the_window_match_the_oracle(fused, window):
    decodes = [window - 1, window, window + 1]
    fresh = [n for n in decodes if n > 1]
    lens = ([1, 1, 1, 2, 2, *fresh], [*decodes, window, window + 1, *fresh])
    case = Sequences(*lens, num_heads=24, num_kv_heads=8, window=window)
    assert_near(case.attend(TorchAttention(fused=fused), 16), case.expected())


@pytest.mark.parametrize("fused", BACKENDS)
@pytest.mark.parametrize("window", [None, 33])
def test_softcap_matches_the_oracle(fused, window):
    case = Sequences(*RAGGED, softcap=2.0, window=window)
    assert_near(case.attend(TorchAttention(fused=fused), 32), case.expected())


@pytest.mark.parametrize("seed", range(8))
def test_random_mixes_match_the_oracle(seed):
    pick = random.Random(seed).randint
    decodes = [pick(1, 700) for _ in range(pick(0, 20))]
    prefills = [(pick(2, 60), pick(0, 1) * pick(1, 300)) for _ in range(pick(0 if decodes else 1, 4))]
    query_lens = [1] * len(decodes) + [new for new, _ in prefills]
    num_kv_heads = pick(1, 3)
    case = Sequences(
        query_lens,
        decodes + [new + cached for new, cached in prefills],
        num_heads=num_kv_heads * pick(1, 4),
        num_kv_heads=num_kv_heads,
        head_dim=(32, 64)[pick(0, 1)],
        window=(None, pick(1, 200))[pick(0, 1)],
        softcap=(None, 5.0)[pick(0, 3) == 0],
        seed=seed,
    )
    assert_near(case.attend(TorchAttention(), (16, 32, 64)[pick(0, 2)]), case.expected())


@pytest.mark.parametrize("fused", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (None, 5.0)])
def test_half_precision_errs_at_most_twice_as_much_as_plain_pytorch(fused, dtype, window, softcap):
    case = Sequences(*RAGGED, dtype=dtype, window=window, softcap=softcap)
    expected = case.expected()
    actual = case.attend(TorchAttention(fused=fused), 32).float()
    plain = case.expected(dtype).float()
    for error in (lambda x: (x - expected).abs().max(), lambda x: (x - expected).square().mean().sqrt()):
        assert error(actual) <= 2 * error(plain)


@pytest.mark.parametrize("fused", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fill", [torch.nan, torch.inf])
def test_slots_nobody_wrote_never_matter(fused, dtype, fill):
    case = Sequences(*RAGGED, dtype=dtype, window=100)
    dirty, clean = (case.attend(TorchAttention(fused=fused), 32, fill=x) for x in (fill, 0.0))
    assert dirty.isfinite().all()
    assert torch.equal(dirty, clean)


def test_a_sequence_attends_alike_alone_and_in_a_batch():
    together = Sequences(*RAGGED).attend(TorchAttention(), 32).split(RAGGED[0])
    for index, rows in enumerate(together):
        alone = Sequences(*([lens[index]] for lens in RAGGED), seed=index)
        assert_near(rows, alone.attend(TorchAttention(), 32))


def test_many_decodes_of_unlike_lengths_are_split_into_buckets_and_keep_their_rows():
    lens = [1 + 37 * i % 600 for i in range(64)]
    case = Sequences([1] * 64, lens)
    backend = TorchAttention()
    kv = backend.allocate(KvSpec(1, 3, 64, torch.float32, CPU), 64 * 19, 32)
    batch = make_batch(kv, [list(range(19 * i, 19 * i + 19)) for i in range(64)], [1] * 64, lens)
    backend.prepare(batch, windows=[None])
    assert len(batch.scratch["plan", None].buckets) > 1
    assert_near(case.attend(backend, 32), case.expected())


def test_a_window_bounds_what_is_gathered():
    backend = TorchAttention()
    kv = backend.allocate(KvSpec(1, 1, 32, torch.float32, CPU), 512, 16)
    batch = make_batch(kv, [list(range(256)), list(range(256, 512))], [1, 16], [4096, 4096])
    backend.prepare(batch, windows=[None, 32])
    for window, most in ((None, 256), (32, 4)):
        plan = batch.scratch["plan", window]
        assert plan.buckets[0].pages.numel() <= 2 * most
        assert plan.prefills[0].pages.numel() <= 2 * most


@torch.inference_mode()
def test_layers_of_different_windows_share_one_step():
    backend = TorchAttention()
    kv = backend.allocate(KvSpec(2, 1, 32, torch.float32, CPU), 8, 16)
    batch = make_batch(kv, [list(range(8))], [100], [100])
    q, k, v = (torch.randn(100, heads, 32) for heads in (2, 1, 1))
    backend.prepare(batch, windows=[None, 10])
    for layer, window in enumerate((None, 10)):
        actual = backend.forward(layer, q, k, v, batch, scale=0.2, window=window, softcap=None)
        assert_near(actual, naive_attention(q, k, v, scale=0.2, window=window).flatten(1))


@torch.inference_mode()
def test_rows_cut_from_a_fused_projection_need_not_be_contiguous():
    backend = TorchAttention()
    kv = backend.allocate(KvSpec(1, 2, 32, torch.float32, CPU), 4, 16)
    batch = make_batch(kv, [[3], [0, 2]], [1, 20], [1, 20])
    q, k, v = torch.randn(21, 8 * 32).unflatten(1, (8, 32)).split((4, 2, 2), 1)
    backend.prepare(batch, windows=[None])
    actual = backend.forward(0, q, k, v, batch, scale=0.2, window=None, softcap=None)
    for rows in (slice(0, 1), slice(1, 21)):
        assert_near(actual[rows], naive_attention(q[rows], k[rows], v[rows], scale=0.2).flatten(1))


@torch.inference_mode()
def test_a_step_in_inference_mode_and_one_outside_share_a_backend():
    case = Sequences(*RAGGED, window=20)
    backend = TorchAttention()
    inside = case.attend(backend, 32)
    with torch.inference_mode(False), torch.no_grad():
        outside = Sequences.attend.__wrapped__(case, backend, 32)
    assert torch.equal(inside, outside)


def test_torch_is_there_by_name_and_for_what_has_no_other_kernels():
    assert select_backend(CPU, torch.float32, "torch").name == "torch"
    assert select_backend(CPU, torch.float16, "auto").name == "torch"
    assert select_backend(CPU, torch.float32, "auto", head_dim=72).name == "torch"
    assert select_backend(CPU, torch.float32, "auto", block_size=8).name == "torch"


@pytest.mark.skipif(native_library() is None, reason="the native kernels are not built")
def test_what_auto_cannot_run_natively_is_said(caplog):
    assert select_backend(CPU, torch.float32, "auto", block_size=8).name == "torch"
    assert re.search("block_size 8 is not a multiple of 16.*; use 16.*Attention runs in PyTorch", caplog.text)
    assert select_backend(CPU, torch.float16, "auto").name == "torch"
    assert "float32 and bfloat16, not float16. Attention runs in PyTorch" in caplog.text


def test_kernels_that_cannot_run_here_are_refused_by_name():
    with pytest.raises(UnsupportedFeature, match="CUDA"):
        select_backend(CPU, torch.bfloat16, "flash")
    with pytest.raises(UnsupportedFeature, match="native"):
        select_backend(CPU, torch.float16, "native")
    with pytest.raises(InvalidArgument, match="'fast'.*auto"):
        select_backend(CPU, torch.bfloat16, "fast")


def test_selecting_on_cpu_does_not_import_flash_attn():
    select_backend(CPU, torch.bfloat16, "auto")
    assert "flash_attn" not in sys.modules
