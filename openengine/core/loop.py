"""`EngineLoop`: the one thread that owns scheduler, blocks, runner and outputs.

    callers      admit · abort · call ──▶ commands ──▶│
    loop thread  drain commands → schedule → execute → commit → output → deliver → snapshot │──▶ sinks

Callers post commands and read immutable snapshots; they never touch what the thread owns. The lock
guards only the books of admission: which ids are open, how many wait, which finished lately.

Does not own what becomes of a step's results (output_processor.py), nor what is told of it (reports.py).

    STARTING ──▶ READY ⇄ DEGRADED ──▶ DRAINING ──▶ STOPPED       (a failed step degrades, the next good one heals)
"""

from __future__ import annotations

import enum
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import torch

from openengine.core.encoder_runner import EncoderRunner
from openengine.core.encoder_scheduler import EncoderScheduler
from openengine.core.memory import trim_allocator
from openengine.core.output_processor import OutputProcessor
from openengine.core.reports import Reports
from openengine.core.runner import ModelRunner, StepResult
from openengine.core.scheduler import Scheduler
from openengine.core.sequence import SequenceGroup
from openengine.core.step_plan import StepPlan
from openengine.core.subscription import Subscription, wake
from openengine.errors import (
    Draining,
    DuplicateRequest,
    InternalError,
    Overloaded,
    PreconditionFailed,
    RequestNotFound,
)
from openengine.event_types import KvEventBatch, RuntimeEvent, RuntimeEventType
from openengine.service_types import AbortStatus, LoadInfo

__all__ = ["EngineLoop", "LoopState"]

_log = logging.getLogger("openengine")
_REMEMBERED_IDS = 4096  # finished requests that an abort still recognizes


class LoopState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    STOPPED = "stopped"


