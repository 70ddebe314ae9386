"""Activation functions by the names checkpoints use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

__all__ = ["ACTIVATIONS", "gated"]

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


def gated(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    """`activation(gate) * up` for gate_up [T, 2I], the gate in the first half: [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate).mul_(up)
