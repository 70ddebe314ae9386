"""What a generate request says and the events that answer it, with the OpenEngine contract's names in snake case.

All are frozen dataclasses. `None` means "absent", as in the contract: the engine's default applies, and an explicit zero
or false is a value of its own. Field meanings and limits: requirements SMP, STP, LGP, KVO, STR and USE of the contract.
Nothing is validated here (validation.py), and what a finished generation amounts to is in results.py.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "AllCandidates",
    "CandidateTokenSelection",
    "CandidateTokenSelectionMode",
    "ChoiceConstraint",
    "FinishReason",
    "GenerateEvent",
    "GenerateRequest",
    "GenerationFinished",
    "GuidedDecoding",
    "GuidedDecodingMode",
    "JsonObjectConstraint",
    "KvEndpoint",
    "KvOptions",
    "KvSessionRef",
    "LogProb",
    "MediaItem",
    "Modality",
    "PrefillReady",
    "PromptOutput",
    "ResponseOptions",
    "SamplingParams",
    "StopCondition",
    "StopMatch",
    "StoppingOptions",
    "TokenInfo",
    "TokenOutput",
    "Usage",
]


# ---- enums: the contract's names without their prefixes ------------------------------------------


class NameEnum(str, enum.Enum):
    """An enum whose members are their own lower-case names, so `reason == "stop"` reads well."""

    def __str__(self) -> str:
        return self.value


class FinishReason(NameEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class CandidateTokenSelectionMode(NameEnum):
    TOP_N = "top_n"
    TOKEN_IDS = "token_ids"
    ALL = "all"


class GuidedDecodingMode(NameEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF_GRAMMAR = "ebnf_grammar"
    STRUCTURAL_TAG = "structural_tag"
    CHOICE = "choice"
    JSON_OBJECT = "json_object"


class Modality(NameEnum):
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


# ---- requests ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn.

    temperature: finite, >= 0; 0 is greedy.  top_p: (0, 1].  top_k: >= 1, or 0 / -1 for off.
    min_p: [0, 1].  frequency_penalty, presence_penalty: [-2, 2], over output tokens.
    repetition_penalty: > 0, over prompt and output tokens.  seed: 0 <= seed < 2**64.
    num_sequences: >= 1 outputs drawn independently from one prompt.
    Order: penalties, temperature, top_k, top_p, min_p.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    num_sequences: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCondition:
    """Exactly one of a stop text (not empty) or a stop token id."""

    stop_text: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingOptions:
    """When an output ends. `max_tokens=None` means to the end of the context; 0 runs the prompt only.

    Before `min_tokens` tokens no EOS, stop token or stop text ends the output.
    `include_stop_in_output` keeps a matched stop in the output (absent: cut off).
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    conditions: tuple[StopCondition, ...] = ()
    ignore_eos: bool | None = None
    include_stop_in_output: bool | None = None


def stop_texts(stopping: StoppingOptions) -> Iterator[str]:
    """The caller's stop texts, in order."""
    return (c.stop_text for c in stopping.conditions if c.stop_text is not None)


def stop_token_ids(stopping: StoppingOptions) -> Iterator[int]:
    """The caller's stop token ids, in order."""
    return (c.stop_token_id for c in stopping.conditions if c.stop_token_id is not None)


