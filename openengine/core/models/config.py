"""`ModelConfig`: one frozen description of a decoder, read from a checkpoint's config dictionary.

Owns what each architecture's config means: names, defaults, windows, rotary embeddings, and which settings are not
implemented. A setting that changes the computation is either described here exactly or refused; none is skipped.
Defaults for absent keys are those of the architecture's config class in transformers, which omits defaults on save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from openengine.core.models.fields import Fields
from openengine.errors import InvalidArgument, UnsupportedFeature
from openengine.ops.activation import ACTIVATIONS
from openengine.ops.rope import ROPE_TYPES, RopeConfig

__all__ = ["ARCHITECTURES", "ModelConfig"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a decoder computes. One entry per layer in `windows` and `layer_ropes`.

    `windows[i]` is the number of latest tokens, itself included, that a token of layer i attends to; None is all.
    `layer_ropes[i]` indexes `ropes`, which is empty for learned positions. `tie_word_embeddings` is what the
    config says; what the checkpoint holds decides.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    activation: str  # a key of ops.activation.ACTIVATIONS
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    attention_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    embed_scale: float | None
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig, ...]
    layer_ropes: tuple[int, ...]
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face config.

        Raises:
            UnsupportedFeature: the architecture, rope type, activation or a setting is not implemented.
            InvalidArgument: a field is missing or has the wrong type or value.
        """
        values = _flatten(hf_config)
        architecture = _architecture(values)
        family = _FAMILIES[architecture]
        values = {family.names.get(key, key): value for key, value in values.items()}
        fields = Fields({**family.defaults, **values})
        _refuse_unsupported(fields, family)

        num_layers = fields.integer("num_hidden_layers")
        num_heads = fields.integer("num_attention_heads")
        hidden_size = fields.integer("hidden_size")
        num_kv_heads = fields.integer_or_none("num_key_value_heads") or num_heads
        head_dim = fields.integer_or_none("head_dim") or _divide(fields, "hidden_size", "num_attention_heads")
        if num_heads % num_kv_heads:
            raise InvalidArgument(
                f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        layer_types = _layer_types(fields, num_layers)
        windows = _windows(fields, family, layer_types, num_layers)
        ropes, layer_ropes = _ropes(fields, family, head_dim, windows)
        attention_bias = "attention_bias" in family.bias_keys and fields.flag("attention_bias", False)
        mlp_bias = "mlp_bias" in family.bias_keys and fields.flag("mlp_bias", False)
        return cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer_or_none("intermediate_size") or _default_width(fields, family),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=fields.integer("max_position_embeddings"),
            norm_eps=fields.number("rms_norm_eps"),
            activation=_activation(fields, family),
            qkv_bias=family.qkv_bias or attention_bias,
            attention_output_bias=family.other_bias or attention_bias,
            mlp_bias=family.other_bias or mlp_bias,
            qk_norm=family.qk_norm,
            attention_scale=(fields.number("query_pre_attn_scalar") if family.is_gemma else head_dim) ** -0.5,
            attention_softcap=fields.number_or_none("attn_logit_softcapping"),
            final_softcap=fields.number_or_none("final_logit_softcapping"),
            embed_scale=hidden_size**0.5 if family.is_gemma else None,
            windows=windows,
            ropes=ropes,
            layer_ropes=layer_ropes,
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        )


@dataclass(frozen=True, slots=True)
class _Family:
    """One architecture: its config's other names, its defaults, and what its config does not spell out."""

    model_type: str
    defaults: dict[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)
    activation_key: str = "hidden_act"
    window_rule: str = "none"  # which layers slide when layer_types is absent
    bias_keys: tuple[str, ...] = ()  # the config's flags that this architecture reads
    qkv_bias: bool = False
    other_bias: bool = False
    qk_norm: bool = False
    is_gemma: bool = False
    has_rope: bool = True
    local_theta: float | None = None  # default base of sliding layers, where they have their own
    softcaps: tuple[str, ...] = ()


