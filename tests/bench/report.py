"""What the benchmark shows: lines of a table, and a plot of the growth curves."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.growth import CLIFF, Point
from tests.bench.machine import Machine
from tests.bench.processes import FreshRun
from tests.bench.works import Arrivals, BatchResult, Comparison

__all__ = [
    "arrivals_lines",
    "batch_lines",
    "comparison_lines",
    "growth_lines",
    "header_lines",
    "load_lines",
    "memory_lines",
    "peer_lines",
    "save_plot",
]

_BAR = 30  # characters of the longest bar


def header_lines(
    environment: Mapping[str, Any], attributes: Mapping[str, Any], model: str, machine: Machine
) -> Iterator[str]:
    yield f"openengine {environment['openengine']}, torch {environment['torch']}, {environment['date']}"
    threads = f"{environment['threads']} threads, {environment['cpus']} CPUs, load {environment['load_average']}"
    yield f"{environment['cpu']}, {threads}"
    yield f"{model}: {attributes['architecture']}, {attributes['dtype']}, kernels {attributes['kernels']}"
    gemm, read = f"{machine.gemm_rate / 1e9:,.0f} Gop/s", f"{machine.read_rate / 1e9:.1f} GB/s"
    yield f"limits: {machine.gemm_dtype} GEMM {gemm}, read {read}"


def batch_lines(results: Sequence[BatchResult]) -> Iterator[str]:
    yield (
        f"{'work':<10}{'requests':>9}{'in':>8}{'out':>7}{'median':>10}{'min':>9}{'max':>9}"
        f"{'tokens/s':>13}{'limit':>10}{'of it':>7}"
    )
    for r in results:
        rate = f"{r.rate:,.1f}" + (" in" if r.is_prompt_work else "")
        limit = r.rate / r.fraction
        yield (
            f"{r.name:<10}{r.num_requests:>9}{r.num_input:>8}{r.num_output:>7}"
            f"{r.median_s:>8.3f} s{min(r.seconds):>9.3f}{max(r.seconds):>9.3f}"
            f"{rate:>13}{limit:>10,.0f}{r.fraction:>7.0%}"
        )


def comparison_lines(results: Sequence[Comparison]) -> Iterator[str]:
    yield f"{'variant':<10}{'rows':>5}{'base step':>12}{'step':>12}{'cost':>9}   whole run, base and variant"
    for r in results:
        base, variant = statistics.median(r.base_seconds), statistics.median(r.variant_seconds)
        yield (
            f"{r.name:<10}{r.num_rows:>5}{r.base_step_s * 1e3:>9.2f} ms{r.variant_step_s * 1e3:>9.2f} ms"
            f"{r.cost:>+9.1%}   {base:.3f} s, {variant:.3f} s"
        )


def arrivals_lines(result: Arrivals) -> Iterator[str]:
    told = f"{result.num_requests} arrivals at {result.rate:g} per second, {result.output_rate:,.1f} tokens/s"
    yield f"{told}; ms at 50, 90, 99 %"
    for name, values in (
        ("first token", result.first_token),
        ("per token, by request", result.per_token),
        ("between two tokens", result.gap),
    ):
        yield f"  {name:<24}" + "".join(f"{value * 1e3:>10.1f}" for value in values)


def growth_lines(points: Sequence[Point], *, says_cliff: bool = True) -> Iterator[str]:
    longest = max(point.step_s for point in points)
    yield f"{points[0].curve:<20}{'rows':>5}{'context':>9}{'step':>12}{'GEMM':>12}{'read':>11}{'over limit':>12}{'factor':>8}"
    for p in points:
        bar = "█" * max(1, round(_BAR * p.step_s / longest))
        cliff = f"  cliff: over {CLIFF}" if p.is_cliff and says_cliff else ""
        yield (
            f"{'':<20}{p.rows:>5}{p.context:>9}{p.step_s * 1e3:>9.2f} ms"
            f"{p.gemm_rate / 1e9:>6.0f} Gop/s{p.read_rate / 1e9:>6.1f} GB/s"
            f"{p.over_limit:>12.2f}{p.factor:>8.2f}  {bar}{cliff}"
        )


def load_lines(runs: Sequence[FreshRun]) -> Iterator[str]:
    imports, loads, totals = ([getattr(run, name) for run in runs] for name in ("import_s", "load_s", "total_s"))
    yield (
        f"import {statistics.median(imports):.2f} s + load {statistics.median(loads):.2f} s = "
        f"{statistics.median(totals):.2f} s (least {min(totals):.2f}, of {len(runs)} processes)"
    )


def memory_lines(run: FreshRun) -> Iterator[str]:
    yield f"weights {_mib(run.weight_bytes)}, KV pool {_mib(run.kv_bytes)}, whose pages are resident once used"
    yield f"  resident after loading {_mib(run.loaded_rss)}, at most {_mib(run.loaded_peak_rss)}"
    yield f"  resident after batch64 {_mib(run.worked_rss)}, at most {_mib(run.peak_rss)}"


def peer_lines(
    name: str, ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], ratios: Mapping[str, float]
) -> Iterator[str]:
    yield f"against {name}, {len(ours)} rounds in turns: ratio of medians (above 1: we are faster)"
    for work, ratio in ratios.items():
        mine, other = (statistics.median(side[work]["s"] for side in sides) for sides in (ours, theirs))
        yield f"  {work:<12}{ratio:>7.2f} x   {mine:>9.3f} s{other:>10.3f} s"


def save_plot(curves: Sequence[Sequence[Point]], path: Path) -> None:
    """Draw each curve with its limit. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(5 * len(curves), 4), squeeze=False)
    for axis, points in zip(axes[0], curves):
        by_rows = points[0].curve.startswith("rows")
        x = [point.rows if by_rows else point.context for point in points]
        axis.loglog(x, [point.step_s * 1e3 for point in points], "o-", base=2, label="measured")
        axis.loglog(
            x, [point.step_s / point.over_limit * 1e3 for point in points], "--", base=2, label="bytes and operations"
        )
        axis.set(title=points[0].curve, xlabel="rows" if by_rows else "context", ylabel="ms per decode step")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _mib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**20:,.0f} MiB"
