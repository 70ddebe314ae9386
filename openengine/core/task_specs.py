"""How a model embeds, or how it scores pairs: values that a checkpoint's files lead to (sentence_transformers.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["DENSE_ACTIVATIONS", "DenseSpec", "EmbeddingSpec", "ScoreSpec", "SparseSpec"]

DENSE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "GELU": F.gelu,
    "Identity": lambda x: x,
    "ReLU": F.relu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
}
"""By the names of classes of torch.nn."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DenseSpec:
    """`activation(x @ weight.T + bias)`. weight: f32 [out, in].  bias: f32 [out] or None."""

    weight: Tensor
    bias: Tensor | None
    activation: str  # of DENSE_ACTIVATIONS

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]"""
        return DENSE_ACTIVATIONS[self.activation](F.linear(x, self.weight, self.bias))

    def to(self, device: torch.device) -> DenseSpec:
        bias = None if self.bias is None else self.bias.to(device)
        return DenseSpec(self.weight.to(device), bias, self.activation)


@dataclass(frozen=True, slots=True)
class SparseSpec:
    """Weights over the vocabulary, as SPLADE: log(1 + relu(logit)), the greatest of all tokens or, `is_sum`, their sum."""

    is_sum: bool = False
    saturates_twice: bool = False

    def saturate(self, values: Tensor) -> Tensor:
        """log(1 + values), or that of that, in place; values >= 0."""
        values = values.log1p_()
        return values.log1p_() if self.saturates_twice else values


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingSpec:
    """How a model embeds.

    `pooling` names modes of ops/pooling.py, whose vectors stand side by side; it is empty for a `sparse` model. With
    `include_prompt=False` pooling leaves the prompt's tokens out. `max_length` is in tokens, None where only the model
    limits it. `default_prompt` is a key of `prompts`. `truncate_dim` is the number of components given by default.
    `dimension` is the native one; the vocabulary's size for a sparse model.
    """

    pooling: tuple[str, ...]
    dimension: int
    include_prompt: bool = True
    dense: tuple[DenseSpec, ...] = ()
    normalize: bool = False
    sparse: SparseSpec | None = None
    max_length: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: str = "cosine"
    truncate_dim: int | None = None


@dataclass(frozen=True, slots=True)
class ScoreSpec:
    """How a model scores a pair of texts.

    `label_ids` are the tokens whose logits make the score: (true, false) or (true,); empty for a head of the model's own.
    `activation` is "sigmoid" or "identity", what the score of one label goes through by default, None where the directory
    leaves it open: sigmoid for one label, identity for several. With `uses_chat_template` the pair is written by the
    model's chat template, called with `template_options`, as messages of the roles "query" and "document" (after a
    "system" one with the instruction); `is_structured` gives their contents as lists of parts.
    """

    label_ids: tuple[int, ...] = ()
    activation: str | None = None
    uses_chat_template: bool = False
    is_structured: bool = False
    template_options: Mapping[str, Any] = field(default_factory=dict)
    max_length: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
