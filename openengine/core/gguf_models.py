"""GGUF models in Hugging Face terms: the config, the parameters' names and values, the generation defaults.

Owns what llama.cpp's converter (`convert_hf_to_gguf.py`) did to each architecture, and undoes it, so that everything
after the loader knows one vocabulary of names and one layout. The file format itself is in `gguf`.

What the converter changes in values:
    llama    rows of q and k are permuted for rotary pairs that lie side by side; Llama 3's rope scaling becomes the
             tensor `rope_freqs.weight`
    gemma    norm weights are stored plus one
    gpt2     the four projections are transposed (the checkpoint's Conv1D keeps them as [in, out])
A tied output matrix is left out of the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from openengine.core.gguf import GgufFile, GgufTensor
from openengine.errors import InvalidArgument, UnsupportedFeature

__all__ = ["CONFIG_TENSORS", "SUPPORTED_ARCHITECTURES", "HfTensor", "generation_defaults", "hf_config", "hf_tensors"]

# Tensors that are configuration: `hf_config` reads them, `hf_tensors` leaves them out.
CONFIG_TENSORS = frozenset({"rope_freqs.weight"})


@dataclass(frozen=True, slots=True, eq=False)
class HfTensor:
    """One parameter under its Hugging Face name, still in the file until `load`."""

    name: str
    shape: tuple[int, ...]  # in the Hugging Face layout
    source: GgufTensor
    _relayout: Callable[[np.ndarray], np.ndarray] | None = None
    _offset: float = 0.0

    def chunks(self, max_values: int) -> Iterator[tuple[slice, np.ndarray]]:
        """Ranges of the first dimension with their values, float32, of about `max_values` each.

        Each array is overwritten by the next. A tensor whose layout differs from the file's comes whole.
        """
        if self._relayout is not None or len(self.shape) < 2:
            yield slice(None), self.load()
            return
        num_rows, row_values = self.shape[0], math.prod(self.shape[1:])
        step = max(1, min(num_rows, max_values // row_values))
        buffer = np.empty((step, *self.shape[1:]), np.float32)
        for start in range(0, num_rows, step):
            rows = slice(start, min(start + step, num_rows))
            values = self.source.dequantize(buffer[: rows.stop - rows.start], rows=rows)
            if self._offset:
                values += np.float32(self._offset)
            yield rows, values

    def load(self, out: np.ndarray | None = None) -> np.ndarray:
        """Values as C-contiguous float32 in `shape`: a new array, or `out` (C-contiguous float32 of that shape).

        Raises:
            InvalidArgument: `out` does not fit.
        """
        if self._relayout is None:
            values = self.source.dequantize(out)
        elif out is None:
            values = np.ascontiguousarray(self._relayout(self.source.dequantize()))
        elif out.shape != self.shape or out.dtype != np.float32:
            raise InvalidArgument(f"out for {self.name!r} must be float32 {self.shape}, not {out.dtype} {out.shape}")
        else:
            values = out
            values[...] = self._relayout(self.source.dequantize())
        if self._offset:
            values += np.float32(self._offset)
        return values


def hf_config(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """The `config.json` this model would have, in the keys of its transformers config class (version 5).

    Rotary parameters are in `rope_parameters` (one dict, or one per layer type for Gemma 3). Numbers stored as
    float32 are given as such, so an epsilon of 1e-5 reads 9.999999747378752e-06.

    Raises:
        InvalidArgument: a needed key is absent or has the wrong type.
        UnsupportedFeature: an architecture that is not in `SUPPORTED_ARCHITECTURES`, or a variation of one.
    """
    family = _family(metadata)
    fields = _Fields(metadata, _architecture(metadata))
    for key, neutral in _NEUTRAL.items():
        if (value := fields.get(key)) is not None and value not in neutral:
            raise UnsupportedFeature(f"GGUF metadata {fields.name(key)} is {value!r}; only {neutral[0]!r} is supported")
    config = family.config(fields, tensors)
    config["vocab_size"] = _embedding(tensors).shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    ids = generation_defaults(metadata)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config[key] = ids.get(key)
    return config


def hf_tensors(gguf: GgufFile) -> list[HfTensor]:
    """Every parameter of the file, in file order, to be loaded one by one.

    Raises:
        InvalidArgument: a shape that contradicts the metadata.
        UnsupportedFeature: tensors whose name means nothing to the architecture (all are listed).
    """
    family = _family(gguf.metadata)
    fields = _Fields(gguf.metadata, _architecture(gguf.metadata))
    num_layers = fields.integer("block_count")
    known, unknown = [], []
    for name, tensor in gguf.tensors.items():
        if name in CONFIG_TENSORS:
            continue
        if (parsed := _parse_name(name, family, num_layers)) is None:
            unknown.append(name)
            continue
        hf_name, part = parsed
        known.append(family.restore(hf_name, part, tensor, fields))
    if unknown:
        raise UnsupportedFeature(
            f"GGUF architecture {fields.architecture!r} with {num_layers} layers has no use for {len(unknown)} tensors: "
            + ", ".join(unknown),
            details={"tensors": unknown},
        )
    return known


def generation_defaults(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The file's `generation_config.json`: only keys that the file sets.

    `eos_token_id` is a list: the end of sequence first, then the ends of turn and of message. `bos_token_id` and
    `pad_token_id` are numbers. Recommended sampling parameters (`general.sampling.*`) appear as `temperature`,
    `top_k`, `top_p` and `min_p`, together with `do_sample`.
    """
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom", "bos", "padding")}
    for name, token_id in ids.items():
        if token_id is not None and type(token_id) is not int:
            raise InvalidArgument(f"GGUF metadata tokenizer.ggml.{name}_token_id {token_id!r} is not a token id")
    defaults: dict[str, Any] = {}
    # dict.fromkeys keeps the order and drops repeats: the end of turn often is the end of sequence.
    if ends := list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None)):
        defaults["eos_token_id"] = ends
    for name, key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if ids[name] is not None:
            defaults[key] = ids[name]
    sampling = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    for key, name in sampling.items():
        if (value := metadata.get(f"general.sampling.{name}")) is not None:
            defaults |= {key: value, "do_sample": True}
    return defaults


