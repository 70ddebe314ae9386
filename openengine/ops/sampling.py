"""Pure functions from logits to tokens and scores: masks, penalties, truncation, the draw, log-probabilities.

Owns the arithmetic; which sequence wants what, and in which order, is `core/sampler.py`. Nothing here keeps state or
reads a random generator, and nothing waits for the device except `score_tokens`, whose results are host arrays.
`ops/sampling_native.py` has the passes over whole rows once more, compiled.

    bits[id] ^ key ──mix──> v in (0, 1) ──> E = -log(1 - v), exponential       key: (seed, output index, position)
    gap = (best logit - logit) / temperature                                    p(token) is proportional to exp(-gap)
    token = the one whose E * exp(gap) is least: the first arrival of an exponential race (Gumbel-max, exponentiated)

The noise of a token depends on its id and its sequence's key alone, so a draw is the same alone or in any batch, and
whether the survivors of truncation come from a short list of candidates or from the whole vocabulary.

Shapes: S rows, V vocabulary, K candidates. Candidates are in canonical order: logit descending, then id ascending.
A row is valid if its best logit is finite; whatever makes it invalid (a NaN, an infinity, nothing but masked tokens) stays
visible there, through masks and penalties too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from openengine.errors import InvalidArgument

__all__ = [
    "NUM_ARRIVALS",
    "SeenTokens",
    "TokenScores",
    "apply_bitmask_",
    "argmax",
    "check_top_n",
    "concatenate",
    "draw",
    "draw_candidates",
    "draw_nucleus",
    "first_inside",
    "forbid_",
    "gaps",
    "negative_times_",
    "noise_keys",
    "penalize_",
    "score_tokens",
    "shared_ranks",
    "token_bits",
    "top_candidates",
    "total_mass",
]

# Passes over the vocabulary run in row chunks of about this many logits, so that their intermediates stay in cache.
_CHUNK_NUMEL = 1 << 19
# Gaps end here. A token this far behind never wins, be it forbidden or merely e**80 times less likely: its time is at
# least e**80 * 2**-65, that of the best token at most 17. Beyond it exp is ten times slower on a CPU (overflow, denormals).
_FAR = 80.0
# Up to this many ids, counting the larger logits of each beats sorting the row.
_MAX_COUNTED_IDS = 16
# First arrivals examined by `draw_nucleus`: all miss a top_p of 0.9 once in 10,000 draws, and then the row is sorted.
NUM_ARRIVALS = 4
_LOW_32 = 0xFFFFFFFF

# The odd constants of splitmix64 (Steele, Lea and Flood, 2014), with signed twins for torch, which multiplies no uint64.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SIGNED_MIX_1 = int(_MIX_1) - (1 << 64)
_SIGNED_MIX_2 = int(_MIX_2) - (1 << 64)


# ---- noise ---------------------------------------------------------------------------------------


def noise_keys(seeds: np.ndarray, output_indices: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Keys of the draws at `positions` (output tokens so far): u64[S] each -> i64[S]. Output index 0 adds nothing."""
    stream = _mix(seeds.astype(np.uint64) + _GOLDEN) ^ _mix(output_indices.astype(np.uint64))
    return _mix(stream + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1))).view(np.int64)


def token_bits(vocab_size: int, device: torch.device) -> Tensor:
    """The ids' own share of the noise, i64[V]: made once, used by every draw."""
    ids = np.arange(1, vocab_size + 1, dtype=np.uint64)
    return torch.from_numpy(_mix(ids * _GOLDEN).view(np.int64)).to(device)


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer: a bijection of u64 that maps 0 to 0."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def _negative_exponential(bits: Tensor, keys: Tensor) -> Tensor:
    """-E for exponential E: bits i64[V] or [S, K], keys i64[S] -> f32[S, V or K], all finite and negative.

    Small E, which decide the race, keep full relative precision: v is |63-bit integer| / 2**63, never 0 and never 1.
    """
    x = torch.bitwise_xor(bits, keys.unsqueeze(-1)).mul_(_SIGNED_MIX_1)
    # The shift is arithmetic, which costs the top bit; 63 of them are left.
    x.bitwise_xor_(x >> 32).mul_(_SIGNED_MIX_2)
    v = x.to(torch.float32).abs_()
    return v.mul_(-(2.0**-63) * (1 - 2.0**-24)).sub_(2.0**-65).log1p_()


