"""Raw arrays to vectors, probabilities and scores: what the semantics mean, and which go together."""

from __future__ import annotations

import numpy as np
import pytest

from openengine.core.task_kinds import TaskKind
from openengine.core.task_output import (
    ClassHead,
    ScoreHead,
    embed_outputs,
    label_scores,
    resolve_label_scores,
    score_outputs,
)
from openengine.core.task_specs import ScoreSpec
from openengine.errors import InvalidArgument
from openengine.task_types import (
    ScoreGroup,
    ScoreNormalization,
    TaskInput,
    TaskOutputGranularity,
    TaskValueSemantics,
)

LOGITS, PROBABILITIES, LOG_PROBABILITIES = (
    TaskValueSemantics.LOGITS,
    TaskValueSemantics.PROBABILITIES,
    TaskValueSemantics.LOG_PROBABILITIES,
)
NONE, SOFTMAX = ScoreNormalization.NONE, ScoreNormalization.SOFTMAX
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def embedded(values: list[np.ndarray], kind: TaskKind = TaskKind.EMBED, **options):
    return embed_outputs(values, [f"i{n}" for n in range(len(values))], kind=kind, **{"normalize": False, **options})


# ---- embed


def test_emb_05_and_emb_07_vectors_come_in_order_as_they_are():
    values = [normal(8) for _ in range(3)]
    outputs = embedded(values)
    assert [(o.item_id, o.input_index, o.embedding.shape) for o in outputs] == [
        ("i0", 0, (8,)),
        ("i1", 1, (8,)),
        ("i2", 2, (8,)),
    ]
    assert all(np.array_equal(o.numpy(), v) for o, v in zip(outputs, values))
    assert {o.granularity for o in outputs} == {TaskOutputGranularity.SEQUENCE}


def test_emb_04_and_e10_dimensions_are_cut_first_and_normalized_then():
    values = [normal(8) for _ in range(3)]
    cut = embedded(values, dimensions=3)
    both = embedded(values, dimensions=3, normalize=True)
    for output, normalized, value in zip(cut, both, values):
        assert np.array_equal(output.numpy(), value[:3])
        np.testing.assert_allclose(normalized.numpy(), value[:3] / np.linalg.norm(value[:3]), rtol=1e-6)


def test_emb_09_normalized_vectors_have_norm_one_whatever_their_size():
    values = [normal(8) * scale for scale in (1e-20, 1.0, 1e30)]
    for output in embedded(values, normalize=True):
        assert abs(np.linalg.norm(output.numpy().astype(np.float64)) - 1) < 1e-6


def test_a_vector_of_zeros_stays_one():
    (output,) = embedded([np.zeros(4, np.float32)], normalize=True)
    assert not output.numpy().any()


def test_emb_06_tokens_have_rows_with_their_ids_each_normalized_for_itself():
    values = [normal(2, 8), normal(5, 8)]
    outputs = embedded(values, TaskKind.EMBED_TOKENS, normalize=True, dimensions=4, token_ids=[[7, 8], [1, 2, 3, 4, 5]])
    assert [o.embedding.shape for o in outputs] == [(2, 4), (5, 4)]
    assert [o.token_ids for o in outputs] == [(7, 8), (1, 2, 3, 4, 5)]
    assert {o.granularity for o in outputs} == {TaskOutputGranularity.TOKEN}
    np.testing.assert_allclose(np.linalg.norm(outputs[1].numpy(), axis=1), 1, rtol=1e-6)


def test_tsk_14_sparse_weights_keep_their_entries():
    raw = np.array([[3, 299_999], [0.5, 2.0]], dtype=np.float32)
    (output,) = embedded([raw], TaskKind.EMBED_SPARSE, vocab_size=300_000)
    assert output.embedding.shape == (300_000,)
    assert output.embedding.indices.tolist() == [3, 299_999]
    assert output.numpy()[299_999] == 2.0


def test_a_text_without_any_weight_is_an_empty_sparse_vector():
    (output,) = embedded([np.empty((2, 0), np.float32)], TaskKind.EMBED_SPARSE, vocab_size=9)
    assert len(output.embedding.indices) == 0
    assert not output.numpy().any()


# ---- classify


def test_labels_and_kind_come_from_config_json():
    head = ClassHead.from_hf({"id2label": {"0": "bad", "1": "good"}, "problem_type": "multi_label_classification"}, 2)
    assert (head.labels, head.is_multi_label, head.is_regression) == (("bad", "good"), True, False)
    assert ClassHead.from_hf({}, 2).labels == ("LABEL_0", "LABEL_1")
    assert ClassHead.from_hf({"problem_type": "regression"}, 1).semantics == (LOGITS,)


