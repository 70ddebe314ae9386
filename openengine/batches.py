"""Batches of any size: a window of them is in flight at a time, and results come as they finish.

An item is a prepared group, or a result that holds the error it was refused with. `window` is how many are in flight:
enough to keep every slot busy, and within the queue.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from openengine.core.sequence import SequenceGroup
from openengine.errors import InvalidArgument, OpenEngineError, Overloaded
from openengine.handle import Handle
from openengine.progress import check_progress, progress_bar
from openengine.results import GenerationResult

__all__ = [
    "Admit",
    "aadmit",
    "arun_batch",
    "arun_one",
    "cancel_and_wait",
    "check_on_error",
    "failed_item",
    "run_batch",
    "run_one",
]

# (group, *, wait) -> handle; with `wait` a full queue is waited for, else Overloaded
Admit = Callable[..., Handle[Any]]

_RETRY_S = 0.02  # between attempts of an event loop's batch to enter a full queue


def run_one(start: Callable[[], Handle[GenerationResult]], request_id: str, *, on_error: str) -> GenerationResult:
    """The result of the request that `start` begins. An interrupt ends it and waits for that."""
    handle = None
    try:
        handle = start()
        return handle.result()
    except OpenEngineError as exc:
        if on_error == "raise":
            raise
        return _failed(request_id, exc)
    except BaseException:
        cancel_and_wait([handle] if handle else [])
        raise


async def arun_one(
    start: Callable[[], Awaitable[Handle[GenerationResult]]], request_id: str, *, on_error: str
) -> GenerationResult:
    """`run_one` for an event loop. Cancelling it cancels the request."""
    handle = None
    try:
        handle = await start()
        return await handle.aresult()
    except OpenEngineError as exc:
        if on_error == "raise":
            raise
        return _failed(request_id, exc)
    except BaseException:
        if handle is not None:
            handle.cancel()
        raise


def run_batch(
    admit: Admit, items: list[SequenceGroup | GenerationResult], *, window: int, on_error: str, progress: bool | None
) -> Iterator[tuple[int, GenerationResult]]:
    """Yield (index, result) as items finish; one that is a result already is yielded as it is."""
    check_progress(progress)
    finished = _Finished()
    pending: dict[int, Handle[GenerationResult]] = {}
    position = 0
    total = len(items)
    with progress_bar(progress if total > 1 else False, total=total, desc="generating", unit="req") as bar:
        try:
            for count in range(total):
                while position < total and len(pending) < window:
                    item, items[position] = items[position], None
                    _start(admit, position, item, pending, finished, total, on_error)
                    position += 1
                index, result = finished.get()
                handle = pending.pop(index, None)
                if handle is not None:
                    result = _result_or_error(handle, on_error, index, total)
                bar(count + 1, total)
                yield index, result
        finally:
            cancel_and_wait(pending.values())


def _start(
    admit: Admit,
    index: int,
    item: SequenceGroup | GenerationResult,
    pending: dict[int, Handle[GenerationResult]],
    finished: _Finished,
    total: int,
    on_error: str,
) -> None:
    if isinstance(item, GenerationResult):
        finished.put(index, item)
        return
    try:
        handle = admit(item, wait=True)
    except OpenEngineError as exc:
        finished.put(index, failed_item(exc, item.request_id, index=index, total=total, on_error=on_error))
        return
    pending[index] = handle
    handle.on_done(lambda: finished.put(index, None))


async def arun_batch(
    start: Callable[..., Awaitable[Handle[GenerationResult]]],
    items: list[SequenceGroup | GenerationResult],
    *,
    window: int,
    on_error: str,
) -> list[GenerationResult]:
    """`run_batch` for an event loop: all results, in order. `start` waits for room. Cancelling it cancels what runs."""
    room = asyncio.Semaphore(window)

    async def run(index: int, item: SequenceGroup | GenerationResult) -> GenerationResult:
        if isinstance(item, GenerationResult):
            return item
        async with room:
            try:
                handle = await start(item)
                try:
                    return await handle.aresult()
                except asyncio.CancelledError:
                    handle.cancel()
                    raise
            except OpenEngineError as exc:
                return failed_item(exc, item.request_id, index=index, total=len(items), on_error=on_error)

    tasks = [asyncio.ensure_future(run(index, item)) for index, item in enumerate(items)]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def aadmit(admit: Admit, group: SequenceGroup) -> Handle[Any]:
    """Wait for room in the queue while the event loop runs on."""
    while True:
        try:
            return admit(group, wait=False)
        except Overloaded:
            await asyncio.sleep(_RETRY_S)


def _result_or_error(handle: Handle[GenerationResult], on_error: str, index: int, total: int) -> GenerationResult:
    try:
        return handle.result()
    except OpenEngineError as exc:
        return failed_item(exc, handle.request_id, index=index, total=total, on_error=on_error)


def check_on_error(on_error: str) -> None:
    """Raises InvalidArgument for what is neither "raise" nor "return"."""
    if not isinstance(on_error, str) or on_error not in ("raise", "return"):
        raise InvalidArgument(f"on_error must be 'raise' or 'return', not {on_error!r:.80}")


def failed_item(error: OpenEngineError, request_id: str, *, index: int, total: int, on_error: str) -> GenerationResult:
    """A result in the place of an item's error, or where `on_error` says "raise" the error, naming the item."""
    if on_error != "raise":
        return _failed(request_id, error)
    named = copy.copy(error)
    named.message = f"item {index} of {total}: {error.message}"
    named.args = (named.message,)
    raise named from error


def _failed(request_id: str, error: OpenEngineError) -> GenerationResult:
    """A result with a copy of the error, because a raised one refers to frames and they to the engine."""
    return GenerationResult(request_id=request_id, error=copy.copy(error))


def cancel_and_wait(handles: Iterable[Handle[Any]]) -> None:
    """End these requests and wait until the loop has given back what they held."""
    handles = list(handles)
    for handle in handles:
        handle.cancel()
    for handle in handles:
        handle.wait()


class _Finished:
    """A queue of finished items that `get` waits on interruptibly."""

    def __init__(self) -> None:
        self._items: deque[tuple[int, GenerationResult | None]] = deque()
        self._lock = threading.RLock()
        # Taken by the lock itself, in C: an interrupt could come between the two steps of a Condition's own `with`.
        self._changed = threading.Condition(self._lock)

    def put(self, index: int, result: GenerationResult | None) -> None:
        with self._lock:
            self._items.append((index, result))
            self._changed.notify()

    def get(self) -> tuple[int, GenerationResult | None]:
        with self._lock:
            self._changed.wait_for(lambda: self._items)
            return self._items.popleft()
