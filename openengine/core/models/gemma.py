"""Gemma 2 and 3 (text): scaled embedding, norms on both sides of a branch, alternating windows.

Gemma 2 caps attention scores and logits; Gemma 3 normalizes query and key heads and turns windowed layers at a base
of their own. Norm weights are stored less one.
"""

from __future__ import annotations

from openengine.core.models.layers import Attention, CausalLM, DecoderLayer
from openengine.ops.norm import RmsNorm

__all__ = ["Gemma2ForCausalLM", "Gemma3ForCausalLM"]


class Gemma2ForCausalLM(CausalLM):
    """Norms before and after attention and MLP; caps, windows and scales come from the config."""

    def _layer(self, index: int) -> DecoderLayer:
        prefix = f"layers.{index}"
        return DecoderLayer(
            attention_norm=self._norm(f"{prefix}.input_layernorm"),
            attention=self._attention(index, f"{prefix}.self_attn"),
            attention_out_norm=self._norm(f"{prefix}.post_attention_layernorm"),
            mlp_norm=self._norm(f"{prefix}.pre_feedforward_layernorm"),
            mlp=self._gated_mlp(f"{prefix}.mlp"),
            mlp_out_norm=self._norm(f"{prefix}.post_feedforward_layernorm"),
        )

    def _norm(self, name: str) -> RmsNorm:
        return self._rms_norm(name, offset=1.0)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Query and key heads are normalized before rotation."""

    def _attention(self, index: int, prefix: str) -> Attention:
        return super()._attention(index, prefix, norm=self._head_norm(prefix, offset=1.0))
