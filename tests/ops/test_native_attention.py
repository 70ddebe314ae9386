"""The compiled attention kernels against the oracle, and against their PyTorch twin."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from openengine.errors import InvalidArgument, UnsupportedFeature
from openengine.ops.attention import select_backend
from openengine.ops.attention_native import NativeAttention, TiledKvCache
from openengine.ops.attention_torch import TorchAttention
from openengine.ops.kv_cache import KvCache, KvSpec
from openengine.ops.native import LEVELS, native_absence, native_library
from openengine.ops.rope import Rope, RopeConfig
from tests.ops.ragged import Sequences, make_batch
from tests.reference import naive_attention

pytestmark = pytest.mark.skipif(native_library() is None, reason=native_absence() or "")

CPU = torch.device("cpu")
RUNNABLE = native_library().levels if native_library() else ()
EVERY_LEVEL = pytest.mark.parametrize("level", RUNNABLE)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
# Query and context lengths: decodes, fresh prompts, prompts with a cached prefix.
RAGGED = ([1, 1, 1, 1, 5, 40, 33], [1, 77, 300, 16, 5, 40, 150])
LONG = ([1, 1, 1, 300, 200], [1500, 129, 1, 300, 650])


@pytest.fixture
def two_threads():
    """How work is cut depends on how many threads there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def assert_errs_at_most_twice_as_much_as_plain_pytorch(case: Sequences, actual: torch.Tensor) -> None:
    exact, plain = case.expected(torch.float64), case.expected(case.dtype).double()
    tiny = 2e-6 if case.dtype == torch.float32 else 1e-9  # plain PyTorch may happen to be exact
    for error in (lambda x: (x - exact).abs().max(), lambda x: (x - exact).square().mean().sqrt()):
        assert error(actual.double()) <= 2 * error(plain) + tiny


@EVERY_LEVEL
@DTYPES
@pytest.mark.parametrize("lens", [RAGGED, LONG], ids=["ragged", "long"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (50, None), (129, 5.0), (None, 2.0)])
def test_a_ragged_batch_matches_the_oracle(level, dtype, lens, window, softcap):
    case = Sequences(*lens, dtype=dtype, window=window, softcap=softcap)
    assert_errs_at_most_twice_as_much_as_plain_pytorch(case, case.attend(NativeAttention(dtype, level=level), 32))


@EVERY_LEVEL
@DTYPES
@pytest.mark.parametrize("seed", range(12))
def test_random_shapes_match_the_oracle(level, dtype, seed):
    pick = random.Random(seed)
    decodes = [pick.randint(1, 700) for _ in range(pick.randint(0, 9))]
    prefills = [(pick.randint(2, 60), pick.choice((0, 1, 100))) for _ in range(pick.randint(0 if decodes else 1, 3))]
    num_kv_heads = pick.randint(1, 3)
    case = Sequences(
        [1] * len(decodes) + [new for new, _ in prefills],
        decodes + [new + cached for new, cached in prefills],
        num_heads=num_kv_heads * pick.randint(1, 16),
        num_kv_heads=num_kv_heads,
        head_dim=pick.choice((32, 48, 64, 80, 96, 112, 128, 192, 256)),
        dtype=dtype,
        window=pick.choice((None, None, pick.randint(1, 200))),
        softcap=pick.choice((None, None, 5.0)),
        seed=seed,
    )
    actual = case.attend(NativeAttention(dtype, level=level), pick.choice((16, 32, 48, 64, 128)))
    assert_errs_at_most_twice_as_much_as_plain_pytorch(case, actual)


@DTYPES
@pytest.mark.parametrize("head_dim", [16, 32, 64, 96, 128, 160, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 11, 16, 100])
def test_head_sizes_and_groups_match_the_oracle(dtype, head_dim, group):
    sizes = {"num_heads": group, "num_kv_heads": 1, "head_dim": head_dim}
    case = Sequences([1, 1, 21], [70, 200, 40], **sizes, dtype=dtype, window=50)
    assert_errs_at_most_twice_as_much_as_plain_pytorch(case, case.attend(NativeAttention(dtype), 16))


@DTYPES
@pytest.mark.parametrize("block_size", [16, 48, 64, 128])
def test_lengths_at_block_boundaries_match_the_oracle(dtype, block_size):
    ends = [block_size - 1, block_size, block_size + 1, 2 * block_size]
    case = Sequences([1] * 4 + [2] * 2 + [ends[3]], ends + [ends[3], ends[3] + 1, ends[3]], dtype=dtype)
    assert_errs_at_most_twice_as_much_as_plain_pytorch(case, case.attend(NativeAttention(dtype), block_size))


