"""Every value that crosses the public API, with the OpenEngine contract's names in snake case.

All are frozen dataclasses. `None` means "absent", as in the contract: the engine's default applies,
and an explicit zero or false is a value of its own. Field meanings and limits: requirements
SMP, STP, LGP, KVO, STR and USE of the contract; `validate_request` checks those that need no model.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from openengine.errors import IncompleteOutput, InvalidArgument, OpenEngineError, PreconditionFailed

if TYPE_CHECKING:
    from openengine.service_types import KvConnectorInfo
    from openengine.task_types import TaskCapabilities
    from openengine.tokenizer_types import TokenizerCapabilities

__all__ = [
    "AbortResponse",
    "AbortStatus",
    "AllBlocksCleared",
    "AllCandidates",
    "BlockRemoved",
    "BlockStored",
    "CandidateTokenSelection",
    "CandidateTokenSelectionMode",
    "ChoiceConstraint",
    "DrainResponse",
    "DrainState",
    "EngineInfo",
    "EngineRole",
    "FinishReason",
    "GenerateEvent",
    "GenerateRequest",
    "GenerationCapabilities",
    "GenerationFinished",
    "GenerationOutput",
    "GenerationResult",
    "GuidedDecoding",
    "GuidedDecodingCapabilities",
    "GuidedDecodingMode",
    "HealthCheck",
    "HealthResponse",
    "HealthState",
    "JsonObjectConstraint",
    "KvEndpoint",
    "KvEvent",
    "KvOptions",
    "KvSessionRef",
    "LoadInfo",
    "LogProb",
    "LogprobCapabilities",
    "LoraAdapter",
    "MediaItem",
    "Modality",
    "ModelInfo",
    "ParallelismInfo",
    "PrefillReady",
    "PromptOutput",
    "RankLoadInfo",
    "ResponseOptions",
    "SamplingParams",
    "StopCondition",
    "StopMatch",
    "StoppingOptions",
    "StorageMedium",
    "Timing",
    "TokenInfo",
    "TokenOutput",
    "Usage",
]


# ---- enums: the contract's names without their prefixes ------------------------------------------


class NameEnum(str, enum.Enum):
    """An enum whose members are their own lower-case names, so `reason == "stop"` reads well."""

    def __str__(self) -> str:
        return self.value


class EngineRole(NameEnum):
    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


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


class HealthState(NameEnum):
    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    NOT_READY = "not_ready"


class AbortStatus(NameEnum):
    ABORTED = "aborted"
    ALREADY_FINISHED = "already_finished"


class DrainState(NameEnum):
    STARTED = "started"
    IN_PROGRESS = "in_progress"
    COMPLETE = "complete"


class StorageMedium(NameEnum):
    GPU = "gpu"
    CPU_PINNED = "cpu_pinned"
    DISK = "disk"
    EXTERNAL = "external"


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
        shown = (f"{name}={_short(value)}" for name, value in given if value not in (None, ""))
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


# ---- what comes back -----------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: waiting for a slot, submission to first token, and between later tokens on average."""

    queue_s: float
    time_to_first_token_s: float | None
    time_per_token_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True, repr=False)
class GenerationOutput:
    """One of a request's `num_sequences` outputs."""

    index: int
    text: str
    tokens: tuple[TokenInfo, ...]
    finish_reason: FinishReason | None
    stop_match: StopMatch | None = None
    message: str = ""  # which limit a "length" reached, and what it cut
    guide: GuidedDecoding | None = None  # that it follows

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def parsed(self) -> Any:
        """What the text says under a JSON guide: its value, or an instance of the class given as `json_schema`.

        None under other guides and without one: take `text`. Raises IncompleteOutput where the output was cut,
        PreconditionFailed where the class refuses a value that meets its schema.
        """
        if self.guide is None or (self.guide.json_schema is None and self.guide.json_object is None):
            return None
        text, stop = self.text, self.stop_match
        if stop is not None and self.tokens and self.tokens[-1].token_id == stop.stop_token_id:
            text = text.removesuffix(self.tokens[-1].token)  # kept in the output, and no part of the value
        try:
            value = json.loads(text)
        except ValueError:
            raise self._incomplete() from None
        # Digits may go on; any other value is closed by its last character.
        if self.finish_reason is not FinishReason.STOP and text[-1].isdigit():
            raise self._incomplete()
        return value if self.guide.output_type is None else self._instance(text)

    def _instance(self, text: str) -> Any:
        kind = self.guide.output_type
        try:
            return kind.model_validate_json(text)
        except Exception as exc:  # validators are the caller's code
            raise PreconditionFailed(
                f"output {self.index} meets the JSON schema of {kind.__name__}, and the class refuses it: {exc}; say what "
                "its validators ask for in the schema (bounds, pattern, enum), or take json.loads(result.text)"
            ) from exc

    def _incomplete(self) -> IncompleteOutput:
        cause = f"it ended with {str(self.finish_reason)!r}"
        if self.finish_reason is FinishReason.LENGTH:
            cause = f"{self.message or 'a limit was reached'}; raise max_tokens"
        elif self.stop_match is not None and self.stop_match.stop_text is not None:
            cause = f"the stop text {self.stop_match.stop_text!r:.80} ended it"
        return IncompleteOutput(
            f"output {self.index} is no complete JSON: {cause}", text=self.text, finish_reason=self.finish_reason
        )

    @property
    def logprobs(self) -> np.ndarray | None:
        """float32 [len(tokens)] raw logprobs, or None when they were not asked for."""
        if not self.tokens or self.tokens[0].logprob is None:
            return None
        return np.array([token.logprob for token in self.tokens], dtype=np.float32)

    def __repr__(self) -> str:
        return f"GenerationOutput({_short(self.text)}, {len(self.tokens)} tokens, {self.finish_reason})"


