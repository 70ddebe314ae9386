"""Where a step's time goes: the command `python -m tests.bench.profile`.

    python -m tests.bench.profile                     decode at 1 and 64 rows, and prefill, on the demo model
    python -m tests.bench.profile --rows 16 --ops 20  other batch sizes, more operations
    python -m tests.bench.profile --variant sampling  requests that sample, or with logprobs
    python -m tests.bench.profile --python            also the most expensive Python functions of the loop's thread

Two passes. The first times the phases of the loop from outside (`probe.PHASES`), which costs microseconds per step: its
sum is the step. The second records operations with torch.profiler, which adds some microseconds to whatever calls an
operation: so much is taken off again, and the parts are scaled to the forward of the first pass. Native kernels, called
through ctypes, are recorded by their names; those that run in one call for all layers time themselves.

"between forwards" is Python and scheduling: the step without its forward, logits and sampling.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from openengine import Engine, OpenEngineError, demo_model
from openengine.ops import native
from openengine.ops.native import NativeLibrary
from openengine.ops.program import KERNELS, NativeProgram
from tests.bench import workload
from tests.bench.arguments import at_least, num_threads
from tests.bench.machine import Machine
from tests.bench.probe import (
    PHASES,
    PhaseClock,
    call_in_loop,
    model_cost,
    native_program,
    steps_of,
    wrapped,
    wrapped_phase,
)
from tests.bench.workload import Request
from tests.bench.works import VARIANTS, Bench, Build, CannotRun

__all__ = ["NativeWatch", "Operations", "StepProfile", "main", "profile_steps"]

_PROMPT = 64  # tokens of a prompt before decoding
_STEPS = 16  # whose operations are recorded
_OUTSIDE = ("forward", "logits", "sample")  # all other phases are "between forwards"
# Matrix products by operation; what they call belongs to them.
_GEMM_OPS = frozenset(
    {"aten::linear", "aten::addmm", "aten::mm", "aten::matmul", "aten::_int_mm", "mkldnn::_linear_pointwise"}
)
_PARTS = {
    "matrix products": "gemm",
    "attention": "attention",
    "other operations": "other",
    "Python in the forward": "python",
}
_MAX_OVERHEAD_S = 3e-6  # of recording one operation; a greater difference between the passes is a disturbance
_SCOPE = "bench::"  # of what this module records itself
_STEP, _ATTENTION, _NATIVE = (_SCOPE + name for name in ("step", "attention", "native "))
_PHASES = {_SCOPE + phase: phase for phase in ("forward", "logits", "sample")}  # whose operations are shown
_PROGRAM = _NATIVE + "forward"  # the call that runs all layers


@dataclass(frozen=True, slots=True)
class Operations:
    """What torch.profiler saw in `num_steps` steps, exclusive seconds per step, medians over the steps.

    `seconds`: by category, of forward and logits.  `nested`: how many operations were called from each category, and so
    how often its time has the recording of another in it.  `names`: (calls, seconds) by operation, of sampling too.
    """

    num_steps: int
    seconds: dict[str, float]
    nested: dict[str, float]
    names: dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One kind of step: median exclusive seconds of each phase over `num_steps`, and the operations inside."""

    title: str
    num_steps: int
    phases: dict[str, float]
    operations: Operations

    @property
    def step_s(self) -> float:
        return sum(self.phases.values())

    @property
    def between_forwards_s(self) -> float:
        """Python and scheduling."""
        return sum(seconds for phase, seconds in self.phases.items() if phase not in _OUTSIDE)

    @property
    def inside(self) -> dict[str, float]:
        """Forward and logits, divided: seconds of matrix products, attention, other operations, and Python."""
        total = self.phases["forward"] + self.phases["logits"]
        recorded = self.operations.seconds
        excess = max(0.0, sum(recorded.values()) - total)
        overhead = min(_MAX_OVERHEAD_S, excess / max(1.0, sum(self.operations.nested.values())))
        parts = {
            name: max(0.0, recorded.get(category, 0.0) - overhead * self.operations.nested.get(category, 0.0))
            for name, category in _PARTS.items()
        }
        scale = total / (sum(parts.values()) or 1.0)
        return {name: scale * seconds for name, seconds in parts.items()}


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    options = {"dtype": args.dtype, "quantization": args.quantization, "kernels": args.kernels}
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # above USDT, or torch reports each start and stop on stderr
    with profile(activities=[ProfilerActivity.CPU]):
        pass  # its first start must be in this thread; the loop's thread starts the others
    with NativeWatch() as watch:
        try:
            engine = Engine(args.model or str(demo_model()), progress=False, num_threads=args.threads, **options)
        except OpenEngineError as exc:
            _parser().error(str(exc))
        with engine:
            _profile_engine(engine, args, watch)
    return 0


