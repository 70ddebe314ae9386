"""`Services`: what an engine answers beside generating: KV discovery, load by rank, abort, and what it does not do.

Owns: the answers of capabilities that this engine lacks, exactly as the contract wants them, and the address that
discovery names. Does not own: the loop, the event log, the tokenizer service; it is handed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from openengine.core.cache_keys import PROFILE, PROFILE_VERSION
from openengine.core.events import EventLog
from openengine.core.loop import EngineLoop
from openengine.core.tokenizer_service import TokenizerService
from openengine.errors import InvalidArgument, KvSessionNotFound, UnsupportedTask
from openengine.service_types import GetKvEventSourcesResponse, KvConnectorInfo, KvEventSource
from openengine.types import AbortStatus, KvEndpoint, KvSessionRef, LoadInfo, RankLoadInfo

__all__ = ["Services"]

_WILDCARDS = ("", "*", "0.0.0.0", "::", "[::]")
_RANK = 0  # the only data-parallel rank
_RANK_FIELDS = (
    "running_requests",
    "queued_requests",
    "used_kv_blocks",
    "total_kv_blocks",
    "prefill_batch_size",
    "decode_batch_size",
)


class Services:
    """Answers for one engine, from any thread. `kv_log` is None where KV events are off."""

    def __init__(self, loop: EngineLoop, tokenizer: TokenizerService, kv_log: EventLog | None) -> None:
        self.tokenizer = tokenizer
        self._loop = loop
        self._kv_log = kv_log
        self._endpoint: KvEndpoint | None = None

    # ---- load and abort --------------------------------------------------------------------------

    def load(self, include_per_rank: bool) -> LoadInfo:
        load = self._loop.load
        if not include_per_rank:
            return load
        values = {name: getattr(load, name) for name in _RANK_FIELDS}
        return replace(load, ranks=(RankLoadInfo(data_parallel_rank=_RANK, **values),))

    def abort(self, request_id: str | None, kv_session: KvSessionRef | None, all_requests: bool) -> AbortStatus:
        """End one target. Raises InvalidArgument for none or several, RequestNotFound or KvSessionNotFound."""
        if request_id is not None and not isinstance(request_id, str):
            raise InvalidArgument(f"request_id must be a str, not {request_id!r:.80}")
        if kv_session is not None and not isinstance(kv_session, KvSessionRef):
            raise InvalidArgument(f"kv_session must be a KvSessionRef, not {kv_session!r:.80}")
        targets = [request_id is not None, kv_session is not None, all_requests is not False]
        is_named = request_id != "" and (kv_session is None or kv_session.session_id)
        if sum(targets) != 1 or not is_named or not isinstance(all_requests, bool):
            raise InvalidArgument(
                "abort takes exactly one target: a non-empty request_id, a kv_session with an id, or all_requests=True"
            )
        if kv_session is not None:
            raise KvSessionNotFound(
                f"session {kv_session.session_id!r:.80} is not open; this engine holds no KV sessions"
            )
        return self._loop.abort_all() if request_id is None else self._loop.abort(request_id)

    # ---- KV discovery ----------------------------------------------------------------------------

    def kv_connector_info(self) -> KvConnectorInfo:
        return KvConnectorInfo(enabled=False)

    def advertise(self, host: str, port: int) -> None:
        """Raises InvalidArgument for a wildcard or a port that nobody can connect to."""
        if not isinstance(host, str) or host in _WILDCARDS:
            raise InvalidArgument(
                f"host {host!r:.80} is a wildcard or empty; give a name or address that others can reach"
            )
        if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
            raise InvalidArgument(f"port must be between 1 and 65535, not {port!r:.80}")
        self._endpoint = KvEndpoint(host=host, port=port, protocol="grpc")

    def kv_event_sources(self, data_parallel_ranks: Sequence[int]) -> GetKvEventSourcesResponse:
        for rank in data_parallel_ranks:
            if rank != _RANK:
                raise InvalidArgument(
                    f"data_parallel_rank {rank!r:.80} does not exist here; the engine has rank {_RANK} only"
                )
        if self._kv_log is None or self._endpoint is None:
            return GetKvEventSourcesResponse()
        source = KvEventSource(
            transport="grpc",
            encoding="protobuf",
            endpoint_addr=self._endpoint,
            data_parallel_rank=_RANK,
            schema_version=1,
            buffer_steps=self._kv_log.capacity,
            max_queue_size=self._kv_log.capacity,
            cache_key_profile=f"{PROFILE}/{PROFILE_VERSION}",
        )
        return GetKvEventSourcesResponse(sources=(source,))

    # ---- what this engine does not do ------------------------------------------------------------

    def refuse_lora(self, *, starts_work: bool = False) -> NoReturn:
        """Raises UnsupportedTask; Draining before that where something new would start."""
        if starts_work:
            self._loop.check_accepting()
        raise UnsupportedTask("this engine serves no LoRA adapters; model_info().supports_lora is false")
