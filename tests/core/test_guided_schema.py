"""JSON schemas as guides: right on every instance, or refused with a pointer and a keyword.

An instance is judged by its text, compact and with default spaces. An instance with another order of members than the
schema's, or a whole number with a fraction, does not count as refused.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")

from guided_tools import EOS, byte_compiler, compiled, greedy_output, random_output

from openengine.core.guides.compiled import CompiledGuide
from openengine.core.guides.compiler import GuideCompiler
from openengine.core.guides.grammar import Grammar
from openengine.core.guides.schema_grammar import add_schema
from openengine.core.guides.schema_source import SchemaDocument
from openengine.core.guides.work import CompileTimeout, Work
from openengine.errors import InvalidArgument
from openengine.types import GuidedDecoding, JsonObjectConstraint


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> Iterator[GuideCompiler]:
    compiler = byte_compiler(tmp_path_factory.mktemp("bytes"), timeout_s=60, max_bytes=4 << 20)
    yield compiler
    compiler.close()


def texts_of(instance: Any) -> tuple[str, str]:
    return json.dumps(instance, ensure_ascii=False, separators=(",", ":")), json.dumps(instance, ensure_ascii=False)


# ---- own cases: schema, valid instances, invalid instances -----------------------------------------

POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x"]}

CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "g6_an_enum_of_unicode": ({"enum": ["在线", "北京"]}, ["在线", "北京"], ["在", "åœ¨çº¿", 1]),
    "g7_bounds_around_zero": ({"type": "number", "minimum": -4, "maximum": 4}, [-0.5, -4, 0, 4, 1e-07], [4.1, -4.01, 1e16]),
    "g8_i_exclusive_zero": ({"type": "number", "exclusiveMinimum": 0}, [0.1, 5, 1e30], [0, -1, -0.1]),
    "g8_ii_integer_minimum": ({"type": "integer", "minimum": 2}, [2, 10, 123456], [1, 0, -3, 2.5]),
    "g8_iii_number_range": ({"type": "number", "minimum": 1, "maximum": 5}, [5, 1, 4.999], [5.7, 0.99]),
    "g8_iv_negative_minimum": ({"type": "integer", "minimum": -5}, [-3, -5, 7], [-6, -10]),
    "g12_pattern_of_one_name": (
        {"type": "object", "patternProperties": {"^score$": {"type": "integer"}}, "additionalProperties": False},
        [{}, {"score": 1}], [{"score": "a"}, {"other": 1}],
    ),
    "patterns_that_match_the_same_names": (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "^(a)": {"minimum": 3}}},
        [{}, {"a": 3}, {"b": "x"}], [{"a": "x"}, {"a": 2}],
    ),
    "g15_digits": ({"type": "string", "pattern": r"^\d+$"}, ["0123"], ["a", "", "1a"]),
    "g15_word_characters": ({"type": "string", "pattern": r"^[\w-]+$"}, ["a_b-c9"], ["a b", "é"]),
    "g24_optional_before_required": (
        {"type": "object", "properties": {k: {"type": "integer"} for k in "abcd"}, "required": ["b", "d"]},
        [{"b": 1, "d": 2}, {"a": 1, "b": 2, "c": 3, "d": 4}, {"b": 1, "c": 1, "d": 2, "e": None}], [{"b": 1}, {"a": 1, "c": 1}],
    ),
    "true": (True, [1, "a", None, {"a": [{}]}], []),
    "types": ({"type": ["integer", "null"]}, [1, None], [1.5, "1", True]),
    "const_object": ({"const": {"a": [1, "x"]}}, [{"a": [1, "x"]}], [{"a": [1]}, {}]),
    "const_number": ({"const": 1.5}, [1.5], [1, "1.5"]),
    "enum_with_type": ({"type": "string", "enum": ["a", 1, "bc"]}, ["a", "bc"], [1, "b"]),
    "enum_of_one_meaning": ({"enum": [[False], 0, 1]}, [[False], 0, 1], [[0], False, True]),
    "all_of": ({"allOf": [{"minimum": 3}, {"maximum": 5, "type": "number"}]}, [3, 4.5], [2, 6, "a"]),
    "any_of": ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]}, ["ab", 7], ["abc", 1.5]),
    "one_of_exclusive": (
        {"oneOf": [{"properties": {"t": {"const": "a"}}, "required": ["t"]}, {"properties": {"t": {"const": "b"}}, "required": ["t"]}],
         "type": "object"},
        [{"t": "a"}, {"t": "b", "x": 1}], [{"t": "c"}, {}],
    ),
    "one_of_overlapping": ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5, "a"], [3, 1.5]),
    "one_of_required": ({"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    "one_of_with_strings": ({"oneOf": [{"type": "string", "minLength": 3}, {"pattern": "^a"}]}, ["xyz", "a", 5], ["abc", "x"]),
    "not_required": ({"type": "object", "not": {"required": ["a", "b"]}}, [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
    "not_enum": ({"not": {"enum": ["a", 1, [2], {"k": 1}]}}, ["b", 2, [3], {}, {"k": 2}, {"k": 1, "l": 2}], ["a", 1, [2], {"k": 1}]),
    "not_type": ({"not": {"type": ["string", "integer"]}}, [1.5, None, []], ["a", 3]),
    "not_properties": (
        {"type": "object", "not": {"properties": {"k": {"type": "integer"}}, "required": ["k"]}}, [{}, {"k": "a"}], [{"k": 1}],
    ),
    "not_pattern": ({"type": "string", "not": {"pattern": "^a"}}, ["", "b"], ["a", "ab"]),
    "not_const_number": ({"type": "number", "not": {"const": 5}}, [4, 5.5, 50], [5]),
    "if_then_else": (
        {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"type": "integer"}}, ["ab", 3], ["a", 1.5, None],
    ),
    "if_on_a_member": (
        {"properties": {"k": {"enum": ["a", "b"]}, "v": {}}, "required": ["k"], "type": "object",
         "if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["v"]}},
        [{"k": "a", "v": 1}, {"k": "b"}], [{"k": "a"}, {"v": 1}],
    ),
    "dependent_required": ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
                           [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    "dependent_schemas": ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}}}},
                          [{"b": 1}, {"a": 1, "b": None}], [{"a": 1, "b": 1}]),
    "dependencies": ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "dependencies": {"a": ["b"], "c": {"maxProperties": 1}}},
                     [{"a": 1, "b": 1}, {"c": 1}], [{"a": 1}, {"b": 1, "c": 1}]),
    "property_names": ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, [{}, {"abc": 1}], [{"A": 1}, {"a1": 1}]),
    "member_counts": ({"type": "object", "properties": {k: {} for k in "abc"}, "additionalProperties": False,
                       "minProperties": 1, "maxProperties": 2},
                      [{"a": 1}, {"b": 1, "c": 1}], [{}, {"a": 1, "b": 1, "c": 1}, {"d": 1}]),
    "most_members": ({"type": "object", "maxProperties": 2}, [{}, {"a": 1, "b": 2}], [{"a": 1, "b": 2, "c": 3}]),
    "additional_schema": ({"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
                          [{"a": None, "b": 1}, {"b": 1, "c": 2}], [{"a": 1}, {"b": "x"}]),
    "patterns_that_overlap": ({"type": "object", "patternProperties": {"a*": {"type": "integer"}, "aaa*": {"maximum": 20}}},
                              [{"a": 21}, {"aaaa": 18}], [{"aaa": 21}, {"a": "x"}, {"aaaa": 31}]),
    "prefix_items": ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 1},
                     [[1], [1, "a"]], [[], ["a"], [1, "a", 2]]),
    "items_of_draft_7": ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [{"type": "integer"}],
                          "additionalItems": {"type": "string"}}, [[], [1, "a", "b"]], [["a"], [1, 2]]),
    "item_counts": ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}, [[1, 2], [1, 2, 3]], [[1], [1, 2, 3, 4]]),
    "contains": ({"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}, "minContains": 2, "maxContains": 3},
                 [[5, 6], [1, 5, 2, 7, 3], [5, 6, 7]], [[5], [1, 2], [5, 6, 7, 8], ["a", 5, 5]]),
    "unique_items": ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1},
                     [["a"], ["c", "a"], ["b", "a", "c"]], [[], ["a", "a"], ["a", "b", "a"]]),
    "unique_small_integers": ({"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 3}, "uniqueItems": True},
                              [[], [3, 1, 2]], [[1, 1], [4]]),
    "recursion": ({"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/t"}}},
                                                        "additionalProperties": False}}},
                  [{}, {"c": [{}, {"c": []}]}], [{"c": [1]}, {"d": 1}]),
    "recursion_with_an_impossible_branch": (
        {"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "required": ["next"]}},
         "anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}, [None], [{"next": None}, {}],
    ),
    "ref_siblings_of_2020": ({"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "maxLength": 2}, ["ab"], ["abc", 1]),
    "ref_siblings_of_draft_7": ({"$schema": "http://json-schema.org/draft-07/schema#", "allOf": [{"$ref": "#/definitions/s", "maxLength": 2}],
                                 "definitions": {"s": {"type": "string"}}}, ["ab", "abc"], [1]),
    "refs_by_id_and_anchor": ({"$id": "http://x.test/root", "$defs": {"a": {"$id": "inner", "type": "integer"}, "b": {"$anchor": "n", "type": "null"}},
                               "anyOf": [{"$ref": "inner"}, {"$ref": "#n"}]}, [1, None], ["a"]),
    "a_format_that_is_enforced": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "today"]),
    "a_format_that_is_a_note": ({"type": "string", "format": "color"}, ["anything"], [1]),
    "length_counts_characters": ({"type": "string", "minLength": 2, "maxLength": 2}, ["é😀", "\n\""], ["é", "abc"]),
    "lookahead": ({"type": "string", "pattern": "^(?!.*bad)[a-z]+$"}, ["good"], ["abadb", ""]),
    "multiple_of": ({"type": "integer", "multipleOf": 7}, [0, 14, -21], [1, 15]),
    "multiple_of_hundredths": ({"type": "number", "multipleOf": 0.01, "minimum": 0}, [0, 1.25, 3], [0.005, -1]),
    "multiple_in_a_range": ({"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 2}, [0, 0.5, 1.5, 2], [0.25, 2.5]),
    "nullable_beside_null": ({"type": ["integer", "null"], "nullable": True}, [1, None], ["a"]),
    "a_property_named_nullable": ({"type": "object", "properties": {"nullable": {"const": True}}}, [{"nullable": True}], [{"nullable": 1}]),
    "notes_of_any_kind": ({"title": "t", "description": 1, "x-foo": {"type": "string"}, "deprecated": True, "type": "null"}, [None], [1]),
    "draft_4_exclusive": ({"$schema": "http://json-schema.org/draft-04/schema#", "type": "number", "minimum": 1, "exclusiveMinimum": True},
                          [1.5, 2], [1, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_gde_01_a_schema_is_right_on_every_instance(compiler, name):
    schema, valid, invalid = CASES[name]
    guide = compiled(compiler, schema)
    assert [text for instance in valid for text in texts_of(instance) if not guide.accepts(text)] == []
    assert [text for instance in invalid for text in texts_of(instance) if guide.accepts(text)] == []


def test_gde_01_random_outputs_are_valid_for_an_independent_checker(compiler):
    jsonschema = pytest.importorskip("jsonschema")
    rng = random.Random(0)
    for name, (schema, _, _) in CASES.items():
        guide = compiled(compiler, schema)
        validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
        if "dependencies" in name or "draft_4" in name:
            validator = jsonschema.Draft4Validator(schema)
        for _ in range(3):
            text = random_output(compiler, guide, rng).decode()
            assert not list(validator.iter_errors(json.loads(text))), (name, text)


def test_gde_06_a_json_object_is_any_object(compiler):
    guide = compiler.compile(GuidedDecoding(json_object=JsonObjectConstraint()))
    assert guide.accepts("{}") and guide.accepts('{"a": [1, {"b": null}]}')
    assert not guide.accepts("[]") and not guide.accepts("1") and not guide.accepts('{"a"}')


@pytest.mark.parametrize("liked", [b" \n", b"\n ", b"\t\n ", b" "])
def test_g17_white_space_is_bounded(compiler, liked):
    guide = compiled(compiler, {"type": "object", "properties": {"rating": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["rating"], "additionalProperties": False})  # fmt: skip

    def prefer(tokens: list[int]) -> int:
        liking = [token for token in liked if token in tokens]
        return liking[0] if liking else EOS if EOS in tokens else tokens[0]

    output = greedy_output(compiler, guide, prefer)
    assert json.loads(output) == {"rating": 0} and len(output) < 120


def test_members_beyond_the_declared_cannot_repeat_their_names(compiler):
    guide = compiled(
        compiler, {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}}
    )
    assert not guide.accepts('{"a": null, "a": 1}')
    assert not guide.accepts('{"\\u0061": 1}')


# ---- refusals --------------------------------------------------------------------------------------

DRAFT_4 = "http://json-schema.org/draft-04/schema#"

REFUSED: dict[str, tuple[Any, str, str]] = {
    "g10_a_pointer_without_hash": ({"$ref": "/$defs/Name", "$defs": {"Name": {}}}, "/$ref", "$ref"),
    "g10_a_remote_reference": ({"properties": {"a": {"$ref": "https://example.com/s.json"}}}, "/properties/a/$ref", "$ref"),
    "a_reference_that_is_no_uri": ({"$id": "http://a]/", "$ref": "#/x"}, "/$ref", "$ref"),
    "more_items_than_any_text_has": ({"minItems": 10**30, "type": "array"}, "", "minItems"),
    "a_reference_to_nothing": ({"$ref": "#/$defs/x"}, "/$ref", "$ref"),
    "a_reference_in_circles": ({"$ref": "#"}, "/$ref", "$ref"),
    "g16_a_pattern_that_cannot_be_meant": ({"properties": {"a": {"pattern": "a\\b"}}}, "/properties/a/pattern", "pattern"),
    "listed_items_beside_a_prefix": (
        {"properties": {"a": {"prefixItems": [{"type": "integer"}], "items": [{"type": "string"}]}}}, "/properties/a/items", "items"
    ),
    "required_of_draft_3": ({"properties": {"a": {"type": "string", "required": True}}}, "/properties/a/required", "required"),
    "a_reference_in_circles_in_any_of": ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "/anyOf/0/$ref", "$ref"),
    "a_reference_in_circles_in_one_of": ({"oneOf": [{"$ref": "#"}, {"type": "null"}]}, "/oneOf/0/$ref", "$ref"),
    "a_negated_dependency": (
        {"items": {"type": "object", "not": {"dependencies": {"a": ["b"]}}}}, "/items/not/dependencies", "dependencies"
    ),
    "a_dependency_of_an_alternative": (
        {"type": "object", "oneOf": [{"required": ["a"], "dependencies": {"a": ["b"]}}, {"required": ["a"], "not": {"required": ["b"]}}]},
        "/oneOf/0/dependencies", "dependencies",
    ),
    "a_dependency_of_listed_objects": (
        {"enum": [{"a": 1}], "oneOf": [{"dependencies": {"a": ["b"]}}, {}]}, "/oneOf/0/dependencies", "dependencies"
    ),
    "a_dependency_as_a_condition": ({"if": {"dependencies": {"a": ["b"]}}, "then": False}, "/if/dependencies", "dependencies"),
    "a_keyword_of_openapi": ({"properties": {"a": {"type": "string", "nullable": True}}}, "/properties/a/nullable", "nullable"),
    "a_reference_to_what_no_value_meets": ({"$defs": {"x": False}, "$ref": "#/$defs/x"}, "", "$ref"),
    "unevaluated_properties": ({"unevaluatedProperties": False}, "/unevaluatedProperties", "unevaluatedProperties"),
    "dynamic_reference": ({"$dynamicRef": "#x"}, "/$dynamicRef", "$dynamicRef"),
    "unique_items_of_any_kind": ({"items": {"type": "string"}, "uniqueItems": True, "type": "array"}, "/uniqueItems", "uniqueItems"),
    "an_exclusive_number_in_draft_4": (
        {"$schema": DRAFT_4, "properties": {"a": {"exclusiveMinimum": 1}}}, "/properties/a/exclusiveMinimum", "exclusiveMinimum"
    ),
    "an_exclusive_boolean_after_draft_4": (
        {"items": {"maximum": 1, "exclusiveMaximum": True}}, "/items/exclusiveMaximum", "exclusiveMaximum"
    ),
    "a_part_of_another_draft": (
        {"$defs": {"a": {"$schema": DRAFT_4, "type": "null"}}, "$ref": "#/$defs/a"}, "/$defs/a/$schema", "$schema"
    ),
    "multiples_without_end": (
        {"allOf": [{"type": "number"}, {"multipleOf": 1009}]}, "/allOf/1/multipleOf", "multipleOf"
    ),
    "a_pattern_of_too_many_parts": (
        {"properties": {"a": {"type": "string", "pattern": "^((a{500}b){500}c){9}$"}}}, "/properties/a/pattern", "pattern"
    ),
    "too_many_items": (
        {"items": {"prefixItems": [{}] * 201, "type": "array"}}, "/items/prefixItems", "prefixItems"
    ),
    "too_many_counted_items": (
        {"properties": {"a": {"type": "array", "contains": {"const": 1}, "maxContains": 5000}}}, "/properties/a/contains", "contains"
    ),
    "undeclared_names_that_must_match": (
        {"items": {"type": "object", "not": {"propertyNames": {"pattern": "^a"}}, "maxProperties": 3}},
        "/items/maxProperties", "maxProperties",
    ),
    "a_negated_multiple": ({"not": {"multipleOf": 3}}, "/not/multipleOf", "multipleOf"),
    "several_undeclared_members": ({"type": "object", "minProperties": 2}, "/minProperties", "minProperties"),
    "an_unknown_type": ({"type": "str"}, "/type", "type"),
    "a_negative_length": ({"items": {"minLength": -1}}, "/items/minLength", "minLength"),
    "a_list_of_no_schemas": ({"anyOf": []}, "/anyOf", "anyOf"),
    "an_old_dialect": ({"$schema": "http://json-schema.org/draft-03/schema#"}, "/$schema", "$schema"),
    "a_draft_between_two": ({"$schema": "http://json-schema.org/draft-05/schema#"}, "/$schema", "$schema"),
    "the_next_draft": ({"$schema": "https://json-schema.org/draft/next/schema"}, "/$schema", "$schema"),
    "a_draft_by_its_date_alone": ({"$schema": "https://json-schema.org/2029-01/schema"}, "/$schema", "$schema"),
    "a_draft_to_come": ({"$schema": "https://json-schema.org/draft/2029-01/schema"}, "/$schema", "$schema"),
    "items_that_are_no_schema": ({"items": 5}, "/items", "items"),
    "listed_items_that_are_no_schema": ({"items": [{}, 5]}, "/items/1", "items"),
    "a_property_with_a_slash": ({"properties": {"a/b": 5}}, "/properties/a~1b", "properties"),
    "a_dependency_with_a_tilde": ({"dependencies": {"a~": [5]}}, "/dependencies/a~0", "dependencies"),
    "a_pattern_beside_listed_values": ({"items": {"enum": ["a"], "pattern": r"\bx"}}, "/items/pattern", "pattern"),
    "a_contradiction": ({"type": "string", "enum": [1]}, "", "type"),
    "nothing_at_all": (False, "", "false"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_gde_07_what_cannot_be_exact_is_refused_with_pointer_and_keyword(compiler, name):
    schema, pointer, keyword = REFUSED[name]
    with pytest.raises(InvalidArgument) as caught:
        compiled(compiler, schema)
    assert caught.value.details == {"pointer": pointer, "keyword": keyword}
    assert keyword in caught.value.message or keyword == "false"


@pytest.mark.parametrize("size", [1 << 30, 2**31 - 1, 2**53 - 1, 10**30])
def test_a_size_that_no_text_has_decides_by_itself(compiler, size):
    texts = ['"a"', "[1]", '{"a": 1}', "true"]

    def accepted(schema):
        guide = compiled(compiler, schema)
        return [text for text in texts if guide.accepts(text)]

    for index, (keyword, kind) in enumerate((("Length", "string"), ("Items", "array"), ("Properties", "object"))):
        others = [text for text in texts if text != texts[index]]
        assert accepted({f"max{keyword}": size}) == texts
        assert accepted({f"min{keyword}": size}) == others
        assert accepted({"not": {"type": kind, f"max{keyword}": size}}) == others
    assert accepted({"contains": {"type": "integer"}, "maxContains": size, "type": "array"}) == ["[1]"]


@pytest.mark.parametrize("step", [10**290, 10**300, 10**310])
def test_multiples_of_a_huge_step_are_a_typed_matter(compiler, step):
    try:
        guide = compiled(compiler, {"type": ["number", "null"], "multipleOf": step})
    except InvalidArgument:
        return
    assert (
        guide.accepts("0")
        and guide.accepts(str(3 * step))
        and not guide.accepts(str(step // 10))
        and not guide.accepts("1e+17")
    )


@pytest.mark.parametrize(
    ("schema", "fix"),
    [
        (False, "the schema of any value is true"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "in pydantic: list in place of set"),
        ({"type": "string", "nullable": True}, '"type": ["string", "null"]'),
        ({"properties": {"a": {"required": True}}}, "list the name in the object's required"),
        ({"oneOf": [{"$ref": "#"}, {"type": "null"}]}, "refers to itself"),
        ({"not": {"dependencies": {"a": ["b"]}}}, "write dependentRequired"),
        ({"minLength": 1.5}, "not 1.5"),
        ({"enum": {"a": [0.25]}}, "not {'a': [0.25]}"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {}}, "nullable": True}, '{"type": "null"}'),
        ({"title": "t", "type": "string", "enum": [1]}, "(type, enum)"),
        (
            {"$schema": "http://json-schema.org/draft-05/schema#"},
            "name one of draft-04, draft-06, draft-07, 2019-09, 2020-12",
        ),
    ],
)
def test_a_refusal_of_a_schema_says_what_to_write(compiler, schema, fix):
    with pytest.raises(InvalidArgument) as caught:
        compiled(compiler, schema)
    assert fix in caught.value.message


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '"a"', "nonsense", '{"type": "string",}', '{"minimum": NaN}', "[" * 5000]
)
def test_gde_07_text_that_is_no_schema_is_refused(compiler, text):
    with pytest.raises(InvalidArgument, match="JSON schema"):
        compiler.compile(GuidedDecoding(json_schema=text))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"type": "string", "type": "integer"}', "the name 'type' twice"),
        ('{"items": {"enum": [1], "a": {}, "enum": [2]}}', "the name 'enum' twice"),
        (r'{"const": "\ud800"}', "lone surrogate"),
        (r'{"enum": ["\uDFFF"]}', "lone surrogate"),
        (r'{"const": {"\ud800": 1}}', "lone surrogate"),
        (r'{"const": [["\ud800"]]}', "lone surrogate"),
        ('{"minimum": ' + "9" * 5000 + "}", "9… is out of range"),
        ('{"minimum": 0.' + "9" * 5000 + "}", "9… is out of range"),
        ('{"minimum": 1e' + "9" * 30 + "}", "is out of range"),
        ('{"pattern": "a{' + "9" * 5000 + '}"}', "a repetition count over"),
        (r'{"type": "string", "pattern": "[\\ud800-\\udfff]"}', "no value meets"),
    ],
    ids=lambda value: value[:20],
)
def test_text_that_python_would_read_in_its_own_way_is_refused(compiler, text, said):
    with pytest.raises(InvalidArgument) as caught:
        compiler.compile(GuidedDecoding(json_schema=text))
    assert said in caught.value.message and "set_int_max_str_digits" not in caught.value.message


def test_surrogates_in_a_class_stand_for_no_character(compiler):
    guide = compiled(compiler, {"type": "string", "pattern": r"^[^\ud800-\udfff]$"})
    assert guide.accepts('"😀"') and guide.accepts('"a"') and not guide.accepts('""')


def objects_of(num_members: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(num_members)}}


def test_as_many_optional_members_as_are_taken_can_be_followed(compiler):
    guide = compiled(compiler, objects_of(900))
    assert guide.accepts('{"p0":1,"p899":2,"more":3}') and not guide.accepts('{"p1":1,"p0":2}')


def test_more_optional_members_than_can_be_followed_are_refused_before_the_backend_sees_them(compiler):
    with pytest.raises(InvalidArgument, match="3000 optional members follow one another, the limit is 900"):
        compiled(compiler, objects_of(3000))


@pytest.mark.parametrize(
    ("listed", "other"),
    [(list(range(0, 7500, 3)), 4), ([(2 * number + 1) / 16 for number in range(-2000, 2000)], 0.25)],
    ids=["whole", "fractions"],
)
def test_a_long_list_of_numbers_can_be_followed(compiler, listed, other):
    guide = compiled(compiler, {"type": "array", "items": {"enum": [*listed, None, True]}})
    assert guide.accepts(json.dumps([*listed[::500], None, True])) and not guide.accepts(json.dumps([other]))
    assert set(json.loads(random_output(compiler, guide, random.Random(0)))) <= {*listed, None, True}


def test_more_listed_arrays_than_can_be_followed_are_refused(compiler):
    guide = compiled(compiler, {"properties": {"a": {"enum": [[number] for number in range(1500)]}}})
    assert guide.accepts('{"a": [1499]}') and not guide.accepts('{"a": [1500]}')
    with pytest.raises(InvalidArgument, match="2500 arrays are listed, the limit is 1500") as caught:
        compiled(compiler, {"properties": {"a": {"enum": [[number] for number in range(2500)], "type": "array"}}})
    assert caught.value.details == {"pointer": "/properties/a/enum", "keyword": "enum"}


CONTAINS = {
    "integers": {"contains": {"type": "integer"}},
    "three_integers": {"contains": {"type": "integer"}, "minContains": 3},
    "after_a_prefix": {"prefixItems": [{"type": "string"}, {}], "contains": {"minimum": 2}, "minContains": 2},
    "two_of_them": {"allOf": [{"contains": {"type": "integer"}}, {"contains": {"minimum": 1}, "minContains": 2}]},
    "of_a_number_of_items": {"contains": {"type": "string"}, "minContains": 2, "minItems": 3, "maxItems": 4},
    "beside_a_highest": {"contains": {"type": "string"}, "allOf": [{"contains": {"type": "null"}, "maxContains": 1}]},
    "objects": {"contains": {"required": ["a"], "type": "object", "properties": {"a": {"type": "integer"}}}, "minContains": 2},
    "a_negation_that_cannot_be_written": {"contains": {"multipleOf": 3, "type": "integer"}, "minContains": 2},
    "another": {"contains": {"type": "object", "maxProperties": 1}, "minContains": 2},
    "a_negated_items": {"not": {"items": {"type": "integer"}}},
    "arrays_of_arrays": {"contains": {"type": "array", "contains": {"type": "integer"}, "minContains": 2}, "minContains": 2},
    "itself": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}, {"type": "array", "contains": {"$ref": "#/$defs/a"}}]}}},
}  # fmt: skip


@pytest.mark.parametrize("name", CONTAINS)
def test_arrays_with_items_that_count_are_judged_as_by_an_independent_checker(compiler, name):
    jsonschema = pytest.importorskip("jsonschema")
    schema = {"type": "array", **CONTAINS[name]}
    guide, validator = compiled(compiler, schema), jsonschema.Draft202012Validator(schema)
    rng = random.Random(0)
    items = [
        0,
        1,
        2,
        3,
        6,
        2.5,
        "a",
        None,
        {},
        {"a": 1},
        {"a": "x"},
        {"a": 1, "b": 2},
        [],
        [1],
        [1, "a", 2],
        [[1, 1], [2, 3]],
        [None],
    ]
    verdicts = set()
    for _ in range(300):
        array = rng.choices(rng.sample(items, 3), k=rng.randrange(7))
        verdicts.add(is_valid := validator.is_valid(array))
        assert guide.accepts(json.dumps(array)) is is_valid, array
    assert verdicts == {True, False}


@pytest.mark.parametrize("low", [1, 3])
def test_any_number_of_items_that_count_can_be_followed(compiler, low):
    guide = compiled(compiler, {"type": "array", "contains": {"type": "integer"}, "minContains": low})
    assert guide.accepts(json.dumps([*range(1500)])) and guide.accepts(json.dumps(["a", *range(low), "a"] * 500))
    assert not guide.accepts(json.dumps(["a"] * 1500)) and not guide.accepts(json.dumps([*range(low - 1), "a"]))


def test_any_number_of_names_that_must_match_can_be_followed(compiler):
    guide = compiled(compiler, {"type": "object", "not": {"propertyNames": {"pattern": "^a"}}})
    assert guide.accepts(json.dumps({f"b{index}": index for index in range(1500)}))
    assert guide.accepts(json.dumps({f"a{index}": index for index in range(1500)} | {"b": 0}))
    assert not guide.accepts(json.dumps({f"a{index}": index for index in range(1500)}))


def test_several_names_that_must_match_may_be_one(compiler):
    names = [{"pattern": "^a"}, {"pattern": "b$"}, {"maxLength": 2}]
    guide = compiled(compiler, {"type": "object", "not": {"anyOf": [{"propertyNames": each} for each in names]}})
    for keys in itertools.chain.from_iterable(
        itertools.permutations(["aa", "ab", "xyz", "xb", "aab", "abc"], n) for n in range(4)
    ):
        is_valid = not any(all(fits(key) for key in keys) for fits in (
            lambda key: key[0] == "a", lambda key: key[-1] == "b", lambda key: len(key) < 3))  # fmt: skip
        assert guide.accepts(json.dumps(dict.fromkeys(keys, 1))) is is_valid, keys


# ---- public test data, where it is at hand ---------------------------------------------------------

DATA = Path(__file__).resolve().parents[3] / "shared" / "jsonschema"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the public JSON schema test data is not beside the checkout")


def suite() -> Iterator[tuple[str, Any, list[tuple[bool, Any]]]]:
    for file in json.loads((DATA / "draft2020-12.json").read_text("utf-8")):
        for case in file["cases"] if file["file"] != "format" else ():
            yield (
                f"{file['file']}: {case['description']}",
                case["schema"],
                [(t["valid"], t["data"]) for t in case["tests"]],
            )


def sample(part: int, of: int) -> Iterator[tuple[str, Any, list[tuple[bool, Any]]]]:
    for line in (DATA / "maskbench_sample.jsonl").read_text("utf-8").splitlines()[part::of]:
        item = json.loads(line)
        yield item["id"], item["schema"], [(test["valid"], test["data"]) for test in item["tests"]]


def whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: whole_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [whole_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e17 else value


def accepts_in_some_order(guide: CompiledGuide, value: Any) -> bool:
    """Whether some order of the members of `value` is accepted: a search over prefixes."""

    def possible(text: str) -> bool:
        return guide.accepts_prefix(text)

    def members(text: str, names: list[str], content: dict, then: Callable[[str], bool]) -> bool:
        if not names:
            return possible(text + "}") and then(text + "}")
        for name in names:
            key = f"{text}{',' if len(names) < len(content) else ''}{json.dumps(name, ensure_ascii=False)}:"
            rest = [other for other in names if other != name]
            if possible(key) and walk(key, content[name], lambda text, rest=rest: members(text, rest, content, then)):
                return True
        return False

    def items(text: str, index: int, content: list, then: Callable[[str], bool]) -> bool:
        if index == len(content):
            return possible(text + "]") and then(text + "]")
        return walk(text + ("," if index else ""), content[index], lambda text: items(text, index + 1, content, then))

    def walk(text: str, content: Any, then: Callable[[str], bool]) -> bool:
        if isinstance(content, dict):
            return members(text + "{", list(content), content, then)
        if isinstance(content, list):
            return items(text + "[", 0, content, then)
        text += json.dumps(content, ensure_ascii=False)
        return possible(text) and then(text)

    return walk("", value, guide.accepts)


def is_text(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def judge(
    compiler: GuideCompiler, cases: Iterator[tuple[str, Any, list[tuple[bool, Any]]]]
) -> tuple[int, Counter, list]:
    """How many schemas are handled, the keywords of the refused, and every instance that was judged wrongly."""
    handled, refused, wrong = 0, Counter(), []
    for name, schema, tests in cases:
        try:
            guide = compiled(compiler, schema)
        except InvalidArgument as exc:
            refused[exc.details.get("keyword", exc.message)] += 1
            continue
        handled += 1
        for is_valid, data in tests:
            accepted = [guide.accepts(text) for text in texts_of(data)] if is_text(data) else []
            if is_valid and not all(accepted):
                accepted = [accepts_in_some_order(guide, whole_numbers(data))]
            wrong += [(name, is_valid, data)] * any(each is not is_valid for each in accepted)
    return handled, refused, wrong


@needs_data
def test_the_public_suite_is_handled_without_a_wrong_instance(compiler):
    handled, refused, wrong = judge(compiler, suite())
    print(f"\nJSON Schema Test Suite: {handled} schemas handled, refused by keyword: {dict(refused.most_common())}")
    assert wrong == []
    assert handled >= 230


@needs_data
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in (1, 2))])
def test_nine_of_ten_schemas_of_the_maskbench_sample_are_handled_without_a_wrong_instance(compiler, part, request):
    if part and request.config.option.markexpr != "soak":
        pytest.skip("a third of the sample by default; pytest -m soak takes the rest")
    handled, refused, wrong = judge(compiler, sample(part, of=3))
    print(f"\nMaskBench sample: {handled} schemas handled, refused by keyword: {dict(refused.most_common())}")
    assert wrong == []
    assert handled >= 0.9 * (handled + refused.total())


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "integer", "multipleOf": 1009, "minimum": 2**53 + 1}, "multipleOf"),
        ({"type": "integer", "multipleOf": 1009, "minimum": 3, "maximum": 12345678901234567890}, "multipleOf"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{"type": "integer"}]}, "prefixItems"),
        ({"$schema": "http://json-schema.org/draft-06/schema#", "if": {"minimum": 1}, "then": False}, "if"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "properties": {"a": {"const": 1}}}, "const"),
    ],
)
def test_what_would_be_read_otherwise_is_refused_by_name(compiler, schema, keyword):
    with pytest.raises(InvalidArgument, match=keyword):
        compiler.compile(GuidedDecoding(json_schema=json.dumps(schema)))


@pytest.mark.parametrize("dialect", ["http://json-schema.org/schema#", "https://json-schema.org/schema"])
def test_a_dialect_without_a_draft_is_the_latest(compiler, dialect):
    guide = compiled(compiler, {"$schema": dialect, "prefixItems": [{"const": 1}]})
    assert guide.accepts("[1]") and not guide.accepts("[2]")


def test_listed_arrays_and_objects_can_be_denied_in_any_draft(compiler):
    for draft in (DRAFT_4, "http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"):
        guide = compiled(compiler, {"$schema": draft, "not": {"enum": [[1], [], {"a": [2]}]}})
        for instance in ([1], [], {"a": [2]}):
            assert not guide.accepts(json.dumps(instance))
        for instance in ([2], [1, 1], {}, {"a": [1]}, {"a": [2], "b": 1}, 1):
            assert guide.accepts(json.dumps(instance))


def test_a_dependency_can_be_denied_where_the_draft_knows_it(compiler):
    guide = compiled(compiler, {"$schema": DRAFT_4, "not": {"dependencies": {"a": ["b"]}}})
    assert guide.accepts('{"a": 1}') and not guide.accepts('{"a": 1, "b": 1}') and not guide.accepts("{}")


def test_an_id_beside_a_reference_names_nothing_in_draft_7(compiler):
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"a": {"$id": "#x", "$ref": "#/definitions/b"}, "b": {"type": "integer"}},
        "properties": {"p": {"$ref": "#x"}},
    }
    with pytest.raises(InvalidArgument, match="an anchor that does not exist"):
        compiled(compiler, schema)
    del schema["definitions"]["a"]["$ref"]
    assert compiled(compiler, schema).accepts('{"p": "any"}')


def test_id_names_a_schema_in_draft_4_only(compiler):
    schema = {
        "$defs": {"x": {"type": "integer"}},
        "properties": {"a": {"id": "some title", "$defs": {"x": {"type": "string"}}, "$ref": "#/$defs/x"}},
        "additionalProperties": False,
    }
    guide = compiler.compile(GuidedDecoding(json_schema=json.dumps(schema)))
    assert guide.accepts('{"a": 1}') and not guide.accepts('{"a": "x"}')


# ---- patterns --------------------------------------------------------------------------------------

_WORDS = ["".join(word) for word in itertools.islice(itertools.product("abcdefghij", repeat=4), 3000)]


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": _WORDS[:60], "pattern": "|".join(_WORDS)},
        {"pattern": "|".join(_WORDS)},
        {"patternProperties": {"|".join(_WORDS): {}}},
        {"enum": [{word: 1} for word in _WORDS[:60]], "patternProperties": {"|".join(_WORDS): {}}},
    ],
    ids=["beside_values", "of_a_string", "of_names", "beside_objects"],
)
def test_a_large_pattern_of_a_schema_stops_when_the_time_is_up(schema):
    now = itertools.count()
    with pytest.raises(CompileTimeout):
        add_schema(Grammar(max_bytes=4 << 20), schema, Work(50, lambda: float(next(now))))


def test_a_pattern_is_worked_out_once_for_all_the_values_beside_it():
    schema = {"enum": _WORDS[:60], "pattern": "|".join(_WORDS)}
    document = SchemaDocument(schema, Work(60))
    found = document.pattern(schema["pattern"], document.root, "pattern")
    assert document.pattern(schema["pattern"], document.root, "pattern") is found
    began = time.thread_time()
    add_schema(Grammar(max_bytes=4 << 20), schema, Work(60))
    assert time.thread_time() - began < 1
