"""Shape in, shape out: what is one prompt, what a batch, and what is refused before anything runs."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from openengine import (
    GenerateRequest,
    GenerationResult,
    InvalidArgument,
    SamplingParams,
    StoppingOptions,
)
from tests.scripted import GREEDY, letters

ABCD = letters("abcd")
ONE_PROMPT = {
    "text": "abcd",
    "list": ABCD,
    "tuple": tuple(ABCD),
    "range": range(1, 5),
    "array": np.array(ABCD),
    "uint8 array": np.array(ABCD, dtype=np.uint8),
    "list of numpy integers": [np.int16(i) for i in ABCD],
    "request": GenerateRequest(
        token_ids=ABCD, sampling=SamplingParams(temperature=0.0), stopping=StoppingOptions(max_tokens=5)
    ),
}


@pytest.mark.parametrize("kind", ONE_PROMPT)
def test_one_prompt_of_any_kind_gives_one_result(engine, kind):
    prompt = ONE_PROMPT[kind]
    result = engine.generate(prompt, **({} if isinstance(prompt, GenerateRequest) else GREEDY))
    assert isinstance(result, GenerationResult)
    assert result.token_ids == engine.generate(ABCD, **GREEDY).token_ids and result.usage.prompt_tokens == 4


def pandas_series(values):
    return pytest.importorskip("pandas").Series(values)


def torch_tensor(values):
    import torch

    return torch.tensor(values)


BATCHES = {
    "list of texts": lambda: ["abcd", "ab"],
    "tuple": lambda: ("abcd", "ab"),
    "list of ids": lambda: [ABCD, letters("ab")],
    "mixed": lambda: ["abcd", np.array(letters("ab"))],
    "generator": lambda: (text for text in ["abcd", "ab"]),
    "object array": lambda: np.array(["abcd", "ab"], dtype=object),
    "text array": lambda: np.array(["abcd", "ab"]),
    "series": lambda: pandas_series(["abcd", "ab"]),
    "dict values": lambda: {"x": "abcd", "y": "ab"}.values(),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_of_any_kind_gives_a_list_in_order(engine, kind):
    results = engine.generate(BATCHES[kind](), **GREEDY)
    assert isinstance(results, list) and [r.usage.prompt_tokens for r in results] == [4, 2]
    assert [r.token_ids for r in results] == [engine.generate(p, **GREEDY).token_ids for p in ("abcd", "ab")]


@pytest.mark.parametrize("make", [np.array, torch_tensor], ids=["array", "tensor"])
def test_rows_of_token_ids_are_a_batch_and_a_single_row_one_prompt(engine, make):
    rows = make([letters("abcd"), letters("efgh")])
    results = engine.generate(rows, **GREEDY)
    assert [r.token_ids for r in results] == [engine.generate(t, **GREEDY).token_ids for t in ("abcd", "efgh")]
    assert engine.generate(rows[0], **GREEDY).token_ids == results[0].token_ids


@pytest.mark.parametrize("empty", [[], (), np.array([]), iter([])], ids=["list", "tuple", "array", "iterator"])
def test_an_empty_batch_gives_an_empty_list(engine, empty):
    assert engine.generate(empty) == [] and list(engine.as_completed([])) == []
    assert asyncio.run(engine.agenerate([])) == []


def test_a_list_of_one_is_a_batch_of_one(engine):
    (result,) = engine.generate(["abcd"], **GREEDY)
    assert result.token_ids == engine.generate("abcd", **GREEDY).token_ids


NO_PROMPTS = {
    "none": None,
    "number": 5,
    "numpy number": np.int64(5),
    "float": 1.5,
    "bytes": b"abc",
    "bytearray": bytearray(b"abc"),
    "dict": {"prompt": "a"},
    "scalar array": np.array(5),
    "float array": np.array([1.0, 2.0]),
    "cube": np.zeros((2, 2, 2), dtype=int),
    "none in a batch": ["abc", None],
    "number in a batch of texts": ["abc", 5],
    "text among ids": [1, "abc"],
    "float among ids": [1, 2.0],
    "bool first": [True, 2],
    "bool among ids": [1, True],
    "numpy bool among ids": [1, np.True_],
    "negative id": [1, -1],
    "id beyond the vocabulary": [1, 27],
    "enormous id": [1, 2**63],
    "more enormous id": [1, 2**70],
    "nested": [[[1, 2]]],
    "ragged": [1, [2, 3]],
    "no ids": [[]],
    "generator in a batch": [(i for i in [1, 2])],
    "lone surrogate": "a\ud800",
    "empty text": "",
    "empty text in a batch": ["abc", ""],
    "set of ids": {1, 2},
}


@pytest.mark.parametrize("kind", NO_PROMPTS)
def test_what_is_no_prompt_is_refused_before_anything_runs(engine, kind):
    with pytest.raises(InvalidArgument):
        engine.generate(NO_PROMPTS[kind], max_tokens=1)
    with pytest.raises(InvalidArgument):
        asyncio.run(engine.agenerate(NO_PROMPTS[kind], max_tokens=1))
    assert engine._loop.num_steps == 0


def test_a_frame_of_several_columns_is_refused_instead_of_running_its_column_names(engine):
    pandas = pytest.importorskip("pandas")
    with pytest.raises(InvalidArgument, match="column"):
        engine.generate(pandas.DataFrame({"prompt": ["a"], "answer": ["b"]}))


@pytest.mark.parametrize("value", ["abc", [1, 2]], ids=["text", "ids"])
def test_as_completed_takes_a_batch_and_no_single_prompt(engine, value):
    with pytest.raises(InvalidArgument, match="into a list"):
        engine.as_completed(value)


@pytest.mark.parametrize("method", ["submit", "stream", "astream"])
def test_one_request_methods_take_no_batch(engine, method):
    for batch in (["a", "b"], []):
        with pytest.raises(InvalidArgument, match="batch"):
            getattr(engine, method)(batch)
