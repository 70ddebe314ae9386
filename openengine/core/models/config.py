"""`ModelConfig`: one frozen description of a decoder, read from a checkpoint's config dictionary.

Owns what each architecture's config means: names, defaults, windows, rotary embeddings, and which settings are not
implemented. A setting that changes the computation is either described here exactly or refused; none is skipped.
Defaults for absent keys are those of the architecture's config class in transformers, which omits defaults on save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from openengine.core.models.architectures import Architecture, HeadKind
from openengine.core.models.fields import Fields
from openengine.core.models.settings import (
    read_activation,
    read_layer_types,
    read_norm_eps,
    read_rope,
    refuse_settings,
    whole_ratio,
)
from openengine.errors import InvalidArgument, UnsupportedFeature
from openengine.ops.rope import RopeConfig

__all__ = ["ModelConfig"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a decoder computes. One entry per layer in `windows` and `layer_ropes`.

    `windows[i]` is the number of latest tokens, itself included, that a token of layer i attends to; None is all.
    `layer_ropes[i]` indexes `ropes`, which is empty for learned positions. `tie_word_embeddings` is what the
    config says; what the checkpoint holds decides. `num_labels` is 0 unless the head is a classifier.
    """

    architecture: str
    model_type: str  # names the family
    head_kind: HeadKind
    num_labels: int
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
        architecture = Architecture.of(values)
        family = _FAMILIES[architecture.model_type]
        values = {family.names.get(key, key): value for key, value in values.items()}
        fields = Fields({**family.defaults, **values})
        refuse_settings(fields, _NEUTRAL, architecture.model_type)
        _refuse_softcaps(fields, family, architecture.model_type)

        num_layers = fields.integer("num_hidden_layers")
        num_heads = fields.integer("num_attention_heads")
        hidden_size = fields.integer("hidden_size")
        num_kv_heads = fields.integer_or_none("num_key_value_heads") or num_heads
        head_dim = fields.integer_or_none("head_dim") or whole_ratio(fields, "hidden_size", "num_attention_heads")
        if num_heads % num_kv_heads:
            raise InvalidArgument(
                f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        layer_types = read_layer_types(fields, num_layers)
        windows = _windows(fields, family, layer_types, num_layers)
        ropes, layer_ropes = _ropes(fields, family, head_dim, windows)
        attention_bias = "attention_bias" in family.bias_keys and fields.flag("attention_bias", False)
        mlp_bias = "mlp_bias" in family.bias_keys and fields.flag("mlp_bias", False)
        return cls(
            architecture=architecture.name,
            model_type=architecture.model_type,
            head_kind=architecture.head_kind,
            num_labels=architecture.num_labels(values),
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer_or_none("intermediate_size") or _default_width(fields, family),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=fields.integer("max_position_embeddings"),
            norm_eps=read_norm_eps(fields, "rms_norm_eps"),
            activation=read_activation(fields, family.activation_key, family.defaults[family.activation_key]),
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

    @property
    def num_values(self) -> int:
        """How many weights it speaks of, roughly: those of the tables and of the layers' matrices."""
        per_layer = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim + 2 * self.intermediate_size
        return self.hidden_size * (self.vocab_size + self.num_labels + self.num_layers * per_layer)


@dataclass(frozen=True, slots=True)
class _Family:
    """One model_type: its config's other names, its defaults, and what its config does not spell out."""

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
    "llama": _Family(_LLAMA, bias_keys=("attention_bias", "mlp_bias")),
    "qwen2": _Family(_QWEN, window_rule="upper", qkv_bias=True),
    "qwen3": _Family({**_QWEN, "head_dim": 128}, window_rule="upper", bias_keys=("attention_bias",), qk_norm=True),
    "mistral": _Family(_MISTRAL, window_rule="all"),
    "ministral": _Family(_MISTRAL, window_rule="all"),
    "gemma2": _Family(
        {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2},
        activation_key="hidden_activation",
        bias_keys=("attention_bias",),
        window_rule="pattern",
        is_gemma=True,
        softcaps=("attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "gemma3_text": _Family(
        {**_GEMMA, "max_position_embeddings": 131072, "rope_theta": 1e6, "sliding_window_pattern": 6},
        activation_key="hidden_activation",
        bias_keys=("attention_bias",),
        window_rule="pattern",
        qk_norm=True,
        is_gemma=True,
        local_theta=10000.0,
        softcaps=("final_logit_softcapping",),
    ),
    "gpt2": _Family(
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

# Beside those that are refused of every kind of model (settings.py).
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attention_sinks": (False,),
    "block_configs": (),
    "clip_qkv": (),
    "compression_config": (),
    "embedding_multiplier": (1,),
    "is_causal": (True,),
    "kv_lora_rank": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "no_rope_layers": ([],),
    "num_local_experts": (0, 1),
    "parallel_attn": (False,),
    "per_layer_config": ({},),
    "position_embedding_type": ("absolute", "rope"),
    "q_lora_rank": (),
    "qk_layernorm": (False,),
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


def _refuse_softcaps(fields: Fields, family: _Family, model_type: str) -> None:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.values.get(name) is not None and name not in family.softcaps:
            raise UnsupportedFeature(f"config: '{name}' is not implemented for {model_type}")


def _default_width(fields: Fields, family: _Family) -> int:
    if family.has_rope:
        return fields.integer("intermediate_size")
    return 4 * fields.integer("hidden_size")


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
        return (read_rope(fields, scaling, head_dim),), (0,) * len(windows)
    local_theta = fields.number_or_none("rope_local_base_freq") or family.local_theta
    if local_theta is not None:
        local = {"rope_theta": local_theta, **local}
    ropes = (read_rope(fields, scaling, head_dim), read_rope(fields, local, head_dim))
    return ropes, tuple(0 if window is None else 1 for window in windows)
