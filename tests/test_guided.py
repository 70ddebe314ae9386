"""Guided decoding through the whole engine: every kind of guide, what is refused, and how outputs end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
import re
import sys
import threading
import time
import typing
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llguidance")

from openengine import (
    ChoiceConstraint,
    GenerateRequest,
    GuidedDecoding,
    GuidedDecodingMode,
    IncompleteOutput,
    InvalidArgument,
    Overloaded,
    PreconditionFailed,
    UnsupportedFeature,
)
from openengine.core.guides.formats import FORMATS
from tests.guided_cases import CASES, END, EOS, PERSON, REFUSED, VOCABULARY, guided_engine, ids, schema, script
from tests.scripted import hashed, scripted_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with guided_engine(tmp_path_factory.mktemp("guided")) as engine:
        yield engine


# ---- what guides mean ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_guide_takes_what_it_should_and_nothing_else(engine, name):
    options, taken, refused = CASES[name]
    guide = engine.compile_guide(**options)
    assert [text for text in taken if not guide.accepts(text)] == []
    assert [text for text in refused if guide.accepts(text)] == []


@pytest.mark.parametrize("name", CASES)
def test_gde_11_every_output_is_accepted_or_a_prefix_when_cut(engine, name):
    guide = engine.compile_guide(**CASES[name][0])
    result = engine.generate(ids("x"), guided=guide, seed=5, num_sequences=4, max_tokens=60, temperature=0.9)
    for output in result.outputs:
        if output.finish_reason == "stop":
            assert guide.accepts(output.text) and output.stop_match.eos_token_id in (EOS, END), output.text
        else:
            whole = output.text.rstrip("\ufffd")  # a character that was cut in the middle
            assert guide.accepts_prefix(whole), output.text


@pytest.mark.parametrize("name", REFUSED)
def test_gde_07_a_guide_that_does_not_compile_is_refused_before_acceptance(engine, name):
    options, said = REFUSED[name]
    num_steps = engine._loop.num_steps
    for call in (engine.compile_guide, lambda **options: engine.submit(ids("x"), **options)):
        with pytest.raises(InvalidArgument) as caught:
            call(**options)
        assert said in caught.value.message
    assert engine._loop.num_steps == num_steps and engine.load_info().running_requests == 0


def test_gde_09_gde_10_one_guide_and_a_known_backend(engine):
    for guide, said in ((GuidedDecoding(), "none"), (GuidedDecoding(regex="a", backend="xgrammar"), "xgrammar")):
        with pytest.raises(InvalidArgument, match=said):
            engine.generate(ids("x"), guided=guide)
    with pytest.raises(InvalidArgument, match="2 guides"):
        engine.generate(ids("x"), regex="a", choice=["b"])
    with pytest.raises(InvalidArgument, match="give a guide"):
        engine.compile_guide()
    with pytest.raises(InvalidArgument, match="did you mean 'regex'"):
        engine.compile_guide(regexp="a")


def test_mod_08_every_kind_is_listed(engine):
    capabilities = engine.model_info().generation.guided_decoding
    assert capabilities.supported and set(capabilities.modes) == set(GuidedDecodingMode)


def test_mod_08_a_model_without_eos_lists_none_and_says_why(tmp_path):
    with scripted_engine(tmp_path, hashed(4), ["a", "b", "c", "d"]) as engine:
        assert engine.model_info().generation.guided_decoding.supported is False
        with pytest.raises(UnsupportedFeature, match="end-of-sequence"):
            engine.generate([0], regex="a")


def test_mod_08_without_the_package_none_is_listed_and_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with guided_engine(tmp_path) as engine:
        assert engine.model_info().generation.guided_decoding.modes == ()
        with pytest.raises(UnsupportedFeature, match=r"\[guided\]"):
            engine.generate(ids("x"), regex="a")


# ---- how outputs go and end ------------------------------------------------------------------------


def test_g3_running_requests_do_not_notice_a_refused_guide(engine):
    handle = engine.submit(ids("x"), max_tokens=40, seed=1, ignore_eos=True)
    for _ in range(5):
        with pytest.raises(InvalidArgument):
            engine.generate(ids("x"), regex="(?=a)b")
    assert handle.result().token_ids == engine.generate(ids("x"), max_tokens=40, seed=1, ignore_eos=True).token_ids


def test_g17_white_space_is_bounded_and_the_value_comes(engine):
    guide = {"type": "object", "properties": {"rating": {"type": "integer"}}, "required": ["rating"]}
    guide["additionalProperties"] = False
    result = engine.generate(ids("w"), json_schema=guide, temperature=0, max_tokens=200)
    assert result.finish_reason == "stop" and list(result.parsed) == ["rating"]


def test_g18_stp_18_a_complete_guide_ends_with_eos(engine):
    result = engine.generate(ids("d"), regex="[0-9]{3}", temperature=0)
    assert result.text == "777" and result.finish_reason == "stop" and result.stop_match.eos_token_id == EOS


def test_g18_also_where_eos_is_ignored_or_more_tokens_are_wanted(engine):
    for options in ({"ignore_eos": True}, {"min_tokens": 10}, {"ignore_eos": True, "min_tokens": 10}):
        result = engine.generate(ids("d"), regex="[0-9]{3}", temperature=0, max_tokens=50, **options)
        assert result.text == "777" and result.stop_match.eos_token_id == EOS, options


def test_g19_no_end_token_is_drawn_before_the_guide_may_end(engine):
    result = engine.generate(ids("e"), json_schema=PERSON, temperature=0)
    assert result.stop_match.eos_token_id == END and set(result.parsed) == {"first_name", "age"}


def test_g22_the_longer_choice_is_reachable_and_so_is_the_shorter(engine):
    longer = engine.generate(ids("b"), choice=["a", "ab"], temperature=0)
    shorter = engine.generate(ids("e"), choice=["a", "ab"], temperature=0)
    assert (longer.text, shorter.text) == ("ab", "a")


def test_stp_05_min_tokens_holds_where_the_guide_can_go_on(engine):
    result = engine.generate(ids("e"), regex="[a-c]*", min_tokens=7, max_tokens=20, temperature=0)
    assert len(result.token_ids) == 8 and result.finish_reason == "stop"


def test_where_eos_is_ignored_a_guide_that_may_end_goes_on(engine):
    result = engine.generate(ids("e"), regex="[a-c]*", max_tokens=9, temperature=0, ignore_eos=True)
    assert len(result.token_ids) == 9 and result.finish_reason == "length" and EOS not in result.token_ids


def test_a_stop_id_ends_an_output_only_where_the_guide_may_end(engine):
    stop = VOCABULARY.index(b"blah")
    result = engine.generate(ids("d"), json_schema=PERSON, temperature=0, stop_token_ids=[stop])
    assert result.stop_match.stop_token_id == stop and set(result.parsed) == {"first_name", "age"}
    kept = engine.generate(
        ids("d"), json_schema=PERSON, temperature=0, stop_token_ids=[stop], include_stop_in_output=True
    )
    assert kept.text == result.text + "blah" and kept.parsed == result.parsed


def test_a_stop_text_ends_an_output_also_within_forced_tokens(engine):
    for jump in ({}, {"logprobs": True}):
        result = engine.generate(ids("x"), regex="[ab]-forced tail", temperature=0, stop="rced", **jump)
        assert result.text.endswith("-fo") and result.stop_match.stop_text == "rced"
        assert len(result.text) == 4 and result.usage.completion_tokens == 8


def test_a_guide_that_stop_ids_make_impossible_fails_its_own_request_only(engine):
    other = engine.submit(ids("x"), max_tokens=30, seed=2)
    with pytest.raises(InvalidArgument, match="stop token ids leave no token after 1 tokens"):
        engine.generate(ids("x"), regex="[xz]y+", stop_token_ids=[ord("y")])
    assert len(other.result().token_ids) > 0 and engine.health().state == "ready"


@pytest.mark.parametrize("options", [{}, {"min_tokens": 3}, {"ignore_eos": True}], ids=str)
def test_a_guide_that_stop_ids_never_let_begin_is_refused_before_acceptance(engine, options):
    with pytest.raises(InvalidArgument, match="leave no token to begin with"):
        engine.submit(ids("x"), regex="[yz]+", stop_token_ids=list(b"yz"), **options)
    assert engine.generate(ids("x"), regex="[yz]*", stop_token_ids=list(b"yz"), temperature=0).text == ""


def test_gde_11_length_says_what_was_cut(engine):
    cut = engine.generate(ids("x"), json_schema=PERSON, seed=1, max_tokens=9).outputs[0]
    assert cut.finish_reason == "length"
    assert cut.message == "max_tokens 9 reached; the output was cut off before it was complete under its guide"
    whole = engine.generate(ids("d"), regex="[0-9]{3}", temperature=0, max_tokens=3).outputs[0]
    assert whole.message == "max_tokens 3 reached; the output might have ended here under its guide"
    none = engine.generate(ids("x"), json_schema=PERSON, max_tokens=0).outputs[0]
    assert none.message == "max_tokens 0 reached; nothing was generated under the guide"


# ---- what comes back -------------------------------------------------------------------------------


def test_parsed_is_the_value_of_a_json_guide_and_none_of_others(engine):
    result = engine.generate(ids("x"), json_schema=PERSON, seed=3)
    assert result.parsed == json.loads(result.text) == result.to_dict()["parsed"]
    assert engine.generate(ids("x"), json_object=True, seed=3, max_tokens=300).outputs[0].guide.json_object is not None
    assert engine.generate(ids("x"), regex="[0-9]+", seed=3, max_tokens=4).parsed is None
    assert engine.generate(ids("x"), max_tokens=2).parsed is None
    assert pickle.loads(pickle.dumps(result)).parsed == result.parsed


def test_parsed_of_a_cut_output_raises_with_the_partial_text(engine):
    for options in ({"max_tokens": 9}, {"stop": ":"}):
        result = engine.generate(ids("x"), json_schema=PERSON, seed=1, **options)
        with pytest.raises(IncompleteOutput) as caught:
            result.parsed
        assert caught.value.text == result.text and caught.value.finish_reason == result.finish_reason
        assert result.to_dict()["parsed"] is None
        again = pickle.loads(pickle.dumps(caught.value))
        assert again.text == result.text and again.message == caught.value.message
    number = engine.generate(ids("d"), json_schema='{"type": "integer"}', temperature=0, max_tokens=3)
    assert number.text == "777" and number.to_dict()["parsed"] is None


def test_parsed_of_a_number_that_a_stop_text_cut_raises(engine):
    for options in ({}, {"include_stop_in_output": True}):
        cut = engine.generate(ids("x"), json_schema='{"const": 12345}', stop="3", **options)
        with pytest.raises(IncompleteOutput, match="more digits"):
            cut.parsed
    closed = engine.generate(ids("x"), json_schema='{"enum": [[1], [2]]}', stop="]", include_stop_in_output=True)
    assert closed.parsed in ([1], [2])


def test_choices_may_come_from_a_generator(engine):
    result = engine.generate(ids("x"), choice=(text for text in ("yes", "no")))
    assert result.text in ("yes", "no")


def test_a_pydantic_class_is_a_schema_and_parsed_its_instance(engine):
    pydantic = pytest.importorskip("pydantic")

    class Person(pydantic.BaseModel, extra="forbid"):
        name: str = pydantic.Field(max_length=5)
        age: int = pydantic.Field(ge=0, le=99)

    result = engine.generate(ids("x"), json_schema=Person, seed=4)
    assert isinstance(result.parsed, Person) and result.parsed.model_dump() == json.loads(result.text)
    guide = engine.compile_guide(json_schema=Person)
    assert isinstance(engine.generate(ids("x"), guided=guide, seed=5).parsed, Person)


def test_a_value_that_the_class_refuses_is_a_typed_error_and_no_value_in_a_row(engine):
    pydantic = pytest.importorskip("pydantic")

    class Odd(pydantic.BaseModel, extra="forbid"):
        n: int = pydantic.Field(ge=0, le=9)

        @pydantic.field_validator("n")
        @classmethod
        def refuse(cls, value: int) -> int:
            raise ([ValueError, KeyError][value % 2])("never")

    for seed in range(4):
        result = engine.generate(ids("x"), json_schema=Odd, seed=seed)
        with pytest.raises(PreconditionFailed, match="(?s)the class refuses it.*never") as caught:
            result.parsed
        assert not isinstance(caught.value, IncompleteOutput) and caught.value.__cause__ is not None
        assert result.to_dict()["parsed"] is None and result.to_dict()["text"] == result.text


def test_a_structural_tag_is_a_dict_or_its_text(engine):
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": "[ab]{3}"}}
    assert engine.compile_guide(structural_tag=tag).accepts("aba")
    assert engine.compile_guide(structural_tag=json.dumps(tag)).accepts("aba")
    with pytest.raises(InvalidArgument, match="structural_tag is no JSON"):
        engine.compile_guide(structural_tag={"type": {1}})
    with pytest.raises(InvalidArgument, match="json.dumps"):
        engine.compile_guide(GuidedDecoding(structural_tag=tag))


def test_types_that_are_no_schema_are_refused_with_what_makes_one_of_them(engine):
    pydantic = pytest.importorskip("pydantic")

    @dataclasses.dataclass
    class Point:
        x: int

    class Row(typing.TypedDict):
        x: int

    class Model(pydantic.BaseModel):
        x: int

    for wrong, fix in (
        (Point, "TypeAdapter"),
        (Row, "TypeAdapter"),
        (list[Point], "RootModel"),
        (Model(x=1), "class Model"),
    ):
        with pytest.raises(InvalidArgument, match=fix):
            engine.compile_guide(json_schema=wrong)
    assert engine.compile_guide(json_schema=pydantic.TypeAdapter(list[Point]).json_schema()).accepts('[{"x":1}]')


def test_what_is_no_guide_is_refused_with_the_keywords(engine):
    for wrong in ({"type": "object"}, "abc", 5):
        for call in (engine.compile_guide, lambda **options: engine.generate(ids("x"), **options)):
            with pytest.raises(InvalidArgument, match=r"compile_guide.*keyword such as json_schema, regex"):
                call(guided=wrong)
        with pytest.raises(InvalidArgument, match="compile_guide"):
            engine.generate(GenerateRequest(token_ids=ids("x"), guided=wrong))


@pytest.mark.parametrize(
    "guide",
    [
        GuidedDecoding(choice=["a", "b"]),
        GuidedDecoding(choice=ChoiceConstraint(choices=("a", 1))),
        GuidedDecoding(json_object=True),
        GuidedDecoding(regex=5),
        GuidedDecoding(json_schema={"type": "object"}),
        GuidedDecoding(json_schema="{}", output_type=[]),
    ],
)
def test_fields_of_a_guide_that_have_other_types_are_refused_by_name(engine, guide):
    for call in (
        lambda: engine.compile_guide(guide),
        lambda: engine.generate(ids("x"), guided=guide),
        lambda: engine.generate(GenerateRequest(token_ids=ids("x"), guided=guide)),
    ):
        with pytest.raises(InvalidArgument, match=r"guided\.(choice|json_object|regex|json_schema|output_type)"):
            call()
    assert engine.compile_guide(GuidedDecoding(choice=ChoiceConstraint(choices=["a", "b"]))).accepts("b")


def test_a_class_whose_schema_fails_is_named_with_its_reason(engine):
    class Broken:
        @classmethod
        def model_json_schema(cls):
            raise RuntimeError("no schema for it")

    class Unbound:
        def model_json_schema(self):
            return {}

    for wrong, why in ((Broken, "RuntimeError: no schema for it"), (Unbound, "TypeError")):
        with pytest.raises(InvalidArgument, match=rf"{wrong.__name__}\.model_json_schema\(\) fails: {why}"):
            engine.compile_guide(json_schema=wrong)


def test_a_guide_is_shown_in_short(engine):
    guide = engine.compile_guide(json_schema={"enum": ["x" * 50 + str(index) for index in range(50)]})
    assert repr(guide).startswith("CompiledGuide(json_schema='{") and len(repr(guide)) < 120
    assert repr(GuidedDecoding(regex="a+")) == "GuidedDecoding(regex='a+')"
    assert len(repr(engine.compile_guide(choice=[f"choice {index}" for index in range(99)]))) < 120


def test_a_schema_is_a_dict_or_its_text(engine):
    as_dict = engine.generate(ids("x"), json_schema=PERSON, seed=6)
    assert engine.generate(ids("x"), json_schema=json.dumps(PERSON), seed=6).text == as_dict.text
    for bad in (5, ["a"], int, {"a": {1}}):
        with pytest.raises(InvalidArgument, match="json_schema"):
            engine.generate(ids("x"), json_schema=bad)


def test_a_compiled_guide_is_accepted_wherever_a_guide_is(engine):
    guide = engine.compile_guide(GuidedDecoding(regex="[a-c]{4}"))
    request = GenerateRequest(token_ids=ids("x"), guided=guide)
    stream = "".join(event.text for event in engine.stream(ids("x"), guided=guide))
    for text in (stream, engine.generate(request).text, *(r.text for r in engine.generate([request, request]))):
        assert guide.accepts(text)


def test_a_compiled_guide_of_another_engine_is_refused(engine, tmp_path):
    with guided_engine(tmp_path) as other:
        guide = other.compile_guide(regex="a")
        with pytest.raises(InvalidArgument, match="another engine"):
            engine.generate(ids("x"), guided=guide)
    with pytest.raises(PreconditionFailed, match="closed"):
        other.compile_guide(regex="b")


def test_logprobs_are_the_models_own_also_of_forced_tokens(engine):
    result = engine.generate(ids("x"), json_schema=PERSON, seed=3, logprobs=1)
    assert result.text == engine.generate(ids("x"), json_schema=PERSON, seed=3).text
    history = tuple(ids("x"))
    for token in result.tokens:
        logits = np.array(script(history))
        np.testing.assert_allclose(token.logprob, logits[token.token_id] - np.log(np.exp(logits).sum()), atol=1e-4)
        history += (token.token_id,)


# ---- waiting for guides ----------------------------------------------------------------------------

PATHOLOGICAL = {
    "nested_repetition": {"regex": "((a?){60}){60}(a{60}){60}"},
    "exponential": {"regex": "(x+x+)+y(.*a){60}(a|b)*a(a|b){60}"},
    "deep_grammar": {"grammar": "root ::= " + "(" * 5000},
    "a_megabyte": {"json_schema": {"enum": ["x" * 100 + str(index) for index in range(10_000)]}},
    "ten_thousand_alternatives": {"choice": [f"choice {index}" for index in range(10_000)]},
    "deep_schema": {"json_schema": '{"items":' * 3000 + "{}" + "}" * 3000},
    "a_schema_that_doubles": {
        "json_schema": {
            "$defs": {f"s{level}": {"allOf": [{"$ref": f"#/$defs/s{level + 1}"}] * 2} for level in range(40)}
            | {"s40": {}},
            "$ref": "#/$defs/s0",
        }
    },
}


@pytest.mark.parametrize("name", PATHOLOGICAL)
def test_a_pathological_guide_is_compiled_or_refused_in_time_while_eight_requests_run(tmp_path, name):
    with guided_engine(tmp_path, guide_timeout_s=2.0) as engine:
        guide = engine.compile_guide(regex="[a-z]*")
        options = {"guided": guide, "max_tokens": 200, "ignore_eos": True}
        expected = engine.generate([ids("x")] * 8, seed=1, **options)
        handles = [engine.submit(ids("x"), seed=1, **options) for _ in range(8)]
        began = time.monotonic()
        try:
            engine.compile_guide(**PATHOLOGICAL[name])
        except (InvalidArgument, Overloaded):  # by whether it could not be compiled, or waited for the requests
            pass
        assert time.monotonic() - began < 10
        assert [handle.result().token_ids for handle in handles] == [result.token_ids for result in expected]


def test_an_event_loop_is_free_while_guides_compile(tmp_path):
    slow = [{"json_schema": {"enum": [f"{n}-{index}" for index in range(8000)]}} for n in range(12)]

    async def ticks() -> int:
        count = 0
        while True:
            try:
                await asyncio.sleep(0.002)
            except asyncio.CancelledError:
                return count
            count += 1

    async def main(engine):
        clock = asyncio.ensure_future(ticks())
        waiting = [asyncio.ensure_future(engine.agenerate(ids("x"), max_tokens=4, **options)) for options in slow]
        streams = [engine.astream(ids("x"), max_tokens=4, **options) for options in slow[:2]]
        await asyncio.sleep(0.05)
        began = time.monotonic()
        # The pool of threads has few, and none of them waits for a guide.
        await asyncio.gather(*(engine.agenerate(ids("x"), max_tokens=2) for _ in range(8)))
        unguided = time.monotonic() - began
        for stream in streams:
            assert [event async for event in stream]
        await asyncio.gather(*waiting)
        clock.cancel()
        return unguided, time.monotonic() - began, await clock

    with guided_engine(tmp_path) as engine:
        unguided, total, count = asyncio.run(main(engine))
    assert unguided < max(0.5, total / 2) and count > 10


def test_a_batch_in_an_event_loop_names_the_item_whose_guide_is_bad(engine):
    requests = [GenerateRequest(token_ids=ids("x"), guided=GuidedDecoding(regex=r)) for r in ("a", "(", "b")]
    with pytest.raises(InvalidArgument, match="item 1 of 3"):
        asyncio.run(engine.agenerate(requests))
    results = asyncio.run(engine.agenerate(requests, on_error="return"))
    assert [result.error is None for result in results] == [True, False, True]
    assert [r.error is None for r in engine.generate(requests, on_error="return")] == [True, False, True]


def test_leaving_a_stream_that_waits_for_its_guide_starts_nothing(engine):
    async def main():
        stream = engine.astream(ids("x"), regex="[a-z]{5}")
        stream.close()
        return [event async for event in stream]

    num_steps = engine._loop.num_steps
    assert asyncio.run(main()) == [] and engine._loop.num_steps == num_steps
    with pytest.raises(InvalidArgument, match="async for"):
        next(iter(engine.astream(ids("x"), regex="[a-z]{5}")))


def test_the_limits_of_guides_are_checked(tmp_path):
    for options in ({"guide_timeout_s": 0}, {"guide_timeout_s": "1"}, {"guide_max_bytes": 0}, {"guide_jump_ahead": 1}):
        with pytest.raises(InvalidArgument, match=next(iter(options))):
            guided_engine(tmp_path, **options)
    with guided_engine(tmp_path, guide_max_bytes=100) as engine:
        with pytest.raises(InvalidArgument, match="guide_max_bytes"):
            engine.generate(ids("x"), regex="a" * 101)


def test_closing_an_engine_ends_the_threads_of_its_guides(tmp_path):
    before = threading.active_count()
    with guided_engine(tmp_path) as engine:
        engine.generate(ids("x"), regex="[a-c]{3}")
        del engine
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_a_large_schema_of_a_request_is_a_guide_like_any_other(engine):
    options = schema(enum=[f"value {index}" for index in range(300)])
    assert json.loads(options["json_schema"])["enum"].count(engine.generate(ids("x"), seed=9, **options).parsed) == 1


def test_the_readme_lists_the_formats_that_are_enforced():
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    listed = re.search(r"Formats\*\* that are enforced: (.*?);", readme, re.DOTALL).group(1)
    assert set(re.findall(r"`([\w-]+)`", listed)) == FORMATS


HARD = {
    "ambiguous": 'root ::= root root root | root root | [a-z] | ""',
    "recursive": 'root ::= "b" x | "b" x "1" | "b" x "2" | "b" x "3" | "b" x "4" | "b" x "5" | ""\nx ::= root',
}


@pytest.mark.parametrize("name", HARD)
def test_a_guide_that_cannot_be_followed_ends_its_own_request_while_eight_others_go_on(tmp_path, name):
    with guided_engine(tmp_path, context=2048, num_kv_blocks=2048) as engine:
        options = {"regex": "[a-z]*", "seed": 1, "max_tokens": 300, "ignore_eos": True}
        expected = engine.generate([ids("x")] * 8, **options)
        handles = [engine.submit(ids("x"), **options) for _ in range(8)]
        with pytest.raises(InvalidArgument, match="cannot be followed any further.*the limit is"):
            engine.generate(ids("b"), grammar=HARD[name], max_tokens=2000, ignore_eos=True, temperature=0)
        assert [handle.result().token_ids for handle in handles] == [result.token_ids for result in expected]
        assert engine.health().state == "ready"
