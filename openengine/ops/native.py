"""The compiled kernels: finds the library, opens it, and binds its functions for a level of this CPU.

The library (`ops/csrc`, built by setup.py as `openengine.ops._native`) is optional. It offers plain C functions
`oe_<name>_<level>`, each compiled once per level; what they compute and their PyTorch twins belong to the modules that
bind them. It is compiled for OpenMP but linked to no OpenMP runtime: opened after torch, it uses torch's, and so its
threads.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch  # before the library is opened: it brings the OpenMP runtime

from openengine.errors import UnsupportedFeature

__all__ = [
    "FLOAT_KINDS",
    "INT8_KIND",
    "LEVELS",
    "NativeLibrary",
    "native_absence",
    "native_library",
    "required_library",
]

_log = logging.getLogger("openengine")

# Raise together with OE_INTERFACE in csrc/common.h whenever the functions or their arguments change.
INTERFACE = 11
LEVELS = ("generic", "avx2", "avx512", "avx512_bf16")  # each includes those before it, as cpu.cpp tests them
FLOAT_KINDS, INT8_KIND = {torch.float32: 0, torch.bfloat16: 1}, 2  # as `Kind` of csrc/common.h numbers them
_REBUILD = "install GCC 10 or newer and install openengine-inference again"


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The opened library. `levels` are those it was compiled for and this CPU can run, the fastest last."""

    handle: ctypes.CDLL
    levels: tuple[str, ...]

    def function(
        self, name: str, *argtypes: type, level: str | None = None, allocates: bool = False
    ) -> Callable[..., None]:
        """The function `name` for the fastest level, or for `level`, which the tests name. It releases the GIL.

        One that `allocates` raises MemoryError where it finds too little. Raises UnsupportedFeature if `level` cannot
        run here.
        """
        level = level or self.levels[-1]
        if level not in self.levels:
            raise UnsupportedFeature(f"native kernels for {level!r} cannot run here; choose one of {self.levels}")
        function = getattr(self.handle, f"oe_{name}_{level}")
        function.argtypes = argtypes
        function.restype = None
        if allocates:
            function.restype, function.errcheck = ctypes.c_int32, _check_memory
        return function


def _check_memory(has_memory: int, function: Callable[..., int], _arguments: tuple[object, ...]) -> None:
    if not has_memory:
        raise MemoryError(f"{function.__name__}: not enough memory for its scratch; run fewer tokens a step")


def native_library() -> NativeLibrary | None:
    """The library, opened at the first call; None where it is absent, for which `native_absence` gives the reason."""
    found = _open()
    return found if isinstance(found, NativeLibrary) else None


def required_library(dtype: torch.dtype) -> NativeLibrary:
    """The library, for kernels of `dtype`. Raises UnsupportedFeature where it is absent or has none for that."""
    library = native_library()
    if library is None:
        raise UnsupportedFeature(f"{native_absence()}, or use kernels='torch'")
    if dtype not in FLOAT_KINDS:
        refused = str(dtype).removeprefix("torch.")
        raise UnsupportedFeature(f"the native kernels take float32 and bfloat16, not {refused}; use kernels='torch'")
    return library


def native_absence() -> str | None:
    """Why there is no library and what to do about it; None where there is one."""
    found = _open()
    return found if isinstance(found, str) else None


@cache
def _open() -> NativeLibrary | str:
    found = _find()
    if isinstance(found, str):
        _log.warning("%s. Until then kernels='auto' is plain PyTorch, several times slower", found)
    return found


def _find() -> NativeLibrary | str:
    spec = importlib.util.find_spec("openengine.ops._native")
    if spec is None or spec.origin is None:
        return f"the native kernels are not built; {_REBUILD}"
    try:
        handle = ctypes.CDLL(spec.origin)
        interface, num_runnable = handle.oe_interface(), handle.oe_cpu_levels()
    except (OSError, AttributeError) as exc:
        return f"the native kernels cannot be opened ({exc}); {_REBUILD}"
    if interface != INTERFACE:
        return f"the native kernels have interface {interface}, this version needs {INTERFACE}; {_REBUILD}"
    runnable = LEVELS[:num_runnable]
    levels = tuple(level for level in runnable if hasattr(handle, f"oe_attention_{level}"))
    if not levels:
        return f"the native kernels have none for this CPU; {_REBUILD}"
    if levels != runnable:
        missing = ", ".join(sorted(set(runnable) - set(levels)))
        _log.warning("the native kernels were built without %s, which this CPU runs; for those, %s", missing, _REBUILD)
    return NativeLibrary(handle, levels)
