"""Guided decoding: its rate beside unguided decoding, the time guides take to compile, and what jumping ahead saves.

`batch64` runs in turns with and without a guide, each request under a schema of its own that nothing completes before the
last token. Compiled are those schemas, or the ones of a file (`--schemas`): JSON lines with a "schema" each.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openengine import GenerateRequest, GuidedDecoding, InvalidArgument, SamplingParams, StoppingOptions
from tests.bench.probe import StepClock
from tests.bench.workload import Request
from tests.bench.works import Bench, CannotRun

__all__ = ["GuidedResult", "endless_schema", "guided_lines", "measure"]

_NUM_JUMPS = 8
_GREEDY = SamplingParams(temperature=0.0)
_VALUES: tuple[dict[str, Any], ...] = (
    {"type": "string"},
    {"type": "integer", "minimum": -1000},
    {"type": "number"},
    {"enum": ["red", "green", "blue"]},
    {"type": "boolean"},
    {"type": "string", "maxLength": 20},
    {"type": "string", "pattern": "^[a-z]+( [a-z]+)*$"},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
)
_LONG_KEYS = {
    "type": "object",
    "properties": {f"the_name_of_measurement_number_{index}_in_the_series": {"type": "boolean"} for index in range(8)},
    "additionalProperties": False,
}
_LONG_KEYS["required"] = list(_LONG_KEYS["properties"])


@dataclass(frozen=True, slots=True)
class GuidedResult:
    """Seconds of whole runs and of steps that decode every row; of compiling each schema; of a schema with long keys."""

    num_requests: int
    base_seconds: tuple[float, ...]
    guided_seconds: tuple[float, ...]
    base_step_s: float | None  # None where no step decoded every row, as is the next
    guided_step_s: float | None
    compile_s: tuple[float, ...]
    num_refused: int
    jump_seconds: tuple[float, float]  # without and with jumping ahead
    jump_steps: tuple[int, int]

    @property
    def rate(self) -> float:
        """Guided tokens per second as a share of unguided ones."""
        return statistics.median(self.base_seconds) / statistics.median(self.guided_seconds)


def endless_schema(index: int) -> str:
    """One of 64 schemas whose least text is far longer than any output here."""
    names = [f"field_{index}_{place}" for place in range(4)]
    values = [_VALUES[(index // 8**place + place) % len(_VALUES)] for place in range(4)]
    item = {"type": "object", "properties": dict(zip(names, values)), "required": names, "additionalProperties": False}
    return json.dumps({"type": "array", "minItems": 10_000, "items": item})


def measure(bench: Bench, schemas: Path | None) -> GuidedResult:
    """Measure on the engine of `bench`. Raises CannotRun where it has no guided decoding."""
    if not bench.engine.model_info().generation.guided_decoding.supported:
        raise CannotRun("this engine has no guided decoding; install the extra 'guided'")
    compile_s, num_refused = _compile(bench, schemas)
    (base_seconds, base_step_s), (guided_seconds, guided_step_s) = _rates(bench)
    (seconds_off, steps_off), (seconds_on, steps_on) = _jumps(bench)
    return GuidedResult(
        num_requests=len(bench.requests("batch64")),
        base_seconds=base_seconds,
        guided_seconds=guided_seconds,
        base_step_s=base_step_s,
        guided_step_s=guided_step_s,
        compile_s=compile_s,
        num_refused=num_refused,
        jump_seconds=(seconds_off, seconds_on),
        jump_steps=(steps_off, steps_on),
    )


def _compile(bench: Bench, path: Path | None) -> tuple[tuple[float, ...], int]:
    if path is None:
        texts = [endless_schema(index) for index in range(64)]
    else:
        texts = [json.dumps(json.loads(line)["schema"]) for line in path.read_text("utf-8").splitlines()]
    bench.engine.compile_guide(json_object=True)  # the vocabulary is prepared once
    seconds, num_refused = [], 0
    for text in texts:
        start = time.perf_counter()
        try:
            bench.engine.compile_guide(json_schema=text)
        except InvalidArgument:
            num_refused += 1
        seconds.append(time.perf_counter() - start)
    return tuple(seconds), num_refused


def _rates(bench: Bench) -> list[tuple[tuple[float, ...], float | None]]:
    """Seconds of each run and of the median step with every row, without and with guides."""
    requests = bench.requests("batch64")
    guides = itertools.cycle([GuidedDecoding(json_schema=endless_schema(index)) for index in range(len(requests))])

    def unguided(request: Request) -> GenerateRequest:
        return _request(request, None)

    def guided(request: Request) -> GenerateRequest:
        return _request(request, next(guides))

    bench.warm_up(requests, guided)
    seconds: dict[Any, list[float]] = {unguided: [], guided: []}
    steps: dict[Any, list[float]] = {unguided: [], guided: []}
    for index in range(bench.repeat):
        for build in (unguided, guided) if index % 2 == 0 else (guided, unguided):
            with StepClock(bench.engine) as clock:
                seconds[build].append(bench.run(requests, build)[0])
            steps[build] += clock.decode_s(len(requests))
    return [
        (tuple(seconds[build]), statistics.median(steps[build]) if steps[build] else None)
        for build in (unguided, guided)
    ]


def _jumps(bench: Bench) -> tuple[tuple[float, int], tuple[float, int]]:
    """Seconds and steps of a batch under a schema that is mostly keys, without and with jumping ahead."""
    preparer = bench.engine._preparer
    guide = bench.engine.compile_guide(json_schema=_LONG_KEYS)
    requests = [
        GenerateRequest(
            token_ids=[100 + index, 200],
            guided=guide,
            sampling=_GREEDY,
            stopping=StoppingOptions(max_tokens=min(400, bench.engine.model_info().max_context_length - 2)),
        )
        for index in range(_NUM_JUMPS)
    ]
    measured, jumps_ahead = [], preparer._jump_ahead
    try:
        for is_on in (False, True):
            preparer._jump_ahead = is_on
            num_steps, start = bench.engine._loop.num_steps, time.perf_counter()
            bench.engine.generate(requests, progress=False)
            measured.append((time.perf_counter() - start, bench.engine._loop.num_steps - num_steps))
    finally:
        preparer._jump_ahead = jumps_ahead
    return measured[0], measured[1]


def guided_lines(result: GuidedResult) -> Iterator[str]:
    base, guided = statistics.median(result.base_seconds), statistics.median(result.guided_seconds)
    yield (
        f"guided: batch64 in {guided:.3f} s, unguided {base:.3f} s: {result.rate:.3f} of the rate; "
        f"a step of all rows {_milliseconds(result.guided_step_s)}, unguided {_milliseconds(result.base_step_s)}"
    )
    yield (
        f"  compiling {len(result.compile_s)} schemas: median {statistics.median(result.compile_s) * 1e3:.1f} ms, "
        f"worst {max(result.compile_s) * 1e3:.0f} ms, {result.num_refused} refused"
    )
    (slow, fast), (many, few) = result.jump_seconds, result.jump_steps
    yield (
        f"  long keys: {fast:.3f} s in {few} steps with jumping ahead, {slow:.3f} s in {many} without: {slow / fast:.2f} x"
    )


def _milliseconds(seconds: float | None) -> str:
    return "never came" if seconds is None else f"{seconds * 1e3:.2f} ms"


def _request(request: Request, guide: GuidedDecoding | None) -> GenerateRequest:
    stopping = StoppingOptions(max_tokens=request.max_tokens, ignore_eos=True)
    return GenerateRequest(token_ids=request.token_ids, sampling=_GREEDY, stopping=stopping, guided=guide)
