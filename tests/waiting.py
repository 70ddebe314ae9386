"""Threads beside a test, waiting for what they do, and whether an engine has anything left to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openengine import Engine, Overloaded

__all__ = ["in_threads", "is_idle", "load", "stream_when_there_is_room", "wait_until"]


def wait_until(condition: Callable[[], Any], timeout: float = 20.0) -> None:
    """Return as soon as `condition()` is true; fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.002)


def in_threads(*functions: Callable[[], Any], timeout: float = 60.0) -> list[Any]:
    """Results of all functions, each run in a thread of its own; the first error is raised."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(timeout) for future in [pool.submit(function) for function in functions]]


def load(engine: Engine) -> tuple[int, int, int]:
    """Running requests, queued ones, used blocks (none without a KV cache); the scheduler's books are checked on the way."""
    engine._loop.call(lambda scheduler: scheduler.check())
    info = engine.load_info()
    return info.running_requests, info.queued_requests, info.used_kv_blocks or 0


def is_idle(engine: Engine) -> bool:
    return load(engine) == (0, 0, 0)


def stream_when_there_is_room(engine: Engine, prompt: Any, **options: Any) -> Any:
    """`engine.stream`, tried again while the queue is full."""
    while True:
        try:
            return engine.stream(prompt, **options)
        except Overloaded:
            time.sleep(0.002)