@dataclass(frozen=True, slots=True)
class AllCandidates:
    """Selects the whole vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateTokenSelection:
    """Which candidates to report at each position; exactly one of the three."""

    top_n: int | None = None
    token_ids: tuple[int, ...] | None = None
    all: AllCandidates | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """What is returned beside the text. A selection implies its `return_*_logprobs`.

    Logprobs are the model's raw log-softmax, before penalties, temperature and truncation.
    `prompt_logprob_start`: prompt tokens before it are listed without a logprob.
    """

    return_prompt_logprobs: bool | None = None
    prompt_candidates: CandidateTokenSelection | None = None
    return_output_logprobs: bool | None = None
    output_candidates: CandidateTokenSelection | None = None
    prompt_logprob_start: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEndpoint:
    host: str
    port: int
    protocol: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSessionRef:
    """Names KV state that a prefill engine holds for a decode engine."""

    session_id: str
    transfer_backend: str = ""
    endpoints: tuple[KvEndpoint, ...] = ()
    dp_rank: int = 0
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOptions:
    """`bypass_prefix_cache` reuses nothing but still caches what it computes; `cache_salt` (not empty) is part of the cache key."""

    session: KvSessionRef | None = None
    data_parallel_rank: int | None = None
    bypass_prefix_cache: bool | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class ChoiceConstraint:
    choices: tuple[str, ...]

    def __post_init__(self) -> None:
        if isinstance(self.choices, list):  # a guide is the key of its compiled form
            object.__setattr__(self, "choices", tuple(self.choices))


@dataclass(frozen=True, slots=True)
class JsonObjectConstraint:
    """Any one JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GuidedDecoding:
    """Exactly one guide. `backend` empty is the default.

    output_type: the class that a JSON guide's `parsed` is an instance of, made by its `model_validate_json`, as pydantic's
    have it. The output follows `json_schema` alone, and no server is told.
    """

    json_schema: str | None = None
    regex: str | None = None
    ebnf_grammar: str | None = None
    structural_tag: str | None = None
    choice: ChoiceConstraint | None = None
    json_object: JsonObjectConstraint | None = None
    backend: str = ""
    output_type: Any = None

    def __repr__(self) -> str:
        given = ((each.name, getattr(self, each.name)) for each in dataclasses.fields(GuidedDecoding))
        shown = (f"{name}={shortened(value)}" for name, value in given if value not in (None, ""))
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """One image, video or audio input with exactly one source."""

    modality: Modality | None = None
    url: str | None = None
    data_uri: str | None = None
    raw_bytes: bytes | None = None
    mime_type: str = ""
    uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One generation. Exactly one of `prompt` (text) and `token_ids`.

    In process `request_id=None` becomes a fresh UUID and `model=None` the engine's model.
    `priority`: larger runs first. `metadata` is free-form and changes nothing.
    """

    prompt: str | None = None
    token_ids: Sequence[int] | None = None
    request_id: str | None = None
    model: str | None = None
    sampling: SamplingParams = SamplingParams()
    stopping: StoppingOptions = StoppingOptions()
    response: ResponseOptions = ResponseOptions()
    kv: KvOptions = KvOptions()
    guided: GuidedDecoding | None = None
    media: tuple[MediaItem, ...] = ()
    lora_name: str | None = None
    priority: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


# ---- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogProb:
    """One candidate at one position. `rank` is 1 for the most likely token."""

    token_id: int
    logprob: float
    token: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One prompt or output token: its id, text and, when asked for, raw logprob, rank and candidates."""

    token_id: int
    token: str
    logprob: float | None = None
    rank: int | None = None
    candidates: Sequence[LogProb] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts over all outputs of a request; the prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_prompt_tokens: int | None = None
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """What ended an output: exactly one is set."""

    stop_token_id: int | None = None
    stop_text: str | None = None
    eos_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """The prompt's tokens; at most once, before any output token."""

    tokens: Sequence[TokenInfo]

    @property
    def text(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """New tokens and new text of one output, never cumulative."""

    output_index: int
    tokens: tuple[TokenInfo, ...]
    text: str


@dataclass(frozen=True, slots=True)
class PrefillReady:
    """A prefill engine's terminal success: decode may attach."""

    kv_session: KvSessionRef
    usage: Usage | None = None

    @property
    def text(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class GenerationFinished:
    """The end of one output. `usage` is set on the request's last event only."""

    output_index: int
    reason: FinishReason
    message: str = ""
    stop_match: StopMatch | None = None
    usage: Usage | None = None

    @property
    def text(self) -> str:
        return ""


GenerateEvent = PromptOutput | TokenOutput | PrefillReady | GenerationFinished


def shortened(value: Any) -> str:
    """A value as a `repr` shows it, of 60 characters at most."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "…")
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
