"""`TaskProfile`: what a checkpoint is, as far as embed, classify and score are concerned.

    architecture's head          with modules.json that end in …        the model
    --------------------------   ------------------------------------   -------------------------------------------
    none                                                                embeds
    any                          Pooling, …                             embeds; its head is not loaded
    masked LM                                                           embeds, sparsely
    classification of tokens                                            classifies tokens
    classification of texts                                             classifies texts; scores pairs if it has one label
                                                                        or was saved as a cross-encoder
    causal LM                    (LogitScore)                           generates; scores by label tokens

Read from the checkpoint's files, never from its path. Owns which of them decide; does not own what they say
(sentence_transformers.py) nor which options follow (task_capabilities.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openengine.core.checkpoint import Checkpoint
from openengine.core.models import EncoderConfig, HeadKind
from openengine.core.sentence_transformers import plain_embedding_spec, plain_score_spec, read_sentence_transformers
from openengine.core.task_output import ClassHead
from openengine.core.task_specs import EmbeddingSpec, ScoreSpec
from openengine.core.task_tokens import has_token_types
from openengine.errors import InvalidArgument

__all__ = ["TaskProfile", "read_task_profile"]


@dataclass(frozen=True, slots=True, eq=False)
class TaskProfile:
    """`head_kind` is that of the model as it is loaded: "none" for one that embeds, whatever its checkpoint has.

    num_token_types: how many types its texts' tokens have; 1 where its tokenizer gives none.
    embedding: how it embeds.  scoring: how it scores pairs, where its files or its head say so.  class_head: a classifier's.
    """

    head_kind: HeadKind = "causal_lm"
    is_encoder: bool = False
    num_token_types: int = 1
    embedding: EmbeddingSpec | None = None
    scoring: ScoreSpec | None = None
    class_head: ClassHead | None = None

    @property
    def generates(self) -> bool:
        return self.head_kind == "causal_lm"

    @property
    def scores_pairs(self) -> bool:
        """Whether it scores pairs of texts: by the next token, or with a head."""
        return self.generates or self.scoring is not None

    @property
    def embeds_tokens(self) -> bool:
        """Whether its tokens have vectors of the same kind as its texts: what is pooled, and not changed after that."""
        spec = self.embedding
        return spec is not None and spec.sparse is None and len(spec.pooling) == 1 and not spec.dense

    @property
    def max_length(self) -> int | None:
        """The tokens of an item that the checkpoint wants at most; None where only the model limits them."""
        spec = self.embedding or self.scoring
        return None if spec is None else spec.max_length


def read_task_profile(checkpoint: Checkpoint) -> TaskProfile:
    """Raises InvalidArgument where the files beside the weights contradict the architecture, or are damaged, and
    UnsupportedFeature for what they ask for and this engine does not compute."""
    config = checkpoint.config
    is_encoder = isinstance(config, EncoderConfig)
    spec = None
    if checkpoint.format == "safetensors":
        spec = read_sentence_transformers(checkpoint.path, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    head_kind: HeadKind = config.head_kind
    embedding = scoring = None
    if isinstance(spec, EmbeddingSpec):
        embedding = spec
        if spec.sparse is None:
            head_kind = "none"
        elif head_kind != "masked_lm":
            raise InvalidArgument(
                f"{checkpoint.path / 'modules.json'} wants sparse vectors, which {config.architecture} has no head for"
            )
    elif isinstance(spec, ScoreSpec):
        scoring = spec
        if head_kind != ("causal_lm" if spec.label_ids else "sequence_classification"):
            raise InvalidArgument(
                f"{checkpoint.path / 'modules.json'} wants scores, which {config.architecture} has no head for"
            )
    elif head_kind in ("none", "masked_lm"):
        embedding = plain_embedding_spec(
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            is_decoder=not is_encoder,
            is_sparse=head_kind == "masked_lm",
        )
    elif head_kind == "sequence_classification" and (config.num_labels == 1 or _is_cross_encoder(checkpoint.hf_config)):
        scoring = plain_score_spec(checkpoint.hf_config)
    is_classifier = head_kind in ("sequence_classification", "token_classification")
    return TaskProfile(
        head_kind=head_kind,
        is_encoder=is_encoder,
        num_token_types=config.num_token_types if is_encoder and has_token_types(checkpoint.path) else 1,
        embedding=embedding,
        scoring=scoring,
        class_head=ClassHead.from_hf(checkpoint.hf_config, config.num_labels) if is_classifier else None,
    )


def _is_cross_encoder(hf_config: Mapping[str, Any]) -> bool:
    """sentence-transformers leaves its mark in the config of the cross-encoders it saves."""
    return bool(hf_config.get("sentence_transformers") or hf_config.get("sbert_ce_default_activation_function"))