def _profile_engine(engine: Engine, args: argparse.Namespace, watch: NativeWatch) -> None:
    attributes = engine.info().attributes
    told = ", ".join(attributes[name] for name in ("architecture", "dtype", "kernels"))
    print(f"{told}, {torch.get_num_threads()} threads")
    bench = Bench(engine, model_cost(engine, args.quantization), Machine("", 1.0, 1.0), quick=args.quick)
    for rows in [*args.rows, None]:
        try:
            for line in _lines(profile_steps(bench, rows, watch, VARIANTS.get(args.variant)), args.ops):
                print(line)
            if args.python and rows is not None:
                _print_python(bench, rows)
        except CannotRun as exc:
            print(f"{_title(rows)} skipped: {exc}")


def profile_steps(bench: Bench, rows: int | None, watch: NativeWatch, build: Build | None = None) -> StepProfile:
    """Profile steps that decode `rows` rows, or with None those that compute prompts. `build` makes other requests than
    greedy ones.

    Raises CannotRun if there are no such steps, as when the rows do not fit.
    """
    requests = _requests(bench, rows)
    bench.check(requests)
    bench.warm_up(requests, build)
    with PhaseClock(bench.engine) as clock:
        bench.run(requests, build)
    steps = steps_of(clock.steps, rows)
    if not steps:
        raise CannotRun("no step had all rows")
    watch.is_recording = True
    try:
        operations = _record(bench, requests, build, lambda plan: _matches(plan, rows, steps[0].num_tokens))
    finally:
        watch.is_recording = False
    phases = {phase: statistics.median(step.seconds.get(phase, 0.0) for step in steps) for phase in PHASES}
    return StepProfile(_title(rows), len(steps), phases, operations)


class NativeWatch:
    """Shows the native kernels of engines created while it is entered to torch.profiler, when `is_recording`."""

    def __init__(self) -> None:
        self.is_recording = False
        self._inner = NativeLibrary.function

    def __enter__(self) -> NativeWatch:
        watch, inner = self, self._inner

        def function(library: NativeLibrary, name: str, *argtypes: type, **options: Any) -> Callable[..., Any]:
            kernel, label = inner(library, name, *argtypes, **options), _NATIVE + name

            def call(*args: Any) -> Any:
                if not watch.is_recording:
                    return kernel(*args)
                with record_function(label):
                    return kernel(*args)

            return call

        NativeLibrary.function = function
        native._open.cache_clear()  # bound functions are kept by library: a new one gets functions of its own
        return self

    def __exit__(self, *exc_info: object) -> None:
        NativeLibrary.function = self._inner
        native._open.cache_clear()


# ---- recording -----------------------------------------------------------------------------------


