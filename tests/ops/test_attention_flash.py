"""The flash backend on CPU, with a stand-in for the package: its documented signatures, computed by the oracle."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import Tensor

from openengine.errors import InvalidArgument, UnsupportedFeature
from openengine.ops.attention import select_backend
from openengine.ops.attention_flash import FlashAttention
from openengine.ops.attention_torch import TorchAttention
from openengine.ops.kv_cache import KvSpec
from tests.ops.ragged import Sequences
from tests.reference import naive_attention

MIXED = ([1, 1, 1, 5, 40, 33], [1, 77, 300, 5, 40, 550])
DECODES = ([1, 1, 1], [255, 256, 257])


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    assert dropout_p == 0.0 and alibi_slopes is None and not return_attn_probs
    for bounds in (cu_seqlens_q, cu_seqlens_k):
        assert bounds.dtype == torch.int32 and bounds.shape == (block_table.shape[0] + 1,)
    query_lens, context_lens = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max_seqlen_q, max_seqlen_k) == (max(query_lens), max(context_lens))
    return paged_oracle(q, k, v, query_lens, context_lens, block_table, softmax_scale, causal, window_size, softcap)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    assert all(x is None for x in (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes))
    assert cache_seqlens.dtype == torch.int32 and not return_softmax_lse
    batch, query_len = q.shape[:2]
    lens = ([query_len] * batch, cache_seqlens.tolist())
    out = paged_oracle(
        q.flatten(0, 1), k_cache, v_cache, *lens, block_table, softmax_scale, causal, window_size, softcap
    )
    return out.unflatten(0, (batch, query_len))


def paged_oracle(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_lens: list[int],
    context_lens: list[int],
    block_table: Tensor,
    scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """What the package documents: pages of a multiple of 256 tokens, a bottom-right causal mask, inclusive windows."""
    assert q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k_cache.dtype == v_cache.dtype
    assert k_cache.ndim == 4 and k_cache.shape[1] % 256 == 0 and k_cache.shape == v_cache.shape
    assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert causal and isinstance(softcap, float)
    left, right = window_size
    assert right in (-1, 0)
    options = {"scale": scale, "window": None if left == -1 else left + 1, "softcap": softcap or None}
    outputs = []
    for rows, length, blocks in zip(q.split(query_lens), context_lens, block_table.tolist()):
        blocks = blocks[: -(-length // k_cache.shape[1])]
        keys, values = (cache[blocks].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        outputs.append(naive_attention(rows, keys, values, **options))
    return torch.cat(outputs).to(q.dtype)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return module


@pytest.mark.parametrize("lens", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (64, None), (None, 5.0)])
@pytest.mark.parametrize("block_size", [256, 512])
@pytest.mark.usefixtures("package")
def test_flash_agrees_with_the_torch_backend(lens, window, softcap, block_size):
    case = Sequences(*lens, dtype=torch.float16, window=window, softcap=softcap)
    actual = case.attend(FlashAttention(torch.float16), block_size)
    torch.testing.assert_close(actual, case.attend(TorchAttention(), 32), atol=2e-3, rtol=2e-3)


@pytest.mark.usefixtures("package")
def test_bfloat16_matches_the_oracle():
    case = Sequences(*MIXED, dtype=torch.bfloat16)
    actual = case.attend(FlashAttention(torch.bfloat16), 256)
    assert torch.equal(actual, case.expected().bfloat16())


@pytest.mark.usefixtures("package")
def test_blocks_travel_between_flash_and_torch():
    spec = KvSpec(2, 2, 32, torch.float16, torch.device("cpu"))
    source, target = FlashAttention(torch.float16).allocate(spec, 3, 256), TorchAttention().allocate(spec, 3, 256)
    for layer in range(2):
        source.key(layer).normal_()
        source.value(layer).normal_()
    target.import_blocks([2, 0], source.export_blocks([0, 1]))
    assert torch.equal(target.export_blocks([2, 0]), source.export_blocks([0, 1]))


def test_an_absent_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(UnsupportedFeature, match=r"flash-attn.*openengine-inference\[flash\]"):
        FlashAttention(torch.bfloat16)


def test_a_package_too_old_for_paging_or_softcap_is_refused(package):
    package.flash_attn_varlen_func = lambda q, k, v, cu_seqlens_q, cu_seqlens_k, block_table=None: None
    with pytest.raises(UnsupportedFeature, match="softcap.*2.6"):
        FlashAttention(torch.bfloat16)


@pytest.mark.usefixtures("package")
def test_float32_is_refused_with_the_fix():
    with pytest.raises(UnsupportedFeature, match="float32.*kernels='torch'"):
        FlashAttention(torch.float32)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("head_dim", "block_size", "error"),
    [(64, 32, InvalidArgument), (60, 256, UnsupportedFeature), (320, 256, UnsupportedFeature)],
)
def test_sizes_without_kernels_are_refused(head_dim, block_size, error):
    spec = KvSpec(1, 1, head_dim, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(error, match="flash-attn needs"):
        FlashAttention(torch.bfloat16).allocate(spec, 1, block_size)


@pytest.mark.usefixtures("package")
def test_an_installed_package_is_not_chosen_on_cpu():
    assert select_backend(torch.device("cpu"), torch.bfloat16, "auto").name != "flash"
    with pytest.raises(UnsupportedFeature, match="CUDA"):
        select_backend(torch.device("cpu"), torch.bfloat16, "flash")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("capability", "dtype", "chosen"),
    [((9, 0), torch.bfloat16, "flash"), ((7, 5), torch.float16, "torch"), ((9, 0), torch.float32, "torch")],
)
def test_auto_is_flash_where_it_can_run(monkeypatch, capability, dtype, chosen):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert select_backend(torch.device("cuda"), dtype, "auto").name == chosen
