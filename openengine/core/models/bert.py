"""BERT, and RoBERTa and XLM-RoBERTa, which are BERT with positions that begin after the padding's, and other heads."""

from __future__ import annotations

import torch

from openengine.core.models.encoder import EncoderModel, HeadNames, LayerNames
from openengine.core.models.encoder_config import EncoderConfig

__all__ = ["BertModel", "RobertaModel"]


class BertModel(EncoderModel):
    """A text's classifier reads the pooler, which nothing else needs."""

    PREFIX = r"(bert\.)?"
    HEAD, TIED_BIAS = "cls.predictions.decoder", "cls.predictions.bias"
    HEADS = (r"cls\..*", r"classifier\..*")
    LAYER_NAMES = LayerNames(
        layers="encoder.layer",
        qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
        out="attention.output.dense",
        attention_norm="attention.output.LayerNorm",
        up="intermediate.dense",
        down="output.dense",
        mlp_norm="output.LayerNorm",
    )
    HEAD_NAMES = HeadNames(
        dense="pooler.dense",
        activation=torch.tanh,
        out="classifier",
        vocabulary_dense="cls.predictions.transform.dense",
        vocabulary_activation=None,
        vocabulary_norm="cls.predictions.transform.LayerNorm",
    )

    @classmethod
    def ignored(cls, config: EncoderConfig) -> tuple[str, ...]:
        pools = cls.HEAD_NAMES.dense == "pooler.dense" and config.head_kind == "sequence_classification"
        return tuple(pattern for pattern in cls.IGNORED if not (pools and pattern.startswith("pooler")))


class RobertaModel(BertModel):
    """RoBERTa and XLM-RoBERTa, which share their names."""

    PREFIX = r"(roberta\.)?"
    HEAD, TIED_BIAS = "lm_head.decoder", "lm_head.bias"
    HEADS = (r"lm_head\..*", r"classifier\..*")
    HEAD_NAMES = HeadNames(
        dense="classifier.dense",
        activation=torch.tanh,
        out="classifier.out_proj",
        vocabulary_dense="lm_head.dense",
        vocabulary_activation="gelu",
        vocabulary_norm="lm_head.layer_norm",
    )
