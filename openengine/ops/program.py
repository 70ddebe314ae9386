"""`NativeProgram`: a sequence of native kernels that runs in one call (`csrc/forward.cpp`).

Written once for a model, kernel by kernel, then run for every step: a step costs one call instead of one per kernel,
and its threads are woken once. The kernels are those that the modules of `ops` call one at a time, and compute the
same.

    place = buffer, offset, row_bytes      where a kernel finds or leaves the rows of a matrix
    rows  = ALL or WANTED                  one row per token of the step, or one per row whose logits are wanted
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, byref, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openengine.ops.activation import NATIVE_ACTIVATIONS
from openengine.ops.attention_native import NativeAttention, TiledKvCache
from openengine.ops.batch import ForwardBatch
from openengine.ops.linear_native import NO_ACTIVATION, NativeWeights
from openengine.ops.native import FLOAT_KINDS, NativeLibrary
from openengine.ops.norm import HeadNorm, LayerNorm, RmsNorm

__all__ = ["ALL", "KERNELS", "WANTED", "NativeProgram", "Place"]

ALL, WANTED = 0, 1
KERNELS = ("norm", "linear", "attention", "take")  # in the order of `Kernel` in csrc/forward.cpp
_NORM, _PRODUCT, _ATTENTION, _TAKE = range(len(KERNELS))
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Place:
    """A matrix of `columns` items a row inside a buffer of the program."""

    buffer: int
    columns: int
    row_bytes: int
    offset: int = 0


# Each mirrors the struct of its name in csrc/forward.cpp, field by field.


class _Operand(ctypes.Structure):
    _fields_ = (("buffer", c_int32), ("unused", c_int32), ("offset", c_int64), ("row_bytes", c_int64))


class _Operation(ctypes.Structure):
    _fields_ = (
        ("kernel", c_int32),
        ("rows", c_int32),
        ("operands", _Operand * 4),
        *((name, c_void_p) for name in ("layer", "weight", "bias", "keys", "values")),
        ("heads", c_int64),
        ("n", c_int64),
        *((name, c_float) for name in ("eps", "scale", "softcap")),
        *((name, c_int32) for name in ("code", "plan", "from_kind", "to_kind")),
    )


class _Angles(ctypes.Structure):
    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("dim", c_int64))


class _Forward(ctypes.Structure):
    _fields_ = (
        ("operations", c_void_p),
        ("num_operations", c_int64),
        ("buffers", c_void_p),
        ("num_tokens", c_int64),
        ("num_wanted", c_int64),
        *((name, c_void_p) for name in ("wanted", "step", "plans", "angles", "workspace", "seconds")),
    )


class NativeProgram:
    """Matrices of `dtype`, float32 or bfloat16. One program serves one thread: it keeps its workspace.

    `source` [T, D] is what a run starts from and may overwrite, `result` [R, D] what it leaves.
    """

    def __init__(self, library: NativeLibrary, backend: NativeAttention, width: int, dtype: torch.dtype) -> None:
        self._backend = backend
        self._dtype = dtype
        self._row_bytes: list[int] = []  # of each buffer
        self._recorded: list[_Operation] = []
        self._operations: ctypes.Array[_Operation] | None = None
        self._held: list[object] = []  # what the operations point to
        self._attentions: list[tuple[int | None, bool]] = []  # kinds of layers, as `NativeAttention.described` has them
        self._num_heads = 0
        self._kv: TiledKvCache | None = None
        self._capacity = 0  # rows that `_memory` has for each buffer
        self._addresses: ctypes.Array[c_void_p] | None = None  # of each buffer
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._seconds = (c_double * len(KERNELS))()
        self.is_timed = False
        self._run = library.function("forward", c_void_p, allocates=True)
        self.source, self.result = self.buffer(width), self.buffer(width)

    # ---- recording -------------------------------------------------------------------------------

    def buffer(self, columns: int) -> Place:
        """A new matrix, of as many rows as a step has tokens."""
        row_bytes = columns * self._dtype.itemsize
        self._row_bytes.append(row_bytes)
        return Place(len(self._row_bytes) - 1, columns, row_bytes)

    def part(self, place: Place, first: int, columns: int) -> Place:
        """Columns [first, first + columns) of a matrix."""
        return replace(place, columns=columns, offset=place.offset + first * self._dtype.itemsize)

    def norm(self, norm: RmsNorm | LayerNorm, x: Place, delta: Place | None, y: Place, rows: int = ALL) -> None:
        """`norm.add(x, delta)` to y."""
        operation = self._add_norm(norm.weight, norm.eps, x, delta, y, rows)
        if isinstance(norm, LayerNorm):
            operation.code = True  # centered
            operation.bias = None if norm.bias is None else norm.bias.data_ptr()
            self._held.append(norm.bias)

    def head_norm(self, norm: HeadNorm, x: Place, y: Place) -> None:
        """`norm(x)` to y."""
        self._add_norm(norm.weight, norm.eps, x, None, y, ALL).heads = norm.weight.shape[0]

    def product(
        self, weights: NativeWeights, x: Place, y: Place, rows: int = ALL, *, activation: str | None = None
    ) -> None:
        """`weights.multiply(x, activation=activation)` to y."""
        operation = self._add(_PRODUCT, rows, x, y)
        operation.layer = weights.address
        operation.code = NO_ACTIVATION if activation is None else NATIVE_ACTIVATIONS[activation]
        operation.from_kind = operation.to_kind = FLOAT_KINDS[self._dtype]
        self._held.append(weights)

    def attention(
        self,
        q: Place,
        k: Place,
        v: Place,
        out: Place,
        rows: int = ALL,
        *,
        num_heads: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        rope: int | None,
    ) -> None:
        """The next layer's `NativeAttention.forward` to `rows` of out, turned by the angles of rotary embedding `rope`."""
        kind = window, rows == WANTED
        if kind not in self._attentions:
            self._attentions.append(kind)
        self._num_heads = num_heads
        operation = self._add(_ATTENTION, ALL, q, k, v, out)
        operation.scale, operation.softcap = scale, softcap or 0.0
        operation.plan = self._attentions.index(kind)
        operation.code = -1 if rope is None else rope

    def take(self, x: Place, y: Place) -> None:
        """The wanted rows of x to y."""
        self._add(_TAKE, WANTED, x, y).n = x.columns * self._dtype.itemsize

    def _add_norm(self, weight: Tensor, eps: float, x: Place, delta: Place | None, y: Place, rows: int) -> _Operation:
        assert y.row_bytes == y.columns * self._dtype.itemsize, "what a norm writes is a whole matrix"
        operation = self._add(_NORM, rows, x, delta, y)
        operation.weight, operation.heads, operation.n = weight.data_ptr(), 1, weight.shape[-1]
        operation.eps, operation.from_kind = eps, FLOAT_KINDS[self._dtype]
        self._held.append(weight)
        return operation

    def _add(self, kernel: int, rows: int, *places: Place | None) -> _Operation:
        operation = _Operation(kernel=kernel, rows=rows)
        for operand, place in zip(operation.operands, places):
            operand.buffer = -1 if place is None else place.buffer
            if place is not None:
                operand.offset, operand.row_bytes = place.offset, place.row_bytes
        self._recorded.append(operation)
        return operation

    # ---- running ---------------------------------------------------------------------------------

    def run(self, batch: ForwardBatch, source: Tensor, angles: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Run all kernels on `source` [T, D], which is overwritten; the rows `batch.logits_rows` of the result, [R, D].

        Needs `NativeAttention.prepare` on the same batch. `angles` are those of each rotary embedding of the model.
        """
        if self._kv is not batch.kv:
            self._bind(batch.kv)
        wanted = batch.logits_rows
        result = torch.empty(wanted.shape[0], self.result.columns, dtype=self._dtype)
        if batch.num_tokens > self._capacity:
            self._reserve(batch.num_tokens)
        self._addresses[self.source.buffer] = source.data_ptr()
        self._addresses[self.result.buffer] = result.data_ptr()
        step, plans, workspace = self._backend.described(batch, self._attentions, self._num_heads)
        plan_list = (c_void_p * len(plans))(*plans)
        angle_list = (_Angles * len(angles))(*((cos.data_ptr(), sin.data_ptr(), cos.shape[-1]) for cos, sin in angles))
        forward = _Forward(
            addressof(self._operations),
            len(self._operations),
            addressof(self._addresses),
            batch.num_tokens,
            wanted.shape[0],
            wanted.data_ptr(),
            step,
            addressof(plan_list),
            addressof(angle_list),
            workspace,
            addressof(self._seconds) if self.is_timed else None,
        )
        self._run(byref(forward))
        return result

    def take_seconds(self) -> dict[str, float]:
        """Seconds that each kind of kernel took while `is_timed`, since the last call."""
        seconds = dict(zip(KERNELS, self._seconds))
        self._seconds = (c_double * len(KERNELS))()
        return seconds

    def _bind(self, kv: TiledKvCache) -> None:
        """Point the attention of each layer at its keys and values."""
        if self._operations is None:
            self._operations = (_Operation * len(self._recorded))(*self._recorded)
        layers = (operation for operation in self._operations if operation.kernel == _ATTENTION)
        for operation, (keys, values) in zip(layers, kv.addresses, strict=True):
            operation.keys, operation.values = keys, values
        self._kv = kv

    def _reserve(self, num_rows: int) -> None:
        """Memory for matrices of `num_rows` rows, but `source` and `result`, which every run brings."""
        sizes = [-(-num_rows * row_bytes // _ALIGNMENT) * _ALIGNMENT for row_bytes in self._row_bytes]
        sizes[self.source.buffer] = sizes[self.result.buffer] = 0
        self._memory = torch.empty(sum(sizes) + _ALIGNMENT, dtype=torch.uint8)
        address = -(-self._memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        self._addresses = (c_void_p * len(sizes))()
        for index, size in enumerate(sizes):
            self._addresses[index] = address
            address += size
        self._capacity = num_rows
