"""What the process shares with its machine: memory that is left, memory given back, CPUs, OpenMP's workers."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["available_bytes", "is_out_of_memory", "one_openmp_thread", "trim_allocator", "usable_cpus"]


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on `device` now: free memory, within the limits of control groups and `ulimit -v`."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return free
    found = _meminfo_available(), _cgroup_available(), _address_space_available()
    limits = [value for value in found if value is not None]
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


def _address_space_available() -> int | None:
    """What `ulimit -v` leaves."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (ImportError, OSError):
        return None
    return None if limit == resource.RLIM_INFINITY else max(0, limit - used)


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """Where a version of control groups has its folders, and its names for a limit, use, and file pages not in use."""

    root: Path
    limit: str
    used: str
    cached: str

    def available(self, group: str) -> Iterator[int]:
        """What `group` and each group around it leave. Those that a container does not show are passed over."""
        inside = Path("/", group).relative_to("/")
        for folder in (self.root / part for part in (inside, *inside.parents)):
            try:
                limit = int((folder / self.limit).read_text())  # "max" where there is none
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                # Cached file pages, such as those of weights just read, are given up when memory is needed.
                yield max(0, limit - int((folder / self.used).read_text()) + int(stat.get(self.cached, 0)))
            except (OSError, ValueError):
                continue


_CGROUP_V1 = _Hierarchy(
    Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)
_CGROUP_V2 = _Hierarchy(Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file")


def _cgroup_available() -> int | None:
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    found = []
    for _number, controllers, group in groups:
        if not controllers:
            found += _CGROUP_V2.available(group)
        elif "memory" in controllers.split(","):
            found += _CGROUP_V1.available(group)
    return min(found, default=None)


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether an allocation failed: of Python, of the system, or of torch, which on a CPU says it in words only."""
    if isinstance(exc, OSError):
        return exc.errno == errno.ENOMEM
    return isinstance(exc, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(exc, RuntimeError) and "DefaultCPUAllocator" in str(exc)
    )


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