@dataclass(frozen=True, slots=True, repr=False)
class GenerationResult:
    """Everything one request produced. Scalar properties read the first output.

    `sampling` and `stopping` are the effective parameters. `error` is set only in batch calls with
    `on_error="return"`; then there are no outputs.
    """

    request_id: str
    outputs: tuple[GenerationOutput, ...] = ()
    prompt: Sequence[TokenInfo] | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    sampling: SamplingParams | None = None
    stopping: StoppingOptions | None = None
    kv_session: KvSessionRef | None = None
    error: OpenEngineError | None = None

    def _first(self) -> GenerationOutput:
        if not self.outputs:
            raise self.error or InvalidArgument(f"request {self.request_id} has no output; see its kv_session")
        return self.outputs[0]

    @property
    def text(self) -> str:
        return self._first().text

    @property
    def token_ids(self) -> list[int]:
        return self._first().token_ids

    @property
    def tokens(self) -> tuple[TokenInfo, ...]:
        return self._first().tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._first().finish_reason

    @property
    def stop_match(self) -> StopMatch | None:
        return self._first().stop_match

    @property
    def logprobs(self) -> np.ndarray | None:
        return self._first().logprobs

    @property
    def parsed(self) -> Any:
        """See `GenerationOutput.parsed`. Raises IncompleteOutput, PreconditionFailed."""
        return self._first().parsed

    def to_dict(self) -> dict[str, Any]:
        """One flat row of plain values, as a pandas DataFrame takes it."""
        row: dict[str, Any] = {"request_id": self.request_id, "text": None, "finish_reason": None}
        if self.outputs:
            first = self.outputs[0]
            row["text"] = first.text
            row["token_ids"] = first.token_ids
            row["finish_reason"] = str(first.finish_reason)
            row["message"] = first.message
            row["logprobs"] = None if first.logprobs is None else first.logprobs.tolist()
            row["parsed"] = _parsed_or_none(first)
        if self.usage is not None:
            row.update(dataclasses.asdict(self.usage))
            del row["reasoning_tokens"]
        if self.timing is not None:
            row.update(dataclasses.asdict(self.timing))
        row["error"] = None if self.error is None else self.error.message
        return row

    def __repr__(self) -> str:
        if self.error is not None:
            return f"GenerationResult(error={_short(self.error.message)})"
        if not self.outputs:
            return f"GenerationResult(kv_session={self.kv_session!r})"
        more = f", {len(self.outputs)} outputs" if len(self.outputs) > 1 else ""
        return f"GenerationResult({_short(self.text)}, {len(self.tokens)} tokens, {self.finish_reason}{more})"


def _parsed_or_none(output: GenerationOutput) -> Any:
    try:
        return output.parsed
    except PreconditionFailed:  # IncompleteOutput is one
        return None


def _short(value: Any) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "…")
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


