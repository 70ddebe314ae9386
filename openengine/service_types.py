"""What the calls beside inference take and give, with the OpenEngine contract's names in snake case.

Who serves, what the model can do, load, health, abort, drain; LoRA lifecycle; KV connector. All are frozen dataclasses;
`None` means "absent". The fields of a request are the keywords of the `Engine` method that it calls. Nothing is validated
here. Subscriptions and their events are in event_types.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from openengine.task_types import TaskCapabilities
from openengine.tokenizer_types import TokenizerCapabilities
from openengine.types import CandidateTokenSelectionMode, GuidedDecodingMode, KvEndpoint, KvSessionRef, NameEnum

__all__ = [
    "AbortRequest",
    "AbortResponse",
    "AbortStatus",
    "DrainRequest",
    "DrainResponse",
    "DrainState",
    "EngineInfo",
    "EngineRole",
    "GenerationCapabilities",
    "GetLoadRequest",
    "GetModelInfoRequest",
    "GuidedDecodingCapabilities",
    "HealthCheck",
    "HealthRequest",
    "HealthResponse",
    "HealthState",
    "KvConnectorInfo",
    "ListLorasResponse",
    "LoadInfo",
    "LoadLoraRequest",
    "LoadLoraResponse",
    "LogprobCapabilities",
    "LoraAdapter",
    "ModelInfo",
    "ParallelismInfo",
    "RankLoadInfo",
    "UnloadLoraRequest",
    "UnloadLoraResponse",
]


# ---- who serves ----------------------------------------------------------------------------------


class EngineRole(NameEnum):
    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismInfo:
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    data_parallel_rank: int | None = None
    data_parallel_start_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvConnectorInfo:
    """How this engine hands KV state to others. Endpoints are connectable, never a wildcard."""

    enabled: bool | None = None
    transfer_backend: str = ""
    local_endpoints: tuple[KvEndpoint, ...] = ()
    supported_protocols: tuple[str, ...] = ()
    supports_remote_prefill: bool | None = None
    supports_decode_pull: bool | None = None
    supports_abort_cleanup: bool | None = None
    supports_drain: bool | None = None
    schema_version: int | None = None


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


# ---- the model and what it can do ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GetModelInfoRequest:
    model: str | None = None


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
    """What is served and what it can do. Sizes in tokens and blocks; of a KV cache None where the model has none.

    `supports_text_input` and `supports_token_ids_input` are of generations; each of the `tasks` names its own kinds of input.
    """

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


# ---- load and health -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GetLoadRequest:
    include_per_rank: bool = False


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
    """The scheduler's load at `timestamp_unix_nanos`. What a model without a KV cache has no figure of is None."""

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


class HealthState(NameEnum):
    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    NOT_READY = "not_ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthRequest:
    """`model` is the probe's, None the default one; `role` is the expected role, None for any."""

    include_inference_probe: bool = False
    model: str | None = None
    role: EngineRole | None = None


@dataclass(frozen=True, slots=True)
class HealthCheck:
    name: str
    state: HealthState
    message: str = ""


@dataclass(frozen=True, slots=True)
class HealthResponse:
    state: HealthState
    checks: tuple[HealthCheck, ...]


# ---- abort and drain -----------------------------------------------------------------------------


class AbortStatus(NameEnum):
    ABORTED = "aborted"
    ALREADY_FINISHED = "already_finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    """Exactly one target."""

    request_id: str | None = None
    kv_session: KvSessionRef | None = None
    all_requests: bool = False


@dataclass(frozen=True, slots=True)
class AbortResponse:
    status: AbortStatus
    message: str = ""


class DrainState(NameEnum):
    STARTED = "started"
    IN_PROGRESS = "in_progress"
    COMPLETE = "complete"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequest:
    """`deadline_ms=None` waits without limit, 0 is a deadline now."""

    stop_accepting_new_requests: bool = False
    deadline_ms: int | None = None
    abort_after_deadline: bool = False


@dataclass(frozen=True, slots=True)
class DrainResponse:
    """One report of a drain. Counts: None is unknown, 0 is none left."""

    state: DrainState
    in_flight_requests: int | None = None
    open_kv_sessions: int | None = None
    message: str = ""


# ---- LoRA ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    lora_id: int
    lora_name: str
    source_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLoraRequest:
    adapter: LoraAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLoraResponse:
    adapter: LoraAdapter
    already_loaded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadLoraRequest:
    lora_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadLoraResponse:
    adapter: LoraAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class ListLorasResponse:
    adapters: tuple[LoraAdapter, ...] = ()
