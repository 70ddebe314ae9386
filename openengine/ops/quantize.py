"""Int8 arithmetic: how weights and activations are quantized, and the product in plain PyTorch.

Weights are symmetric per output, `w = q * scale` with q in [-127, 127]. Activations are asymmetric: every run of 192
inputs of a row has a range of its own, found anew each time and stretched to include 0, and `x = (q - zero) * scale`
with q in [0, 255]. (One range for a whole row loses two to three times as much, as a few inputs are far greater than
the rest.) With integer sums over each run,

    y = scale_w * (sum over runs of scale_x * (sum q_x q_w - zero * sum q_w)) + bias

A run that is not finite makes its row so; ranges below 1e-30 count as zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openengine.ops.activation import activated

__all__ = ["INT8_RUN", "Int8Weights", "quantize_run", "quantize_weight"]

INT8_RUN = 192  # inputs, as csrc/linear.h has it
_LEAST_RANGE = 1e-30


def quantize_run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One run of each row, x [T, n] -> q u8 [T, n], scale f32 [T], zero i32 [T]."""
    values = x.float()
    low, high = values.amin(dim=1).clamp(max=0), values.amax(dim=1).clamp(min=0)
    span = high - low
    inverse = _inverse(span, 255)
    zero = (-low * inverse).round()
    q = ((values * inverse[:, None]).round() + zero[:, None]).clamp(0, 255)
    return _integers(q, torch.uint8), span / 255, _integers(zero, torch.int32)


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> q i8 [out, in], scale f32 [out]."""
    values = weight.float()
    most = values.abs().amax(dim=1)
    q = (values * _inverse(most, 127)[:, None]).round().clamp(-127, 127)
    return _integers(q, torch.int8), most / 127


def _inverse(span: Tensor, steps: int) -> Tensor:
    # A division, as in the native kernel: `steps / span` would multiply by a rounded reciprocal.
    return torch.where(span > _LEAST_RANGE, torch.full_like(span, steps) / span, 0)


def _integers(q: Tensor, dtype: torch.dtype) -> Tensor:
    return q.nan_to_num(nan=0.0).to(dtype)


class Int8Weights:
    """Int8 weights [out, in] with a bias, multiplied by PyTorch: the twin of `NativeWeights` in int8.

    `dtype` is that of the activations; `bias` is float32 [out], zeros until written, or None.
    """

    __slots__ = ("_q", "_scales", "_sums", "bias", "dtype", "gated", "in_features", "out_features")

    item_bytes = 1
    kernels = "torch"

    def __init__(
        self, out_features: int, in_features: int, *, dtype: torch.dtype, bias: bool = False, gated: bool = False
    ) -> None:
        self.out_features, self.in_features = out_features, in_features
        self.dtype = dtype
        self.gated = gated
        self.bias = torch.zeros(out_features) if bias else None
        self._q = torch.empty(out_features, in_features, dtype=torch.int8)
        self._scales = torch.empty(out_features)
        self._sums = torch.empty(-(-in_features // INT8_RUN), out_features, dtype=torch.int32)

    @property
    def num_bytes(self) -> int:
        tensors = (self._q, self._scales, self._sums, self.bias)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def write(self, first: int, values: Tensor) -> None:
        """Put rows `first` on: values [n, in], of any float dtype."""
        rows = slice(first, first + values.shape[0])
        self._q[rows], self._scales[rows] = quantize_weight(values)
        for sums, q in zip(self._sums, self._q[rows].split(INT8_RUN, dim=1)):
            sums[rows] = q.sum(dim=1, dtype=torch.int32)

    def multiply(self, x: Tensor, dtype: torch.dtype, activation: str | None = None) -> Tensor:
        """See `Weights.multiply`."""
        y = torch.zeros(x.shape[0], self.out_features)
        for run, weights, sums in zip(x.split(INT8_RUN, dim=1), self._q.split(INT8_RUN, dim=1), self._sums):
            q, scale, zero = quantize_run(run)
            # PyTorch multiplies signed by signed: q less 128, and its zero with it.
            signed = (q.to(torch.int16) - 128).to(torch.int8)
            products = torch._int_mm(signed, weights.T) - (zero - 128)[:, None] * sums
            y += products * scale[:, None]
        y *= self._scales
        if self.bias is not None:
            y += self.bias
        return activated(y, activation, gated=self.gated).to(dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """The weight's rows `ids` i64[n] as [n, in] in `dtype`."""
        return (self._q[ids].float() * self._scales[ids, None]).to(self.dtype)

    def dense(self) -> Tensor:
        """The weight [out, in] in `dtype`, a copy."""
        return (self._q.float() * self._scales[:, None]).to(self.dtype)
