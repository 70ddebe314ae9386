"""`Workers`: the threads that compile guides, none of which anything waits for without end.

Compiling ends in calls of the backend that cannot be interrupted. So a job that exceeds its time is given up: whoever
waits for it hears so at once, another thread takes the place of its own, and that one ends when its call returns. A job
that is slow, though within its time, gets a substitute for its thread while others wait, which ends once there is nothing
to do. Small jobs go first, and one that waits too long is refused. The threads are daemons: the process ends without
them, after giving those in a call a moment to return.
"""

from __future__ import annotations

import atexit
import heapq
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from openengine.errors import Overloaded, PreconditionFailed

__all__ = ["Workers"]

_STACK_BYTES = 64 << 20  # the backend follows a grammar's references by recursion
_MAX_GIVEN_UP = 8  # each keeps a core busy and its memory until it returns
_SLOW_S = 0.5  # most guides take some milliseconds; one that takes so long may take all of its time
_MAX_SUBSTITUTES = 6  # eight threads in all beside two workers: more would only share the same cores
_MAX_EXIT_S = 3.0  # most calls return sooner, and nobody waits long for a process to end
_stack_size_lock = threading.Lock()  # the size is the process's, so whoever changes it for a moment takes turns


class _Job:
    """A call and its outcome; `is_over` once the outcome is settled. Times are when it came and when it was started."""

    __slots__ = ("args", "began", "came", "function", "future", "is_over")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.came = time.monotonic()
        self.function = function
        self.args = args
        self.future: Future[Any] = Future()
        self.is_over = False
        self.began = 0.0


class Workers:
    """At most `count` threads that run jobs, small ones first, beside those whose jobs are slow or were given up.

    A job that waits longer than `max_wait_s` is refused. Safe to use from many threads.
    """

    def __init__(self, count: int, *, name: str, max_wait_s: float = math.inf) -> None:
        self._count = count
        self._max_wait_s = max_wait_s
        self._name = name
        self._changed = threading.Condition()
        self._pending: list[tuple[int, int, _Job]] = []  # a heap: size, number, job
        self._num_jobs = 0
        self._running: dict[threading.Thread, _Job] = {}
        self._num_threads = 0
        self._num_idle = 0
        self._num_given_up = 0
        self._timer: threading.Timer | None = None  # runs while jobs wait for what may turn out slow
        self._is_closed = False
        atexit.register(_await_return, self._running)

    def submit(self, function: Callable[..., Any], *args: Any, size: int = 0) -> Future[Any]:
        """Run `function(*args)` in a worker, after smaller jobs and those of its `size` that came before.

        Raises: PreconditionFailed when closed; Overloaded while too many calls that were given up still go on.
        """
        job = _Job(function, args)
        with self._changed:
            if self._is_closed:
                raise _closed()
            if self._num_given_up >= _MAX_GIVEN_UP:
                raise _overloaded()
            self._num_jobs += 1
            heapq.heappush(self._pending, (size, self._num_jobs, job))
            self._start_thread()
            self._changed.notify()
        return job.future

    @contextmanager
    def time_limit(self, seconds: float, error: Callable[[], Exception]) -> Iterator[None]:
        """Within a job: give it up with `error()` unless the block ends in time."""
        job = self._running[threading.current_thread()]
        timer = threading.Timer(seconds, lambda: self._give_up(job, error()))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def close(self) -> None:
        """Give up all jobs with PreconditionFailed; idle threads end, busy ones when their calls return. Idempotent."""
        with self._changed:
            self._is_closed = True
            pending, running = self._take_pending(), list(self._running.values())
            self._changed.notify_all()
            if self._timer is not None:
                self._timer.cancel()
        for job in running:
            self._give_up(job, _closed())
        for job in pending:
            _fail(job, _closed())

    def _start_thread(self) -> None:
        if self._num_idle >= len(self._pending):
            return
        if self._num_threads >= self._max_threads():
            self._look_later()
            return
        self._num_threads += 1
        with _stack_size_lock:
            usual = threading.stack_size(_STACK_BYTES)
            try:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            finally:
                threading.stack_size(usual)

    def _max_threads(self) -> int:
        since = time.monotonic() - _SLOW_S
        num_slow = sum(job.began <= since and not job.is_over for job in self._running.values())
        return self._count + min(num_slow, _MAX_SUBSTITUTES)

    def _look_later(self) -> None:
        """See whether there is a substitute to start when the next job turns slow, and who has waited too long."""
        if self._timer is not None or self._is_closed:
            return
        now = time.monotonic()
        waits = [job.began + _SLOW_S - now for job in self._running.values() if not job.is_over]
        self._timer = threading.Timer(min((wait for wait in waits if wait > 0), default=_SLOW_S) + 0.001, self._look)
        self._timer.daemon = True
        self._timer.start()

    def _look(self) -> None:
        since = time.monotonic() - self._max_wait_s
        with self._changed:
            self._timer = None
            late = [job for *_, job in self._pending if job.came < since]
            if late:
                self._pending = [entry for entry in self._pending if entry[-1] not in late]
                heapq.heapify(self._pending)
            if not self._is_closed:
                self._start_thread()
        for job in late:
            _fail(job, _crowded(self._max_wait_s))

    def _take_pending(self) -> list[_Job]:
        pending, self._pending = self._pending, []
        return [job for *_, job in pending]

    def _work(self) -> None:
        thread = threading.current_thread()
        while (job := self._next(thread)) is not None:
            result, error = None, None
            try:
                result = job.function(*job.args)
            except BaseException as exc:  # the backend's panics too: whoever waits shall hear of it
                error = exc
            with self._changed:
                del self._running[thread]
                if job.is_over:
                    self._num_given_up -= 1
                    return
                job.is_over = True
            if error is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(error)
            del job, result, error  # an idle thread holds on to nothing

    def _next(self, thread: threading.Thread) -> _Job | None:
        with self._changed:
            while True:
                self._num_idle += 1
                while not self._pending and not self._is_closed and self._num_threads <= self._count:
                    self._changed.wait()
                self._num_idle -= 1
                if not self._pending:
                    self._num_threads -= 1
                    return None
                job = heapq.heappop(self._pending)[-1]
                if job.future.set_running_or_notify_cancel():
                    job.began = time.monotonic()
                    self._running[thread] = job
                    self._start_thread()  # or look later: what waits behind this job may wait long
                    return job

    def _give_up(self, job: _Job, error: Exception) -> None:
        waiting: list[_Job] = []
        with self._changed:
            if job.is_over:
                return
            job.is_over = True
            self._num_threads -= 1
            self._num_given_up += 1
            if self._num_given_up >= _MAX_GIVEN_UP:
                waiting = self._take_pending()
            else:
                self._start_thread()
        job.future.set_exception(error)
        for other in waiting:
            _fail(other, _overloaded())


def _await_return(running: dict[threading.Thread, _Job]) -> None:
    """A call that returns while the interpreter is taken down may crash it, so most are let return before; none for long."""
    deadline = time.monotonic() + _MAX_EXIT_S
    for thread in list(running):
        thread.join(max(0.0, deadline - time.monotonic()))


def _fail(job: _Job, error: Exception) -> None:
    if job.future.set_running_or_notify_cancel():
        job.future.set_exception(error)


def _closed() -> PreconditionFailed:
    return PreconditionFailed("the engine is closed; create a new Engine")


def _crowded(seconds: float) -> Overloaded:
    return Overloaded(f"the guide waited {seconds:g} s for others that take long to compile; try again later")


def _overloaded() -> Overloaded:
    return Overloaded("guides that took too long to compile are still being given up; try again later")
