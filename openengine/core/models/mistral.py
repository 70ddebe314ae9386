"""Mistral and Ministral: Llama, with sliding windows and a head size of their own that the config describes."""

from __future__ import annotations

from openengine.core.models.llama import LlamaForCausalLM

__all__ = ["MinistralForCausalLM", "MistralForCausalLM"]


class MistralForCausalLM(LlamaForCausalLM):
    """Computes what its config says, layer by layer, as Llama does."""


class MinistralForCausalLM(MistralForCausalLM):
    """Mistral whose layers may differ in their window."""
