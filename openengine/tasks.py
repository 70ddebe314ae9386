"""`Tasks`: embed, classify and score of an engine: lists of any length in, one response out; for one input its output.

    texts ── build, check and tokenize all ──▶ PreparedTask ── requests of some steps' tokens ──▶ loop
                                                            ◀─ raw arrays, in order ──           a few at a time

Everything is checked before anything runs. Of a long list only a few requests are in flight, so that other callers get their
turn; a request id, and a request of the contract, stay one request. Does not own what a request means (task_admission.py).
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from openengine.batches import Admit, aadmit, cancel_and_wait
from openengine.core.item_results import ItemResults
from openengine.core.sequence import SequenceGroup
from openengine.core.task_admission import PreparedTask, TaskPreparer
from openengine.errors import InvalidArgument
from openengine.handle import Handle
from openengine.progress import check_progress, progress_bar
from openengine.task_options import build_classify, build_embed, build_score
from openengine.task_results import TaskResponse, TaskResult, TaskUsage, total_usage
from openengine.task_types import ClassifyRequest, EmbedRequest, ScoreRequest, TaskRequest

__all__ = ["Call", "PreparedTask", "TaskHandle", "Tasks"]

_WINDOW = 4  # requests of one call in flight: enough that a step is full while the next ones are prepared
_STEPS_PER_REQUEST = 2
_MAX_ITEMS = 512


class Tasks:
    """`check_accepting` raises what admission would raise for any request. Where something is started, `admit` takes a group
    and gives its handle; it is not kept, since it belongs to the engine that owns this."""

    def __init__(self, preparer: TaskPreparer, check_accepting: Callable[[], None], *, tokens_per_step: int) -> None:
        self.preparer = preparer
        self._check_accepting = check_accepting
        self._tokens_per_request = _STEPS_PER_REQUEST * tokens_per_step

    # ---- preparing -------------------------------------------------------------------------------

    def prepare(self, request: TaskRequest) -> PreparedTask:
        """Check and tokenize a request of the contract."""
        self._check_accepting()
        for kind, prepare in (
            (EmbedRequest, self.preparer.embed),
            (ClassifyRequest, self.preparer.classify),
            (ScoreRequest, self.preparer.score),
        ):
            if isinstance(request, kind):
                return prepare(request)
        raise InvalidArgument(f"a task is an EmbedRequest, ClassifyRequest or ScoreRequest, not {request!r:.80}")

    def embed(self, inputs: Any, options: dict[str, Any]) -> Call:
        self._check("embed", inputs)
        request, local = build_embed(inputs, options)
        is_split = _is_split(request, inputs)
        prepared = self.preparer.embed(
            request, prompt=local.prompt, prompt_name=local.prompt_name, truncate=local.truncate, is_split=is_split
        )
        return self._call(prepared, is_split, "embedding", is_single=local.is_single)

    def classify(self, inputs: Any, options: dict[str, Any]) -> Call:
        self._check("classify", inputs)
        request, local = build_classify(inputs, options)
        is_split = _is_split(request, inputs)
        prepared = self.preparer.classify(request, truncate=local.truncate, is_split=is_split)
        return self._call(prepared, is_split, "classifying", is_single=local.is_single)

    def score(self, query: Any, candidates: Any, options: dict[str, Any]) -> Call:
        self._check("score", query)
        request, local = build_score(query, candidates, options)
        is_split = _is_split(request, query)
        prepared = self.preparer.score(request, labels=local.labels, truncate=local.truncate, is_split=is_split)
        return self._call(prepared, is_split, "scoring")

    def _check(self, task: str, given: Any) -> None:
        """Whether the model does it comes before what is wrong with the inputs, but after a request's id and model."""
        self._check_accepting()
        if not isinstance(given, TaskRequest):
            self.preparer.check(task)

    def _call(self, prepared: PreparedTask, is_split: bool, doing: str, *, is_single: bool = False) -> Call:
        parts = self._parts(prepared) if is_split else [(0, len(prepared.items))]
        return Call(prepared, parts, doing, is_single)

    def _parts(self, prepared: PreparedTask) -> list[tuple[int, int]]:
        """Ranges of items of a few steps' tokens each."""
        parts, start, tokens = [], 0, 0
        for index, item in enumerate(prepared.items):
            tokens += len(item.token_ids) - item.num_shared
            if tokens >= self._tokens_per_request or index + 1 - start == _MAX_ITEMS:
                parts.append((start, index + 1))
                start, tokens = index + 1, 0
        if start < len(prepared.items):
            parts.append((start, len(prepared.items)))
        return parts

    # ---- running ---------------------------------------------------------------------------------

    def run(self, admit: Admit, call: Call, progress: bool | None) -> TaskResult:
        """Run a call; an interrupt cancels its requests and nothing else."""
        check_progress(progress)
        total, values, usages = len(call.prepared.items), [], []
        progress = progress if len(call.parts) > 1 else False
        with (
            progress_bar(progress, total=total, desc=call.doing, unit="item") as bar,
            closing(_results(admit, call)) as results,
        ):
            for raw in results:
                values += raw.values
                usages.append(raw.usage)
                bar(len(values), total)
        return call.respond(values, usages)

    async def arun(self, admit: Admit, call: Call) -> TaskResult:
        """`run` for an event loop. Cancelling the task cancels the requests."""
        values: list[np.ndarray] = []
        usages: list[TaskUsage] = []
        pending: deque[Handle[ItemResults]] = deque()

        async def take() -> None:
            raw = await pending[0].aresult()
            pending.popleft()
            values.extend(raw.values)
            usages.append(raw.usage)

        try:
            for group in call.groups():
                if len(pending) == _WINDOW:
                    await take()
                pending.append(await aadmit(admit, group))
            while pending:
                await take()
        except BaseException:
            for handle in pending:
                handle.cancel()
            raise
        return call.respond(values, usages)

    def submit(self, admit: Admit, request: TaskRequest | PreparedTask) -> TaskHandle:
        """Start a request and return its handle at once. What this raises was not accepted."""
        prepared = request if isinstance(request, PreparedTask) else self.prepare(request)
        return TaskHandle(admit(prepared.group()), prepared)


