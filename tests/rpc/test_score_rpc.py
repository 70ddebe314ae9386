"""Score over gRPC: groups, candidates, label tokens, instructions."""

from __future__ import annotations

import numpy as np
import pytest

from openengine.rpc import Client
from openengine.rpc import openengine_pb2 as pb
from tests.checkpoints import VOCAB_SIZE
from tests.rpc.task_serving import (
    INVALID,
    LOG_PROBABILITIES,
    LOGITS,
    NONE,
    PROBABILITIES,
    SEQUENCE,
    SIMILARITY,
    SOFTMAX,
    TOKEN,
    call,
    group,
    refused,
    score_request,
    tensor,
)
from tests.task_models import TEXTS


def test_scr_01_02_03_groups_have_ids_a_query_and_candidates(cross):
    assert refused(cross, score_request([])) is INVALID
    assert refused(cross, score_request([group("a", ["b"]), group("c", ["d"])])) is INVALID, "SCR-02: equal ids"
    assert refused(cross, score_request([group("a", ["b"], "")])) is INVALID, "SCR-02: empty"
    assert refused(cross, score_request([group("a", [])])) is INVALID
    request = score_request([group("a", ["b"])])
    request.groups[0].ClearField("query")
    assert refused(cross, request) is INVALID


def test_scr_05_06_what_is_not_advertised_or_makes_no_sense_is_refused(task_servers):
    cross, causal = task_servers["cross"], task_servers["causal"]
    for options in ({"granularity": TOKEN}, {"output_semantics": SIMILARITY}, {"normalization": SOFTMAX}):
        assert refused(cross, score_request(**options)) is INVALID
    labels = {"label_token_ids": [5, 6]}
    assert refused(causal, score_request(**labels, output_semantics=LOGITS, normalization=SOFTMAX)) is INVALID
    assert refused(causal, score_request(**labels, granularity=TOKEN)) is INVALID


def scores(response) -> np.ndarray:
    return np.stack([tensor(c.scores) for g in response.groups for c in g.candidates])


def test_scr_06_08_11_labels_are_scored_in_the_vocabulary_or_among_themselves(causal):
    labels = [30, 5, 300]
    responses = {}
    for semantics, normalization in (
        (LOGITS, NONE),
        (PROBABILITIES, NONE),
        (LOG_PROBABILITIES, NONE),
        (PROBABILITIES, SOFTMAX),
        (LOG_PROBABILITIES, SOFTMAX),
    ):
        request = score_request(label_token_ids=labels, output_semantics=semantics, normalization=normalization)
        response = responses[semantics, normalization] = call(causal, request)
        assert list(response.label_token_ids) == labels and scores(response).shape == (len(TEXTS), 3), "SCR-08"
        assert (response.semantics, response.normalization) == (semantics, normalization), "SCR-11"
        assert response.granularity == SEQUENCE and not response.HasField("higher_is_better")
    logits, whole = scores(responses[LOGITS, NONE]), scores(responses[PROBABILITIES, NONE])
    among = scores(responses[PROBABILITIES, SOFTMAX])
    assert np.allclose(among.sum(1), 1, atol=1e-6) and (whole.sum(1) < 1).all()
    assert np.allclose(np.log(whole) - np.log(among), (np.log(whole) - np.log(among))[:, :1], atol=1e-4)
    assert np.allclose(np.log(among[:, 0] / among[:, 1]), logits[:, 0] - logits[:, 1], atol=1e-4)
    assert np.allclose(np.exp(scores(responses[LOG_PROBABILITIES, NONE])), whole, atol=1e-6)
    assert np.allclose(np.exp(scores(responses[LOG_PROBABILITIES, SOFTMAX])), among, atol=1e-6)
    default = call(causal, score_request(label_token_ids=labels))
    assert default.normalization in (NONE, SOFTMAX) and default.semantics == PROBABILITIES
    every = scores(
        call(
            causal, score_request(label_token_ids=range(VOCAB_SIZE), output_semantics=PROBABILITIES, normalization=NONE)
        )
    )
    assert np.allclose(every.sum(1), 1, atol=1e-5), "over the whole vocabulary"


def test_scr_07_08_09_label_tokens_are_checked(task_servers):
    causal, cross = task_servers["causal"], task_servers["cross"]
    assert causal.tasks.score.supports_label_token_scoring and not cross.tasks.score.supports_label_token_scoring
    assert refused(causal, score_request(label_token_ids=[5, 6, 5])) is INVALID, "SCR-07"
    assert refused(causal, score_request(label_token_ids=[VOCAB_SIZE])) is INVALID
    too_many = range(causal.tasks.score.max_label_token_ids + 1)
    assert refused(causal, score_request(label_token_ids=too_many)) is INVALID, "SCR-08"
    assert refused(cross, score_request(label_token_ids=[5])) is INVALID, "SCR-08"
    assert refused(causal, score_request()) is INVALID, "SCR-09: it has no score of its own"


def test_scr_10_an_instruction_needs_a_place(task_servers):
    for kind in ("cross", "causal"):
        assert not task_servers[kind].tasks.score.supports_instruction
        assert (
            refused(task_servers[kind], score_request(instruction="be kind", label_token_ids=[5] * (kind == "causal")))
            is INVALID
        )


def test_scr_11_to_14_every_candidate_once_in_order_with_a_rankable_score(cross):
    request = score_request([group("a", TEXTS, "x"), group("b c", ["d"], "y")])
    response = call(cross, request)
    assert response.granularity == SEQUENCE and response.semantics == PROBABILITIES and response.normalization == NONE
    assert response.HasField("higher_is_better") and response.higher_is_better, "SCR-14"
    for group_index, (found, asked) in enumerate(zip(response.groups, request.groups, strict=True)):
        assert found.HasField("group_index") and (found.group_id, found.group_index) == (asked.group_id, group_index)
        for index, (candidate, wanted) in enumerate(zip(found.candidates, asked.candidates, strict=True)):
            assert candidate.HasField("candidate_index") and candidate.candidate_index == index
            assert candidate.candidate_id == wanted.item_id and tensor(candidate.scores).shape == (1,)
    names = {field.name for field in pb.ScoreCandidateOutput.DESCRIPTOR.fields}
    assert names == {"candidate_id", "candidate_index", "scores", "token_ids"}, "SCR-13: no field for a document"


def test_scr_15_candidates_have_no_token_ids_by_sequence(causal):
    response = call(causal, score_request(label_token_ids=[5]))
    assert all(not candidate.token_ids for candidate in response.groups[0].candidates)
    assert response.higher_is_better, "one score per candidate"


@pytest.mark.parametrize(("kind", "labels"), [("cross", []), ("causal", [5, 6])])
def test_scr_16_groups_of_one_give_the_scores_of_one_group(task_servers, kind, labels):
    one = call(task_servers[kind], score_request([group("how are you ", TEXTS)], label_token_ids=labels))
    several = [group("how are you ", [text], f"g{index}") for index, text in enumerate(TEXTS)]
    split = call(task_servers[kind], score_request(several, label_token_ids=labels))
    assert np.abs(scores(one) - scores(split)).max() < 1e-5


def test_scr_18_ranking_is_the_clients(cross):
    with Client(cross.target) as client:
        response = client.score("how are you", [*TEXTS, TEXTS[0]])
    ranking, values = response.ranking(), response.scores
    assert sorted(ranking) == list(range(len(values))) and (np.diff(values[ranking]) <= 0).all()
    assert ranking.index(0) < ranking.index(len(TEXTS)), "ties by index"
