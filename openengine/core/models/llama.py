"""Llama, and Mistral, which is Llama with a sliding window that its config describes."""

from __future__ import annotations

from openengine.core.models.layers import CausalLM, DecoderLayer
from openengine.ops.norm import RmsNorm

__all__ = ["LlamaForCausalLM"]


class LlamaForCausalLM(CausalLM):
    """Pre-norm decoder with grouped-query attention, rotary positions and a gated MLP."""

    def _layer(self, index: int) -> DecoderLayer:
        prefix = f"layers.{index}"
        return DecoderLayer(
            attention_norm=self._norm(f"{prefix}.input_layernorm"),
            attention=self._attention(index, f"{prefix}.self_attn"),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm"),
            mlp=self._gated_mlp(f"{prefix}.mlp"),
        )

    def _norm(self, name: str) -> RmsNorm:
        return self._rms_norm(name)
