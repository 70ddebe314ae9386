"""Pooling with a model's own heads: which rows are needed, and that items keep apart."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import openengine.core.pooler as pooler_module
from openengine.core.heads import TaskHead
from openengine.core.pooler import Pooler
from openengine.core.task_kinds import TaskKind
from openengine.core.task_specs import EmbeddingSpec
from openengine.core.task_work import TaskWork
from openengine.ops.linear import Linear

CPU = torch.device("cpu")
LENS = [3, 1, 5]


def linear(out_features: int) -> Linear:
    made = Linear.empty(16, {"out": out_features}, bias=True, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(out_features)
    for _, tensor in made.tensors():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    made.finish()
    return made


def hidden() -> torch.Tensor:
    return torch.randn(sum(LENS), 16, generator=torch.Generator().manual_seed(9))


def pooler_of(head: TaskHead | None = None, spec: EmbeddingSpec | None = None) -> Pooler:
    return Pooler(SimpleNamespace(device=CPU, task_head=head), spec)


@pytest.mark.parametrize(
    ("pooling", "include_prompt", "rows"),
    [
        (("cls",), True, "first"),
        (("cls",), False, "all"),
        (("last",), True, "last"),
        (("last",), False, "last"),
        (("mean",), True, "all"),
        (("cls", "last"), True, "all"),
    ],
)
def test_an_embedder_needs_only_the_rows_that_it_pools(pooling, include_prompt, rows):
    pooler = pooler_of(spec=EmbeddingSpec(pooling, 16, include_prompt=include_prompt))
    assert pooler.rows(TaskKind.EMBED) == rows
    assert pooler.rows(TaskKind.EMBED_TOKENS) == "all"


@pytest.mark.parametrize(("pooling", "rows"), [("cls", "first"), ("last", "last"), ("mean", "all")])
@pytest.mark.parametrize("kind", [TaskKind.CLASSIFY, TaskKind.SCORE])
def test_a_head_gets_the_rows_that_it_is_for(kind, pooling, rows):
    head = TaskHead(pooling, 4, linear(4))
    pooler, x = pooler_of(head), hidden()
    assert pooler.rows(kind) == rows
    parts = x.split(LENS)
    vectors = {"cls": [p[0] for p in parts], "last": [p[-1] for p in parts], "mean": [p.mean(0) for p in parts]}
    expected = head(torch.stack(vectors[pooling])).numpy()
    for given in (x, *([torch.stack(vectors[pooling])] if rows != "all" else [])):
        result = pooler.pool(TaskWork(kind), given, LENS)
        np.testing.assert_allclose(np.stack(result), expected, rtol=1e-5, atol=1e-6)


def test_tokens_are_split_by_item_and_keep_no_others_alive():
    head, x = TaskHead(None, 4, linear(4)), hidden()
    for kind, expected in ((TaskKind.CLASSIFY_TOKENS, head(x)), (TaskKind.EMBED_TOKENS, x)):
        result = pooler_of(head, EmbeddingSpec(("mean",), 16)).pool(TaskWork(kind), x, LENS)
        assert [len(rows) for rows in result] == LENS
        assert all(rows.base is None for rows in result)
        np.testing.assert_allclose(np.concatenate(result), expected.numpy())


@pytest.mark.parametrize("rows_at_once", [1, 2, 100])
def test_label_logits_come_with_the_logsumexp_over_the_vocabulary(monkeypatch, rows_at_once):
    lm_head = linear(40)
    monkeypatch.setattr(pooler_module, "_CHUNK_BYTES", rows_at_once * 4 * 40)
    model = SimpleNamespace(device=CPU, task_head=None, logits=lm_head, config=SimpleNamespace(vocab_size=40))
    x = hidden()[:3]
    result = np.stack(Pooler(model, None).pool(TaskWork(TaskKind.LABELS, (7, 2)), x, LENS))
    logits = lm_head(x)
    expected = torch.cat([logits[:, [7, 2]], logits.logsumexp(1, keepdim=True)], 1)
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-5)


def test_bfloat16_rows_give_float32_arrays():
    spec = EmbeddingSpec(("mean",), 16)
    for kind in (TaskKind.EMBED, TaskKind.EMBED_TOKENS):
        assert {a.dtype for a in pooler_of(spec=spec).pool(TaskWork(kind), hidden().bfloat16(), LENS)} == {
            np.dtype(np.float32)
        }
