"""`EngineLoop`: the one thread that owns scheduler, blocks, runner and outputs.

    callers      admit · abort · call ──▶ commands ──▶│
    loop thread  drain commands → schedule → execute → commit → output → deliver → snapshot │──▶ sinks

Callers post commands and read immutable snapshots; they never touch what the thread owns. The lock
guards only the books of admission: which ids are open, how many wait, which finished lately.

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
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from openengine.core.events import EventLog
from openengine.core.memory import trim_allocator
from openengine.core.output import Candidates, PromptTokens
from openengine.core.runner import ModelRunner, StepResult
from openengine.core.runtime_events import RuntimeEventBus
from openengine.core.scheduler import Scheduler, StepPlan, TokenDelta
from openengine.core.sequence import Sequence, SequenceGroup, SequenceState
from openengine.core.subscription import Subscription, Waiter, wake
from openengine.core.task_work import TaskItemOutput
from openengine.errors import (
    Cancelled,
    Draining,
    DuplicateRequest,
    InternalError,
    InvalidArgument,
    OpenEngineError,
    Overloaded,
    PreconditionFailed,
    RequestNotFound,
)
from openengine.ops import sampling
from openengine.ops.sampling import TokenScores
from openengine.service_types import KvEventBatch, RuntimeEventType
from openengine.types import (
    AbortStatus,
    FinishReason,
    GenerateEvent,
    GenerationFinished,
    LoadInfo,
    PromptOutput,
    StopMatch,
    TokenInfo,
)

__all__ = ["EngineLoop", "LoopState", "Sink"]

_log = logging.getLogger("openengine")
_REMEMBERED_IDS = 4096  # finished requests that an abort still recognizes


class LoopState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    STOPPED = "stopped"


class Sink(Protocol):
    """Receives one request's events, in the loop thread."""

    def deliver(
        self, events: list[GenerateEvent | TaskItemOutput], *, error: OpenEngineError | None, is_last: bool
    ) -> list[Waiter]:
        """Take events; returns who waits for them in event loops. Must not block or raise."""


