"""`EncoderConfig`: one frozen description of an encoder, read from a checkpoint's config dictionary.

As with `ModelConfig`, a setting that changes the computation is either described here exactly or refused, and defaults
for absent keys are those of the config classes in transformers.
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

__all__ = ["EncoderConfig"]


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """What an encoder computes. One entry per layer in `windows` and `layer_ropes`.

    `max_position_embeddings` is the greatest length of an item in tokens. The table of learned positions has
    `num_positions` rows (0: none), of which the first token uses row `first_position`.
    In a layer with a window, a token attends to those at most `windows[i]` tokens before and after it.
    `layer_ropes[i]` indexes `ropes`, which is empty for learned positions. `num_labels` is 0 unless the head is a
    classifier. `tie_word_embeddings` is what the config says; what the checkpoint holds decides.
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
    head_dim: int
    max_position_embeddings: int
    num_positions: int
    first_position: int
    pad_token_id: int | None  # only where positions skip it
    num_token_types: int  # 0: the model has no embedding of token types
    num_position_buckets: int  # of the bias by distance; 0: none
    norm_eps: float
    activation: str  # a key of ops.activation.ACTIVATIONS, as is the next
    classifier_activation: str
    classifier_pooling: str  # "cls" or "mean"
    classifier_bias: bool
    decoder_bias: bool
    attention_bias: bool
    mlp_bias: bool
    norm_bias: bool
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig, ...]
    layer_ropes: tuple[int, ...]
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> EncoderConfig:
        """Read a Hugging Face config.

        Raises:
            UnsupportedFeature: the architecture or a setting is not implemented.
            InvalidArgument: a field is missing or has the wrong type or value.
        """
        architecture = Architecture.of(hf_config)
        family = _FAMILIES[architecture.model_type]
        values = {family.names.get(key, key): value for key, value in hf_config.items()}
        fields = Fields({**_COMMON, **family.defaults, **values})
        refuse_settings(fields, {**_NEUTRAL, **family.neutral}, architecture.model_type)

        num_layers = fields.integer("num_hidden_layers")
        head_dim = whole_ratio(fields, "hidden_size", "num_attention_heads")
        num_rows = fields.integer("max_position_embeddings")
        pad_token_id = _padding_id(fields, family)
        first_position = 0 if pad_token_id is None else pad_token_id + 1
        if first_position >= num_rows:
            raise InvalidArgument(f"positions begin at pad_token_id + 1, but there are only {num_rows} of them")
        windows = _windows(fields, num_layers) if family.has_rope else (None,) * num_layers
        return cls(
            architecture=architecture.name,
            model_type=architecture.model_type,
            head_kind=architecture.head_kind,
            num_labels=architecture.num_labels(hf_config),
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=fields.integer("num_attention_heads"),
            head_dim=head_dim,
            max_position_embeddings=num_rows - first_position,
            num_positions=0 if family.has_rope else num_rows,
            first_position=first_position,
            pad_token_id=pad_token_id,
            num_token_types=fields.integer("type_vocab_size") if family.has_token_types else 0,
            num_position_buckets=fields.integer_or_none("relative_attention_num_buckets") or 0,
            norm_eps=read_norm_eps(fields, "norm_eps"),
            activation=read_activation(fields, "hidden_act", "gelu"),
            classifier_activation=read_activation(fields, "classifier_activation", "gelu"),
            classifier_pooling=_classifier_pooling(fields),
            classifier_bias=fields.flag("classifier_bias", True),
            decoder_bias=fields.flag("decoder_bias", True),
            attention_bias=fields.flag("attention_bias", True),
            mlp_bias=fields.flag("mlp_bias", True),
            norm_bias=fields.flag("norm_bias", True),
            windows=windows,
            ropes=_ropes(fields, head_dim) if family.has_rope else (),
            layer_ropes=tuple(0 if window is None else 1 for window in windows) if family.has_rope else (),
            tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        )

    @property
    def num_values(self) -> int:
        """How many weights it speaks of, roughly: those of the tables and of the layers' matrices."""
        per_layer = 4 * self.hidden_size + 2 * self.intermediate_size
        rows = self.vocab_size + self.num_positions + self.num_token_types + self.num_labels
        return self.hidden_size * (rows + self.num_layers * per_layer)


