"""Activation functions by the names checkpoints use.

For bfloat16 results native kernels compute GELU with an error below 7e-5 (5e-6 of its argument where that is more), its tanh form and SiLU with a
relative one below 2e-4; all else to float32's precision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

__all__ = ["ACTIVATIONS", "NATIVE_ACTIVATIONS", "activated"]

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


def activated(x: Tensor, activation: str | None, *, gated: bool) -> Tensor:
    """`activation(x)`, [T, D]; x itself if there is none.

    With `gated` x is [gate | up], and the result `activation(gate) * up`, [T, D / 2].
    """
    if activation is None:
        return x
    if not gated:
        return ACTIVATIONS[activation](x)
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)
