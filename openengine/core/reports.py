"""`Reports`: what others may know of the engine: its load, what enters its cache, what it does.

    scheduler, plan ──▶ load · KV events · runtime events ──▶ readers, woken once per step

Owns the load. Does not own the queues of events and who reads them (events.py, runtime_events.py), nor the books of
admission, whose figures it is given.

The scheduler changes between steps only, so that a snapshot taken when a step begins, and one when it has ended, are true
until the next: what a reader gets is the load at the moment it asks, with that time on it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from openengine.core.encoder_scheduler import EncoderScheduler
from openengine.core.events import EventLog
from openengine.core.runtime_events import RuntimeEventBus
from openengine.core.scheduler import Scheduler
from openengine.core.sequence import SequenceGroup
from openengine.core.step_plan import StepPlan
from openengine.core.subscription import Subscription, Waiter
from openengine.errors import PreconditionFailed
from openengine.event_types import KvEventBatch, RuntimeEvent, RuntimeEventType
from openengine.service_types import LoadInfo

__all__ = ["Reports"]


class Reports:
    """Written by the loop thread; `load` and the subscriptions are for any thread.

    `kv_log` is None where KV events are off; then `scheduler.blocks` records none.
    """

    def __init__(
        self,
        scheduler: Scheduler | EncoderScheduler,
        *,
        instance_id: str,
        kv_log: EventLog | None,
        runtime_events: RuntimeEventBus,
    ) -> None:
        self._scheduler = scheduler
        self._instance_id = instance_id
        self._kv_log = kv_log
        self._runtime_events = runtime_events
        self._waiters: list[Waiter] = []  # readers of KV events, woken with the rest of the step
        self._latest_time = 0  # of a load that was asked for
        self._num_queued_tokens = 0  # of all requests that the scheduler ever got
        self._load = self._snapshot(None)

    # ---- readers' side ---------------------------------------------------------------------------

    def load(self, *, num_open: int, num_accepted_tokens: int) -> LoadInfo:
        """The load now. What waits is known from the requests in flight and from the prompt tokens of all ever accepted, of
        which the scheduler may not have got the last ones."""
        load, num_queued_tokens = self._load
        self._latest_time = now = max(self._latest_time, time.time_ns())
        # A step may have begun since the figures were taken, hence the floors.
        return replace(
            load,
            timestamp_unix_nanos=now,
            queued_requests=max(0, num_open - load.running_requests),
            waiting_tokens=load.waiting_tokens + max(0, num_accepted_tokens - num_queued_tokens),
        )

    def subscribe_kv_events(self, *, include_snapshot: bool, **place: Any) -> Subscription[KvEventBatch]:
        """As `EventLog.subscribe`; a snapshot is there after `begin`. Raises PreconditionFailed when KV events are off."""
        if self._kv_log is None:
            raise PreconditionFailed(
                "KV events are off; create the engine with a prefix cache and an event_buffer_size above 0"
            )
        return self._kv_log.subscribe(include_snapshot=include_snapshot, **place)

    def subscribe_runtime_events(self, types: Iterable[RuntimeEventType]) -> Subscription[RuntimeEvent]:
        """As `RuntimeEventBus.subscribe`."""
        return self._runtime_events.subscribe(types)

    # ---- the loop thread's side ------------------------------------------------------------------

    def begin(self, subscription: Subscription[KvEventBatch]) -> None:
        """Give a new subscription the snapshot of the cache that it waits for."""
        self.record_changes()
        self._kv_log.begin(subscription, self._scheduler.blocks.snapshot())

    def record_changes(self) -> None:
        """Log what has entered and left the prefix cache."""
        if self._kv_log is not None:
            self._waiters += self._kv_log.append(self._scheduler.blocks.take_events())

    def count_queued(self, group: SequenceGroup) -> None:
        """The scheduler has got `group`, or it ended before that."""
        self._num_queued_tokens += group.num_prompt

    def begin_step(self, plan: StepPlan) -> None:
        """The load while `plan` runs becomes readable."""
        self._load = self._snapshot(plan)

    def tell_queue(self, group: SequenceGroup, action: str, num_queued: int) -> None:
        if RuntimeEventType.QUEUE in self._runtime_events.wanted and not group.is_probe:
            attributes = {"action": action, "request_id": group.request_id, "queued_requests": num_queued}
            self._runtime_events.emit(RuntimeEventType.QUEUE, attributes)

    def tell_forward_pass(self, plan: StepPlan, *, step: int, seconds: float) -> None:
        if RuntimeEventType.FORWARD_PASS not in self._runtime_events.wanted or not plan.scheduled:
            return
        attributes = {
            "step": step,
            "num_tokens": plan.num_tokens,
            "prefill_sequences": len(plan.scheduled) - plan.num_decodes,
            "decode_sequences": plan.num_decodes,
            "duration_ms": f"{seconds * 1000:.3f}",
        }
        self._runtime_events.emit(RuntimeEventType.FORWARD_PASS, attributes)

    def publish(self, plan: StepPlan | None, *, num_ended: int) -> list[Waiter]:
        """The load after `plan` and the events of the step become readable; returns whom to `wake`."""
        self._load = self._snapshot(plan)
        if RuntimeEventType.BATCH in self._runtime_events.wanted:
            self._tell_batch(plan, num_ended)
        waiters, self._waiters = self._waiters, []
        return waiters + self._runtime_events.flush()

    def close(self) -> None:
        """End every subscription after what is there for it."""
        if self._kv_log is not None:
            self._kv_log.close()
        self._runtime_events.close()

    def _tell_batch(self, plan: StepPlan | None, num_ended: int) -> None:
        num_admitted, num_preempted = (len(plan.admitted), len(plan.preempted)) if plan is not None else (0, 0)
        if num_admitted or num_preempted or num_ended:
            attributes = {
                "admitted": num_admitted,
                "preempted": num_preempted,
                "ended": num_ended,
                "running_requests": self._load[0].running_requests,
            }
            self._runtime_events.emit(RuntimeEventType.BATCH, attributes)

    def _snapshot(self, plan: StepPlan | None) -> tuple[LoadInfo, int]:
        """What the scheduler knows of the load, and the tokens it had got by then. A batch is that of the latest step, and
        none when nothing runs any more. A model without a KV cache has no figures of one."""
        scheduler, blocks = self._scheduler, self._scheduler.blocks
        num_running, has_kv = scheduler.num_running_groups, blocks.num_blocks > 0
        num_scheduled, num_decodes = (len(plan.scheduled), plan.num_decodes) if plan and num_running else (0, 0)
        load = LoadInfo(
            instance_id=self._instance_id,
            running_requests=num_running,
            active_kv_sessions=0,
            used_kv_blocks=blocks.num_used if has_kv else None,
            total_kv_blocks=blocks.num_blocks if has_kv else None,
            running_tokens=sum(seq.num_computed for seq in scheduler.running) if has_kv else None,
            waiting_tokens=scheduler.num_waiting_tokens,
            prefill_batch_size=num_scheduled - num_decodes,
            decode_batch_size=num_decodes,
        )
        return load, self._num_queued_tokens
