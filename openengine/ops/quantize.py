"""Int8 arithmetic: how weights and activations are quantized, and the product in plain PyTorch.

Both have a range of their own for every run of 192 inputs of an output or of a row. (One range for all of them loses
two to three times as much, as a few inputs are far greater than the rest.)

Weights are symmetric, `w = q * scale` with q in [-127, 127], and the q of two neighbours, the inputs 0 and 1, 2 and 3
and so on, add up to at most 128 in magnitude: their products with two activations then fit 16 bits, as CPUs without
instructions for int8 need them to. Activations are asymmetric, found anew each time, with a range stretched to include
0: `x = (q - zero) * scale` with q in [0, 255]. With integer sums over each run,

    y = sum over runs of scale_w * (scale_x * (sum q_x q_w - zero * sum q_w)) + bias

A run that is not finite makes its row so; ranges below 1e-30 count as zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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
    """One run of each output, weight [out, n] -> q i8 [out, n], scale f32 [out]."""
    values = weight.float()
    pairs = F.pad(values, (0, values.shape[1] % 2)).unflatten(1, (-1, 2)).sum(dim=2)
    most = torch.maximum(values.abs().amax(dim=1), pairs.abs().amax(dim=1))
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
        runs = -(-in_features // INT8_RUN)
        self._scales = torch.empty(runs, out_features)
        self._sums = torch.empty(runs, out_features, dtype=torch.int32)

    @property
    def num_bytes(self) -> int:
        tensors = (self._q, self._scales, self._sums, self.bias)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def write(self, first: int, values: Tensor) -> None:
        """Put rows `first` on: values [n, in], of any float dtype."""
        rows = slice(first, first + values.shape[0])
        for run, part in enumerate(values.split(INT8_RUN, dim=1)):
            q, self._scales[run, rows] = quantize_weight(part)
            self._q[rows, run * INT8_RUN : run * INT8_RUN + q.shape[1]] = q
            self._sums[run, rows] = q.sum(dim=1, dtype=torch.int32)

    def multiply(self, x: Tensor, dtype: torch.dtype, activation: str | None = None) -> Tensor:
        """See `Weights.multiply`."""
        y = torch.zeros(x.shape[0], self.out_features)
        parts = zip(x.split(INT8_RUN, dim=1), self._q.split(INT8_RUN, dim=1), self._scales, self._sums)
        for run, weights, scales, sums in parts:
            q, scale, zero = quantize_run(run)
            # PyTorch multiplies signed by signed: q less 128, and its zero with it.
            signed = (q.to(torch.int16) - 128).to(torch.int8)
            products = torch._int_mm(signed, weights.T) - (zero - 128)[:, None] * sums
            y += products * scale[:, None] * scales
        if self.bias is not None:
            y += self.bias
        return activated(y, activation, gated=self.gated).to(dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """The weight's rows `ids` i64[n] as [n, in] in `dtype`."""
        return self._dequantized(self._q[ids], self._scales[:, ids])

    def dense(self) -> Tensor:
        """The weight [out, in] in `dtype`, a copy."""
        return self._dequantized(self._q, self._scales)

    def _dequantized(self, q: Tensor, scales: Tensor) -> Tensor:
        factors = scales.T.repeat_interleave(INT8_RUN, dim=1)[:, : self.in_features]
        return (q.float() * factors).to(self.dtype)
