"""Results collected from events, and token records that are made when they are read."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import numpy as np
import pytest

from openengine.core.output import Candidates, PromptTokens, ResultCollector
from openengine.types import (
    FinishReason,
    GenerationFinished,
    KvSessionRef,
    LogProb,
    PrefillReady,
    PromptOutput,
    SamplingParams,
    StopMatch,
    StoppingOptions,
    TokenInfo,
    Usage,
)
from tests.stream_grammar import whole_stream

# ---- collecting ----------------------------------------------------------------------------------


def test_a_result_holds_every_output_in_index_order_with_usage_of_the_last_event():
    events = whole_stream()
    sampling, stopping = SamplingParams(num_sequences=2), StoppingOptions(max_tokens=3)
    collector = ResultCollector("r", sampling=sampling, stopping=stopping)
    for event in events:
        collector.add(event)
    result = collector.result()
    assert [output.index for output in result.outputs] == [0, 1]
    assert [output.text for output in result.outputs] == ["abc", "a"]
    assert [output.token_ids for output in result.outputs] == [[0, 1, 3], [0, 2]]
    assert [output.finish_reason for output in result.outputs] == [FinishReason.LENGTH, FinishReason.STOP]
    assert [output.stop_match for output in result.outputs] == [None, StopMatch(eos_token_id=2)]
    assert result.prompt is events[0].tokens
    assert result.usage == Usage(2, 5, 7, cached_prompt_tokens=0)
    assert (result.request_id, result.sampling, result.stopping) == ("r", sampling, stopping)


def test_stp_03_an_output_without_tokens_is_in_the_result():
    collector = ResultCollector("r")
    collector.add(GenerationFinished(0, FinishReason.LENGTH, usage=Usage(2, 0, 2)))
    assert (collector.result().text, collector.result().tokens) == ("", ())


def test_a_prefill_result_carries_the_session():
    collector = ResultCollector("r")
    collector.add(PrefillReady(KvSessionRef(session_id="s"), Usage(2, 0, 2)))
    result = collector.result()
    assert (result.kv_session, result.usage, result.outputs) == (KvSessionRef(session_id="s"), Usage(2, 0, 2), ())


def test_a_result_before_the_end_shows_an_output_without_finish_reason():
    collector = ResultCollector("r")
    for event in whole_stream()[:3]:
        collector.add(event)
    assert [(output.text, output.finish_reason) for output in collector.result().outputs] == [("ab", None), ("a", None)]


# ---- objects made on demand ----------------------------------------------------------------------


@dataclass
class Scores:
    logprobs: np.ndarray
    ranks: np.ndarray
    candidate_ids: np.ndarray | None = None
    candidate_logprobs: np.ndarray | None = None
    candidate_ranks: np.ndarray | None = None


def _literal(token_id):
    return f"t{token_id}"


def _candidates(num=3):
    ids = np.arange(num, dtype=np.int64) + 5
    return Candidates(ids, np.arange(0, -num, -1, dtype=np.float32) / 2, np.arange(num) + 1, _literal)


def test_candidates_read_as_a_sequence_of_logprobs():
    candidates = _candidates()
    expected = (LogProb(5, 0.0, "t5", 1), LogProb(6, -0.5, "t6", 2), LogProb(7, -1.0, "t7", 3))
    assert len(candidates) == 3
    assert tuple(candidates) == expected
    assert candidates[-1] == expected[-1]
    assert candidates[1:] == expected[1:]
    assert expected[1] in candidates
    assert [type(value) for value in (candidates[0].token_id, candidates[0].logprob, candidates[0].rank)] == [
        int,
        float,
        int,
    ]
    with pytest.raises(IndexError):
        candidates[3]


def test_candidates_equal_and_hash_like_the_tuple_of_their_items():
    candidates = _candidates()
    assert candidates == tuple(candidates) and tuple(candidates) == candidates and candidates == list(candidates)
    assert candidates == _candidates() and candidates != _candidates(2) and candidates != "t5"
    assert hash(candidates) == hash(tuple(candidates))
    assert TokenInfo(5, "t5", 0.0, 1, candidates) == TokenInfo(5, "t5", 0.0, 1, tuple(candidates))


def test_candidates_show_a_short_repr():
    assert repr(_candidates(1)) == f"Candidates([{LogProb(5, 0.0, 't5', 1)!r}])"
    assert repr(_candidates(50_000)).endswith(", … 49997 more])")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_candidates_are_copied_and_pickled_without_the_tokenizer(copied):
    candidates = Candidates(np.array([1]), np.array([-1.0], np.float32), np.array([1]), lambda token_id: "x")
    assert copied(candidates) == (LogProb(1, -1.0, "x", 1),)


def test_candidates_of_a_whole_vocabulary_make_only_what_is_read():
    made = []
    candidates = Candidates(np.arange(100_000), np.zeros(100_000, np.float32), np.arange(100_000) + 1, made.append)
    assert candidates[7].token_id == 7
    assert made == [7]


def _prompt(start, num_tokens=4, num_candidates=2):
    num_scored = num_tokens - max(1, start)
    scores = Scores(-np.arange(1, num_scored + 1, dtype=np.float32), np.arange(num_scored) + 1)
    if num_candidates:
        scores.candidate_ids = np.arange(num_scored * num_candidates).reshape(num_scored, num_candidates)
        scores.candidate_logprobs = -scores.candidate_ids.astype(np.float32)
        scores.candidate_ranks = scores.candidate_ids + 1
    return PromptTokens(np.arange(10, 10 + num_tokens), _literal, start, scores)


@pytest.mark.parametrize("start", [0, 1])
def test_lgp_10_lgp_11_every_prompt_token_but_the_first_is_scored(start):
    prompt = _prompt(start)
    assert len(prompt) == 4
    assert prompt[0] == TokenInfo(10, "t10")
    assert prompt[1] == TokenInfo(11, "t11", -1.0, 1, (LogProb(0, 0.0, "t0", 1), LogProb(1, -1.0, "t1", 2)))
    assert [token.logprob for token in prompt] == [None, -1.0, -2.0, -3.0]
    assert prompt[-1].candidates == (LogProb(4, -4.0, "t4", 5), LogProb(5, -5.0, "t5", 6))


def test_lgp_13_tokens_before_the_start_are_listed_without_scores():
    prompt = _prompt(2)
    assert [token.token_id for token in prompt] == [10, 11, 12, 13]
    assert [token.logprob for token in prompt] == [None, None, -1.0, -2.0]
    assert prompt[1] == TokenInfo(11, "t11")


def test_prompt_tokens_without_a_selection_have_no_candidates():
    assert _prompt(0, num_candidates=0)[2] == TokenInfo(12, "t12", -2.0, 2, ())


def test_a_prompt_of_one_token_has_nothing_to_score():
    assert tuple(_prompt(0, num_tokens=1)) == (TokenInfo(10, "t10"),)


def test_prompt_tokens_slice_and_equal_like_a_tuple():
    prompt = _prompt(0)
    assert prompt[1:3] == tuple(prompt)[1:3]
    assert prompt == tuple(prompt)
    assert PromptOutput(prompt) == PromptOutput(tuple(prompt))