@EVERY_LEVEL
@DTYPES
@pytest.mark.parametrize("fill", [torch.nan, torch.inf])
def test_slots_nobody_wrote_never_matter(level, dtype, fill):
    case = Sequences(*RAGGED, dtype=dtype, window=100)
    dirty, clean = (case.attend(NativeAttention(dtype, level=level), 32, fill=x) for x in (fill, 0.0))
    assert dirty.isfinite().all()
    assert torch.equal(dirty, clean)


@EVERY_LEVEL
@pytest.mark.parametrize("part", range(3), ids=["query", "key", "value"])
@DTYPES
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC10000, -0x10000, 0x7FC00001, -1], ids=hex)
def test_nan_in_a_token_reaches_those_who_see_it_and_no_other_sequence(level, dtype, part, bits):
    backend = NativeAttention(dtype, level=level)
    kv = backend.allocate(KvSpec(1, 1, 32, dtype, CPU), 4, 16)
    batch = make_batch(kv, [[1], [0, 2]], [1, 20], [1, 20])
    parts = [torch.randn(21, 1, 32).to(dtype) for _ in range(3)]
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    if dtype == torch.bfloat16:
        nan = torch.tensor(bits >> 16 | 1, dtype=torch.int16).view(torch.bfloat16)
    parts[part][11] = nan  # the eleventh token of the prompt
    assert parts[part][11].isnan().all()
    backend.prepare(batch, windows=[None])
    with torch.inference_mode():
        out = backend.forward(0, *parts, batch, scale=0.2, window=None, softcap=None)
    hit = out.isnan().any(1)
    assert not hit[0]
    assert hit[11] and (hit.sum() == 1 if part == 0 else hit[11:].all())


@EVERY_LEVEL
@DTYPES
def test_neither_the_batch_nor_the_number_of_threads_changes_a_bit(level, dtype):
    def attend(case: Sequences, num_threads: int) -> torch.Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            return case.attend(NativeAttention(dtype, level=level), 32)
        finally:
            torch.set_num_threads(before)

    together = attend(Sequences(*LONG, dtype=dtype), 2)
    assert torch.equal(together, attend(Sequences(*LONG, dtype=dtype), 1))
    for index, rows in enumerate(together.split(LONG[0])):
        case = Sequences(*([lens[index]] for lens in LONG), seed=index, dtype=dtype)
        assert torch.equal(rows, attend(case, 2))
        assert torch.equal(rows, attend(case, 1))


@EVERY_LEVEL
@DTYPES
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 4), (3, 3), (16, 8)])  # the last has more rows than an item
def test_heads_attended_together_are_heads_attended_alone_to_the_last_bit(
    level, dtype, num_kv_heads, group, monkeypatch, two_threads
):
    sizes = {"num_heads": num_kv_heads * group, "num_kv_heads": num_kv_heads, "head_dim": 32, "dtype": dtype}
    lengths = [1, 16, 17, 255, 256, 257, 300, 32, 600, 90, 5, 130, 20, 1300]  # in their batch the longest are split
    backend = NativeAttention(dtype, level=level)
    plans = []
    make_plan = backend._make_plan
    monkeypatch.setattr(backend, "_make_plan", lambda *args: plans.append(make_plan(*args)) or plans[-1])
    together = Sequences([1] * len(lengths), lengths, window=1000, **sizes).attend(backend, 48)
    assert plans[-1][0].is_joined and plans[-1][0].num_merges
    for index, length in enumerate(lengths):
        (alone,) = Sequences([1], [length], seed=index, window=1000, **sizes).attend(backend, 48)
        assert torch.equal(together[index], alone)


@EVERY_LEVEL
@DTYPES
@torch.inference_mode()
def test_a_prompt_in_chunks_is_the_prompt_at_once_to_the_last_bit(level, dtype):
    backend = NativeAttention(dtype, level=level)
    kv = backend.allocate(KvSpec(1, 1, 64, dtype, CPU), 10, 32)
    q, k, v = (torch.randn(300, heads, 64).to(dtype) for heads in (3, 1, 1))

    def attend(start: int, end: int) -> torch.Tensor:
        batch = make_batch(kv, [list(range(10))], [end - start], [end])
        backend.prepare(batch, windows=[70])
        return backend.forward(0, q[start:end], k[start:end], v[start:end], batch, scale=0.2, window=70, softcap=None)

    whole = attend(0, 300)
    assert torch.equal(torch.cat([attend(0, 17), attend(17, 150), attend(150, 300)]), whole)


@EVERY_LEVEL
@DTYPES
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (70, None), (300, 5.0)])
def test_a_query_alone_gives_what_it_gives_among_others_to_the_last_bit(level, dtype, window, softcap):
    # Decoding, jumping over forced tokens and computing again after a preemption must agree.
    length, num_last = 1100, 40
    options = {"dtype": dtype, "window": window, "softcap": softcap}
    together = Sequences([num_last], [length], **options).attend(NativeAttention(dtype, level=level), 32)
    prefix = Sequences([1], [length], **options)
    q, k, v = prefix.tensors()[0]
    alone = [
        _Part([1], [end], parts=(q[:end], k[:end], v[:end]), **options).attend(NativeAttention(dtype, level=level), 32)
        for end in range(length - num_last + 1, length + 1)
    ]
    assert torch.equal(torch.cat(alone), together)


