"""Embed and Classify over gRPC: options, outputs, and what is not advertised."""

from __future__ import annotations

import numpy as np
import pytest

from tests.checkpoints import VOCAB_SIZE
from tests.rpc.task_serving import (
    DENSE,
    INVALID,
    LOG_PROBABILITIES,
    LOGITS,
    PROBABILITIES,
    SEQUENCE,
    SIMILARITY,
    SPARSE,
    TOKEN,
    call,
    classify_request,
    embed_request,
    refused,
    tensor,
)
from tests.task_models import LABELS, TEXTS

# ---- EMB -----------------------------------------------------------------------------------------


def test_emb_01_05_07_08_absent_options_are_the_models_and_outputs_say_what_they_are(embedding):
    response = call(embedding, embed_request())
    assert len(response.outputs) == len(TEXTS)
    for index, output in enumerate(response.outputs):
        assert output.item_id == f"i{index}" and output.HasField("input_index") and output.input_index == index
        assert output.granularity == SEQUENCE and output.WhichOneof("embedding") == "dense"
        assert tensor(output.dense).shape == (embedding.tasks.embed.dimension,), "TSK-13"
        assert not output.token_ids
    explicit = call(embedding, embed_request(granularity=SEQUENCE, normalize=False, encoding=DENSE))
    assert [list(o.dense.values) for o in explicit.outputs] == [list(o.dense.values) for o in response.outputs]


def test_emb_06_09_tokens_have_vectors_and_their_ids(embedding):
    response = call(embedding, embed_request(granularity=TOKEN, normalize=True))
    for output, text in zip(response.outputs, TEXTS):
        values = tensor(output.dense)
        assert list(output.token_ids) == embedding.engine.tokenize(text) and output.granularity == TOKEN
        assert values.shape == (len(output.token_ids), embedding.tasks.embed.dimension)
        assert np.allclose(np.linalg.norm(values, axis=1), 1, atol=1e-5), "EMB-09"


def test_emb_02_09_normalize_is_done_or_not_as_asked(embedding):
    raw = [tensor(o.dense) for o in call(embedding, embed_request(normalize=False)).outputs]
    for output, values in zip(call(embedding, embed_request(normalize=True)).outputs, raw):
        assert np.allclose(tensor(output.dense), values / np.linalg.norm(values), atol=1e-6)


def test_emb_02_what_is_not_advertised_is_refused(task_servers):
    assert refused(task_servers["embedding"], embed_request(encoding=SPARSE)) is INVALID
    sparse = task_servers["sparse"]
    assert not sparse.tasks.embed.supports_normalization and not sparse.tasks.embed.supports_dimension_override
    for options in ({"encoding": DENSE}, {"granularity": TOKEN}, {"normalize": True}, {"dimensions": 5}):
        assert refused(sparse, embed_request(**options)) is INVALID
    assert call(sparse, embed_request(encoding=SPARSE, granularity=SEQUENCE)).outputs


def test_emb_03_04_dimensions_reduce_and_never_pad(embedding):
    native = embedding.tasks.embed.dimension
    assert embedding.tasks.embed.supports_dimension_override
    raw = tensor(call(embedding, embed_request(["a b"])).outputs[0].dense)
    for count in (1, 7, native):
        cut = tensor(call(embedding, embed_request(["a b"], dimensions=count)).outputs[0].dense)
        assert np.array_equal(cut, raw[:count])
        normal = tensor(call(embedding, embed_request(["a b"], dimensions=count, normalize=True)).outputs[0].dense)
        assert np.allclose(normal, raw[:count] / np.linalg.norm(raw[:count]), atol=1e-6)
    for count in (0, native + 1):
        assert refused(embedding, embed_request(["a"], dimensions=count)) is INVALID


def test_tsk_14_sparse_vectors_have_ascending_entries_of_the_vocabulary(task_servers):
    for output in call(task_servers["sparse"], embed_request()).outputs:
        assert output.WhichOneof("embedding") == "sparse", "EMB-08"
        shape, indices = tuple(output.sparse.shape), list(output.sparse.indices)
        assert shape == (VOCAB_SIZE,) and len(indices) == len(output.sparse.values)
        assert indices == sorted(set(indices)) and all(index < VOCAB_SIZE for index in indices)
        assert len(indices) <= task_servers["sparse"].tasks.embed.max_output_values_per_item


# ---- CLS -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["classifier", "tagger", "cross"])
def test_cls_01_02_04_to_07_outputs_are_aligned_and_semantics_agree(task_servers, kind):
    served, by_token = task_servers[kind], kind == "tagger"
    found = {}
    for semantics in (LOGITS, PROBABILITIES, LOG_PROBABILITIES):
        response = call(served, classify_request(output_semantics=semantics))
        for index, output in enumerate(response.outputs):
            assert output.item_id == f"i{index}" and output.HasField("input_index") and output.input_index == index
            assert output.semantics == semantics and output.granularity == (TOKEN if by_token else SEQUENCE)
            values, tokens = tensor(output.scores), served.engine.tokenize(TEXTS[index])
            assert len(output.labels) == values.shape[-1]
            if kind != "cross":
                assert list(output.labels) == list(LABELS.values()), "CLS-05"
            assert values.ndim == 1 + by_token and (not by_token or len(values) == len(tokens)), "CLS-04"
            assert list(output.token_ids) == (tokens if by_token else []), "CLS-06"
            found.setdefault(semantics, []).append(values)
    for logits, probabilities, logs in zip(found[LOGITS], found[PROBABILITIES], found[LOG_PROBABILITIES]):
        assert probabilities.min() >= 0 and probabilities.max() <= 1
        assert np.allclose(np.exp(logs), probabilities, atol=1e-6)
        if kind == "cross":
            assert np.allclose(probabilities, 1 / (1 + np.exp(-logits)), atol=1e-6)
        else:
            assert np.allclose(probabilities.sum(-1), 1, atol=1e-6)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            assert np.allclose(probabilities, weights / weights.sum(-1, keepdims=True), atol=1e-6)


def test_cls_03_what_is_not_advertised_is_refused(task_servers):
    assert refused(task_servers["classifier"], classify_request(granularity=TOKEN)) is INVALID
    assert refused(task_servers["tagger"], classify_request(granularity=SEQUENCE)) is INVALID
    for kind in ("classifier", "tagger", "cross"):
        assert refused(task_servers[kind], classify_request(output_semantics=SIMILARITY)) is INVALID