# ---- discovery, health, load ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismInfo:
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    data_parallel_rank: int | None = None
    data_parallel_start_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Who serves. `attributes` adds what the contract has no field for: device, dtype, kernels, memory."""

    engine_name: str
    engine_version: str
    role: EngineRole
    instance_id: str
    supported_models: tuple[str, ...]
    parallelism: ParallelismInfo
    schema_revision: int
    minimum_client_revision: int
    schema_release: str
    kv_connector: KvConnectorInfo | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobCapabilities:
    supported: bool | None = None
    candidate_selection_modes: tuple[CandidateTokenSelectionMode, ...] = ()
    max_top_n: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedDecodingCapabilities:
    supported: bool | None = None
    modes: tuple[GuidedDecodingMode, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCapabilities:
    prompt_logprobs: LogprobCapabilities | None = None
    output_logprobs: LogprobCapabilities | None = None
    guided_decoding: GuidedDecodingCapabilities | None = None
    max_num_sequences: int | None = None
    supports_priority: bool | None = None
    supports_stop_in_output: bool | None = None
    supports_cache_salt: bool | None = None
    supports_prefix_cache_bypass: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What is served and what it can do. Sizes in tokens and blocks."""

    model_id: str
    served_model_name: str
    served_model_aliases: tuple[str, ...] = ()
    max_context_length: int | None = None
    max_output_tokens: int | None = None
    kv_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_running_requests: int | None = None
    max_batched_tokens: int | None = None
    tokenizer_modes: tuple[str, ...] = ()
    supports_text_input: bool | None = None
    supports_token_ids_input: bool | None = None
    generation: GenerationCapabilities | None = None
    supports_lora: bool | None = None
    supports_multimodal: bool | None = None
    reasoning_parser: str = ""
    tool_call_parser: str = ""
    tasks: TaskCapabilities | None = None
    tokenizer: TokenizerCapabilities | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoadInfo:
    data_parallel_rank: int | None = None
    running_requests: int | None = None
    queued_requests: int | None = None
    used_kv_blocks: int | None = None
    total_kv_blocks: int | None = None
    prefill_batch_size: int | None = None
    decode_batch_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadInfo:
    """A point-in-time snapshot of the scheduler."""

    instance_id: str = ""
    timestamp_unix_nanos: int | None = None
    running_requests: int | None = None
    queued_requests: int | None = None
    active_kv_sessions: int | None = None
    used_kv_blocks: int | None = None
    total_kv_blocks: int | None = None
    running_tokens: int | None = None
    waiting_tokens: int | None = None
    prefill_batch_size: int | None = None
    decode_batch_size: int | None = None
    ranks: tuple[RankLoadInfo, ...] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HealthCheck:
    name: str
    state: HealthState
    message: str = ""


@dataclass(frozen=True, slots=True)
class HealthResponse:
    state: HealthState
    checks: tuple[HealthCheck, ...]


@dataclass(frozen=True, slots=True)
class AbortResponse:
    status: AbortStatus
    message: str = ""


@dataclass(frozen=True, slots=True)
class DrainResponse:
    """One report of a drain. Counts: None is unknown, 0 is none left."""

    state: DrainState
    in_flight_requests: int | None = None
    open_kv_sessions: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    lora_id: int
    lora_name: str
    source_path: str


# ---- KV events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Full blocks that entered the prefix cache, in chain order. Hashes are 32 bytes.

    `extra_keys` has one tuple per hash, or is empty when no block has any. `group_idx` and `kv_cache_spec_*` name the KV
    group; `cache_key_profile` is "<profile>/<version>" of the hashes.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    lora_name: str | None = None
    medium: StorageMedium = StorageMedium.GPU
    extra_keys: tuple[tuple[str, ...], ...] = ()
    group_idx: int = 0
    kv_cache_spec_kind: str = ""
    kv_cache_spec_sliding_window: int = 0
    cache_key_profile: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """Blocks that left the prefix cache."""

    block_hashes: tuple[bytes, ...]
    medium: StorageMedium = StorageMedium.GPU
    group_idx: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Everything stored before is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvent:
    """`request_id` is the request that caused it, where there is one; `kv_session` the session that holds the blocks."""

    event: BlockStored | BlockRemoved | AllBlocksCleared
    request_id: str = ""
    kv_session: KvSessionRef | None = None


# ---- validation that needs no model --------------------------------------------------------------

_UINT32_MAX = 2**32 - 1
_UINT64_MAX = 2**64 - 1
_INT32_MAX = 2**31 - 1
_MAX_STOP_CHARS = 1 << 16  # each is a node of the automaton that looks for stops, some 300 bytes
_GROUPS = {"sampling": SamplingParams, "stopping": StoppingOptions, "response": ResponseOptions, "kv": KvOptions}


