"""Guides with the texts they take and refuse, and a model for them, shared by the tests in process and over gRPC.

Token b is the byte b, 256 and 257 end an output, and some tokens of several bytes follow. The first token of a prompt
says what the model likes:

w  white space     b  the letter b, then to end     d  three digits, then "blah"     e  to end, with the second id
any other: something that depends on all tokens
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from openengine import Engine
from openengine.types import ChoiceConstraint, GuidedDecoding
from tests.scripted import hashed, scripted_engine

EOS, END = 256, 257
EXTRA = (b"ab", b"abc", b'{"', b'":', b'"}', b"12", b"true", b"blah", b"name", b"  ", "线".encode())
VOCABULARY = [*(bytes([value]) for value in range(256)), "<eos>", "<end>", *EXTRA]
VOCAB_SIZE = len(VOCABULARY)
PERSON = {
    "type": "object",
    "properties": {"first_name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["first_name", "age"],
    "additionalProperties": False,
}
ENGINE = {"context": 512, "num_kv_blocks": 512, "max_num_seqs": 16, "max_num_batched_tokens": 64}
_LIKES = {"w": (b"  ", b" ", b"\n", b"\t"), "b": (b"b",), "d": (b"blah", b"7"), "e": ()}
_hashed = hashed(VOCAB_SIZE)


def script(history: tuple[int, ...]) -> list[float]:
    kind = chr(history[0])
    if kind not in _LIKES:
        return _hashed(history)
    liked = [VOCABULARY.index(text) for text in _LIKES[kind]]
    if kind == "d" and len(history) < 4:
        liked = [ord("7")]
    liked += [END, EOS] if kind == "e" else [EOS]
    logits = [-0.01 * token for token in range(VOCAB_SIZE)]
    for rank, token in enumerate(liked):
        logits[token] = 20.0 - rank
    return logits


def guided_engine(directory: Path, **options: Any) -> Engine:
    return scripted_engine(directory, script, VOCABULARY, eos_token_ids=(EOS, END), **{**ENGINE, **options})


def ids(text: str) -> list[int]:
    return list(text.encode())


def schema(**keywords: Any) -> dict[str, str]:
    return {"json_schema": json.dumps(keywords)}


def choice(*texts: str) -> GuidedDecoding:
    return GuidedDecoding(choice=ChoiceConstraint(texts))


def regex(pattern: str) -> GuidedDecoding:
    return GuidedDecoding(regex=pattern)


def grammar(text: str) -> GuidedDecoding:
    return GuidedDecoding(ebnf_grammar=text)


AMBIGUOUS = grammar('root ::= root root root | root root | [a-z] | ""')
# Right recursion over two rules: each letter may close all that were opened before, in eight ways.
_CLOSED = " | ".join(f'"a" x "{digit}"' for digit in range(8))
RECURSIVE = grammar(f'root ::= "a" x | {_CLOSED} | ""\nx ::= root')


_ORDER = {name: {"type": "integer"} for name in "abcd"}
_TAGS = {"structures": [{"begin": "<f>", "schema": {"enum": [1, 2]}, "end": "</f>"}], "triggers": ["<f"]}
_TAG_FORMAT = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}}}

# Name -> guide, texts it takes, texts it refuses.
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "gde_01_json_schema": (
        schema(type="object", properties={"a": {"type": "integer"}}, required=["a"], additionalProperties=False),
        ['{"a":1}', '{"a": 1}', '{ "a": -20 }', '{\n  "a": 1\n}'],
        ['{"a":1.5}', "{}", '{"a":1,"b":2}', '{"a":1} ', '{   "a":1}'],
    ),
    "gde_02_regex": ({"regex": "a[0-9]+z?"}, ["a1", "a12z"], ["a", "xa1", "a1zz"]),
    "gde_03_grammar": (
        {"grammar": 'root ::= "(" root ")" | [a-c]+'},
        ["a", "((cab))"],
        ["", "(a", "d"],
    ),
    "gde_04_structures": (
        {"structural_tag": json.dumps({"type": "structural_tag", **_TAGS})},
        ["", "free text", "x <f>1</f> y <f>2</f>"],
        ["<f>3</f>", "<f>1"],
    ),
    "gde_04_format": (
        {"structural_tag": json.dumps({"type": "structural_tag", "format": {**_TAG_FORMAT, "end": "</f>"}})},
        ["<f>1</f>", "<f>2</f>"],
        ["", "x", "<f>3</f>", "<f>1</f> "],
    ),
    "gde_05_g22_choice": ({"choice": ["a", "ab", "b"]}, ["a", "ab", "b"], ["", "ba", "abc"]),
    "gde_06_json_object": ({"json_object": True}, ["{}", '{"a": [1, null]}'], ["[]", "1", ""]),
    "g4_anchors": ({"regex": "^(.*)$"}, ["", "abc"], ["a\nb"]),
    "g4_empty_alternative": ({"regex": "^(|.*)$"}, ["", "abc"], ["a\nb"]),
    "g6_enum_of_other_scripts": (schema(enum=["在线", "北京"]), ['"在线"', '"北京"'], ['"在"', '"å"', '"上海"']),
    "g7_number_within_bounds": (
        schema(type="number", minimum=-4, maximum=4),
        ["-0.5", "-4", "0", "4"],
        ["4.1", "-4.01", "40"],
    ),
    "g8_exclusive_minimum": (schema(type="number", exclusiveMinimum=0), ["0.1", "10"], ["0", "-1", "0.0"]),
    "g8_integer_minimum": (schema(type="integer", minimum=2), ["2", "10"], ["1", "0", "-3"]),
    "g8_number_range": (schema(type="number", minimum=1, maximum=5), ["5", "1", "4.99"], ["5.7", "0.9"]),
    "g8_negative_minimum": (schema(type="integer", minimum=-5), ["-3", "0", "7"], ["-6", "-10"]),
    "g12_pattern_properties": (
        schema(type="object", patternProperties={"^score$": {"type": "integer"}}, additionalProperties=False),
        ["{}", '{"score": 3}'],
        ['{"score": "a"}', '{"other": 3}', "{ "],
    ),
    "g15_digits": (schema(type="string", pattern=r"^\d+$"), ['"12"'], ['""', '"a"', '"١"']),
    "g15_words": (schema(type="string", pattern=r"^[\w-]+$"), ['"a-b_1"'], ['""', '"a b"', '"é"']),
    "g24_optional_members_first": (
        schema(type="object", properties=_ORDER, required=["b", "d"], additionalProperties=False),
        ['{"a":1,"b":2,"c":3,"d":4}', '{"b":2,"d":4}', '{"a":1,"b":2,"d":4}'],
        ['{"a":1,"b":2}', "{}"],
    ),
}

# Name -> guide, what the refusal says.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "g1_gde_08_no_choices": ({"choice": []}, "choices is empty"),
    "gde_08_an_empty_choice": ({"choice": ["a", ""]}, "choices[1] is empty"),
    "gde_08_a_repeated_choice": ({"choice": ["a", "a"]}, "twice"),
    "g3_open_class": ({"regex": "[a-"}, "position"),
    "g3_lookahead": ({"regex": "(?=a)b"}, "lookahead"),
    "g10_reference_without_hash": (schema(**{"$ref": "/$defs/Name", "$defs": {"Name": {}}}), "/$defs/Name"),
    "g10_remote_reference": (schema(**{"$ref": "https://example.com/schema.json"}), "https://example.com"),
    "g15_word_boundary": (schema(type="string", pattern=r"\bfoo"), r"\b"),
    "g16_pattern_that_does_not_compile": (schema(type="string", pattern="(a"), "pattern"),
    "gde_07_no_json": ({"json_schema": "{"}, "JSON"),
    "gde_07_grammar_without_root": ({"grammar": 'start ::= "a"'}, "root"),
    "gde_07_tag_without_triggers": ({"structural_tag": '{"type": "structural_tag"}'}, "/structures"),
}
