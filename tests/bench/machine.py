"""The machine: what it is, how fast it multiplies large matrices, and how fast it reads memory.

Both rates are the best of several public ways to reach them, with the threads that the engine gets.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import openengine
from openengine.core.memory import usable_cpus
from openengine.ops import huge_pages

__all__ = ["Machine", "Probe", "environment", "measure"]

_GEMM_SHAPES = ((1024, 2048, 2048), (2048, 1536, 1536))  # M, N, K
_READ_BYTES = 512 << 20  # many times any cache
_PROBE_BYTES = 128 << 20
_PROBE_SHAPE = (256, 1536, 1536)
_BUDGET_S = 0.6  # for each way of each figure
_PACKAGES = ("torch", "numpy", "tokenizers", "safetensors")


@dataclass(frozen=True, slots=True)
class Machine:
    """`gemm_rate`: operations per second in `gemm_dtype` at large M.  `read_rate`: bytes per second from memory."""

    gemm_dtype: str
    gemm_rate: float
    read_rate: float

    def better(self, other: Machine) -> Machine:
        """The higher of two measurements of each figure: a limit is what the machine gives when nothing disturbs it."""
        return Machine(self.gemm_dtype, max(self.gemm_rate, other.gemm_rate), max(self.read_rate, other.read_rate))

    def drift(self, other: Machine) -> float:
        """By which fraction the figures of two measurements differ at most."""
        pairs = ((self.gemm_rate, other.gemm_rate), (self.read_rate, other.read_rate))
        return max(1 - min(pair) / max(pair) for pair in pairs)


@torch.inference_mode()
def measure(gemm_dtype: str, *, quick: bool = False) -> Machine:
    """Measure both rates. `gemm_dtype`: "float32", "bfloat16", "float16" or "int8". `quick` gives a rough idea only."""
    budget = 0.01 if quick else _BUDGET_S
    best = 0.0
    for m, n, k in _GEMM_SHAPES[: 1 if quick else None]:
        for multiply in _gemms(gemm_dtype, m, n, k):
            best = max(best, 2.0 * m * n * k / _least_s(multiply, budget))
    buffer = _ones(_READ_BYTES // (64 if quick else 1))
    read = max(buffer.nbytes / _least_s(reader, budget) for reader in _readers(buffer))
    return Machine(gemm_dtype, best, read)


class Probe:
    """What the machine multiplies and reads at the moment: on a shared host either may halve within a second."""

    def __init__(self, gemm_dtype: str, *, quick: bool = False) -> None:
        m, n, k = _PROBE_SHAPE
        budget = 0.0 if quick else 0.1
        self._operations = 2.0 * m * n * k
        self._multiply = min(_gemms(gemm_dtype, m, n, k), key=lambda multiply: _least_s(multiply, budget))
        self._buffer = _ones(_PROBE_BYTES // (16 if quick else 1))
        self._read = min(_readers(self._buffer), key=lambda read: _least_s(read, budget))

    def rates(self) -> tuple[float, float]:
        """Operations and bytes per second, each of one pass of some milliseconds."""
        start = time.perf_counter()
        self._multiply()
        middle = time.perf_counter()
        self._read()
        return self._operations / (middle - start), self._buffer.nbytes / (time.perf_counter() - middle)


def environment(num_threads: int) -> dict[str, Any]:
    """Versions, hardware, date and load: what a figure depends on."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "openengine": openengine.__version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES},
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpus": usable_cpus(),
        "threads": num_threads,
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def _gemms(dtype: str, m: int, n: int, k: int) -> Iterator[Callable[[], Tensor]]:
    if dtype != "float32":  # where a CPU has nothing for a dtype, converting to float32 is a way
        yield from _gemms("float32", m, n, k)
    if dtype == "int8":
        a = torch.randint(-127, 127, (m, k), dtype=torch.int8)
        b = torch.randint(-127, 127, (n, k), dtype=torch.int8)
        yield lambda: torch._int_mm(a, b.T)
        return
    x = torch.randn(m, k).to(getattr(torch, dtype))
    weight = torch.randn(n, k).to(getattr(torch, dtype))
    yield lambda: F.linear(x, weight)
    try:  # no public interface, but the fastest way there is for weights that stay
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return
    yield lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _ones(num_bytes: int) -> Tensor:
    """Memory f32 of the kind that the engine reads."""
    return huge_pages.empty(num_bytes).view(torch.float32).fill_(1.0)


def _readers(buffer: Tensor) -> Iterator[Callable[[], Tensor]]:
    matrix = buffer.view(-1, 1 << 14)
    vector = torch.ones(matrix.shape[1])
    integers = buffer.view(torch.int32)
    yield lambda: torch.mv(matrix, vector)
    yield integers.amax
    yield buffer.sum


def _least_s(function: Callable[[], Any], budget: float) -> float:
    function()
    least, start = float("inf"), time.perf_counter()
    while True:
        before = time.perf_counter()
        function()
        now = time.perf_counter()
        least = min(least, now - before)
        if now - start > budget:
            return least


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
