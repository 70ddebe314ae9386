"""`Subscription`: a stream of events that one thread writes and readers in threads and event loops follow.

Owns waiting and waking. Does not own what is read: a `Source` keeps that (events.py, runtime_events.py).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from openengine.errors import OpenEngineError

__all__ = ["Signal", "Source", "Subscription", "Waiter", "wake"]

Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]
T = TypeVar("T")
_T_co = TypeVar("_T_co", covariant=True)


class Subscription(Generic[T]):
    """A stream of events, for `for` or `async for`; one reader at a time. It ends with the engine, or by `close`.

    Raises Overloaded, as its last word, when the reader fell behind what is kept. Leaving it early disturbs nobody.
    """

    def __init__(self, signal: Signal, source: Source[T]) -> None:
        self._signal = signal
        self.source = source
        self._is_closed = False

    def poll(self) -> T | None:
        """The next event if it is there already, else None."""
        if self._is_closed:
            return None
        try:
            return self.source.take()
        except OpenEngineError:
            self.close()
            raise

    def close(self) -> None:
        """End the stream, also for a reader that is waiting. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.source.close()
            wake(self._signal.notify())

    def __iter__(self) -> Subscription[T]:
        return self

    def __next__(self) -> T:
        while True:
            # Both are read before the source, so that whatever comes after that is seen in the next round.
            version, is_last = self._signal.version, self._signal.is_closed
            event = self.poll()
            if event is not None:
                return event
            if is_last or self._is_closed:
                raise StopIteration
            self._signal.wait(version)

    def __aiter__(self) -> Subscription[T]:
        return self

    async def __anext__(self) -> T:
        while True:
            version, is_last = self._signal.version, self._signal.is_closed
            event = self.poll()
            if event is not None:
                return event
            if is_last or self._is_closed:
                raise StopAsyncIteration
            await self._signal.wait_async(version)

    def __enter__(self) -> Subscription[T]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Source(Protocol[_T_co]):
    def take(self) -> _T_co | None:
        """The next event, None when there is none yet."""

    def close(self) -> None: ...


class Signal:
    """What one writer and its readers share: a lock, a count of what happened, and who waits for more."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        # Taken by the lock itself, in C: an interrupt could come between the two steps of a Condition's own `with`.
        self.changed = threading.Condition(self.lock)
        self.version = 0
        self.is_closed = False
        self._waiting: list[Waiter] = []

    def notify(self) -> list[Waiter]:
        """Something happened: release the readers in threads, return those in event loops."""
        with self.lock:
            self.version += 1
            self.changed.notify_all()
            waiting, self._waiting = self._waiting, []
            return waiting

    def close(self) -> list[Waiter]:
        with self.lock:
            self.is_closed = True
            return self.notify()

    def wait(self, version: int) -> None:
        """Until more has happened than `version` counted."""
        with self.lock:
            self.changed.wait_for(lambda: self.version != version)

    async def wait_async(self, version: int) -> None:
        event_loop = asyncio.get_running_loop()
        waiter = (event_loop, event_loop.create_future())
        with self.lock:
            if self.version != version:
                return
            self._waiting.append(waiter)
        try:
            await waiter[1]
        finally:
            with self.lock:
                if waiter in self._waiting:  # cancelled
                    self._waiting.remove(waiter)


def wake(waiters: Iterable[Waiter]) -> None:
    """Release those who wait in event loops, with one call into each loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for event_loop, future in waiters:
        by_loop.setdefault(event_loop, []).append(future)
    for event_loop, futures in by_loop.items():
        try:
            event_loop.call_soon_threadsafe(_resolve, futures)
        except RuntimeError:
            pass  # the reader closed its event loop: nobody waits any more


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
