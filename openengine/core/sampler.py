"""Sampling state by slot, and the step's entry from logits to tokens.

Owns what each running sequence asked for and how often it produced each token; the loop thread is its only user. The
arithmetic is `ops/sampling.py` and, compiled, `ops/sampling_native.py`. Order of the stages, each skipped when no row of the batch needs it:

    raw logits ─ guide bitmask ─ min_tokens ─ repetition, presence, frequency ─ temperature ─ top_k ─ top_p ─ min_p ─ draw
        └──────────────────────── logprobs, ranks, candidates of the drawn tokens (always of the raw logits) ─────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from openengine.ops import sampling
from openengine.ops.native import NativeLibrary
from openengine.ops.sampling import SeenTokens, TokenScores
from openengine.ops.sampling_native import NativeSampling

__all__ = ["GuideMask", "SampledBatch", "Sampler", "SlotParams"]

# Candidates gathered first for rows with top_p alone: most nuclei are smaller.
_NUCLEUS_WIDTH = 128
# Rows sorted at once, which takes some 50 bytes of intermediates per logit.
_MAX_SORTED_ROWS = 8
_FLOAT32 = np.finfo(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotParams:
    """One sequence's effective sampling values, validated; ranges as in `SamplingParams`, nothing absent.

    seed: 0 <= seed < 2**64.  stop_token_ids: EOS and stop ids that must not be drawn before `min_tokens` tokens.
    At most one of top_n, candidate_ids and all_candidates is set, and then `return_logprobs` is true.
    """

    temperature: float
    top_p: float
    top_k: int  # 0 = off
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    seed: int
    output_index: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    return_logprobs: bool
    top_n: int | None
    candidate_ids: tuple[int, ...] | None
    all_candidates: bool


@dataclass(slots=True)
class SampledBatch:
    """What one step drew, by (row, slot) pair, on the host.

    token_ids: i64[S].  failed: bool[S], where the logits held a NaN or infinity, or no token was possible; such a pair's
    token means nothing and its slot did not advance.  scores: None if no pair asked, else one entry per pair, None for
    those that did not ask or failed, `TokenScores` with N = 1 for the others.
    """

    token_ids: np.ndarray
    failed: np.ndarray
    scores: list[TokenScores | None] | None


@dataclass(frozen=True, slots=True)
class GuideMask:
    """The tokens that guides allow.

    pairs: i64[G], the (row, slot) pairs that have a guide.  bits: i32[G, ceil(V / 32)], bit t % 32 of word t // 32 allows
    token t.  complete: bool[G], where only an end is left, which then comes even before `min_tokens`.
    """

    pairs: np.ndarray
    bits: Tensor
    complete: np.ndarray


# How a slot's token is chosen. It follows from the slot's own values, so the batch cannot change a draw. Plain integers:
# they are compared in every step.
_GREEDY = 0
_FULL = 1
_TOP_K = 2
_NUCLEUS = 3  # top_p without top_k: the mass is that of the whole vocabulary

# Of each row of a group: token id, best logit, and whether the attempt sufficed, None where every one does.
_Drawn = tuple[Tensor, Tensor, Tensor | None]

_SLOT = np.dtype(
    [
        ("seed", np.uint64),
        ("output_index", np.uint64),
        ("num_output", np.int64),
        ("min_tokens", np.int64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("temperature", np.float32),
        ("max_gap", np.float32),  # -log(min_p)
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("draw", np.int8),
        ("penalized", np.bool_),
        ("scored", np.bool_),
        ("plain", np.bool_),  # only the best token is asked for
    ],
    align=True,
)


class Sampler:
    """Draws one token for each (logits row, slot) pair of a step. `native` holds compiled kernels to use where they serve."""

    def __init__(
        self, *, max_slots: int, vocab_size: int, device: torch.device, native: NativeLibrary | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self.kernels = sampling if native is None else NativeSampling(native)  # what passes over whole rows
        self._device = device
        self._bits = sampling.token_bits(vocab_size, device)
        self._slots = np.zeros(max_slots, _SLOT)
        self._params: list[SlotParams | None] = [None] * max_slots
        self._counts = _TokenCounts(max_slots, vocab_size)
        self._stop_ids = np.full((max_slots, 0), -1, np.int64)  # padded with -1

    def set_slot(self, slot: int, params: SlotParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Start `slot`, or restart it after preemption with the output so far: its later draws are the same either way."""
        assert params.top_n is None or params.top_n <= self._vocab_size, "top_n is checked before acceptance"
        # Temperature and repetition are rounded into float32's normal range, where dividing by them is safe.
        self._slots[slot] = (
            params.seed,
            params.output_index,
            len(output_ids),
            params.min_tokens,
            params.top_k,
            params.top_p,
            _normal(params.temperature),
            -np.log(params.min_p) if params.min_p > 0 else np.inf,
            _normal(params.repetition_penalty),
            params.frequency_penalty,
            params.presence_penalty,
            self._draw_kind(params),
            (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0),
            params.return_logprobs,
            False,
        )
        state = self._slots[slot]
        state["plain"] = state["draw"] == _GREEDY and not (state["penalized"] or state["scored"] or params.min_tokens)
        self._params[slot] = params
        self._set_stop_ids(slot, params.stop_token_ids)
        self._counts.clear(slot)
        if self._slots[slot]["penalized"]:
            self._counts.set(slot, prompt_ids if params.repetition_penalty != 1 else (), output_ids)

    def catch_up(self, slot: int, output_ids: Sequence[int]) -> None:
        """Count the last of `output_ids` as if they had been drawn: tokens that a guide forced and nothing drew."""
        for token in output_ids[int(self._slots["num_output"][slot]) :]:
            self._advance(np.array([slot]), np.array([token]))

    def clear_slot(self, slot: int) -> None:
        """Forget `slot`."""
        self._slots[slot] = np.zeros((), _SLOT)
        self._params[slot] = None
        self._stop_ids[slot] = -1
        self._counts.clear(slot)

    def sample(
        self, logits: Tensor, rows: np.ndarray, slots: np.ndarray, *, mask: GuideMask | None = None
    ) -> SampledBatch:
        """Draw a token for each pair (rows[i], slots[i]) and advance the slots with the drawn tokens.

        logits: f32[L, V], contiguous; masks and penalties may be applied in place.  rows, slots: i64[S]; a row may serve
        several slots, a slot comes once.  mask: None where no pair has a guide.
        """
        if not len(slots):
            return SampledBatch(np.empty(0, np.int64), np.empty(0, np.bool_), None)
        state = self._slots[slots]
        if len(rows) != len(logits) or (rows != np.arange(len(rows))).any():
            logits = logits.index_select(0, self._tensor(rows))
        if mask is None and state["plain"].all():
            # Of few rows the many small steps below would take longer than a layer of the model.
            token_ids, failed, _ = _on_host((*self.kernels.argmax(logits), None))
            self._slots["num_output"][slots] += ~failed
            return SampledBatch(token_ids, failed, None)
        token_ids, failed = self._draw(self._process(logits, slots, state, mask), state)
        scores = self._score(logits, slots, token_ids, state["scored"] & ~failed)
        self._advance(slots[~failed], token_ids[~failed])
        return SampledBatch(token_ids, failed, scores)

    def _draw_kind(self, params: SlotParams) -> int:
        # min_p = 1 leaves the best token alone; drawing among exact ties instead would not be greedy.
        if params.temperature == 0 or params.top_k == 1 or params.min_p == 1:
            return _GREEDY
        if 0 < params.top_k < self._vocab_size:
            return _TOP_K
        return _NUCLEUS if params.top_p < 1 else _FULL

    def _set_stop_ids(self, slot: int, stop_token_ids: Sequence[int]) -> None:
        # An id outside the vocabulary cannot be drawn, so there is nothing to mask.
        ids = [token for token in stop_token_ids if token < self._vocab_size]
        missing = len(ids) - self._stop_ids.shape[1]
        if missing > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(ids)] = ids

    def _process(self, logits: Tensor, slots: np.ndarray, state: np.ndarray, mask: GuideMask | None) -> Tensor:
        """Masks and penalties: in place, or on a copy where the raw logits are still wanted for scores."""
        is_early = state["num_output"] < state["min_tokens"]
        if mask is not None:
            is_early[mask.pairs[mask.complete]] = False
        early, penalized = np.flatnonzero(is_early), state["penalized"].any()
        if mask is None and not early.size and not penalized:
            return logits
        if state["scored"].any():
            logits = logits.clone()
        if mask is not None:
            self._apply_mask_(logits, mask)
        if early.size:
            row, place = np.nonzero(self._stop_ids[slots[early]] >= 0)
            flat = early[row] * self._vocab_size + self._stop_ids[slots[early[row]], place]
            sampling.forbid_(logits, self._tensor(flat))
        if penalized:
            seen = self._counts.of(slots)
            self.kernels.penalize_(logits, seen, state["repetition"], state["frequency"], state["presence"])
        return logits

    def _apply_mask_(self, logits: Tensor, mask: GuideMask) -> None:
        if len(mask.pairs) == len(logits):
            self.kernels.apply_bitmask_(logits, mask.bits)
            return
        pairs = self._tensor(mask.pairs)
        guided = logits.index_select(0, pairs)
        self.kernels.apply_bitmask_(guided, mask.bits)
        logits.index_copy_(0, pairs, guided)

    def _draw(self, logits: Tensor, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Token ids i64[S] and failures bool[S]; one wait for the device, and another for each retry of a wide nucleus."""
        kinds = np.flatnonzero(np.bincount(state["draw"]))
        if len(kinds) == 1:
            token_ids, failed, unfit = _on_host(self._draw_group(logits, state, None, 0))
        else:
            groups = [np.flatnonzero(state["draw"] == kind) for kind in kinds]
            parts = [_on_host(drawn) for drawn in [self._draw_group(logits, state, rows, 0) for rows in groups]]
            order = np.argsort(np.concatenate(groups))
            token_ids, failed, unfit = (np.concatenate(column)[order] for column in zip(*parts))
        if kinds[-1] == _NUCLEUS:
            for attempt, most_rows in ((1, len(state)), (2, _MAX_SORTED_ROWS)):
                left = np.flatnonzero(unfit)
                for start in range(0, left.size, most_rows):
                    rows = left[start : start + most_rows]
                    token_ids[rows], failed[rows], unfit[rows] = _on_host(
                        self._draw_group(logits, state, rows, attempt)
                    )
        return token_ids, failed

    def _draw_group(self, logits: Tensor, state: np.ndarray, members: np.ndarray | None, attempt: int) -> _Drawn:
        """Draw for rows that share a kind, all of them if `members` is None.

        A nucleus is looked for among the best candidates, then by a race that needs no order, then by a full sort.
        """
        if members is not None:
            logits, state = logits.index_select(0, self._tensor(members)), state[members]
        kind = state["draw"][0]
        if kind == _GREEDY:
            return *self.kernels.argmax(logits), None
        keys = self._tensor(sampling.noise_keys(state["seed"], state["output_index"], state["num_output"]))
        temperature = self._tensor(state["temperature"])
        max_gap = self._tensor(state["max_gap"]) if np.isfinite(state["max_gap"]).any() else None
        common = {"temperature": temperature, "max_gap": max_gap, "keys": keys, "bits": self._bits}
        if kind == _FULL:
            _, best = self.kernels.argmax(logits)
            return self.kernels.draw(logits, best=best, **common), best, None
        top_p = self._tensor(state["top_p"]) if (state["top_p"] < 1).any() else None
        if kind == _TOP_K:
            values, ids = self.kernels.top_candidates(logits, int(state["top_k"].max()))
            top_k = self._tensor(state["top_k"])
            drawn, _ = sampling.draw_candidates(values, ids, top_k=top_k, top_p=top_p, mass=None, **common)
            return drawn, values[:, 0], None
        if attempt == 1:
            _, best = self.kernels.argmax(logits)
            mass = self.kernels.total_mass(logits, best, temperature)
            drawn, found = self.kernels.draw_nucleus(logits, best=best, mass=mass, top_p=top_p, **common)
            return drawn, best, found
        width = min(_NUCLEUS_WIDTH, self._vocab_size) if attempt == 0 else self._vocab_size
        values, ids = self.kernels.top_candidates(logits, width)
        best = values[:, 0]
        mass = self.kernels.total_mass(logits, best, temperature)
        drawn, fits = sampling.draw_candidates(values, ids, top_k=None, top_p=top_p, mass=mass, **common)
        return drawn, best, fits if width < self._vocab_size else None

    def _score(
        self, logits: Tensor, slots: np.ndarray, token_ids: np.ndarray, asked: np.ndarray
    ) -> list[TokenScores | None] | None:
        """Raw scores of the drawn tokens of the pairs that asked; pairs with the same kind of selection go together."""
        if not asked.any():
            return None
        groups: dict[tuple[tuple[int, ...] | None, bool], list[int]] = {}
        for pair in np.flatnonzero(asked):
            params = self._params[slots[pair]]
            groups.setdefault((params.candidate_ids, params.all_candidates), []).append(int(pair))
        scores: list[TokenScores | None] = [None] * len(slots)
        for (candidate_ids, all_candidates), pairs in groups.items():
            top_ns = [self._params[slots[pair]].top_n for pair in pairs]
            batch = self.kernels.score_tokens(
                logits if len(pairs) == len(logits) else logits.index_select(0, self._tensor(np.array(pairs))),
                self._tensor(token_ids[pairs]),
                top_n=max((n for n in top_ns if n is not None), default=None),
                candidate_ids=candidate_ids,
                all_candidates=all_candidates,
            )
            named = self._vocab_size if all_candidates else len(candidate_ids) if candidate_ids is not None else None
            for index, (pair, top_n) in enumerate(zip(pairs, top_ns, strict=True)):
                scores[pair] = batch.row(index, top_n if named is None else named)
        return scores

    def _advance(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        self._slots["num_output"][slots] += 1
        penalized = self._slots["penalized"][slots]
        if penalized.any():
            self._counts.add(slots[penalized], token_ids[penalized])

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


class _TokenCounts:
    """How often each penalized slot generated each token; a count of 0 marks a token of the prompt alone.

    Sparse: sorted keys `slot * V + token` with their counts, so that memory and the work of a step follow the tokens seen
    (12 bytes each) and not slots x vocabulary (64 MiB at 64 x 262,144 in int32, walked in every step).
    """

    def __init__(self, max_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._keys = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int32)
        self._sizes = np.zeros(max_slots, np.int64)  # entries by slot

    def set(self, slot: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Fill a cleared slot."""
        # Placeholders of other modalities may lie outside the vocabulary; they have no logit to penalize.
        prompt, output = (np.asarray(ids, np.int64) for ids in (prompt_ids, output_ids))
        tokens, places = np.unique(np.concatenate([prompt[prompt < self._vocab_size], output]), return_inverse=True)
        counts = np.bincount(places[len(places) - len(output) :], minlength=len(tokens)).astype(np.int32)
        start = int(self._sizes[:slot].sum())
        self._keys = np.insert(self._keys, start, slot * self._vocab_size + tokens)
        self._counts = np.insert(self._counts, start, counts)
        self._sizes[slot] = len(tokens)

    def clear(self, slot: int) -> None:
        if self._sizes[slot]:
            start = int(self._sizes[:slot].sum())
            segment = slice(start, start + int(self._sizes[slot]))
            self._keys, self._counts = np.delete(self._keys, segment), np.delete(self._counts, segment)
            self._sizes[slot] = 0

    def add(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """Count one more of token_ids[i] in slots[i]; the slots are distinct."""
        new = np.sort(slots * self._vocab_size + token_ids)
        places = np.searchsorted(self._keys, new)
        known = np.zeros(len(new), np.bool_)
        inside = places < len(self._keys)
        known[inside] = self._keys[places[inside]] == new[inside]
        self._counts[places[known]] += 1
        if not known.all():
            self._keys = np.insert(self._keys, places[~known], new[~known])
            self._counts = np.insert(self._counts, places[~known], 1)
            self._sizes[new[~known] // self._vocab_size] += 1

    def of(self, slots: np.ndarray) -> SeenTokens:
        """The entries of `slots`, as views."""
        ends = np.cumsum(self._sizes)
        sizes = self._sizes[slots]
        return SeenTokens(self._keys, self._counts, slots * self._vocab_size, ends[slots] - sizes, sizes)


def _on_host(drawn: _Drawn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids i64[G], and bool[G] each: the row was invalid; the attempt did not suffice, though it was valid."""
    token_ids, best, fits = drawn
    failed = ~np.isfinite(best.cpu().numpy())
    return token_ids.cpu().numpy(), failed, np.zeros_like(failed) if fits is None else ~(fits.cpu().numpy() | failed)


def _normal(value: float) -> float:
    return min(max(value, float(_FLOAT32.tiny)), float(_FLOAT32.max))
