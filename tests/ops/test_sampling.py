"""`ops/sampling.py` against a naive sampler in numpy, and against what arithmetic and the requirements say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from openengine.errors import InvalidArgument
from openengine.ops import sampling

# ---- the oracle: one row at a time, in float64, no shortcuts --------------------------------------

MASK_64 = (1 << 64) - 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)


def oracle_key(seed: int, output_index: int, position: int) -> int:
    stream = mix((seed + 0x9E3779B97F4A7C15) & MASK_64) ^ mix(output_index)
    return mix((stream + 0x9E3779B97F4A7C15 * (position + 1)) & MASK_64)


def oracle_noise(key: int, vocab_size: int) -> np.ndarray:
    """Exponential noise of every token, f64[V]."""
    noise = []
    for token in range(vocab_size):
        x = ((mix(((token + 1) * 0x9E3779B97F4A7C15) & MASK_64) ^ key) * 0xBF58476D1CE4E5B9) & MASK_64
        signed = x - (1 << 64) if x >> 63 else x
        x = ((signed ^ (signed >> 32)) * 0x94D049BB133111EB) & MASK_64
        signed = x - (1 << 64) if x >> 63 else x
        noise.append(-np.log1p(-(abs(signed) / 2**63 * (1 - 2**-24) + 2**-65)))
    return np.array(noise)


def oracle_probabilities(
    logits: np.ndarray, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """What is left to draw from after temperature, top_k, top_p and min_p, f64[V], sums to 1."""
    scaled = logits.astype(np.float64) / temperature
    order = np.lexsort((np.arange(len(logits)), -logits))
    probabilities = np.exp(scaled - scaled.max())
    kept = order[: top_k or len(order)]
    masses = probabilities[kept] / probabilities[kept].sum()
    if top_p < 1:
        kept = kept[: int(np.searchsorted(np.cumsum(masses), top_p)) + 1]
    kept = kept[probabilities[kept] >= min_p]
    result = np.zeros(len(logits))
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


def oracle_draw(probabilities: np.ndarray, noise: np.ndarray) -> int:
    with np.errstate(divide="ignore"):
        return int(np.argmin(noise / probabilities))


def oracle_penalize(logits, prompt_ids, output_ids, *, repetition=1.0, frequency=0.0, presence=0.0) -> np.ndarray:
    result = logits.astype(np.float64)
    for token in set(prompt_ids) | set(output_ids):
        result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
    for token in set(output_ids):
        result[token] -= list(output_ids).count(token) * frequency + presence
    return result


# ---- the draw ------------------------------------------------------------------------------------


def keys_for(num_rows: int, seed: int = 11) -> torch.Tensor:
    """Keys of the first `num_rows` positions of one stream."""
    fill = np.full(num_rows, seed, np.uint64)
    return torch.from_numpy(sampling.noise_keys(fill, np.zeros_like(fill), np.arange(num_rows)))


def draw_many(
    row: np.ndarray, num_draws: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=11
) -> np.ndarray:
    """One row drawn at `num_draws` positions, by the functions the sampler would use."""
    logits = torch.from_numpy(row).expand(num_draws, -1).contiguous()
    best = logits.amax(-1)
    common = {
        "temperature": torch.full((num_draws,), temperature),
        "max_gap": torch.full((num_draws,), -float(np.log(min_p))) if min_p else None,
        "keys": keys_for(num_draws, seed),
        "bits": sampling.token_bits(len(row), torch.device("cpu")),
    }
    if not top_k and top_p == 1:
        return sampling.draw(logits, best=best, **common).numpy()
    ids, fits = sampling.draw_candidates(
        *sampling.top_candidates(logits, top_k or len(row)),
        top_k=torch.full((num_draws,), top_k) if top_k else None,
        top_p=torch.full((num_draws,), top_p, dtype=torch.float64) if top_p < 1 else None,
        mass=None if top_k else sampling.total_mass(logits, best, common["temperature"]),
        **common,
    )
    assert fits.all()
    return ids.numpy()


def rough_logits(vocab_size: int, seed: int = 0) -> np.ndarray:
    """Logits in steps of 1/4, so that ties are everywhere, as they are with bfloat16 models."""
    return np.round(np.random.default_rng(seed).normal(size=vocab_size) * 8).astype(np.float32) / 4


COMBINATIONS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.95, "min_p": 0.05},
    {"top_k": 30, "top_p": 0.7, "min_p": 0.2},
]


@pytest.mark.parametrize("params", COMBINATIONS)
def test_smp_12_draws_are_those_of_the_naive_sampler(params):
    row = rough_logits(300)
    probabilities = oracle_probabilities(row, **params)
    expected = [oracle_draw(probabilities, oracle_noise(oracle_key(11, 0, p), 300)) for p in range(40)]
    assert draw_many(row, 40, **params).tolist() == expected


@pytest.mark.parametrize("params", COMBINATIONS)
def test_smp_12_draws_have_the_right_distribution(params):
    row = rough_logits(60, seed=3)
    probabilities = oracle_probabilities(row, **params)
    counts = np.bincount(draw_many(row, 20_000, **params), minlength=60)
    assert not counts[probabilities == 0].any()
    # The chi-square approximation needs some 5 expected draws per cell: rarer tokens share one.
    expected = 20_000 * probabilities
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum() + 1)
    counts = np.append(counts[~rare], counts[rare].sum() + 1)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    degrees = len(counts) - 1
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)


def test_smp_08_positions_seeds_and_output_indices_are_independent():
    row = np.zeros(16, np.float32)
    bits = sampling.token_bits(16, torch.device("cpu"))
    logits = torch.zeros(4096, 16)

    def stream(seeds, indices, positions):
        keys = sampling.noise_keys(*(np.broadcast_to(a, 4096) for a in (seeds, indices, positions)))
        ones = torch.ones(4096)
        return sampling.draw(
            logits, best=ones * 0, temperature=ones, max_gap=None, keys=torch.from_numpy(keys), bits=bits
        ).numpy()

    steps = np.arange(4096)
    streams = [stream(7, 0, steps), stream(8, 0, steps), stream(7, 1, steps), stream(steps, 0, 0), stream(7, steps, 0)]
    for first in range(len(streams)):
        assert (streams[first][1:] == streams[first][:-1]).mean() == pytest.approx(1 / 16, abs=0.02)
        for second in range(first):
            assert (streams[first] == streams[second]).mean() == pytest.approx(1 / 16, abs=0.02)
    assert draw_many(row, 5).tolist() == draw_many(row, 5).tolist()


def test_a_wide_nucleus_found_by_the_race_equals_the_sorted_one():
    row = rough_logits(5000, seed=5)
    logits = torch.from_numpy(row).expand(200, -1).contiguous()
    best, temperature = logits.amax(-1), torch.full((200,), 4.0)
    ids, found = sampling.draw_nucleus(
        logits,
        best=best,
        mass=sampling.total_mass(logits, best, temperature),
        temperature=temperature,
        max_gap=torch.full((200,), 3.0),
        top_p=torch.full((200,), 0.9, dtype=torch.float64),
        keys=keys_for(200),
        bits=sampling.token_bits(5000, torch.device("cpu")),
    )
    expected = draw_many(row, 200, temperature=4.0, top_p=0.9, min_p=float(np.exp(-3.0)))
    assert found.all()
    assert ids.tolist() == expected.tolist()


def test_candidates_that_miss_the_nucleus_are_reported():
    logits = torch.zeros(2, 64)
    _, fits = sampling.draw_candidates(
        *sampling.top_candidates(logits, 8),
        temperature=torch.ones(2),
        max_gap=None,
        top_k=None,
        top_p=torch.tensor([0.125, 0.2], dtype=torch.float64),
        mass=torch.full((2,), 64.0, dtype=torch.float64),
        keys=keys_for(2),
        bits=sampling.token_bits(64, torch.device("cpu")),
    )
    assert fits.tolist() == [True, False]


# ---- selection -----------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [64, 300, 4096, 5003])
@pytest.mark.parametrize("count", [0, 1, 5, 33, 64])
def test_top_candidates_are_in_canonical_order_whatever_the_ties(vocab_size, count):
    rows = np.stack([rough_logits(vocab_size, seed) for seed in range(3)])
    rows[0, ::2] = -np.inf
    rows[1, :50] = -0.0
    rows[1, 20:40] = 0.0
    values, ids = sampling.top_candidates(torch.from_numpy(rows), count)
    for row, row_values, row_ids in zip(rows, values.numpy(), ids.numpy(), strict=True):
        expected = np.lexsort((np.arange(vocab_size), -row))[:count]
        assert row_ids.tolist() == expected.tolist()
        assert (row_values == row[expected]).all()


def test_top_candidates_of_a_void_row_stay_in_the_vocabulary():
    for value in (np.nan, -np.inf):
        rows = torch.from_numpy(np.full((2, 5003), np.copysign(value, -1.0), np.float32))
        assert sampling.top_candidates(rows, 40)[1].max() < 5003


@pytest.mark.parametrize("vocab_size", [7, 96, 1024])
def test_argmax_takes_the_first_of_equal_logits(vocab_size):
    rows = torch.zeros(3, vocab_size)
    rows[1, [4, 6]] = 1.0
    rows[2, -1] = 2.0
    ids, values = sampling.argmax(rows)
    assert ids.tolist() == [0, 4, vocab_size - 1]
    assert values.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("vocab_size", [7, 1024])
def test_argmax_of_a_row_with_a_nan_is_not_finite(vocab_size):
    rows = torch.zeros(2, vocab_size)
    rows[1, 5] = torch.nan
    assert torch.isfinite(sampling.argmax(rows)[1]).tolist() == [True, False]


# ---- masks and penalties -------------------------------------------------------------------------


def test_bitmask_allows_the_tokens_whose_bit_is_set():
    allowed = np.random.default_rng(0).random((3, 70)) < 0.5
    words = np.packbits(np.pad(allowed, ((0, 0), (0, 26))), axis=1, bitorder="little").view("<i4").astype(np.int32)
    logits = torch.zeros(3, 70)
    sampling.apply_bitmask_(logits, torch.from_numpy(words))
    assert (torch.isfinite(logits).numpy() == allowed).all()


def seen_tokens(*rows: dict[int, int]) -> sampling.SeenTokens:
    """Tokens and how often each was generated, by row; the keys of a row begin at 1,000 times its number."""
    sizes = np.array([len(row) for row in rows])
    keys = [1000 * index + token for index, row in enumerate(rows) for token in row]
    counts = np.array([count for row in rows for count in row.values()], np.int32)
    return sampling.SeenTokens(np.array(keys), counts, 1000 * np.arange(len(rows)), np.cumsum(sizes) - sizes, sizes)


def full(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_smp_07_penalties_equal_the_naive_ones():
    row = rough_logits(50)
    prompt, output = [1, 1, 2, 30], [2, 5, 5, 5, 49]
    logits = torch.from_numpy(np.stack([row, row]))
    seen = seen_tokens({}, {token: output.count(token) for token in sorted({*prompt, *output})})
    sampling.penalize_(logits, seen, full(9, 1.7), full(9, 0.3), full(9, 0.7))
    expected = oracle_penalize(row, prompt, output, repetition=1.7, frequency=0.3, presence=0.7)
    assert (logits[0].numpy() == row).all()
    np.testing.assert_allclose(logits[1].numpy(), expected, rtol=1e-6)


def test_penalties_keep_masked_tokens_masked_and_finite_ones_finite():
    logits = torch.tensor([[-torch.inf, 5.0, -5.0, 0.0, torch.inf]])
    seen = seen_tokens(dict.fromkeys(range(5), 1))
    for repetition in (torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max):
        sampling.penalize_(logits, seen, full(repetition), full(0), full(0))
    assert torch.isfinite(logits).tolist() == [[False, True, True, True, False]]
    assert logits[0, 4] == torch.inf


# ---- scores --------------------------------------------------------------------------------------


def test_s1_logprobs_are_the_raw_log_softmax():
    scores = sampling.score_tokens(torch.tensor([[1.0, 0.0, -1.0, -2.0]]), torch.tensor([1]), top_n=4)
    np.testing.assert_allclose(scores.candidate_logprobs, [[-0.44019, -1.44019, -2.44019, -3.44019]], atol=1e-5)
    assert scores.candidate_ids.tolist() == [[0, 1, 2, 3]]
    assert scores.candidate_ranks.tolist() == [[1, 2, 3, 4]]
    assert scores.logprobs[0] == pytest.approx(-1.44019, abs=1e-5)
    assert scores.ranks.tolist() == [2]


def test_lgp_15_equal_logits_share_the_better_rank():
    logits = torch.tensor([[2.0, 3.0, 3.0, 2.0, 1.0]])
    for selection in ({"top_n": 5}, {"candidate_ids": (1, 2, 0, 3, 4)}, {"candidate_ids": (1, 2, 0, 3, 4) * 4}):
        scores = sampling.score_tokens(logits, torch.tensor([3]), **selection)
        assert scores.ranks.tolist() == [3]
        assert scores.candidate_ranks[0, :5].tolist() == [1, 1, 3, 3, 5]
    assert sampling.score_tokens(logits, torch.tensor([3]), all_candidates=True).candidate_ranks.tolist() == [
        [3, 1, 1, 3, 5]
    ]


def test_lgp_04_top_n_gives_exactly_n_distinct_candidates_despite_ties():
    scores = sampling.score_tokens(torch.zeros(2, 4096), torch.tensor([9, 4000]), top_n=20)
    assert scores.candidate_ids.tolist() == [list(range(20))] * 2
    empty = sampling.score_tokens(torch.zeros(2, 4096), torch.tensor([9, 4000]), top_n=0)
    assert empty.candidate_ids.shape == empty.candidate_logprobs.shape == empty.candidate_ranks.shape == (2, 0)


def test_lgp_05_asked_ids_come_in_request_order():
    row = rough_logits(100)
    scores = sampling.score_tokens(torch.from_numpy(row[None]), torch.tensor([0]), candidate_ids=(90, 3, 41))
    expected = row - np.log(np.exp(row.astype(np.float64)).sum())
    assert scores.candidate_ids.tolist() == [[90, 3, 41]]
    np.testing.assert_allclose(scores.candidate_logprobs[0], expected[[90, 3, 41]], atol=1e-5)


def test_lgp_06_all_candidates_sum_to_one():
    scores = sampling.score_tokens(torch.from_numpy(rough_logits(1000)[None]), torch.tensor([0]), all_candidates=True)
    assert scores.candidate_ids[0].tolist() == list(range(1000))
    assert np.exp(scores.candidate_logprobs.astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)
    assert scores.candidate_logprobs[0, 0] == scores.logprobs[0]
    assert scores.candidate_ranks[0, 0] == scores.ranks[0]


@pytest.mark.parametrize(
    "selection", [{}, {"top_n": 3}, {"candidate_ids": (5, 1)}, {"candidate_ids": tuple(range(20))}]
)
def test_scores_in_row_chunks_equal_those_of_single_rows(selection):
    logits = torch.from_numpy(np.stack([rough_logits(60_000, seed) for seed in range(10)]))
    targets = torch.arange(10) * 5000
    whole = sampling.score_tokens(logits, targets, **selection)
    for row in range(10):
        alone = sampling.score_tokens(logits[row : row + 1], targets[row : row + 1], **selection)
        part = whole.row(row, None if not selection else alone.candidate_ids.shape[1])
        np.testing.assert_allclose(part.logprobs, alone.logprobs, atol=1e-6)
        assert part.ranks.tolist() == alone.ranks.tolist()
        if selection:
            assert part.candidate_ids.tolist() == alone.candidate_ids.tolist()
            assert part.candidate_ranks.tolist() == alone.candidate_ranks.tolist()


def test_lgp_01_logprobs_are_finite_and_never_positive():
    logits = torch.tensor([[200.0, -200.0, 0.0], [1e-3, 0.0, -1e30], [30000.0, 29999.0, -torch.inf]])
    scores = sampling.score_tokens(logits, torch.tensor([0, 0, 0]))
    assert (scores.logprobs <= 0).all() and np.isfinite(scores.logprobs).all()
    assert scores.ranks.tolist() == [1, 1, 1]


def test_candidates_outside_the_vocabulary_are_refused():
    logits = torch.zeros(1, 10)
    with pytest.raises(InvalidArgument, match="top_n 11 exceeds the vocabulary of 10"):
        sampling.score_tokens(logits, torch.tensor([0]), top_n=11)
    with pytest.raises(InvalidArgument, match=r"\[10\] are outside the vocabulary of 10"):
        sampling.score_tokens(logits, torch.tensor([0]), candidate_ids=(3, 10))


@pytest.mark.parametrize("selection", [{}, {"top_n": 3}, {"all_candidates": True}])
def test_concatenated_scores_equal_those_of_all_rows(selection):
    logits, targets = torch.from_numpy(np.stack([rough_logits(200, seed) for seed in range(5)])), torch.arange(5)
    parts = [sampling.score_tokens(logits[at], targets[at], **selection) for at in (slice(0, 2), slice(2, 5))]
    joined, whole = sampling.concatenate(parts), sampling.score_tokens(logits, targets, **selection)
    for name in ("logprobs", "ranks", "candidate_ids", "candidate_logprobs", "candidate_ranks"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name))
    assert sampling.concatenate([]).logprobs.shape == (0,)
