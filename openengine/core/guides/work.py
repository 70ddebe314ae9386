"""The time that compiling one guide may take, and its manners: other threads are let through all along."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["CompileTimeout", "Work"]

_TICKS_PER_LOOK = 32
_LONGEST_TURN_S = 0.001  # an engine step waits no longer than this for the interpreter
_PAUSE_S = 0.00005  # enough for a waiting thread to take over


class CompileTimeout(Exception):
    """The guide's time is up."""


class Work:
    """Counts steps of one compilation. Owned by the thread that compiles."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deadline = clock() + timeout_s
        self._turn_began = clock()
        self._ticks = 0

    @property
    def remaining_s(self) -> float:
        return self._deadline - self._clock()

    def tick(self, weight: int = 1) -> None:
        """Note a small step, or `weight` of them. Raises CompileTimeout when the time is up."""
        self._ticks += weight
        if self._ticks < _TICKS_PER_LOOK:
            return
        self._ticks = 0
        now = self._clock()
        if now > self._deadline:
            raise CompileTimeout
        if now - self._turn_began > _LONGEST_TURN_S:
            time.sleep(_PAUSE_S)
            self._turn_began = self._clock()
