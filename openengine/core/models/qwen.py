"""Qwen 1.5 to 3: Llama with biases on q, k and v (to 2.5), or with normalized query and key heads (3)."""

from __future__ import annotations

from openengine.core.models.layers import Attention
from openengine.core.models.llama import LlamaForCausalLM

__all__ = ["Qwen2ForCausalLM", "Qwen3ForCausalLM"]


class Qwen2ForCausalLM(LlamaForCausalLM):
    """The biases and the optional window of upper layers come from the config."""


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Query and key heads are normalized before rotation."""

    def _attention(self, index: int, prefix: str) -> Attention:
        return super()._attention(index, prefix, norm=self._head_norm(prefix))
