"""Weights packed for the native matrix products (`csrc/linear.cpp`), and those products.

One packed copy serves any number of rows, reads back exactly, and can be a table of embeddings at the same time. Rows
are packed as they are loaded, so that no unpacked copy exists.

A row's result depends neither on the rows beside it nor on the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from openengine.ops.activation import NATIVE_ACTIVATIONS
from openengine.ops.huge_pages import HugePages
from openengine.ops.native import FLOAT_KINDS, INT8_KIND, NativeLibrary
from openengine.ops.quantize import INT8_RUN

__all__ = ["NO_ACTIVATION", "NativeWeights"]

_PANEL, _GROUP_BYTES = 32, 4  # as csrc/linear.h has them
NO_ACTIVATION = -1
_CONVERTED = 1 << 20  # elements that are converted at once
# Of all weights, one after another, as a step reads them. The region in which one engine's end and another's begin is
# given back with the last of them.
_memory = HugePages()

_pointer, _i64, _i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Layer(ctypes.Structure):
    _fields_ = (
        ("weights", _pointer),
        ("scales", _pointer),
        ("sums", _pointer),
        ("bias", _pointer),
        ("outputs", _i64),
        ("inputs", _i64),
        ("kind", _i32),
        ("is_gated", _i32),
    )


class NativeWeights:
    """Packed weights [out, in] with a bias, in `dtype`, or in int8 with activations quantized as they come.

    How int8 quantizes is described in `ops.quantize`, whose `Int8Weights` is the twin.
    `bias` is float32 [out], zeros until written, or None.
    """

    __slots__ = (
        "_arrays",
        "_functions",
        "_layer",
        "address",
        "bias",
        "dtype",
        "gated",
        "in_features",
        "int8",
        "out_features",
    )

    kernels = "native"

    def __init__(
        self,
        library: NativeLibrary,
        out_features: int,
        in_features: int,
        *,
        dtype: torch.dtype,
        int8: bool = False,
        bias: bool = False,
        gated: bool = False,
        level: str | None = None,
    ) -> None:
        assert dtype in FLOAT_KINDS, "only the dtypes of `supports`"
        self.out_features, self.in_features = out_features, in_features
        self.dtype = dtype
        self.int8 = int8
        self.gated = gated
        num_panels = -(-out_features // _PANEL)
        num_groups = -(-in_features * self.item_bytes // _GROUP_BYTES)
        weights = _memory.zeros(num_panels * num_groups * _PANEL * _GROUP_BYTES)
        num_padded = num_panels * _PANEL
        biases = torch.zeros(num_padded)
        num_runs = num_padded * -(-in_features // INT8_RUN) if int8 else 0
        scales = torch.zeros(num_runs)
        sums = torch.zeros(num_runs, dtype=torch.int16)
        self.bias = biases[:out_features] if bias else None
        self._arrays = (weights, scales, sums, biases)
        pointers = [tensor.data_ptr() for tensor in self._arrays]
        self._layer = _Layer(*pointers, out_features, in_features, INT8_KIND if int8 else FLOAT_KINDS[dtype], gated)
        self.address = ctypes.addressof(self._layer)
        self._functions = _bind(library, level)

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        """Whether there are kernels for activations of this dtype."""
        return dtype in FLOAT_KINDS

    @property
    def item_bytes(self) -> int:
        """Bytes of one weight."""
        return 1 if self.int8 else self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._arrays)

    def write(self, first: int, values: Tensor) -> None:
        """Put rows `first` on: values [n, in], of any float dtype."""
        kinds = FLOAT_KINDS if self.int8 else (self.dtype,)
        if values.dtype in kinds:
            self._write(first, values)
            return
        for part in values.split(max(1, _CONVERTED // max(1, self.in_features))):
            self._write(first, part.to(torch.float32 if self.int8 else self.dtype))
            first += part.shape[0]

    def _write(self, first: int, values: Tensor) -> None:
        assert values.shape[1] == self.in_features, "values must be [n, in]"
        assert 0 <= first <= self.out_features - values.shape[0], "rows that the weights do not have"
        values = values.contiguous()
        _multiply, pack, quantize, _rows = self._functions
        row_bytes = values.shape[1] * values.itemsize
        if self.int8:
            kind = FLOAT_KINDS[values.dtype]
            quantize(self.address, values.data_ptr(), row_bytes, kind, first, values.shape[0])
        else:
            pack(self.address, values.data_ptr(), row_bytes, first, values.shape[0])

    def multiply(
        self, x: Tensor, dtype: torch.dtype, activation: str | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """See `Weights.multiply`; `dtype` is float32 or bfloat16.

        The result is the first rows of `out`, contiguous and in `dtype`, where there is one.
        """
        assert x.shape[1] == self.in_features, "x must be [T, in]"
        assert self.int8 or x.dtype == self.dtype, "x must be of the dtype of the weights"
        if x.stride(1) != 1:
            x = x.contiguous()
        num_rows = x.shape[0]
        num_columns = self.out_features if activation is None or not self.gated else self.out_features // 2
        if out is not None:
            assert out.dtype == dtype and out.is_contiguous(), "out must be contiguous and of dtype"
            assert out.shape[0] >= num_rows and out.shape[1] == num_columns, "out must have room for [T, out]"
        y = torch.empty(num_rows, num_columns, dtype=dtype) if out is None else out[:num_rows]
        self._functions[0](
            self.address,
            x.data_ptr(),
            x.stride(0) * x.itemsize,
            FLOAT_KINDS[x.dtype],
            y.data_ptr(),
            num_columns * y.itemsize,
            FLOAT_KINDS[dtype],
            num_rows,
            NO_ACTIVATION if activation is None else NATIVE_ACTIVATIONS[activation],
        )
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """The weight's rows `ids` i64[n], each from 0 to out_features - 1, as [n, in] in `dtype`."""
        assert ids.dtype == torch.int64, "ids must be i64"
        ids = ids.contiguous()
        out = torch.empty(ids.shape[0], self.in_features, dtype=self.dtype)
        row_bytes = self.in_features * out.itemsize
        self._functions[3](
            self.address, ids.data_ptr(), ids.shape[0], out.data_ptr(), row_bytes, FLOAT_KINDS[self.dtype]
        )
        return out

    def dense(self) -> Tensor:
        """The weight [out, in] in `dtype`, a copy."""
        return self.rows(torch.arange(self.out_features))


@cache
def _bind(library: NativeLibrary, level: str | None) -> tuple[Callable[..., None], ...]:
    product = _pointer, _pointer, _i64, _i32, _pointer, _i64, _i32, _i64, _i32
    quantize = _pointer, _pointer, _i64, _i32, _i64, _i64
    return (
        library.function("linear", *product, level=level, allocates=True),
        library.function("linear_pack", _pointer, _pointer, _i64, _i64, _i64, level=level),
        library.function("linear_quantize", *quantize, level=level),
        library.function("linear_rows", _pointer, _pointer, _i64, _pointer, _i64, _i32, level=level),
    )
