"""Activation functions by the names checkpoints use, and the gated form, for which there is a native kernel.

For bfloat16 results native kernels compute GELU with an absolute error below 7e-5, its tanh form and SiLU with a relative one
below 2e-4; all else to float32's precision.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from openengine.ops.native import NativeLibrary

__all__ = ["ACTIVATIONS", "NATIVE_ACTIVATIONS", "Gated"]

_gelu_tanh = partial(F.gelu, approximate="tanh")

# gelu_new and gelu_fast write the same tanh approximation with other constants' digits.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}

# As csrc/activation.h numbers them.
_CODES = {F.silu: 0, _gelu_tanh: 1, F.gelu: 2, F.relu: 3}
NATIVE_ACTIVATIONS = {name: _CODES[function] for name, function in ACTIVATIONS.items()}
_KINDS = {torch.float32: 0, torch.bfloat16: 1}


class Gated:
    """`activation(gate) * up` for gate_up [T, 2I], the gate in the first half: a fresh [T, I]."""

    __slots__ = ("_activation", "_code", "_native")

    def __init__(self, activation: str, native: NativeLibrary | None = None) -> None:
        self._activation = ACTIVATIONS[activation]
        self._code = NATIVE_ACTIVATIONS[activation]
        self._native = native and _bind(native)

    @property
    def code(self) -> int | None:
        """The activation's number in the native kernels; None without them."""
        return self._code if self._native else None

    def __call__(self, gate_up: Tensor) -> Tensor:
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if self._native and gate_up.dtype in _KINDS and gate_up.stride(1) == 1:
            y = torch.empty(num_rows, width, dtype=gate_up.dtype)
            row_bytes = gate_up.stride(0) * gate_up.itemsize
            pointers = gate_up.data_ptr(), row_bytes, y.data_ptr()
            self._native(self._code, *pointers, num_rows, width, _KINDS[gate_up.dtype])
            return y
        gate, up = gate_up.chunk(2, dim=-1)
        return self._activation(gate).mul_(up)


@cache
def _bind(library: NativeLibrary) -> Callable[..., None]:
    pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    return library.function("gated", i32, pointer, i64, pointer, i64, i64, i32)