class EngineLoop:
    """Runs steps until closed. `scheduler` and `runner` belong to the loop thread from `start` on.

    `kv_log` is None where KV events are off; then `scheduler.blocks` records none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        token_text: Callable[[int], str],
        max_queued_requests: int,
        num_threads: int | None,
        instance_id: str,
        kv_log: EventLog | None,
        runtime_events: RuntimeEventBus,
    ) -> None:
        self._scheduler = scheduler
        self._runner: ModelRunner | None = runner
        self._token_text = token_text
        self._max_queued = max_queued_requests
        self._num_threads = num_threads
        self._instance_id = instance_id
        self._kv_log = kv_log
        self.runtime_events = runtime_events
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
        self._finished_ids: OrderedDict[str, None] = OrderedDict()
        # A put from a destructor that the garbage collector runs inside another put is safe with this queue only.
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._deliveries: dict[SequenceGroup, list[GenerateEvent | TaskItemOutput]] = {}
        self._errors: dict[SequenceGroup, OpenEngineError] = {}
        self._waiters: list[Waiter] = []  # readers of KV events, woken with the rest of the step
        self._load = self._snapshot()
        self._thread = threading.Thread(target=self._run, name="openengine-loop", daemon=True)

    # ---- callers' side ---------------------------------------------------------------------------

    def start(self) -> None:
        self.state = LoopState.READY
        self._thread.start()

    @property
    def load(self) -> LoadInfo:
        """The latest snapshot; brought up to date with requests admitted since."""
        load = self._load
        return replace(load, queued_requests=max(0, len(self._open) - load.running_requests))

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
            self._commands.put(lambda: self._add(group))

    def abort(self, request_id: str) -> AbortStatus:
        """End a request as cancelled before the next step. Raises RequestNotFound for an id never seen."""
        self._check_process()
        with self._lock:
            group = self._open.get(request_id)
            if group is not None:
                self._commands.put(lambda: self._cancel(group))
                return AbortStatus.ABORTED
            if request_id in self._finished_ids:
                return AbortStatus.ALREADY_FINISHED
        raise RequestNotFound(f"request_id {request_id!r:.80} is not known; it never arrived or finished long ago")

    def abort_group(self, group: SequenceGroup) -> None:
        """End this very request, whatever its id means by now. Does nothing in another process."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._open.get(group.request_id) is group:
                self._commands.put(lambda: self._cancel(group))

    def abort_all(self, message: str = "") -> AbortStatus:
        """End every request but probes; `message` says why in their last events."""
        self._check_process()
        with self._lock:
            groups = [group for group in self._open.values() if not group.is_probe]
            self._commands.put(lambda: [self._cancel(group, message) for group in groups])
        return AbortStatus.ABORTED if groups else AbortStatus.ALREADY_FINISHED

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
            if self._kv_log is None:
                raise PreconditionFailed(
                    "KV events are off; create the engine with a prefix cache and an event_buffer_size above 0"
                )
            subscription = self._kv_log.subscribe(include_snapshot=include_snapshot, **place)
            if include_snapshot:
                self._commands.put(lambda: self._begin(subscription))
        return subscription

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

    def _check_acceptable(self, group: SequenceGroup) -> None:
        if group.is_probe:
            self._check_open()
        else:
            self.check_accepting()
        if group.request_id in self._open:
            raise DuplicateRequest(
                f"request_id {group.request_id!r:.80} is in flight; wait for it to finish or choose another id"
            )

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
        if self._kv_log is not None:
            self._kv_log.close()
        self.runtime_events.close()
        self._runner = None
        self._token_text = str  # its tokenizer goes too: nothing is decoded any more
        trim_allocator()

    def _contain(self, work: Callable[[], None]) -> None:
        """A fault of ours fails the open requests, so that none of them hangs, and the loop goes on."""
        try:
            work()
        except BaseException as exc:  # native code may raise what is no Exception, and this thread has nobody else
            _log.exception("the engine loop failed")
            self._degrade()
            self._fail_all(InternalError(f"the engine failed: {exc!r}"))
            self._deliver()

    def _turn(self) -> None:
        self._drain_commands()
        self._deliver(self._step() if self._scheduler.has_work else None)

    def _shut_down(self) -> None:
        self._drain_commands()
        for group in list(self._open.values()):
            self._cancel(group)
        self._deliver()

    def _drain_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _add(self, group: SequenceGroup) -> None:
        if not group.is_finished:  # a fault of the loop may have ended it before it began
            self._scheduler.add(group)
            self._tell_queue(group, "enqueue")

    def _step(self) -> StepPlan:
        """The whole engine."""
        plan = self._scheduler.schedule()
        self._note_started(plan)
        started = time.monotonic()
        result = self._execute(plan)
        self._tell_forward_pass(plan, time.monotonic() - started)
        if result is not None:
            self._process(self._commit(plan, result))
            self._finish_items(result.pooled)
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
                self._fail(group, error)
            return None
        with self._lock:
            if self.state is LoopState.DEGRADED:
                self.state = LoopState.READY
        return result

    def _degrade(self) -> None:
        with self._lock:
            if self.state is LoopState.READY:
                self.state = LoopState.DEGRADED

    def _commit(self, plan: StepPlan, result: StepResult) -> list[tuple[TokenDelta, TokenInfo | None]]:
        """Record the step and wrap its tokens. Rows without a finite logit fail their request first."""
        sampled = result.sampled
        if sampled is None:
            return [(delta, None) for delta in self._scheduler.commit(plan, ())]
        if sampled.failed.any():
            row = 0
            for item in plan.scheduled:
                for seq in item.samples:
                    if sampled.failed[row] and not seq.is_finished:
                        self._fail(seq.group, _why_no_token(seq))
                    row += 1
        token_ids = sampled.token_ids.tolist()
        deltas = self._scheduler.commit(plan, token_ids)
        return [(delta, self._token_info(delta, sampled.scores)) for delta in deltas]

    def _token_info(self, delta: TokenDelta, scores: list[TokenScores | None] | None) -> TokenInfo | None:
        if delta.token_id < 0:
            return None
        token = self._token_text(delta.token_id)
        score = None if scores is None else scores[delta.row]
        if score is None:
            return TokenInfo(delta.token_id, token)
        candidates = ()
        if score.candidate_ids is not None:
            candidates = Candidates(
                score.candidate_ids[0], score.candidate_logprobs[0], score.candidate_ranks[0], self._token_text
            )
        return TokenInfo(delta.token_id, token, float(score.logprobs[0]), int(score.ranks[0]), candidates)

    def _process(self, deltas: list[tuple[TokenDelta, TokenInfo | None]]) -> None:
        """The one loop over sequences: text, stops, events."""
        now = time.monotonic()
        for delta, info in deltas:
            seq, group, stream = delta.seq, delta.seq.group, delta.seq.stream
            if group.first_token_time is None:
                group.first_token_time = now
                self._emit_prompt(group)
            if seq.is_finished:
                continue  # its prompt's scores were no numbers
            reason, match = delta.reason, delta.stop_match
            if info is None:
                pass  # max_tokens=0: an output without tokens
            elif match is not None and match.eos_token_id is not None:
                stream.push_eos(info)
            elif match is not None:
                stream.push_stop_token(info)
            else:
                match = stream.push(info, seq.num_output)
                reason = FinishReason.STOP if match is not None else reason
                if match is None and seq.guide_state is not None:
                    try:
                        reason, match = self._follow_guide(seq, info.token_id, reason)
                    except InternalError as exc:
                        self._fail(group, exc)
                        continue
            output = stream.take() if reason is None else stream.finish()
            if output is not None:
                self._emit(group, output)
            if reason is not None:
                message = _length_message(seq, info) if reason is FinishReason.LENGTH else ""
                self._scheduler.finish(seq, reason, match)
                self._emit_finished(seq, message)

    def _follow_guide(
        self, seq: Sequence, token_id: int, reason: FinishReason | None
    ) -> tuple[FinishReason | None, StopMatch | None]:
        """Tell the guide of the drawn token, and append those that must come after it; says how they end the output."""
        state = seq.guide_state
        state.accept(token_id)
        while seq.group.jumps_ahead and state.forced and reason is None:
            token_id = state.forced[-1]
            reason = self._scheduler.append_forced(seq, token_id)
            match = seq.stream.push(TokenInfo(token_id, self._token_text(token_id)), seq.num_output)
            if match is not None:
                return FinishReason.STOP, match
            state.accept(token_id)
        return reason, None

    def _finish_items(self, pooled: list[tuple[Sequence, np.ndarray]]) -> None:
        """Emit what the items of tasks have become, and end them."""
        for seq, values in pooled:
            if seq.is_finished:
                continue  # its request failed with an item before it
            if not np.isfinite(values).all():
                self._fail(seq.group, InternalError("the model returned values that are not numbers (NaN)"))
                continue
            self._emit(seq.group, TaskItemOutput(seq.index, values))
            self._scheduler.finish(seq, FinishReason.STOP)

    # ---- events ----------------------------------------------------------------------------------

    def _emit(self, group: SequenceGroup, event: GenerateEvent | TaskItemOutput) -> None:
        self._deliveries.setdefault(group, []).append(event)

    def _emit_prompt(self, group: SequenceGroup) -> None:
        if group.score_start is None:
            return
        scores = sampling.concatenate(group.prompt_scores)
        group.prompt_scores = []
        if np.isnan(scores.logprobs).any():
            self._fail(group, InternalError("the model returned logits that are not numbers (NaN) for the prompt"))
            return
        self._emit(group, PromptOutput(PromptTokens(group.prompt_ids, self._token_text, group.score_start, scores)))

    def _emit_finished(self, seq: Sequence, message: str = "") -> None:
        group = seq.group
        usage = group.usage if group.is_finished else None
        self._emit(group, GenerationFinished(seq.index, seq.finish_reason, message, seq.stop_match, usage))

    def _cancel(self, group: SequenceGroup, message: str = "") -> None:
        if group.task is not None:
            self._cancel_items(group, message)
            return
        for seq in group.sequences:
            if not seq.is_finished:
                output = seq.stream.finish()
                if output is not None:
                    self._emit(group, output)
                self._scheduler.finish(seq, FinishReason.CANCELLED)
                self._emit_finished(seq, message)

    def _cancel_items(self, group: SequenceGroup, message: str) -> None:
        """A task has no partial result: it ends with an error."""
        if group.is_finished:
            return
        for seq in group.sequences:
            if not seq.is_finished:
                self._scheduler.finish(seq, FinishReason.CANCELLED)
        reason = f": {message}" if message else ""
        self._errors[group] = Cancelled(f"request {group.request_id!r:.80} was cancelled{reason}")
        self._deliveries.setdefault(group, [])

    def _fail(self, group: SequenceGroup, error: OpenEngineError) -> None:
        for seq in group.sequences:
            if not seq.is_finished:
                self._scheduler.fail(seq, error)
        self._errors[group] = error
        self._deliveries.setdefault(group, [])

    def _fail_all(self, error: OpenEngineError) -> None:
        """Fail every open request and start from an empty scheduler, whose books can no longer be trusted."""
        self._deliveries.clear()
        self._scheduler.reset()
        for group in list(self._open.values()):
            for seq in group.sequences:
                seq.error = error
                if not seq.is_finished:  # one that the scheduler had not got yet
                    seq.move_to(SequenceState.FAILED)
            self._errors[group] = error
            self._deliveries[group] = []

    def _deliver(self, plan: StepPlan | None = None) -> None:
        """Hand this step's events to their sinks, with one wake-up per event loop.

        Books and load come first: whoever sees the end of a request finds both without it.
        """
        self._record_changes()
        deliveries, self._deliveries = self._deliveries, {}
        errors, self._errors = self._errors, {}
        ended = {group for group in deliveries if group in errors or group.is_finished}
        for group in ended:
            self._close_books(group)
        self._load = self._snapshot(plan)
        self._tell_batch(plan, len(ended))
        waiters, self._waiters = [*self._waiters, *self.runtime_events.flush()], []
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

    # ---- KV and runtime events -------------------------------------------------------------------

    def _begin(self, subscription: Subscription[KvEventBatch]) -> None:
        self._record_changes()
        self._kv_log.begin(subscription, self._scheduler.blocks.snapshot())

    def _record_changes(self) -> None:
        if self._kv_log is not None:
            self._waiters += self._kv_log.append(self._scheduler.blocks.take_events())

    def _tell_queue(self, group: SequenceGroup, action: str) -> None:
        if RuntimeEventType.QUEUE in self.runtime_events.wanted and not group.is_probe:
            attributes = {"action": action, "request_id": group.request_id, "queued_requests": self._num_queued}
            self.runtime_events.emit(RuntimeEventType.QUEUE, attributes)

    def _tell_forward_pass(self, plan: StepPlan, seconds: float) -> None:
        if RuntimeEventType.FORWARD_PASS not in self.runtime_events.wanted or not plan.scheduled:
            return
        attributes = {
            "step": self.num_steps,
            "num_tokens": plan.num_tokens,
            "prefill_sequences": len(plan.scheduled) - plan.num_decodes,
            "decode_sequences": plan.num_decodes,
            "duration_ms": f"{seconds * 1000:.3f}",
        }
        self.runtime_events.emit(RuntimeEventType.FORWARD_PASS, attributes)

    def _tell_batch(self, plan: StepPlan | None, num_ended: int) -> None:
        if RuntimeEventType.BATCH not in self.runtime_events.wanted:
            return
        num_admitted, num_preempted = (len(plan.admitted), len(plan.preempted)) if plan is not None else (0, 0)
        if num_admitted or num_preempted or num_ended:
            attributes = {
                "admitted": num_admitted,
                "preempted": num_preempted,
                "ended": num_ended,
                "running_requests": self._load.running_requests,
            }
            self.runtime_events.emit(RuntimeEventType.BATCH, attributes)

    # ---- books -----------------------------------------------------------------------------------

    def _note_started(self, plan: StepPlan) -> None:
        now = time.monotonic()
        for seq in plan.admitted:
            if seq.group.start_time is None:
                seq.group.start_time = now
                with self._lock:
                    self._num_queued -= not seq.group.is_probe
                    self._changed.notify_all()
                self._tell_queue(seq.group, "dequeue")

    def _close_books(self, group: SequenceGroup) -> None:
        with self._lock:
            if group.start_time is None:
                self._num_queued -= not group.is_probe
            self._open.pop(group.request_id, None)
            self._finished_ids[group.request_id] = None
            self._finished_ids.move_to_end(group.request_id)
            while len(self._finished_ids) > _REMEMBERED_IDS:
                self._finished_ids.popitem(last=False)
        if group.start_time is None:
            self._tell_queue(group, "dequeue")

    def _snapshot(self, plan: StepPlan | None = None) -> LoadInfo:
        running = self._scheduler.running
        blocks = self._scheduler.blocks
        num_running = self._scheduler.num_running_groups
        scheduled = plan.scheduled if plan is not None else ()
        num_decodes = plan.num_decodes if plan is not None else 0
        return LoadInfo(
            instance_id=self._instance_id,
            timestamp_unix_nanos=time.time_ns(),
            running_requests=num_running,
            queued_requests=max(0, len(self._open) - num_running),
            active_kv_sessions=0,
            used_kv_blocks=blocks.num_used,
            total_kv_blocks=blocks.num_blocks,
            running_tokens=sum(seq.num_computed for seq in running),
            waiting_tokens=self._scheduler.num_waiting_tokens,
            prefill_batch_size=len(scheduled) - num_decodes,
            decode_batch_size=num_decodes,
        )


def _why_no_token(seq: Sequence) -> OpenEngineError:
    """Why no token could be drawn: the model's logits, or a guide that allows none."""
    state, group = seq.guide_state, seq.group
    if state is not None:
        is_early = seq.num_output < (group.stopping.min_tokens or 0)
        has_token = group.guide.leaves_token(state, min_tokens_left=is_early)
        if state.error is not None:
            return InternalError(f"the guide cannot be followed any further: {state.error}")
        if not has_token:
            return InvalidArgument(
                f"the guide and the stop token ids leave no token after {seq.num_output} tokens: all that the guide allows end "
                "the output, which it does not allow yet; take those out of stop_token_ids"
            )
    return InternalError("the model returned logits that are not numbers (NaN)")


def _length_message(seq: Sequence, last: TokenInfo | None) -> str:
    """Which limit ended an output, and under a guide what that cut."""
    message, state = seq.group.max_len_reason, seq.guide_state
    if state is None:
        return message
    if last is None:
        return f"{message}; nothing was generated under the guide"
    cut = "complete under its guide" if state.may_end else "cut off before it was complete under its guide"
    return f"{message}; the output is {cut}"
