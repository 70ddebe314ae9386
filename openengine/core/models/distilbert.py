"""DistilBERT: BERT without token types and pooler, under names of its own."""

from __future__ import annotations

import torch

from openengine.core.models.encoder import EncoderModel, HeadNames, LayerNames

__all__ = ["DistilBertModel"]


class DistilBertModel(EncoderModel):
    """Differs from BERT in names and in its classifier's activation."""

    PREFIX = r"(distilbert\.)?"
    HEAD = "vocab_projector"
    HEADS = (r"vocab_\w+\..*", r"(pre_)?classifier\..*")
    LAYER_NAMES = LayerNames(
        layers="transformer.layer",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        out="attention.out_lin",
        attention_norm="sa_layer_norm",
        up="ffn.lin1",
        down="ffn.lin2",
        mlp_norm="output_layer_norm",
    )
    HEAD_NAMES = HeadNames(
        dense="pre_classifier",
        activation=torch.relu,
        out="classifier",
        vocabulary_dense="vocab_transform",
        vocabulary_activation=None,
        vocabulary_norm="vocab_layer_norm",
    )
