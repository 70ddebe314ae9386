"""Normalization over the last dimension, computed in float32 whatever the dtype of the activations.

Weights stay float32: they are small, and the product is then rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["HeadNorm", "LayerNorm", "RmsNorm"]


class RmsNorm:
    """Root-mean-square norm; `offset` is added to the stored weight at load (Gemma stores `w - 1`)."""

    __slots__ = ("eps", "name", "offset", "weight")

    def __init__(self, name: str, width: int, eps: float, *, offset: float = 0.0, device: torch.device) -> None:
        self.name = name
        self.eps = eps
        self.offset = offset
        self.weight = torch.empty(width, dtype=torch.float32, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] -> a fresh tensor of the same shape and dtype."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)

    def add(self, residual: Tensor, delta: Tensor | None) -> Tensor:
        """Add `delta` to `residual` in place and return the norm of the sum."""
        if delta is not None:
            residual += delta
        return self(residual)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The stored tensor as `(name, tensor)`."""
        yield f"{self.name}.weight", self.weight

    def finish(self) -> None:
        """Apply the offset, once, after the stored values are in."""
        if self.offset:
            self.weight += self.offset


class LayerNorm:
    """Mean and variance norm with weight and bias."""

    __slots__ = ("bias", "eps", "name", "weight")

    def __init__(self, name: str, width: int, eps: float, *, device: torch.device) -> None:
        self.name = name
        self.eps = eps
        self.weight = torch.empty(width, dtype=torch.float32, device=device)
        self.bias = torch.empty(width, dtype=torch.float32, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] -> a fresh tensor of the same shape and dtype."""
        return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)

    def add(self, residual: Tensor, delta: Tensor | None) -> Tensor:
        """Add `delta` to `residual` in place and return the norm of the sum."""
        if delta is not None:
            residual += delta
        return self(residual)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors as `(name, tensor)`."""
        yield f"{self.name}.weight", self.weight
        yield f"{self.name}.bias", self.bias

    def finish(self) -> None:
        """Nothing to derive from the stored values."""


class HeadNorm:
    """Root-mean-square norm of every query and key head, both in one call.

    `parts` maps the name of each stored weight [H] to its number of heads: `{q_norm: Nq, k_norm: Nkv}`.
    """

    __slots__ = ("eps", "offset", "parts", "stored", "weight")

    def __init__(
        self, parts: dict[str, int], head_dim: int, eps: float, *, offset: float = 0.0, device: torch.device
    ) -> None:
        self.parts = parts
        self.eps = eps
        self.offset = offset
        self.stored = torch.empty(len(parts), head_dim, dtype=torch.float32, device=device)
        self.weight: Tensor | None = None  # [heads, H], made by finish

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, heads, H] -> a fresh tensor of the same shape and dtype."""
        return (F.rms_norm(x.float(), x.shape[-1:], None, self.eps) * self.weight).to(x.dtype)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors as `(name, view)`."""
        for name, row in zip(self.parts, self.stored):
            yield f"{name}.weight", row

    def finish(self) -> None:
        """Apply the offset and repeat each weight over its heads, once, after the stored values are in."""
        heads = torch.tensor(list(self.parts.values()), device=self.stored.device)
        self.weight = (self.stored + self.offset).repeat_interleave(heads, dim=0)