# -------------------------------------------------------------------------------------------------------- metadata

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


class _Fields:
    """Typed reads of the `<architecture>.*` keys."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.architecture = architecture
        self._metadata = metadata

    def name(self, key: str) -> str:
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


def _architecture(metadata: Mapping[str, Any]) -> str:
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise InvalidArgument("GGUF metadata general.architecture is missing: the file holds no model")
    return architecture


def _family(metadata: Mapping[str, Any]) -> _Family:
    architecture = _architecture(metadata)
    if architecture not in _FAMILIES:
        raise UnsupportedFeature(
            f"GGUF architecture {architecture!r} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return _FAMILIES[architecture]


def _embedding(tensors: Mapping[str, GgufTensor]) -> GgufTensor:
    tensor = tensors.get("token_embd.weight")
    if tensor is None or len(tensor.shape) != 2:
        raise InvalidArgument("the GGUF file has no matrix token_embd.weight: it holds no complete model")
    return tensor


# --------------------------------------------------------------------------------------------------------- configs


def _decoder_config(fields: _Fields, architecture: str, model_type: str) -> dict[str, Any]:
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


def _llama_config(fields: _Fields, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
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


def _qwen_config(architecture: str, model_type: str) -> Callable[[_Fields, Mapping[str, GgufTensor]], dict[str, Any]]:
    def config_of(fields: _Fields, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
        _refuse_window(fields)
        config = _decoder_config(fields, architecture, model_type)
        config |= {"hidden_act": "silu", "rope_parameters": _rope_parameters(fields, config, tensors)}
        config |= {"use_sliding_window": False, "sliding_window": None}
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
        if model_type == "qwen3":
            config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        return config

    return config_of


def _gemma2_config(fields: _Fields, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
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


def _gemma3_config(fields: _Fields, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
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


def _gpt2_config(fields: _Fields, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
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


def _refuse_window(fields: _Fields) -> None:
    if window := fields.integer("attention.sliding_window", 0, minimum=0):
        raise UnsupportedFeature(
            f"GGUF metadata {fields.name('attention.sliding_window')} {window}: this architecture has no window here"
        )


def _gemma_query_scalar(config: Mapping[str, Any], *, layers_of_27b: int) -> int:
    """The files do not hold it; llama.cpp tells the 27B models, the only ones that differ, by their depth."""
    if config["num_hidden_layers"] == layers_of_27b:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def _layer_types(fields: _Fields, num_layers: int, *, period: int) -> list[str]:
    """Every `period`-th layer sees everything, the others a window."""
    period = fields.integer("attention.sliding_window_pattern", period)
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)]


# ------------------------------------------------------------------------------------------------------------ rope


def _rope_parameters(fields: _Fields, config: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
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


def _yarn_rope(fields: _Fields, theta: float, context_length: int) -> dict[str, Any]:
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


# --------------------------------------------------------------------------------------------------------- tensors

_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>0|[1-9]\d{0,5})\.)?(?P<part>[a-z_]+)\.(?P<kind>weight|bias)")


def _parse_name(name: str, family: _Family, num_layers: int) -> tuple[str, str] | None:
    """(Hugging Face name, GGUF part such as `attn_q`), or None if the architecture has no such tensor."""
    match = _TENSOR_NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match["layer"], match["part"], match["kind"]
    if layer is None:
        hf_part = family.outer.get(part)
        return None if hf_part is None else (f"{hf_part}.{kind}", part)
    hf_part = family.inner.get(part)
    if hf_part is None or int(layer) >= num_layers:
        return None
    return f"{family.layers}.{layer}.{hf_part}.{kind}", part


def _as_is(name: str, part: str, tensor: GgufTensor, fields: _Fields) -> HfTensor:
    return HfTensor(name, tensor.shape, tensor)


def _llama_tensor(name: str, part: str, tensor: GgufTensor, fields: _Fields) -> HfTensor:
    if part not in ("attn_q", "attn_k"):
        return HfTensor(name, tensor.shape, tensor)
    num_heads = fields.integer("attention.head_count")
    if part == "attn_k":
        num_heads = fields.integer("attention.head_count_kv", num_heads)
    num_rows = tensor.shape[0] if tensor.shape else 0
    if num_rows % (2 * num_heads):
        raise InvalidArgument(f"GGUF tensor {tensor.name!r} {tensor.shape} does not divide into {num_heads} heads")

    def split_pairs(values: np.ndarray) -> np.ndarray:
        """Rows (pair, member) of each head to rows (member, pair)."""
        pairs = values.reshape(num_heads, num_rows // num_heads // 2, 2, -1)
        return pairs.swapaxes(1, 2).reshape(values.shape)

    return HfTensor(name, tensor.shape, tensor, split_pairs)


def _gemma_tensor(name: str, part: str, tensor: GgufTensor, fields: _Fields) -> HfTensor:
    return HfTensor(name, tensor.shape, tensor, _offset=-1.0 if part.endswith("norm") else 0.0)


def _gpt2_tensor(name: str, part: str, tensor: GgufTensor, fields: _Fields) -> HfTensor:
    if part in ("attn_qkv", "attn_output", "ffn_up", "ffn_down") and name.endswith(".weight"):
        return HfTensor(name, tensor.shape[::-1], tensor, np.transpose)
    return HfTensor(name, tensor.shape, tensor)


# -------------------------------------------------------------------------------------------------------- families


@dataclass(frozen=True, slots=True)
class _Family:
    """How one GGUF architecture is said in Hugging Face terms."""

    config: Callable[[_Fields, Mapping[str, GgufTensor]], dict[str, Any]]
    layers: str
    outer: Mapping[str, str]
    inner: Mapping[str, str]
    restore: Callable[[str, str, GgufTensor, _Fields], HfTensor]


_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA = _PROJECTIONS | {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA2 = _PROJECTIONS | {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2_OUTER = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}

_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(_llama_config, "model.layers", _OUTER, _LLAMA, _llama_tensor),
    "qwen2": _Family(_qwen_config("Qwen2ForCausalLM", "qwen2"), "model.layers", _OUTER, _LLAMA, _as_is),
    "qwen3": _Family(_qwen_config("Qwen3ForCausalLM", "qwen3"), "model.layers", _OUTER, _LLAMA | _QK_NORMS, _as_is),
    "gemma2": _Family(_gemma2_config, "model.layers", _OUTER, _GEMMA2, _gemma_tensor),
    "gemma3": _Family(_gemma3_config, "model.layers", _OUTER, _GEMMA2 | _QK_NORMS, _gemma_tensor),
    "gpt2": _Family(_gpt2_config, "transformer.h", _GPT2_OUTER, _GPT2, _gpt2_tensor),
}

SUPPORTED_ARCHITECTURES: tuple[str, ...] = tuple(_FAMILIES)
