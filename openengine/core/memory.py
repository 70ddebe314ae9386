"""What the process shares with its machine: memory that is left, memory given back, OpenMP's workers."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["available_bytes", "one_openmp_thread", "trim_allocator"]


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on `device` now: free memory, within the control group's limit if there is one."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return free
    limits = [value for value in (_meminfo_available(), _cgroup_available()) if value is not None]
    if limits:
        return min(limits)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _meminfo_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: the caller falls back to the physical size
    return None


def _cgroup_available() -> int | None:
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit == "max":
            return None
        root = Path("/sys/fs/cgroup")
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        # Cached file pages, such as those of weights just read, are given up when memory is needed.
        return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None  # no control group v2


def trim_allocator() -> None:
    """Return freed heap pages to the system where the C library can (glibc keeps them otherwise)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        pass  # not glibc: nothing to trim


@contextmanager
def one_openmp_thread() -> Iterator[None]:
    """Parallel operations of the calling thread run on it alone; other threads are as they were.

    OpenMP keeps workers for every thread that ever ran a parallel operation. As soon as they outnumber the processors
    they sleep between operations instead of spinning, and waking them costs more than a small operation: with workers
    left over from loading, the loop decoded one sequence at half its speed.
    """
    library = ctypes.CDLL(None)
    try:
        get_threads, set_threads = library.omp_get_max_threads, library.omp_set_num_threads
    except AttributeError:  # no OpenMP in this process
        yield
        return
    before = get_threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(before)
