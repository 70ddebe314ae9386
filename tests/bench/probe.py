"""Looking inside an engine: sizes of its model, its steps, timers around its phases.

Nothing in the engine knows of it: methods of instances are wrapped from outside, and put back. growth.py, guided.py,
profile.py and embed.py reach inside too, each for what it alone measures.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from openengine import Engine
from openengine.ops.program import NativeProgram
from tests.bench.cost import ModelCost

__all__ = [
    "PHASES",
    "PhaseClock",
    "Step",
    "StepClock",
    "call_in_loop",
    "model_cost",
    "native_program",
    "steps_of",
    "wrapped",
    "wrapped_phase",
]

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Phase -> (path from the engine's loop to the owner, method). Time within a nested phase counts there alone.
PHASES: dict[str, tuple[str, str]] = {
    "schedule": ("_scheduler", "schedule"),
    "slots": ("_runner", "_update_slots"),
    "build": ("_runner._slots", "build"),
    "prepare attention": ("_runner._backend", "prepare"),
    "forward": ("_runner._model", "forward"),
    "logits": ("_runner._model", "logits"),
    "sample": ("_runner._sampler", "sample"),
    "runner, rest": ("_runner", "execute"),
    "commit": ("_output", "commit"),
    "output": ("_output", "process"),
    "deliver": ("", "_deliver"),
    "loop, rest": ("", "_turn"),
}


def model_cost(engine: Engine, quantization: str | None) -> ModelCost:
    """The sizes of the engine's model, from its configuration: what must be read, whatever form the weights have."""
    model = engine._loop._runner._model
    config, attributes = model.config, engine.info().attributes
    width, inner = config.hidden_size, config.intermediate_size
    query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    num_mlp = 3 if hasattr(model.layers[0].mlp, "gate_up") else 2
    return ModelCost(
        vocab_size=config.vocab_size,
        layer_weights=config.num_layers * width * (2 * query_width + 2 * kv_width + num_mlp * inner),
        head_weights=config.vocab_size * width,
        weight_item_bytes=1 if quantization == "int8" else _ITEM_BYTES[attributes["dtype"]],
        kv_token_bytes=attributes["kv_bytes"] // attributes["kv_tokens"],
        query_width=query_width,
        windows=tuple(config.windows),
    )


def native_program(engine: Engine) -> NativeProgram | None:
    """The one native call that runs the layers of the engine's model, where there is one."""
    forward = engine._loop._runner._model.native_forward
    return None if forward is None else forward.program


def call_in_loop(engine: Engine, function: Callable[[], None]) -> None:
    """Run `function` in the loop's thread, between steps."""
    engine._loop.call(lambda _scheduler: function())


@contextmanager
def wrapped(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace the method `owner.name` of this one instance for the duration; `wrapper` gets the original."""
    inner = getattr(owner, name)
    is_own = name in getattr(owner, "__dict__", {})
    setattr(owner, name, wrapper(inner))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, inner)
        else:
            delattr(owner, name)


def wrapped_phase(
    engine: Engine, phase: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> AbstractContextManager[None]:
    """`wrapped` for the method of a phase."""
    path, name = PHASES[phase]
    owner = engine._loop
    for part in filter(None, path.split(".")):
        owner = getattr(owner, part)
    return wrapped(owner, name, wrapper)


# ---- steps ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Step:
    """One step of the loop, by `time.perf_counter`. `num_rows` sequences ran, `num_decodes` of them by one token."""

    start: float
    end: float
    num_rows: int
    num_decodes: int
    num_tokens: int
    seconds: dict[str, float] = field(default_factory=dict)  # by phase, from a PhaseClock

    @property
    def is_decode(self) -> bool:
        return 0 < self.num_decodes == self.num_rows

    @property
    def total_s(self) -> float:
        return self.end - self.start


class StepClock:
    """Times every step while it is entered; `steps` is read afterwards. Costs some microseconds per step."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[Step] = []
        self._wrapping = wrapped(engine._loop, "_step", self._timed)

    def __enter__(self) -> StepClock:
        self._wrapping.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._wrapping.__exit__(*exc_info)

    def _timed(self, inner: Callable[[], Any]) -> Callable[[], Any]:
        def step() -> Any:
            start = time.perf_counter()
            plan = inner()
            end = time.perf_counter()
            self.steps.append(Step(start, end, len(plan.scheduled), plan.num_decodes, plan.num_tokens))
            return plan

        return step

    def decode_s(self, num_rows: int) -> list[float]:
        """Seconds from one step's start to the next one's, of steps that decode `num_rows` rows, as does the next."""
        pairs = zip(self.steps, self.steps[1:])
        return [b.start - a.start for a, b in pairs if _decodes(a, num_rows) and _decodes(b, num_rows)]

    def gaps(self) -> list[float]:
        """Seconds between two tokens of one output, once for each: a step counts for every row that it decoded."""
        pairs = zip(self.steps, self.steps[1:])
        return [b.end - a.end for a, b in pairs for _ in range(b.num_decodes)]


def _decodes(step: Step, num_rows: int) -> bool:
    return step.num_decodes == step.num_rows == num_rows


# ---- phases --------------------------------------------------------------------------------------


class PhaseClock:
    """Times every phase of every turn while it is entered: exclusive seconds in `Step.seconds`."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[Step] = []
        self._engine = engine
        self._seconds: dict[str, float] = defaultdict(float)
        self._nested: list[float] = []  # for each open phase, seconds spent in the phases within it
        self._plan: Any = None
        self._wrappings = ExitStack()

    def __enter__(self) -> PhaseClock:
        for phase in PHASES:
            wrapper = self._turn if phase == "loop, rest" else self._timed
            self._wrappings.enter_context(
                wrapped_phase(self._engine, phase, lambda inner, p=phase, w=wrapper: w(inner, p))
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._wrappings.close()

    def _timed(self, inner: Callable[..., Any], phase: str) -> Callable[..., Any]:
        nested, clock = self._nested, time.perf_counter

        def call(*args: Any, **kwargs: Any) -> Any:
            nested.append(0.0)
            start = clock()
            try:
                result = inner(*args, **kwargs)
            finally:
                elapsed = clock() - start
                self._seconds[phase] += elapsed - nested.pop()
                if nested:
                    nested[-1] += elapsed
            if phase == "schedule":
                self._plan = result
            return result

        return call

    def _turn(self, inner: Callable[[], Any], phase: str) -> Callable[[], Any]:
        timed = self._timed(inner, phase)

        def turn() -> Any:
            self._seconds.clear()
            self._plan = None
            start = time.perf_counter()
            timed()
            plan = self._plan
            if plan is not None:
                counts = len(plan.scheduled), plan.num_decodes, plan.num_tokens
                self.steps.append(Step(start, time.perf_counter(), *counts, dict(self._seconds)))

        return turn


def steps_of(steps: list[Step], num_rows: int | None) -> list[Step]:
    """Steps that decode exactly `num_rows` rows; with None the largest of those that compute prompts only."""
    if num_rows is not None:
        return [step for step in steps if _decodes(step, num_rows)]
    prompts = [step for step in steps if step.num_rows and not step.num_decodes]
    most = max((step.num_tokens for step in prompts), default=0)
    return [step for step in prompts if step.num_tokens == most]
