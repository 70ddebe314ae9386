"""`Services`: what an engine answers beside generating: load by rank, abort, drain, and what it does not do.

Owns: the answers of capabilities that this engine lacks, exactly as the contract wants them. Does not own: the loop, which
it is handed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

import numpy as np

from openengine.core.loop import EngineLoop
from openengine.discovery import RANK
from openengine.errors import Draining, InvalidArgument, KvSessionNotFound, UnsupportedTask
from openengine.service_types import AbortStatus, DrainResponse, DrainState, LoadInfo, RankLoadInfo
from openengine.types import KvSessionRef

__all__ = ["Services"]

_log = logging.getLogger("openengine")
_REPORT_S = 1.0  # the longest that a drain says nothing
_RANK_FIELDS = (
    "running_requests",
    "queued_requests",
    "used_kv_blocks",
    "total_kv_blocks",
    "prefill_batch_size",
    "decode_batch_size",
)


class Services:
    """Answers for one engine, from any thread."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    def load(self, include_per_rank: bool) -> LoadInfo:
        load = self._loop.load
        if not include_per_rank:
            return load
        values = {name: getattr(load, name) for name in _RANK_FIELDS}
        return replace(load, ranks=(RankLoadInfo(data_parallel_rank=RANK, **values),))

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

    # ---- drain -----------------------------------------------------------------------------------

    def drain(
        self, *, stop_accepting: bool, deadline_ms: int | None, abort_after_deadline: bool
    ) -> Iterator[DrainResponse]:
        """Reports until nothing is in flight. Raises InvalidArgument for a deadline that is none, before anything changes."""
        is_integer = isinstance(deadline_ms, (int, np.integer)) and not isinstance(deadline_ms, bool)
        if deadline_ms is not None and not (is_integer and deadline_ms >= 0):
            raise InvalidArgument(f"deadline_ms must be a non-negative integer, not {deadline_ms!r:.80}")
        if stop_accepting:
            self._loop.stop_accepting()
        return self._drain_reports(deadline_ms, abort_after_deadline)

    def _drain_reports(self, deadline_ms: int | None, abort_after_deadline: bool) -> Iterator[DrainResponse]:
        loop = self._loop
        deadline = None if deadline_ms is None else time.monotonic() + deadline_ms / 1000
        yield DrainResponse(DrainState.STARTED, loop.num_in_flight, 0)
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if loop.wait_idle(_REPORT_S if left is None else max(0.0, min(_REPORT_S, left))):
                yield DrainResponse(DrainState.COMPLETE, 0, 0)
                return
            if left is None or left > 0:
                yield DrainResponse(DrainState.IN_PROGRESS, loop.num_in_flight, 0)
                continue
            if not abort_after_deadline:
                raise Draining(
                    f"{loop.num_in_flight} requests are still in flight at the deadline of {deadline_ms} ms; they go on, "
                    "drain again to wait for them or pass abort_after_deadline=True"
                )
            _log.warning("the drain's limit of %d ms cancels %d requests", deadline_ms, loop.num_in_flight)
            loop.abort_all(f"the engine drains, and its limit of {deadline_ms} ms came before the request's end")
            deadline = None

    # ---- what this engine does not do ------------------------------------------------------------

    def refuse_lora(self, *, starts_work: bool = False) -> NoReturn:
        """Raises UnsupportedTask; Draining before that where something new would start."""
        if starts_work:
            self._loop.check_accepting()
        raise UnsupportedTask("this engine serves no LoRA adapters; model_info().supports_lora is false")
