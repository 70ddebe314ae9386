"""ModernBERT: rotary positions, layers that normalize their input, gated MLPs, windows in most layers.

The base of the rotation depends on whether a layer has a window. Biases are where the config says so, usually nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from openengine.core.heads import TaskHead
from openengine.core.models.encoder import EncoderModel, SelfAttention
from openengine.core.models.layers import Angles, GatedMlp
from openengine.ops.activation import ACTIVATIONS
from openengine.ops.batch import EncoderBatch
from openengine.ops.linear import Linear
from openengine.ops.norm import LayerNorm

__all__ = ["ModernBertModel"]


@dataclass(slots=True)
class PreNormLayer:
    """Norm, attention, norm, MLP. The first layer's input is normalized already."""

    attention_norm: LayerNorm | None
    attention: SelfAttention
    out: Linear
    mlp_norm: LayerNorm
    mlp: GatedMlp

    def __call__(
        self, residual: Tensor, branch: Tensor | None, batch: EncoderBatch, angles: Angles, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """residual [T, D] is changed in place; `branch` is still to be added to it, as is the one returned.

        With `rows` i64[R] only those continue after attention, and both results are [R, D].
        """
        x = residual if self.attention_norm is None else self.attention_norm.add(residual, branch)
        attended = self.attention(x, batch, angles, None)
        if rows is not None:
            residual, attended = residual[rows], attended[rows]
        return residual, self.mlp(self.mlp_norm.add(residual, self.out(attended)))


class ModernBertModel(EncoderModel):
    """Every head goes through one transform."""

    PREFIX = r"(model\.)?"
    EMBED, EMBED_NORM, HEAD = "embeddings.tok_embeddings", "embeddings.norm", "decoder"
    HEADS = (r"head\..*", r"decoder\..*", r"classifier\..*")
    RENAMED = ()

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.norm = self._layer_norm("final_norm", bias=self.config.norm_bias)

    def forward(self, batch: EncoderBatch, rows: Tensor | None = None) -> Tensor:
        residual, branch = self._embed(batch), None
        angles = [rope.angles(batch.positions) for rope in self._ropes]
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            chosen = angles[self.config.layer_ropes[index]]
            residual, branch = layer(residual, branch, batch, chosen, rows if index == last else None)
        return self.norm.add(residual, branch)

    def _layer(self, index: int) -> PreNormLayer:
        config, prefix = self.config, f"layers.{index}"
        width, inner = config.hidden_size, config.intermediate_size
        norm = self._layer_norm(f"{prefix}.attn_norm", bias=config.norm_bias) if index else None
        return PreNormLayer(
            attention_norm=norm,
            attention=self._self_attention(index, {f"{prefix}.attn.Wqkv": 3 * width}),
            out=self._linear(width, {f"{prefix}.attn.Wo": width}, bias=config.attention_bias),
            mlp_norm=self._layer_norm(f"{prefix}.mlp_norm", bias=config.norm_bias),
            mlp=GatedMlp(
                self._linear(width, {f"{prefix}.mlp.Wi": 2 * inner}, bias=config.mlp_bias, gated=True),
                self._linear(inner, {f"{prefix}.mlp.Wo": width}, bias=config.mlp_bias),
                config.activation,
            ),
        )

    def _task_head(self) -> TaskHead | None:
        config = self.config
        if self.head_kind == "none":
            return None
        dense = self._dense("head.dense", bias=config.classifier_bias)
        activation = ACTIVATIONS[config.classifier_activation]
        norm = self._layer_norm("head.norm", bias=config.norm_bias)
        if self.head_kind == "masked_lm":
            return TaskHead(None, config.vocab_size, self.head, dense, activation, norm)
        pooling = config.classifier_pooling if self.head_kind == "sequence_classification" else None
        return self._classifier("classifier", pooling=pooling, dense=dense, activation=activation, norm=norm)
