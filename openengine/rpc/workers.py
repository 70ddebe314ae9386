"""`Workers`: a few threads for one purpose, for what would hold up the event loop.

Each purpose has threads of its own, so that none waits for another's. Nobody is queued in the threads: who waits for one
waits in the event loop, and leaves nothing behind when its task is cancelled. Threads cannot be stopped: what a caller has
left runs on unheard, counts as long as it runs, and keeps no process from ending.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["Workers", "in_own_thread"]

_T = TypeVar("_T")
_Work = tuple[Callable[[], Any], "Future[Any]"]


class Workers:
    """`num_threads` threads, used from one event loop."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._free = asyncio.Semaphore(num_threads)
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        for _ in range(num_threads):
            threading.Thread(target=_run, args=(self._work,), name=name, daemon=True).start()

    async def run(self, function: Callable[..., _T], *args: Any, when_left: Callable[[_T], object] | None = None) -> _T:
        """What `function(*args)` returns or raises. A result that nobody waits for any more goes to `when_left`."""
        await self._free.acquire()
        event_loop, future = asyncio.get_running_loop(), Future()
        future.add_done_callback(lambda _: _call_soon(event_loop, self._free.release))
        self._work.put((lambda: function(*args), future))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if when_left is not None:
                future.add_done_callback(lambda done: _hand_over(done, when_left))
            raise
        finally:
            # An error refers to this frame: with the future in it, a refused prompt would stay until the next collection.
            del future

    def close(self) -> None:
        """End the threads that are idle, and the others when they are."""
        for _ in range(self._num_threads):
            self._work.put(None)


async def in_own_thread(name: str, function: Callable[[], _T]) -> _T:
    """Run `function` in a thread made for it."""
    workers = Workers(1, name)
    try:
        return await workers.run(function)
    finally:
        workers.close()


def _run(work: queue.SimpleQueue[_Work | None]) -> None:
    while (item := work.get()) is not None:
        function, future = item
        if future.set_running_or_notify_cancel():
            try:
                result = function()
            except BaseException as exc:
                future.set_exception(exc)
            else:
                future.set_result(result)
                del result
        del item, function, future  # an idle thread keeps no prompt


def _call_soon(event_loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> None:
    try:
        event_loop.call_soon_threadsafe(function)
    except RuntimeError:
        pass  # the event loop has ended: nobody waits any more


def _hand_over(done: Future[Any], take: Callable[[Any], object]) -> None:
    if not done.cancelled() and done.exception() is None:
        take(done.result())
