"""What each keyword of JSON Schema, or its negation, does to a shape under construction.

A rule takes one state and returns the states that also meet (or do not meet) its keywords: none, one or several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from openengine.core.guides.formats import format_language
from openengine.core.guides.language import ANY_CHAR, EMPTY, Language, complement, intersect, literal, repeat
from openengine.core.guides.regex import search
from openengine.core.guides.schema_shapes import (
    ArrayShape,
    Contains,
    Goal,
    MemberRule,
    NumberShape,
    ObjectDraft,
    State,
    StringShape,
    Values,
    counted,
    unique,
)
from openengine.core.guides.schema_source import Schema, unsupported
from openengine.core.guides.schema_values import Value, type_of
from openengine.errors import InvalidArgument

if TYPE_CHECKING:
    from openengine.core.guides.schema_solver import ShapeSolver

__all__ = ["Rule", "check_size", "rules_of"]

_MAX_STATES = 1000


@dataclass(frozen=True, slots=True)
class Rule:
    """What to do about keywords that belong together, for values of `kind` (None: of every type)."""

    keywords: tuple[str, ...]
    kind: str | None
    apply: Callable[[ShapeSolver, Any, Schema, bool], Iterable[State]]


def rules_of(schema: Schema, *, is_legacy: bool) -> list[Rule]:
    """The rules for the keywords of `schema`."""
    if "$ref" in schema and is_legacy:
        return [_RULE_OF["$ref"]]
    # In the order of the document, because that is the order of the members that keywords declare.
    keywords = (keyword for keyword in (*_FIRST, *schema.content) if keyword in schema and keyword in _RULE_OF)
    return unique(_RULE_OF[keyword] for keyword in keywords)


def check_size(states: list[State], schema: Schema, keywords: tuple[str, ...]) -> None:
    """Raises InvalidArgument when there are more alternatives than anyone wants to tell apart."""
    if len(states) > _MAX_STATES:
        keyword = next(keyword for keyword in keywords if keyword in schema)
        raise unsupported(schema.at(keyword), keyword, f"it makes more than {_MAX_STATES} alternatives")


# ---- any type --------------------------------------------------------------------------------------


def _type(solver: ShapeSolver, state: State, schema: Schema, holds: bool) -> list[State]:
    wanted = schema.content["type"]
    names = wanted if isinstance(wanted, list) else [wanted]
    if state.kind in names:
        return [state] if holds else []
    if state.kind == "number" and "integer" in names:
        if isinstance(state, Values):
            return [state]
        if state.range.is_integer is (not holds):
            return []
        return [NumberShape(replace(state.range, is_integer=holds))]
    return [] if holds else [state]


def _enum(solver: ShapeSolver, state: State, schema: Schema, holds: bool) -> list[State]:
    return _one_of_values(solver, state, schema, schema.content["enum"], holds)


def _const(solver: ShapeSolver, state: State, schema: Schema, holds: bool) -> list[State]:
    return _one_of_values(solver, state, schema, [schema.content["const"]], holds)


def _one_of_values(solver: ShapeSolver, state: State, schema: Schema, listed: list[Any], holds: bool) -> list[State]:
    listed = [value for value in listed if type_of(value) == state.kind]
    if isinstance(state, Values):
        wanted = set(map(Value.of, listed))
        kept = tuple(value for value in state.values if (value in wanted) is holds)
        return [Values(state.kind, kept)] if kept else []
    if holds:
        return [Values(state.kind, tuple(dict.fromkeys(map(Value.of, listed))))] if listed else []
    if state.kind == "string":
        return [StringShape(intersect(state.language, *(complement(literal(value)) for value in listed)))]
    if state.kind == "number":
        return [NumberShape(replace(state.range, excluded=state.range.excluded | set(map(Fraction, listed))))]
    return solver.refine_all([state], tuple((_schema_of(solver, value, schema), False) for value in listed))


def _schema_of(solver: ShapeSolver, value: Any, schema: Schema) -> Schema:
    """A schema that holds for one array or object alone."""
    if isinstance(value, list):
        size = len(value)
        content = {
            "prefixItems": [{"const": item} for item in value],
            "items": False,
            "minItems": size,
            "maxItems": size,
        }
        if not value:
            del content["prefixItems"]
    else:
        content = {
            "properties": {name: {"const": inner} for name, inner in value.items()},
            "required": list(value),
            "additionalProperties": False,
        }
    return solver.document.made(("const", Value.of(value)), {"type": type_of(value), **content}, schema.pointer)


def _all_of(solver: ShapeSolver, state: State, schema: Schema, holds: bool) -> list[State]:
    parts = _parts(solver, schema, "allOf")
    if holds:
        return solver.refine_all([state], tuple((part, True) for part in parts))
    return [new for part in parts for new in solver.refine([state], part, False)]


def _any_of(solver: ShapeSolver, state: State, schema: Schema, holds: bool) -> list[State]:
    parts = _parts(solver, schema, "anyOf")
    if not holds:
        return solver.refine_all([state], tuple((part, False) for part in parts))
    return [new for part in parts for new in solver.refine([state], part, True)]


def _one_of(solver: ShapeSolver, state: State, schema: Schema, holds: bool) -> list[State]:
    parts = _parts(solver, schema, "oneOf")
    # Values are judged one by one in the end, and two alternatives that both hold for one are no harm before that.
    if isinstance(state, Values):
        return [state]
    if not holds:
        none = solver.refine_all([state], tuple((part, False) for part in parts))
        pairs = [(a, b) for index, a in enumerate(parts) for b in parts[index + 1 :]]
        two = [new for a, b in pairs for new in solver.refine_all([state], ((a, True), (b, True)))]
        return none + two
    possible = [(part, new) for part in parts if (new := solver.refine([state], part, True))]
    found: list[State] = []
    for part, new in possible:
        rivals = [
            rival for rival, _ in possible if rival is not part and _overlap(solver, schema, part, rival, state.kind)
        ]
        found += solver.refine_all(new, tuple((rival, False) for rival in rivals))
    return found


def _overlap(solver: ShapeSolver, schema: Schema, part: Schema, rival: Schema, kind: str) -> bool:
    keys = ("type", "properties", "required", "patternProperties", "additionalProperties")
    around = {key: schema.content[key] for key in keys if key in schema}
    context = solver.document.made(("around", id(schema.content)), around, schema.pointer, schema.base)
    pair = sorted((part, rival), key=lambda each: each.pointer)
    return solver.may_hold(solver.goal((context, True), *((each, True) for each in pair)), kind)


def _not(solver: ShapeSolver, state: State, schema: Schema, holds: bool) -> list[State]:
    return solver.refine([state], solver.document.child(schema, "not"), not holds)


def _reference(solver: ShapeSolver, state: State, schema: Schema, holds: bool) -> list[State]:
    return solver.refine([state], solver.document.resolve(schema), holds)


def _if(solver: ShapeSolver, state: State, schema: Schema, holds: bool) -> list[State]:
    condition = solver.document.child(schema, "if")
    yes = [solver.document.child(schema, "then")] if "then" in schema else []
    no = [solver.document.child(schema, "else")] if "else" in schema else []
    if not yes and not no:
        return [state] if holds else []
    found: list[State] = []
    for branch, is_met in ((yes, True), (no, False)):
        if holds or branch:
            found += solver.refine_all([state], ((condition, is_met), *((part, holds) for part in branch)))
    return found


def _refused(solver: ShapeSolver, state: State, schema: Schema, holds: bool) -> list[State]:
    for keyword in ("$dynamicRef", "$recursiveRef", "unevaluatedItems", "unevaluatedProperties"):
        if keyword in schema and not (keyword.startswith("uneval") and schema.content[keyword] in (True, {})):
            raise unsupported(schema.at(keyword), keyword, "this keyword is not supported")
    return [state] if holds else []


def _parts(solver: ShapeSolver, schema: Schema, keyword: str) -> list[Schema]:
    return [solver.document.child(schema, keyword, index) for index in range(len(schema.content[keyword]))]


# ---- numbers and strings ---------------------------------------------------------------------------


def _minimum(solver: ShapeSolver, state: NumberShape, schema: Schema, holds: bool) -> list[State]:
    bound, strictly = schema.content["minimum"], schema.content.get("exclusiveMinimum") is True
    if holds:
        return [NumberShape(state.range.at_least(Fraction(bound), strictly=strictly))]
    return [NumberShape(state.range.at_most(Fraction(bound), strictly=not strictly))]


def _maximum(solver: ShapeSolver, state: NumberShape, schema: Schema, holds: bool) -> list[State]:
    bound, strictly = schema.content["maximum"], schema.content.get("exclusiveMaximum") is True
    if holds:
        return [NumberShape(state.range.at_most(Fraction(bound), strictly=strictly))]
    return [NumberShape(state.range.at_least(Fraction(bound), strictly=not strictly))]


def _exclusive_minimum(solver: ShapeSolver, state: NumberShape, schema: Schema, holds: bool) -> list[State]:
    bound = schema.content["exclusiveMinimum"]
    if isinstance(bound, bool):
        return [state] if holds else []
    if holds:
        return [NumberShape(state.range.at_least(Fraction(bound), strictly=True))]
    return [NumberShape(state.range.at_most(Fraction(bound), strictly=False))]


def _exclusive_maximum(solver: ShapeSolver, state: NumberShape, schema: Schema, holds: bool) -> list[State]:
    bound = schema.content["exclusiveMaximum"]
    if isinstance(bound, bool):
        return [state] if holds else []
    if holds:
        return [NumberShape(state.range.at_most(Fraction(bound), strictly=True))]
    return [NumberShape(state.range.at_least(Fraction(bound), strictly=False))]


def _multiple_of(solver: ShapeSolver, state: NumberShape, schema: Schema, holds: bool) -> list[State]:
    if not holds:
        raise unsupported(schema.at("multipleOf"), "multipleOf", "it cannot be negated")
    step = Fraction(schema.content["multipleOf"])
    return [NumberShape(state.range.with_multiple(step, schema.at("multipleOf")))]


def _search(solver: ShapeSolver, schema: Schema, keyword: str, pattern: str) -> Language:
    try:
        return search(pattern)
    except InvalidArgument as exc:
        raise unsupported(schema.at(keyword), keyword, exc.message) from None


def _within(solver: ShapeSolver, state: StringShape, language: Language, holds: bool) -> list[State]:
    return [StringShape(intersect(state.language, language if holds else complement(language)))]


def _min_length(solver: ShapeSolver, state: StringShape, schema: Schema, holds: bool) -> list[State]:
    return _within(solver, state, repeat(ANY_CHAR, schema.content["minLength"], None), holds)


def _max_length(solver: ShapeSolver, state: StringShape, schema: Schema, holds: bool) -> list[State]:
    limit = schema.content["maxLength"]
    return _within(solver, state, repeat(ANY_CHAR, 0, limit) if holds else repeat(ANY_CHAR, limit + 1, None), True)


def _pattern(solver: ShapeSolver, state: StringShape, schema: Schema, holds: bool) -> list[State]:
    return _within(solver, state, _search(solver, schema, "pattern", schema.content["pattern"]), holds)


def _format(solver: ShapeSolver, state: StringShape, schema: Schema, holds: bool) -> list[State]:
    language = format_language(schema.content["format"])
    if language is None:
        return [state] if holds else []
    return _within(solver, state, language, holds)


# ---- arrays ----------------------------------------------------------------------------------------


def _items(solver: ShapeSolver, state: ArrayShape, schema: Schema, holds: bool) -> list[State]:
    """`prefixItems`, `items` and `additionalItems`, which divide the items among them."""
    content = schema.content
    if isinstance(content.get("items"), list):
        first, rest = "items", "additionalItems"
    else:
        first, rest = "prefixItems", "items"
    prefix = [solver.document.child(schema, first, index) for index in range(len(content.get(first, ())))]
    after = solver.document.child(schema, rest) if rest in content else None
    if holds:
        goals = [solver.goal((part, True)) for part in prefix]
        return [_with_items(solver, state, goals, solver.goal((after, True)) if after else ())]
    found: list[State] = []
    for index, part in enumerate(prefix):
        goals = [*[()] * index, solver.goal((part, False))]
        found.append(replace(_with_items(solver, state, goals, ()), low=max(state.low, index + 1)))
    if after is not None:
        wrong = solver.goal((after, False))
        if any(part.content is True for part, _ in wrong):
            return found
        if prefix and wrong:
            raise unsupported(schema.at(rest), rest, "it cannot be negated after a prefix")
        if wrong:
            entry = Contains(wrong, None, 1, None, (schema.at(rest), rest))
            found.append(replace(state, contains=(*state.contains, entry)))
        else:
            found.append(replace(state, low=max(state.low, len(prefix) + 1)))
    return found


def _with_items(solver: ShapeSolver, state: ArrayShape, prefix: list[Goal], items: Goal) -> ArrayShape:
    size = max(len(prefix), len(state.prefix))
    mine = [*state.prefix, *[state.items] * (size - len(state.prefix))]
    theirs = [*prefix, *[items] * (size - len(prefix))]
    merged = tuple(solver.goal(a, b) for a, b in zip(mine, theirs, strict=True))
    return replace(state, prefix=merged, items=solver.goal(state.items, items))


def _min_items(solver: ShapeSolver, state: ArrayShape, schema: Schema, holds: bool) -> list[State]:
    bound = schema.content["minItems"]
    return counted(state, bound, None) if holds else counted(state, 0, bound - 1)


def _max_items(solver: ShapeSolver, state: ArrayShape, schema: Schema, holds: bool) -> list[State]:
    bound = schema.content["maxItems"]
    return counted(state, 0, bound) if holds else counted(state, bound + 1, None)


def _unique_items(solver: ShapeSolver, state: ArrayShape, schema: Schema, holds: bool) -> list[State]:
    if not schema.content["uniqueItems"]:
        return [state] if holds else []
    if not holds:
        raise unsupported(schema.at("uniqueItems"), "uniqueItems", "it cannot be negated")
    return [replace(state, unique=(schema.at("uniqueItems"), "uniqueItems"))]


def _contains(solver: ShapeSolver, state: ArrayShape, schema: Schema, holds: bool) -> list[State]:
    part = solver.document.child(schema, "contains")
    low, high = schema.content.get("minContains", 1), schema.content.get("maxContains")
    if solver.document.is_legacy:
        low, high = 1, None
    goal, others = solver.goal((part, True)), solver.goal((part, False))
    bounds = [(low, high)] if holds else [(0, low - 1), (None if high is None else high + 1, None)]
    found: list[State] = []
    for least, most in bounds:
        if least is None or (most is not None and most < least):
            continue
        if most == 0:
            found.append(_with_items(solver, state, [], others))
        elif (least, most) == (0, None):
            found.append(state)
        else:
            entry = Contains(goal, None if most is None else others, least, most, (schema.at("contains"), "contains"))
            found.append(replace(state, contains=(*state.contains, entry)))
    return found


# ---- objects ---------------------------------------------------------------------------------------


def _properties(solver: ShapeSolver, state: ObjectDraft, schema: Schema, holds: bool) -> list[State]:
    """`properties`, `patternProperties` and `additionalProperties`, which divide the members among them."""
    content = schema.content
    named = {name: solver.document.child(schema, "properties", name) for name in content.get("properties", {})}
    patterns = {
        _search(solver, schema, "patternProperties", text): solver.document.child(schema, "patternProperties", text)
        for text in content.get("patternProperties", {})
    }
    rest = solver.document.child(schema, "additionalProperties") if "additionalProperties" in schema else None
    keyword = next(each for each in ("properties", "patternProperties", "additionalProperties") if each in schema)
    where = (schema.at(keyword), keyword)
    if holds:
        source = MemberRule(
            tuple((name, solver.goal((part, True))) for name, part in named.items()),
            tuple((language, solver.goal((part, True))) for language, part in patterns.items()),
            solver.goal((rest, True)) if rest else (),
        )
        return [replace(state, sources=(*state.sources, source), where=where)]
    found: list[State] = []
    for name, part in named.items():
        source = MemberRule(((name, solver.goal((part, False))),))
        found.append(replace(_with_required(solver, state, [name]), sources=(*state.sources, source), where=where))
    outside = intersect(*(complement(literal(name)) for name in named), *(complement(each) for each in patterns))
    for keyword, part, names in (
        *(("patternProperties", part, language) for language, part in patterns.items()),
        *((("additionalProperties", rest, outside),) if rest else ()),
    ):
        if part.content is False:
            found.append(replace(state, some=(*state.some, names), where=where))
        elif part.content not in (True, {}):
            raise unsupported(schema.at(keyword), keyword, "it cannot be negated")
    return found


def _with_required(solver: ShapeSolver, state: ObjectDraft, names: Iterable[str]) -> ObjectDraft:
    return replace(state, required=tuple(dict.fromkeys((*state.required, *names))))


def _required(solver: ShapeSolver, state: ObjectDraft, schema: Schema, holds: bool) -> list[State]:
    names = schema.content["required"]
    if isinstance(names, bool):
        return [state] if holds else []
    if holds:
        return [] if state.absent & set(names) else [_with_required(solver, state, names)]
    return [replace(state, absent=state.absent | {name}) for name in names if name not in state.required]


def _dependencies(solver: ShapeSolver, state: ObjectDraft, schema: Schema, holds: bool) -> list[State]:
    states: list[State] = [state]
    denied: list[State] = []
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        for name, wanted in schema.content.get(keyword, {}).items():
            if isinstance(wanted, list):
                part = solver.document.made((id(wanted), "required"), {"required": wanted}, schema.at(keyword))
            else:
                part = solver.document.child(schema, keyword, name)
            present = solver.document.made(("present", name), {"required": [name]}, schema.at(keyword))
            if not holds:
                denied += solver.refine_all([state], ((present, True), (part, False)))
            else:
                without = solver.refine(states, present, False)
                states = unique([*without, *solver.refine_all(states, ((present, True), (part, True)))])
                check_size(states, schema, (keyword,))
    return states if holds else denied


def _property_names(solver: ShapeSolver, state: ObjectDraft, schema: Schema, holds: bool) -> list[State]:
    part = solver.document.child(schema, "propertyNames")
    where = (schema.at("propertyNames"), "propertyNames")
    if holds:
        return [replace(state, names=solver.goal(state.names, (part, True)), where=where)]
    wrong = solver.string_language(solver.goal((part, False)))
    return [] if wrong == EMPTY else [replace(state, some=(*state.some, wrong), where=where)]


def _min_properties(solver: ShapeSolver, state: ObjectDraft, schema: Schema, holds: bool) -> list[State]:
    bound = schema.content["minProperties"]
    states = counted(state, bound, None) if holds else counted(state, 0, bound - 1)
    return [replace(each, where=(schema.at("minProperties"), "minProperties")) for each in states]


def _max_properties(solver: ShapeSolver, state: ObjectDraft, schema: Schema, holds: bool) -> list[State]:
    bound = schema.content["maxProperties"]
    states = counted(state, 0, bound) if holds else counted(state, bound + 1, None)
    return [replace(each, where=(schema.at("maxProperties"), "maxProperties")) for each in states]


_RULES = (
    Rule(("$dynamicRef", "$recursiveRef", "unevaluatedItems", "unevaluatedProperties"), None, _refused),
    Rule(("type",), None, _type),
    Rule(("enum",), None, _enum),
    Rule(("const",), None, _const),
    Rule(("minimum",), "number", _minimum),
    Rule(("maximum",), "number", _maximum),
    Rule(("exclusiveMinimum",), "number", _exclusive_minimum),
    Rule(("exclusiveMaximum",), "number", _exclusive_maximum),
    Rule(("multipleOf",), "number", _multiple_of),
    Rule(("minLength",), "string", _min_length),
    Rule(("maxLength",), "string", _max_length),
    Rule(("pattern",), "string", _pattern),
    Rule(("format",), "string", _format),
    Rule(("prefixItems", "items", "additionalItems"), "array", _items),
    Rule(("minItems",), "array", _min_items),
    Rule(("maxItems",), "array", _max_items),
    Rule(("uniqueItems",), "array", _unique_items),
    Rule(("contains",), "array", _contains),
    Rule(("properties", "patternProperties", "additionalProperties"), "object", _properties),
    Rule(("required",), "object", _required),
    Rule(("minProperties",), "object", _min_properties),
    Rule(("maxProperties",), "object", _max_properties),
    Rule(("propertyNames",), "object", _property_names),
    Rule(("$ref",), None, _reference),
    Rule(("allOf",), None, _all_of),
    Rule(("not",), None, _not),
    Rule(("dependencies", "dependentRequired", "dependentSchemas"), "object", _dependencies),
    Rule(("if",), None, _if),
    Rule(("anyOf",), None, _any_of),
    Rule(("oneOf",), None, _one_of),
)

_RULE_OF = {keyword: rule for rule in _RULES for keyword in rule.keywords}
_FIRST = ("type", "enum", "const")  # they leave the least to do for the others
