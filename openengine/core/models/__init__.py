"""Models by architecture name. A family's module is imported when one of its models is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from openengine.core.models.architectures import ARCHITECTURES, Architecture, HeadKind
from openengine.core.models.config import ModelConfig
from openengine.core.models.encoder_config import EncoderConfig
from openengine.core.models.layers import CausalLM
from openengine.core.models.model import Model

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "CausalLM",
    "EncoderConfig",
    "HeadKind",
    "Model",
    "ModelConfig",
    "model_class",
    "read_config",
]

# The config's model_type -> module and class.
_CLASSES = {
    "bert": ("bert", "BertModel"),
    "distilbert": ("distilbert", "DistilBertModel"),
    "gemma2": ("gemma", "Gemma2ForCausalLM"),
    "gemma3_text": ("gemma", "Gemma3ForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "llama": ("llama", "LlamaForCausalLM"),
    "ministral": ("mistral", "MinistralForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "modernbert": ("modernbert", "ModernBertModel"),
    "mpnet": ("mpnet", "MPNetModel"),
    "qwen2": ("qwen", "Qwen2ForCausalLM"),
    "qwen3": ("qwen", "Qwen3ForCausalLM"),
    "roberta": ("bert", "RobertaModel"),
    "xlm-roberta": ("bert", "RobertaModel"),
}


def read_config(hf_config: Mapping[str, Any]) -> ModelConfig | EncoderConfig:
    """What a Hugging Face config describes; raises what the `from_hf` of both raise."""
    return (EncoderConfig if Architecture.of(hf_config).is_encoder else ModelConfig).from_hf(hf_config)


def model_class(config: ModelConfig | EncoderConfig) -> type[Model]:
    """The class that computes what `config` describes."""
    module, name = _CLASSES[config.model_type]
    return getattr(import_module(f"{__name__}.{module}"), name)
