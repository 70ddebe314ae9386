"""Where sampling values come from, what seeds reproduce, and prompt logprobs."""

from __future__ import annotations

import numpy as np
import pytest

from openengine import (
    AllCandidates,
    CandidateTokenSelection,
    InvalidArgument,
    SamplingParams,
)
from tests.scripted import ABC, GREEDY, hashed, letters, scripted_engine

# ---- sampling parameters -------------------------------------------------------------------------


def test_smp_01_the_request_comes_before_the_engine_and_that_before_the_checkpoint(tmp_path):
    config = {"do_sample": True, "temperature": 0.3, "top_k": 7, "top_p": 0.9}
    default = SamplingParams(temperature=0.5, num_sequences=1)
    with scripted_engine(tmp_path, hashed(27), ABC, generation_config=config, default_sampling=default) as engine:
        effective = engine.generate("ab", top_p=0.4, max_tokens=6)
        assert effective.sampling == SamplingParams(
            temperature=0.5, top_p=0.4, top_k=7, min_p=0.0, frequency_penalty=0.0, presence_penalty=0.0,
            repetition_penalty=1.0, num_sequences=1,
        )  # fmt: skip
        assert engine.generate("ab", temperature=0).sampling.temperature == 0


def test_stp_01_04_06_without_max_tokens_the_context_is_the_limit_whatever_a_librarys_default_is(tmp_path):
    with scripted_engine(tmp_path, hashed(27), ABC, generation_config={"max_new_tokens": 5}, context=40) as engine:
        assert engine.model_info().max_output_tokens is None
        for options in ({}, {"min_tokens": 10}):
            result = engine.generate("ab", ignore_eos=True, **options)
            assert (len(result.token_ids), result.finish_reason) == (38, "length")
            assert "context of 40 tokens" in result.outputs[0].message and result.stopping.max_tokens == 38
        with pytest.raises(InvalidArgument, match="min_tokens 39"):
            engine.generate("ab", min_tokens=39)


@pytest.mark.parametrize("num_sequences", [0, 2, 100, "3"])
def test_smp_09_a_default_number_of_sequences_is_one(tmp_path, num_sequences):
    with pytest.raises(InvalidArgument, match=r"default_sampling.*num_sequences"):
        scripted_engine(tmp_path, hashed(27), ABC, default_sampling=SamplingParams(num_sequences=num_sequences))


def test_do_sample_false_in_the_checkpoint_means_greedy_and_leaves_its_other_values_out(tmp_path):
    config = {"do_sample": False, "top_k": 3, "temperature": 0.2}
    with scripted_engine(tmp_path, hashed(27), ABC, generation_config=config) as engine:
        sampling = engine.generate("ab", max_tokens=3).sampling
    assert (sampling.temperature, sampling.top_k) == (0.0, 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"generation_config": {"do_sample": True, "temperature": -1}},
        {"generation_config": {"do_sample": True, "top_p": "high"}},
        {"generation_config": {"do_sample": True, "repetition_penalty": 0}},
        {"default_sampling": SamplingParams(top_p=2.0)},
        {"default_sampling": {"temperature": 1.0}},
    ],
)
def test_defaults_out_of_range_are_refused_when_the_engine_is_made(tmp_path, settings):
    with pytest.raises(InvalidArgument, match="default_sampling"):
        scripted_engine(tmp_path, hashed(27), ABC, **settings)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}])
def test_smp_02_03_04_05_the_ends_of_the_ranges_are_greedy(engine, options):
    greedy = engine.generate("abc", temperature=0, max_tokens=20).token_ids
    assert engine.generate("abc", max_tokens=20, **options).token_ids == greedy


def test_smp_08_10_a_seed_reproduces_each_sequence_and_no_seed_does_not(engine):
    def run(**options):
        return [o.token_ids for o in engine.generate("abc", max_tokens=20, num_sequences=3, **options).outputs]

    assert run(seed=0) == run(seed=0) != run(seed=1)
    assert run() != run() and len(set(map(tuple, run(temperature=0)))) == 1


def test_an_engine_seed_reproduces_requests_in_their_order(tmp_path):
    def run(name):
        with scripted_engine(tmp_path / name, hashed(27), ABC, seed=4) as engine:
            return [engine.generate("abc", max_tokens=20).token_ids for _ in range(2)]

    first = run("a")
    assert first == run("b") and first[0] != first[1]


# ---- prompt logprobs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "start", "unscored"), [("a", None, 1), ("abcd", None, 1), ("abcd", 0, 1), ("abcd", 1, 1), ("abcd", 3, 3)]
)
def test_lgp_09_10_13_prompt_tokens_before_the_start_are_listed_without_scores(engine, prompt, start, unscored):
    result = engine.generate(prompt, prompt_logprobs=2, prompt_logprob_start=start, **GREEDY)
    assert [t.token_id for t in result.prompt] == letters(prompt)
    assert [t.logprob is None for t in result.prompt] == [i < unscored for i in range(len(prompt))]
    assert [len(t.candidates) for t in result.prompt] == [0 if i < unscored else 2 for i in range(len(prompt))]


def test_lgp_12_16_selections_are_independent_and_imply_their_logprobs(engine):
    result = engine.generate("abc", output_candidates=CandidateTokenSelection(top_n=2), **GREEDY)
    assert result.prompt is None and len(result.tokens[0].candidates) == 2 and result.tokens[0].rank == 1
    everything = CandidateTokenSelection(all=AllCandidates())
    result = engine.generate("abc", prompt_candidates=everything, **GREEDY)
    assert result.logprobs is None and len(result.prompt[2].candidates) == 27
    assert abs(sum(np.exp(c.logprob) for c in result.prompt[2].candidates) - 1) < 1e-5
