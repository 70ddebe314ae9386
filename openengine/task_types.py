"""What embed, classify and score take, and which of them a model performs, with the contract's names in snake case.

All are frozen dataclasses. `None` means "absent": the model's default applies, and an explicit zero or false is a value
of its own. Meanings and limits: requirements TSK, EMB, CLS, SCR and CAP of the contract. Nothing is validated here, and
what comes back is in task_results.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from openengine.types import MediaItem, Modality, NameEnum

__all__ = [
    "ClassifyCapabilities",
    "ClassifyOptions",
    "ClassifyRequest",
    "EmbedCapabilities",
    "EmbedOptions",
    "EmbedRequest",
    "EmbeddingEncoding",
    "MultimodalTaskInput",
    "ScoreCapabilities",
    "ScoreGroup",
    "ScoreNormalization",
    "ScoreOptions",
    "ScoreRequest",
    "TaskCapabilities",
    "TaskInput",
    "TaskInputType",
    "TaskOutputGranularity",
    "TaskRequestContext",
    "TaskValueSemantics",
]


# ---- enums: the contract's names without their prefixes ------------------------------------------


class TaskInputType(NameEnum):
    TEXT = "text"
    TOKEN_IDS = "token_ids"
    MULTIMODAL = "multimodal"


class TaskOutputGranularity(NameEnum):
    SEQUENCE = "sequence"
    TOKEN = "token"


class EmbeddingEncoding(NameEnum):
    DENSE = "dense"
    SPARSE = "sparse"


class TaskValueSemantics(NameEnum):
    LOGITS = "logits"
    PROBABILITIES = "probabilities"
    LOG_PROBABILITIES = "log_probabilities"
    SIMILARITY = "similarity"
    RELEVANCE = "relevance"
    REWARD = "reward"
    MODEL_DEFINED = "model_defined"


class ScoreNormalization(NameEnum):
    """NONE asks for native values, SOFTMAX normalizes over each label vector."""

    NONE = "none"
    SOFTMAX = "softmax"


# ---- requests ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRequestContext:
    """Who asks. In process `request_id=None` becomes a fresh UUID and `model=None` the engine's model."""

    request_id: str | None = None
    model: str | None = None
    lora_name: str | None = None
    priority: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalTaskInput:
    """At least one media item, with text, token ids or neither."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    media: tuple[MediaItem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInput:
    """One item: exactly one of `text`, `token_ids` and `multimodal`. `item_id` is unique in its batch or group."""

    item_id: str
    text: str | None = None
    token_ids: Sequence[int] | None = None
    multimodal: MultimodalTaskInput | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedOptions:
    """`dimensions` takes the first so many components, before `normalize` gives each vector the L2 norm 1."""

    granularity: TaskOutputGranularity | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    encoding: EmbeddingEncoding | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    inputs: tuple[TaskInput, ...]
    context: TaskRequestContext = TaskRequestContext()
    options: EmbedOptions = EmbedOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyOptions:
    granularity: TaskOutputGranularity | None = None
    output_semantics: TaskValueSemantics | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyRequest:
    inputs: tuple[TaskInput, ...]
    context: TaskRequestContext = TaskRequestContext()
    options: ClassifyOptions = ClassifyOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreGroup:
    """One query with its candidates. Item ids are unique within the group."""

    group_id: str
    query: TaskInput
    candidates: tuple[TaskInput, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """With `label_token_ids` the scores are those of these next tokens; without, the model's native ones."""

    granularity: TaskOutputGranularity | None = None
    output_semantics: TaskValueSemantics | None = None
    normalization: ScoreNormalization | None = None
    label_token_ids: tuple[int, ...] = ()
    instruction: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    groups: tuple[ScoreGroup, ...]
    context: TaskRequestContext = TaskRequestContext()
    options: ScoreOptions = ScoreOptions()


TaskRequest = EmbedRequest | ClassifyRequest | ScoreRequest


# ---- which tasks a model performs ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedCapabilities:
    supported: bool | None = None
    input_types: tuple[TaskInputType, ...] = ()
    granularities: tuple[TaskOutputGranularity, ...] = ()
    encodings: tuple[EmbeddingEncoding, ...] = ()
    dimension: int | None = None
    max_batch_size: int | None = None
    max_output_values_per_item: int | None = None
    supports_priority: bool | None = None
    supports_lora: bool | None = None
    supports_normalization: bool | None = None
    supports_dimension_override: bool | None = None
    modalities: tuple[Modality, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyCapabilities:
    supported: bool | None = None
    input_types: tuple[TaskInputType, ...] = ()
    granularities: tuple[TaskOutputGranularity, ...] = ()
    semantics: tuple[TaskValueSemantics, ...] = ()
    max_batch_size: int | None = None
    max_output_values_per_item: int | None = None
    supports_priority: bool | None = None
    supports_lora: bool | None = None
    modalities: tuple[Modality, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCapabilities:
    supported: bool | None = None
    input_types: tuple[TaskInputType, ...] = ()
    granularities: tuple[TaskOutputGranularity, ...] = ()
    semantics: tuple[TaskValueSemantics, ...] = ()
    normalizations: tuple[ScoreNormalization, ...] = ()
    supports_label_token_scoring: bool | None = None
    supports_instruction: bool | None = None
    max_groups: int | None = None
    max_candidates_per_group: int | None = None
    max_output_values_per_candidate: int | None = None
    supports_priority: bool | None = None
    supports_lora: bool | None = None
    higher_is_better: bool | None = None
    modalities: tuple[Modality, ...] = ()
    max_label_token_ids: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCapabilities:
    """None is a task that is not advertised."""

    embed: EmbedCapabilities | None = None
    classify: ClassifyCapabilities | None = None
    score: ScoreCapabilities | None = None
