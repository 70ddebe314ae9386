"""Options by keyword or in a request: what they mean, and that every bad value is refused before anything runs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import numpy as np
import pytest

from openengine import (
    AllCandidates,
    CandidateTokenSelection,
    GenerateRequest,
    GuidedDecoding,
    InvalidArgument,
    KvOptions,
    KvSessionRef,
    MediaItem,
    ModelNotFound,
    OpenEngineError,
    RequestNotFound,
    ResponseOptions,
    RoleMismatch,
    SamplingParams,
    StopCondition,
    StoppingOptions,
    UnsupportedFeature,
    UnsupportedTask,
)
from tests.scripted import ABC, GREEDY, hashed, letters, scripted_engine
from tests.waiting import load


def test_keywords_fill_the_fields_of_every_option_group(engine):
    result = engine.generate(
        "abcd", temperature=0.0, max_tokens=3, stop=["zz", "yy"], stop_token_ids=[26], logprobs=2, prompt_logprobs=1,
        cache_salt="s", priority=-3, metadata={"user": "u"}, request_id="mine",
    )  # fmt: skip
    assert result.request_id == "mine" and result.sampling.temperature == 0.0 and result.stopping.max_tokens == 3
    assert [c.stop_text or c.stop_token_id for c in result.stopping.conditions] == ["zz", "yy", 26]
    assert [len(t.candidates) for t in result.tokens] == [2] * 3 and [len(t.candidates) for t in result.prompt] == [
        0,
        1,
        1,
        1,
    ]


@pytest.mark.parametrize(
    ("value", "candidates"), [(True, 0), (0, 0), (3, 3), (np.int64(2), 2), (False, None), (None, None)]
)
def test_logprobs_takes_a_count_or_a_yes_or_no(engine, value, candidates):
    result = engine.generate("abcd", logprobs=value, prompt_logprobs=value, **GREEDY)
    if candidates is None:
        assert result.logprobs is None and result.prompt is None
    else:
        assert result.logprobs.shape == (5,) and len(result.tokens[0].candidates) == candidates
        assert result.prompt[0].logprob is None and len(result.prompt[1].candidates) == candidates


def test_keywords_override_the_fields_of_sampling_params(engine):
    result = engine.generate("ab", SamplingParams(temperature=0.9, top_k=5), temperature=0.0, max_tokens=1)
    assert (result.sampling.temperature, result.sampling.top_k) == (0.0, 5)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("max_token", "max_tokens"), ("temprature", "temperature"), ("stop_strings", "stop"), ("n", "num_sequences")],
)
def test_an_unknown_keyword_is_refused_with_a_suggestion_everywhere(engine, name, suggestion):
    calls = [
        engine.generate,
        engine.submit,
        engine.stream,
        engine.astream,
        lambda *a, **k: asyncio.run(engine.agenerate(*a, **k)),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match=f"{name}.*{suggestion}"):
            call("abc", **{name: 1})
    for call in (engine.generate, engine.as_completed):
        # The call is at fault, not an item of it.
        with pytest.raises(InvalidArgument, match=rf"^unknown option '{name}'"):
            call(["abc"], on_error="return", **{name: 1})


def test_options_beside_a_request_are_refused_and_named(engine):
    request = GenerateRequest(prompt="abc")
    with pytest.raises(InvalidArgument, match="sampling, max_tokens, stop into it"):
        engine.generate(request, SamplingParams(), stop="x", max_tokens=3)
    with pytest.raises(InvalidArgument, match=r"item 1 of 2.*max_tokens"):
        engine.generate(["abc", request], max_tokens=3)


NAN, INF = float("nan"), float("inf")
BAD_OPTIONS = [
    *[{"temperature": v} for v in (-0.1, NAN, INF, "hot", True, 10**400, [1], np.nan, np.array([1.0, 2.0]))],
    *[{"top_p": v} for v in (0, -0.1, 1.0001, NAN, "x")],
    *[{"top_k": v} for v in (-2, 1.5, 5.0, "x", True, 2**31)],
    *[{"min_p": v} for v in (-0.1, 1.1, NAN)],
    *[{"frequency_penalty": v} for v in (-2.1, 2.1, INF)],
    *[{"presence_penalty": v} for v in (-2.1, 2.1, NAN)],
    *[{"repetition_penalty": v} for v in (0, -1, INF, NAN)],
    *[{"seed": v} for v in (-1, 2**64, 1.0, "x", True)],
    *[{"num_sequences": v} for v in (0, -1, 65, 1.0, True)],
    *[{"max_tokens": v} for v in (-1, 1.0, "x", True, 2**40, NAN)],
    *[{"min_tokens": v} for v in (-1, 1.0, "x")],
    {"min_tokens": 5, "max_tokens": 4},
    {"min_tokens": 1, "stop_token_ids": range(27)},
    *[{"stop": v} for v in (5, [5], "", [""], b"x", [None], {"x": 1}, "\ud800", ["a", 1.5], np.array("x"))],
    {"stop": "x" * 65537},
    {"stop": [f"{i:04}" for i in range(16385)]},
    *[{"stop_token_ids": v} for v in (-1, 27, 1.5, "5", [1.5], [True], True, [None], [[1]], {1: 2}, 2**80)],
    {"conditions": [StopCondition(stop_token_id=1)] * (2**18 + 1)},
    *[{"conditions": v} for v in ("x", ["x"], [StopCondition()], [StopCondition(stop_text="a", stop_token_id=1)], 5)],
    *[{"ignore_eos": v} for v in (1, "yes", 0.0)],
    {"include_stop_in_output": "yes"},
    *[{"logprobs": v} for v in (-1, 1.5, "3", 28, 10**9, [1], np.array([1, 2]))],
    *[{"prompt_logprobs": v} for v in (-1, 1.5, "3", 28)],
    {"logprobs": 0, "return_output_logprobs": False},
    {"logprobs": False, "return_output_logprobs": True},
    {"logprobs": 2, "output_candidates": CandidateTokenSelection(top_n=1)},
    {"return_output_logprobs": 1},
    *[{"prompt_logprob_start": v, "prompt_logprobs": 1} for v in (-1, 4, 1.5)],
    *[{"output_candidates": v} for v in ("x", 5, CandidateTokenSelection())],
    {"output_candidates": CandidateTokenSelection(top_n=1, token_ids=(1,))},
    *[{"output_candidates": CandidateTokenSelection(token_ids=v)} for v in ((), 5, "ab", (27,), (-1,), (True,))],
    *[{"output_candidates": CandidateTokenSelection(token_ids=v)} for v in ((1, 1), (1.5,), (None,), np.array(1))],
    *[{"output_candidates": CandidateTokenSelection(all=v)} for v in (True, False)],
    {"output_candidates": CandidateTokenSelection(top_n=28)},
    {"output_candidates": CandidateTokenSelection(top_n=1), "return_output_logprobs": False},
    *[{"cache_salt": v} for v in ("", 5, "\udfff", b"x")],
    {"bypass_prefix_cache": 1},
    *[{"data_parallel_rank": v} for v in (1, -1, "0", 0.0)],
    {"session": "s"},
    *[{"priority": v} for v in ("x", 1.5, 2**31, -(2**31) - 1, True)],
    *[{"request_id": v} for v in ("", 5, b"x", "\ud800", ["x"])],
    {"model": 5},
    *[{"metadata": v} for v in (3, "x", ["x"])],
    *[{"media": v} for v in (5, "x", ["x"])],
    {"lora_name": 5},
    {"guided": "x"},
    {"choice": "abc"},
    {"choice": 5},
    {"json_schema": {"a": {1, 2}}},
    {"json_object": True, "regex": "a"},
    {"tools": []},
    {"template_kwargs": {}},
]  # fmt: skip


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=lambda options: f"{options!r:.60}")
def test_smp_stp_lgp_kvo_a_value_out_of_range_or_of_another_type_is_refused_before_anything_runs(engine, options):
    for call in (engine.generate, engine.submit):
        with pytest.raises(InvalidArgument) as caught:
            call(letters("abcd"), **options)
        assert type(caught.value) is InvalidArgument and len(caught.value.message) < 1000
    with pytest.raises(InvalidArgument):
        engine.generate([letters("abcd"), "ab"], **options)
    assert engine._loop.num_steps == 0 and load(engine) == (0, 0, 0)


BAD_REQUESTS = [
    *[{name: value} for name in ("sampling", "stopping", "response", "kv") for value in ({}, None, "x", 5)],
    {"prompt": 5},
    {"prompt": b"abc"},
    {"prompt": "a", "token_ids": [1]},
    {"prompt": None},
    {"prompt": None, "token_ids": []},
    {"prompt": None, "token_ids": "abc"},
    {"prompt": None, "token_ids": 5},
    {"prompt": None, "token_ids": [1.0]},
    {"prompt": None, "token_ids": [[1]]},
    {"prompt": None, "token_ids": [None]},
    {"prompt": None, "token_ids": [1, True]},
    {"prompt": None, "token_ids": (i for i in [1, 2])},
    {"stopping": StoppingOptions(conditions="ab")},
    {"stopping": StoppingOptions(conditions=None)},
    {"stopping": StoppingOptions(conditions=({"stop_text": "a"},))},
    {"response": ResponseOptions(prompt_candidates={"top_n": 1})},
]


@pytest.mark.parametrize("fields", BAD_REQUESTS, ids=lambda fields: f"{fields!r:.60}")
def test_gen_03_04_a_malformed_request_is_refused_before_anything_runs(engine, fields):
    with pytest.raises(InvalidArgument):
        engine.submit(GenerateRequest(**{"prompt": "abc", **fields}))
    assert engine._loop.num_steps == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": "other"}, ModelNotFound),
        ({"model": ""}, ModelNotFound),
        ({"lora_name": "m"}, UnsupportedTask),
        ({"media": (MediaItem(url="x"),)}, UnsupportedFeature),
        ({"guided": GuidedDecoding(regex="a")}, UnsupportedFeature),
        ({"regex": "a"}, UnsupportedFeature),
        ({"session": KvSessionRef(session_id="s")}, RoleMismatch),
    ],
)
def test_gen_02_12_13_what_this_engine_cannot_honour_is_refused_by_its_own_error(engine, options, error):
    with pytest.raises(error):
        engine.submit("abc", **options)


NUMPY_SCALARS = {
    "temperature": np.float32(0.0), "top_p": np.float16(0.5), "top_k": np.int8(3), "min_p": np.float64(0.0),
    "frequency_penalty": np.float32(0.0), "repetition_penalty": np.float32(1.0), "seed": np.uint8(7),
    "num_sequences": np.uint8(2), "max_tokens": np.uint8(60), "min_tokens": np.uint8(2), "ignore_eos": np.True_,
    "priority": np.uint8(5), "bypass_prefix_cache": np.False_,
    "logprobs": np.uint8(2), "prompt_logprobs": np.int16(1), "prompt_logprob_start": np.uint8(1),
}  # fmt: skip


def test_numpy_scalars_mean_what_pythons_numbers_mean(tmp_path):
    # 200 + 60 does not fit into the uint8 that max_tokens comes as.
    prompt = letters("abcdefghij") * 20
    with scripted_engine(tmp_path, hashed(27), ABC, context=400, num_kv_blocks=200) as engine:
        plain = {name: value.item() for name, value in NUMPY_SCALARS.items()}
        expected, result = engine.generate(prompt, **plain), engine.generate(prompt, **NUMPY_SCALARS)
    assert [o.token_ids for o in result.outputs] == [o.token_ids for o in expected.outputs]
    assert len(result.token_ids) == 60 and len(result.outputs) == 2
    assert result.sampling == expected.sampling and result.stopping == expected.stopping
    assert type(result.sampling.num_sequences) is int and type(result.stopping.max_tokens) is int


def test_candidates_of_a_list_and_an_array_of_ids_are_those_ids(engine):
    for ids in ([3, 1], np.array([3, 1]), (3, 1)):
        result = engine.generate("ab", output_candidates=CandidateTokenSelection(token_ids=ids), **GREEDY)
        assert [c.token_id for c in result.tokens[0].candidates] == [3, 1]


def test_lgp_06_all_candidates_of_every_sequence_count_against_the_limit(tmp_path):
    with scripted_engine(tmp_path, hashed(27), ABC, context=400000, num_kv_blocks=100000) as engine:
        options = {"output_candidates": CandidateTokenSelection(all=AllCandidates()), "max_tokens": 390000}
        with pytest.raises(InvalidArgument, match="27 candidates at 24960000 positions"):
            engine.generate("ab", num_sequences=64, **options)
        engine.submit("ab", **options).cancel()


def test_a_very_long_request_id_is_a_request_id_and_never_a_long_message(engine):
    name = "x" * 1_000_000
    assert engine.generate("abc", max_tokens=1, request_id=name).request_id == name
    assert engine.abort(name).status == "already_finished"
    with pytest.raises(RequestNotFound) as caught:
        engine.abort("y" * 1_000_000)
    assert len(caught.value.message) < 300


def test_gen_10_the_tables_of_many_stop_texts_are_shared_by_all_outputs(engine):
    import tracemalloc

    stops = [f"{index:04x}" * 16 for index in range(1024)]
    tracemalloc.start()
    try:
        handle = engine.submit("ab", stop=stops, num_sequences=64, max_tokens=2, ignore_eos=True)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    assert len(handle.result().outputs) == 64


ODD_VALUES = [
    None, True, 0, -1, 5, 10**30, 1.5, NAN, INF, "", "x", b"x", [], [1], ["x"], [None], (), {}, {"a": 1}, {1},
    object(), int, np.int8(3), np.uint64(2**64 - 1), np.float16(0.5), np.bool_(True), np.array(3),
    np.array([1, 2]), np.array([]),
    1j, range(3), iter([1]), SamplingParams(), StopCondition(stop_text="a"),
    CandidateTokenSelection(top_n=1), AllCandidates(), ...,
]  # fmt: skip
FIELDS = [
    (kind, field.name)
    for kind in (SamplingParams, StoppingOptions, ResponseOptions, KvOptions)
    for field in dataclasses.fields(kind)
]


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_no_value_of_any_type_in_any_option_raises_anything_but_a_typed_error(engine, kind, name):
    group = {SamplingParams: "sampling", StoppingOptions: "stopping", ResponseOptions: "response", KvOptions: "kv"}[
        kind
    ]
    for value in ODD_VALUES:
        for call in (
            lambda v=value: engine.generate("abc", **{"max_tokens": 1, name: v}),
            lambda v=value: engine.generate(GenerateRequest(prompt="abc", **{group: kind(**{name: v})})),
        ):
            with contextlib.suppress(OpenEngineError):
                assert call().finish_reason
    assert load(engine) == (0, 0, 0)


@pytest.mark.parametrize(
    "name",
    ["stop", "stop_token_ids", "logprobs", "prompt_logprobs", *(f.name for f in dataclasses.fields(GenerateRequest))],
)
def test_no_value_of_any_type_in_any_keyword_or_request_field_raises_anything_but_a_typed_error(engine, name):
    for value in ODD_VALUES:
        calls = [lambda v=value: engine.generate("abc", **{"max_tokens": 1, name: v})]
        if hasattr(GenerateRequest, name):
            calls.append(
                lambda v=value: engine.generate(dataclasses.replace(GenerateRequest(prompt="abc"), **{name: v}))
            )
        for call in calls:
            with contextlib.suppress(OpenEngineError):
                assert call().finish_reason
    assert load(engine) == (0, 0, 0)
