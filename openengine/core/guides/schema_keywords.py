"""What each keyword of JSON Schema, or its negation, does to a shape under construction.

A rule takes one state and returns the states that also meet (or do not meet) its keywords: none, one or several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

from openengine.core.guides.formats import format_language
from openengine.core.guides.language import ANY_CHAR, Language, complement, intersect, literal, repeat
from openengine.core.guides.schema_member_keywords import (
    dependencies,
    max_properties,
    min_properties,
    properties,
    property_names,
    required,
)
from openengine.core.guides.schema_shapes import (
    ArrayShape,
    Contains,
    Demand,
    Goal,
    NumberShape,
    State,
    StringShape,
    Values,
    counted,
    unique,
)
from openengine.core.guides.schema_source import Schema, unsupported
from openengine.core.guides.schema_values import Value, type_of

if TYPE_CHECKING:
    from openengine.core.guides.schema_solver import ShapeSolver

__all__ = ["Rule", "rules_of"]


_MORE_THAN_ANY = 1 << 30  # characters, items or members: more than any text that a model writes, or anybody reads, has

_Apply: TypeAlias = "Callable[[ShapeSolver, Any, Schema, bool], Iterable[State]]"
"""What a rule makes of a state, where the schema holds or does not."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What to do about keywords that belong together, for values of `kind` (None: of every type)."""

    keywords: tuple[str, ...]
    kind: str | None
    apply: _Apply


def rules_of(schema: Schema, *, is_legacy: bool) -> list[Rule]:
    """The rules for the keywords of `schema`."""
    if "$ref" in schema and is_legacy:
        return [_RULE_OF["$ref"]]
    # In the order of the document, because that is the order of the members that keywords declare.
    keywords = (keyword for keyword in (*_FIRST, *schema.content) if keyword in schema and keyword in _RULE_OF)
    return unique(_RULE_OF[keyword] for keyword in keywords)


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
    return solver.refine_all([state], tuple(Demand(_schema_of(solver, value, schema), False) for value in listed))


def _schema_of(solver: ShapeSolver, value: Any, schema: Schema) -> Schema:
    """A schema that holds for one array or object alone."""
    # In keywords that mean the same in every draft.
    if isinstance(value, list):
        content = {
            "items": [{"enum": [item]} for item in value],
            "additionalItems": False,
            "minItems": len(value),
        }
    else:
        content = {
            "properties": {name: {"enum": [inner]} for name, inner in value.items()},
            "required": list(value),
            "additionalProperties": False,
        }
    return solver.document.made(("const", Value.of(value)), {"type": type_of(value), **content}, schema.pointer)


def _all_of(solver: ShapeSolver, state: State, schema: Schema, holds: bool) -> list[State]:
    parts = _parts(solver, schema, "allOf")
    if holds:
        return solver.refine_all([state], tuple(Demand(part, True) for part in parts))
    return [new for part in parts for new in solver.refine([state], part, False)]


def _any_of(solver: ShapeSolver, state: State, schema: Schema, holds: bool) -> list[State]:
    parts = _parts(solver, schema, "anyOf")
    if not holds:
        return solver.refine_all([state], tuple(Demand(part, False) for part in parts))
    return [new for part in parts for new in solver.refine([state], part, True)]


def _one_of(solver: ShapeSolver, state: State, schema: Schema, holds: bool) -> list[State]:
    parts = _parts(solver, schema, "oneOf")
    # Values are judged one by one in the end, and two alternatives that both hold for one are no harm before that.
    # With dependencies that the draft does not know nothing is left out, so that negating them is noticed.
    is_clear = not solver.document.has_unknown_dependencies
    if isinstance(state, Values) and is_clear:
        return [state]
    if not holds:
        none = solver.refine_all([state], tuple(Demand(part, False) for part in parts))
        pairs = [(a, b) for index, a in enumerate(parts) for b in parts[index + 1 :]]
        two = [new for a, b in pairs for new in solver.refine_all([state], (Demand(a, True), Demand(b, True)))]
        return none + two
    possible = [(part, new) for part in parts if (new := solver.refine([state], part, True)) or not is_clear]
    found: list[State] = []
    for part, new in possible:
        rivals = [
            rival
            for rival, _ in possible
            if rival is not part and (not is_clear or _overlap(solver, schema, part, rival, state.kind))
        ]
        found += solver.refine_all(new, tuple(Demand(rival, False) for rival in rivals))
    return found


