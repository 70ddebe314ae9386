"""Settings that configs of several kinds of model share, read and checked.

Each raises UnsupportedFeature for what is not implemented and InvalidArgument for what is malformed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openengine.core.models.fields import Fields
from openengine.errors import InvalidArgument, UnsupportedFeature
from openengine.ops.activation import ACTIVATIONS
from openengine.ops.rope import ROPE_TYPES, RopeConfig

__all__ = ["read_activation", "read_layer_types", "read_norm_eps", "read_rope", "refuse_settings", "whole_ratio"]

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


# Settings of other models, or of rarely used variants, with the values that leave the computation as it is here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "is_encoder_decoder": (False,),
    "num_experts": (0, 1),
    "pruned_heads": ({},),
    "quantization_config": ({},),
}


def refuse_settings(fields: Fields, neutral: Mapping[str, tuple[Any, ...]], model_type: str) -> None:
    """Refuse settings with a value beside those that change nothing here: `neutral`, and what goes for every kind of model."""
    for name, values in {**_NEUTRAL, **neutral}.items():
        value = fields.values.get(name)
        if value is not None and value not in values:
            what = f"{value.get('quant_method', value)!r}" if isinstance(value, Mapping) else repr(value)
            raise UnsupportedFeature(f"config: '{name}' {what} is not implemented for {model_type}")


def whole_ratio(fields: Fields, name: str, by: str) -> int:
    """A head's size where the config does not give it: one field over another, without rest."""
    value, divisor = fields.integer(name), fields.integer(by)
    if value % divisor:
        raise InvalidArgument(f"{name} {value} is not a multiple of {by} {divisor}, and 'head_dim' is absent")
    return value // divisor


def read_norm_eps(fields: Fields, key: str) -> float:
    """What is added to a variance: small beside it."""
    value = fields.number(key)
    if value >= 1:
        raise InvalidArgument(f"config: '{key}' is {value!r}, expected a number below 1")
    return value


def read_activation(fields: Fields, key: str, default: str) -> str:
    """The activation under `key`, one of ops.activation's."""
    name = fields.text_or_none(key)
    name = default if name is None else name
    if name not in ACTIVATIONS:
        raise UnsupportedFeature(f"activation {name!r:.80} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return name


def read_layer_types(fields: Fields, num_layers: int) -> list[str] | None:
    """`full_attention` or `sliding_attention` for each layer; None if the config does not say."""
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


def read_rope(fields: Fields, parameters: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """One rotary embedding; keys of `parameters` go before those of the config itself."""
    unknown = sorted(set(parameters) - _ROPE_KEYS)
    if unknown:
        raise UnsupportedFeature(f"rope parameter {', '.join(map(repr, unknown))} is not implemented")
    named = Fields(parameters, where="config: rope parameters")
    kinds = (named.text_or_none("rope_type"), named.text_or_none("type"), "default")
    kind = next(kind for kind in kinds if kind is not None)
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
