"""GPT-2: learned positions, LayerNorm, biases everywhere, weights stored as [in, out]."""

from __future__ import annotations

from torch import Tensor

from openengine.core.models.layers import Attention, CausalLM, DecoderLayer, Mlp
from openengine.ops.batch import ForwardBatch
from openengine.ops.norm import LayerNorm

__all__ = ["GPT2LMHeadModel"]


class GPT2LMHeadModel(CausalLM):
    """Pre-norm decoder; one stored tensor holds q, k and v."""

    IGNORED = (r"h\.\d+\.attn\.(bias|masked_bias)",)  # the causal mask and its fill value
    HEADS = (*CausalLM.HEADS, r"classifier\..*")
    EMBED, NORM, TOKEN_CLASSIFIER = "wte", "ln_f", "classifier"

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._positions = self._embedding("wpe", self.config.max_position_embeddings)

    def _embed(self, batch: ForwardBatch) -> Tensor:
        return self.embed(batch.input_ids).add_(self._positions(batch.positions))

    def _layer(self, index: int) -> DecoderLayer:
        prefix, width, inner = f"h.{index}", self.config.hidden_size, self.config.intermediate_size
        return DecoderLayer(
            attention_norm=self._norm(f"{prefix}.ln_1"),
            attention=Attention(
                index,
                self.config,
                self.backend,
                qkv=self._linear(width, {f"{prefix}.attn.c_attn": 3 * width}, bias=True, transposed=True),
                out=self._linear(width, {f"{prefix}.attn.c_proj": width}, bias=True, transposed=True),
            ),
            mlp_norm=self._norm(f"{prefix}.ln_2"),
            mlp=Mlp(
                self._linear(width, {f"{prefix}.mlp.c_fc": inner}, bias=True, transposed=True),
                self._linear(inner, {f"{prefix}.mlp.c_proj": width}, bias=True, transposed=True),
                self.config.activation,
            ),
        )

    def _norm(self, name: str) -> LayerNorm:
        return self._layer_norm(name)