def _overlap(solver: ShapeSolver, schema: Schema, part: Schema, rival: Schema, kind: str) -> bool:
    keys = ("type", "properties", "required", "patternProperties", "additionalProperties")
    around = {key: schema.content[key] for key in keys if key in schema}
    context = solver.document.made(("around", id(schema.content)), around, schema.pointer, schema.base)
    pair = sorted((part, rival), key=lambda each: each.pointer)
    return solver.may_hold(solver.goal(Demand(context, True), *(Demand(each, True) for each in pair)), kind)


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
            found += solver.refine_all([state], (Demand(condition, is_met), *(Demand(part, holds) for part in branch)))
    return found


def _refused(solver: ShapeSolver, state: State, schema: Schema, holds: bool) -> list[State]:
    for keyword in ("$dynamicRef", "$recursiveRef", "unevaluatedItems", "unevaluatedProperties"):
        if keyword in schema and not (keyword.startswith("uneval") and schema.content[keyword] in (True, {})):
            raise unsupported(schema.at(keyword), keyword, "this keyword is not supported")
    return [state] if holds else []


def _parts(solver: ShapeSolver, schema: Schema, keyword: str) -> list[Schema]:
    return [solver.document.child(schema, keyword, index) for index in range(len(schema.content[keyword]))]


# ---- numbers and strings ---------------------------------------------------------------------------


def _bound(keyword: str, *, is_low: bool, is_open: bool) -> _Apply:
    """The rule of `minimum` or one like it. In draft 4, `exclusiveMinimum` says whether `minimum` itself is allowed."""
    opened_by = "exclusiveMinimum" if is_low else "exclusiveMaximum"

    def apply(solver: ShapeSolver, state: NumberShape, schema: Schema, holds: bool) -> list[State]:
        bound = schema.content[keyword]
        if isinstance(bound, bool):
            return [state] if holds else []
        strictly = is_open or schema.content.get(opened_by) is True
        # The negation is bounded from the other side, and holds the bound itself where this does not.
        limited = state.range.at_least if is_low is holds else state.range.at_most
        return [NumberShape(limited(Fraction(bound), strictly=strictly is holds))]

    return apply


def _multiple_of(solver: ShapeSolver, state: NumberShape, schema: Schema, holds: bool) -> list[State]:
    if not holds:
        raise unsupported(schema.at("multipleOf"), "multipleOf", "it cannot be negated")
    step = Fraction(schema.content["multipleOf"])
    return [NumberShape(state.range.with_multiple(step, schema.at("multipleOf")))]


def _of_size(keyword: str, apply: _Apply) -> _Apply:
    """The rule of a bound for a size, where it is one that texts can have."""

    def rule(solver: ShapeSolver, state: State, schema: Schema, holds: bool) -> Iterable[State]:
        if schema.content[keyword] < _MORE_THAN_ANY:
            return apply(solver, state, schema, holds)
        return [state] if holds is keyword.startswith("max") else []

    return rule


def _within(state: StringShape, language: Language, holds: bool) -> list[State]:
    return [StringShape(intersect(state.language, language if holds else complement(language)))]


def _min_length(solver: ShapeSolver, state: StringShape, schema: Schema, holds: bool) -> list[State]:
    return _within(state, repeat(ANY_CHAR, schema.content["minLength"], None), holds)


