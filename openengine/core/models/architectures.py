"""The names of architectures: a family, and what its head does.

    Llama ForCausalLM, Bert ForTokenClassification, Qwen3 Model, …

Any head goes with any family of its kind. A name that is put together otherwise is not supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from openengine.core.models.fields import Fields
from openengine.errors import InvalidArgument, UnsupportedFeature

__all__ = ["ARCHITECTURES", "Architecture", "HeadKind"]

# What hidden states go into: logits over the vocabulary for the next token, nothing, logits of labels for a text or
# for each token, logits over the vocabulary at each token's own place.
HeadKind = Literal["causal_lm", "none", "sequence_classification", "token_classification", "masked_lm"]

# Family -> the config's model_type.
_DECODERS = {
    "GPT2": "gpt2",
    "Gemma2": "gemma2",
    "Gemma3Text": "gemma3_text",
    "Llama": "llama",
    "Ministral": "ministral",
    "Mistral": "mistral",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
}
_ENCODERS = {
    "Bert": "bert",
    "DistilBert": "distilbert",
    "MPNet": "mpnet",
    "ModernBert": "modernbert",
    "Roberta": "roberta",
    "XLMRoberta": "xlm-roberta",
}
_CLASSIFIERS: dict[str, HeadKind] = {
    "ForSequenceClassification": "sequence_classification",
    "ForTokenClassification": "token_classification",
}
_DECODER_HEADS: dict[str, HeadKind] = {"ForCausalLM": "causal_lm", "Model": "none", **_CLASSIFIERS}
_ENCODER_HEADS: dict[str, HeadKind] = {"Model": "none", "ForMaskedLM": "masked_lm", **_CLASSIFIERS}
_IRREGULAR = {
    ("GPT2", "ForCausalLM"): "GPT2LMHeadModel",
    ("Gemma3Text", "ForCausalLM"): "Gemma3ForCausalLM",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One supported architecture. `model_type` is that of its family's configs and names the family here."""

    name: str
    model_type: str
    head_kind: HeadKind
    is_encoder: bool

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> Architecture:
        """The first of the config's architectures that is supported; without any, the usual one of its model_type.

        Raises:
            UnsupportedFeature: none is supported.
            InvalidArgument: they are no list of names.
        """
        nested = hf_config.get("text_config")
        nested = nested if isinstance(nested, Mapping) else {}
        given = [names for names in (hf_config.get("architectures"), nested.get("architectures")) if names is not None]
        names = next((names for names in given if names != []), None)
        if names is None:
            model_type = nested.get("model_type") or hf_config.get("model_type")
            found = [item for item in ARCHITECTURES.values() if item.model_type == model_type]
            if not found:
                raise UnsupportedFeature(
                    f"config names no architecture, and model_type {model_type!r} is not supported; {_supported()}"
                )
            return found[0]
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise InvalidArgument(f"config: 'architectures' is {names!r}, expected a list of names")
        for name in names:
            if name in ARCHITECTURES:
                return _checked(ARCHITECTURES[name], nested.get("model_type") or hf_config.get("model_type"))
        raise UnsupportedFeature(f"architecture {', '.join(names)} is not supported; {_supported()}")

    def num_labels(self, hf_config: Mapping[str, Any]) -> int:
        """How many labels a classifier's config has, 0 for other heads.

        Two where it says nothing, which transformers leaves out on save. Raises InvalidArgument for a malformed field.
        """
        if not self.head_kind.endswith("classification"):
            return 0
        labels = hf_config.get("id2label")
        if labels is None:
            return Fields(hf_config).integer_or_none("num_labels") or 2
        if not isinstance(labels, Mapping) or not labels:
            raise InvalidArgument(f"config: 'id2label' is {labels!r:.80}, expected an object of label names by id")
        return len(labels)


def _checked(architecture: Architecture, model_type: object) -> Architecture:
    # Libraries go by either of the two, so that where they differ nobody knows which model it is.
    if model_type is not None and model_type != architecture.model_type:
        raise InvalidArgument(
            f"config: 'model_type' is {model_type!r:.80}, and {architecture.name} is a {architecture.model_type}; correct one"
        )
    return architecture


def _name(family: str, head: str) -> str:
    return _IRREGULAR.get((family, head), f"{family}{head}")


# The usual architecture of a model_type comes first.
ARCHITECTURES: Mapping[str, Architecture] = {
    _name(family, head): Architecture(_name(family, head), model_type, kind, families is _ENCODERS)
    for families, heads in ((_DECODERS, _DECODER_HEADS), (_ENCODERS, _ENCODER_HEADS))
    for family, model_type in families.items()
    for head, kind in heads.items()
}


def _supported() -> str:
    decoders = ", ".join(_name(family, "ForCausalLM") for family in _DECODERS)
    return (
        f"supported decoders: {decoders}, and {', '.join(_DECODER_HEADS)} of the same families; encoders: "
        f"{', '.join(_ENCODER_HEADS)} of {', '.join(_ENCODERS)}"
    )
