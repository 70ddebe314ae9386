"""Measuring from fresh processes: importing and loading, memory, and other engines (`--vs`).

This module is also what such a process runs: `python -m tests.bench.processes` reads a job from stdin and prints one
JSON line. Only there its clock starts before anything heavy is imported.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FreshRun", "PeerFailed", "fresh_run", "ratios", "run_peer"]

_ROOT = Path(__file__).resolve().parents[2]


class PeerFailed(Exception):
    """A peer's script ended without a line of results; the message has the end of what it wrote."""


@dataclass(frozen=True, slots=True)
class FreshRun:
    """One process that imported, loaded, and maybe ran a work. Seconds and bytes; None where the system is silent."""

    import_s: float
    load_s: float
    weight_bytes: int
    kv_bytes: int
    loaded_rss: int | None
    loaded_peak_rss: int | None
    worked_rss: int | None
    peak_rss: int | None

    @property
    def total_s(self) -> float:
        return self.import_s + self.load_s


def fresh_run(model: str, options: Mapping[str, Any], *, work: str | None = None, quick: bool = False) -> FreshRun:
    """Load `model` in a new process and, with `work`, run that once. `options`: those of `Engine`."""
    job = {"model": model, "options": dict(options), "work": work, "quick": quick}
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.processes"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
        cwd=_ROOT,
    )
    if done.returncode:
        raise PeerFailed(f"a fresh process failed: {done.stderr[-2000:]}")
    return FreshRun(**json.loads(done.stdout.splitlines()[-1]))


def run_peer(command: str) -> dict[str, Any]:
    """Run a peer's script and return the last line of its output that is a JSON object.

    Such a line has, for each work it ran, `{"s": seconds, "out_tok_s": rate, "in_tok_s": rate}`, and optionally
    "engine", "import_s" and "load_s". Raises PeerFailed without one.
    """
    try:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    except OSError as exc:
        raise PeerFailed(f"{command!r}: {exc}") from exc
    for line in reversed(done.stdout.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    raise PeerFailed(f"{command!r} ended with {done.returncode} and no JSON line: {done.stderr[-2000:]}")


def ratios(ours: list[Mapping[str, Any]], theirs: list[Mapping[str, Any]]) -> dict[str, float]:
    """For each work both sides ran, how many times faster we are by the median over the rounds.

    Each item is one round of one side, in the form of `run_peer`.
    """
    works = [name for name in ours[0] if all(isinstance(side.get(name), Mapping) for side in (*ours, *theirs))]
    return {
        name: statistics.median(side[name]["s"] for side in theirs)
        / statistics.median(side[name]["s"] for side in ours)
        for name in works
    }


def _work_here(job: Mapping[str, Any], start: float) -> dict[str, Any]:
    from openengine import Engine

    imported = time.perf_counter()
    engine = Engine(job["model"], progress=False, **job["options"])
    loaded = time.perf_counter()
    rss, peak = _rss("VmRSS"), _rss("VmHWM")
    if job["work"] is not None:
        from tests.bench.machine import Machine
        from tests.bench.probe import model_cost
        from tests.bench.works import Bench

        cost = model_cost(engine, job["options"].get("quantization"))
        bench = Bench(engine, cost, Machine("", 1.0, 1.0), quick=job["quick"])
        bench.run(bench.requests(job["work"]))
    attributes = engine.info().attributes
    result = {
        "import_s": imported - start,
        "load_s": loaded - imported,
        "weight_bytes": attributes["weight_bytes"],
        "kv_bytes": attributes["kv_bytes"],
        "loaded_rss": rss,
        "loaded_peak_rss": peak,
        "worked_rss": _rss("VmRSS"),
        "peak_rss": _rss("VmHWM"),
    }
    engine.close()
    return result


def _rss(field: str) -> int | None:
    """Resident bytes now (VmRSS) or at most (VmHWM). `getrusage` would count what the parent held at the fork."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return None


if __name__ == "__main__":
    started = time.perf_counter()
    print(json.dumps(_work_here(json.load(sys.stdin), started)))
