"""What results of tasks offer beside their fields: arrays, labels, rankings, columns."""

from __future__ import annotations

import numpy as np
import pytest

from openengine import (
    ClassificationOutput,
    ClassifyResponse,
    DenseFloatTensor,
    EmbeddingOutput,
    EmbedResponse,
    InvalidArgument,
    ScoreCandidateOutput,
    ScoreGroupOutput,
    ScoreNormalization,
    ScoreResponse,
    SparseFloatTensor,
    TaskOutputGranularity,
    TaskValueSemantics,
)

SEQUENCE, TOKEN = TaskOutputGranularity.SEQUENCE, TaskOutputGranularity.TOKEN


def dense(values) -> DenseFloatTensor:
    array = np.asarray(values, np.float32)
    return DenseFloatTensor(shape=array.shape, values=array.reshape(-1))


def embeddings(*values, granularity=SEQUENCE) -> EmbedResponse:
    outputs = tuple(
        EmbeddingOutput(item_id=str(n), input_index=n, granularity=granularity, embedding=dense(v))
        for n, v in enumerate(values)
    )
    return EmbedResponse(request_id="r", outputs=outputs)


def classes(*values, labels=("bad", "good"), granularity=SEQUENCE) -> ClassifyResponse:
    outputs = tuple(
        ClassificationOutput(
            item_id=str(n),
            input_index=n,
            granularity=granularity,
            semantics=TaskValueSemantics.PROBABILITIES,
            scores=dense(v),
            labels=labels,
        )
        for n, v in enumerate(values)
    )
    return ClassifyResponse(request_id="r", outputs=outputs)


def scores(*groups, higher_is_better: bool | None = True) -> ScoreResponse:
    made = tuple(
        ScoreGroupOutput(
            group_id=f"g{n}",
            group_index=n,
            candidates=tuple(
                ScoreCandidateOutput(candidate_id=f"c{i}", candidate_index=i, scores=dense(np.atleast_1d(v)))
                for i, v in enumerate(group)
            ),
        )
        for n, group in enumerate(groups)
    )
    return ScoreResponse(
        request_id="r",
        groups=made,
        granularity=SEQUENCE,
        semantics=TaskValueSemantics.PROBABILITIES,
        normalization=ScoreNormalization.NONE,
        higher_is_better=higher_is_better,
    )


def test_embeddings_are_an_array_and_a_sequence():
    response = embeddings([1, 2, 3], [4, 5, 6])
    assert len(response) == 2
    assert response.numpy().dtype == np.float32
    assert response.numpy().tolist() == [[1, 2, 3], [4, 5, 6]]
    assert np.asarray(response).shape == (2, 3)
    assert np.array(response, dtype=np.float64).dtype == np.float64
    assert [output.numpy().tolist() for output in response] == [[1, 2, 3], [4, 5, 6]]
    assert response[-1].numpy().shape == (3,)
    assert embeddings().numpy().shape == (0, 0)


def test_embeddings_by_token_have_no_common_array_unless_they_are_as_long():
    response = embeddings([[1, 2]], [[3, 4], [5, 6]], granularity=TOKEN)
    with pytest.raises(InvalidArgument, match=r"different shapes .*result\[0\]\.numpy"):
        response.numpy()
    assert response[1].numpy().shape == (2, 2)


def test_a_sparse_vector_unfolds():
    tensor = SparseFloatTensor(shape=(2, 3), indices=[1, 5], values=[0.5, 2])
    assert tensor.numpy().tolist() == [[0, 0.5, 0], [0, 0, 2]]
    assert np.asarray(tensor).dtype == np.float32


def test_the_repr_of_a_result_is_short():
    response = embeddings(np.zeros(1000), np.ones(1000))
    assert len(repr(response)) < 600
    assert "nonzero=2" in repr(SparseFloatTensor(shape=(9,), indices=[1, 5], values=[0.5, 2]))


def test_labels_are_those_of_the_highest_scores():
    response = classes([0.9, 0.1], [0.2, 0.8])
    assert response.labels == ["bad", "good"]
    assert response.scores.shape == (2, 2)
    assert response[1].label == "good"
    assert classes([0.1, 0.9], labels=()).labels == ["1"]
    assert classes([[0.9, 0.1], [0.2, 0.8]], granularity=TOKEN).labels == [["bad", "good"]]


def test_scores_come_in_the_order_of_the_request():
    response = scores([0.1, 0.7, 0.3])
    np.testing.assert_allclose(response.scores, [0.1, 0.7, 0.3])
    assert len(response) == 3
    assert response[1].candidate_id == "c1"
    assert scores([0.1], [0.2], [0.3]).scores.shape == (3,)
    assert scores([[0.1, 0.9], [0.2, 0.8]]).scores.shape == (2, 2)


def test_scr_18_a_ranking_is_stable_and_goes_by_the_better_end():
    assert scores([0.1, 0.7, 0.3, 0.7]).ranking() == [1, 3, 2, 0]
    assert scores([0.1, 0.7, 0.3, 0.7], higher_is_better=False).ranking() == [0, 2, 1, 3]


def test_scr_18_scores_that_do_not_rank_are_not_ranked():
    with pytest.raises(InvalidArgument, match=r"do not rank.*has 2.*labels=\[' yes'\].*scores\[:, 0\]"):
        scores([[0.1, 0.9]]).ranking()
    with pytest.raises(InvalidArgument, match="do not rank: whether higher is better"):
        scores([0.1, 0.9], higher_is_better=None).ranking()


def test_a_ranking_of_several_groups_names_one():
    response = scores([0.1, 0.7], [0.9, 0.2])
    with pytest.raises(InvalidArgument, match=r"2 groups; name one"):
        response.ranking()
    assert response.ranking(1) == [0, 1]


def test_a_data_frame_takes_to_dict():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(scores([0.25, 0.75], [0.5]).to_dict())
    assert frame["score"].tolist() == [0.25, 0.75, 0.5]
    assert frame["group_id"].tolist() == ["g0", "g0", "g1"]
    assert pandas.DataFrame(embeddings([1, 2], [3, 4]).to_dict())["embedding"][1].tolist() == [3, 4]
    assert pandas.DataFrame(classes([0.9, 0.1]).to_dict())["label"].tolist() == ["bad"]