def _max_length(solver: ShapeSolver, state: StringShape, schema: Schema, holds: bool) -> list[State]:
    limit = schema.content["maxLength"]
    return _within(state, repeat(ANY_CHAR, 0, limit) if holds else repeat(ANY_CHAR, limit + 1, None), True)


def _pattern(solver: ShapeSolver, state: StringShape, schema: Schema, holds: bool) -> list[State]:
    return _within(state, solver.document.pattern(schema.content["pattern"], schema, "pattern"), holds)


def _format(solver: ShapeSolver, state: StringShape, schema: Schema, holds: bool) -> list[State]:
    language = format_language(schema.content["format"])
    if language is None:
        return [state] if holds else []
    return _within(state, language, holds)


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
        goals = [solver.goal(Demand(part, True)) for part in prefix]
        return [_with_items(solver, state, goals, solver.goal(Demand(after, True)) if after else ())]
    found: list[State] = []
    for index, part in enumerate(prefix):
        goals = [*[()] * index, solver.goal(Demand(part, False))]
        found.append(replace(_with_items(solver, state, goals, ()), low=max(state.low, index + 1)))
    if after is not None:
        wrong = solver.goal(Demand(after, False))
        if any(part.content is True for part, _ in wrong):
            return found
        if prefix and wrong:
            raise unsupported(schema.at(rest), rest, "it cannot be negated after a prefix")
        if wrong:
            entry = Contains(wrong, solver.goal(Demand(after, True)), 1, None, (schema.at(rest), rest))
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
    if high is not None and high >= _MORE_THAN_ANY:
        high = None
    goal, others = solver.goal(Demand(part, True)), solver.goal(Demand(part, False))
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
            entry = Contains(goal, others, least, most, (schema.at("contains"), "contains"))
            found.append(replace(state, contains=(*state.contains, entry)))
    return found


_RULES = (
    Rule(("$dynamicRef", "$recursiveRef", "unevaluatedItems", "unevaluatedProperties"), None, _refused),
    Rule(("type",), None, _type),
    Rule(("enum",), None, _enum),
    Rule(("const",), None, _const),
    Rule(("minimum",), "number", _bound("minimum", is_low=True, is_open=False)),
    Rule(("maximum",), "number", _bound("maximum", is_low=False, is_open=False)),
    Rule(("exclusiveMinimum",), "number", _bound("exclusiveMinimum", is_low=True, is_open=True)),
    Rule(("exclusiveMaximum",), "number", _bound("exclusiveMaximum", is_low=False, is_open=True)),
    Rule(("multipleOf",), "number", _multiple_of),
    Rule(("minLength",), "string", _of_size("minLength", _min_length)),
    Rule(("maxLength",), "string", _of_size("maxLength", _max_length)),
    Rule(("pattern",), "string", _pattern),
    Rule(("format",), "string", _format),
    Rule(("prefixItems", "items", "additionalItems"), "array", _items),
    Rule(("minItems",), "array", _of_size("minItems", _min_items)),
    Rule(("maxItems",), "array", _of_size("maxItems", _max_items)),
    Rule(("uniqueItems",), "array", _unique_items),
    Rule(("contains",), "array", _contains),
    Rule(("properties", "patternProperties", "additionalProperties"), "object", properties),
    Rule(("required",), "object", required),
    Rule(("minProperties",), "object", _of_size("minProperties", min_properties)),
    Rule(("maxProperties",), "object", _of_size("maxProperties", max_properties)),
    Rule(("propertyNames",), "object", property_names),
    Rule(("$ref",), None, _reference),
    Rule(("allOf",), None, _all_of),
    Rule(("not",), None, _not),
    Rule(("dependencies", "dependentRequired", "dependentSchemas"), "object", dependencies),
    Rule(("if",), None, _if),
    Rule(("anyOf",), None, _any_of),
    Rule(("oneOf",), None, _one_of),
)

_RULE_OF = {keyword: rule for rule in _RULES for keyword in rule.keywords}
_FIRST = ("type", "enum", "const")  # they leave the least to do for the others