@dataclass(frozen=True)
class _Part(Sequences):
    """One sequence of given q, k and v."""

    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def tensors(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        return [self.parts]


@EVERY_LEVEL
@DTYPES
@torch.inference_mode()
def test_one_query_over_a_very_long_context_matches_the_oracle(level, dtype):
    torch.manual_seed(7)
    length, spec = 100_003, KvSpec(1, 1, 32, dtype, CPU)
    backend = NativeAttention(dtype, level=level)
    kv = backend.allocate(spec, -(-length // 64), 64)
    q, k, v = (torch.randn(n, heads, 32).to(dtype) for n, heads in ((1, 2), (length, 1), (length, 1)))
    blocks = torch.zeros(1, 2, kv.num_blocks * 64, 1, 32, dtype=dtype)
    blocks[0, 0, :length], blocks[0, 1, :length] = k, v
    kv.import_blocks(range(kv.num_blocks), blocks.view(1, 2, kv.num_blocks, 64, 1, 32))
    batch = make_batch(kv, [list(range(kv.num_blocks))], [1], [length])
    backend.prepare(batch, windows=[None])
    out = backend.forward(0, q, k[-1:], v[-1:], batch, scale=1.0, window=None, softcap=None)
    exact = naive_attention(q, k, v, scale=1.0, dtype=torch.float64).flatten(1)
    plain = naive_attention(q, k, v, scale=1.0, dtype=dtype).flatten(1)
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-6


@EVERY_LEVEL
@DTYPES
@pytest.mark.parametrize("rotary_dim", [64, 32, 24])
@torch.inference_mode()
def test_rotation_write_and_attention_match_the_twin(level, dtype, rotary_dim):
    angles = Rope(RopeConfig("default", 10_000.0, rotary_dim, 512, 512), 512, device=CPU).angles
    fused = torch.randn(46, 15, 64).to(dtype)
    outputs = []
    for backend in (NativeAttention(dtype, level=level), TorchAttention()):
        kv = backend.allocate(KvSpec(2, 3, 64, dtype, CPU), 4, 32)
        for step, (first, rows) in enumerate(((0, slice(0, 40)), (40, slice(40, 46)))):
            batch = make_batch(kv, [[2, 3]], [rows.stop - first], [rows.stop])
            backend.prepare(batch, windows=[None])
            q, k, v = fused[rows].clone().split((9, 3, 3), 1)
            options = {"scale": 0.125, "window": None, "softcap": None, "angles": angles(batch.positions)}
            outputs.append((step, backend.forward(1, q, k, v, batch, **options)))
        outputs.append((2, kv.export_blocks([2])[1]))
    # One rounding apart: the twin rounds the rotated query and key, then the scores.
    tolerance = 2e-5 if dtype == torch.float32 else 0.03
    for (_, native), (_, twin) in zip(outputs[:3], outputs[3:]):
        torch.testing.assert_close(native, twin, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("contiguous", [False, True])
@torch.inference_mode()
def test_rows_cut_from_a_fused_projection_need_not_be_contiguous(contiguous):
    backend = NativeAttention(torch.float32)
    kv = backend.allocate(KvSpec(1, 2, 32, torch.float32, CPU), 4, 16)
    batch = make_batch(kv, [[3], [0, 2]], [1, 20], [1, 20])
    q, k, v = torch.randn(21, 8 * 32).unflatten(1, (8, 32)).split((4, 2, 2), 1)
    if not contiguous:
        k = k.transpose(0, 1).contiguous().transpose(0, 1)  # heads apart
    backend.prepare(batch, windows=[None])
    actual = backend.forward(0, q, k, v, batch, scale=0.2, window=None, softcap=None)
    for rows in (slice(0, 1), slice(1, 21)):
        expected = naive_attention(q[rows], k[rows], v[rows], scale=0.2).flatten(1)
        torch.testing.assert_close(actual[rows], expected, atol=2e-5, rtol=2e-5)


@torch.inference_mode()
def test_layers_of_different_windows_share_one_step():
    backend = NativeAttention(torch.float32)
    kv = backend.allocate(KvSpec(2, 1, 32, torch.float32, CPU), 8, 16)
    batch = make_batch(kv, [list(range(8))], [100], [100])
    q, k, v = (torch.randn(100, heads, 32) for heads in (2, 1, 1))
    backend.prepare(batch, windows=[None, 10])
    for layer, window in enumerate((None, 10)):
        actual = backend.forward(layer, q, k, v, batch, scale=0.2, window=window, softcap=None)
        expected = naive_attention(q, k, v, scale=0.2, window=window).flatten(1)
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


@EVERY_LEVEL
@torch.inference_mode()
def test_only_wanted_tokens_are_attended_where_few_are(level, two_threads):
    backend = NativeAttention(torch.float32, level=level)
    kv = backend.allocate(KvSpec(1, 2, 32, torch.float32, CPU), 12, 32)
    tables, heads = [[0], [1], list(range(2, 12))], 4

    def num_items(wanted: list[int]) -> int:
        batch = make_batch(kv, tables, [1, 1, 300], [20, 30, 300])
        batch.logits_rows = torch.tensor(wanted, dtype=torch.int64)
        backend.prepare(batch, windows=[None])
        backend.described(batch, [(None, True)], heads)
        ((plan, _lists),) = batch.scratch["native"].plans.values()
        return plan.num_items

    each = kv.spec.num_kv_heads  # items of one decode, and of each span of the prompt's queries
    assert num_items([]) == 0
    assert num_items([1]) == num_items([301]) == num_items([290, 301]) == each
    assert num_items([0, 1, 301]) == 3 * each
    assert num_items(list(range(302))) > num_items([0, 1, 2, 301]) == 4 * each


# ---- the cache -----------------------------------------------------------------------------------


@DTYPES
def test_blocks_survive_the_way_between_unlike_caches(dtype):
    spec = KvSpec(3, 2, 48, dtype, CPU)
    plain, tiled = KvCache(spec, 6, 32), TiledKvCache(spec, 6, 32)
    blocks = torch.randn(3, 2, 6, 32, 2, 48).to(dtype)
    plain.import_blocks(range(6), blocks)
    tiled.import_blocks([5, 4, 3], plain.export_blocks([0, 1, 2]))
    assert torch.equal(tiled.export_blocks([3, 5]), blocks[:, :, [2, 0]])
    assert tiled.export_blocks([3]).is_contiguous()
    tiled.copy_blocks([(5, 0)])
    assert torch.equal(tiled.export_blocks([0, 4]), blocks[:, :, [0, 1]])


@DTYPES
@torch.inference_mode()
def test_what_was_written_leaves_in_the_exported_layout(dtype):
    backend = NativeAttention(dtype)
    kv = backend.allocate(KvSpec(1, 2, 32, dtype, CPU), 3, 16)
    batch = make_batch(kv, [[2, 0]], [30], [30])
    q, k, v = (torch.randn(30, heads, 32).to(dtype) for heads in (4, 2, 2))
    backend.prepare(batch, windows=[None])
    backend.forward(0, q, k, v, batch, scale=0.2, window=None, softcap=None)
    exported = kv.export_blocks([2, 0])[0].flatten(1, 2)  # [2, 32, heads, head_dim]
    assert torch.equal(exported[0, :30], k)
    assert torch.equal(exported[1, :30], v)


def test_blocks_of_another_shape_are_refused():
    kv = TiledKvCache(KvSpec(1, 1, 32, torch.float32, CPU), 2, 16)
    with pytest.raises(InvalidArgument, match="same model, dtype and block_size"):
        kv.import_blocks([0], torch.zeros(1, 2, 1, 32, 1, 32))


# ---- selection -----------------------------------------------------------------------------------


def test_auto_is_native_on_cpu():
    assert select_backend(CPU, torch.bfloat16, "auto", head_dim=64, block_size=32).name == f"native {RUNNABLE[-1]}"
    assert select_backend(CPU, torch.float32, "native").name.startswith("native")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float16}, "float16"),
        ({"head_dim": 72}, "head_dim 72.*multiple of 16"),
        ({"head_dim": 272}, "head_dim 272.*256"),
        ({"block_size": 8}, "block_size 8.*multiple of 16"),
        ({"device": torch.device("cuda")}, "CPU.*cuda"),
    ],
)
def test_what_has_no_kernels_is_refused_by_name_and_left_to_torch_by_auto(options, message):
    options = {"device": CPU, "dtype": torch.float32} | options
    with pytest.raises(UnsupportedFeature, match=f"{message}.*torch"):
        select_backend(options.pop("device"), options.pop("dtype"), "native", **options)


def test_a_cache_of_a_size_without_kernels_is_refused():
    with pytest.raises(UnsupportedFeature, match="head_dim 40"):
        NativeAttention(torch.float32).allocate(KvSpec(1, 1, 40, torch.float32, CPU), 4, 16)


def test_a_level_that_cannot_run_here_is_refused():
    with pytest.raises(UnsupportedFeature, match="'sse9' cannot run here"):
        NativeAttention(torch.float32, level="sse9")
    assert set(RUNNABLE) <= set(LEVELS)
