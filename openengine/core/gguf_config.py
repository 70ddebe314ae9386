"""The config that a GGUF file's metadata stands for, in the keys of the config classes of transformers (version 5).

One function per family, from typed `GgufFields` and the tensors that are configuration. Which architecture is whose, and
the tensors that are weights, are gguf_models.py's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from openengine.core.gguf import GgufTensor
from openengine.errors import InvalidArgument, UnsupportedFeature

__all__ = [
    "GgufFields",
    "gemma2_config",
    "gemma3_config",
    "gpt2_config",
    "llama_config",
    "qwen_config",
    "refuse_variations",
]

# Values of keys that change the arithmetic of these architectures; anything else would be a different model.
_NEUTRAL: Mapping[str, tuple] = {
    "expert_count": (0,),
    "nextn_predict_layers": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "use_parallel_residual": (False,),
    "embedding_scale": (1.0, 0.0),
    "residual_scale": (1.0, 0.0),
    "logit_scale": (1.0, 0.0),
}


class GgufFields:
    """Typed reads of the `<architecture>.*` keys. Raises InvalidArgument for a value that is absent or of another type."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.architecture = architecture
        self._metadata = metadata

    def name(self, key: str) -> str:
        """The whole name of `key` in the file."""
        return f"{self.architecture}.{key}"

    def get(self, key: str) -> Any:
        """The value or None. Of an array with one item per layer, the item if all are equal."""
        value = self._metadata.get(self.name(key))
        if isinstance(value, np.ndarray):
            if value.size == 0 or (value != value[0]).any():
                raise UnsupportedFeature(f"GGUF metadata {self.name(key)} differs between layers: {value.tolist()}")
            value = value[0].item()
        return value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._present(key, default)
        if type(value) is not int or value < minimum:
            raise InvalidArgument(f"GGUF metadata {self.name(key)} {value!r} is not an integer of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._present(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise InvalidArgument(f"GGUF metadata {self.name(key)} {value!r} is not a finite number")
        return float(value)

    def _present(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None and default is None:
            raise InvalidArgument(f"GGUF metadata {self.name(key)} is missing: the file is incomplete")
        return default if value is None else value


def refuse_variations(fields: GgufFields) -> None:
    """Raises UnsupportedFeature for a key that makes it another model than its architecture."""
    for key, neutral in _NEUTRAL.items():
        if (value := fields.get(key)) is not None and value not in neutral:
            raise UnsupportedFeature(f"GGUF metadata {fields.name(key)} is {value!r}; only {neutral[0]!r} is supported")


def llama_config(fields: GgufFields, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Llama, and Mistral, whose files say llama."""
    window = fields.integer("attention.sliding_window", 0, minimum=0)
    config = _decoder_config(fields, "LlamaForCausalLM", "llama")
    config |= {"hidden_act": "silu", "rope_parameters": _rope_parameters(fields, config, tensors)}
    if window:
        # Mistral files say llama; without a window the two are the same model.
        return config | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return config | {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def qwen_config(architecture: str, model_type: str) -> Callable[[GgufFields, Mapping[str, GgufTensor]], dict[str, Any]]:
    """What reads the metadata of one generation of Qwen."""

    def config_of(fields: GgufFields, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
        _refuse_window(fields)
        config = _decoder_config(fields, architecture, model_type)
        config |= {"hidden_act": "silu", "rope_parameters": _rope_parameters(fields, config, tensors)}
        config |= {"use_sliding_window": False, "sliding_window": None}
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
        if model_type == "qwen3":
            config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        return config

    return config_of


def gemma2_config(fields: GgufFields, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Gemma 2."""
    config = _decoder_config(fields, "Gemma2ForCausalLM", "gemma2")
    # The defaults are llama.cpp's and the original model's; old files do not say.
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "rope_parameters": _rope_parameters(fields, config, tensors),
        "query_pre_attn_scalar": _gemma_query_scalar(config, layers_of_27b=46),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
        "sliding_window": fields.integer("attention.sliding_window", 4096),
        "layer_types": _layer_types(fields, config["num_hidden_layers"], period=2),
    }


def gemma3_config(fields: GgufFields, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Gemma 3 without its vision tower."""
    config = _decoder_config(fields, "Gemma3ForCausalLM", "gemma3_text")
    local = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10000.0)}
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "rope_parameters": {
            "full_attention": _rope_parameters(fields, config, tensors),
            "sliding_attention": local,
        },
        "query_pre_attn_scalar": _gemma_query_scalar(config, layers_of_27b=62),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 0.0) or None,
        "final_logit_softcapping": fields.number("final_logit_softcapping", 0.0) or None,
        "sliding_window": fields.integer("attention.sliding_window"),
        "layer_types": _layer_types(fields, config["num_hidden_layers"], period=6),
    }


def gpt2_config(fields: GgufFields, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """GPT-2."""
    _refuse_window(fields)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": fields.integer("embedding_length"),
        "n_inner": fields.integer("feed_forward_length"),
        "n_layer": fields.integer("block_count"),
        "n_head": fields.integer("attention.head_count"),
        "n_positions": fields.integer("context_length"),
        "layer_norm_epsilon": fields.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _decoder_config(fields: GgufFields, architecture: str, model_type: str) -> dict[str, Any]:
    """What all rotary, RMS-normalized families have in common."""
    hidden_size, num_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := fields.integer(key, head_dim)) != head_dim:
            raise UnsupportedFeature(f"GGUF metadata {fields.name(key)} {value} differs from the head size {head_dim}")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
    }


def _refuse_window(fields: GgufFields) -> None:
    if window := fields.integer("attention.sliding_window", 0, minimum=0):
        raise UnsupportedFeature(
            f"GGUF metadata {fields.name('attention.sliding_window')} {window}: this architecture has no window here"
        )


def _gemma_query_scalar(config: Mapping[str, Any], *, layers_of_27b: int) -> int:
    """The files do not hold it; llama.cpp tells the 27B models, the only ones that differ, by their depth."""
    if config["num_hidden_layers"] == layers_of_27b:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def _layer_types(fields: GgufFields, num_layers: int, *, period: int) -> list[str]:
    """Every `period`-th layer sees everything, the others a window."""
    period = fields.integer("attention.sliding_window_pattern", period)
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)]


# ------------------------------------------------------------------------------------------------------------ rope


def _rope_parameters(
    fields: GgufFields, config: Mapping[str, Any], tensors: Mapping[str, GgufTensor]
) -> dict[str, Any]:
    theta = fields.number("rope.freq_base", 10000.0)
    kind = fields.get("rope.scaling.type") or "none"
    if "rope_freqs.weight" in tensors:
        if kind != "none":
            raise UnsupportedFeature(f"rope_freqs.weight together with {fields.name('rope.scaling.type')} {kind!r}")
        return _llama3_rope(tensors["rope_freqs.weight"], theta, config["head_dim"])
    if kind == "none":
        factor = fields.number("rope.scale_linear", 1.0)  # the key before there were types
        if factor != 1.0:
            return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        return _yarn_rope(fields, theta, config["max_position_embeddings"])
    raise UnsupportedFeature(
        f"GGUF metadata {fields.name('rope.scaling.type')} {kind!r} is not supported; supported are none, linear, yarn"
    )


def _yarn_rope(fields: GgufFields, theta: float, context_length: int) -> dict[str, Any]:
    factor = fields.number("rope.scaling.factor")
    if factor < 1:
        raise InvalidArgument(f"GGUF metadata {fields.name('rope.scaling.factor')} {factor} is less than 1")
    for key, neutral in (("yarn_ext_factor", (1.0, -1.0)), ("yarn_log_multiplier", (0.0,))):
        if (value := fields.get(f"rope.scaling.{key}")) is not None and value not in neutral:
            raise UnsupportedFeature(f"GGUF metadata {fields.name(f'rope.scaling.{key}')} {value} is not supported")
    parameters = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": fields.integer("rope.scaling.original_context_length", context_length),
    }
    for key in ("beta_fast", "beta_slow"):
        if fields.get(f"rope.scaling.yarn_{key}") is not None:
            parameters[key] = fields.number(f"rope.scaling.yarn_{key}")
    attention = fields.number("rope.scaling.yarn_attn_factor", fields.number("rope.scaling.attn_factor", 1.0))
    if attention != 1.0:
        # llama.cpp multiplies YaRN's own magnitude, transformers replaces it.
        parameters["attention_factor"] = attention * (1 + 0.1 * math.log(factor))
    return parameters


def _llama3_rope(tensor: GgufTensor, theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters whose per-frequency factors are those of the tensor.

    The converter stores the factors only. All published models share the band (1, 4, 8192) and differ in the factor,
    which is what the slowest frequency is divided by.
    """
    factors = tensor.dequantize().reshape(-1).astype(np.float64)
    factor, low, high, original = float(factors.max(initial=1.0)), 1.0, 4.0, 8192
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise UnsupportedFeature(
            f"rope_freqs.weight {tensor.shape} is not the Llama 3 scaling of {head_dim // 2} frequencies with low and "
            f"high factors {low:g} and {high:g} and original length {original}"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
