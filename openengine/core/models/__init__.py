"""Models by architecture name. A family's module is imported when one of its models is asked for."""

from __future__ import annotations

from importlib import import_module

from openengine.core.models.config import ARCHITECTURES, ModelConfig
from openengine.core.models.layers import CausalLM

__all__ = ["ARCHITECTURES", "CausalLM", "ModelConfig", "model_class"]

_MODULES = {
    "GPT2LMHeadModel": "gpt2",
    "Gemma2ForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma",
    "LlamaForCausalLM": "llama",
    "MinistralForCausalLM": "mistral",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
}


def model_class(config: ModelConfig) -> type[CausalLM]:
    """The class that computes what `config` describes."""
    module = import_module(f"{__name__}.{_MODULES[config.architecture]}")
    return getattr(module, config.architecture)
