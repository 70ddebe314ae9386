"""Ragged batches for the tests of encoder attention: random items, run through an attention and through the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openengine.ops.batch import EncoderBatch
from openengine.ops.encoder_attention import EncoderAttention
from openengine.ops.rope import Rope, RopeConfig

__all__ = ["Items", "assert_errs_at_most_twice_as_much_as_plain_pytorch", "make_encoder_batch"]

CPU = torch.device("cpu")


def make_encoder_batch(lens: list[int]) -> EncoderBatch:
    """The batch of items of these lengths."""
    return EncoderBatch(
        input_ids=torch.zeros(sum(lens), dtype=torch.int64),
        positions=torch.cat([torch.arange(n) for n in lens]),
        token_types=None,
        cu_seqlens=torch.tensor([0, *lens]).cumsum(0).to(torch.int32),
        lens=lens,
    )


@dataclass(frozen=True)
class Items:
    """Random queries, keys and values of whole items; item i depends on `seed + i` alone."""

    lens: list[int]
    num_heads: int = 3
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    window: int | None = None
    biased: bool = False
    rotary_dim: int | None = None
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 * 0.9  # not a power of two

    def rows(self) -> Tensor:
        """What a projection gives: `[T, 3, heads, head_dim]`, with scores of several units."""
        return torch.cat([self._item(self.seed + index, length) for index, length in enumerate(self.lens)])

    def _item(self, seed: int, length: int) -> Tensor:
        rows = torch.randn(length, 3, self.num_heads, self.head_dim, generator=torch.Generator().manual_seed(seed))
        return (rows * torch.tensor([2.0, 1.0, 1.0])[:, None, None]).to(self.dtype)

    def distance_bias(self) -> Tensor | None:
        """`[heads, 2 * max_len - 1]` for a model that takes more than the longest item, or None."""
        size = 2 * (max(self.lens) + 3) - 1
        return torch.randn(self.num_heads, size, generator=torch.Generator().manual_seed(1)) if self.biased else None

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.rotary_dim is None:
            return None
        return Rope(RopeConfig("default", 10_000.0, self.rotary_dim, 512, 512), 512, device=CPU).angles(positions)

    @torch.inference_mode()
    def attend(self, attention: EncoderAttention) -> Tensor:
        """What `attention` gives, `[T, heads * head_dim]`."""
        batch = make_encoder_batch(self.lens)
        attention.prepare(batch, [self.window])
        options = {"scale": self.scale, "window": self.window, "distance_bias": self.distance_bias()}
        out = attention.forward(*self.rows().unbind(1), batch, **options, angles=self.angles(batch.positions))
        assert out.shape == (sum(self.lens), self.num_heads * self.head_dim)
        assert out.dtype == self.dtype
        return out

    def expected(self, dtype: torch.dtype) -> Tensor:
        """Every step written out, in `dtype`."""
        items = self.rows().to(dtype).split(self.lens)
        return torch.cat([self._expected(*item.unbind(1)) for item in items]).flatten(1)

    def _expected(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(len(q))
        if self.rotary_dim is not None:
            q, k = (self._rotated(x, positions) for x in (q, k))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
        distances = positions - positions[:, None]
        if self.biased:
            bias = self.distance_bias()
            scores = scores + bias[:, distances + bias.shape[1] // 2].to(q.dtype)
        if self.window is not None:
            scores = scores.masked_fill(distances.abs() > self.window, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = (angle.to(torch.float64) for angle in self.angles(positions))
        half = self.rotary_dim // 2
        first, second = x[..., :half].double(), x[..., half : 2 * half].double()
        turned = first * cos[..., :half] + second * sin[..., :half], second * cos[..., half:] + first * sin[..., half:]
        return torch.cat([*turned, x[..., 2 * half :].double()], dim=-1).to(x.dtype)


def assert_errs_at_most_twice_as_much_as_plain_pytorch(items: Items, actual: Tensor) -> None:
    exact, plain = items.expected(torch.float64), items.expected(items.dtype).double()
    tiny = 2e-6 if items.dtype == torch.float32 else 1e-9  # plain PyTorch may happen to be exact
    for error in (lambda x: (x - exact).abs().max(), lambda x: (x - exact).square().mean().sqrt()):
        assert error(actual.double()) <= 2 * error(plain) + tiny
