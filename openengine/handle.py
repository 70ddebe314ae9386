"""`Handle`: one accepted request, as its caller sees it; `EventStream`: reading it as a stream.

The loop thread writes (`deliver`), any thread or event loop reads. A handle keeps its engine alive
until the request has ended, and no longer.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Generic, TypeVar

from openengine.core.item_results import ItemCollector, ItemResults
from openengine.core.output import ResultCollector
from openengine.core.sequence import SequenceGroup
from openengine.core.subscription import Waiter
from openengine.core.task_work import TaskItemOutput
from openengine.errors import InvalidArgument, OpenEngineError, PreconditionFailed
from openengine.results import GenerationResult, Timing
from openengine.types import GenerateEvent, Usage

__all__ = ["EventStream", "Handle", "LateStream"]

_log = logging.getLogger("openengine")
_Result = TypeVar("_Result", GenerationResult, ItemResults)


class Handle(Generic[_Result]):
    """A running request. Iterate it (`for` or `async for`) for its events, or ask for `result()`; both work, in any order.

    Each event is delivered once, to whoever reads it first. An error of the engine is raised by both.
    `cancel()` ends the request; its result then has `finish_reason="cancelled"`. `usage` is what the request has used, once it
    has ended in whatever way; its last event has the same, unless that is an error.

    Of a task the result is `ItemResults`, and a cancelled one raises Cancelled.
    """

    def __init__(
        self, group: SequenceGroup, cancel: Callable[[SequenceGroup], None], *, keep_events: bool = True
    ) -> None:
        self.request_id = group.request_id
        self._pid = os.getpid()
        self.usage: Usage | None = None
        self._group: SequenceGroup | None = group
        self._cancel: Callable[[SequenceGroup], None] | None = cancel
        self._collector: ResultCollector | ItemCollector | None = _collector(group)
        self._events: deque[GenerateEvent] | None = deque() if keep_events else None
        self._lock = threading.RLock()
        # Taken by the lock itself, in C: an interrupt could come between the two steps of a Condition's own `with`.
        self._changed = threading.Condition(self._lock)
        self._on_done: Callable[[], None] | None = None
        self._waiters: list[Waiter] = []
        self._result: _Result | None = None
        self._error: OpenEngineError | None = None

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._result is not None or self._error is not None

    def _check_process(self) -> None:
        if not self.done and os.getpid() != self._pid:
            raise PreconditionFailed("this request runs in another process; ask for its result there")

    def cancel(self) -> None:
        """End the request before the next step; does nothing when it has ended."""
        group, cancel = self._group, self._cancel
        if group is not None and cancel is not None:
            cancel(group)

    def result(self, timeout: float | None = None) -> _Result:
        """Wait for the end and return everything the request produced.

        Raises TimeoutError after `timeout` seconds (the request goes on), or the error that ended the request.
        """
        self._check_process()
        with self._lock:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(
                    f"request {self.request_id!r} has not finished within {timeout} s; it is still running"
                )
        return self._outcome()

    async def aresult(self) -> _Result:
        """`result()` for an event loop. Cancelling the awaiting task leaves the request running; see `cancel`."""
        self._check_process()
        while not self.done:
            await self._wait(lambda: self.done)
        return self._outcome()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end without raising its error; False when `timeout` seconds pass first."""
        self._check_process()
        with self._lock:
            return self._changed.wait_for(lambda: self.done, timeout)

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the request ends, in the loop thread, or now if it has; it must not block or raise."""
        with self._lock:
            if not self.done:
                assert self._on_done is None, "one callback per handle"
                self._on_done = callback
                return
        callback()

    def stream_only(self) -> None:
        """Keep nothing for `result()`, whose outputs are empty then: for a reader of events who forgets them."""
        collector = self._collector
        if isinstance(collector, ResultCollector):
            collector.keeps_content = False

    def unread_events(self) -> list[GenerateEvent]:
        """The events that are there and that nobody has read; they stay to be read."""
        with self._lock:
            return list(self._events or ())

    def drop_unread(self) -> None:
        """Forget the events that are there: nobody is going to read them."""
        with self._lock:
            if self._events is not None:
                self._events.clear()

    def __iter__(self) -> Iterator[GenerateEvent]:
        while (event := self.next_event()) is not None:
            yield event

    async def __aiter__(self) -> AsyncIterator[GenerateEvent]:
        while (event := await self.anext_event()) is not None:
            yield event

    def next_event(self) -> GenerateEvent | None:
        """The next event, waiting for it; None after the last. Raises the error that ended the request."""
        self._check_process()
        with self._lock:
            self._changed.wait_for(lambda: self._events or self.done)
            if self._events:
                return self._events.popleft()
        if self._error is not None:
            raise copy.copy(self._error)
        return None

    async def anext_event(self) -> GenerateEvent | None:
        """`next_event` for an event loop."""
        self._check_process()
        while True:
            with self._lock:
                if self._events:
                    return self._events.popleft()
            if self.done:
                if self._error is not None:
                    raise copy.copy(self._error)
                return None
            await self._wait(lambda: self._events or self.done)

    async def _wait(self, is_ready: Callable[[], Any]) -> None:
        event_loop = asyncio.get_running_loop()
        with self._lock:
            if is_ready():
                return
            waiter = (event_loop, event_loop.create_future())
            self._waiters.append(waiter)
        try:
            await waiter[1]
        finally:
            with self._lock:
                if waiter in self._waiters:  # cancelled
                    self._waiters.remove(waiter)

    def _outcome(self) -> _Result:
        if self._error is not None:
            # A copy for each caller: a raised error refers to the frames it passed, and with them to the engine.
            raise copy.copy(self._error)
        assert self._result is not None
        return self._result

    # ---- the loop thread's side ------------------------------------------------------------------

    def deliver(
        self, events: list[GenerateEvent | TaskItemOutput], *, error: OpenEngineError | None, is_last: bool
    ) -> list[Waiter]:
        """Take a step's events; returns who waits for them in event loops."""
        assert self._collector is not None and self._group is not None, "no event may follow the last"
        for event in events:
            self._collector.add(event)
        result = self._collector.result(timing=_timing(self._group)) if is_last and error is None else None
        if is_last:
            self.usage = self._group.usage
        with self._lock:
            if self._events is not None:
                self._events.extend(events)
            if is_last:
                self._result, self._error = result, error
                self._group = self._cancel = self._collector = None
                on_done, self._on_done = self._on_done, None
            waiters = []
            if self._events is not None or is_last:
                waiters, self._waiters = self._waiters, waiters
                self._changed.notify_all()
        if is_last and on_done is not None:
            try:
                on_done()
            except Exception:
                _log.exception("request %s: its on_done callback failed", self.request_id)
        return waiters

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self.done else "running"
        return f"Handle({self.request_id!r}, {state})"