@dataclass(frozen=True, slots=True)
class Call:
    """A prepared call, and the ranges of its items that become requests. `is_single`: it has one input, outside a list."""

    prepared: PreparedTask
    parts: list[tuple[int, int]]
    doing: str
    is_single: bool

    def groups(self) -> Iterator[SequenceGroup]:
        first = self.prepared.request_id
        for number, (start, stop) in enumerate(self.parts):
            yield self.prepared.group(start, stop, request_id=str(uuid.uuid4()) if number else first)

    def respond(self, values: Sequence[np.ndarray], usages: Sequence[TaskUsage]) -> TaskResult:
        response = self.prepared.respond(values, total_usage(usages))
        return response[0] if self.is_single else response


def _is_split(request: TaskRequest, given: Any) -> bool:
    """Whether a call may become several requests: a request of the contract and one with an id stay one."""
    return request is not given and request.context.request_id is None


def _results(admit: Admit, call: Call) -> Iterator[ItemResults]:
    """What the requests of a call give, in order; a few of them run at a time."""
    pending: deque[Handle[ItemResults]] = deque()
    try:
        for group in call.groups():
            if len(pending) == _WINDOW:
                yield pending[0].result()
                pending.popleft()
            pending.append(admit(group, wait=True))
        while pending:
            yield pending[0].result()
            pending.popleft()
    finally:
        cancel_and_wait(pending)


class TaskHandle:
    """An accepted request: ask for its `result()`. Cancelled, it raises Cancelled."""

    def __init__(self, handle: Handle[ItemResults], prepared: PreparedTask) -> None:
        self.request_id = handle.request_id
        self._handle = handle
        self._prepared = prepared

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._handle.done

    @property
    def usage(self) -> TaskUsage | None:
        """What the request has used, once it has ended in whatever way: of a cancelled one all that it brought."""
        usage = self._handle.usage
        if usage is None:
            return None
        return TaskUsage(input_tokens=usage.prompt_tokens, cached_input_tokens=usage.cached_prompt_tokens)

    def cancel(self) -> None:
        """End the request before the next step; does nothing when it has ended."""
        self._handle.cancel()

    def on_done(self, callback: Callable[[], None]) -> None:
        """As `Handle.on_done`."""
        self._handle.on_done(callback)

    def result(self, timeout: float | None = None) -> TaskResponse:
        """Wait for the response. Raises TimeoutError after `timeout` seconds, or the error that ended the request."""
        return self._respond(self._handle.result(timeout))

    async def aresult(self) -> TaskResponse:
        """`result()` for an event loop. Cancelling the awaiting task leaves the request running; see `cancel`."""
        return self._respond(await self._handle.aresult())

    async def await_end(self) -> None:
        """Wait until the request has ended; raises its error."""
        await self._handle.aresult()

    def _respond(self, raw: ItemResults) -> TaskResponse:
        return self._prepared.respond(raw.values, raw.usage)
