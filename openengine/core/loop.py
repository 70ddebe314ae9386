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
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from openengine.core.output import Candidates, PromptTokens
from openengine.core.runner import ModelRunner, StepResult
from openengine.core.scheduler import Scheduler, StepPlan, TokenDelta
from openengine.core.sequence import Sequence, SequenceGroup
from openengine.errors import (
    DuplicateRequest,
    Draining,
    InternalError,
    OpenEngineError,
    Overloaded,
    PreconditionFailed,
    RequestNotFound,
)
from openengine.ops import sampling
from openengine.ops.sampling import TokenScores
from openengine.types import (
    AbortStatus,
    FinishReason,
    GenerateEvent,
    GenerationFinished,
    LoadInfo,
    PromptOutput,
    TokenInfo,
    Usage,
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

    def deliver(self, events: list[GenerateEvent], *, error: OpenEngineError | None, is_last: bool) -> list[Any]:
        """Take events; returns (event loop, future) pairs that wait for them. Must not block or raise."""


class EngineLoop:
    """Runs steps until closed. `scheduler` and `runner` belong to the loop thread from `start` on."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        token_text: Callable[[int], str],
        max_queued_requests: int,
        num_threads: int | None,
        instance_id: str,
    ) -> None:
        self._scheduler = scheduler
        self._runner: ModelRunner | None = runner
        self._token_text = token_text
        self._max_queued = max_queued_requests
        self._num_threads = num_threads
        self._instance_id = instance_id
        self.state = LoopState.STARTING
        self.num_steps = 0
        self._changed = threading.Condition()  # guards the four below; notified when a request ends
        self._open: dict[str, SequenceGroup] = {}
        self._num_queued = 0
        self._num_arrived = 0
        self._finished_ids: OrderedDict[str, None] = OrderedDict()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._deliveries: dict[SequenceGroup, list[GenerateEvent]] = {}
        self._errors: dict[SequenceGroup, OpenEngineError] = {}
        self._load = self._snapshot()
        self._thread = threading.Thread(target=self._run, name="openengine-loop", daemon=True)

    # ---- callers' side ---------------------------------------------------------------------------

    def start(self) -> None:
        self.state = LoopState.READY
        self._thread.start()

    @property
    def load(self) -> LoadInfo:
        """The latest snapshot; brought up to date with requests admitted since."""
        return self._load

    @property
    def num_open(self) -> int:
        return len(self._open)

    def admit(self, group: SequenceGroup) -> None:
        """Accept a request: the acceptance boundary. Whatever goes wrong later reaches its sink.

        Raises PreconditionFailed (closed), Draining, DuplicateRequest or Overloaded; then nothing was accepted.
        """
        with self._changed:
            if self.state is LoopState.STOPPED:
                raise PreconditionFailed("the engine is closed; create a new Engine")
            if self.state is LoopState.DRAINING:
                raise Draining("the engine is draining and takes no new requests; send it to another engine")
            if group.request_id in self._open:
                raise DuplicateRequest(
                    f"request_id {group.request_id!r} is in flight; wait for it to finish or choose another id"
                )
            if self._num_queued >= self._max_queued:
                raise Overloaded(
                    f"{self._num_queued} requests are queued, the limit max_queued_requests is {self._max_queued}; "
                    "try again later or raise the limit",
                    retry_after_ms=100,
                )
            self._num_arrived += 1
            group.arrival = self._num_arrived
            group.arrival_time = time.monotonic()
            self._open[group.request_id] = group
            self._num_queued += 1
            self._post(lambda: self._scheduler.add(group))

    def abort(self, request_id: str) -> AbortStatus:
        """End a request as cancelled before the next step. Raises RequestNotFound for an id never seen."""
        with self._changed:
            group = self._open.get(request_id)
            if group is not None:
                self._post(lambda: self._cancel(group))
                return AbortStatus.ABORTED
            if request_id in self._finished_ids:
                return AbortStatus.ALREADY_FINISHED
        raise RequestNotFound(f"request_id {request_id!r} is not known; it never arrived or finished long ago")

    def abort_group(self, group: SequenceGroup) -> None:
        """End this very request, whatever its id means by now."""
        with self._changed:
            if self._open.get(group.request_id) is group:
                self._post(lambda: self._cancel(group))

    def abort_all(self) -> AbortStatus:
        with self._changed:
            groups = list(self._open.values())
            self._post(lambda: [self._cancel(group) for group in groups])
        return AbortStatus.ABORTED if groups else AbortStatus.ALREADY_FINISHED

    def call(self, function: Callable[[Scheduler], Any]) -> Any:
        """Run `function(scheduler)` in the loop thread between steps and return its result."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function(self._scheduler))
            except Exception as exc:
                future.set_exception(exc)

        with self._changed:
            if self.state is LoopState.STOPPED:
                raise PreconditionFailed("the engine is closed; create a new Engine")
            self._post(run)
        return future.result()

    def stop_accepting(self) -> None:
        """Refuse new requests from now on; final."""
        with self._changed:
            if self.state is not LoopState.STOPPED:
                self.state = LoopState.DRAINING

    def wait_idle(self, timeout: float | None) -> bool:
        """Wait until no request is open; False when `timeout` seconds pass first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, timeout)

    def close(self) -> None:
        """Cancel what is open, end the thread and drop what it owns. Idempotent."""
        with self._changed:
            was_running = self.state is not LoopState.STOPPED
            self.state = LoopState.STOPPED
        self._wake.set()
        if was_running and self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.set()

    # ---- the loop thread -------------------------------------------------------------------------

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        with torch.inference_mode():
            while self.state is not LoopState.STOPPED:
                self._wake.clear()
                self._contain(self._turn)
                if not self._scheduler.has_work:
                    self._wake.wait()
            self._contain(self._shut_down)
        self._runner = None

    def _contain(self, work: Callable[[], None]) -> None:
        """A fault of ours fails the open requests, so that none of them hangs, and the loop goes on."""
        try:
            work()
        except Exception as exc:
            _log.exception("the engine loop failed")
            self._fail_all(InternalError(f"the engine failed: {exc!r}"))
            self._deliver()

    def _turn(self) -> None:
        self._drain_commands()
        plan = self._step() if self._scheduler.has_work else None
        self._deliver()
        self._load = self._snapshot(plan)

    def _shut_down(self) -> None:
        self._drain_commands()
        for group in list(self._open.values()):
            self._cancel(group)
        self._deliver()
        self._load = self._snapshot()

    def _drain_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _step(self) -> StepPlan:
        """The whole engine."""
        plan = self._scheduler.schedule()
        self._note_started(plan)
        result = self._execute(plan)
        if result is not None:
            self._process(self._commit(plan, result))
        self.num_steps += 1
        return plan

    def _execute(self, plan: StepPlan) -> StepResult | None:
        """Run the model; a failure ends only the requests of this plan."""
        try:
            result = self._runner.execute(plan)
        except Exception as exc:
            _log.exception("a forward pass failed")
            if self.state is LoopState.READY:
                self.state = LoopState.DEGRADED
            error = InternalError(f"the forward pass failed: {exc!r}")
            for group in {id(item.seq.group): item.seq.group for item in plan.scheduled}.values():
                self._fail(group, error)
            return None
        if self.state is LoopState.DEGRADED:
            self.state = LoopState.READY
        return result

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
                        self._fail(seq.group, InternalError("the model returned logits that are not numbers (NaN)"))
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
            output = stream.take() if reason is None else stream.finish()
            if output is not None:
                self._emit(group, output)
            if reason is not None:
                self._scheduler.finish(seq, reason, match)
                message = group.max_len_reason if reason is FinishReason.LENGTH else ""
                self._emit_finished(seq, message)

    # ---- events ----------------------------------------------------------------------------------

    def _emit(self, group: SequenceGroup, event: GenerateEvent) -> None:
        self._deliveries.setdefault(group, []).append(event)

    def _emit_prompt(self, group: SequenceGroup) -> None:
        if group.score_start is None:
            return
        scores = sampling.concatenate(group.prompt_scores)
        group.prompt_scores = []
        self._emit(group, PromptOutput(PromptTokens(group.prompt_ids, self._token_text, group.score_start, scores)))

    def _emit_finished(self, seq: Sequence, message: str = "") -> None:
        group = seq.group
        usage = self._usage(group) if group.is_finished else None
        self._emit(group, GenerationFinished(seq.index, seq.finish_reason, message, seq.stop_match, usage))

    def _usage(self, group: SequenceGroup) -> Usage:
        completion = group.num_output_tokens
        cached = group.num_cached_tokens if self._scheduler.blocks.enable_prefix_cache else None
        return Usage(group.num_prompt, completion, group.num_prompt + completion, cached)

    def _cancel(self, group: SequenceGroup) -> None:
        for seq in group.sequences:
            if not seq.is_finished:
                output = seq.stream.finish()
                if output is not None:
                    self._emit(group, output)
                self._scheduler.finish(seq, FinishReason.CANCELLED)
                self._emit_finished(seq)

    def _fail(self, group: SequenceGroup, error: OpenEngineError) -> None:
        for seq in group.sequences:
            if not seq.is_finished:
                self._scheduler.fail(seq, error)
        self._errors[group] = error
        self._deliveries.setdefault(group, [])

    def _fail_all(self, error: OpenEngineError) -> None:
        """Fail every open request and start from an empty scheduler, whose books can no longer be trusted."""
        self._deliveries.clear()
        for group in list(self._open.values()):
            for seq in group.sequences:
                seq.error = error
            self._errors[group] = error
            self._deliveries[group] = []
        self._scheduler.reset()

    def _deliver(self) -> None:
        """Hand this step's events to their sinks, with one wake-up per event loop."""
        waiting: dict[Any, list[Any]] = {}
        deliveries, self._deliveries = self._deliveries, {}
        for group, events in deliveries.items():
            error = self._errors.pop(group, None)
            is_last = error is not None or group.is_finished
            if is_last:
                self._close_books(group)
            sink = group.sink
            if is_last:
                group.sink = None  # the request is over: nothing of it may keep its caller's engine alive
            for event_loop, future in sink.deliver(events, error=error, is_last=is_last):
                waiting.setdefault(event_loop, []).append(future)
        for event_loop, futures in waiting.items():
            try:
                event_loop.call_soon_threadsafe(_resolve, futures)
            except RuntimeError:
                pass  # the caller closed its event loop: nobody waits any more

    # ---- books -----------------------------------------------------------------------------------

    def _note_started(self, plan: StepPlan) -> None:
        now = time.monotonic()
        for seq in plan.admitted:
            if seq.group.start_time is None:
                seq.group.start_time = now
                with self._changed:
                    self._num_queued -= 1

    def _close_books(self, group: SequenceGroup) -> None:
        with self._changed:
            if group.start_time is None:
                self._num_queued -= 1
            self._open.pop(group.request_id, None)
            self._finished_ids[group.request_id] = None
            while len(self._finished_ids) > _REMEMBERED_IDS:
                self._finished_ids.popitem(last=False)
            self._changed.notify_all()

    def _snapshot(self, plan: StepPlan | None = None) -> LoadInfo:
        running = self._scheduler.running
        blocks = self._scheduler.blocks
        num_running = len({id(seq.group) for seq in running})
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
            waiting_tokens=sum(seq.num_tokens for seq in self._scheduler.waiting),
            prefill_batch_size=len(scheduled) - num_decodes,
            decode_batch_size=num_decodes,
        )


def _resolve(futures: list[Any]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
