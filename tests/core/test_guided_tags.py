"""Structural tags: exact by an oracle of their texts, and refused by the part that is to blame."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("llguidance")

from guided_tools import byte_compiler

from openengine.core.guides.compiler import GuideCompiler
from openengine.errors import InvalidArgument
from openengine.types import GuidedDecoding


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> Iterator[GuideCompiler]:
    compiler = byte_compiler(tmp_path_factory.mktemp("bytes"), timeout_s=30)
    yield compiler
    compiler.close()


def structural(content: object) -> GuidedDecoding:
    return GuidedDecoding(structural_tag=json.dumps(content))


def form(content: object) -> GuidedDecoding:
    return structural({"type": "structural_tag", "format": content})


def structures(schema: object, end: str) -> GuidedDecoding:
    tag = {"begin": "<", "schema": schema, "end": end}
    return structural({"type": "structural_tag", "structures": [tag], "triggers": ["<"]})


def schema(content: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": content}


def tag(begin: str, content: object, end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: object) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def triggered(triggers: list[str], *tags: object, **options: object) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": triggers, "tags": list(tags), **options}


ANY = {"type": "any_text"}
NEST = {"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}

# ---- numbers, whose end shows only in what follows -------------------------------------------------


@pytest.mark.parametrize(
    ("content", "end", "valid", "invalid"),
    [
        ({"const": 1}, "2", ["12"], ["1", "122", "2"]),
        ({"const": -1}, "0", ["-10"], ["-1"]),
        ({"enum": [1, 12]}, "3", ["13", "123"], ["12", "1"]),
        ({"enum": [1, 12]}, "2x", ["12x", "122x"], ["12", "1x"]),
        ({"enum": [1, 123]}, "24", ["124", "12324"], ["12", "123", "1234"]),
        ({"type": "integer", "minimum": 10, "maximum": 99}, "5", ["105", "995"], ["10", "55", "1005"]),
        ({"type": "integer"}, "2}", ["12}", "22}", "122}"], ["2}", "12", "1}"]),
        ({"enum": [1, 2, None]}, "2", ["12", "22", "null2"], ["1", "2", "122"]),
        ({"type": "number"}, "<", ["1.5e3<", "0<"], ["1.<", "<"]),
    ],
)
def test_a_number_before_digits_is_taken_where_its_end_is_clear(compiler, content, end, valid, invalid):
    whole = compiler.compile(form(tag("", schema(content), end)))
    assert [text for text in valid + invalid if whole.accepts(text)] == valid
    older = compiler.compile(structures(content, end))
    assert all(older.accepts(f"a <{text} b") for text in valid)


@pytest.mark.parametrize(
    ("guide", "pointer", "end_at", "example"),
    [
        (form(tag("", schema({"enum": [1, 12]}), "2")), "/format/content", "/format/end", "'122'"),
        (form(tag("", schema({"type": "integer"}), "2")), "/format/content", "/format/end", ""),
        (form(tag("", schema({"type": "integer", "minimum": 0, "maximum": 99}), "5")), "/format/content", "/format/end", ""),
        (form(triggered(["<"], tag("<", schema({"type": "number"}), ["x", "e1"]))), "/format/tags/0/content", "/format/tags/0/end", ""),
        (form(tag("", schema({"enum": [None, 1, 12]}), "2")), "/format/content", "/format/end", "'2'"),
        (structures({"type": "integer"}, "0"), "/structures/0/schema", "/structures/0/end", ""),
    ],
)  # fmt: skip
def test_a_number_whose_end_is_not_clear_is_refused_with_both_places(compiler, guide, pointer, end_at, example):
    with pytest.raises(InvalidArgument) as caught:
        compiler.compile(guide)
    message = caught.value.message
    assert f"exactly at {pointer}:" in message and f"end at {end_at} " in message and example in message
    assert "where it ends is not clear" in message and "begin the end with" in message
    assert caught.value.details["pointer"] == pointer


# ---- free text up to what ends it ------------------------------------------------------------------

JSON_TAG = tag("<j>", schema({"enum": [1, {"a": 2}]}), "</j>")


@pytest.mark.parametrize(
    ("content", "valid", "invalid"),
    [
        (tag("[", triggered(["<j"], JSON_TAG), "]"), ["[]", "[a<j>1</j>b]", '[<j>{"a": 2}</j>]'], ["[a]b]", "[<j]", "[", "[]]"]),
        (tag("[", triggered(["<"], JSON_TAG), "</t>"), ["[a</t>", "[<j>1</j></t>"], ["[</j></t>", "[<</t>", "[a"]),
        (tag("[", triggered(["<j"], JSON_TAG, stop_after_first=True), ["]", "!"]), ["[a!", "[a<j>1</j>]"], ["[<j>1</j>b]", "[a!]"]),
        (tag("[", triggered(["<j"], JSON_TAG, at_least_one=True), "]"), ["[<j>1</j>]", "[a<j>1</j>b]"], ["[]", "[a]<j>1</j>]"]),
        (sequence(triggered(["<j"], JSON_TAG), const("."), NEST), [".x", "a<j>1</j>b.((x))"], ["a.b.x", "ax"]),
        (sequence(triggered(["<j"], JSON_TAG), tag("<e>", NEST, "")), ["<e>x", "a<j>1</j>b<e>(x)"], ["a<e><e>x", "<j>1</j>"]),
        (tag("[", ANY | {"excludes": ["1>"]}, ["1>", ">"]), ["[2>", "[21>", "[>"], ["[1", "[1>>"]),
        (tag("[", ANY | {"excludes": ["<"]}, "</t>"), ["[a</t>", "[</t>"], ["[<a</t>", "[a"]),
    ],
)  # fmt: skip
def test_free_text_ends_at_the_first_of_what_ends_it(compiler, content, valid, invalid):
    guide = compiler.compile(form(content))
    assert [text for text in valid + invalid if guide.accepts(text)] == valid


# ---- refusals --------------------------------------------------------------------------------------

REFUSED = {
    "free_text_before_a_rule": (sequence(ANY | {"excludes": ["!"]}, NEST), "/format/elements/0", "the free text at /format/elements/0 may go on"),
    "free_text_before_json": (sequence(ANY, schema({})), "/format/elements/1/json_schema", "the JSON value at /format/elements/1/json_schema"),
    "a_pattern_before_a_rule": (sequence(regex("(?!ab)[ab(]*"), NEST), "/format/elements/0/pattern", "the regular expression at /format/elements/0/pattern"),
    "a_pattern": (sequence(const("a"), regex("a[")), "/format/elements/1/pattern", "position 1"),
    "a_pattern_of_no_text": ({"type": "or", "elements": [const("a"), regex("(?=a)b")]}, "/format/elements/1/pattern", "matches no text"),
    "a_pattern_too_large": (tag("a", regex("((a{99}){99}b){99}"), "b"), "/format/content/pattern", "too complex"),
    "a_grammar": (tag("a", {"type": "grammar", "grammar": "root ::= ("}, "b"), "/format/content/grammar", "line 1"),
    "a_grammar_without_a_rule": (tag("a", {"type": "grammar", "grammar": "root ::= x"}, "b"), "/format/content/grammar", "grammar:x'"),
    "a_grammar_without_end": (sequence({"type": "grammar", "grammar": 'root ::= "a" root'}), "/format/elements/0/grammar", "no text derives"),
    "a_schema": (tag("a", schema({"type": "object", "required": 1}), "b"), "/format/content/json_schema/required", "/format/content/json_schema"),
    "a_schema_too_large": (tag("a", schema({"type": "string", "pattern": "a{999}{999}"}), "b"), "/format/content/json_schema", "too complex"),
    "a_trigger_after_an_exclude": (triggered(["a<"], tag("a<b", ANY, ""), excludes=["a"]), "/format/tags/0/begin", "can never occur"),
    "a_trigger_after_the_end": (tag("", triggered(["<t"], tag("<t>", ANY, ">")), "<"), "/format/content/tags/0/begin", "can never occur"),
    "numbers_in_one_place": (triggered(["<"], tag("<", schema({"enum": [1, 123]}), ">"), tag("<", schema({"const": 1}), "2/")), "/format/tags/0/content/json_schema", "cannot be told from"),
    "a_trigger_that_is_missing": (triggered(["<"], tag("<a", ANY, "b"), tag("a", ANY, "b")), "/format/tags/1/begin", "/format/triggers"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_part_and_its_pointer(compiler, name):
    content, pointer, said = REFUSED[name]
    with pytest.raises(InvalidArgument) as caught:
        compiler.compile(form(content))
    assert said in caught.value.message and "lookahead" not in caught.value.message
    assert caught.value.details["pointer"].startswith(pointer) and len(caught.value.message) < 500


_JUNK = [
    None,
    True,
    0,
    -1,
    1.5,
    "",
    "a",
    "\x00",
    "(?=a)",
    "(",
    [],
    [""],
    [1],
    [[]],
    [None],
    {},
    {"type": "tag"},
    {"a": 1},
    10**400,
]


def test_odd_members_are_taken_or_refused_with_a_pointer(compiler):
    rng = random.Random(4)
    for _ in range(250):
        content = _without_texts(_format(rng, 2))
        document = {"type": "structural_tag", "format": content}
        *path, last = rng.choice(list(_paths(document)))
        inner: Any = document
        for step in path:
            inner = inner[step]
        if rng.random() < 0.2:
            del inner[last]
        else:
            inner[last] = rng.choice(_JUNK)
        try:
            compiler.compile(GuidedDecoding(structural_tag=json.dumps(document)))
        except InvalidArgument as exc:
            assert re.search("at (#|/)", exc.message), exc.message
            assert "pointer" in exc.details, exc.message


def _paths(value: Any, path: tuple = ()) -> Iterator[tuple]:
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in members:
        yield (*path, key)
        yield from _paths(inner, (*path, key))


# ---- an oracle -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_gde_04_random_tags_take_exactly_their_texts(compiler, seed):
    rng = random.Random(seed)
    num_taken = 0
    for _ in range(100):
        content = _format(rng, 2)
        try:
            guide = compiler.compile(form(_without_texts(content)))
        except InvalidArgument as exc:
            assert "/format" in exc.message and "lookahead" not in exc.message
            continue
        num_taken += 1
        for _ in range(20):
            text = _some_text(rng, content)
            if rng.random() < 0.5:
                text = _changed(rng, text)
            assert guide.accepts(text) == (len(text) in _ends(content, text, 0)), (content, text)
    assert num_taken > 60


def _ends(content: dict[str, Any], text: str, start: int) -> set[int]:
    """Where a text of the format that begins at `start` may end."""
    kind = content["type"]
    places = range(start, len(text) + 1)
    if kind == "const_string":
        return _after(text, start, [content["value"]])
    if kind == "json_schema":
        return _after(text, start, content["texts"])
    if kind == "regex":
        return {end for end in places if re.fullmatch(content["pattern"], text[start:end])}
    if kind == "grammar":
        return {
            end for end in places if re.fullmatch(r"(\(*)x(\)*)", text[start:end]) and _is_balanced(text[start:end])
        }
    if kind == "or":
        return set().union(*(_ends(each, text, start) for each in content["elements"]))
    if kind == "any_text":
        return {end for end in places if not _holds(text[start:end], content.get("excludes", []))}
    if kind == "tag":
        return {
            end for inside in _after(text, start, [content["begin"]]) for end in _ends_of_rest(content, text, inside)
        }
    if kind == "triggered_tags":
        return _ends_of_triggered(content, text, start, [])
    if kind == "sequence":
        return _ends_of_sequence(content["elements"], text, start)
    return _ends_of_separated(content, text, start)


def _after(text: str, start: int, words: Sequence[str]) -> set[int]:
    return {start + len(word) for word in words if text.startswith(word, start)}


def _holds(text: str, words: Sequence[str]) -> bool:
    return any(word in text for word in words)


def _is_balanced(text: str) -> bool:
    return text.count("(") == text.count(")")


def _ends_of_rest(content: dict[str, Any], text: str, start: int) -> set[int]:
    closing = [content["end"]] if isinstance(content["end"], str) else content["end"]
    inner = content["content"]
    if inner["type"] in ("any_text", "triggered_tags") and all(closing):
        return _ends_of_free_text(inner, text, start, closing)
    return {end for inside in _ends(inner, text, start) for end in _after(text, inside, closing)}


def _ends_of_free_text(content: dict[str, Any], text: str, start: int, closing: Sequence[str]) -> set[int]:
    if content["type"] == "any_text":
        return _ends_at_first(text, start, closing, content.get("excludes", []))
    return _ends_of_triggered(content, text, start, closing)


def _ends_at_first(text: str, start: int, closing: Sequence[str], stops: Sequence[str]) -> set[int]:
    found = set()
    for place in range(start, len(text) + 1):
        for end in _after(text, place, closing):
            is_first = not _holds(text[start : end - 1], closing)
            across = any(
                text.startswith(stop, at) and at + len(stop) <= end for stop in stops for at in range(start, place)
            )
            if is_first and not across:
                found.add(end)
    return found


def _ends_of_triggered(content: dict[str, Any], text: str, start: int, closing: Sequence[str]) -> set[int]:
    stops = [*content["triggers"], *content.get("excludes", [])]
    found: set[int] = set()
    pending, seen = [(start, False)], set()
    for begin, has_tag in pending:
        if has_tag and content.get("stop_after_first"):
            found |= _after(text, begin, closing) if closing else {begin}
            continue
        if has_tag or not content.get("at_least_one"):
            if closing:
                found |= _ends_at_first(text, begin, closing, stops)
            else:
                found |= {end for end in range(begin, len(text) + 1) if not _holds(text[begin:end], stops)}
        for each in content["tags"]:
            trigger = min((word for word in content["triggers"] if each["begin"].startswith(word)), key=len)
            for place in range(begin, len(text)):
                before = text[begin : place + len(trigger) - 1]
                if text.startswith(each["begin"], place) and not _holds(before, [*stops, *closing]):
                    new = {(end, True) for end in _ends_of_rest(each, text, place + len(each["begin"]))} - seen
                    seen |= new
                    pending.extend(new)
    return found


def _ends_of_sequence(elements: Sequence[dict[str, Any]], text: str, start: int) -> set[int]:
    places = {start}
    for element, following in zip(elements, [*elements[1:], {"type": ""}], strict=True):
        closing = {"const_string": following.get("value"), "tag": following.get("begin")}.get(following["type"])
        if element["type"] in ("any_text", "triggered_tags") and closing:
            ends = (end for place in places for end in _ends_of_free_text(element, text, place, [closing]))
            places = {end - len(closing) for end in ends}
        else:
            places = {end for place in places for end in _ends(element, text, place)}
    return places


def _ends_of_separated(content: dict[str, Any], text: str, start: int) -> set[int]:
    found = set() if content["at_least_one"] else {start}
    pending = [start]
    for place in pending:
        ends = {end for each in content["tags"] for end in _ends(each, text, place)}
        found |= ends
        if not content["stop_after_first"]:
            nexts = {after for end in ends for after in _after(text, end, [content["separator"]])}
            pending.extend(nexts - set(pending))
    return found


# ---- random formats and texts ----------------------------------------------------------------------

_NUMBERS = [1, 12, 2, 123, 21, -1, 122]
_VALUES = [*_NUMBERS, None, True, "a", "<", {}, [1], 1.5]


def _word(rng: random.Random, low: int = 1, high: int = 3, letters: str = "ab<>/12 ") -> str:
    return "".join(rng.choice(letters) for _ in range(rng.randint(low, high)))


def _format(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["const_string", "regex", "json_schema", "json_schema", "any_text", "grammar"]
    kinds += ["tag", "tag", "sequence", "or", "triggered_tags", "triggered_tags", "separated"] if depth else []
    kind = rng.choice(kinds)
    if kind == "const_string":
        return const(_word(rng))
    if kind == "regex":
        return regex(rng.choice(["[ab]+", "a|ab", "[^<]*", "1*", "(?!ab)[ab]{1,3}", "<[ab]?>", ".{2}", "b?"]))
    if kind == "json_schema":
        values = rng.sample(rng.choice([_VALUES, _NUMBERS]), rng.randint(1, 3))
        content = {"const": values[0]} if len(values) == 1 else {"enum": values}
        return {**schema(content), "texts": [json.dumps(value, separators=(",", ":")) for value in values]}
    if kind == "any_text":
        return ANY | ({"excludes": [_word(rng, 1, 2) for _ in range(rng.randint(1, 2))]} if rng.random() < 0.4 else {})
    if kind == "grammar":
        return dict(NEST)
    if kind == "tag":
        return _random_tag(rng, depth, _word(rng, 0, 2))
    if kind in ("sequence", "or"):
        return {"type": kind, "elements": [_format(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind == "triggered_tags":
        triggers = [_word(rng, 1, 2, "<ab") for _ in range(rng.randint(1, 2))]
        tags = [_random_tag(rng, depth, rng.choice(triggers) + _word(rng, 0, 2)) for _ in range(rng.randint(1, 2))]
        options = {name: True for name in ("at_least_one", "stop_after_first") if rng.random() < 0.3}
        return triggered(
            triggers, *tags, **options, **({"excludes": [_word(rng, 1, 2)]} if rng.random() < 0.25 else {})
        )
    tags = [_random_tag(rng, depth, _word(rng, 0, 2)) for _ in range(rng.randint(1, 2))]
    flags = {name: rng.random() < 0.4 for name in ("at_least_one", "stop_after_first")}
    return {"type": "tags_with_separator", "separator": _word(rng, 0, 2), "tags": tags, **flags}


def _random_tag(rng: random.Random, depth: int, begin: str) -> dict[str, Any]:
    end = _word(rng, 0 if rng.random() < 0.2 else 1, 2, "<>/ab12")
    return tag(begin, _format(rng, depth - 1), [end, _word(rng, 1, 2)] if end and rng.random() < 0.3 else end)


def _without_texts(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_texts(value) for key, value in content.items() if key != "texts"}
    return [_without_texts(each) for each in content] if isinstance(content, list) else content


def _some_text(rng: random.Random, content: dict[str, Any]) -> str:
    """A text that the format is likely to take."""
    kind = content["type"]
    if kind == "const_string":
        return content["value"]
    if kind == "regex":
        return rng.choice(["a", "ab", "b", "", "<a>", "<>", "11", "bb", "ba"])
    if kind == "json_schema":
        return rng.choice(content["texts"])
    if kind == "any_text":
        return _word(rng, 0, 4)
    if kind == "grammar":
        depth = rng.randint(0, 2)
        return "(" * depth + "x" + ")" * depth
    if kind == "tag":
        end = content["end"] if isinstance(content["end"], str) else rng.choice(content["end"])
        return content["begin"] + _some_text(rng, content["content"]) + end
    if kind == "sequence":
        return "".join(_some_text(rng, each) for each in content["elements"])
    if kind == "or":
        return _some_text(rng, rng.choice(content["elements"]))
    tags = [_some_text(rng, rng.choice(content["tags"])) for _ in range(rng.randint(0, 2))]
    if kind == "triggered_tags":
        return "".join(_word(rng, 0, 2) + each for each in tags) + _word(rng, 0, 1)
    return content["separator"].join(tags)


def _changed(rng: random.Random, text: str) -> str:
    place = rng.randint(0, len(text))
    return text[:place] + rng.choice(["", "a", "<", ">", "1", "2", "/"]) + text[place + rng.randint(0, 1) :]


# ---- each kind of format ---------------------------------------------------------------------------

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}

TAGS: dict[str, tuple[GuidedDecoding, list[str], list[str]]] = {
    "structures": (
        structural({"type": "structural_tag", "triggers": ["<f="], "structures": [
            {"begin": "<f=a>", "schema": POINT, "end": "</f>"}, {"begin": "<f=ab>", "schema": {"type": "integer"}, "end": "</f>"}]}),
        ["", "hello < world", 'say <f=a>{"x": 1}</f> done', '<f=ab>12</f><f=a>{"x":3}</f>', "<f", "日本<f=ab>1</f>語"],
        ['<f=a>{"x": 1}', "<f=b>", '<f=a>{"y":1}</f>', "x <f=", '<f=ab>{"x":1}</f>'],
    ),
    "triggered_tags": (
        form({"type": "triggered_tags", "triggers": ["<t>"], "tags": [tag("<t>", schema(POINT), "</t>")]}),
        ["", "text", 'a<t>{"x":1}</t>b<t>{"x":2}</t>'], ["<t>", 'a<t>{"x":1}'],
    ),
    "at_least_one_and_stop": (
        form({"type": "triggered_tags", "triggers": ["<t>"], "tags": [tag("<t>", schema(POINT), "</t>")], "at_least_one": True, "stop_after_first": True}),
        ['hi <t>{"x":1}</t>'], ["hi", "", '<t>{"x":1}</t> more'],
    ),
    "sequence": (
        form({"type": "sequence", "elements": [
            {"type": "const_string", "value": "A:"},
            {"type": "or", "elements": [{"type": "regex", "pattern": "[0-9]+"}, {"type": "const_string", "value": "none"}]},
            tag("<think>", {"type": "any_text"}, "</think>"),
            {"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}]}),
        ["A:12<think>a<b</think>((x))", "A:none<think></think>x"], ["A:<think></think>x", "A:1<think>a</think>b</think>x", "A:1x"],
    ),
    "any_text": (form({"type": "any_text"}), ["", "anything\nat all"], []),
    "any_text_without": (form({"type": "any_text", "excludes": ["no"]}), ["yes", "n o"], ["nno"]),
    "text_up_to_a_tag": (
        form({"type": "sequence", "elements": [{"type": "any_text"}, tag("<j>", schema(POINT), "")]}),
        ['abc<j>{"x":1}', '<j>{"x":1}'], ["abc", '<j>{"x":1}<j>{"x":1}'],
    ),
    "separated": (
        form({"type": "tags_with_separator", "separator": ",", "tags": [tag("<", {"type": "regex", "pattern": "[a-z]+"}, ">")], "at_least_one": True}),
        ["<a>", "<a>,<bc>"], ["", "<a>,", "<a><b>"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAGS)
def test_gde_04_text_with_structure_where_a_trigger_begins_it(compiler, name):
    guide, valid, invalid = TAGS[name]
    compiled = compiler.compile(guide)
    assert [text for text in valid + invalid if compiled.accepts(text)] == valid


@pytest.mark.parametrize(
    ("guide", "said"),
    [
        (GuidedDecoding(structural_tag="{"), "not valid JSON"), (structural([]), '"type": "structural_tag"'), (structural({}), '"type": "structural_tag"'),
        (form({"type": "nope"}), "/format"), (form(tag("a", {"type": "any_text"}, "b") | {"x": 1}), "has x"),
        (form({"type": "sequence", "elements": []}), "/format/elements"), (form({"type": "regex", "pattern": "("}), "missing ')'"),
        (structural({"type": "structural_tag", "structures": [{"begin": "x", "schema": {}, "end": ""}], "triggers": ["<"]}), "none of the triggers"),
        (form(tag("a", schema({"uniqueItems": True, "type": "array"}), "b")), "/format/content/json_schema"),
        (form({"type": "sequence", "elements": [schema({"type": "integer"}), {"type": "regex", "pattern": "[0-9]"}]}), "its end is not clear"),
        (form({"type": "sequence", "elements": [{"type": "any_text"}, schema({})]}), "cannot be told from"),
        (form({"type": "const_string"}), "/format/value"), (form({"type": "triggered_tags", "triggers": [""], "tags": [tag("a", schema({}), "")]}), "triggers"),
    ],
)  # fmt: skip
def test_gde_07_a_structural_tag_that_cannot_be_exact_is_refused(compiler, guide, said):
    with pytest.raises(InvalidArgument) as caught:
        compiler.compile(guide)
    assert said in caught.value.message
