"""Measuring: batches, variants interleaved with their base, and arrivals.

Every run begins with an empty prefix cache and with prompts that no run before had; warming up is not measured. Times
are those of `engine.generate` on token ids, from the call to the last result.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from openengine import Engine, GenerateRequest, GenerationResult, SamplingParams, StoppingOptions
from openengine.types import CandidateTokenSelection, GuidedDecoding, ResponseOptions
from tests.bench import workload
from tests.bench.cost import ModelCost
from tests.bench.machine import Machine
from tests.bench.probe import StepClock
from tests.bench.workload import Request

__all__ = ["VARIANTS", "Arrivals", "BatchResult", "Bench", "Build", "CannotRun", "Comparison", "percentiles"]

_ROWS = 64  # of a comparison
_QUICK = 8  # by which `quick` shortens prompts and outputs
_GREEDY = SamplingParams(temperature=0.0)
_SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, repetition_penalty=1.1, seed=1)
_TOP_5 = ResponseOptions(return_output_logprobs=True, output_candidates=CandidateTokenSelection(top_n=5))
# Objects without end: nothing completes this guide before the last token.
_SCHEMA = """{"type": "array", "minItems": 10000, "items": {"type": "object", "additionalProperties": false,
"properties": {"name": {"type": "string"}, "count": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
"required": ["name", "count", "kind"]}}"""

Build = Callable[[Request], GenerateRequest]


class CannotRun(Exception):
    """This engine cannot run the work; the message says why."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """A batch that ran several times. `limit_s` is what the machine needs at least (`cost.py`)."""

    name: str
    num_requests: int
    num_input: int
    num_output: int
    seconds: tuple[float, ...]
    limit_s: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def is_prompt_work(self) -> bool:
        return self.num_output == self.num_requests

    @property
    def rate(self) -> float:
        """Tokens per second: generated ones, or those of the prompts where nothing else is asked for."""
        return (self.num_input if self.is_prompt_work else self.num_output) / self.median_s

    @property
    def fraction(self) -> float:
        """Of the machine's limit."""
        return self.limit_s / self.median_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """A variant against its base, run in turns. Medians over all steps that decoded every row, in seconds."""

    name: str
    base: str
    num_rows: int
    base_step_s: float
    variant_step_s: float
    base_seconds: tuple[float, ...]
    variant_seconds: tuple[float, ...]

    @property
    def cost(self) -> float:
        """By which fraction a step takes longer; negative where it is faster."""
        return self.variant_step_s / self.base_step_s - 1


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests that came one by one. Percentiles 50, 90 and 99, in seconds.

    `per_token` is each request's mean time per token after the first, `gap` the time between any two tokens.
    """

    rate: float
    num_requests: int
    output_rate: float
    first_token: tuple[float, float, float]
    per_token: tuple[float, float, float]
    gap: tuple[float, float, float]


@dataclass(slots=True)
class Bench:
    """Runs works on one engine. `quick` shortens everything: it shows that the benchmark works, and no speed."""

    engine: Engine
    cost: ModelCost
    machine: Machine
    repeat: int = 3
    quick: bool = False
    num_runs: int = 0

    @property
    def shrink(self) -> int:
        """By which all lengths are divided."""
        return _QUICK if self.quick else 1

    def batch(self, name: str) -> BatchResult:
        """Run a batch work `repeat` times."""
        requests = self.requests(name)
        self.warm_up(requests)
        seconds = tuple(self.run(requests, shared=name == "prefix")[0] for _ in range(self.repeat))
        return BatchResult(
            name,
            len(requests),
            sum(len(request.token_ids) for request in requests),
            sum(request.max_tokens for request in requests),
            seconds,
            self.limit_s(name),
        )

    def compare(self, name: str) -> Comparison:
        """`sampling`, `logprobs` or `guided` against greedy decoding of the same prompts."""
        rows = min(_ROWS, self.engine.model_info().max_running_requests)
        requests = workload.uniform(rows, *((8, 24) if self.quick else (64, 64)), self.cost.vocab_size)
        variant = VARIANTS[name]
        self.warm_up(requests, variant)
        seconds: dict[Build, list[float]] = {_greedy: [], variant: []}
        steps: dict[Build, list[float]] = {_greedy: [], variant: []}
        for index in range(self.repeat):
            # Each comes first as often as the other, so that a machine that slows down favours neither.
            for build in (_greedy, variant) if index % 2 == 0 else (variant, _greedy):
                with StepClock(self.engine) as clock:
                    seconds[build].append(self.run(requests, build)[0])
                steps[build] += clock.decode_s(rows)
        if not all(steps.values()):
            raise CannotRun(
                f"{rows} requests never decoded together; the KV pool or max_num_batched_tokens is too small"
            )
        return Comparison(
            name,
            "greedy",
            rows,
            statistics.median(steps[_greedy]),
            statistics.median(steps[variant]),
            tuple(seconds[_greedy]),
            tuple(seconds[variant]),
        )

    def arrivals(self, rate: float, num_requests: int) -> Arrivals:
        """Submit `num_requests` of `batch64`, again and again, when a Poisson process of `rate` per second says so."""
        pool = self.requests("batch64")
        requests = [pool[index % len(pool)] for index in range(num_requests)]
        self.warm_up(pool)
        self.engine.clear_prefix_cache()
        built = [_greedy(request) for request in self._distinct(requests)]
        handles = []
        with StepClock(self.engine) as clock:
            start = time.perf_counter()
            for request, arrival in zip(built, workload.arrival_times(num_requests, rate)):
                time.sleep(max(0.0, start + arrival - time.perf_counter()))
                handles.append(self.engine.submit(request))
            timings = [handle.result().timing for handle in handles]
            seconds = time.perf_counter() - start
        return Arrivals(
            rate,
            num_requests,
            sum(request.max_tokens for request in requests) / seconds,
            percentiles([timing.time_to_first_token_s for timing in timings]),
            percentiles([timing.time_per_token_s for timing in timings]),
            percentiles(clock.gaps()),
        )

    # ---- what works are made of ------------------------------------------------------------------

    def requests(self, name: str) -> list[Request]:
        """The requests of a batch work. Raises CannotRun where the engine cannot take them."""
        requests = workload.make(name, self.cost.vocab_size)
        if self.quick:
            requests = [_shortened(request, keep=name == "prefix") for request in requests]
        self.check(requests)
        return requests

    def check(self, requests: Sequence[Request]) -> None:
        """Raises CannotRun where one of the requests cannot run here."""
        longest = max(len(request.token_ids) + request.max_tokens for request in requests)
        limit = self.engine.model_info().max_context_length
        if longest > limit:
            raise CannotRun(f"needs a context of {longest} tokens, the model or the KV pool has {limit}")

    def warm_up(self, requests: Sequence[Request], build: Build | None = None) -> None:
        """Run the work once, with few tokens."""
        self.run([Request(ids, min(count, 4)) for ids, count in requests], build or _greedy)

    def run(
        self, requests: Sequence[Request], build: Build | None = None, *, shared: bool = False, cached: bool = False
    ) -> tuple[float, list[GenerationResult]]:
        """Run requests at once: seconds, and the results, which are checked for their length.

        `cached`: the prompts may be those of an earlier run, or begin like them, and what is known is not computed.
        """
        requests = requests if cached else self._distinct(requests, shared=shared)
        built = [(build or _greedy)(request) for request in requests]
        if not cached:
            self.engine.clear_prefix_cache()
        start = time.perf_counter()
        results = self.engine.generate(built, progress=False)
        seconds = time.perf_counter() - start
        for request, result in zip(requests, results):
            assert len(result.tokens) == request.max_tokens, f"{len(result.tokens)} tokens, not {request.max_tokens}"
        return seconds, results

    def limit_s(self, name: str) -> float:
        """Seconds that the machine needs at least for a batch work."""
        return self.cost.batch_s(self.requests(name), self.machine, shared_prefix=self._num_shared(name))

    def _num_shared(self, name: str) -> int:
        return 0 if name != "prefix" else workload.SHARED_PREFIX // self.shrink

    def _distinct(self, requests: Sequence[Request], *, shared: bool = False) -> list[Request]:
        self.num_runs += 1
        return workload.distinct(list(requests), self.num_runs, self.cost.vocab_size, shared=shared)


def percentiles(values: Sequence[float | None]) -> tuple[float, float, float]:
    """The 50th, 90th and 99th percentile of the values there are, by the nearest rank; NaN where there are none."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return (float("nan"),) * 3
    # Ranks count from 1 and are rounded up, in integers: 0.9 * 10 need not be 9.
    return tuple(ordered[-(-len(ordered) * percent // 100) - 1] for percent in (50, 90, 99))


def _request(request: Request, **options: Any) -> GenerateRequest:
    return GenerateRequest(
        token_ids=request.token_ids,
        stopping=StoppingOptions(max_tokens=request.max_tokens, ignore_eos=True),
        **{"sampling": _GREEDY, **options},
    )


def _greedy(request: Request) -> GenerateRequest:
    return _request(request)


def _sampled(request: Request) -> GenerateRequest:
    return _request(request, sampling=_SAMPLED)


def _with_logprobs(request: Request) -> GenerateRequest:
    return _request(request, response=_TOP_5)


def _guided(request: Request) -> GenerateRequest:
    return _request(request, guided=GuidedDecoding(json_schema=_SCHEMA))


VARIANTS: dict[str, Build] = {"sampling": _sampled, "logprobs": _with_logprobs, "guided": _guided}


def _shortened(request: Request, *, keep: bool) -> Request:
    """A small part of a request; with `keep` its first tokens are what it shares with others."""
    count = max(2, len(request.token_ids) // _QUICK)
    ids = request.token_ids[: count - 4] + request.token_ids[-4:] if keep else request.token_ids[:count]
    return Request(ids, max(1, request.max_tokens // _QUICK))
