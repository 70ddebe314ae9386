"""`TaskHead`: what turns hidden states into the logits of a task other than the next token.

    classifier     x ─ [dense ─ activation] ─ out
    masked LM      x ─ dense ─ activation ─ norm ─ out, which is often the table of token embeddings

Which of a text's rows a head is for is its `pooling`; who gathers them is not its business. The modules belong to the
model, which names, fills and counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from openengine.ops.linear import Linear
    from openengine.ops.norm import LayerNorm

__all__ = ["Pooling", "TaskHead"]

Pooling = Literal["cls", "mean", "last"]


@dataclass(frozen=True, slots=True)
class TaskHead:
    """`pooling` says which hidden state of a text goes in: the first, the mean or the last; None: each of them.

    `num_labels` counts what comes out: labels, or the vocabulary.
    """

    pooling: Pooling | None
    num_labels: int
    out: Linear
    dense: Linear | None = None
    activation: Callable[[Tensor], Tensor] | None = None
    norm: LayerNorm | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, D], in the model's dtype -> logits float32 [N, num_labels]."""
        if self.dense is not None:
            x = self.dense(x)
        if self.activation is not None:
            x = self.activation(x)
        if self.norm is not None:
            x = self.norm(x)
        return self.out(x, dtype=torch.float32)