# ---- masks and penalties, in place ---------------------------------------------------------------


def apply_bitmask_(logits: Tensor, mask: Tensor) -> None:
    """Forbid every token whose bit is 0: logits f32[S, V], mask i32[S, ceil(V / 32)], bit t % 32 of word t // 32 is token t."""
    shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
    for rows in _chunks(*logits.shape):
        bits = (mask[rows].unsqueeze(-1) >> shifts).bitwise_and_(1).flatten(1)[:, : logits.shape[1]]
        logits[rows] += torch.zeros_like(logits[rows]).masked_fill_(bits == 0, -torch.inf)


def forbid_(logits: Tensor, flat: Tensor) -> None:
    """Set the logits at `flat` (i64[N], row * V + token) to -inf, those that are no numbers to NaN."""
    values = logits.view(-1)
    values.index_copy_(0, flat, values[flat] - torch.inf)


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """The distinct tokens that rows have seen, as segments of two arrays that others may share.

    Row s has the entries [starts[s], starts[s] + sizes[s]) of keys i64[N] and counts i32[N]: the token is keys[e] - bases[s],
    and counts[e] says how often it was generated, 0 if it stands in the prompt alone. bases, starts, sizes: i64[S].
    """

    keys: np.ndarray
    counts: np.ndarray
    bases: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray


def penalize_(
    logits: Tensor, seen: SeenTokens, repetition: np.ndarray, frequency: np.ndarray, presence: np.ndarray
) -> None:
    """Penalize the seen tokens of logits f32[S, V]; repetition, frequency, presence: f32[S].

    A positive logit is divided by the repetition penalty, another multiplied by it; then the frequency penalty is taken off
    for each time it was generated, and the presence penalty once. Results stay finite where the logit was, so that no penalty
    turns a row invalid, and what was not finite stays as it is.
    """
    limit = torch.finfo(torch.float32).max
    row = np.repeat(np.arange(len(seen.sizes)), seen.sizes)
    entry = np.arange(len(row)) + (seen.starts - np.cumsum(seen.sizes) + seen.sizes)[row]
    counts = seen.counts[entry]
    flat = seen.keys[entry] - seen.bases[row] + row * logits.shape[1]
    subtract = (counts * frequency[row] + (counts > 0) * presence[row]).astype(np.float32)
    flat, repetition, subtract = (torch.from_numpy(a).to(logits.device) for a in (flat, repetition[row], subtract))
    values = logits.view(-1)[flat]
    penalized = torch.where(values > 0, values / repetition, values * repetition).sub_(subtract).clamp_(-limit, limit)
    logits.view(-1)[flat] = torch.where(values.isfinite(), penalized, values)


# ---- selection -----------------------------------------------------------------------------------


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first largest entry of each row of f32[S, V]: ids i64[S], values f32[S]. A row with a NaN has the value NaN."""
    vocab_size = logits.shape[1]
    block = next((size for size in (256, 128, 64, 32) if vocab_size % size == 0), None)
    if block is None:
        ids = logits.argmax(-1)
        return ids, logits.gather(1, ids.unsqueeze(-1)).squeeze(-1)
    # torch vectorizes amax but not argmax: find the block first, then the place in it (5-10 times faster on a CPU).
    blocks = logits.unflatten(-1, (-1, block))
    best_block = blocks.amax(-1).argmax(-1)
    inside = blocks[torch.arange(len(logits), device=logits.device), best_block]
    values, offsets = inside.max(-1)
    return best_block * block + offsets, values


def top_candidates(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of each row of f32[S, V] in canonical order: values f32[S, count], ids i64[S, count].

    Exactly `count` distinct ids, whatever the ties; a shorter list is a prefix of a longer one. The first value of a row
    with a NaN is NaN.
    """
    vocab_size = logits.shape[1]
    if count * 32 > vocab_size:
        parts = [logits[rows].sort(dim=-1, descending=True, stable=True) for rows in _chunks(*logits.shape)]
        values, ids = (torch.cat(half)[:, :count] for half in zip(*parts, strict=True))
        return values, ids
    # The best `count` tokens lie in the `count` blocks with the best maxima (equal maxima: the earlier block, which
    # holds the lower id), so only those are ranked. Wide lists want smaller blocks.
    block = 32 if count * 128 <= vocab_size else 16
    padded = F.pad(logits, (0, -vocab_size % block), value=-torch.inf) if vocab_size % block else logits
    maxima = padded.unflatten(-1, (-1, block)).amax(-1)
    offsets = torch.arange(block, device=logits.device)
    best_blocks = _best_ids(maxima, torch.arange(maxima.shape[1], device=logits.device), count)
    ids = (best_blocks.unsqueeze(-1) * block + offsets).flatten(1)
    ids = _best_ids(padded.gather(1, ids), ids, count)
    if padded is not logits:
        # Padding comes after every number; only a NaN can sort below it, and such a row is void, but must stay in range.
        ids.clamp_(max=vocab_size - 1)
    return logits.gather(1, ids), ids


