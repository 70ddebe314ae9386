"""Normalization over the last dimension, computed in float32 whatever the dtype of the activations.

Weights stay float32: they are small, and the product is then rounded once. With a native library, one kernel
(`csrc/norm.cpp`) adds the residual and normalizes; what it does not serve runs in PyTorch, which is its twin.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from openengine.ops.native import FLOAT_KINDS, NativeLibrary

__all__ = ["HeadNorm", "LayerNorm", "RmsNorm"]


class RmsNorm:
    """Root-mean-square norm; `offset` is added to the stored weight at load (Gemma stores `w - 1`)."""

    __slots__ = ("_native", "eps", "name", "offset", "weight")

    def __init__(
        self,
        name: str,
        width: int,
        eps: float,
        *,
        offset: float = 0.0,
        device: torch.device,
        native: NativeLibrary | None = None,
    ) -> None:
        self.name = name
        self.eps = eps
        self.offset = offset
        self.weight = torch.empty(width, dtype=torch.float32, device=device)
        self._native = native and _bind(native)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] -> a fresh tensor of the same shape and dtype."""
        return self.add(x, None)

    def add(self, residual: Tensor, delta: Tensor | None) -> Tensor:
        """Add `delta` to `residual` in place and return the norm of the sum."""
        if self._native and _is_served(residual, delta):
            return _norm(self._native, residual, delta, self.weight, None, self.eps)
        if delta is not None:
            residual += delta
        return F.rms_norm(residual.float(), self.weight.shape, self.weight, self.eps).to(residual.dtype)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The stored tensor as `(name, tensor)`."""
        yield f"{self.name}.weight", self.weight

    def finish(self) -> None:
        """Apply the offset, once, after the stored values are in."""
        if self.offset:
            self.weight += self.offset


class LayerNorm:
    """Mean and variance norm with weight and bias; the bias stays zero if none is stored (`bias=False`)."""

    __slots__ = ("_native", "bias", "eps", "has_bias", "name", "weight")

    def __init__(
        self,
        name: str,
        width: int,
        eps: float,
        *,
        bias: bool = True,
        device: torch.device,
        native: NativeLibrary | None = None,
    ) -> None:
        self.name = name
        self.eps = eps
        self.has_bias = bias
        self.weight = torch.empty(width, dtype=torch.float32, device=device)
        self.bias = torch.zeros(width, dtype=torch.float32, device=device)
        self._native = native and _bind(native)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + self.bias.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] -> a fresh tensor of the same shape and dtype."""
        return self.add(x, None)

    def add(self, residual: Tensor, delta: Tensor | None) -> Tensor:
        """Add `delta` to `residual` in place and return the norm of the sum."""
        if self._native and _is_served(residual, delta):
            return _norm(self._native, residual, delta, self.weight, self.bias, self.eps)
        if delta is not None:
            residual += delta
        normed = F.layer_norm(residual.float(), self.weight.shape, self.weight, self.bias, self.eps)
        return normed.to(residual.dtype)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors as `(name, tensor)`."""
        yield f"{self.name}.weight", self.weight
        if self.has_bias:
            yield f"{self.name}.bias", self.bias

    def finish(self) -> None:
        """Nothing to derive from the stored values."""


class HeadNorm:
    """Root-mean-square norm of every query and key head, both in one call.

    `parts` maps the name of each stored weight [H] to its number of heads: `{q_norm: Nq, k_norm: Nkv}`.
    """

    __slots__ = ("_native", "eps", "offset", "parts", "stored", "weight")

    def __init__(
        self,
        parts: dict[str, int],
        head_dim: int,
        eps: float,
        *,
        offset: float = 0.0,
        device: torch.device,
        native: NativeLibrary | None = None,
    ) -> None:
        self.parts = parts
        self.eps = eps
        self.offset = offset
        self.stored = torch.empty(len(parts), head_dim, dtype=torch.float32, device=device)
        self.weight: Tensor | None = None  # [heads, H], made by finish
        self._native = native and _bind(native)

    @property
    def num_bytes(self) -> int:
        return self.stored.nbytes + (0 if self.weight is None else self.weight.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, heads, H] -> a fresh tensor of the same shape and dtype."""
        if self._native and x.dtype in FLOAT_KINDS and x.stride(2) == 1 and x.stride(1) == x.shape[2]:
            return _norm(self._native, x, None, self.weight, None, self.eps)
        return (F.rms_norm(x.float(), x.shape[-1:], None, self.eps) * self.weight).to(x.dtype)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors as `(name, view)`."""
        for name, row in zip(self.parts, self.stored):
            yield f"{name}.weight", row

    def finish(self) -> None:
        """Apply the offset and repeat each weight over its heads, once, after the stored values are in."""
        heads = torch.tensor(list(self.parts.values()), device=self.stored.device)
        self.weight = (self.stored + self.offset).repeat_interleave(heads, dim=0)


@cache
def _bind(library: NativeLibrary) -> Callable[..., None]:
    pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    rows = (pointer, i64)
    return library.function("norm", *rows, *rows, pointer, pointer, pointer, i64, i64, i64, ctypes.c_float, i32, i32)


def _is_served(residual: Tensor, delta: Tensor | None) -> bool:
    if residual.dtype not in FLOAT_KINDS or residual.dim() != 2 or residual.stride(1) != 1:
        return False
    return delta is None or (delta.dtype == residual.dtype and delta.shape == residual.shape and delta.stride(1) == 1)


def _norm(
    function: Callable[..., None], x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """The norm of x [T, D] or [T, heads, D], to which `delta` [T, D] is added first; LayerNorm if there is a bias."""
    y = torch.empty(x.shape, dtype=x.dtype)
    item_bytes = x.itemsize
    function(
        x.data_ptr(),
        x.stride(0) * item_bytes,
        None if delta is None else delta.data_ptr(),
        0 if delta is None else delta.stride(0) * item_bytes,
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.shape[0],
        x.shape[1] if x.dim() == 3 else 1,
        x.shape[-1],
        eps,
        bias is not None,
        FLOAT_KINDS[x.dtype],
    )
    return y