@dataclass(frozen=True, slots=True)
class _Family:
    """One model_type: its config's other names, its defaults, and what its config does not spell out.

    Positions of a family with `padding` begin after the id that pads, and skip it: the config's, or a fixed one.
    `neutral` adds to the settings that are refused unless they change nothing.
    """

    defaults: dict[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    padding: int | str | None = None
    has_token_types: bool = False
    has_rope: bool = False


_COMMON: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "norm_eps": 1e-12,
    "classifier_pooling": "cls",
}
_PLAIN: dict[str, tuple[Any, ...]] = {  # what only ModernBERT reads, with the values that others have anyway
    "attention_bias": (True,),
    "classifier_bias": (True,),
    "classifier_pooling": ("cls",),
    "layer_types": (),
    "mlp_bias": (True,),
    "norm_bias": (True,),
    "rope_parameters": ({},),
    "rope_scaling": ({},),
    "rope_theta": (),
}
_FIXED_BUCKETS = {"relative_attention_num_buckets": (32,)}  # transformers computes 32, whatever a config says
_NO_BUCKETS: dict[str, tuple[Any, ...]] = {"relative_attention_num_buckets": ()}

_EPS = {"layer_norm_eps": "norm_eps"}
_ROBERTA = _Family(
    {"vocab_size": 50265, "type_vocab_size": 2, "pad_token_id": 1},
    names=_EPS,
    neutral={**_PLAIN, **_NO_BUCKETS},
    padding="pad_token_id",
    has_token_types=True,
)

_FAMILIES: dict[str, _Family] = {
    "bert": _Family(
        {"vocab_size": 30522, "type_vocab_size": 2},
        names=_EPS,
        neutral={**_PLAIN, **_NO_BUCKETS},
        has_token_types=True,
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "mpnet": _Family(
        {"vocab_size": 30527, "relative_attention_num_buckets": 32},
        names=_EPS,
        neutral={**_PLAIN, **_FIXED_BUCKETS},
        padding=1,
    ),
    "distilbert": _Family(
        {"vocab_size": 30522, "num_hidden_layers": 6},
        names={
            "dim": "hidden_size",
            "hidden_dim": "intermediate_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "activation": "hidden_act",
        },
        neutral={**_PLAIN, **_NO_BUCKETS, "layer_norm_eps": (1e-12,)},
    ),
    "modernbert": _Family(
        {
            "vocab_size": 50368,
            "intermediate_size": 1152,
            "num_hidden_layers": 22,
            "max_position_embeddings": 8192,
            "norm_eps": 1e-5,
            "attention_bias": False,
            "classifier_bias": False,
            "mlp_bias": False,
            "norm_bias": False,
            "local_attention": 128,
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0,
        },
        names={"hidden_activation": "hidden_act"},
        neutral=_NO_BUCKETS,
        has_rope=True,
    ),
}

# Beside those that are refused of every kind of model (settings.py).
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_window": (),
    "emb_pooler": (),
    "embedding_size": (),
    "feed_forward_type": ("original",),
    "is_causal": (False,),
    "is_decoder": (False,),
    "layer_norm_type": ("layer_norm",),
    "lora_adaptations": ([],),
    "num_key_value_heads": (),
    "position_embedding_type": ("absolute",),
    "relative_attention": (False,),
    "use_rms_norm": (False,),
}


def _padding_id(fields: Fields, family: _Family) -> int | None:
    if not isinstance(family.padding, str):
        return family.padding
    value = fields.values.get(family.padding)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgument(f"config: '{family.padding}' is {value!r}, expected a token id: positions begin after it")
    return value


def _classifier_pooling(fields: Fields) -> str:
    pooling = fields.text_or_none("classifier_pooling")
    if pooling not in ("cls", "mean"):
        raise UnsupportedFeature(f"config: 'classifier_pooling' {pooling!r} is not supported; supported: cls, mean")
    return pooling


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """How far each layer looks to either side: half of `local_attention` in sliding ones."""
    types = read_layer_types(fields, num_layers)
    if types is None:
        period = fields.integer("global_attn_every_n_layers")
        types = ["sliding_attention" if layer % period else "full_attention" for layer in range(num_layers)]
    reach = fields.integer("local_attention") // 2
    return tuple(reach if name == "sliding_attention" else None for name in types)


def _ropes(fields: Fields, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """The rotary embeddings of full and of sliding layers."""
    given = fields.values.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or set(given) - {"full_attention", "sliding_attention"}:
        raise InvalidArgument(
            f"config: 'rope_parameters' is {given!r}, expected an object for full_attention and for sliding_attention"
        )
    scaling = fields.values.get("rope_scaling") or {}
    ropes = []
    for layer_type, theta in (("full_attention", "global_rope_theta"), ("sliding_attention", "local_rope_theta")):
        parameters = given.get(layer_type) or {}
        if not isinstance(parameters, Mapping) or not isinstance(scaling, Mapping):
            raise InvalidArgument(f"config: rope parameters of {layer_type} are {parameters!r}, expected an object")
        ropes.append(read_rope(fields, {"rope_theta": fields.number(theta), **parameters, **scaling}, head_dim))
    return ropes[0], ropes[1]
