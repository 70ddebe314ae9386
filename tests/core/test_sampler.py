"""`core/sampler.py`: what a slot draws depends on its own request alone, in any batch and after any interruption."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from openengine.core.sampler import GuideMask, SampledBatch, Sampler, SlotParams
from openengine.ops.native import native_absence, native_library

CPU = torch.device("cpu")
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "seed": 7,
    "output_index": 0,
    "min_tokens": 0,
    "stop_token_ids": (),
    "return_logprobs": False,
    "top_n": None,
    "candidate_ids": None,
    "all_candidates": False,
}
# One of every kind of draw, with and without what changes logits.
MIXED = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.0, "repetition_penalty": 2.0},
    {"top_k": 20, "seed": 1},
    {"top_k": 300, "top_p": 0.9, "temperature": 2.0, "frequency_penalty": 1.0},
    {"top_p": 0.8, "seed": 2},
    {"top_p": 0.97, "temperature": 8.0, "seed": 3},
    {"top_p": 0.1, "temperature": 50.0, "seed": 3},
    {"min_p": 0.2, "presence_penalty": 1.5, "seed": 4},
    {"min_p": 0.02, "temperature": 1.7, "top_p": 0.9, "return_logprobs": True, "top_n": 3},
    {"temperature": 0.3, "return_logprobs": True, "candidate_ids": (9, 4), "output_index": 2},
    {"min_tokens": 3, "stop_token_ids": (0, 5, 17), "top_k": 1},
]
VOCAB = 2048
KERNELS = {"native": None}  # of the samplers that a test makes


@pytest.fixture(params=["torch", "native"], autouse=True)
def kernels(request, monkeypatch) -> str:
    """Every test runs with the kernels of PyTorch and with the native ones."""
    if request.param == "native":
        if native_library() is None:
            pytest.skip(native_absence())
        monkeypatch.setitem(KERNELS, "native", native_library())
    return request.param


def params(**values) -> SlotParams:
    return SlotParams(**{**NEUTRAL, **values})


def empty_sampler(num_slots: int, vocab_size: int = VOCAB) -> Sampler:
    return Sampler(max_slots=num_slots, vocab_size=vocab_size, device=CPU, native=KERNELS["native"])


def sampler(*slots: SlotParams, vocab_size: int = VOCAB, prompt=(), output=()) -> Sampler:
    """A sampler whose first slots are set."""
    result = empty_sampler(max(4, len(slots)), vocab_size)
    for slot, slot_params in enumerate(slots):
        result.set_slot(slot, slot_params, prompt, output)
    return result


def step(target: Sampler, logits: torch.Tensor, slots=None, **kwargs) -> SampledBatch:
    """One row per slot."""
    # A copy, since a step owns its logits and may change them.
    return target.sample(logits.clone(), np.arange(len(logits)), np.array(slots or range(len(logits))), **kwargs)


def rough_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    """Logits in steps of 1/4, so that ties are everywhere, as they are with bfloat16 models."""
    rows = np.round(np.random.default_rng(seed).normal(size=(num_rows, vocab_size)) * 8) / 4
    return torch.from_numpy(rows.astype(np.float32))


def generate(target: Sampler, slot: int, num_tokens: int, first_step: int = 0) -> list[int]:
    """Tokens of one slot, whose logits differ from step to step."""
    rows = (rough_logits(1, seed=at) for at in range(first_step, first_step + num_tokens))
    return [int(step(target, row, [slot]).token_ids[0]) for row in rows]


# ---- one request, any batch ----------------------------------------------------------------------


def test_smp_08_a_mixed_batch_gives_each_request_what_it_gets_alone():
    requests = [params(**values) for values in MIXED]
    prompt = list(range(0, 200, 3))
    together, shuffled = sampler(*requests, prompt=prompt), empty_sampler(30)
    order = np.random.default_rng(5).permutation(len(requests))
    place = 2 * order[::-1] + 1
    for slot, request in zip(place, order, strict=True):
        shuffled.set_slot(int(slot), requests[request], prompt, [])
    alone = [sampler(request, prompt=prompt) for request in requests]
    for at in range(6):
        logits = rough_logits(len(requests), seed=at)
        expected = [step(one, logits[i : i + 1]).token_ids[0] for i, one in enumerate(alone)]
        assert step(together, logits).token_ids.tolist() == expected
        assert step(shuffled, logits[order], place.tolist()).token_ids.tolist() == [expected[i] for i in order]


def test_s5_a_seeded_and_a_greedy_request_do_not_touch_each_other():
    first, second = params(seed=99, top_k=1), params(temperature=0.0, repetition_penalty=2.0)
    logits = rough_logits(2)
    alone = [step(sampler(p, prompt=[3, 5]), logits[i : i + 1]).token_ids[0] for i, p in enumerate((first, second))]
    assert step(sampler(first, second, prompt=[3, 5]), logits).token_ids.tolist() == alone
    assert step(sampler(second, first, prompt=[3, 5]), logits.flip(0)).token_ids.tolist() == alone[::-1]


def test_s7_outputs_of_one_prompt_differ_and_index_0_is_the_single_run():
    logits = torch.zeros(1, VOCAB)
    rows = np.zeros(4, np.int64)
    runs = []
    for _ in range(2):
        fork = sampler(*(params(output_index=i) for i in range(4)))
        runs.append(np.stack([fork.sample(logits, rows, np.arange(4)).token_ids for _ in range(8)]))
    assert (runs[0] == runs[1]).all()
    assert len({tuple(column) for column in runs[0].T}) == 4
    single = sampler(params())
    assert [step(single, logits).token_ids[0] for _ in range(8)] == runs[0][:, 0].tolist()


def test_smp_10_greedy_outputs_of_one_prompt_are_equal():
    fork = sampler(*(params(temperature=0.0, output_index=i) for i in range(4)))
    drawn = fork.sample(rough_logits(2), np.array([1, 1, 1, 1]), np.arange(4))
    assert len(set(drawn.token_ids.tolist())) == 1


@pytest.mark.parametrize("values", MIXED)
def test_p5_a_resumed_slot_continues_with_the_same_tokens(values):
    prompt = [3, 3, 8, 1000]
    whole = generate(sampler(params(**values), prompt=prompt), 0, 12)
    resumed = sampler(params(), params(temperature=0.5))
    resumed.set_slot(3, params(**values), prompt, whole[:5])
    assert generate(resumed, 3, 7, first_step=5) == whole[5:]


def test_smp_08_seeds_differ_up_to_the_largest():
    logits = torch.zeros(1, VOCAB)
    seeds = (0, 1, 2**63 - 1, 2**63, 2**64 - 1)
    outputs = []
    for seed in seeds:
        one = sampler(params(seed=seed))
        outputs.append(tuple(int(step(one, logits).token_ids[0]) for _ in range(4)))
    assert len(set(outputs)) == len(seeds)


def test_s8_the_random_generators_of_the_process_are_untouched():
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    step(sampler(*(params(**values) for values in MIXED)), rough_logits(len(MIXED)))
    assert states() == before


# ---- values that mean greedy, or nothing ---------------------------------------------------------


@pytest.mark.parametrize("values", [{"top_p": 1e-9}, {"top_p": 5e-324}, {"top_k": 1}, {"min_p": 1.0}])
@pytest.mark.parametrize("temperature", [1e-30, 1e-300, 0.7, 1.0, 100.0])
def test_smp_03_04_05_tiny_top_p_single_top_k_and_full_min_p_equal_greedy(values, temperature):
    logits = rough_logits(8)
    logits[0, 40:60] = 50.0
    chosen = sampler(*(params(temperature=temperature, seed=i, **values) for i in range(8)))
    assert step(chosen, logits).token_ids.tolist() == logits.numpy().argmax(-1).tolist()


@pytest.mark.parametrize("values", [{"top_k": VOCAB}, {"top_k": VOCAB + 5}, {"top_p": 1.0}, {"min_p": 0.0}])
def test_truncation_that_keeps_everything_changes_nothing(values):
    logits = rough_logits(8)
    plain = sampler(*(params(temperature=1e30, seed=i) for i in range(8)))
    kept = sampler(*(params(temperature=1e30, seed=i, **values) for i in range(8)))
    assert step(plain, logits).token_ids.tolist() == step(kept, logits).token_ids.tolist()


def test_temperatures_beyond_float32_are_flat_and_keep_masked_tokens_out():
    logits = torch.full((4, VOCAB), -torch.inf)
    logits[:, :8] = torch.arange(8.0)
    flat = sampler(*(params(temperature=1e300, seed=i) for i in range(4)))
    drawn = np.stack([step(flat, logits).token_ids for _ in range(50)])
    assert set(drawn.ravel().tolist()) == set(range(8))


def test_the_kth_of_equal_logits_is_the_one_with_the_lowest_id():
    logits = torch.zeros(1, VOCAB)
    logits[0, 100] = 0.5
    one = sampler(params(top_k=3, temperature=5.0))
    assert {int(step(one, logits).token_ids[0]) for _ in range(60)} == {0, 1, 100}


# ---- penalties -----------------------------------------------------------------------------------


def test_s4_repetition_counts_the_prompt_and_presence_does_not():
    a, b = 1, 2
    equal = torch.full((1, 8), 2.0)

    def first_two(**values):
        # The greedy choice shows the penalized logits: a slightly lower token 5 wins once the others are penalized.
        one = sampler(params(temperature=0.0, **values), vocab_size=8, prompt=[a, a, b])
        return [int(step(one, equal).token_ids[0]) for _ in range(9)]

    assert first_two(repetition_penalty=2.0)[:6] == [0, 3, 4, 5, 6, 7]
    assert first_two(repetition_penalty=2.0)[6] == 0
    assert first_two(presence_penalty=1.0)[:8] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert first_two(presence_penalty=1.0)[8] == 0


def test_s4_repetition_halves_a_positive_logit_of_the_prompt():
    for other, expected in ((0.99, 1), (1.01, 0)):
        logits = torch.tensor([[other, 2.0, 2.0, 0.0]])
        one = sampler(params(temperature=0.0, repetition_penalty=2.0), vocab_size=4, prompt=[1, 1, 2])
        assert step(one, logits).token_ids.tolist() == [expected]


def test_smp_07_frequency_counts_every_occurrence():
    logits = torch.tensor([[3.0, 0.9, 0.0, 0.0]])
    one = sampler(params(temperature=0.0, frequency_penalty=0.5), vocab_size=4, prompt=[0] * 20)
    assert [int(step(one, logits).token_ids[0]) for _ in range(7)] == [0, 0, 0, 0, 0, 1, 0]


def test_penalties_of_many_slots_follow_the_naive_counts():
    rng = np.random.default_rng(1)
    vocab_size, num_slots = 50, 6
    target = empty_sampler(num_slots, vocab_size)
    history: dict[int, tuple[list[int], list[int]]] = {}
    values = {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
    for _ in range(60):
        slot = int(rng.integers(num_slots))
        if slot in history and rng.random() < 0.3:
            target.clear_slot(slot)
            del history[slot]
        elif slot not in history:
            prompt, output = (rng.integers(0, vocab_size, rng.integers(0, 9)).tolist() for _ in range(2))
            target.set_slot(slot, params(**values), prompt + [vocab_size + 3], output)
            history[slot] = (prompt, output)
        active = rng.permutation([s for s in history if rng.random() < 0.8]).astype(np.int64)
        logits = rough_logits(len(active), vocab_size, seed=int(rng.integers(1000)))
        drawn = target.sample(logits.clone(), np.arange(len(active)), active).token_ids
        for row, slot, token in zip(logits.double().numpy(), active.tolist(), drawn.tolist(), strict=True):
            prompt, output = history[slot]
            for seen in {*prompt, *output}:
                row[seen] = row[seen] / 1.3 if row[seen] > 0 else row[seen] * 1.3
                row[seen] -= output.count(seen) * 0.4 + (seen in output) * 0.2
            assert row[token] == pytest.approx(row.max(), abs=1e-5)
            output.append(token)


def test_extreme_repetition_penalties_leave_a_row_valid():
    logits = torch.tensor([[0.0, 3.0, -3.0, 1.0]])
    for penalty in (1e-300, 1e-30, 1e30, 1e300):
        one = sampler(params(repetition_penalty=penalty), vocab_size=4, prompt=[0, 1, 2, 3])
        assert not step(one, logits).failed.any()


# ---- stops, guides and invalid rows --------------------------------------------------------------


def test_stp_05_stop_ids_are_not_drawn_before_min_tokens():
    logits = torch.zeros(2, 8)
    logits[:, 3], logits[:, 6], logits[:, 1] = 9.0, 8.0, 7.0
    waiting = params(temperature=0.0, min_tokens=2, stop_token_ids=(3, 6, 900))
    target = sampler(waiting, params(temperature=0.0, stop_token_ids=(3,)), vocab_size=8)
    assert [step(target, logits).token_ids.tolist() for _ in range(3)] == [[1, 3], [1, 3], [3, 3]]


def test_a_guide_mask_comes_before_penalties_and_truncation():
    logits = torch.zeros(2, 70)
    logits[:, 0] = 30.0
    mask = torch.full((2, 3), -1, dtype=torch.int32)
    mask[0] = torch.tensor([0, 0, 0b100001])  # tokens 64 and 69
    target = sampler(params(top_k=5, repetition_penalty=1.5), params(top_k=5), vocab_size=70, prompt=[64, 69])
    guides = GuideMask(np.arange(2), mask, np.zeros(2, np.bool_))
    drawn = np.stack([step(target, logits, mask=guides).token_ids for _ in range(30)])
    assert set(drawn[:, 0].tolist()) == {64, 69}
    assert set(drawn[:, 1].tolist()) == {0}


def test_only_guided_rows_are_masked():
    logits = torch.zeros(3, 40)
    logits[:, 39] = 5.0
    guides = GuideMask(np.array([1]), torch.tensor([[1 << 7, 0]], dtype=torch.int32), np.zeros(1, np.bool_))
    greedy = params(temperature=0.0)
    drawn = step(sampler(greedy, greedy, greedy, vocab_size=40), logits, mask=guides)
    assert drawn.token_ids.tolist() == [39, 7, 39]


def test_stp_05_a_complete_guide_ends_before_min_tokens():
    logits = torch.zeros(2, 8)
    waiting = params(temperature=0.0, min_tokens=5, stop_token_ids=(3,))
    bits = torch.full((2, 1), 1 << 3 | 1 << 5, dtype=torch.int32)
    guides = GuideMask(np.arange(2), bits, np.array([True, False]))
    assert step(sampler(waiting, waiting, vocab_size=8), logits, mask=guides).token_ids.tolist() == [3, 5]


def test_tokens_that_a_guide_forced_count_as_drawn():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3))
    values = params(seed=5, repetition_penalty=1.5, frequency_penalty=0.5)
    drawn, forced = sampler(values, vocab_size=50), sampler(values, vocab_size=50)
    tokens = [int(step(drawn, logits).token_ids[0]) for _ in range(6)]
    forced.catch_up(0, tokens[:4])
    forced.catch_up(0, tokens[:4])
    assert [int(step(forced, logits).token_ids[0]) for _ in range(2)] == tokens[4:]


@pytest.mark.parametrize("values", MIXED)
def test_an_invalid_row_fails_alone(values):
    logits = rough_logits(5)
    healthy = step(sampler(*[params(**values)] * 5), logits)
    for token, invalid in ((700, torch.nan), (700, -torch.nan), (slice(None), -torch.inf), (700, torch.inf)):
        broken = logits.clone()
        broken[2, token] = invalid
        drawn = step(sampler(*[params(**values)] * 5), broken)
        assert drawn.failed.tolist() == [False, False, True, False, False]
        assert np.delete(drawn.token_ids, 2).tolist() == np.delete(healthy.token_ids, 2).tolist()
        assert drawn.scores is None or drawn.scores[2] is None
        assert 0 <= drawn.token_ids[2] < VOCAB


def test_a_mask_does_not_hide_a_nan_and_leaves_no_token_fails():
    logits = torch.zeros(2, 64)
    logits[0, 40] = torch.nan
    mask = torch.tensor([[-1, 0], [0, 0]], dtype=torch.int32)
    guides = GuideMask(np.arange(2), mask, np.zeros(2, np.bool_))
    assert step(sampler(params(), params(), vocab_size=64), logits, mask=guides).failed.tolist() == [True, True]


def test_a_failed_row_does_not_advance_its_slot():
    logits = rough_logits(1)
    expected = generate(sampler(params()), 0, 2)
    one = sampler(params())
    step(one, torch.full_like(logits, torch.nan))
    assert generate(one, 0, 2) == expected


def test_a_batch_without_sequences_draws_nothing():
    drawn = sampler().sample(torch.zeros(0, VOCAB), np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert drawn.token_ids.shape == drawn.failed.shape == (0,)
    assert drawn.scores is None


# ---- scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_s1_lgp_14_logprobs_are_raw_whatever_the_sampling_values(temperature):
    logits = torch.tensor([[1.0, 0.0, -1.0, -2.0]])
    request = params(
        temperature=temperature, top_p=0.9, repetition_penalty=1.4, return_logprobs=True, top_n=4, min_tokens=9
    )
    drawn = step(sampler(request, vocab_size=4, prompt=[0]), logits)
    scores = drawn.scores[0]
    np.testing.assert_allclose(scores.candidate_logprobs[0], [-0.44019, -1.44019, -2.44019, -3.44019], atol=1e-5)
    assert scores.candidate_ranks.tolist() == [[1, 2, 3, 4]]
    assert scores.ranks[0] == drawn.token_ids[0] + 1
    assert scores.logprobs[0] == scores.candidate_logprobs[0, drawn.token_ids[0]]
    assert logits.tolist() == [[1.0, 0.0, -1.0, -2.0]]


def test_lgp_02_each_pair_gets_what_it_asked_for():
    greedy = {"temperature": 0.0, "return_logprobs": True}
    target = sampler(
        params(temperature=0.0),
        params(**greedy),
        params(**greedy, top_n=2),
        params(**greedy, top_n=5),
        params(**greedy, candidate_ids=(7, 3)),
        params(**greedy, all_candidates=True),
        params(**greedy, top_n=0),
    )
    scores = step(target, rough_logits(7)).scores
    assert scores[0] is None
    assert scores[1].candidate_ids is None
    assert [s.candidate_ids.shape for s in scores[2:]] == [(1, 2), (1, 5), (1, 2), (1, VOCAB), (1, 0)]
    assert scores[4].candidate_ids.tolist() == [[7, 3]]
    assert all(s.ranks.tolist() == [1] and s.logprobs[0] <= 0 for s in scores[1:])
    assert scores[3].candidate_logprobs[0, 0] == scores[3].logprobs[0]


def test_scores_of_a_forked_row_belong_to_each_token():
    logits = torch.zeros(2, VOCAB)
    logits[1] = rough_logits(1)[0]
    target = sampler(*(params(temperature=9.0, output_index=i, return_logprobs=True) for i in range(3)))
    drawn = target.sample(logits, np.array([1, 1, 1]), np.arange(3))
    expected = logits[1].double().log_softmax(-1)[torch.from_numpy(drawn.token_ids)]
    np.testing.assert_allclose([s.logprobs[0] for s in drawn.scores], expected, atol=1e-5)


def test_a_large_vocabulary_draws_and_scores():
    vocab_size = 262_144
    requests = (params(), params(top_p=0.9), params(top_k=50, repetition_penalty=1.2), params(temperature=0.0))
    requests += (params(top_p=0.9, temperature=30.0), params(return_logprobs=True, top_n=5))
    logits = rough_logits(len(requests), vocab_size)
    drawn = step(sampler(*requests, vocab_size=vocab_size, prompt=[vocab_size - 1]), logits)
    assert not drawn.failed.any()
    for row, request in enumerate(requests):
        alone = step(sampler(request, vocab_size=vocab_size, prompt=[vocab_size - 1]), logits[row : row + 1])
        assert drawn.token_ids[row] == alone.token_ids[0]