def _requests(bench: Bench, rows: int | None) -> list[Request]:
    if rows is None:
        return bench.requests("prefill")
    # The first to finish its prompt decodes while the last still waits: so many steps do not have all rows,
    # and some more, because rows that decode leave the prompts less of each: hence twice the steps to record.
    waiting = -(-rows * _PROMPT // bench.engine.model_info().max_batched_tokens)
    return workload.uniform(rows, _PROMPT // bench.shrink, waiting + 2 * _STEPS, bench.cost.vocab_size)


def _record(bench: Bench, requests: list[Request], build: Build | None, matches: Callable[[Any], bool]) -> Operations:
    engine = bench.engine
    recorder = _Recorder(matches, native_program(engine))
    with ExitStack() as stack:
        for scope, phase in _PHASES.items():
            stack.enter_context(wrapped_phase(engine, phase, lambda inner, scope=scope: _scoped(inner, scope)))
        backend = engine._loop._runner._backend
        stack.enter_context(wrapped(backend, "forward", lambda inner: _scoped(inner, _ATTENTION)))
        stack.enter_context(wrapped_phase(engine, "runner, rest", recorder.wrap))
        bench.run(requests, build)
        call_in_loop(engine, recorder.stop)
    return recorder.operations()


def _matches(plan: Any, rows: int | None, most: int) -> bool:
    if rows is None:
        return not plan.num_decodes and plan.num_tokens == most
    return plan.num_decodes == len(plan.scheduled) == rows


class _Recorder:
    """Runs torch.profiler over the first steps that match, in the loop's thread: the profiler sees one thread only."""

    def __init__(self, matches: Callable[[Any], bool], program: NativeProgram | None) -> None:
        self._matches = matches
        self._program = program
        self._kernels: list[dict[str, float]] = []  # of each step, what the kernels inside the program took
        self._profiler = profile(activities=[ProfilerActivity.CPU])
        self._is_running = False
        self._num_steps = 0

    def wrap(self, inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def execute(plan: Any) -> Any:
            if self._num_steps == _STEPS or not self._matches(plan):
                self.stop()
                return inner(plan)
            if self._num_steps == 0:
                self._profiler.start()
                self._time_program(True)
                self._is_running = True
            self._num_steps += self._is_running
            with record_function(_STEP):
                result = inner(plan)
            if self._program is not None:
                self._kernels.append(self._program.take_seconds())
            return result

        return execute

    def _time_program(self, is_timed: bool) -> None:
        if self._program is not None:
            self._program.is_timed = is_timed

    def stop(self) -> None:
        if self._is_running:
            self._profiler.stop()
            self._time_program(False)
            self._is_running = False

    def operations(self) -> Operations:
        if not self._num_steps:
            return Operations(0, {}, {}, {})
        by_category: dict[str, Counter[int]] = defaultdict(Counter)  # category -> step -> seconds
        by_name: dict[str, Counter[int]] = defaultdict(Counter)
        num_calls: Counter[str] = Counter()
        nested: Counter[str] = Counter()
        for event in self._profiler.events():
            step, phase, category = _place(event)
            if step is None or phase is None:
                continue
            seconds = event.self_cpu_time_total / 1e6
            if phase != "sample":
                by_category[category][id(step)] += seconds
                nested[_place(event.cpu_parent)[2]] += 1
            by_name[event.name][id(step)] += seconds
            num_calls[event.name] += 1
        self._divide_program(by_category, by_name, num_calls)
        count = self._num_steps
        return Operations(
            count,
            {category: _median(seconds, count) for category, seconds in by_category.items()},
            {category: calls / count for category, calls in nested.items()},
            {name: (num_calls[name] / count, _median(seconds, count)) for name, seconds in by_name.items()},
        )

    def _divide_program(
        self, by_category: dict[str, Counter[int]], by_name: dict[str, Counter[int]], num_calls: Counter[str]
    ) -> None:
        """Put the kernels inside the one call in its place; what is left of it is the call's own."""
        for step, kernels in zip(list(by_name.get(_PROGRAM, ())), self._kernels):
            for name in KERNELS:
                for total, key in ((by_category, _kernel_category(name)), (by_name, f"{_PROGRAM}: {name}")):
                    total[key][step] += kernels[name]
                by_category["other"][step] -= kernels[name]
                by_name[_PROGRAM][step] -= kernels[name]
                num_calls[f"{_PROGRAM}: {name}"] += 1


def _kernel_category(name: str) -> str:
    return "gemm" if "linear" in name else "attention" if "attention" in name else "other"


def _median(seconds: Counter[int], num_steps: int) -> float:
    """Over all steps, of which those without an entry took none."""
    return statistics.median([*seconds.values(), *[0.0] * (num_steps - len(seconds))])


def _scoped(inner: Callable[..., Any], scope: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(scope):
            return inner(*args, **kwargs)

    return call


def _place(event: Any) -> tuple[Any, str | None, str]:
    """The step, the phase and the category of an operation, from the operations around it, innermost first."""
    phase = category = None
    ancestor = event
    while ancestor is not None and ancestor.name != _STEP:
        name = ancestor.name
        phase = _PHASES.get(name, phase)
        if category is None:
            if name in _GEMM_OPS:
                category = "gemm"
            elif name == _ATTENTION:
                category = "attention"
            elif name.startswith(_NATIVE) and (found := _kernel_category(name)) != "other":
                category = found
        ancestor = ancestor.cpu_parent
    return ancestor, phase, category or ("python" if event.name in _PHASES else "other")


def _print_python(bench: Bench, rows: int) -> None:
    """Calls and time of the loop thread's Python functions, per step, over a whole run of decoding."""
    requests = _requests(bench, rows)
    profiler = cProfile.Profile(time.thread_time)  # waiting, and other threads, are not counted
    before = bench.engine._loop.num_steps
    call_in_loop(bench.engine, profiler.enable)
    bench.run(requests)
    call_in_loop(bench.engine, profiler.disable)
    num_steps = bench.engine._loop.num_steps - before
    print(
        f"\nPython of the loop, {rows} rows, {num_steps} steps: calls and own µs per step (slowed down by the profiler)"
    )
    entries = pstats.Stats(profiler).stats.items()
    for (path, line, name), (_, calls, own, _total, _callers) in sorted(entries, key=lambda item: -item[1][2])[:40]:
        where = f"{os.path.basename(path)}:{line} {name}" if line else name
        print(f"  {calls / num_steps:>9.1f}{own / num_steps * 1e6:>10.1f}  {where}")


# ---- showing -------------------------------------------------------------------------------------


def _title(rows: int | None) -> str:
    return "prefill" if rows is None else f"decode, {rows} row{'s' * (rows > 1)}"


def _lines(result: StepProfile, num_ops: int) -> Iterator[str]:
    total = result.step_s
    yield f"\n{result.title}: {total * 1e3:.2f} ms per step, median of {result.num_steps} steps"
    parts = {**result.inside, "sampling": result.phases["sample"]}
    parts.update((phase, seconds) for phase, seconds in result.phases.items() if phase not in _OUTSIDE)
    parts["between forwards"] = result.between_forwards_s
    for name, seconds in parts.items():
        yield f"  {name:<24}{seconds * 1e3:>9.3f} ms{seconds / total:>8.1%}"
    names = sorted(result.operations.names.items(), key=lambda item: -item[1][1])[:num_ops]
    if names:
        yield f"  operations by own time, per step of {result.operations.num_steps} recorded:"
    for name, (calls, seconds) in names:
        yield f"    {calls:>7.1f} x{seconds * 1e6:>10.1f} µs  {name.removeprefix(_SCOPE)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.profile", description="Where a step's time goes.")
    parser.add_argument("--model", help="directory, .gguf file or hub id (default: the demo model)")
    parser.add_argument(
        "--rows", type=at_least(1), nargs="*", default=[1, 64], help="rows of the decode steps (default: 1 64)"
    )
    parser.add_argument("--variant", choices=sorted(VARIANTS), help="of the requests (default: greedy)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--threads", type=num_threads)
    parser.add_argument(
        "--ops", type=at_least(0), default=12, help="operations listed for each kind of step (default: 12)"
    )
    parser.add_argument("--python", action="store_true", help="also list the loop's Python functions")
    parser.add_argument("--quick", action="store_true", help="shorter prompts: tries the profile, measures nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
