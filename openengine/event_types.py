"""What the engine tells its subscribers: KV events, runtime events, and what asks for them.

Names are the OpenEngine contract's in snake case. All are frozen dataclasses; `None` means "absent". The fields of a
request are the keywords of the `Engine` method that it calls. Nothing is validated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from openengine.types import KvEndpoint, KvSessionRef, NameEnum

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "GetKvEventSourcesRequest",
    "GetKvEventSourcesResponse",
    "KvEvent",
    "KvEventBatch",
    "KvEventSource",
    "RuntimeEvent",
    "RuntimeEventType",
    "StorageMedium",
    "SubscribeKvEventsRequest",
    "SubscribeRuntimeEventsRequest",
]


# ---- KV events -----------------------------------------------------------------------------------


class StorageMedium(NameEnum):
    GPU = "gpu"
    CPU_PINNED = "cpu_pinned"
    DISK = "disk"
    EXTERNAL = "external"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventBatch:
    """Events of one step. `sequence_number` counts per rank from 1, without gaps."""

    sequence_number: int
    timestamp_unix_nanos: int
    data_parallel_rank: int
    events: tuple[KvEvent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribeKvEventsRequest:
    """No ranks: all. `start_sequence_number` replays from there; 0 is live only."""

    data_parallel_ranks: tuple[int, ...] = ()
    include_snapshot: bool = False
    start_sequence_number: int = 0


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