_LLAMA = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0}
_QWEN = {
    **_LLAMA,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_MISTRAL = {**_LLAMA, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
_GEMMA = {
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
}

_FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family("llama", _LLAMA, bias_keys=("attention_bias", "mlp_bias")),
    "Qwen2ForCausalLM": _Family("qwen2", _QWEN, window_rule="upper", qkv_bias=True),
    "Qwen3ForCausalLM": _Family(
        "qwen3", {**_QWEN, "head_dim": 128}, window_rule="upper", bias_keys=("attention_bias",), qk_norm=True
    ),
    "MistralForCausalLM": _Family("mistral", _MISTRAL, window_rule="all"),
    "MinistralForCausalLM": _Family("ministral", _MISTRAL, window_rule="all"),
    "Gemma2ForCausalLM": _Family(
        "gemma2",
        {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2},
        activation_key="hidden_activation",
        bias_keys=("attention_bias",),
        window_rule="pattern",
        is_gemma=True,
        softcaps=("attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "Gemma3ForCausalLM": _Family(
        "gemma3_text",
        {**_GEMMA, "max_position_embeddings": 131072, "rope_theta": 1e6, "sliding_window_pattern": 6},
        activation_key="hidden_activation",
        bias_keys=("attention_bias",),
        window_rule="pattern",
        qk_norm=True,
        is_gemma=True,
        local_theta=10000.0,
        softcaps=("final_logit_softcapping",),
    ),
    "GPT2LMHeadModel": _Family(
        "gpt2",
        {
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": True,
            "intermediate_size": None,
        },
        {
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "n_inner": "intermediate_size",
            "layer_norm_epsilon": "rms_norm_eps",
            "activation_function": "hidden_act",
        },
        qkv_bias=True,
        other_bias=True,
        has_rope=False,
    ),
}

ARCHITECTURES = tuple(_FAMILIES)

# Settings of other models, or of rarely used variants, with the values that leave the computation as it is here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attention_sinks": (False,),
    "block_configs": (),
    "clip_qkv": (),
    "compression_config": (),
    "embedding_multiplier": (1,),
    "is_encoder_decoder": (False,),
    "kv_lora_rank": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "no_rope_layers": ([],),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "parallel_attn": (False,),
    "per_layer_config": ({},),
    "position_embedding_type": ("absolute", "rope"),
    "pruned_heads": ({},),
    "q_lora_rank": (),
    "qk_layernorm": (False,),
    "quantization_config": ({},),
    "residual_multiplier": (1,),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "scale_depth": (),
    "scale_emb": (1,),
    "use_bidirectional_attention": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
}


def _flatten(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with a nested text_config's values on top, which describe the decoder."""
    nested = hf_config.get("text_config")
    if nested is None:
        return dict(hf_config)
    if not isinstance(nested, Mapping):
        raise InvalidArgument(f"config: 'text_config' is {nested!r}, expected an object")
    outer = {key: value for key, value in hf_config.items() if key != "text_config"}
    return {**outer, **nested, "architectures": outer.get("architectures") or nested.get("architectures")}


def _architecture(values: Mapping[str, Any]) -> str:
    names = values.get("architectures")
    if not names:
        model_type = values.get("model_type")
        names = [name for name, family in _FAMILIES.items() if family.model_type == model_type]
        if not names:
            raise UnsupportedFeature(
                f"config names no architecture, and model_type {model_type!r} is not supported; "
                f"supported architectures: {', '.join(ARCHITECTURES)}"
            )
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f"config: 'architectures' is {names!r}, expected a list of names")
    for name in names:
        if name in _FAMILIES:
            return name
    raise UnsupportedFeature(f"architecture {', '.join(names)} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(fields: Fields, family: _Family) -> None:
    for name, neutral in _NEUTRAL.items():
        value = fields.values.get(name)
        if value is not None and value not in neutral:
            what = f"{value.get('quant_method', value)!r}" if isinstance(value, Mapping) else repr(value)
            raise UnsupportedFeature(f"config: '{name}' {what} is not implemented for {family.model_type}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.values.get(name) is not None and name not in family.softcaps:
            raise UnsupportedFeature(f"config: '{name}' is not implemented for {family.model_type}")


def _divide(fields: Fields, name: str, by: str) -> int:
    value, divisor = fields.integer(name), fields.integer(by)
    if value % divisor:
        raise InvalidArgument(f"{name} {value} is not a multiple of {by} {divisor}, and 'head_dim' is absent")
    return value // divisor


def _default_width(fields: Fields, family: _Family) -> int:
    if family.has_rope:
        return fields.integer("intermediate_size")
    return 4 * fields.integer("hidden_size")


def _activation(fields: Fields, family: _Family) -> str:
    name = fields.text_or_none(family.activation_key) or family.defaults[family.activation_key]
    if name not in ACTIVATIONS:
        raise UnsupportedFeature(f"activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return name


def _layer_types(fields: Fields, num_layers: int) -> list[str] | None:
    types = fields.values.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, (list, tuple)) or len(types) != num_layers:
        raise InvalidArgument(f"config: 'layer_types' is {types!r}, expected one name for each of {num_layers} layers")
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise UnsupportedFeature(
                f"layer type {name!r} is not supported; supported: full_attention, sliding_attention"
            )
    return list(types)


def _windows(fields: Fields, family: _Family, layer_types: list[str] | None, num_layers: int) -> tuple[int | None, ...]:
    window = fields.integer_or_none("sliding_window")
    if family.window_rule == "upper" and not fields.flag("use_sliding_window", False):
        window = None
    if layer_types is not None:
        slides = [name == "sliding_attention" for name in layer_types]
        if any(slides) and window is None:
            raise InvalidArgument("config: 'layer_types' has sliding_attention but no 'sliding_window' is in force")
    elif window is None or family.window_rule == "none":
        slides = [False] * num_layers
    elif family.window_rule == "all":
        slides = [True] * num_layers
    elif family.window_rule == "upper":
        first = fields.values.get("max_window_layers")
        if isinstance(first, bool) or not isinstance(first, int):
            raise InvalidArgument(f"config: 'max_window_layers' is {first!r}, expected an integer")
        slides = [layer >= first for layer in range(num_layers)]
    else:
        pattern = fields.integer("sliding_window_pattern")
        slides = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    return tuple(window if slide else None for slide in slides)


def _ropes(
    fields: Fields, family: _Family, head_dim: int, windows: tuple[int | None, ...]
) -> tuple[tuple[RopeConfig, ...], tuple[int, ...]]:
    """The rotary embeddings, and which one each layer uses."""
    if not family.has_rope:
        return (), ()
    scaling = fields.values.get("rope_scaling") or fields.values.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise InvalidArgument(f"config: 'rope_scaling' is {scaling!r}, expected an object")
    local: Mapping[str, Any] = {}
    if nested := [name for name in ("full_attention", "sliding_attention") if name in scaling]:
        if unknown := sorted(set(scaling) - set(nested)):
            raise UnsupportedFeature(f"rope parameters for {', '.join(unknown)} are not implemented")
        for name in nested:
            if not isinstance(scaling[name], (Mapping, type(None))):
                raise InvalidArgument(f"config: rope parameters of {name} are {scaling[name]!r}, expected an object")
        if family.local_theta is None and None in scaling.values():
            raise UnsupportedFeature("layers without rotary positions (rope parameters of null) are not implemented")
        scaling, local = scaling.get("full_attention") or {}, scaling.get("sliding_attention") or {}
    elif family.local_theta is None:
        return (_rope(fields, scaling, head_dim),), (0,) * len(windows)
    local_theta = fields.number_or_none("rope_local_base_freq") or family.local_theta
    if local_theta is not None:
        local = {"rope_theta": local_theta, **local}
    ropes = (_rope(fields, scaling, head_dim), _rope(fields, local, head_dim))
    return ropes, tuple(0 if window is None else 1 for window in windows)


_ROPE_KEYS = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "finetuned",  # of the original YaRN checkpoints: a remark
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "short_factor",
    "truncate",
    "type",
}
_ROPE_ALIASES = {"su": "longrope"}  # the first Phi-3 configs' name


def _rope(fields: Fields, parameters: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """One rotary embedding; keys of `parameters` go before those of the config itself."""
    unknown = sorted(set(parameters) - _ROPE_KEYS)
    if unknown:
        raise UnsupportedFeature(f"rope parameter {', '.join(map(repr, unknown))} is not implemented")
    named = Fields(parameters, where="config: rope parameters")
    kind = named.text_or_none("rope_type") or named.text_or_none("type") or "default"
    kind = _ROPE_ALIASES.get(kind, kind)
    if kind not in ROPE_TYPES:
        raise UnsupportedFeature(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    outer = {name: fields.values.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    rope = Fields({**outer, **parameters}, where=f"config: rope parameters of type {kind}")

    length = fields.integer("max_position_embeddings")
    original = (
        fields.integer_or_none("original_max_position_embeddings")
        or rope.integer_or_none("original_max_position_embeddings")
        or length
    )
    factor = rope.number_or_none("factor")
    if factor is None:
        factor = length / original if kind in ("yarn", "longrope") else 1.0
        if kind in ("linear", "dynamic", "llama3"):
            rope.number("factor")
    rotary_dim = int(head_dim * (rope.number_or_none("partial_rotary_factor") or 1.0))
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise InvalidArgument(f"rotary dimension {rotary_dim} of head_dim {head_dim} must be even, from 2 to head_dim")
    is_longrope, is_llama3 = kind == "longrope", kind == "llama3"
    return RopeConfig(
        type=kind,
        theta=rope.number("rope_theta"),
        rotary_dim=rotary_dim,
        max_position_embeddings=length,
        original_max_position_embeddings=original,
        factor=factor,
        attention_factor=rope.number_or_none("attention_factor"),
        beta_fast=rope.number_or_none("beta_fast") or 32.0,
        beta_slow=rope.number_or_none("beta_slow") or 1.0,
        mscale=rope.number_or_none("mscale"),
        mscale_all_dim=rope.number_or_none("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
        low_freq_factor=rope.number("low_freq_factor") if is_llama3 else 1.0,
        high_freq_factor=rope.number("high_freq_factor") if is_llama3 else 4.0,
        short_factor=rope.numbers("short_factor", rotary_dim // 2) if is_longrope else (),
        long_factor=rope.numbers("long_factor", rotary_dim // 2) if is_longrope else (),
    )
