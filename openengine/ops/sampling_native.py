"""The functions of `ops/sampling.py` that pass over whole rows, compiled (`csrc/sampling.cpp`).

Signatures and results are those of their twins there, which also serve what the kernels do not: other devices and
dtypes, and lists of more than 1,024 tokens. Draws are decided by the twins' own arithmetic: a kernel runs the race and
names the few tokens that arrive first, and these alone are timed again.

A row's result depends neither on the rows beside it nor on the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from openengine.ops import sampling
from openengine.ops.native import NativeLibrary
from openengine.ops.sampling import NUM_ARRIVALS, SeenTokens, TokenScores

__all__ = ["NativeSampling"]

_MAX_TOP = 1024  # as csrc/sampling.cpp has it
_pointer, _i64 = ctypes.c_void_p, ctypes.c_int64


class NativeSampling:
    """`ops/sampling.py` for float32 rows on a CPU. `level` is for the tests, which name it."""

    def __init__(self, library: NativeLibrary, *, level: str | None = None) -> None:
        def bind(name: str, num_pointers: int, *rest: type) -> Callable[..., None]:
            """`rest` stands between the size of a row and the pointers."""
            argtypes = (_pointer, _i64, _i64, _i64, *rest, *[_pointer] * num_pointers)
            return library.function(name, *argtypes, level=level)

        self._top = bind("top", 2, _i64)
        self._score = bind("score", 6, _i64)
        self._mass = bind("mass", 3)
        self._mass_before = bind("mass_before", 4, _i64)
        self._race = bind("race", 6, _i64)
        self._penalize = bind("penalize", 8)
        self._apply_bitmask = bind("apply_bitmask", 1, _i64)

    # ---- masks and penalties, in place -----------------------------------------------------------

    def apply_bitmask_(self, logits: Tensor, mask: Tensor) -> None:
        if not _is_served(logits):
            return sampling.apply_bitmask_(logits, mask)
        _pass_over(self._apply_bitmask, logits, mask.shape[1], tensors=[mask])

    def penalize_(
        self, logits: Tensor, seen: SeenTokens, repetition: np.ndarray, frequency: np.ndarray, presence: np.ndarray
    ) -> None:
        if not _is_served(logits):
            return sampling.penalize_(logits, seen, repetition, frequency, presence)
        arrays = (seen.keys, seen.counts, seen.bases, seen.starts, seen.sizes, repetition, frequency, presence)
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        _pass_over(self._penalize, logits, tensors=tensors)

    # ---- selection -------------------------------------------------------------------------------

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if not _is_served(logits):
            return sampling.argmax(logits)
        values, ids = self.top_candidates(logits, 1)
        return ids.squeeze(1), values.squeeze(1)

    def top_candidates(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        if not (_is_served(logits) and 0 < count <= _MAX_TOP):
            return sampling.top_candidates(logits, count)
        values, ids = _table(logits, count, torch.float32), _table(logits, count, torch.int64)
        _pass_over(self._top, logits, count, tensors=[values, ids])
        return values, ids

    # ---- the draw --------------------------------------------------------------------------------

    def draw(
        self, logits: Tensor, *, best: Tensor, temperature: Tensor, max_gap: Tensor | None, keys: Tensor, bits: Tensor
    ) -> Tensor:
        noise = {"best": best, "temperature": temperature, "max_gap": max_gap, "keys": keys}
        if not _is_served(logits):
            return sampling.draw(logits, bits=bits, **noise)
        return self._arrivals(logits, bits=bits, **noise)[:, 0]

    def draw_nucleus(
        self,
        logits: Tensor,
        *,
        best: Tensor,
        mass: Tensor,
        temperature: Tensor,
        max_gap: Tensor | None,
        top_p: Tensor,
        keys: Tensor,
        bits: Tensor,
    ) -> tuple[Tensor, Tensor]:
        noise = {"best": best, "temperature": temperature, "max_gap": max_gap, "keys": keys}
        if not _is_served(logits):
            return sampling.draw_nucleus(logits, mass=mass, top_p=top_p, bits=bits, **noise)
        arrivals = self._arrivals(logits, bits=bits, **noise)
        before = torch.empty(arrivals.shape, dtype=torch.float64)
        _pass_over(self._mass_before, logits, arrivals.shape[1], tensors=[best, temperature, arrivals, before])
        return sampling.first_inside(arrivals, before, top_p * mass)

    def total_mass(self, logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
        if not _is_served(logits):
            return sampling.total_mass(logits, best, temperature)
        mass = torch.empty(len(logits), dtype=torch.float64)
        _pass_over(self._mass, logits, tensors=[best, temperature, mass])
        return mass

    def _arrivals(
        self, logits: Tensor, *, best: Tensor, temperature: Tensor, max_gap: Tensor | None, keys: Tensor, bits: Tensor
    ) -> Tensor:
        """The first arrivals of each row, i64[S, few], in their order."""
        ids = _table(logits, min(NUM_ARRIVALS, logits.shape[1]), torch.int64)
        _pass_over(self._race, logits, ids.shape[1], tensors=[best, temperature, max_gap, keys, bits, ids])
        ids = ids.sort(dim=-1).values  # of equal times the lower id comes first
        gap = sampling.gaps(logits.gather(1, ids), best, temperature, max_gap)
        times = sampling.negative_times_(gap, bits[ids], keys)
        return ids.gather(1, times.argsort(dim=-1, descending=True, stable=True))

    # ---- scores ----------------------------------------------------------------------------------

    def score_tokens(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        top_n: int | None = None,
        candidate_ids: Sequence[int] | None = None,
        all_candidates: bool = False,
    ) -> TokenScores:
        count = max(1, top_n or 0)
        if candidate_ids is not None or all_candidates or not _is_served(logits) or count > _MAX_TOP:
            return sampling.score_tokens(
                logits, targets, top_n=top_n, candidate_ids=candidate_ids, all_candidates=all_candidates
            )
        sampling.check_top_n(top_n, logits.shape[1])
        num_rows = len(logits)
        values, ids = _table(logits, count, torch.float32), _table(logits, count, torch.int64)
        mass, chosen = torch.empty(num_rows, dtype=torch.float64), torch.empty(num_rows)
        above = torch.empty(num_rows, dtype=torch.int64)
        _pass_over(self._score, logits, count, tensors=[targets, values, ids, mass, chosen, above])
        best, log_mass = values.numpy()[:, :1], np.log(mass.numpy())[:, None].astype(np.float32)
        # In this order no rounding makes a logprob positive: both terms are <= 0.
        scores = TokenScores(((chosen.numpy()[:, None] - best) - log_mass)[:, 0], above.numpy() + 1)
        if top_n is not None:
            top = values[:, :top_n]
            scores.candidate_ids = ids.numpy()[:, :top_n]
            scores.candidate_logprobs = (top.numpy() - best) - log_mass
            scores.candidate_ranks = sampling.shared_ranks(top).numpy().astype(np.int32)
        return scores


def _is_served(logits: Tensor) -> bool:
    return logits.dtype == torch.float32 and logits.device.type == "cpu" and logits.stride(1) == 1


def _table(logits: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(len(logits), width, dtype=dtype)


def _pass_over(kernel: Callable[..., None], logits: Tensor, *sizes: int, tensors: Sequence[Tensor | None]) -> None:
    held = [None if tensor is None else tensor.contiguous() for tensor in tensors]
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in held]
    kernel(logits.data_ptr(), logits.stride(0), *logits.shape, *sizes, *addresses)
