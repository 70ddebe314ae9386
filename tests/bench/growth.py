"""How the time of a decode step grows with concurrency and with context, and where it grows more than the work does.

Each point is the median over steps that decode exactly so many rows. `over_limit` compares each with the least that its
operations and bytes could take (`ModelCost.decode_bound_s`) at the rates right after it, for on a shared host these
change from second to second. A cliff is a point whose `over_limit` is more than 1.3 times the least of the points before
it on its curve: more work should never make the engine less efficient.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.bench import workload
from tests.bench.machine import Probe
from tests.bench.probe import wrapped
from tests.bench.works import Bench, CannotRun

__all__ = ["CLIFF", "Point", "curves", "with_factors"]

CLIFF = 1.3
_ROWS = (1, 2, 4, 8, 16, 32, 64)
_ROWS_CONTEXT = 256  # tokens, at which concurrency grows
_CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)
_CONTEXT_ROWS = (1, 4)  # rows, at which context grows: many long ones would take minutes to fill
_LEAST_STEPS = 24


@dataclass(frozen=True, slots=True)
class Point:
    """`context` is the mean over the measured steps; `factor` is against the best point before on the same curve."""

    curve: str
    rows: int
    context: int
    step_s: float
    gemm_rate: float  # operations per second
    read_rate: float  # bytes per second
    over_limit: float
    factor: float = 1.0

    @property
    def is_cliff(self) -> bool:
        return self.factor > CLIFF


def curves(bench: Bench) -> Iterator[list[Point] | str]:
    """Each curve as it is measured; a text for a point that cannot be, saying why."""
    context = _ROWS_CONTEXT // bench.shrink
    yield from _curve(bench, f"rows, context {context}", [(rows, context) for rows in _ROWS])
    for rows in _CONTEXT_ROWS:
        sizes = [(rows, context // bench.shrink) for context in _CONTEXTS]
        yield from _curve(bench, f"context, {rows} row{'s' * (rows > 1)}", sizes)


def with_factors(points: list[Point]) -> list[Point]:
    """The points of one curve, in order, with their `factor`."""
    best, result = float("inf"), []
    for point in points:
        best = min(best, point.over_limit)
        result.append(replace(point, factor=point.over_limit / best))
    return result


def _curve(bench: Bench, name: str, sizes: list[tuple[int, int]]) -> Iterator[list[Point] | str]:
    points, probe = [], Probe(bench.machine.gemm_dtype, quick=bench.quick)
    for rows, context in sizes[:: 3 if bench.quick else 1]:
        try:
            points.append(_point(bench, probe, name, rows, context))
        except CannotRun as exc:
            yield f"{name}: {rows} rows at {context} tokens: {exc}"
    yield with_factors(points)


def _point(bench: Bench, probe: Probe, name: str, rows: int, context: int) -> Point:
    info = bench.engine.model_info()
    if rows > info.max_running_requests:
        raise CannotRun(f"max_num_seqs is {info.max_running_requests}")
    if rows * context > info.total_kv_blocks * info.kv_block_size:
        raise CannotRun(f"the KV pool holds {info.total_kv_blocks * info.kv_block_size} tokens")
    # The first to finish its prompt decodes until the last has: so many steps do not have all rows, for each is full and
    # all of them together compute no more than every row's context.
    num_steps = _LEAST_STEPS // (4 if bench.quick else 1)
    num_output = num_steps + -(-rows * context // info.max_batched_tokens)
    if num_output >= context:
        raise CannotRun(f"a prompt of {context} tokens is too short for {num_output} steps")
    requests = workload.uniform(rows, context - num_output, num_output, bench.cost.vocab_size)
    bench.check(requests)
    bench.warm_up(requests[:1])
    clock = _Clock(probe)
    with wrapped(bench.engine._loop, "_step", clock.timed):
        bench.run(requests, cached=True)  # only the decode steps count, and a context begins as the one before
    steps = [step for step in clock.steps if step.num_decodes == rows]
    if not steps:
        raise CannotRun("the requests never decoded together")
    mean = context - len(steps) // 2
    over_limit = [
        step.seconds / bench.cost.decode_bound_s([mean] * rows, step.gemm_rate, step.read_rate) for step in steps
    ]
    step_s, gemm_rate, read_rate = (
        statistics.median(getattr(step, figure) for step in steps) for figure in ("seconds", "gemm_rate", "read_rate")
    )
    return Point(name, rows, mean, step_s, gemm_rate, read_rate, statistics.median(over_limit))


@dataclass(frozen=True, slots=True)
class _Step:
    """`seconds`: since the machine was probed after the step before, with that in the caches and nothing of the engine's.

    `num_decodes`: of both steps' rows, 0 where either does anything else.
    """

    num_decodes: int
    seconds: float
    gemm_rate: float
    read_rate: float


class _Clock:
    """Times the steps and, after each, the machine."""

    def __init__(self, probe: Probe) -> None:
        self.steps: list[_Step] = []
        self._probe = probe
        self._rows = 0  # of the step before
        self._resumed = time.perf_counter()

    def timed(self, inner: Callable[[], Any]) -> Callable[[], Any]:
        def step() -> Any:
            plan = inner()
            seconds = time.perf_counter() - self._resumed
            rows = plan.num_decodes if plan.num_decodes == len(plan.scheduled) else 0
            self.steps.append(_Step(rows if rows == self._rows else 0, seconds, *self._probe.rates()))
            self._rows, self._resumed = rows, time.perf_counter()
            return plan

        return step
