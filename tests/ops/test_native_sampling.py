"""The compiled passes over rows of logits against their PyTorch twins."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from openengine.errors import InvalidArgument
from openengine.ops import sampling
from openengine.ops.native import native_absence, native_library
from openengine.ops.sampling import SeenTokens
from openengine.ops.sampling_native import NativeSampling

LIBRARY = native_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=native_absence() or "")

CPU = torch.device("cpu")
EVERY_LEVEL = pytest.mark.parametrize("level", LIBRARY.levels if LIBRARY else [])
SHAPES = [(1, 1), (1, 15), (3, 16), (2, 31), (5, 1000), (64, 257), (1, 5003), (9, 4096), (64, 2051)]


def native(level: str) -> NativeSampling:
    return NativeSampling(LIBRARY, level=level)


def rows_of(num_rows: int, vocab_size: int, *, ties: bool = False, masked: bool = False, seed: int = 0) -> torch.Tensor:
    """Random logits; with `ties` in coarse steps that include -0.0, with `masked` -inf at all but a few tokens of a row."""
    draw = np.random.default_rng([num_rows, vocab_size, seed])
    values = draw.normal(size=(num_rows, vocab_size)) * 6
    if ties:
        values = np.round(values / 4) * 2
    if masked:
        values[draw.random(values.shape) < draw.random((num_rows, 1))] = -np.inf
        values[:, draw.integers(vocab_size)] = 1.0
    return torch.from_numpy(values.astype(np.float32))


def every_kind(num_rows: int, vocab_size: int) -> list[torch.Tensor]:
    kinds = [rows_of(num_rows, vocab_size, ties=ties, masked=masked) for ties in (0, 1) for masked in (0, 1)]
    order = kinds[0].sort(dim=-1).values
    return [*kinds, order, order.flip(-1), torch.full_like(order, -2.5)]


def counts_within(vocab_size: int) -> list[int]:
    return [count for count in (1, 2, 5, 17, 50, 128, 256, 1024) if count <= vocab_size]


def race_of(logits: torch.Tensor, *, temperature: float, min_p: float = 0.0, seed: int = 0) -> dict:
    num_rows, vocab_size = logits.shape
    fill = np.full(num_rows, seed, np.uint64)
    return {
        "best": logits.amax(-1),
        "temperature": torch.full((num_rows,), temperature),
        "max_gap": torch.full((num_rows,), -float(np.log(min_p))) if min_p else None,
        "keys": torch.from_numpy(sampling.noise_keys(fill, np.zeros_like(fill), np.arange(num_rows))),
        "bits": sampling.token_bits(vocab_size, CPU),
    }


# ---- selection -----------------------------------------------------------------------------------


@EVERY_LEVEL
@pytest.mark.parametrize("shape", SHAPES)
def test_the_best_are_those_of_the_twin_in_the_same_order(level, shape):
    for logits in every_kind(*shape):
        for count in counts_within(shape[1]):
            values, ids = native(level).top_candidates(logits, count)
            twin_values, twin_ids = sampling.top_candidates(logits, count)
            assert torch.equal(ids, twin_ids)
            assert torch.equal(values, twin_values)
        ids, values = native(level).argmax(logits)
        assert torch.equal(ids, sampling.argmax(logits)[0])
        assert torch.equal(values, logits.amax(-1))


@EVERY_LEVEL
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("place", [0, 20, 300, 1002])
def test_a_row_with_a_nan_says_so_and_stays_within_bounds(level, place, sign):
    logits = rows_of(4, 1003)
    logits[1, place] = sign * torch.nan
    logits[3] = torch.nan
    for count in (1, 30, 256):
        for kernels in (native(level), sampling):
            values, ids = kernels.top_candidates(logits, count)
            assert values[:, 0].isnan().tolist() == [False, True, False, True]
            assert ((ids >= 0) & (ids < 1003)).all()
            assert [len(set(row)) for row in ids.tolist()] == [count] * 4
    scores = native(level).score_tokens(logits, torch.tensor([0, 1, 2, 3]), top_n=5)
    assert np.isfinite(scores.logprobs).tolist() == [True, False, True, False]


@EVERY_LEVEL
def test_rows_of_a_wider_table_and_other_dtypes_are_served(level):
    table = rows_of(6, 900)
    part = table[::2, :801]
    assert torch.equal(native(level).top_candidates(part, 9)[1], sampling.top_candidates(part, 9)[1])
    for other in (table.bfloat16(), table.T):
        assert torch.equal(native(level).argmax(other)[0], sampling.argmax(other)[0])
    assert torch.equal(native(level).top_candidates(table, 0)[1], torch.empty(6, 0, dtype=torch.int64))
    wide = rows_of(2, 3000, ties=True)
    assert torch.equal(native(level).top_candidates(wide, 1025)[1], sampling.top_candidates(wide, 1025)[1])


# ---- the draw ------------------------------------------------------------------------------------


@EVERY_LEVEL
@pytest.mark.parametrize("temperature", [2.0**-126, 0.3, 1.0, 40.0, 3.4e38])
def test_the_mass_is_exact_to_some_float32_roundings(level, temperature):
    for shape in SHAPES:
        for logits in every_kind(*shape):
            best, heat = logits.amax(-1), torch.full((shape[0],), temperature)
            exact = torch.exp((logits.double() - best[:, None]) / heat.double()[:, None]).sum(-1)
            assert ((native(level).total_mass(logits, best, heat) - exact).abs() / exact).max() <= 4e-7


@EVERY_LEVEL
@pytest.mark.parametrize("min_p", [0.0, 0.05])
@pytest.mark.parametrize("temperature", [0.2, 1.0, 30.0])
def test_draws_are_those_of_the_twin(level, temperature, min_p):
    for shape in SHAPES:
        for seed, logits in enumerate(every_kind(*shape)):
            race = race_of(logits, temperature=temperature, min_p=min_p, seed=seed)
            assert torch.equal(native(level).draw(logits, **race), sampling.draw(logits, **race))
            mass = sampling.total_mass(logits, race["best"], race["temperature"])
            for top_p in (0.3, 0.93):
                nucleus = {**race, "mass": mass, "top_p": torch.full((shape[0],), top_p, dtype=torch.float64)}
                drawn, found = native(level).draw_nucleus(logits, **nucleus)
                twin_drawn, twin_found = sampling.draw_nucleus(logits, **nucleus)
                assert torch.equal(found, twin_found)
                assert torch.equal(drawn[found], twin_drawn[found])


@EVERY_LEVEL
def test_a_row_alone_gives_the_same_bits_as_among_others(level):
    kernels = native(level)
    logits = rows_of(40, 3001, ties=True)
    race = race_of(logits, temperature=1.3)
    mass = kernels.total_mass(logits, race["best"], race["temperature"])
    drawn = kernels.draw(logits, **race)
    scores = kernels.score_tokens(logits, drawn, top_n=3)
    for at in range(0, 40, 7):
        row = slice(at, at + 1)
        alone = {name: value if name == "bits" or value is None else value[row] for name, value in race.items()}
        assert torch.equal(kernels.total_mass(logits[row], alone["best"], alone["temperature"]), mass[row])
        assert torch.equal(kernels.draw(logits[row], **alone), drawn[row])
        single = kernels.score_tokens(logits[row], drawn[row], top_n=3)
        assert (single.logprobs == scores.logprobs[row]).all()
        assert (single.candidate_logprobs == scores.candidate_logprobs[row]).all()


# ---- scores --------------------------------------------------------------------------------------


@EVERY_LEVEL
@pytest.mark.parametrize("top_n", [None, 0, 1, 5, 256])
def test_scores_are_those_of_the_twin(level, top_n):
    for shape in SHAPES:
        if (top_n or 0) > shape[1]:
            continue
        for logits in every_kind(*shape):
            targets = torch.from_numpy(np.random.default_rng(shape[0]).integers(0, shape[1], shape[0]))
            scores, twin = (k.score_tokens(logits, targets, top_n=top_n) for k in (native(level), sampling))
            exact = logits.double().log_softmax(-1).numpy()
            assert (scores.ranks == twin.ranks).all()
            assert (scores.logprobs <= 0).all()
            expected = np.take_along_axis(exact, targets.numpy()[:, None], 1)[:, 0]
            np.testing.assert_allclose(scores.logprobs, expected, rtol=2e-7, atol=4e-7)
            if top_n is None:
                assert scores.candidate_ids is None
                continue
            assert scores.candidate_ids.shape == (shape[0], top_n)
            assert (scores.candidate_ids == twin.candidate_ids).all()
            assert (scores.candidate_ranks == twin.candidate_ranks).all()
            expected = np.take_along_axis(exact, scores.candidate_ids, 1)
            np.testing.assert_allclose(scores.candidate_logprobs, expected, rtol=2e-7, atol=4e-7)


@EVERY_LEVEL
def test_named_candidates_and_too_many_are_left_to_the_twin(level):
    logits, targets = rows_of(3, 1500), torch.tensor([0, 9, 1499])
    for selection in ({"candidate_ids": (7, 3)}, {"all_candidates": True}, {"top_n": 1500}):
        scores, twin = (k.score_tokens(logits, targets, **selection) for k in (native(level), sampling))
        assert (scores.candidate_ids == twin.candidate_ids).all()
        assert (scores.candidate_logprobs == twin.candidate_logprobs).all()
    with pytest.raises(InvalidArgument, match="top_n 900 exceeds the vocabulary of 800"):
        native(level).score_tokens(logits[:, :800], targets[:1], top_n=900)


# ---- masks and penalties -------------------------------------------------------------------------


@EVERY_LEVEL
@pytest.mark.parametrize("shape", SHAPES)
def test_masked_rows_are_those_of_the_twin(level, shape):
    num_rows, vocab_size = shape
    draw = np.random.default_rng(vocab_size)
    words = draw.integers(-(2**31), 2**31, (num_rows, -(-vocab_size // 32)), np.int32)
    words[:, ::3], words[:, 1::4] = 0, -1
    logits = rows_of(num_rows, vocab_size, masked=True)
    logits[0, :: vocab_size // 2 + 1] = torch.nan
    logits[-1, 0] = torch.inf
    masked, twin = logits.clone(), logits.clone()
    native(level).apply_bitmask_(masked, torch.from_numpy(words))
    sampling.apply_bitmask_(twin, torch.from_numpy(words))
    torch.testing.assert_close(masked, twin, rtol=0, atol=0, equal_nan=True)
    assert masked[0, 0].isnan()


@EVERY_LEVEL
@pytest.mark.parametrize("shape", SHAPES)
def test_penalized_rows_are_those_of_the_twin_to_the_bit(level, shape):
    num_rows, vocab_size = shape
    draw = np.random.default_rng(vocab_size)
    tokens = [draw.permutation(vocab_size)[: draw.integers(0, min(vocab_size, 300) + 1)] for _ in range(num_rows + 2)]
    slots = draw.permutation(num_rows + 2)[:num_rows]  # others have entries too
    sizes = np.array([len(row) for row in tokens])
    keys = np.concatenate([np.sort(row) + slot * vocab_size for slot, row in enumerate(tokens)])
    counts = draw.integers(0, 4, len(keys), np.int32)
    seen = SeenTokens(keys, counts, slots * vocab_size, (np.cumsum(sizes) - sizes)[slots], sizes[slots])
    penalties = [draw.uniform(low, high, num_rows).astype(np.float32) for low, high in ((0.5, 2), (-2, 2), (-2, 2))]
    logits = rows_of(num_rows, vocab_size, masked=True)
    logits[0, 0] = torch.inf
    penalized, twin = logits.clone(), logits.clone()
    native(level).penalize_(penalized, seen, *penalties)
    sampling.penalize_(twin, seen, *penalties)
    assert torch.equal(penalized, twin)
