"""The API of one engine, as a caller meets it: shapes, options, streams, handles, aborts, drains, discovery, faults.

A scripted model stands in for a real one, so that every expected value is exact and a step takes no time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import pickle
import sys
import threading
import time
import warnings

import numpy as np
import pytest

import openengine
from openengine import (
    AllCandidates,
    CandidateTokenSelection,
    Draining,
    DuplicateRequest,
    EngineRole,
    GenerateRequest,
    GenerationFinished,
    GenerationResult,
    GuidedDecoding,
    InternalError,
    InvalidArgument,
    KvOptions,
    KvSessionRef,
    MediaItem,
    ModelNotFound,
    OpenEngineError,
    Overloaded,
    PreconditionFailed,
    PromptOutput,
    RequestNotFound,
    ResponseOptions,
    RoleMismatch,
    SamplingParams,
    StopCondition,
    StoppingOptions,
    TokenOutput,
    UnsupportedFeature,
    UnsupportedTask,
)
from tests.scripted import follow, hashed, scripted_engine
from tests.stream_grammar import check_stream

ABC = ["<eos>", *"abcdefghijklmnopqrstuvwxyz"]
GREEDY = {"temperature": 0.0, "max_tokens": 5}


def letters(text: str) -> list[int]:
    return [ABC.index(char) for char in text]


class Gate:
    """A script that waits at each row until it is opened; `entered` is set once a step has begun."""

    def __init__(self, script=hashed(27)) -> None:
        self.script = script
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, history):
        self.entered.set()
        assert self.opened.wait(30), "the test never opened the gate"
        return self.script(history)


class Switch:
    """A script that fails, or gives NaN, while told to."""

    def __init__(self, script=hashed(27)) -> None:
        self.script = script
        self.fails = lambda history: False
        self.is_nan = lambda history: False

    def __call__(self, history):
        if self.fails(history):
            raise ArithmeticError("the script was told to fail")
        return [float("nan")] * 27 if self.is_nan(history) else self.script(history)


@pytest.fixture
def engine(tmp_path):
    with scripted_engine(tmp_path, hashed(27), ABC) as engine:
        yield engine


@pytest.fixture
def gated(tmp_path):
    gate = Gate()
    with scripted_engine(tmp_path, gate, ABC) as engine:
        engine.gate = gate
        yield engine
        gate.opened.set()


def load(engine) -> tuple[int, int, int]:
    """Running, queued, used blocks; the books of the scheduler are checked on the way."""
    engine._loop.call(lambda scheduler: scheduler.check())
    info = engine.load_info()
    return info.running_requests, info.queued_requests, info.used_kv_blocks


def wait_until(condition, timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.002)


# ---- shape in = shape out ------------------------------------------------------------------------

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


# ---- options -------------------------------------------------------------------------------------


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
            call(ABCD, **options)
        assert type(caught.value) is InvalidArgument and len(caught.value.message) < 1000
    with pytest.raises(InvalidArgument):
        engine.generate([ABCD, "ab"], **options)
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


def test_gen_11_a_numpy_priority_orders_as_its_number(gated):
    first = gated.submit("a", max_tokens=1)
    assert gated.gate.entered.wait(20)
    order, done = [], threading.Event()
    for name, priority in [("low", np.uint8(1)), ("high", np.uint8(200)), ("negative", np.int8(-3))]:
        handle = gated.submit(letters("abc"), max_tokens=1, priority=priority, request_id=name)
        handle.on_done(lambda name=name: (order.append(name), len(order) == 3 and done.set()))
    queue = gated._loop._commands  # run them while the step is held: the order is decided at admission
    assert queue.qsize() == 3
    gated.gate.opened.set()
    assert done.wait(20) and first.result()
    assert order == ["high", "low", "negative"]


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


@pytest.mark.parametrize(
    "messages", ["hi", [], [5], [{}], [{"role": "user"}], {"role": "user"}, 5, [{"role": 5, "content": "x"}]]
)
def test_malformed_messages_are_refused(chatting, messages):
    for call in (chatting.chat, chatting.apply_chat_template, lambda m: chatting.submit(messages=m)):
        with pytest.raises(InvalidArgument):
            call(messages)


# ---- chat ----------------------------------------------------------------------------------------


@pytest.fixture
def chatting(tmp_path):
    """An engine whose chat template writes each content, then "z" where the answer begins."""
    import json

    with scripted_engine(tmp_path, hashed(27), ABC) as engine:
        path = tmp_path / "tokenizer_config.json"
        template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}t{% endif %}{{ extra }}z"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
        from openengine.core.tokenizer import load_tokenizer

        engine._tokenizer = engine._preparer._tokenizer = load_tokenizer(tmp_path)
        yield engine


MESSAGES = [{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}]


def test_chat_is_generate_with_the_rendered_messages_in_every_form(chatting):
    expected = chatting.generate("abcz", **GREEDY).token_ids
    assert chatting.apply_chat_template(MESSAGES) == letters("abcz")
    assert chatting.chat(MESSAGES, **GREEDY).token_ids == expected
    assert chatting.generate(messages=MESSAGES, **GREEDY).token_ids == expected
    assert chatting.submit(messages=MESSAGES, **GREEDY).result().token_ids == expected
    assert asyncio.run(chatting.agenerate(messages=MESSAGES, **GREEDY)).token_ids == expected
    text = "".join(event.text for event in chatting.stream(messages=MESSAGES, **GREEDY))
    assert text == chatting.detokenize(expected)


def test_tools_and_template_arguments_reach_the_template(chatting):
    assert chatting.apply_chat_template(MESSAGES, [{"name": "f"}], extra="x") == letters("abctxz")
    result = chatting.chat(MESSAGES, tools=[{"name": "f"}], template_kwargs={"extra": "x"}, **GREEDY)
    assert result.token_ids == chatting.generate("abctxz", **GREEDY).token_ids


@pytest.mark.parametrize(
    "arguments", [{"prompts": "a", "messages": MESSAGES}, {}, {"messages": MESSAGES, "template_kwargs": 5},
                  {"messages": MESSAGES, "tools": 5}, {"prompts": "a", "tools": [{}]}],
)  # fmt: skip
def test_prompt_and_messages_exclude_each_other_and_tools_need_messages(chatting, arguments):
    with pytest.raises(InvalidArgument):
        chatting.generate(**arguments)


def test_c8_a_prompt_with_a_bos_of_its_own_warns_where_it_was_written_if_the_tokenizer_adds_another(tmp_path):
    from openengine.core.tokenizer import load_tokenizer
    from tests.checkpoints import VOCAB_SIZE, write_tokenizer

    write_tokenizer(tmp_path / "adds")
    with scripted_engine(tmp_path / "m", hashed(VOCAB_SIZE), [f"<{i}>" for i in range(VOCAB_SIZE)]) as engine:
        engine._preparer._tokenizer = load_tokenizer(tmp_path / "adds")

        async def agenerate(prompt):
            return await engine.agenerate(prompt, max_tokens=1)

        async def asubmit(prompt):
            return await (await engine.asubmit(prompt, max_tokens=1)).aresult()

        async def astream(prompt, **guide):
            return [event async for event in engine.astream(prompt, max_tokens=1, **guide)]

        calls = {
            "generate": lambda: engine.generate("<|bos|>hello", max_tokens=1),
            "batch": lambda: engine.generate(["a", "<|bos|>hello"], max_tokens=1),
            "as_completed": lambda: list(engine.as_completed(["<|bos|>hello"], max_tokens=1)),
            "stream": lambda: list(engine.stream("<|bos|>hello", max_tokens=1)),
            "submit": lambda: engine.submit("<|bos|>hello", max_tokens=1).result(),
            "agenerate": lambda: asyncio.run(agenerate("<|bos|>hello")),
            "agenerate of itself": lambda: asyncio.run(engine.agenerate("<|bos|>hello", max_tokens=1)),
            "async batch": lambda: asyncio.run(agenerate(["a", "<|bos|>hello"])),
            "asubmit": lambda: asyncio.run(asubmit("<|bos|>hello")),
            "astream": lambda: asyncio.run(astream("<|bos|>hello")),
            "astream with a guide": lambda: asyncio.run(astream("<|bos|>hello", regex="<.*>")),
        }
        for name, call in calls.items():
            with pytest.warns(UserWarning, match="sees two") as caught, contextlib.suppress(UnsupportedFeature):
                call()  # the guide is refused late, for want of an end of sequence
            assert [warning.filename for warning in caught] == [__file__], name
        engine.generate(["hello"], max_tokens=1)


def test_c8_no_warning_where_the_tokenizer_adds_no_bos(chatting):
    from openengine.core.tokenizer import Tokenizer

    tokenizer = chatting._preparer._tokenizer
    named = Tokenizer(tokenizer.vocabulary, bos_token_id=0, eos_token_id=0, pad_token_id=None, unk_token_id=None)
    chatting._preparer._tokenizer = named
    assert named.starts_with_bos("<eos>abc")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chatting.generate("<eos>abc", max_tokens=1).usage.prompt_tokens == 4


def test_a_model_without_a_chat_template_says_so(engine):
    with pytest.raises(UnsupportedFeature, match="chat template"):
        engine.chat(MESSAGES)


# ---- results -------------------------------------------------------------------------------------


def test_a_result_reprs_shortly_pickles_and_becomes_a_row(engine):
    result = engine.generate(ABCD, num_sequences=2, seed=1, logprobs=2, prompt_logprobs=1, max_tokens=30)
    assert len(repr(result)) < 200 and "2 outputs" in repr(result)
    copy = pickle.loads(pickle.dumps(result))
    assert copy == result and copy.text == result.text
    row = result.to_dict()
    assert row["text"] == result.text and row["completion_tokens"] == 60 and row["error"] is None
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(r.to_dict() for r in engine.generate(["ab", ""], on_error="return", max_tokens=2))
    assert frame["finish_reason"][0] == "length" and frame["error"][1] and pandas.isna(frame["text"][1])


def test_timing_parts_are_ordered(engine):
    timing = engine.generate(ABCD, max_tokens=9).timing
    assert 0 <= timing.queue_s <= timing.time_to_first_token_s <= timing.total_s and timing.time_per_token_s > 0


def test_importing_the_package_imports_neither_torch_nor_an_option(tmp_path):
    import subprocess

    code = (
        "import sys, openengine; print(sorted({'torch', 'grpc', 'tokenizers', 'numpy', 'jinja2'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
    assert set(openengine.__all__) <= set(dir(openengine))


# ---- batches -------------------------------------------------------------------------------------


def test_as_completed_yields_each_index_once_as_it_finishes(engine):
    lengths = [9, 2, 30, 1, 5]
    requests = [
        GenerateRequest(
            token_ids=ABCD, stopping=StoppingOptions(max_tokens=n), sampling=SamplingParams(temperature=0.0)
        )
        for n in lengths
    ]
    found = list(engine.as_completed(requests))
    assert sorted(index for index, _ in found) == list(range(5)) and [i for i, _ in found] != list(range(5))
    assert all(len(result.token_ids) == lengths[index] for index, result in found)


def test_as_completed_checks_everything_before_the_first_item_is_asked_for(engine):
    with pytest.raises(InvalidArgument, match="item 1 of 2"):
        engine.as_completed(["ab", ""])
    assert engine._loop.num_steps == 0


def test_leaving_as_completed_early_cancels_the_rest(gated):
    gated.gate.opened.set()
    for _index, _result in gated.as_completed(["ab"] * 200, max_tokens=100):
        break
    gc.collect()
    wait_until(lambda: load(gated) == (0, 0, 0))


def test_on_error_return_puts_each_error_in_its_place_with_its_id(engine):
    items = [
        "ab",
        [99],
        GenerateRequest(prompt="", request_id="empty"),
        GenerateRequest(prompt="ab", model="other"),
        GenerateRequest(prompt="ab", request_id="twin"),
        GenerateRequest(prompt="ab", request_id="twin"),
    ]
    for results in (engine.generate(items, on_error="return"), asyncio.run(engine.agenerate(items, on_error="return"))):
        kinds = [type(r.error) for r in results]
        assert kinds == [type(None), InvalidArgument, InvalidArgument, ModelNotFound, type(None), DuplicateRequest]
        assert [r.request_id for r in results[1:]] == ["", "empty", "", "twin", "twin"]
        assert results[1].outputs == () and "error" in repr(results[1])
        with pytest.raises(InvalidArgument):
            _ = results[1].text
    single = engine.generate("", on_error="return", request_id="one")
    assert isinstance(single.error, InvalidArgument) and single.request_id == "one"
    assert (
        asyncio.run(engine.agenerate(GenerateRequest(prompt="", request_id="two"), on_error="return")).request_id
        == "two"
    )


@pytest.mark.parametrize("value", ["ignore", None, 5])
def test_on_error_has_two_values(engine, value):
    for prompt in ("ab", ["ab"]):
        with pytest.raises(InvalidArgument, match="'raise' or 'return'"):
            engine.generate(prompt, on_error=value)


def test_p9_one_id_twice_in_a_batch_runs_nothing(engine):
    batch = [GenerateRequest(prompt="ab", request_id="x") for _ in range(2)]
    for run in (engine.generate, lambda b: asyncio.run(engine.agenerate(b)), engine.as_completed):
        with pytest.raises(DuplicateRequest, match="item 1 of 2.*'x'"):
            run(batch)
    assert engine._loop.num_steps == 0
    with pytest.raises(InvalidArgument, match="the batch has 2"):
        engine.generate(["a", "b"], request_id="x")


def test_progress_shows_a_bar_when_asked_and_none_elsewhere(engine, capsys):
    engine.generate(["ab"] * 3, max_tokens=1)
    assert capsys.readouterr().err == ""
    engine.generate(["ab"] * 3, max_tokens=1, progress=True)
    assert "3/3" in capsys.readouterr().err


def test_a_batch_of_any_size_runs_through_a_queue_of_two(tmp_path):
    with scripted_engine(tmp_path, hashed(27), ABC, max_queued_requests=2, max_num_seqs=2) as engine:
        results = engine.generate(["abc"] * 300, **GREEDY)
        assert len(results) == 300 and len({tuple(r.token_ids) for r in results}) == 1
        assert len(asyncio.run(engine.agenerate(["abc"] * 100, **GREEDY))) == 100


def test_gen_14_only_submit_raises_overloaded(tmp_path):
    gate = Gate()
    with scripted_engine(tmp_path, gate, ABC, max_queued_requests=3, max_num_seqs=2) as engine:
        first = engine.submit("ab", **GREEDY)
        assert gate.entered.wait(20)
        queued = [engine.submit("ab", **GREEDY) for _ in range(3)]
        with pytest.raises(Overloaded, match=r"3 requests are queued.*max_queued_requests is 3") as caught:
            engine.submit("ab")
        assert caught.value.retryable and caught.value.retry_after_ms > 0
        with pytest.raises(Overloaded):
            engine.stream("ab")
        waiting = [
            threading.Thread(target=engine.generate, args=(prompt,), kwargs=GREEDY) for prompt in ("ab", ["ab"] * 9)
        ]
        waiting.append(threading.Thread(target=lambda: asyncio.run(engine.agenerate(["ab"] * 5, **GREEDY))))
        waiting.append(threading.Thread(target=lambda: asyncio.run(engine.agenerate("ab", **GREEDY))))
        for thread in waiting:
            thread.start()
        time.sleep(0.05)
        gate.opened.set()
        for thread in waiting:
            thread.join(20)
            assert not thread.is_alive()
        assert len({tuple(handle.result().token_ids) for handle in [first, *queued]}) == 1
        assert load(engine) == (0, 0, 0)


# ---- streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_str_a_stream_follows_the_grammar_and_joins_to_the_result(engine, num_sequences):
    options = {
        "num_sequences": num_sequences,
        "seed": 3,
        "max_tokens": 20,
        "prompt_logprobs": 1,
        "logprobs": 1,
        "stop": "b",
    }
    events = list(engine.stream("abcd", **options))
    check_stream(events, num_sequences, prompt_tokens=4)
    result = engine.generate("abcd", **options)
    for output in result.outputs:
        mine = [e for e in events if isinstance(e, TokenOutput) and e.output_index == output.index]
        assert "".join(e.text for e in mine) == output.text
        assert [t.token_id for e in mine for t in e.tokens] == output.token_ids
    assert isinstance(events[0], PromptOutput) and events[0].tokens == result.prompt


def test_str_15_the_first_token_arrives_before_the_last_is_made(gated):
    stream = gated.stream("ab", **GREEDY)
    seen = []
    reader = threading.Thread(target=lambda: seen.extend(stream))
    reader.start()
    gated.gate.script, original = (
        (lambda history: (len(history) > 4 and held.wait(20), original(history))[1]),
        gated.gate.script,
    )
    held = threading.Event()
    gated.gate.opened.set()
    wait_until(lambda: seen)
    assert not stream.handle.done
    held.set()
    reader.join(20)
    check_stream(seen, 1, completion_tokens=5)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_astream_gives_what_stream_gives(engine, number):
    async def collect():
        return [event async for event in engine.astream("abcd", num_sequences=number + 1, seed=1, max_tokens=9)]

    events = asyncio.run(collect())
    check_stream(events, number + 1, completion_tokens=9 * (number + 1))
    assert events == list(engine.stream("abcd", num_sequences=number + 1, seed=1, max_tokens=9))


ENDLESS = {"max_tokens": 120, "ignore_eos": True}


def leave_by_break(engine):
    for _event in engine.stream("ab", **ENDLESS):
        break


def leave_by_exception(engine):
    with pytest.raises(ZeroDivisionError):
        for _event in engine.stream("ab", **ENDLESS):
            raise ZeroDivisionError


def leave_by_del(engine):
    stream = engine.stream("ab", **ENDLESS)
    next(stream)
    del stream


def leave_by_close(engine):
    stream = engine.stream("ab", **ENDLESS)
    next(stream)
    stream.close()
    assert stream.handle.result(20).finish_reason == "cancelled"


def leave_by_with(engine):
    with engine.stream("ab", **ENDLESS) as stream:
        next(stream)


def leave_without_reading(engine):
    engine.stream("ab", **ENDLESS)


def leave_async_by_break(engine):
    async def main():
        async for _event in engine.astream("ab", **ENDLESS):
            break

    asyncio.run(main())


def leave_async_by_aclose(engine):
    async def main():
        stream = engine.astream("ab", **ENDLESS)
        await stream.__anext__()
        await stream.aclose()

    asyncio.run(main())


def leave_async_by_cancelling_the_task(engine):
    async def read():
        async for _event in engine.astream("ab", **ENDLESS):
            await asyncio.sleep(0)

    async def main():
        task = asyncio.create_task(read())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def leave_async_by_timeout(engine):
    async def main():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.agenerate(["ab"] * 5, **ENDLESS), 0.02)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.agenerate("ab", **ENDLESS), 0.02)

    asyncio.run(main())


LEAVING = [
    leave_by_break, leave_by_exception, leave_by_del, leave_by_close, leave_by_with, leave_without_reading,
    leave_async_by_break, leave_async_by_aclose, leave_async_by_cancelling_the_task, leave_async_by_timeout,
]  # fmt: skip


@pytest.mark.parametrize("leave", LEAVING, ids=lambda leave: leave.__name__)
def test_gen_15_leaving_early_cancels_the_request_and_frees_its_blocks(tmp_path, leave):
    def slow(history):
        time.sleep(0.002)
        return hashed(27)(history)

    with scripted_engine(tmp_path, slow, ABC) as engine:
        leave(engine)
        gc.collect()
        wait_until(lambda: load(engine) == (0, 0, 0), 5)
        assert engine._loop.num_steps < 100, "it ran to its end"
        assert engine.generate("ab", **GREEDY).finish_reason == "length"


def test_a_stream_read_to_its_end_stays_at_its_end(engine):
    stream = engine.stream("ab", **GREEDY)
    assert list(stream) and list(stream) == []
    stream.close()
    assert stream.handle.result().finish_reason == "length"


# ---- handles -------------------------------------------------------------------------------------


def test_a_handle_gives_its_result_before_after_and_without_reading_events(engine):
    expected = engine.generate("abcd", **GREEDY).token_ids
    without = engine.submit("abcd", **GREEDY)
    assert without.result().token_ids == expected
    before = engine.submit("abcd", **GREEDY)
    assert before.result().token_ids == expected
    check_stream(before, 1, completion_tokens=5)
    after = engine.submit("abcd", **GREEDY)
    check_stream(after, 1, completion_tokens=5)
    assert after.result().token_ids == expected and after.result() is after.result()
    assert after.done and "done" in repr(after)


def test_result_times_out_and_the_request_goes_on(gated):
    handle = gated.submit("ab", **GREEDY)
    for timeout in (0, 0.01, -1):
        with pytest.raises(TimeoutError, match="still running"):
            handle.result(timeout)
    assert not handle.wait(0.01) and not handle.done and "running" in repr(handle)
    gated.gate.opened.set()
    assert len(handle.result(20).token_ids) == 5 and handle.wait(0)


def test_a_handle_may_be_awaited_iterated_and_cancelled_again_after_its_end(engine):
    handle = engine.submit("abcd", **GREEDY)

    async def main():
        events = [event async for event in handle]
        return events, await handle.aresult(), await handle.aresult()

    events, first, second = asyncio.run(main())
    check_stream(events, 1)
    assert first is second and list(handle) == []
    handle.cancel()
    assert handle.result() is first


def test_cancel_ends_as_a_result_and_not_as_an_exception(gated):
    handle = gated.submit("abcd", num_sequences=2, prompt_logprobs=0, **GREEDY)
    handle.cancel()
    handle.cancel()
    gated.gate.opened.set()
    result = handle.result(20)
    assert {o.finish_reason for o in result.outputs} == {"cancelled"} and len(result.outputs) == 2
    assert result.usage.prompt_tokens == 4


def test_events_are_shared_between_readers_each_to_one(engine):
    handle = engine.submit("abcd", temperature=0, max_tokens=40, ignore_eos=True)
    parts = [[], []]
    threads = [threading.Thread(target=lambda part=part: part.extend(handle)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    tokens = [token.token_id for part in parts for e in part if isinstance(e, TokenOutput) for token in e.tokens]
    assert sorted(tokens) == sorted(handle.result().token_ids)


# ---- ids and aborts ------------------------------------------------------------------------------


def test_gen_08_p9_an_id_in_flight_is_refused_undisturbed_and_reusable_after(gated):
    first = gated.submit("abcd", request_id="x", **GREEDY)
    assert gated.gate.entered.wait(20)
    for call in (gated.submit, gated.generate, gated.stream, lambda p, **k: asyncio.run(gated.agenerate(p, **k))):
        with pytest.raises(DuplicateRequest, match="'x' is in flight"):
            call("ab", request_id="x")
    with pytest.raises(DuplicateRequest, match="item 0 of 1"):
        gated.generate(["ab"], request_id="x")
    gated.gate.opened.set()
    expected = first.result().token_ids
    assert gated.generate("abcd", request_id="x", **GREEDY).token_ids == expected


def test_gen_01_every_request_without_an_id_gets_its_own(engine):
    results = engine.generate(["ab"] * 20, max_tokens=1)
    assert len({r.request_id for r in results}) == 20


@pytest.mark.parametrize(
    "target", [{}, {"request_id": ""}, {"request_id": "x", "all_requests": True}, {"request_id": 5}, {"request_id": []}]
)
def test_abt_01_abort_takes_exactly_one_target(engine, target):
    with pytest.raises(InvalidArgument):
        engine.abort(**target)


def test_abt_02_an_unknown_request_is_not_found(engine):
    with pytest.raises(RequestNotFound, match="'nobody'"):
        engine.abort("nobody")


def test_abt_04_07_08_aborting_a_running_and_a_queued_request_leaves_others_alone(tmp_path):
    gate = Gate()
    with scripted_engine(tmp_path, gate, ABC, max_num_seqs=2) as engine:
        running, other = (
            engine.submit("abcd", request_id=name, num_sequences=1, **GREEDY) for name in ("run", "other")
        )
        assert gate.entered.wait(20)
        queued = engine.submit("abcd", request_id="queue", num_sequences=2, **GREEDY)
        assert engine.abort("run").status == "aborted" and engine.abort("queue").status == "aborted"
        gate.opened.set()
        for handle, count in ((running, 1), (queued, 2)):
            events = list(handle)
            check_stream(events, count, prompt_tokens=4)
            finishes = [e for e in events if isinstance(e, GenerationFinished)]
            assert [f.reason for f in finishes] == ["cancelled"] * count and finishes[-1].usage is not None
        assert other.result().token_ids == engine.generate("abcd", request_id="run", **GREEDY).token_ids
        assert load(engine) == (0, 0, 0)


def test_abt_04_outputs_that_finished_before_keep_their_reason(tmp_path):
    # Output 0 takes the likely token "a" and stops; output 1 is held back by its seed until the abort.
    gate = Gate(lambda history: [0.0] * 27)
    gate.opened.set()
    with scripted_engine(tmp_path, gate, ABC, context=120) as engine:
        handle = engine.submit("ab", num_sequences=6, seed=5, stop_token_ids=range(1, 14), max_tokens=100)
        finished = []
        for event in handle:
            if isinstance(event, GenerationFinished):
                finished.append(event.reason)
                gate.opened.clear()
                handle.cancel()
                gate.opened.set()
        reasons = [output.finish_reason for output in handle.result().outputs]
    assert sorted(reasons) == sorted(finished) and "stop" in reasons
    assert handle.result().usage.completion_tokens >= 6


def test_abt_05_a_finished_request_is_already_finished_however_often(engine):
    engine.generate("ab", request_id="x", max_tokens=1)
    assert [engine.abort("x").status for _ in range(3)] == ["already_finished"] * 3


def test_abt_05_the_last_1024_ids_are_remembered(engine):
    ids = [f"r{i}" for i in range(1024)]
    engine.generate([GenerateRequest(prompt="a", request_id=i, stopping=StoppingOptions(max_tokens=0)) for i in ids])
    assert {engine.abort(i).status for i in ids} == {"already_finished"}


def test_abt_06_abort_all_ends_everything(gated):
    assert gated.abort(all_requests=True).status == "already_finished"
    handles = [gated.submit("abcd", **GREEDY) for _ in range(70)]
    assert gated.abort(all_requests=True).status == "aborted"
    gated.gate.opened.set()
    assert {handle.result(20).finish_reason for handle in handles} == {"cancelled"}
    assert load(gated) == (0, 0, 0) and gated.abort(all_requests=True).status == "already_finished"


def test_a_handle_cancels_its_own_request_and_never_a_namesake(gated):
    gated.gate.opened.set()
    old = gated.submit("ab", request_id="x", max_tokens=1)
    old.result()
    gated.gate.opened.clear()
    new = gated.submit("ab", request_id="x", **GREEDY)
    old.cancel()
    gated.gate.opened.set()
    assert new.result().finish_reason == "length"


# ---- drain ---------------------------------------------------------------------------------------


def drain_states(engine, **options) -> list[str]:
    return [str(report.state) for report in engine.drain_events(**options)]


def test_drn_01_05_09_an_idle_engine_starts_and_completes_and_joins_a_second_drain(engine):
    reports = list(engine.drain_events())
    assert [str(r.state) for r in reports] == ["started", "complete"]
    assert reports[-1].in_flight_requests == 0 and reports[-1].open_kv_sessions == 0
    assert drain_states(engine) == ["started", "complete"] and engine.drain() is None


def test_drn_03_11_new_requests_are_refused_running_ones_finish_and_the_rest_keeps_working(gated):
    running = gated.submit("abcd", request_id="r", **GREEDY)
    assert gated.gate.entered.wait(20)
    drained = threading.Thread(target=gated.drain)
    drained.start()
    wait_until(lambda: gated.health().state == "draining")
    for call in (gated.submit, gated.generate, gated.stream):
        with pytest.raises(Draining) as caught:
            call("ab")
        assert caught.value.retryable
    assert isinstance(gated.generate(["ab"], on_error="return")[0].error, Draining)
    assert gated.load_info().running_requests + gated.load_info().queued_requests == 1
    assert gated.tokenize("ab") == letters("ab") and gated.model_info() and gated.info()
    gated.gate.opened.set()
    drained.join(20)
    assert not drained.is_alive() and running.done and running.result().finish_reason == "length"
    assert gated.abort("r").status == "already_finished"
    health = gated.health(include_inference_probe=True)
    assert health.state == "draining" and health.checks[-1].state == "ready"


def test_drn_04_without_stopping_new_requests_are_accepted_throughout(engine):
    assert drain_states(engine, stop_accepting_new_requests=False) == ["started", "complete"]
    assert engine.health().state == "ready" and engine.generate("ab", **GREEDY)


def test_drn_06_08_a_deadline_of_zero_reports_draining_and_the_work_goes_on(gated):
    running = gated.submit("abcd", **GREEDY)
    for _ in range(2):
        with pytest.raises(Draining, match="1 requests are still in flight at the deadline of 0 ms"):
            gated.drain(deadline_ms=0)
    with pytest.raises(Draining):
        gated.submit("ab")
    gated.gate.opened.set()
    assert running.result().finish_reason == "length"
    assert drain_states(gated, deadline_ms=0) == ["started", "complete"]


def test_drn_07_at_the_deadline_what_runs_is_aborted(gated):
    handles = [gated.submit("abcd", **GREEDY) for _ in range(3)]
    assert gated.gate.entered.wait(20)
    threading.Timer(0.1, gated.gate.opened.set).start()
    states = drain_states(gated, deadline_ms=20, abort_after_deadline=True)
    assert states[0] == "started" and states[-1] == "complete"
    assert {handle.result(0).finish_reason for handle in handles} == {"cancelled"}


def test_drn_13_progress_is_reported_at_least_once_a_second(gated):
    gated.submit("abcd", **GREEDY)
    threading.Timer(1.2, gated.gate.opened.set).start()
    reports = list(gated.drain_events(deadline_ms=np.int64(20000)))
    assert [str(r.state) for r in reports] == ["started", "in_progress", "complete"]
    assert [r.in_flight_requests for r in reports] == [1, 1, 0]


def test_drn_12_leaving_the_reports_leaves_the_drain_as_it_is(gated):
    handle = gated.submit("abcd", **GREEDY)
    reports = gated.drain_events()
    next(reports)
    reports.close()
    gated.gate.opened.set()
    assert handle.result().finish_reason == "length" and gated.health().state == "draining"


@pytest.mark.parametrize("deadline", [-1, 1.5, "x", True, NAN])
def test_a_bad_deadline_drains_nothing(engine, deadline):
    with pytest.raises(InvalidArgument, match="deadline_ms"):
        engine.drain(deadline_ms=deadline)
    assert engine.generate("ab", **GREEDY)


# ---- health --------------------------------------------------------------------------------------


def test_hlt_01_02_a_plain_check_answers_while_a_step_runs(gated):
    gated.submit("ab", **GREEDY)
    assert gated.gate.entered.wait(20)
    health = gated.health()
    assert health.state == "ready" and all(c.name and c.state == "ready" for c in health.checks)
    assert "inference_probe" not in [c.name for c in health.checks]


def test_hlt_03_07_a_probe_computes_and_leaves_nothing_behind(engine):
    engine.generate("abcdefgh", **GREEDY)
    cached = engine._loop.call(lambda scheduler: scheduler.blocks.num_cached)
    steps = engine._loop.num_steps
    (probe,) = [c for c in engine.health(include_inference_probe=True).checks if c.name == "inference_probe"]
    assert probe.state == "ready" and engine._loop.num_steps == steps + 1
    assert engine._loop.call(lambda scheduler: scheduler.blocks.num_cached) == cached
    assert load(engine) == (0, 0, 0)


def test_hlt_07_a_probe_is_beyond_aborts_limits_and_drains(tmp_path):
    gate = Gate()
    with scripted_engine(tmp_path, gate, ABC, max_queued_requests=1) as engine:
        first = engine.submit("ab", **GREEDY)
        assert gate.entered.wait(20)
        queued = engine.submit("ab", **GREEDY)
        found = []
        prober = threading.Thread(target=lambda: found.append(engine.health(include_inference_probe=True)))
        prober.start()
        wait_until(lambda: len(engine._loop._open) == 3)
        assert [r.in_flight_requests for r in [next(engine.drain_events())]] == [2]
        assert engine.abort(all_requests=True).status == "aborted"
        gate.opened.set()
        prober.join(20)
        assert found[0].checks[-1].state == "ready"
        assert {h.result().finish_reason for h in (first, queued)} == {"cancelled"}


def test_hlt_04_an_unknown_model_is_not_found(engine):
    assert engine.health(model="scripted").state == "ready"
    for probe in (False, True):
        with pytest.raises(ModelNotFound, match="'other'"):
            engine.health(model="other", include_inference_probe=probe)


def test_hlt_05_an_expected_role_is_checked(engine):
    assert engine.health(role=EngineRole.AGGREGATED).checks[-1].state == "ready"
    wrong = engine.health(role=EngineRole.DECODE)
    assert wrong.state == "not_ready" and wrong.checks[-1].name == "role" and "decode" in wrong.checks[-1].message


def test_health_of_a_closed_engine_is_not_ready(tmp_path):
    engine = scripted_engine(tmp_path, hashed(27), ABC)
    engine.close()
    health = engine.health(include_inference_probe=True)
    assert health.state == "not_ready" and health.checks[-1].name == "inference_probe"


# ---- load, info ----------------------------------------------------------------------------------


def test_ld_01_02_03_05_load_follows_reality(tmp_path):
    gate = Gate()
    with scripted_engine(tmp_path, gate, ABC, max_num_seqs=2) as engine:
        idle = engine.load_info()
        assert (idle.running_requests, idle.queued_requests, idle.used_kv_blocks) == (0, 0, 0)
        assert idle.total_kv_blocks == engine.model_info().total_kv_blocks == 64
        assert idle.instance_id == engine.info().instance_id
        handles = [engine.submit("abcde", **GREEDY) for _ in range(5)]
        assert gate.entered.wait(20)
        assert engine.load_info().queued_requests == 5, "what was accepted shows at once, although a step runs"
        hold = threading.Event()
        gate.script, original = (
            (lambda history: (len(history) == 7 and hold.wait(20), original(history))[1]),
            gate.script,
        )
        gate.opened.set()
        wait_until(lambda: engine.load_info().running_tokens >= 10)
        busy = engine.load_info()
        assert busy.running_requests == 2 and busy.queued_requests == 3 and busy.waiting_tokens == 15
        assert 0 < busy.used_kv_blocks <= 64 and busy.decode_batch_size + busy.prefill_batch_size == 2
        assert busy.timestamp_unix_nanos >= idle.timestamp_unix_nanos
        hold.set()
        for handle in handles:
            handle.result()
        assert load(engine) == (0, 0, 0)


def test_ld_03_whoever_has_the_result_sees_a_load_without_it(engine):
    for _ in range(50):
        engine.generate("abc", max_tokens=2)
        info = engine.load_info()
        assert (info.running_requests, info.queued_requests, info.used_kv_blocks) == (0, 0, 0)


def test_eng_info_is_complete_and_constant(engine):
    info = engine.info()
    assert info == engine.info() and info.role == "aggregated" and info.instance_id
    assert info.schema_revision == info.minimum_client_revision == 1 and info.schema_release
    assert info.supported_models and len(set(info.supported_models)) == len(info.supported_models)
    for name in info.supported_models:
        assert engine.model_info(name) == engine.model_info()
        assert engine.generate("ab", model=name, max_tokens=1).token_ids
    assert {"device", "dtype", "kernels", "kv_tokens"} <= set(info.attributes)


@pytest.mark.parametrize("model", ["other", "", 5])
def test_mod_02_an_unknown_model_is_not_found(engine, model):
    with pytest.raises(ModelNotFound, match="served are scripted"):
        engine.model_info(model)


def test_mod_04_06_07_09_capabilities_are_what_works(engine):
    info = engine.model_info()
    generation = info.generation
    assert (info.max_context_length, info.kv_block_size, info.max_running_requests) == (128, 4, 64)
    top = generation.output_logprobs.max_top_n
    assert len(engine.generate("ab", logprobs=top, prompt_logprobs=top, max_tokens=1).tokens[0].candidates) == top
    assert len(engine.generate("ab", num_sequences=generation.max_num_sequences, max_tokens=1).outputs) == 64
    for options in ({"logprobs": top + 1}, {"prompt_logprobs": top + 1}, {"num_sequences": 65}):
        with pytest.raises(InvalidArgument):
            engine.generate("ab", **options)
    assert (
        generation.guided_decoding.supported is False
        and info.supports_lora is False
        and info.supports_multimodal is False
    )


def test_served_name_and_aliases_name_the_model(tmp_path):
    with scripted_engine(tmp_path, hashed(27), ABC, served_model_name="served", aliases=("a", "b")) as engine:
        info = engine.model_info()
        assert (info.served_model_name, info.served_model_aliases) == ("served", ("a", "b")) and repr(engine)


# ---- tokens --------------------------------------------------------------------------------------


def test_tokenize_is_what_generate_runs_and_detokenize_takes_it_back(engine):
    assert engine.tokenize("abc") == letters("abc") and engine.tokenize("") == []
    for ids in (letters("abc"), tuple(letters("abc")), np.array(letters("abc")), iter(letters("abc"))):
        assert engine.detokenize(ids) == "abc"
    assert engine.detokenize([]) == "" and engine.detokenize(iter([])) == ""
    assert engine.detokenize([1, 0]) == "a" and engine.detokenize([1, 0], skip_special_tokens=False) == "a<eos>"
    assert [t.token_id for t in engine.generate("abc", prompt_logprobs=0, max_tokens=0).prompt] == letters("abc")


@pytest.mark.parametrize(
    "ids", [5, None, "abc", [1.5], [True], ["1"], [None], [-1], [27], [2**70], [[1]], np.array(1.0)]
)
def test_tok_14_detokenize_refuses_what_is_no_token_id(engine, ids):
    with pytest.raises(InvalidArgument):
        engine.detokenize(ids)


@pytest.mark.parametrize("text", [5, None, b"abc", ["abc"], "\ud800"])
def test_tokenize_refuses_what_is_no_text(engine, text):
    with pytest.raises(InvalidArgument):
        engine.tokenize(text)


# ---- stopping ------------------------------------------------------------------------------------


def scripted(directory, tokens, *, then=None, vocabulary=ABC, eos=(0,), **options):
    return scripted_engine(
        directory, follow(*tokens, vocab_size=len(vocabulary), then=then), vocabulary, eos_token_ids=eos, **options
    )


def test_stp_01_02_max_tokens_bounds_each_output_and_none_means_the_context(engine):
    assert [len(engine.generate("ab", max_tokens=n, ignore_eos=True).token_ids) for n in (1, 7)] == [1, 7]
    result = engine.generate("ab", ignore_eos=True)
    assert result.usage.total_tokens == 128 and result.finish_reason == "length"
    handle = engine.submit("ab", ignore_eos=True)
    *_, last = handle
    assert "context of 128" in last.message
    many = engine.generate("ab", max_tokens=10**6, num_sequences=2, seed=1)
    assert [len(output.token_ids) for output in many.outputs] == [126, 126]  # STP-04


def test_stp_03_max_tokens_zero_runs_the_prompt_and_nothing_else(engine):
    events = list(engine.stream("abcdefgh", max_tokens=0, num_sequences=2, prompt_logprobs=1))
    check_stream(events, 2, prompt_tokens=8, completion_tokens=0)
    assert len(events[0].tokens) == 8 and {e.reason for e in events[1:]} == {"length"}
    result = engine.generate("abcdefghi", max_tokens=0)
    assert result.token_ids == [] and result.text == "" and result.usage.cached_prompt_tokens == 8
    assert result.logprobs is None


def test_stp_05_nothing_ends_an_output_before_min_tokens(tmp_path):
    with scripted(tmp_path, letters("ab") + [0] + letters("c"), then=3) as engine:
        assert engine.generate([1], temperature=0, max_tokens=9).usage.completion_tokens == 3
        # The eos at position 2 may not be drawn, so the first of the rest is: "a".
        result = engine.generate([1], temperature=0, min_tokens=4, max_tokens=9, stop="a")
        assert result.text[:3] == "aba" and result.usage.completion_tokens >= 4
        stopped = engine.generate([1], temperature=0, min_tokens=2, max_tokens=9, stop_token_ids=letters("a"))
        assert stopped.token_ids[0] != letters("a")[0] and stopped.usage.completion_tokens >= 2


def test_stp_08_10_11_a_stop_text_ends_the_output_with_or_without_it(tmp_path):
    with scripted(tmp_path, letters("abcdef")) as engine:
        for include, text in ((None, "ab"), (False, "ab"), (True, "abcd")):
            result = engine.generate([1], temperature=0, stop=["zz", "cd"], include_stop_in_output=include)
            assert result.text == text and result.finish_reason == "stop" and result.stop_match.stop_text == "cd"
            assert result.usage.completion_tokens == 4


def test_stp_09_10_11_a_stop_token_ends_the_output_with_or_without_it(tmp_path):
    with scripted(tmp_path, letters("abcdef")) as engine:
        for include, text in ((False, "ab"), (True, "abc")):
            result = engine.generate([1], temperature=0, stop_token_ids=letters("xc"), include_stop_in_output=include)
            assert result.text == text and result.stop_match.stop_token_id == 3 and result.token_ids == letters(text)
            assert result.usage.completion_tokens == 3  # USE-02: sampled and not emitted counts


def test_stp_12_13_14_eos_ends_unless_ignored_and_a_callers_stop_of_that_id_is_the_callers(tmp_path):
    with scripted(tmp_path, [1, 0, 2, 2]) as engine:
        result = engine.generate([1], temperature=0, max_tokens=4)
        assert result.text == "a" and result.token_ids == [1, 0] and result.stop_match.eos_token_id == 0
        ignored = engine.generate([1], temperature=0, max_tokens=4, ignore_eos=True)
        assert ignored.token_ids == [1, 0, 2, 2] and ignored.finish_reason == "length" and ignored.text == "abb"
        for ignore in (False, True):
            caller = engine.generate([1], temperature=0, max_tokens=4, stop_token_ids=0, ignore_eos=ignore)
            assert caller.stop_match.stop_token_id == 0 and caller.token_ids == [1]


def test_stp_15_a_stop_token_wins_over_a_stop_text_at_the_same_token(tmp_path):
    with scripted(tmp_path, letters("abc")) as engine:
        result = engine.generate([1], temperature=0, stop="b", stop_token_ids=2)
        assert result.stop_match.stop_token_id == 2


def test_stp_16_stops_never_match_the_prompt(tmp_path):
    with scripted(tmp_path, letters("abab")) as engine:
        assert engine.generate([2], temperature=0, max_tokens=2, stop="bab").text == "ab"


def test_stp_17_each_output_stops_on_its_own(engine):
    result = engine.generate("ab", num_sequences=8, seed=2, stop_token_ids=letters("abc"), max_tokens=60)
    assert len({len(output.token_ids) for output in result.outputs}) > 2
    assert result.usage.completion_tokens == sum(len(o.token_ids) + (o.finish_reason == "stop") for o in result.outputs)


# ---- sampling parameters -------------------------------------------------------------------------


def test_smp_01_the_request_comes_before_the_engine_and_that_before_the_checkpoint(tmp_path):
    config = {"do_sample": True, "temperature": 0.3, "top_k": 7, "top_p": 0.9, "max_new_tokens": 6}
    default = SamplingParams(temperature=0.5, num_sequences=2)
    with scripted_engine(tmp_path, hashed(27), ABC, generation_config=config, default_sampling=default) as engine:
        effective = engine.generate("ab", top_p=0.4)
        assert effective.sampling == SamplingParams(
            temperature=0.5, top_p=0.4, top_k=7, min_p=0.0, frequency_penalty=0.0, presence_penalty=0.0,
            repetition_penalty=1.0, num_sequences=2,
        )  # fmt: skip
        assert effective.stopping.max_tokens == 6 and len(effective.outputs) == 2
        assert engine.generate("ab", temperature=0, num_sequences=1, max_tokens=8).usage.completion_tokens == 8


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
        {"generation_config": {"max_new_tokens": -5}},
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


# ---- prefix cache and usage ----------------------------------------------------------------------


def cached(engine, prompt="abcdefghij", **options) -> int:
    return engine.generate(prompt, temperature=0, max_tokens=1, **options).usage.cached_prompt_tokens


def test_kvo_01_02_bypass_reuses_nothing_and_still_caches(engine):
    assert [cached(engine, bypass_prefix_cache=b) for b in (True, True, False, True)] == [0, 0, 8, 0]


def test_kvo_03_a_salt_separates(engine):
    assert [cached(engine, cache_salt=s) for s in ("x", None, "y", "x", "y", None)] == [0, 0, 0, 8, 8, 8]


def test_kvo_05_use_04_05_only_full_blocks_are_reused_and_one_token_is_computed(engine):
    cached(engine)
    assert [cached(engine, "abcdefghijklmnop"[:n]) for n in (3, 4, 5, 8, 9, 12)] == [0, 0, 4, 4, 8, 8]


def test_kvo_06_a_cached_prompt_gives_the_same_output(engine):
    first, second = (engine.generate("abcdefghij", logprobs=2, prompt_logprobs=2, **GREEDY) for _ in range(2))
    third = engine.generate("abcdefghij", logprobs=2, **GREEDY)
    assert third.usage.cached_prompt_tokens == 8 and third.token_ids == first.token_ids == second.token_ids
    assert list(first.prompt) == list(second.prompt) and first.tokens == third.tokens  # LGP-17


def test_clear_prefix_cache_forgets_everything_while_requests_run(gated):
    gated.gate.opened.set()
    assert cached(gated) == 0 and cached(gated) == 8
    running = gated.submit("abcdefghij", **ENDLESS)
    gated.clear_prefix_cache()
    assert cached(gated) in (0, 8)  # the running one may have restored it
    running.cancel()
    running.result()
    gated.clear_prefix_cache()
    assert cached(gated) == 0


def test_use_05_without_a_prefix_cache_the_count_is_absent(tmp_path):
    with scripted_engine(tmp_path, hashed(27), ABC, enable_prefix_cache=False) as engine:
        assert cached(engine) is None and cached(engine, cache_salt="x") is None


def test_use_02_03_the_prompt_counts_once_and_outputs_together(engine):
    usage = engine.generate("abc", num_sequences=4, seed=1, max_tokens=5).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 20, 23)


# ---- faults of the model -------------------------------------------------------------------------


@pytest.fixture
def faulty(tmp_path):
    switch = Switch()
    with scripted_engine(tmp_path, switch, ABC) as engine:
        engine.switch = switch
        yield engine


def test_nan_logits_end_that_request_alone_and_poison_no_cache(faulty):
    healthy = letters("abcdefghij")
    expected = faulty.generate(healthy, **GREEDY).token_ids
    poisoned = letters("zyxwvutsrq")
    faulty.switch.is_nan = lambda history: history[0] == poisoned[0] and len(history) > 12
    handles = [faulty.submit(prompt, num_sequences=2, **GREEDY) for prompt in (healthy, poisoned, healthy)]
    with pytest.raises(InternalError, match="NaN"):
        handles[1].result()
    assert [o.token_ids for h in (handles[0], handles[2]) for o in h.result().outputs] == [expected] * 4
    assert faulty.health().state == "ready" and load(faulty) == (0, 0, 0)
    faulty.switch.is_nan = lambda history: False
    again = faulty.generate(poisoned, **GREEDY)
    assert again.usage.cached_prompt_tokens == 0 and len(again.token_ids) == 5


def test_nan_in_the_prompts_scores_is_an_error_and_no_logprob(faulty):
    faulty.switch.is_nan = lambda history: len(history) == 3
    for max_tokens in (0, 3):
        with pytest.raises(InternalError, match="NaN"):
            faulty.generate("abcdef", prompt_logprobs=1, max_tokens=max_tokens)
    assert load(faulty) == (0, 0, 0) and faulty._loop.call(lambda s: s.blocks.num_cached) == 0
    faulty.switch.is_nan = lambda history: False
    assert faulty.generate("abcdef", prompt_logprobs=1, max_tokens=1).prompt[5].logprob <= 0


def test_an_error_reaches_every_way_of_reading(faulty):
    faulty.switch.fails = lambda history: len(history) == 5
    for read in (lambda h: h.result(), lambda h: list(h), lambda h: asyncio.run(h.aresult())):
        handle = faulty.submit("abc", **GREEDY)
        with pytest.raises(InternalError, match="told to fail") as first:
            read(handle)
        with pytest.raises(InternalError) as second:
            handle.result()
        assert first.value is not second.value and "failed" in repr(handle)
    with pytest.raises(InternalError):
        list(faulty.stream("abc", **GREEDY))
    with pytest.raises(InternalError):
        faulty.generate(["a", "abc"], **GREEDY)
    results = faulty.generate(["abcdefg", "abc"], on_error="return", **GREEDY)
    assert [type(r.error) for r in results] == [InternalError, InternalError] or results[0].token_ids
    assert load(faulty) == (0, 0, 0)


def test_a_raising_step_fails_its_plan_degrades_and_the_next_good_step_heals(faulty):
    faulty.switch.fails = lambda history: True
    with pytest.raises(InternalError, match="the forward pass failed.*told to fail"):
        faulty.generate("abcdefgh", **GREEDY)
    assert faulty.health().state == "degraded" and load(faulty) == (0, 0, 0)
    assert faulty._loop.call(lambda scheduler: scheduler.blocks.num_cached) == 0
    faulty.switch.fails = lambda history: False
    assert len(faulty.generate("abcdefgh", **GREEDY).token_ids) == 5
    assert faulty.health().state == "ready"


def test_a_raising_step_spares_those_that_were_not_in_it(tmp_path):
    switch = Switch()
    with scripted_engine(tmp_path, switch, ABC, max_num_seqs=1) as engine:
        switch.fails = lambda history: history[0] == 26
        bad, good = engine.submit("zzz", **GREEDY), engine.submit("abc", **GREEDY)
        with pytest.raises(InternalError):
            bad.result()
        assert len(good.result().token_ids) == 5


def test_a_fault_of_the_loop_itself_fails_what_is_open_and_the_engine_serves_on(faulty, caplog):
    original = faulty._loop._scheduler.schedule
    faulty._loop._scheduler.schedule = lambda: 1 / 0
    handles = [faulty.submit("abcdefgh", **GREEDY) for _ in range(3)]
    for handle in handles:
        with pytest.raises(InternalError, match="ZeroDivisionError"):
            handle.result(20)
    assert faulty.health().state == "degraded"
    faulty._loop._scheduler.schedule = original
    assert len(faulty.generate("abcdefgh", **GREEDY).token_ids) == 5 and load(faulty) == (0, 0, 0)
    assert faulty.health().state == "ready" and "the engine loop failed" in caplog.text


# ---- scheduling ----------------------------------------------------------------------------------


def test_must_show_6_a_short_prompt_starts_within_four_steps_of_a_long_ones_prefill(tmp_path):
    started = threading.Event()

    def script(history):
        return [1.0] * 27

    with scripted_engine(tmp_path, script, ABC, context=9000, num_kv_blocks=3000, max_num_batched_tokens=512) as engine:
        batches = engine._loop._runner._model.batches
        forward = engine._loop._runner._model.forward
        go = threading.Event()

        def held(batch):
            if len(batches) == 2:
                started.set()
                assert go.wait(20)
            return forward(batch)

        engine._loop._runner._model.forward = held
        long = engine.submit([1 + i % 26 for i in range(8000)], max_tokens=1)
        assert started.wait(20)
        before = len(batches)
        short = engine.submit([1 + (i * 7) % 26 for i in range(16)], max_tokens=1)
        first_token_at = []
        short.on_done(lambda: first_token_at.append(len(batches)))
        go.set()
        short.result(20)
        assert first_token_at[0] - before - 1 <= 4 and not long.done
        long.result(60)
        # While it had the engine to itself, the long prompt used the whole budget.
        assert max(map(sum, batches)) == 512 and len(batches) <= 8000 // 512 + 3


def test_gen_16_a_short_request_finishes_while_a_long_one_runs(engine):
    long = engine.submit("ab", ignore_eos=True)
    engine.generate("cd", max_tokens=2)
    assert not long.done or len(long.result().token_ids) == 126
    long.result()


def test_a_sequence_takes_as_many_steps_as_tokens(engine):
    engine.generate("abcdefgh", max_tokens=10, ignore_eos=True)
    assert engine._loop.num_steps == 10


# ---- lifecycle -----------------------------------------------------------------------------------


def test_a_closed_engine_says_so_everywhere_and_closes_twice(tmp_path):
    engine = scripted_engine(tmp_path, hashed(27), ABC)
    engine.generate("ab", max_tokens=1, request_id="x")
    engine.close()
    engine.close()
    calls = [
        lambda: engine.generate("ab"),
        lambda: engine.generate(["ab", "cd"]),
        lambda: asyncio.run(engine.agenerate("ab")),
        lambda: asyncio.run(engine.agenerate(["ab"])),
        lambda: engine.submit("ab"),
        lambda: engine.stream("ab"),
        lambda: engine.astream("ab"),
        lambda: list(engine.as_completed(["ab"])),
        lambda: engine.tokenize("ab"),
        lambda: engine.clear_prefix_cache(),
    ]
    for call in calls:
        with pytest.raises(PreconditionFailed, match="closed"):
            call()
    assert engine.health().state == "not_ready" and engine.load_info().running_requests == 0
    assert engine.info().instance_id and "stopped" in repr(engine)
    assert engine.drain(deadline_ms=0) is None


def test_closing_cancels_what_runs_and_wakes_who_waits(gated):
    handles = [gated.submit("abcd", **GREEDY) for _ in range(3)]
    assert gated.gate.entered.wait(20)
    closer = threading.Thread(target=gated.close)
    closer.start()
    gated.gate.opened.set()
    assert {handle.result(20).finish_reason for handle in handles} == {"cancelled"}
    closer.join(20)
    check_stream(handles[0], 1)


def test_with_closes_also_when_its_body_raises(tmp_path):
    with pytest.raises(KeyError), scripted_engine(tmp_path, hashed(27), ABC) as engine:
        raise KeyError
    assert engine.health().state == "not_ready"


def test_an_engine_does_not_pickle_and_says_what_to_do(engine):
    with pytest.raises(TypeError, match="EngineConfig"):
        pickle.dumps(engine)


def test_every_error_is_of_the_one_tree():
    names = [
        n
        for n in openengine.__all__
        if isinstance(getattr(openengine, n), type) and issubclass(getattr(openengine, n), Exception)
    ]
    assert all(issubclass(getattr(openengine, name), OpenEngineError) for name in names) and len(names) > 12
    assert KvOptions() == KvOptions()
