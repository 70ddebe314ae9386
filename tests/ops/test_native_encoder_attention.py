"""The compiled attention of encoders against the oracle, on every instruction set that this CPU has."""

from __future__ import annotations

import random

import pytest
import torch

from openengine.errors import UnsupportedFeature
from openengine.ops.encoder_attention import select_encoder_attention
from openengine.ops.encoder_attention_native import NativeEncoderAttention
from openengine.ops.native import native_absence, native_library
from tests.ops.encoders import Items, assert_errs_at_most_twice_as_much_as_plain_pytorch, make_encoder_batch

pytestmark = pytest.mark.skipif(native_library() is None, reason=native_absence() or "")

CPU = torch.device("cpu")
RUNNABLE = native_library().levels if native_library() else ()
EVERY_LEVEL = pytest.mark.parametrize("level", RUNNABLE)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
RAGGED = [1, 40, 300, 16, 1, 7, 33, 129]


@EVERY_LEVEL
@DTYPES
@pytest.mark.parametrize("seed", range(24))
def test_random_items_match_the_oracle(level, dtype, seed):
    pick = random.Random(seed)
    head_dim = pick.choice((32, 64, 64, 128, 8, 24, 40, 72, 80, 96, 200, 256))
    items = Items(
        [pick.choice((1, pick.randint(1, 20), pick.randint(1, 300))) for _ in range(pick.randint(1, 6))],
        num_heads=pick.randint(1, 5),
        head_dim=head_dim,
        dtype=dtype,
        window=pick.choice((None, None, 0, pick.randint(1, 40), pick.randint(1, 400))),
        biased=pick.random() < 0.4,
        rotary_dim=pick.choice((None, head_dim, head_dim // 2)),
        seed=seed,
    )
    assert_errs_at_most_twice_as_much_as_plain_pytorch(items, items.attend(NativeEncoderAttention(dtype, level=level)))


@EVERY_LEVEL
@DTYPES
@pytest.mark.parametrize("window", [None, 0, 1, 64, 256, 2000])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_items_longer_than_a_chunk_match_the_oracle(level, dtype, window, biased):
    items = Items([257, 700, 512], num_heads=2, dtype=dtype, window=window, biased=biased)
    assert_errs_at_most_twice_as_much_as_plain_pytorch(items, items.attend(NativeEncoderAttention(dtype, level=level)))


@EVERY_LEVEL
@DTYPES
def test_every_length_of_a_few_tiles_matches_the_oracle(level, dtype):
    items = Items(list(range(1, 68)), num_heads=1, dtype=dtype)
    assert_errs_at_most_twice_as_much_as_plain_pytorch(items, items.attend(NativeEncoderAttention(dtype, level=level)))


@DTYPES
@pytest.mark.parametrize("head_dim", [1, 5, 16, 48, 100, 112, 160, 192])
def test_heads_of_any_size_match_the_oracle(dtype, head_dim):
    items = Items([70, 3], head_dim=head_dim, dtype=dtype, rotary_dim=head_dim // 2 * 2 or None)
    assert_errs_at_most_twice_as_much_as_plain_pytorch(items, items.attend(NativeEncoderAttention(dtype)))


@EVERY_LEVEL
@DTYPES
@pytest.mark.parametrize("options", [{}, {"window": 40, "rotary_dim": 32}, {"biased": True}], ids=str)
def test_neither_the_batch_nor_the_number_of_threads_changes_a_bit(level, dtype, options):
    def attend(items: Items, num_threads: int) -> torch.Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            return items.attend(NativeEncoderAttention(dtype, level=level))
        finally:
            torch.set_num_threads(before)

    together = attend(Items(RAGGED, dtype=dtype, **options), 2)
    assert torch.equal(together, attend(Items(RAGGED, dtype=dtype, **options), 1))
    for index, rows in enumerate(together.split(RAGGED)):
        if options.get("biased"):
            break  # an item alone has the bias of another model
        item = Items(RAGGED[index : index + 1], dtype=dtype, seed=index, **options)
        assert torch.equal(rows, attend(item, 1))
        assert torch.equal(rows, attend(item, 7))  # so many that it is cut into smaller blocks


@EVERY_LEVEL
@DTYPES
@pytest.mark.parametrize("part", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("fill", [torch.nan, torch.inf])
def test_nan_and_infinity_stay_in_their_item(level, dtype, part, fill):
    attention, batch = NativeEncoderAttention(dtype, level=level), make_encoder_batch([5, 20, 9])
    rows = Items(batch.lens, dtype=dtype).rows()
    rows[11, part] = fill
    attention.prepare(batch, [None])
    with torch.inference_mode():
        out = attention.forward(*rows.unbind(1), batch, scale=0.2)
    hit = out.isfinite().logical_not().any(1)
    assert hit[11]
    assert not hit[:5].any() and not hit[25:].any()
    assert hit[5:25].all() or (part == 0 and hit.sum() == 1)


@DTYPES
@torch.inference_mode()
def test_scores_far_apart_neither_overflow_nor_vanish(dtype):
    q, k, v = (torch.randn(50, 1, 32).to(dtype) for _ in range(3))
    attention, batch = NativeEncoderAttention(dtype), make_encoder_batch([50])
    attention.prepare(batch, [None])
    for scale in (1e4, 1e-30):
        out = attention.forward(q, k, v, batch, scale=scale)
        scores = (q[:, 0].double() @ k[:, 0].double().T) * scale
        torch.testing.assert_close(out.double(), scores.softmax(-1) @ v[:, 0].double(), atol=0.02, rtol=0.02)


@torch.inference_mode()
def test_layers_of_unlike_windows_and_bias_share_one_step():
    attention, batch = NativeEncoderAttention(torch.float32), make_encoder_batch([9, 30])
    attention.prepare(batch, [None, 4])
    for options in ({"window": 4}, {"biased": True}, {}, {"window": 4, "biased": True}):
        items = Items(batch.lens, **options)
        actual = attention.forward(
            *items.rows().unbind(1), batch, scale=items.scale, window=items.window, distance_bias=items.distance_bias()
        )
        assert_errs_at_most_twice_as_much_as_plain_pytorch(items, actual)


@torch.inference_mode()
def test_heads_need_not_lie_side_by_side():
    attention, batch = NativeEncoderAttention(torch.float32), make_encoder_batch([9, 30])
    attention.prepare(batch, [None])
    q, k, v = Items(batch.lens).rows().unbind(1)
    apart = k.transpose(0, 1).contiguous().transpose(0, 1)
    together, apart = (attention.forward(q, x, v, batch, scale=0.2) for x in (k, apart))
    assert torch.equal(together, apart)


# ---- selection -----------------------------------------------------------------------------------


def test_auto_is_native_on_cpu():
    assert select_encoder_attention(CPU, torch.bfloat16, "auto", head_dim=32).name == f"native {RUNNABLE[-1]}"
    assert select_encoder_attention(CPU, torch.float32, "native").name.startswith("native")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float16}, "float16"),
        ({"head_dim": 264}, "head_dim 264.*256"),
        ({"device": torch.device("cuda")}, "CPU.*cuda"),
    ],
)
def test_what_has_no_kernels_is_refused_by_name_and_left_to_torch_by_auto(options, message):
    options = {"device": CPU, "dtype": torch.float32} | options
    arguments = options.pop("device"), options.pop("dtype")
    with pytest.raises(UnsupportedFeature, match=f"{message}.*torch"):
        select_encoder_attention(*arguments, "native", **options)
    assert select_encoder_attention(*arguments, "auto", **options).name == "torch"
