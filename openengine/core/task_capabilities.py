"""What a model's profile says it can do: `TaskCapabilities` for discovery, and words for refusals.

Owns the limits of requests. Does not own checking requests against them (task_admission.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

from openengine.core.task_output import ScoreHead
from openengine.core.task_profile import TaskProfile
from openengine.core.task_tokens import TaskTokenizer
from openengine.errors import UnsupportedTask
from openengine.names import check_request_id, check_served
from openengine.task_types import (
    ClassifyCapabilities,
    EmbedCapabilities,
    EmbeddingEncoding,
    ScoreCapabilities,
    ScoreNormalization,
    TaskCapabilities,
    TaskInputType,
    TaskOutputGranularity,
    TaskValueSemantics,
)
from openengine.types import GenerateRequest

__all__ = ["MAX_ITEMS", "MAX_LABELS", "NoGeneration", "abilities", "task_capabilities"]

MAX_ITEMS = 4096  # of one request; the engine's own calls split longer lists
MAX_LABELS = 1024

_INPUT_TYPES = (TaskInputType.TEXT, TaskInputType.TOKEN_IDS)
_BY_TEXT, _BY_TOKEN = (TaskOutputGranularity.SEQUENCE,), (TaskOutputGranularity.TOKEN,)
# Of the label tokens' scores.
_LABEL_SEMANTICS = (
    TaskValueSemantics.PROBABILITIES,
    TaskValueSemantics.LOGITS,
    TaskValueSemantics.LOG_PROBABILITIES,
)


def task_capabilities(
    profile: TaskProfile, score_head: ScoreHead | None, tokenizer: TaskTokenizer, *, vocab_size: int
) -> TaskCapabilities | None:
    """None for a model that performs no task."""
    max_length = tokenizer.max_length
    capabilities = TaskCapabilities(
        embed=_embed(profile, max_length),
        classify=_classify(profile, max_length),
        score=_score(profile, score_head, tokenizer, vocab_size),
    )
    return None if capabilities == TaskCapabilities() else capabilities


def abilities(profile: TaskProfile, capabilities: TaskCapabilities | None) -> str:
    """What the model does, for the end of a sentence: "embed", "generate and score", …"""
    names = ["generate"] if profile.generates else []
    if capabilities is not None:
        names += [name for name in ("embed", "classify", "score") if getattr(capabilities, name) is not None]
    return " and ".join(names) or "nothing that can be asked for"


def _embed(profile: TaskProfile, max_length: int) -> EmbedCapabilities | None:
    spec = profile.embedding
    if spec is None:
        return None
    is_dense = spec.sparse is None
    return EmbedCapabilities(
        supported=True,
        input_types=_INPUT_TYPES,
        granularities=_BY_TEXT + _BY_TOKEN if profile.embeds_tokens else _BY_TEXT,
        encodings=(EmbeddingEncoding.DENSE if is_dense else EmbeddingEncoding.SPARSE,),
        dimension=spec.dimension if spec.truncate_dim is None else None,  # else a text has another one by default
        max_batch_size=MAX_ITEMS,
        max_output_values_per_item=spec.dimension * (max_length if profile.embeds_tokens else 1),
        supports_priority=True,
        supports_lora=False,
        supports_normalization=is_dense,
        supports_dimension_override=is_dense,
    )


def _classify(profile: TaskProfile, max_length: int) -> ClassifyCapabilities | None:
    head = profile.class_head
    if head is None:
        return None
    by_token = profile.head_kind == "token_classification"
    return ClassifyCapabilities(
        supported=True,
        input_types=_INPUT_TYPES,
        granularities=_BY_TOKEN if by_token else _BY_TEXT,
        semantics=head.semantics,
        max_batch_size=MAX_ITEMS,
        max_output_values_per_item=len(head.labels) * (max_length if by_token else 1),
        supports_priority=True,
        supports_lora=False,
    )


def _score(
    profile: TaskProfile, head: ScoreHead | None, tokenizer: TaskTokenizer, vocab_size: int
) -> ScoreCapabilities | None:
    if head is None and not profile.generates:
        return None
    max_labels = min(MAX_LABELS, vocab_size) if profile.generates else None
    return ScoreCapabilities(
        supported=True,
        input_types=_INPUT_TYPES if tokenizer.takes_pair_ids else (TaskInputType.TEXT,),
        granularities=_BY_TEXT,
        semantics=_LABEL_SEMANTICS if head is None else head.semantics,
        normalizations=tuple(ScoreNormalization) if profile.generates else head.normalizations,
        supports_label_token_scoring=profile.generates,
        supports_instruction=tokenizer.takes_instruction,
        max_groups=MAX_ITEMS,
        max_candidates_per_group=MAX_ITEMS,
        max_output_values_per_candidate=max_labels or head.num_scores,
        supports_priority=True,
        supports_lora=False,
        higher_is_better=None if head is None else head.higher_is_better,
        max_label_token_ids=max_labels,
    )


class NoGeneration:
    """Stands in for the preparer of generations, for a model that does something else.

    What a request names is checked all the same, and first: an unknown model is not said to be unable.
    """

    def __init__(self, does: str, model_names: Collection[str]) -> None:
        self._does = does
        self._model_names = model_names

    def warn(self, requests: object) -> None:
        """Nothing to warn of: `prepare` raises."""

    def check(self, request: GenerateRequest) -> NoReturn:
        """Raises as `refuse`."""
        self.refuse(request.request_id, request.model)

    prepare = check

    def refuse(self, request_id: object, model: object) -> NoReturn:
        """Raises UnsupportedTask, whatever was to be generated; before that what is wrong with the names of a request."""
        check_request_id(request_id)
        check_served(model, self._model_names)
        raise UnsupportedTask(f"the model does not generate text; it can {self._does}")
