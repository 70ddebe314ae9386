"""The command `python -m tests.bench`: chooses works, runs them in one engine, prints the table and writes the JSON."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from openengine import Engine, OpenEngineError, demo_model
from tests.bench import growth, guided, report, workload
from tests.bench.arguments import arrival_rate, at_least, names_of, num_threads
from tests.bench.machine import Machine, environment, measure
from tests.bench.probe import model_cost
from tests.bench.processes import FreshRun, PeerFailed, fresh_run, ratios, run_peer
from tests.bench.works import BatchResult, Bench, CannotRun, Comparison

__all__ = ["main"]

_COMPARED = ("sampling", "logprobs")
WORKS = (*workload.BATCH_WORKS, "arrivals", *_COMPARED, "guided", "growth", "load", "memory")
_PEER_WORKS = ("single", "batch64", "prefill", "prefix")
_DRIFT = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    for command in args.vs:
        if not shlex.split(command) or shutil.which(shlex.split(command)[0]) is None:
            parser.error(f"--vs {command!r}: there is no such command")
    if args.plot is not None:
        if "growth" not in args.works:
            parser.error("--plot draws the work growth, which --works leaves out")
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("--plot needs matplotlib, which is not installed")
    for path in (args.json, args.plot):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{path}: there is no directory {path.parent}")
        if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            parser.error(f"{path} cannot be written")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    args.model = args.model or str(demo_model())
    options = {
        "dtype": args.dtype,
        "quantization": args.quantization,
        "kernels": args.kernels,
        "num_threads": args.threads,
    }
    try:
        engine = Engine(args.model, progress=False, **options)
    except OpenEngineError as exc:
        parser.error(str(exc))
    with engine:
        document = _run(engine, args, options)
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=1, default=_plain) + "\n", "utf-8")
    return 0 if all(command in document["peers"] for command in args.vs) else 1


def _run(engine: Engine, args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    attributes = dict(engine.info().attributes)
    gemm_dtype = args.quantization or attributes["dtype"]
    before = measure(gemm_dtype, quick=args.quick)
    document: dict[str, Any] = {
        "environment": environment(torch.get_num_threads()),
        "model": args.model,
        "options": options,
        "attributes": attributes,
        "works": {},
        "skipped": {},
        "peers": {},
    }
    _show(report.header_lines(document["environment"], attributes, Path(args.model).name, before))
    bench = Bench(engine, model_cost(engine, args.quantization), before, repeat=args.repeat, quick=args.quick)
    if args.quick:
        _show(["--quick: the figures below mean nothing"])
    runner = _Runner(bench, args, options, document)
    for name in args.works:
        runner.run(name)
    for command in args.vs:
        runner.against(command)
    after = measure(gemm_dtype, quick=args.quick)
    document["machine"] = {"before": before, "after": after}
    runner.summarize(before.better(after))
    if before.drift(after) > _DRIFT:
        _show([f"limits drifted by {before.drift(after):.0%} during the run: the machine was not quiet, or throttles"])
    return document


class _Runner:
    """Runs works by name; results go to `document`, lines to stdout."""

    def __init__(
        self, bench: Bench, args: argparse.Namespace, options: dict[str, Any], document: dict[str, Any]
    ) -> None:
        self._bench = bench
        self._args = args
        self._options = {name: value for name, value in options.items() if value is not None}
        self._document = document
        self._batches: list[BatchResult] = []
        self._comparisons: list[Comparison] = []

    def run(self, name: str) -> None:
        """Run one work; one that cannot run here, or whose process fails, is noted with the reason."""
        print(f"… {name}", file=sys.stderr, flush=True)
        try:
            if name in workload.BATCH_WORKS:
                self._batches.append(self._bench.batch(name))
            elif name in _COMPARED:
                self._compare(name)
            else:
                {
                    "arrivals": self._arrivals,
                    "growth": self._growth,
                    "guided": self._guided,
                    "load": self._load,
                    "memory": self._memory,
                }[name]()
        except (CannotRun, PeerFailed) as exc:
            self._skip(name, str(exc))

    def against(self, command: str) -> None:
        """Run the peer and the engine in turns; a round's figure is the better of two runs, as theirs is."""
        names, ours, theirs = self._peer_works(), [], []
        for index in range(self._args.repeat):
            print(f"… round {index + 1} against {command}", file=sys.stderr, flush=True)
            try:
                theirs.append(run_peer(command))
            except PeerFailed as exc:
                self._skip(command, str(exc))
                return
            ours.append(self._round(names))
        found = ratios(ours, theirs)
        self._document["peers"][command] = {"ours": ours, "theirs": theirs, "ratios": found}
        _show(["", *report.peer_lines(theirs[0].get("engine", command), ours, theirs, found)])

    def summarize(self, machine: Machine) -> None:
        """The table of batches, against the best that the machine showed before and after."""
        self._bench.machine = machine
        self._batches = [
            dataclasses.replace(result, limit_s=self._bench.limit_s(result.name)) for result in self._batches
        ]
        works = self._document["works"]
        for result in (*self._batches, *self._comparisons):
            works[result.name] = result
        if self._batches:
            _show(["", *report.batch_lines(self._batches)])
        if self._comparisons:
            _show(["", *report.comparison_lines(self._comparisons)])

    def _compare(self, name: str) -> None:
        self._comparisons.append(self._bench.compare(name))

    def _arrivals(self) -> None:
        result = self._bench.arrivals(self._args.rate, self._args.arrivals)
        self._document["works"]["arrivals"] = result
        _show(["", *report.arrivals_lines(result)])

    def _guided(self) -> None:
        result = guided.measure(self._bench, self._args.schemas)
        self._document["works"]["guided"] = result
        _show(["", *guided.guided_lines(result)])

    def _growth(self) -> None:
        curves = []
        for found in growth.curves(self._bench):
            if isinstance(found, str):
                self._skip("growth", found)
            elif found:
                curves.append(found)
                _show(["", *report.growth_lines(found, says_cliff=not self._args.quick)])
        self._document["works"]["growth"] = [
            {**dataclasses.asdict(point), "is_cliff": point.is_cliff} for points in curves for point in points
        ]
        if self._args.plot is not None and curves:
            report.save_plot(curves, self._args.plot)

    def _load(self) -> None:
        runs = [self._fresh(None) for _ in range(self._args.repeat)]
        self._document["works"]["load"] = runs
        _show(["", *report.load_lines(runs)])

    def _memory(self) -> None:
        self._bench.requests("batch64")  # says so if they do not fit
        run = self._fresh("batch64")
        self._document["works"]["memory"] = run
        _show(["", *report.memory_lines(run)])

    def _fresh(self, work: str | None) -> FreshRun:
        return fresh_run(self._args.model, self._options, work=work, quick=self._args.quick)

    def _peer_works(self) -> list[str]:
        names = []
        for name in _PEER_WORKS:
            try:
                self._bench.warm_up(self._bench.requests(name))
                names.append(name)
            except CannotRun as exc:
                self._skip(f"{name} against peers", str(exc))
        return names

    def _round(self, names: list[str]) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        for name in names:
            requests = self._bench.requests(name)
            seconds = min(self._bench.run(requests, shared=name == "prefix")[0] for _ in range(2))
            figures[name] = {
                "s": seconds,
                "out_tok_s": sum(request.max_tokens for request in requests) / seconds,
                "in_tok_s": sum(len(request.token_ids) for request in requests) / seconds,
            }
        return figures

    def _skip(self, name: str, reason: str) -> None:
        self._document["skipped"].setdefault(name, []).append(reason)
        _show([f"{name} skipped: {reason}"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--model", help="directory, .gguf file or hub id (default: the demo model)")
    parser.add_argument(
        "--works",
        type=names_of("works", WORKS),
        default=list(WORKS),
        metavar="A,B",
        help=f"any of {','.join(WORKS)} (default: all)",
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument(
        "--repeat", type=at_least(1), default=3, help="runs of each work, of which the median counts (default: 3)"
    )
    parser.add_argument("--threads", type=num_threads, help="of the engine and of the limits (default: torch's)")
    parser.add_argument("--rate", type=arrival_rate, default=2.0, help="arrivals per second (default: 2)")
    parser.add_argument(
        "--schemas", type=Path, metavar="FILE", help="JSON lines with the schemas that `guided` compiles"
    )
    parser.add_argument(
        "--arrivals", type=at_least(1), default=40, help="requests of the work `arrivals` (default: 40)"
    )
    parser.add_argument(
        "--vs",
        action="append",
        default=[],
        metavar="CMD",
        help="run this command in turns with the engine; it prints a JSON line with, for each work it ran, "
        '"single": {"s": seconds, "out_tok_s": rate, "in_tok_s": rate} and so on; may repeat',
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the growth curves (needs matplotlib)")
    parser.add_argument(
        "--quick", action="store_true", help="an eighth of all lengths: tries the benchmark, measures nothing"
    )
    return parser


def _show(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def _plain(value: Any) -> Any:
    """A result as JSON: its fields, and what follows from them."""
    if not dataclasses.is_dataclass(value):
        return str(value)
    derived = ("median_s", "rate", "fraction", "cost", "total_s")
    return {**dataclasses.asdict(value), **{name: getattr(value, name) for name in derived if hasattr(value, name)}}


if __name__ == "__main__":
    sys.exit(main())