class EngineLoop:
    """Runs steps until closed. What it is made of belongs to the loop thread from `start` on.

    `num_threads` are torch's in that thread; None leaves them as they are.
    """

    def __init__(
        self,
        scheduler: Scheduler | EncoderScheduler,
        runner: ModelRunner | EncoderRunner,
        output: OutputProcessor,
        reports: Reports,
        *,
        max_queued_requests: int,
        num_threads: int | None,
    ) -> None:
        self._scheduler = scheduler
        self._runner: ModelRunner | EncoderRunner | None = runner
        self._output: OutputProcessor | None = output
        self._reports = reports
        self._max_queued = max_queued_requests
        self._num_threads = num_threads
        self.state = LoopState.STARTING
        self.num_steps = 0
        self._pid = os.getpid()
        self._lock = threading.RLock()  # guards state, _open and the counts below; notified on change
        # Taken by the lock itself, in C: an interrupt could come between the two steps of a Condition's own `with`.
        self._changed = threading.Condition(self._lock)
        self._open: dict[str, SequenceGroup] = {}
        self._num_queued = 0
        self._num_undelivered = 0  # accepted requests, without probes, whose last event has not been delivered
        self._num_arrived = 0
        self._num_accepted_tokens = 0  # of the prompts of all requests ever accepted
        self._ending: set[str] = set()  # ids of open requests that an abort ends before the next step
        self._finished_ids: OrderedDict[str, None] = OrderedDict()
        # A put from a destructor that the garbage collector runs inside another put is safe with this queue only.
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="openengine-loop", daemon=True)

    # ---- callers' side ---------------------------------------------------------------------------

    def start(self) -> None:
        self.state = LoopState.READY
        self._thread.start()

    @property
    def load(self) -> LoadInfo:
        """The load at this moment, requests admitted since the latest step included."""
        return self._reports.load(num_open=len(self._open), num_accepted_tokens=self._num_accepted_tokens)

    @property
    def num_in_flight(self) -> int:
        """Accepted requests that have not ended, without probes."""
        return self._num_undelivered

    @property
    def is_here(self) -> bool:
        """Whether this process is the one whose thread runs the loop."""
        return os.getpid() == self._pid

    def is_open(self, request_id: str) -> bool:
        """Whether a request of this id is in flight."""
        return request_id in self._open

    def check_unused(self, request_id: str) -> None:
        """Raises DuplicateRequest where a request of this id is in flight."""
        if self.is_open(request_id):
            raise DuplicateRequest(
                f"request_id {request_id!r:.80} is in flight; wait for it to finish or choose another id"
            )

    def admit(self, group: SequenceGroup, *, wait: bool = False) -> None:
        """Accept a request: the acceptance boundary. Whatever goes wrong later reaches its sink.

        `wait`: until the queue has room, where Overloaded would be raised. A probe is taken while draining and
        beyond the limit. Raises PreconditionFailed (closed), Draining, DuplicateRequest or Overloaded; then
        nothing was accepted.
        """
        self._check_process()
        with self._lock:
            self._check_acceptable(group)
            while self._num_queued >= self._max_queued and not group.is_probe:
                if not wait:
                    raise Overloaded(
                        f"{self._num_queued} requests are queued, the limit max_queued_requests is {self._max_queued}; "
                        "try again later or raise the limit",
                        retry_after_ms=100,
                    )
                self._changed.wait()
                self._check_acceptable(group)
            self._num_arrived += 1
            group.arrival = self._num_arrived
            group.arrival_time = time.monotonic()
            self._open[group.request_id] = group
            self._num_queued += not group.is_probe
            self._num_undelivered += not group.is_probe
            self._num_accepted_tokens += group.num_prompt
            self._commands.put(lambda: self._add(group))

    def abort(self, request_id: str) -> AbortStatus:
        """End a request as cancelled before the next step. One that is ending for this already has finished for its
        caller. Raises RequestNotFound for an id never seen."""
        self._check_process()
        with self._lock:
            group = self._open.get(request_id)
            if group is not None:
                return self._end([group])
            if request_id in self._finished_ids:
                return AbortStatus.ALREADY_FINISHED
        raise RequestNotFound(f"request_id {request_id!r:.80} is not known; it never arrived or finished long ago")

    def abort_group(self, group: SequenceGroup) -> None:
        """End this very request, whatever its id means by now. Does nothing in another process."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._open.get(group.request_id) is group:
                self._end([group])

    def abort_all(self, message: str = "") -> AbortStatus:
        """End every request but probes; `message` says why in their last events."""
        self._check_process()
        with self._lock:
            return self._end([group for group in self._open.values() if not group.is_probe], message)

    def call(self, function: Callable[[Scheduler], Any]) -> Any:
        """Run `function(scheduler)` in the loop thread between steps and return its result."""
        self._check_process()
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function(self._scheduler))
            except Exception as exc:
                future.set_exception(exc)

        with self._lock:
            self._check_open()
            self._commands.put(run)
        return future.result()

    def subscribe_kv_events(self, *, include_snapshot: bool = False, **place: Any) -> Subscription[KvEventBatch]:
        """KV events as `EventLog.subscribe` gives them. Raises PreconditionFailed when they are off."""
        self._check_process()
        with self._lock:
            self._check_open()
            subscription = self._reports.subscribe_kv_events(include_snapshot=include_snapshot, **place)
            if include_snapshot:
                self._commands.put(lambda: self._reports.begin(subscription))
        return subscription

    def subscribe_runtime_events(self, types: Iterable[RuntimeEventType]) -> Subscription[RuntimeEvent]:
        """Runtime events of these types from now on, of all types for none."""
        return self._reports.subscribe_runtime_events(types)

    def stop_accepting(self) -> None:
        """Refuse new requests from now on; final."""
        self._check_process()
        with self._lock:
            if self.state is not LoopState.STOPPED:
                self.state = LoopState.DRAINING
                self._changed.notify_all()

    def wait_idle(self, timeout: float | None) -> bool:
        """Wait until nothing is in flight; False when `timeout` seconds pass first."""
        self._check_process()
        with self._lock:
            return self._changed.wait_for(lambda: not self._num_undelivered, timeout)

    def close(self) -> None:
        """Cancel what is open, end the thread and drop what it owns. Idempotent; does nothing in another process."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self.state = LoopState.STOPPED
            self._changed.notify_all()
        self._commands.put(lambda: None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
            trim_allocator()  # once more: what its workers held has come back only now

    def check_accepting(self) -> None:
        """Raises what `admit` raises for every request at present: PreconditionFailed (closed) or Draining."""
        self._check_open()
        if self.state is LoopState.DRAINING:
            raise Draining("the engine is draining and takes no new requests; send it to another engine")

    def _end(self, groups: list[SequenceGroup], message: str = "") -> AbortStatus:
        """Have those of `groups` cancelled that are not about to be already. Called with the lock held."""
        ending = [group for group in groups if group.request_id not in self._ending]
        if not ending:
            return AbortStatus.ALREADY_FINISHED
        self._ending.update(group.request_id for group in ending)
        self._commands.put(lambda: [self._output.cancel(group, message) for group in ending])
        return AbortStatus.ABORTED

    def _check_acceptable(self, group: SequenceGroup) -> None:
        if group.is_probe:
            self._check_open()
        else:
            self.check_accepting()
        self.check_unused(group.request_id)

    def _check_open(self) -> None:
        if self.state is LoopState.STOPPED:
            raise PreconditionFailed("the engine is closed; create a new Engine")

    def _check_process(self) -> None:
        # A fork copies neither the loop's thread nor the state of its locks.
        if os.getpid() != self._pid:
            raise PreconditionFailed("this engine was created in another process; create one in each process")

    # ---- the loop thread -------------------------------------------------------------------------

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        try:
            with torch.inference_mode():
                while self.state is not LoopState.STOPPED:
                    self._contain(self._turn)
                    if not self._scheduler.has_work:
                        command = self._commands.get()
                        self._contain(command)
        finally:  # also when the containment itself has failed: nobody may wait for a thread that is gone
            with self._lock:
                self.state = LoopState.STOPPED
                self._changed.notify_all()
            self._contain(self._shut_down)
        self._reports.close()
        self._runner.close()
        self._runner = self._output = None  # the model and its tokenizer go: nothing is computed or decoded any more
        trim_allocator()

    def _contain(self, work: Callable[[], None]) -> None:
        """A fault of ours fails the open requests, so that none of them hangs, and the loop goes on."""
        try:
            work()
        except BaseException as exc:  # native code may raise what is no Exception, and this thread has nobody else
            _log.exception("the engine loop failed")
            self._degrade()
            self._output.fail_all(list(self._open.values()), InternalError(f"the engine failed: {exc!r}"))
            self._deliver()

    def _turn(self) -> None:
        self._drain_commands()
        self._deliver(self._step() if self._scheduler.has_work else None)

    def _shut_down(self) -> None:
        self._drain_commands()
        for group in list(self._open.values()):
            self._output.cancel(group)
        self._deliver()

    def _drain_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _add(self, group: SequenceGroup) -> None:
        self._reports.count_queued(group)
        if not group.is_finished:  # a fault of the loop may have ended it before it began
            self._scheduler.add(group)
            self._reports.tell_queue(group, "enqueue", self._num_queued)

    def _step(self) -> StepPlan:
        """The whole engine."""
        plan = self._scheduler.schedule()
        self._note_started(plan)
        self._reports.begin_step(plan)
        started = time.monotonic()
        result = self._execute(plan)
        self._reports.tell_forward_pass(plan, step=self.num_steps, seconds=time.monotonic() - started)
        if result is not None:
            self._output.process(self._output.commit(plan, result))
            self._output.finish_items(result.pooled)
        self.num_steps += 1
        return plan

    def _execute(self, plan: StepPlan) -> StepResult | None:
        """Run the model; a failure ends only the requests of this plan."""
        try:
            result = self._runner.execute(plan)
        except Exception as exc:
            _log.exception("a forward pass failed")
            self._degrade()
            error = InternalError(f"the forward pass failed: {exc!r}")
            # Those admitted in this step may not have reached their slots, even if nothing of theirs was to be computed.
            sequences = [*(item.seq for item in plan.scheduled), *plan.admitted]
            for group in dict.fromkeys(seq.group for seq in sequences):
                self._output.fail(group, error)
            return None
        with self._lock:
            if self.state is LoopState.DEGRADED:
                self.state = LoopState.READY
        return result

    def _degrade(self) -> None:
        with self._lock:
            if self.state is LoopState.READY:
                self.state = LoopState.DEGRADED

    def _deliver(self, plan: StepPlan | None = None) -> None:
        """Hand this step's events to their sinks, with one wake-up per event loop.

        Books and load come first: whoever sees the end of a request finds both without it.
        """
        self._reports.record_changes()
        deliveries, errors = self._output.take()
        ended = {group for group in deliveries if group in errors or group.is_finished}
        for group in ended:
            self._close_books(group)
        waiters = self._reports.publish(plan, num_ended=len(ended))
        for group, events in deliveries.items():
            error, is_last = errors.get(group), group in ended
            try:
                waiters += group.sink.deliver(events, error=error, is_last=is_last)
            except Exception:  # one caller's trouble is not another's
                _log.exception("request %s: its events could not be delivered", group.request_id)
            if is_last:
                # Over: its parts refer to one another and to the caller's engine, and must not outlive this.
                group.sink, group.sequences = None, []
        wake(waiters)
        if ended:
            with self._lock:
                self._num_undelivered -= sum(not group.is_probe for group in ended)
                self._changed.notify_all()

    # ---- books -----------------------------------------------------------------------------------

    def _note_started(self, plan: StepPlan) -> None:
        now = time.monotonic()
        for seq in plan.admitted:
            if seq.group.start_time is None:
                seq.group.start_time = now
                with self._lock:
                    self._num_queued -= not seq.group.is_probe
                    self._changed.notify_all()
                self._reports.tell_queue(seq.group, "dequeue", self._num_queued)

    def _close_books(self, group: SequenceGroup) -> None:
        with self._lock:
            if group.start_time is None:
                self._num_queued -= not group.is_probe
            self._open.pop(group.request_id, None)
            self._ending.discard(group.request_id)
            self._finished_ids[group.request_id] = None
            self._finished_ids.move_to_end(group.request_id)
            while len(self._finished_ids) > _REMEMBERED_IDS:
                self._finished_ids.popitem(last=False)
        if group.start_time is None:
            self._reports.tell_queue(group, "dequeue", self._num_queued)
