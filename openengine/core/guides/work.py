"""The time that guides may take: that of compiling one, and that of following it through an output.

Owns the clocks of both; does not own what happens when a time is up. Whatever takes long lets other threads through.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

__all__ = ["CompileTimeout", "StepTime", "Turns", "Work"]

_TICKS_PER_LOOK = 32
_MAX_KNOWN_SIZE = 500_000  # parts: some tens of megabytes
_LONGEST_TURN_S = 0.0005  # so long an engine step waits for the interpreter, some ten times
_PAUSE_S = 0.00005  # enough for a waiting thread to take over

# Nearly all guides compile within milliseconds. One that takes long is in no hurry: beside steps it takes short turns, and
# rests between them.
_LONG_S = 0.25
_LONG_TURN_S = 0.00025
_REST_S = 0.0004
_LONGEST_WAIT_S = 0.05  # a notice may be lost where the stack ends
_STEPPING_S = 0.25  # so long after a step another may be under way

# Every request of a batch waits for the slowest guide. One with 900 optional members over 262,144 tokens takes 2 ms a
# token, and up to 20 ms for some; what exceeds these limits is a grammar whose text so far has ever more readings.
_STEP_S = 0.010
_EXCESS_S = 0.250


class CompileTimeout(Exception):
    """The guide's time is up."""


class Turns:
    """Which of several compilations runs Python: one at a time, for a step has to wait for each that wants the interpreter.

    Those that have taken long leave it to others most of the time while there are steps. A turn is nobody's once its holder's
    time is up, whether that has noticed or not. Safe to use from many threads.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._changed = threading.Condition(threading.Lock())
        self._holder: Work | None = None
        self._rest_until = self._stepping_until = -math.inf

    def note_step(self) -> None:
        """A step begins: outputs are being made."""
        self._stepping_until = self.clock() + _STEPPING_S

    def take(self, work: Work) -> bool:
        """Wait for the turn of `work`; returns whether it came before its time is up."""
        with self._changed:
            while (now := self.clock()) < work.deadline:
                holder = self._holder
                wait_s = 0.0
                if holder is not None:
                    wait_s = holder.deadline - now
                elif work.is_long:
                    wait_s = self._rest_until - now
                if wait_s <= 0.0:
                    self._holder = work
                    return True
                self._changed.wait(min(wait_s, work.deadline - now, _LONGEST_WAIT_S))
            return False

    def end(self, work: Work) -> None:
        """The turn of `work` is over, if it had one."""
        with self._changed:
            if self._holder is not work:
                return
            self._holder = None
            if work.is_long and (now := self.clock()) < self._stepping_until:
                self._rest_until = now + _REST_S
            self._changed.notify_all()


class Work:
    """Counts steps of one compilation, and remembers what it found. Owned by the thread that compiles.

    turns: where a turn is taken within a `with`. That is for workers alone: an interrupt, which reaches the main thread, might
    come between the two steps of entering and leave it taken.
    """

    def __init__(
        self, timeout_s: float, clock: Callable[[], float] = time.monotonic, *, turns: Turns | None = None
    ) -> None:
        self._clock = clock
        self._turns = turns
        self.deadline = clock() + timeout_s
        self._turn_began = clock()
        self._spent_s = self._waited_s = 0.0  # in turns, and for turns, that are over
        self._waits_since: float | None = None
        self._ticks = 0
        self.known: dict[Hashable, Any] = {}
        """What `remember` was told."""
        self._known_size = 0

    @property
    def is_long(self) -> bool:
        """Whether it has taken long, so that it had better be no burden to others."""
        return self._spent_s > _LONG_S

    @property
    def waited_s(self) -> float:
        """Seconds of its time that went to letting others run and to waiting for turns."""
        since = self._waits_since
        return self._waited_s + (0.0 if since is None else self._clock() - since)

    def __enter__(self) -> Work:
        self._take_turn()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end_turn()

    def tick(self, weight: int = 1) -> None:
        """Note a small step, or `weight` of them. Raises CompileTimeout when the time is up."""
        self._ticks += weight
        if self._ticks >= _TICKS_PER_LOOK:
            self._ticks = 0
            self.take_turns()

    def remember(self, question: Hashable, answer: Any, size: int) -> None:
        """Keep an answer of so many parts in `known` for a while: much of a compilation is the same questions again."""
        self._known_size += size
        if self._known_size > _MAX_KNOWN_SIZE:
            self.known.clear()
            self._known_size = size
        self.known[question] = answer

    def take_turns(self) -> None:
        """Let other threads run, if this one had the interpreter for long. Raises CompileTimeout when the time is up."""
        now = self._clock()
        if now > self.deadline:
            raise CompileTimeout
        if now - self._turn_began > (_LONG_TURN_S if self.is_long else _LONGEST_TURN_S):
            self._end_turn()
            self._waits_since = self._clock()
            time.sleep(_PAUSE_S)
            self._take_turn()

    def _take_turn(self) -> None:
        if self._waits_since is None:
            self._waits_since = self._clock()
        has_turn = self._turns is None or self._turns.take(self)
        self._waited_s, self._waits_since = self.waited_s, None
        if not has_turn:
            raise CompileTimeout
        self._turn_began = self._clock()

    def _end_turn(self) -> None:
        self._spent_s += self._clock() - self._turn_began
        if self._turns is not None:
            self._turns.end(self)


class StepTime:
    """CPU time that following one guide takes: 10 ms a token, and beyond that a quarter of a second in all.

    CPU time, for a machine that is busy with other things must not end a request. What a token leaves of its 10 ms makes up
    for what others took beyond them. Owned by the loop thread.
    """

    __slots__ = ("_excess_s",)

    def __init__(self, excess_s: float = 0.0) -> None:
        self._excess_s = excess_s

    def copy(self) -> StepTime:
        return StepTime(self._excess_s)

    def spend(self, seconds: float) -> None:
        """Note time that the token took that comes next."""
        self._excess_s += seconds

    def next_token(self, seconds: float) -> bool:
        """Note the token, and time that it took beside what was spent before; returns whether `error` says anything."""
        excess_s = self._excess_s + seconds - _STEP_S
        self._excess_s = excess_s if excess_s > 0 else 0.0
        return excess_s > _EXCESS_S

    @property
    def error(self) -> str | None:
        """What is wrong when too much was spent, None while all is well."""
        if self._excess_s <= _EXCESS_S:
            return None
        return (
            f"following it took {self._excess_s:.2f} s of CPU time more than {1000 * _STEP_S:g} ms a token, the limit is "
            f"{_EXCESS_S:g} s"
        )