@pytest.mark.parametrize(
    "config", [{"id2label": {"0": "a"}}, {"id2label": {"1": "a", "2": "b"}}, {"problem_type": "x"}]
)
def test_labels_that_do_not_fit_the_head_are_a_load_error(config):
    with pytest.raises(InvalidArgument, match="id2label|problem_type"):
        ClassHead.from_hf(config, 2)


def test_cls_07_probabilities_of_exclusive_classes_sum_to_one_and_logs_are_their_logs():
    head = ClassHead(("a", "b", "c"))
    values = [normal(3) * 5, np.array([0.0, 200.0, -200.0], np.float32)]
    by = {
        semantics: np.stack(
            [o.numpy() for o in head.outputs(values, ["x", "y"], kind=TaskKind.CLASSIFY, semantics=semantics)]
        )
        for semantics in head.semantics
    }
    np.testing.assert_allclose(by[PROBABILITIES].sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(by[PROBABILITIES], softmax(by[LOGITS]), rtol=1e-5)
    np.testing.assert_allclose(np.exp(by[LOG_PROBABILITIES]), by[PROBABILITIES], rtol=1e-5)
    assert np.isfinite(by[LOG_PROBABILITIES]).all()
    assert np.array_equal(by[LOGITS], np.stack(values))


@pytest.mark.parametrize("head", [ClassHead(("a", "b"), is_multi_label=True), ClassHead(("a",))], ids=str)
def test_cls_07_each_class_of_a_multi_label_head_has_its_own_probability(head):
    values = [normal(len(head.labels)) * 3]
    (output,) = head.outputs(values, ["x"], kind=TaskKind.CLASSIFY, semantics=PROBABILITIES)
    np.testing.assert_allclose(output.numpy(), 1 / (1 + np.exp(-values[0])), rtol=1e-5)
    (logs,) = head.outputs(values, ["x"], kind=TaskKind.CLASSIFY, semantics=LOG_PROBABILITIES)
    np.testing.assert_allclose(np.exp(logs.numpy()), output.numpy(), rtol=1e-5)


def test_cls_04_tokens_have_rows_with_their_ids_and_labels():
    head = ClassHead(("O", "PER"))
    values = [normal(3, 2), normal(1, 2)]
    outputs = head.outputs(
        values, ["x", "y"], kind=TaskKind.CLASSIFY_TOKENS, semantics=PROBABILITIES, token_ids=[[1, 2, 3], [4]]
    )
    assert [(o.scores.shape, o.token_ids, o.labels) for o in outputs] == [
        ((3, 2), (1, 2, 3), ("O", "PER")),
        ((1, 2), (4,), ("O", "PER")),
    ]
    np.testing.assert_allclose(outputs[0].numpy(), softmax(values[0]), rtol=1e-5)
    assert outputs[0].label == [("O", "PER")[i] for i in values[0].argmax(-1)]


# ---- score


def test_a_cross_encoder_of_one_label_scores_as_sentence_transformers_does():
    one = ClassHead(("r",))
    for activation, default in ((None, PROBABILITIES), ("sigmoid", PROBABILITIES), ("identity", LOGITS)):
        head = ScoreHead.of_classes(one, ScoreSpec(activation=activation))
        assert head.resolve(None, None) == (default, NONE)
        assert head.higher_is_better
    values = [normal(1), normal(1)]
    np.testing.assert_allclose(head.scores(values, PROBABILITIES), 1 / (1 + np.exp(-np.stack(values))), rtol=1e-6)
    assert np.array_equal(head.scores(values, LOGITS), np.stack(values))


def test_scores_of_several_classes_do_not_rank_and_may_be_softmaxed():
    head = ScoreHead.of_classes(ClassHead(("contradiction", "entailment", "neutral")), ScoreSpec())
    assert head.higher_is_better is None
    assert head.resolve(None, None) == (LOGITS, NONE)
    assert head.resolve(None, SOFTMAX) == (PROBABILITIES, SOFTMAX)
    assert head.resolve(LOG_PROBABILITIES, None) == (LOG_PROBABILITIES, SOFTMAX)
    for wrong in ((LOGITS, SOFTMAX), (PROBABILITIES, NONE), (TaskValueSemantics.REWARD, None)):
        with pytest.raises(InvalidArgument):
            head.resolve(*wrong)
    values = [normal(3)]
    np.testing.assert_allclose(head.scores(values, PROBABILITIES)[0], softmax(values[0]), rtol=1e-6)


def test_scr_06_a_single_native_score_has_no_softmax():
    head = ScoreHead.of_classes(ClassHead(("r",)), ScoreSpec())
    assert head.normalizations == (NONE,)
    with pytest.raises(InvalidArgument, match="normalization none, not softmax"):
        head.resolve(None, SOFTMAX)


def test_e6_a_label_score_is_p_yes_of_p_yes_and_p_no():
    head = ScoreHead.of_labels((9693, 2152))
    raw = [np.array([yes, no, 30.0], np.float32) for yes, no in ((12.0, 10.0), (-3.0, 4.0), (90.0, -90.0))]
    yes, no = np.stack(raw)[:, 0], np.stack(raw)[:, 1]
    expected = np.exp(yes - np.logaddexp(yes, no))
    assert head.resolve(None, None) == (PROBABILITIES, NONE)
    np.testing.assert_allclose(head.scores(raw, PROBABILITIES)[:, 0], expected, rtol=1e-6)
    np.testing.assert_allclose(head.scores(raw, LOGITS)[:, 0], yes - no)
    assert np.isfinite(head.scores(raw, LOG_PROBABILITIES)).all()


def test_a_label_score_of_one_token_is_its_logit():
    head = ScoreHead.of_labels((5,), ScoreSpec(activation="identity"))
    raw = [np.array([1.5, 30.0], np.float32)]
    assert head.resolve(None, None) == (LOGITS, NONE)
    assert head.scores(raw, LOGITS).tolist() == [[1.5]]


def test_scr_06_labels_are_probabilities_among_themselves_or_in_the_vocabulary():
    logits = normal(50)
    labels = [3, 1, 40]
    raw = [np.append(logits[labels], np.logaddexp.reduce(logits))]
    everywhere = softmax(logits)[labels]
    np.testing.assert_allclose(label_scores(raw, PROBABILITIES, NONE)[0], everywhere, rtol=1e-5)
    np.testing.assert_allclose(label_scores(raw, LOG_PROBABILITIES, NONE)[0], np.log(everywhere), rtol=1e-5)
    np.testing.assert_allclose(label_scores(raw, PROBABILITIES, SOFTMAX)[0], softmax(logits[labels]), rtol=1e-5)
    assert np.array_equal(label_scores(raw, LOGITS, NONE)[0], logits[labels])


def test_scr_06_what_is_left_open_for_labels_and_what_is_refused():
    assert resolve_label_scores(None, None, 2) == (PROBABILITIES, SOFTMAX)
    assert resolve_label_scores(None, None, 1) == (PROBABILITIES, NONE)  # among one label it would always be 1
    assert resolve_label_scores(LOGITS, None, 2) == (LOGITS, NONE)
    assert resolve_label_scores(None, NONE, 2) == (PROBABILITIES, NONE)
    assert resolve_label_scores(LOG_PROBABILITIES, None, 2) == (LOG_PROBABILITIES, SOFTMAX)
    with pytest.raises(InvalidArgument, match="not logits"):
        resolve_label_scores(LOGITS, SOFTMAX, 2)
    with pytest.raises(InvalidArgument, match="not as similarity"):
        resolve_label_scores(TaskValueSemantics.SIMILARITY, None, 2)


def test_a_certain_label_has_a_probability_of_at_most_one():
    raw = [np.array([10.000001, 10.0], np.float32)]
    assert label_scores(raw, PROBABILITIES, NONE).tolist() == [[1.0]]


def test_scr_12_scores_go_back_to_their_groups_and_candidates_in_order():
    def group(name: str, count: int) -> ScoreGroup:
        candidates = tuple(TaskInput(item_id=f"{name}{n}", text="d") for n in range(count))
        return ScoreGroup(group_id=name, query=TaskInput(item_id="q", text="q"), candidates=candidates)

    scores = np.arange(6, dtype=np.float32).reshape(3, 2)
    first, second = score_outputs([group("a", 1), group("b", 2)], scores)
    assert (first.group_id, first.group_index, second.group_index) == ("a", 0, 1)
    assert [
        (c.candidate_id, c.candidate_index, c.numpy().tolist()) for c in (*first.candidates, *second.candidates)
    ] == [
        ("a0", 0, [0, 1]),
        ("b0", 0, [2, 3]),
        ("b1", 1, [4, 5]),
    ]