def _best_ids(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest values, ties by lower id: f32[S, N], i64[N] or [S, N] -> i64[S, count].

    Value and complemented id share one integer key, so keys are distinct and `topk` has nothing left to choose.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0: -0.0 equals 0.0 and must not sort below it
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill_(values.isnan(), 0x7FFFFFFF)
    keys = (ordered.to(torch.int64) << 32) | (_LOW_32 - ids)
    return _LOW_32 - (keys.topk(count, dim=-1).values & _LOW_32)


# ---- the draw ------------------------------------------------------------------------------------


def draw(
    logits: Tensor, *, best: Tensor, temperature: Tensor, max_gap: Tensor | None, keys: Tensor, bits: Tensor
) -> Tensor:
    """Draw one token per row from the whole vocabulary: ids i64[S].

    logits f32[S, V]; best f32[S], their row maxima; temperature f32[S], > 0; max_gap f32[S] is -log(min_p), None where
    no row has one; keys i64[S] from `noise_keys`; bits i64[V] from `token_bits`.
    """
    ids = torch.empty_like(keys)
    for rows in _chunks(*logits.shape):
        gap = gaps(logits[rows], best[rows], temperature[rows], None if max_gap is None else max_gap[rows])
        ids[rows] = argmax(negative_times_(gap, bits, keys[rows]))[0]
    return ids


def draw_nucleus(
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
    """Draw one token per row from its top_p nucleus, however wide, without sorting: ids i64[S], success bool[S].

    The race is run over the whole vocabulary; the first arrival that lies in the nucleus, which is what it would be had
    the others not taken part, wins. A token lies in it if the tokens before it in canonical order have not reached
    top_p * mass. A row whose first few arrivals all lie outside fails; arguments as in `draw` and `draw_candidates`.
    """
    all_arrivals, all_before = [], []
    every_id = torch.arange(logits.shape[1], device=logits.device)
    for rows in _chunks(*logits.shape):
        part = logits[rows]
        weights = gaps(part, best[rows], temperature[rows], None).neg_().exp_()
        better, equal = torch.empty_like(weights), torch.empty_like(weights)
        gap = gaps(part, best[rows], temperature[rows], None if max_gap is None else max_gap[rows])
        _, arrivals = top_candidates(negative_times_(gap, bits, keys[rows]), min(NUM_ARRIVALS, part.shape[1]))
        before = []
        for arrival in arrivals.split(1, dim=-1):
            value = part.gather(1, arrival)
            torch.eq(part, value, out=equal).mul_(torch.lt(every_id, arrival, out=better))
            torch.gt(part, value, out=better).add_(equal).mul_(weights)
            before.append(better.sum(-1, dtype=torch.float64))
        all_arrivals.append(arrivals)
        all_before.append(torch.stack(before, -1))
    return first_inside(torch.cat(all_arrivals), torch.cat(all_before), top_p * mass)


def first_inside(arrivals: Tensor, before: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first of each row's arrivals i64[S, K] with less than `target` f64[S] of mass `before` it f64[S, K], if any."""
    inside = before < target.unsqueeze(-1)
    return arrivals.gather(1, inside.long().argmax(-1, keepdim=True)).squeeze(-1), inside.any(-1)


def total_mass(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """Sum of exp(-gap) over each row's vocabulary, f64[S]: the whole that top_p is a share of."""
    mass = torch.empty_like(best, dtype=torch.float64)
    for rows in _chunks(*logits.shape):
        mass[rows] = gaps(logits[rows], best[rows], temperature[rows], None).neg_().exp_().sum(-1, dtype=torch.float64)
    return mass


def draw_candidates(
    values: Tensor,
    ids: Tensor,
    *,
    temperature: Tensor,
    max_gap: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    mass: Tensor | None,
    keys: Tensor,
    bits: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row from candidates in canonical order: ids i64[S], and whether its truncation fits, bool[S].

    values f32[S, K], ids i64[S, K] from `top_candidates`. Of the first `top_k` (i64[S], each <= K), the smallest prefix
    whose mass reaches `top_p` (f64[S]) stays, the token that crosses included; then those with at least min_p of the best
    token's probability. The whole is `mass` (f64[S]), or without it the first `top_k`: probabilities are renormalized
    after top_k. A row that does not reach top_p within its K candidates is reported as not fitting.
    """
    gap = gaps(values, values[:, 0], temperature, None)
    keep = torch.ones_like(gap, dtype=torch.bool) if max_gap is None else gap <= max_gap.unsqueeze(-1)
    fits = torch.ones_like(keys, dtype=torch.bool)
    weights = torch.exp(-gap).double() if top_p is not None else None
    if top_k is not None:
        first_k = torch.arange(values.shape[1], device=values.device) < top_k.unsqueeze(-1)
        keep &= first_k
        if weights is not None:
            weights *= first_k
    if weights is not None:
        reached = weights.cumsum(-1)
        target = top_p * (reached[:, -1] if mass is None else mass)
        fits = reached[:, -1] >= target
        before = F.pad(reached[:, :-1], (1, 0))
        # Rounding hides the mass of the last tokens; top_p = 1 keeps them all the same.
        keep &= (before < target.unsqueeze(-1)) | (top_p >= 1).unsqueeze(-1)
    times = negative_times_(gap, bits[ids], keys).masked_fill_(~keep, -torch.inf)
    return ids.gather(1, times.argmax(-1, keepdim=True)).squeeze(-1), fits


def gaps(logits: Tensor, best: Tensor, temperature: Tensor, max_gap: Tensor | None) -> Tensor:
    """How far each logit is behind the best one, f32[S, V or K], at most `_FAR`; beyond `max_gap` it is that far."""
    gap = torch.sub(best.unsqueeze(-1), logits).div_(temperature.unsqueeze(-1)).clamp_(max=_FAR)
    if max_gap is not None:
        # On a CPU sums of floats are several times faster than masks.
        beyond = torch.gt(gap, max_gap.unsqueeze(-1), out=torch.empty_like(gap))
        gap.add_(beyond, alpha=_FAR).clamp_(max=_FAR)
    return gap


def negative_times_(gap: Tensor, bits: Tensor, keys: Tensor) -> Tensor:
    """Minus the times of arrival, in the place of `gap` f32[S, V or K]; bits i64[V] or [S, K], keys i64[S]."""
    return gap.exp_().mul_(_negative_exponential(bits, keys))


def _chunks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    size = max(1, _CHUNK_NUMEL // vocab_size)
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


# ---- scores --------------------------------------------------------------------------------------


@dataclass(slots=True)
class TokenScores:
    """Raw scores of N tokens, as host arrays; the candidate arrays [N, K] are None where no candidates were asked for."""

    logprobs: np.ndarray  # f32[N], log-softmax of the unmodified logits, <= 0
    ranks: np.ndarray  # i64[N], 1 + number of tokens with a strictly greater logit: equal logits share the better rank
    candidate_ids: np.ndarray | None = None  # i64[N, K]
    candidate_logprobs: np.ndarray | None = None  # f32[N, K]
    candidate_ranks: np.ndarray | None = None  # i32[N, K]

    def row(self, index: int, num_candidates: int | None) -> TokenScores:
        """The scores of one token (N = 1) with its first `num_candidates` candidates, or none: views, nothing is copied."""
        at = slice(index, index + 1)
        if num_candidates is None:
            return TokenScores(self.logprobs[at], self.ranks[at])
        return TokenScores(
            self.logprobs[at],
            self.ranks[at],
            self.candidate_ids[at, :num_candidates],
            self.candidate_logprobs[at, :num_candidates],
            self.candidate_ranks[at, :num_candidates],
        )


def concatenate(parts: Sequence[TokenScores]) -> TokenScores:
    """Join the scores of consecutive tokens; all parts have candidates or none has. No parts give N = 0."""
    if not parts:
        return TokenScores(np.empty(0, np.float32), np.empty(0, np.int64))
    columns = ([getattr(part, field.name) for part in parts] for field in dataclasses.fields(TokenScores))
    return TokenScores(*(None if column[0] is None else np.concatenate(column) for column in columns))


def score_tokens(
    logits: Tensor,
    targets: Tensor,
    *,
    top_n: int | None = None,
    candidate_ids: Sequence[int] | None = None,
    all_candidates: bool = False,
) -> TokenScores:
    """Score `targets` (i64[N]) under logits [N, V] of any float type; intermediates take a few rows at a time.

    At most one selection: `top_n` best candidates (canonical order, exactly that many), `candidate_ids` in the order
    given, or the whole vocabulary in id order.  Raises InvalidArgument for a candidate outside the vocabulary.
    """
    num_rows, vocab_size = logits.shape
    check_top_n(top_n, vocab_size)
    outside = [token for token in candidate_ids or () if not 0 <= token < vocab_size]
    if outside:
        raise InvalidArgument(f"candidate token ids {outside[:5]} are outside the vocabulary of {vocab_size} tokens")
    scores = TokenScores(np.empty(num_rows, np.float32), np.empty(num_rows, np.int64))
    asked = None
    if top_n is not None:
        width = top_n
        scores.candidate_ids = np.empty((num_rows, width), np.int64)
    elif candidate_ids is not None or all_candidates:
        named = np.arange(vocab_size) if all_candidates else np.array(candidate_ids, np.int64)
        width = len(named)
        scores.candidate_ids = np.broadcast_to(named, (num_rows, width))
        asked = None if all_candidates else torch.from_numpy(named).to(logits.device)
    if scores.candidate_ids is not None:
        scores.candidate_logprobs = np.empty((num_rows, width), np.float32)
        scores.candidate_ranks = np.empty((num_rows, width), np.int32)
    for rows in _chunks(num_rows, vocab_size):
        _score_rows(scores, rows, logits[rows].float(), targets[rows], top_n, asked)
    return scores


def check_top_n(top_n: int | None, vocab_size: int) -> None:
    """Raises InvalidArgument for more candidates than there are tokens."""
    if top_n is not None and not 0 <= top_n <= vocab_size:
        raise InvalidArgument(f"top_n {top_n} exceeds the vocabulary of {vocab_size} tokens; ask for fewer candidates")


def _score_rows(
    scores: TokenScores, rows: slice, logits: Tensor, targets: Tensor, top_n: int | None, asked: Tensor | None
) -> None:
    """Fill in `rows` of `scores` from their logits f32[C, V]."""
    best = logits.amax(-1, keepdim=True)
    log_mass = (logits - best).clamp_(min=-_FAR).exp_().sum(-1, keepdim=True).log_()

    def store(values: Tensor, into: np.ndarray) -> None:
        # In this order no rounding makes a logprob positive: both terms are <= 0.
        into[rows] = ((values - best) - log_mass).reshape(into[rows].shape).cpu().numpy()

    chosen = logits.gather(1, targets.unsqueeze(-1))
    store(chosen, scores.logprobs)
    scores.ranks[rows] = ((logits > chosen).sum(-1) + 1).cpu().numpy()
    if scores.candidate_ids is None:
        return
    if top_n is not None:
        values, ids = top_candidates(logits, top_n)
        ranks = shared_ranks(values)
        scores.candidate_ids[rows] = ids.cpu().numpy()
    elif asked is not None and len(asked) <= _MAX_COUNTED_IDS:
        values = logits[:, asked]
        ranks = torch.stack([(logits > value).sum(-1) for value in values.unsqueeze(-1).unbind(1)], -1) + 1
    else:
        ordered, ids = top_candidates(logits, logits.shape[1])
        ranks = torch.empty_like(ids).scatter_(1, ids, shared_ranks(ordered))
        values = logits if asked is None else logits[:, asked]
        ranks = ranks if asked is None else ranks[:, asked]
    store(values, scores.candidate_logprobs)
    scores.candidate_ranks[rows] = ranks.cpu().numpy()


def shared_ranks(values: Tensor) -> Tensor:
    """Ranks of values sorted descending, equal ones sharing the first: f32[C, K] -> i64[C, K]."""
    places = torch.arange(1, values.shape[1] + 1, device=values.device).expand(values.shape)
    repeats = torch.zeros_like(values, dtype=torch.bool)
    torch.eq(values[:, 1:], values[:, :-1], out=repeats[:, 1:])
    return places.masked_fill(repeats, 0).cummax(-1).values