def _collector(group: SequenceGroup) -> ResultCollector | ItemCollector:
    if group.task is not None:
        return ItemCollector(group)
    return ResultCollector(
        group.request_id,
        sampling=group.sampling,
        stopping=group.stopping,
        guide=None if group.guide is None else group.guide.source,
    )


def _timing(group: SequenceGroup) -> Timing:
    now = time.monotonic()
    start, first = group.start_time, group.first_token_time
    later = max((seq.num_output for seq in group.sequences), default=0) - 1
    return Timing(
        queue_s=(now if start is None else start) - group.arrival_time,
        time_to_first_token_s=None if first is None else first - group.arrival_time,
        time_per_token_s=None if first is None or later < 1 else (now - first) / later,
        total_s=now - group.arrival_time,
    )


class EventStream:
    """Events of one request, for `for` or `async for`. Leaving it early, in whatever way, cancels the request."""

    def __init__(self, handle: Handle[GenerationResult]) -> None:
        self.handle = handle

    def __iter__(self) -> EventStream:
        return self

    def __next__(self) -> GenerateEvent:
        try:
            event = self.handle.next_event()
        except BaseException:
            self.close()
            raise
        if event is None:
            raise StopIteration
        return event

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> GenerateEvent:
        try:
            event = await self.handle.anext_event()
        except BaseException:
            self.close()
            raise
        if event is None:
            raise StopAsyncIteration
        return event

    def close(self) -> None:
        """Cancel the request unless it has ended."""
        self.handle.cancel()

    async def aclose(self) -> None:
        self.close()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> EventStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "handle"):  # an interrupt may have come before
            self.close()


class LateStream(EventStream):
    """A stream for `async for` whose request begins when the first event is asked for: `handle` is None before that."""

    def __init__(self, start: Callable[[], Awaitable[Handle[GenerationResult]]]) -> None:
        self._start: Callable[[], Awaitable[Handle[GenerationResult]]] | None = start
        self.handle = None

    def __next__(self) -> GenerateEvent:
        raise InvalidArgument("this stream is for `async for`; use stream() for `for`")

    async def __anext__(self) -> GenerateEvent:
        start, self._start = self._start, None
        if start is not None:
            self.handle = await start()
        if self.handle is None:
            raise StopAsyncIteration
        return await super().__anext__()

    def close(self) -> None:
        self._start = None
        if self.handle is not None:
            super().close()
