"""Attention of encoders in PyTorch, against the oracle, and the choice of kernels."""

from __future__ import annotations

import random

import pytest
import torch

from openengine.errors import InvalidArgument
from openengine.ops.encoder_attention import TorchEncoderAttention, select_encoder_attention
from tests.ops.encoders import Items, assert_errs_at_most_twice_as_much_as_plain_pytorch

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@DTYPES
@pytest.mark.parametrize("seed", range(16))
def test_random_items_match_the_oracle(dtype, seed):
    pick = random.Random(seed)
    head_dim = pick.choice((8, 32, 64, 80))
    items = Items(
        [pick.choice((1, pick.randint(1, 90))) for _ in range(pick.randint(1, 6))],
        num_heads=pick.randint(1, 4),
        head_dim=head_dim,
        dtype=dtype,
        window=pick.choice((None, 0, pick.randint(1, 40))),
        biased=pick.random() < 0.4,
        rotary_dim=pick.choice((None, head_dim, head_dim // 2)),
        seed=seed,
    )
    assert_errs_at_most_twice_as_much_as_plain_pytorch(items, items.attend(TorchEncoderAttention()))


def test_unknown_kernels_are_refused_by_name():
    with pytest.raises(InvalidArgument, match="'fast' is unknown.*torch"):
        select_encoder_attention(CPU, torch.float32, "fast")