def validate_request(request: GenerateRequest) -> None:
    """Check every field of `request` that can be judged without a model.

    Raises InvalidArgument naming the field, its value and its range (SMP-02..11, STP-06/07,
    LGP-07/16, KVO-04, GEN-03/04).
    """
    if not isinstance(request, GenerateRequest):
        raise InvalidArgument(f"a request must be a GenerateRequest, not {request!r:.80}")
    for name, kind in _GROUPS.items():
        if not isinstance(getattr(request, name), kind):
            raise InvalidArgument(f"{name} must be a {kind.__name__}, not {getattr(request, name)!r:.80}")
    for name in ("prompt", "request_id", "model", "lora_name"):
        _check_text(name, getattr(request, name))
    if (request.prompt is None) == (request.token_ids is None):
        raise InvalidArgument("a request takes exactly one of prompt and token_ids; pass text or ids, not both")
    _validate_sampling(request.sampling)
    _validate_stopping(request.stopping)
    _validate_response(request.response)
    _validate_kv(request.kv)
    _check_integer("priority", request.priority, -_INT32_MAX - 1, _INT32_MAX)
    if request.guided is not None and not isinstance(request.guided, GuidedDecoding):
        raise InvalidArgument(
            f"guided must be a GuidedDecoding or what compile_guide returned, not {request.guided!r:.80}; for a schema, "
            "GuidedDecoding(json_schema=json.dumps(schema))"
        )
    _check_items("media", request.media, MediaItem)
    if not isinstance(request.metadata, Mapping):
        raise InvalidArgument(f"metadata must be a mapping of texts, not {request.metadata!r:.80}")
    for item in request.metadata.items():
        if None in item:
            raise InvalidArgument(f"metadata must be a mapping of texts; it has {item!r:.80}")
        for text in item:
            _check_text("metadata: a key or value", text)


def _validate_sampling(sampling: SamplingParams) -> None:
    _check_number("temperature", sampling.temperature, "finite and >= 0", lambda v: v >= 0)
    _check_number("top_p", sampling.top_p, "in (0, 1]", lambda v: 0 < v <= 1)
    _check_integer("top_k", sampling.top_k, -1, _INT32_MAX, note="; 0 and -1 switch it off")
    _check_number("min_p", sampling.min_p, "in [0, 1]", lambda v: 0 <= v <= 1)
    _check_number("frequency_penalty", sampling.frequency_penalty, "in [-2, 2]", lambda v: -2 <= v <= 2)
    _check_number("presence_penalty", sampling.presence_penalty, "in [-2, 2]", lambda v: -2 <= v <= 2)
    _check_number("repetition_penalty", sampling.repetition_penalty, "finite and > 0", lambda v: v > 0)
    _check_integer("seed", sampling.seed, 0, _UINT64_MAX)
    _check_integer("num_sequences", sampling.num_sequences, 1, _UINT32_MAX)


def _validate_stopping(stopping: StoppingOptions) -> None:
    _check_integer("max_tokens", stopping.max_tokens, 0, _UINT32_MAX)
    _check_integer("min_tokens", stopping.min_tokens, 0, _UINT32_MAX)
    _check_flag("ignore_eos", stopping.ignore_eos)
    _check_flag("include_stop_in_output", stopping.include_stop_in_output)
    if stopping.max_tokens is not None and (stopping.min_tokens or 0) > stopping.max_tokens:
        raise InvalidArgument(
            f"min_tokens {stopping.min_tokens} exceeds max_tokens {stopping.max_tokens}; lower one or raise the other"
        )
    _check_items("conditions", stopping.conditions, StopCondition)
    for index, condition in enumerate(stopping.conditions):
        if (condition.stop_text is None) == (condition.stop_token_id is None):
            raise InvalidArgument(f"stop condition {index} takes exactly one of stop_text and stop_token_id")
        _check_text(f"stop condition {index}: stop_text", condition.stop_text)
        _check_integer(f"stop condition {index}: stop_token_id", condition.stop_token_id, 0, _UINT32_MAX)
        if condition.stop_text == "":
            raise InvalidArgument(f"stop condition {index} has an empty stop_text; it would match everywhere")
    num_chars = sum(len(text) for text in stop_texts(stopping))
    if num_chars > _MAX_STOP_CHARS:
        raise InvalidArgument(
            f"the stop texts have {num_chars} characters together, the limit is {_MAX_STOP_CHARS}; give fewer or shorter ones"
        )


