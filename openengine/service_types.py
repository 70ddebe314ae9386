"""What the calls beside inference take and give, with the OpenEngine contract's names in snake case.

Requests of discovery, health, abort and drain; LoRA lifecycle; KV connector, KV event sources and batches; runtime
events. All are frozen dataclasses; `None` means "absent". The fields of a request are the keywords of the `Engine`
method that it calls. Nothing is validated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from openengine.types import EngineRole, KvEndpoint, KvEvent, KvSessionRef, LoraAdapter, NameEnum

__all__ = [
    "AbortRequest",
    "DrainRequest",
    "GetKvEventSourcesRequest",
    "GetKvEventSourcesResponse",
    "GetLoadRequest",
    "GetModelInfoRequest",
    "HealthRequest",
    "KvConnectorInfo",
    "KvEventBatch",
    "KvEventSource",
    "ListLorasResponse",
    "LoadLoraRequest",
    "LoadLoraResponse",
    "RuntimeEvent",
    "RuntimeEventType",
    "SubscribeKvEventsRequest",
    "SubscribeRuntimeEventsRequest",
    "UnloadLoraRequest",
    "UnloadLoraResponse",
]


# ---- discovery, health, abort, drain -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GetModelInfoRequest:
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GetLoadRequest:
    include_per_rank: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthRequest:
    """`model` is the probe's, None the default one; `role` is the expected role, None for any."""

    include_inference_probe: bool = False
    model: str | None = None
    role: EngineRole | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    """Exactly one target."""

    request_id: str | None = None
    kv_session: KvSessionRef | None = None
    all_requests: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequest:
    """`deadline_ms=None` waits without limit, 0 is a deadline now."""

    stop_accepting_new_requests: bool = False
    deadline_ms: int | None = None
    abort_after_deadline: bool = False


# ---- LoRA ----------------------------------------------------------------------------------------


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


# ---- KV connector and KV events ------------------------------------------------------------------


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
class GetKvEventSourcesRequest:
    """No ranks: all."""

    data_parallel_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventSource:
    """Where KV events can be had. `cache_key_profile` is "<profile>/<version>" of their hashes, empty if unknown."""

    transport: str
    encoding: str
    endpoint_addr: KvEndpoint | None = None
    topic: str = ""
    replay_endpoint: str = ""
    data_parallel_rank: int | None = None
    schema_version: int | None = None
    buffer_steps: int | None = None
    hwm: int | None = None
    max_queue_size: int | None = None
    cache_key_profile: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetKvEventSourcesResponse:
    sources: tuple[KvEventSource, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribeKvEventsRequest:
    """No ranks: all. `start_sequence_number` replays from there; 0 is live only."""

    data_parallel_ranks: tuple[int, ...] = ()
    include_snapshot: bool = False
    start_sequence_number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventBatch:
    """Events of one step. `sequence_number` counts per rank from 1, without gaps."""

    sequence_number: int
    timestamp_unix_nanos: int
    data_parallel_rank: int
    events: tuple[KvEvent, ...]


# ---- runtime events ------------------------------------------------------------------------------


class RuntimeEventType(NameEnum):
    FORWARD_PASS = "forward_pass"
    BATCH = "batch"
    QUEUE = "queue"
    TRANSFER = "transfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribeRuntimeEventsRequest:
    """No types: all."""

    types: tuple[RuntimeEventType, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeEvent:
    event_id: str
    timestamp_unix_nanos: int
    type: RuntimeEventType
    attributes: Mapping[str, str] = field(default_factory=dict)
