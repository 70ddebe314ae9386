"""MPNet: RoBERTa's positions and heads, no token types, and a bias on attention that depends on the distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from openengine.core.models.bert import RobertaModel
from openengine.core.models.encoder import LayerNames
from openengine.ops.embedding import Embedding

__all__ = ["MPNetModel"]

_EXACT, _FARTHEST = 8, 128  # distances with a bucket each; the distance from which on all share the last


class MPNetModel(RobertaModel):
    """One table of biases serves all layers: per head, by the bucket of a key's distance from the query."""

    PREFIX = r"(mpnet\.)?"
    LAYER_NAMES = LayerNames(
        layers="encoder.layer",
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        out="attention.attn.o",
        attention_norm="attention.LayerNorm",
        up="intermediate.dense",
        down="output.dense",
        mlp_norm="output.LayerNorm",
    )

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        rows, heads = self.config.num_position_buckets, self.config.num_heads
        name = "encoder.relative_attention_bias"
        self._biases = self._add(Embedding(name, rows, heads, dtype=torch.float32, device=self.device))

    def finish(self) -> None:
        """Spread the buckets over all distances that occur, the most negative first."""
        super().finish()
        distances = torch.arange(1 - self._max_length, self._max_length, device=self.device)
        buckets = _bucket(distances, self.config.num_position_buckets)
        self._distance_bias = self._biases(buckets).T.contiguous()  # [heads, 2 * max_length - 1]


def _bucket(distance: Tensor, num_buckets: int) -> Tensor:
    """Half of the buckets for each direction: the nearest keys have one each, then they widen logarithmically."""
    half = num_buckets // 2
    steps = distance.abs()
    widening = torch.log(steps.float().clamp(min=1) / _EXACT) / math.log(_FARTHEST / _EXACT)
    far = (_EXACT + (widening * (half - _EXACT)).long()).clamp(max=half - 1)
    return torch.where(distance > 0, half, 0) + torch.where(steps < _EXACT, steps, far)