def _validate_response(response: ResponseOptions) -> None:
    _check_flag("return_prompt_logprobs", response.return_prompt_logprobs)
    _check_flag("return_output_logprobs", response.return_output_logprobs)
    _check_integer("prompt_logprob_start", response.prompt_logprob_start, 0, _UINT32_MAX)
    for name in ("prompt", "output"):
        selection = getattr(response, f"{name}_candidates")
        if selection is None:
            continue
        _check_type(f"{name}_candidates", selection, CandidateTokenSelection)
        returned = getattr(response, f"return_{name}_logprobs")
        if returned is not None and not returned:
            raise InvalidArgument(f"{name}_candidates contradicts return_{name}_logprobs=False; drop one of them")
        variants = [v for v in (selection.top_n, selection.token_ids, selection.all) if v is not None]
        if len(variants) != 1:
            raise InvalidArgument(f"{name}_candidates takes exactly one of top_n, token_ids and all")
        _check_integer(f"{name}_candidates: top_n", selection.top_n, 0, _UINT32_MAX)
        _check_type(f"{name}_candidates: all", selection.all, AllCandidates)
        if selection.token_ids is not None:
            _validate_candidate_ids(name, selection.token_ids)


def _validate_candidate_ids(name: str, token_ids: Sequence[int]) -> None:
    if not isinstance(token_ids, (tuple, list, range, np.ndarray)) or getattr(token_ids, "ndim", 1) != 1:
        raise InvalidArgument(f"{name}_candidates: token_ids must be a sequence of token ids, not {token_ids!r:.80}")
    if not len(token_ids):
        raise InvalidArgument(f"{name}_candidates has an empty token_ids selection; name at least one id")
    seen: set[int] = set()
    for token_id in token_ids:
        if token_id is None:
            raise InvalidArgument(f"{name}_candidates: token id must be an integer, not None")
        _check_integer(f"{name}_candidates: token id", token_id, 0, _UINT32_MAX)
        if token_id in seen:
            raise InvalidArgument(f"{name}_candidates names token id {token_id} twice; name each once")
        seen.add(token_id)


def _validate_kv(kv: KvOptions) -> None:
    _check_text("cache_salt", kv.cache_salt)
    if kv.cache_salt == "":
        raise InvalidArgument("cache_salt is empty; leave it out to share the cache, or give a non-empty salt")
    _check_flag("bypass_prefix_cache", kv.bypass_prefix_cache)
    _check_integer("data_parallel_rank", kv.data_parallel_rank, 0, _UINT32_MAX)
    _check_type("session", kv.session, KvSessionRef)


def _check_type(name: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise InvalidArgument(f"{name} must be a {kind.__name__}, not {value!r:.80}")


def _check_flag(name: str, value: object) -> None:
    if value is not None and not isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(f"{name} must be True or False, not {value!r:.80}")


def _check_text(name: str, value: object) -> None:
    """A text that can be encoded: keys are hashes of bytes, and a server sends bytes."""
    _check_type(name, value, str)
    if value is None or value.isascii():
        return
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise InvalidArgument(
            f"{name} holds a lone surrogate ({value[exc.start]!r} at position {exc.start}), which is no character; "
            "decode the bytes it came from with errors='replace'"
        ) from None


def _check_items(name: str, values: object, kind: type) -> None:
    if not isinstance(values, (tuple, list)):
        raise InvalidArgument(f"{name} must be a tuple of {kind.__name__}, not {values!r:.80}")
    for index, value in enumerate(values):
        if not isinstance(value, kind):
            raise InvalidArgument(f"{name}[{index}] must be a {kind.__name__}, not {value!r:.80}")


def _check_number(name: str, value: object, rule: str, accepts) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidArgument(f"{name} must be a number {rule}, not {value!r:.80}")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an int beyond the range of float
        finite = False
    if not finite or not accepts(value):
        raise InvalidArgument(f"{name} must be {rule}, not {value!r:.80}")


def _check_integer(name: str, value: object, low: int, high: int, *, note: str = "") -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidArgument(f"{name} must be an integer, not {value!r:.80}")
    if not low <= value <= high:
        raise InvalidArgument(f"{name} must be between {low} and {high}{note}, not {value!r:.80}")


def stop_texts(stopping: StoppingOptions) -> Iterator[str]:
    """The caller's stop texts, in order."""
    return (c.stop_text for c in stopping.conditions if c.stop_text is not None)


def stop_token_ids(stopping: StoppingOptions) -> Iterator[int]:
    """The caller's stop token ids, in order."""
    return (c.stop_token_id for c in stopping.conditions if c.stop_token_id is not None)
