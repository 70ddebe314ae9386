"""What a schema asks of values of each JSON type, worked out from its keywords.

A *goal* is a conjunction of literals (schema, holds or not). `ShapeSolver.shapes(goal)` gives its alternatives: a value
meets the goal exactly if it meets one of them. A shape speaks of one JSON type, and of the parts of arrays and objects
by goals again, so recursion and references need no special case:

    allOf, $ref            the literals of one goal            not                the same keywords, negated
    anyOf, type            alternatives                        if, dependencies   (if and then) or (not if and else)
    oneOf                  alternatives, each without those of the others that it does not exclude by itself
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from openengine.core.guides.formats import format_language
from openengine.core.guides.language import (
    ANY_CHAR,
    ANY_TEXT,
    EMPTY,
    Language,
    TooComplex,
    complement,
    intersect,
    is_empty,
    literal,
    matches,
    repeat,
    union,
)
from openengine.core.guides.numbers import NumberRange
from openengine.core.guides.regex import search
from openengine.core.guides.schema_source import TYPES, Schema, SchemaDocument, unsupported
from openengine.core.guides.schema_values import Validator, Value, type_of
from openengine.core.guides.work import Work
from openengine.errors import InvalidArgument

__all__ = ["ArrayShape", "Contains", "Goal", "NumberShape", "ObjectShape", "Shape", "ShapeSolver", "StringShape", "Values"]

Goal = tuple[tuple[Schema, bool], ...]
"""Literals in the order of their writing, which is the order of declared properties."""

_MAX_STATES = 1000
_MAX_CLASSES = 64


@dataclass(frozen=True, slots=True)
class Values:
    """Finitely many values of one type."""

    kind: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class NumberShape:
    range: NumberRange
    kind = "number"


@dataclass(frozen=True, slots=True)
class StringShape:
    language: Language = ANY_TEXT
    kind = "string"


@dataclass(frozen=True, slots=True)
class Contains:
    """Between `low` and `high` items meet `goal`; `others` is its negation, needed where there is a `high`."""

    goal: Goal
    others: Goal | None
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """Item i meets `prefix[i]`, or `items` beyond it; there are between `low` and `high` of them."""

    prefix: tuple[Goal, ...] = ()
    items: Goal = ()
    low: int = 0
    high: int | None = None
    contains: tuple[Contains, ...] = ()
    unique: tuple[str, str] | None = None  # pointer and keyword that ask for it
    kind = "array"


@dataclass(frozen=True, slots=True)
class _Source:
    """The three keywords of one schema that divide an object's members among them."""

    properties: tuple[tuple[str, Goal], ...] = ()
    patterns: tuple[tuple[Language, Goal], ...] = ()
    additional: Goal = ()


@dataclass(frozen=True, slots=True)
class _Object:
    """An object shape under construction; `some` are sets of names of which one must be present."""

    sources: tuple[_Source, ...] = ()
    required: tuple[str, ...] = ()
    absent: frozenset[str] = frozenset()
    names: Goal = ()
    low: int = 0
    high: int | None = None
    some: tuple[Language, ...] = ()
    where: tuple[str, str] = ("", "")
    kind = "object"


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """Declared members in order (name, goal, required), then others by disjoint sets of names.

    low, high: bounds on the number of members.  some: how many of the others are required by the bounds or otherwise.
    """

    declared: tuple[tuple[str, Goal, bool], ...]
    others: tuple[tuple[Language, Goal], ...]
    low: int
    high: int | None
    some: tuple[Language, ...]
    where: tuple[str, str]
    kind = "object"


Shape = Values | NumberShape | StringShape | ArrayShape | ObjectShape
_State = Values | NumberShape | StringShape | ArrayShape | _Object

_STARTS: dict[str, _State] = {
    "null": Values("null", (Value.of(None),)),
    "boolean": Values("boolean", (Value.of(False), Value.of(True))),
    "number": NumberShape(NumberRange()),
    "string": StringShape(),
    "array": ArrayShape(),
    "object": _Object(),
}


class ShapeSolver:
    """Works out shapes of the goals of one document, each once."""

    def __init__(self, document: SchemaDocument, work: Work) -> None:
        self.document = document
        self.work = work
        self._validator = Validator(document)
        self._shapes: dict[Goal, tuple[Shape, ...]] = {}
        self._may_hold: dict[tuple[Goal, str | None], bool] = {}
        self._strings: dict[tuple[Schema, bool], list[_State]] = {}
        self._empty: dict[Language, bool] = {}
        self._open: list[tuple[Schema, bool]] = []  # literals being expanded, to notice references that go in circles

    def shapes(self, goal: Goal) -> tuple[Shape, ...]:
        """The alternatives of `goal`; none when no value can meet it. Raises InvalidArgument for what is unsupported."""
        known = self._shapes.get(goal)
        if known is None:
            known = self._shapes[goal] = tuple(shape for kind in TYPES for shape in self._solve(goal, kind))
        return known

    def goal(self, *parts: tuple[Schema, bool] | Goal) -> Goal:
        """A goal of literals and goals, without the literals that always hold."""
        flat: dict[tuple[Schema, bool], None] = {}
        for part in parts:
            for schema, holds in (part,) if part and isinstance(part[0], Schema) else part:
                if schema.content is not holds and not (holds and schema.content == {}):
                    flat[schema, holds] = None
        return tuple(flat)

    def string_language(self, goal: Goal) -> Language:
        """The strings that meet `goal`."""
        found = [EMPTY]
        for shape in self.shapes(goal):
            if isinstance(shape, StringShape):
                found.append(shape.language)
            elif shape.kind == "string":
                found.extend(literal(value.content) for value in shape.values)
        return union(*found)

    def surely_empty(self, language: Language) -> bool:
        """Whether no string belongs to `language`; False when that would take too long to find out."""
        known = self._empty.get(language)
        if known is None:
            try:
                known = is_empty(language, self.work)
            except TooComplex:
                known = False
            self._empty[language] = known
        return known

    # ---- one goal, one type

    def _solve(self, goal: Goal, kind: str) -> list[Shape]:
        outer, self._open = self._open, []
        try:
            states = self._refine_all([_STARTS[kind]], goal)
        finally:
            self._open = outer
        values: dict[Value, None] = {}
        shapes: dict[Shape, None] = {}
        for state in states:
            if isinstance(state, Values):
                values.update(dict.fromkeys(state.values))
            elif isinstance(state, _Object):
                shapes.update(dict.fromkeys(self._finish_object(state)))
            elif isinstance(state, StringShape):
                if not self.surely_empty(state.language):
                    shapes[state] = None
            elif isinstance(state, NumberShape):
                if state.range.values() != []:
                    shapes[state] = None
            elif state.high is None or state.low <= state.high:
                shapes[state] = None
        # A finite set is checked value by value against the whole goal, so that nothing else need be worked out for it.
        held = tuple(v for v in values if all(self._validator.holds(schema, v.content) is p for schema, p in goal))
        return ([Values(kind, held)] if held else []) + list(shapes)

    def _refine_all(self, states: list[_State], goal: Goal) -> list[_State]:
        for schema, holds in goal:
            states = self._refine(states, schema, holds)
        return states

    def _refine(self, states: list[_State], schema: Schema, holds: bool) -> list[_State]:
        """The states that also meet (or do not meet) `schema`."""
        self.work.tick()
        if not states:
            return []
        if isinstance(schema.content, bool):
            return states if schema.content is holds else []
        if states[0].kind == "string" and states != [_STARTS["string"]]:
            # Strings need no alternatives: what a schema asks of them is one language, worked out once.
            alone = self._strings.get((schema, holds))
            if alone is None:
                alone = self._strings[schema, holds] = self._refine([_STARTS["string"]], schema, holds)
            return _merged_strings(_both_strings(a, b) for a in states for b in alone)
        if (schema, holds) in self._open:
            raise unsupported(schema.at("$ref"), "$ref", "the schema refers to itself without anything in between")
        self._open.append((schema, holds))
        try:
            new = self._assert(states, schema) if holds else self._deny(states, schema)
        finally:
            self._open.pop()
        return _merged_strings(new) if states[0].kind == "string" else new

    def _assert(self, states: list[_State], schema: Schema) -> list[_State]:
        for rule in self._rules(schema):
            states = _unique(state for old in states for state in self._apply(old, schema, rule, True))
            _check_size(states, schema, rule.keywords)
        return states

    def _deny(self, states: list[_State], schema: Schema) -> list[_State]:
        found: list[_State] = []
        for rule in self._rules(schema):
            found = _unique([*found, *(state for old in states for state in self._apply(old, schema, rule, False))])
            _check_size(found, schema, rule.keywords)
        return found

    def _rules(self, schema: Schema) -> list[_Rule]:
        if "$ref" in schema and self.document.is_legacy:
            return [rule for rule in _RULES if "$ref" in rule.keywords]
        # Keywords in the order of the document, because that is the order of the members that they declare.
        return list(dict.fromkeys(_RULE_OF[keyword] for keyword in (*_FIRST, *schema.content) if keyword in schema and keyword in _RULE_OF))

    def _apply(self, state: _State, schema: Schema, rule: _Rule, holds: bool) -> Iterable[_State]:
        if rule.kind is not None and state.kind != rule.kind:
            return [state] if holds else []
        if rule.kind is not None and isinstance(state, Values):
            return [state]  # checked by value in the end
        return rule.apply(self, state, schema, holds)

    # ---- whether alternatives exclude one another

    def may_hold(self, goal: Goal, kind: str | None = None, depth: int = 6) -> bool:
        """False only if no value (of type `kind`) meets `goal`. True when that would take too long to find out."""
        key = (goal, kind)
        if depth == 0:
            return True
        known = self._may_hold.get(key)
        if known is None:
            self._may_hold[key] = True  # what a recursive schema asks of itself here
            shapes = self.shapes(goal) if kind is None else self._solve(goal, kind)
            known = self._may_hold[key] = any(self._shape_may_hold(shape, depth - 1) for shape in shapes)
        return known

    def _shape_may_hold(self, shape: Shape, depth: int) -> bool:
        if isinstance(shape, ArrayShape):
            first = [*shape.prefix[: shape.low], *([shape.items] if shape.low > len(shape.prefix) else [])]
            return all(self.may_hold(goal, None, depth) for goal in first)
        if isinstance(shape, ObjectShape):
            return all(self.may_hold(goal, None, depth) for _, goal, is_required in shape.declared if is_required)
        return True

    def _finish_object(self, state: _Object) -> list[ObjectShape]:
        """Give every member its goal; alternatives where one of several declared members may be the one required."""
        names = self.string_language(state.names) if state.names else ANY_TEXT
        declared: dict[str, Goal] = {}
        for name in (*(name for source in state.sources for name, _ in source.properties), *state.required):
            if name not in declared:
                goal = self.goal(*(_goal_for(source, name) for source in state.sources))
                is_out = name in state.absent or not matches(names, name) or any(s.content is not h for s, h in goal if isinstance(s.content, bool))
                declared[name] = _NEVER if is_out else goal
        if any(declared[name] is _NEVER for name in state.required):
            return []
        rest = intersect(names, *(complement(literal(name)) for name in (*declared, *state.absent)))
        others = self._classes(state, rest)
        present = {name: goal for name, goal in declared.items() if goal is not _NEVER}
        alternatives = [(frozenset(state.required), ())]
        for wanted in state.some:
            within = [name for name in present if matches(wanted, name)]
            alternatives = _unique(
                [(required | {name}, some) for required, some in alternatives for name in within]
                + [(required, (*some, wanted)) for required, some in alternatives if others]
            )
        return [
            ObjectShape(
                tuple((name, goal, name in required) for name, goal in present.items()),
                others,
                state.low,
                state.high,
                some,
                state.where,
            )
            for required, some in alternatives
        ]

    def _classes(self, state: _Object, rest: Language) -> tuple[tuple[Language, Goal], ...]:
        classes: list[tuple[Language, Goal]] = [(rest, ())]
        for source in state.sources:
            split: list[tuple[Language, Goal, bool]] = [(language, goal, False) for language, goal in classes]
            for pattern, wanted in source.patterns:
                parts = []
                for language, goal, is_matched in split:
                    parts.append((intersect(language, pattern), self.goal(goal, wanted), True))
                    parts.append((intersect(language, complement(pattern)), goal, is_matched))
                split = [part for part in parts if not self.surely_empty(part[0])]
                if len(split) > _MAX_CLASSES:
                    raise unsupported(*state.where, f"its patterns divide names into more than {_MAX_CLASSES} classes")
            classes = [(lang, goal if done else self.goal(goal, source.additional)) for lang, goal, done in split]
        merged: dict[Goal, list[Language]] = {}
        for language, goal in classes:
            if not any(isinstance(schema.content, bool) for schema, _ in goal) and not self.surely_empty(language):
                merged.setdefault(goal, []).append(language)
        return tuple((union(*languages), goal) for goal, languages in merged.items())

    # ---- keywords of any type

    def _type(self, state: _State, schema: Schema, holds: bool) -> list[_State]:
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

    def _enum(self, state: _State, schema: Schema, holds: bool) -> list[_State]:
        return self._one_of_values(state, schema, schema.content["enum"], holds)

    def _const(self, state: _State, schema: Schema, holds: bool) -> list[_State]:
        return self._one_of_values(state, schema, [schema.content["const"]], holds)

    def _one_of_values(self, state: _State, schema: Schema, listed: list[Any], holds: bool) -> list[_State]:
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
        return self._refine_all([state], tuple((self._schema_of(value, schema), False) for value in listed))

    def _schema_of(self, value: Any, schema: Schema) -> Schema:
        """A schema that holds for one array or object alone."""
        if isinstance(value, list):
            size = len(value)
            content = {"prefixItems": [{"const": item} for item in value], "items": False, "minItems": size, "maxItems": size}
            if not value:
                del content["prefixItems"]
        else:
            content = {
                "properties": {name: {"const": inner} for name, inner in value.items()},
                "required": list(value),
                "additionalProperties": False,
            }
        return self.document.made(("const", Value.of(value)), {"type": type_of(value), **content}, schema.pointer)

    def _all_of(self, state: _State, schema: Schema, holds: bool) -> list[_State]:
        parts = self._parts(schema, "allOf")
        if holds:
            return self._refine_all([state], tuple((part, True) for part in parts))
        return [new for part in parts for new in self._refine([state], part, False)]

    def _any_of(self, state: _State, schema: Schema, holds: bool) -> list[_State]:
        parts = self._parts(schema, "anyOf")
        if not holds:
            return self._refine_all([state], tuple((part, False) for part in parts))
        return [new for part in parts for new in self._refine([state], part, True)]

    def _one_of(self, state: _State, schema: Schema, holds: bool) -> list[_State]:
        parts = self._parts(schema, "oneOf")
        # Values are judged one by one in the end, and two alternatives that both hold for one are no harm before that.
        if isinstance(state, Values):
            return [state]
        if not holds:
            none = self._refine_all([state], tuple((part, False) for part in parts))
            pairs = [(a, b) for index, a in enumerate(parts) for b in parts[index + 1 :]]
            two = [new for a, b in pairs for new in self._refine_all([state], ((a, True), (b, True)))]
            return none + two
        possible = [(part, new) for part in parts if (new := self._refine([state], part, True))]
        found: list[_State] = []
        for part, new in possible:
            rivals = [rival for rival, _ in possible if rival is not part and self._overlap(schema, part, rival, state.kind)]
            found += self._refine_all(new, tuple((rival, False) for rival in rivals))
        return found

    def _overlap(self, schema: Schema, part: Schema, rival: Schema, kind: str) -> bool:
        keys = ("type", "properties", "required", "patternProperties", "additionalProperties")
        around = {key: schema.content[key] for key in keys if key in schema}
        context = self.document.made(("around", id(schema.content)), around, schema.pointer, schema.base)
        pair = sorted((part, rival), key=lambda each: each.pointer)
        return self.may_hold(self.goal((context, True), *((each, True) for each in pair)), kind)

    def _not(self, state: _State, schema: Schema, holds: bool) -> list[_State]:
        return self._refine([state], self.document.child(schema, "not"), not holds)

    def _reference(self, state: _State, schema: Schema, holds: bool) -> list[_State]:
        return self._refine([state], self.document.resolve(schema), holds)

    def _if(self, state: _State, schema: Schema, holds: bool) -> list[_State]:
        condition = self.document.child(schema, "if")
        yes = [self.document.child(schema, "then")] if "then" in schema else []
        no = [self.document.child(schema, "else")] if "else" in schema else []
        if not yes and not no:
            return [state] if holds else []
        found: list[_State] = []
        for branch, is_met in ((yes, True), (no, False)):
            if holds or branch:
                found += self._refine_all([state], ((condition, is_met), *((part, holds) for part in branch)))
        return found

    def _refused(self, state: _State, schema: Schema, holds: bool) -> list[_State]:
        for keyword in ("$dynamicRef", "$recursiveRef", "unevaluatedItems", "unevaluatedProperties"):
            if keyword in schema and not (keyword.startswith("uneval") and schema.content[keyword] in (True, {})):
                raise unsupported(schema.at(keyword), keyword, "this keyword is not supported")
        return [state] if holds else []

    def _parts(self, schema: Schema, keyword: str) -> list[Schema]:
        return [self.document.child(schema, keyword, index) for index in range(len(schema.content[keyword]))]

    # ---- numbers and strings

    def _minimum(self, state: NumberShape, schema: Schema, holds: bool) -> list[_State]:
        bound, strictly = schema.content["minimum"], schema.content.get("exclusiveMinimum") is True
        if holds:
            return [NumberShape(state.range.at_least(Fraction(bound), strictly=strictly))]
        return [NumberShape(state.range.at_most(Fraction(bound), strictly=not strictly))]

    def _maximum(self, state: NumberShape, schema: Schema, holds: bool) -> list[_State]:
        bound, strictly = schema.content["maximum"], schema.content.get("exclusiveMaximum") is True
        if holds:
            return [NumberShape(state.range.at_most(Fraction(bound), strictly=strictly))]
        return [NumberShape(state.range.at_least(Fraction(bound), strictly=not strictly))]

    def _exclusive_minimum(self, state: NumberShape, schema: Schema, holds: bool) -> list[_State]:
        bound = schema.content["exclusiveMinimum"]
        if isinstance(bound, bool):
            return [state] if holds else []
        if holds:
            return [NumberShape(state.range.at_least(Fraction(bound), strictly=True))]
        return [NumberShape(state.range.at_most(Fraction(bound), strictly=False))]

    def _exclusive_maximum(self, state: NumberShape, schema: Schema, holds: bool) -> list[_State]:
        bound = schema.content["exclusiveMaximum"]
        if isinstance(bound, bool):
            return [state] if holds else []
        if holds:
            return [NumberShape(state.range.at_most(Fraction(bound), strictly=True))]
        return [NumberShape(state.range.at_least(Fraction(bound), strictly=False))]

    def _multiple_of(self, state: NumberShape, schema: Schema, holds: bool) -> list[_State]:
        if not holds:
            raise unsupported(schema.at("multipleOf"), "multipleOf", "it cannot be negated")
        return [NumberShape(state.range.with_multiple(Fraction(schema.content["multipleOf"])))]

    def _search(self, schema: Schema, keyword: str, pattern: str) -> Language:
        try:
            return search(pattern)
        except InvalidArgument as exc:
            raise unsupported(schema.at(keyword), keyword, exc.message) from None

    def _within(self, state: StringShape, language: Language, holds: bool) -> list[_State]:
        return [StringShape(intersect(state.language, language if holds else complement(language)))]

    def _min_length(self, state: StringShape, schema: Schema, holds: bool) -> list[_State]:
        return self._within(state, repeat(ANY_CHAR, schema.content["minLength"], None), holds)

    def _max_length(self, state: StringShape, schema: Schema, holds: bool) -> list[_State]:
        limit = schema.content["maxLength"]
        return self._within(state, repeat(ANY_CHAR, 0, limit) if holds else repeat(ANY_CHAR, limit + 1, None), True)

    def _pattern(self, state: StringShape, schema: Schema, holds: bool) -> list[_State]:
        return self._within(state, self._search(schema, "pattern", schema.content["pattern"]), holds)

    def _format(self, state: StringShape, schema: Schema, holds: bool) -> list[_State]:
        language = format_language(schema.content["format"])
        if language is None:
            return [state] if holds else []
        return self._within(state, language, holds)

    # ---- arrays

    def _items(self, state: ArrayShape, schema: Schema, holds: bool) -> list[_State]:
        """`prefixItems`, `items` and `additionalItems`, which divide the items among them."""
        content = schema.content
        if isinstance(content.get("items"), list):
            first, rest = "items", "additionalItems"
        else:
            first, rest = "prefixItems", "items"
        prefix = [self.document.child(schema, first, index) for index in range(len(content.get(first, ())))]
        after = self.document.child(schema, rest) if rest in content else None
        if holds:
            goals = [self.goal((part, True)) for part in prefix]
            return [self._with_items(state, goals, self.goal((after, True)) if after else ())]
        found: list[_State] = []
        for index, part in enumerate(prefix):
            goals = [*[()] * index, self.goal((part, False))]
            found.append(replace(self._with_items(state, goals, ()), low=max(state.low, index + 1)))
        if after is not None:
            wrong = self.goal((after, False))
            if any(part.content is True for part, _ in wrong):
                return found
            if prefix and wrong:
                raise unsupported(schema.at(rest), rest, "it cannot be negated after a prefix")
            if wrong:
                found.append(replace(state, contains=(*state.contains, Contains(wrong, None, 1, None))))
            else:
                found.append(replace(state, low=max(state.low, len(prefix) + 1)))
        return found

    def _with_items(self, state: ArrayShape, prefix: list[Goal], items: Goal) -> ArrayShape:
        size = max(len(prefix), len(state.prefix))
        mine = [*state.prefix, *[state.items] * (size - len(state.prefix))]
        theirs = [*prefix, *[items] * (size - len(prefix))]
        merged = tuple(self.goal(a, b) for a, b in zip(mine, theirs, strict=True))
        return replace(state, prefix=merged, items=self.goal(state.items, items))

    def _min_items(self, state: ArrayShape, schema: Schema, holds: bool) -> list[_State]:
        bound = schema.content["minItems"]
        return _counted(state, bound, None) if holds else _counted(state, 0, bound - 1)

    def _max_items(self, state: ArrayShape, schema: Schema, holds: bool) -> list[_State]:
        bound = schema.content["maxItems"]
        return _counted(state, 0, bound) if holds else _counted(state, bound + 1, None)

    def _unique_items(self, state: ArrayShape, schema: Schema, holds: bool) -> list[_State]:
        if not schema.content["uniqueItems"]:
            return [state] if holds else []
        if not holds:
            raise unsupported(schema.at("uniqueItems"), "uniqueItems", "it cannot be negated")
        return [replace(state, unique=(schema.at("uniqueItems"), "uniqueItems"))]

    def _contains(self, state: ArrayShape, schema: Schema, holds: bool) -> list[_State]:
        part = self.document.child(schema, "contains")
        low, high = schema.content.get("minContains", 1), schema.content.get("maxContains")
        if self.document.is_legacy:
            low, high = 1, None
        goal, others = self.goal((part, True)), self.goal((part, False))
        bounds = [(low, high)] if holds else [(0, low - 1), (None if high is None else high + 1, None)]
        found: list[_State] = []
        for least, most in bounds:
            if least is None or (most is not None and most < least):
                continue
            if most == 0:
                found.append(self._with_items(state, [], others))
            elif (least, most) == (0, None):
                found.append(state)
            else:
                entry = Contains(goal, None if most is None else others, least, most)
                found.append(replace(state, contains=(*state.contains, entry)))
        return found

    # ---- objects

    def _properties(self, state: _Object, schema: Schema, holds: bool) -> list[_State]:
        """`properties`, `patternProperties` and `additionalProperties`, which divide the members among them."""
        content = schema.content
        named = {name: self.document.child(schema, "properties", name) for name in content.get("properties", {})}
        patterns = {
            self._search(schema, "patternProperties", text): self.document.child(schema, "patternProperties", text)
            for text in content.get("patternProperties", {})
        }
        rest = self.document.child(schema, "additionalProperties") if "additionalProperties" in schema else None
        where = (schema.pointer, "properties")
        if holds:
            source = _Source(
                tuple((name, self.goal((part, True))) for name, part in named.items()),
                tuple((language, self.goal((part, True))) for language, part in patterns.items()),
                self.goal((rest, True)) if rest else (),
            )
            return [replace(state, sources=(*state.sources, source), where=where)]
        found: list[_State] = []
        for name, part in named.items():
            source = _Source(((name, self.goal((part, False))),))
            found.append(replace(self._with_required(state, [name]), sources=(*state.sources, source), where=where))
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

    def _with_required(self, state: _Object, names: Iterable[str]) -> _Object:
        return replace(state, required=tuple(dict.fromkeys((*state.required, *names))))

    def _required(self, state: _Object, schema: Schema, holds: bool) -> list[_State]:
        names = schema.content["required"]
        if isinstance(names, bool):
            return [state] if holds else []
        if holds:
            return [] if state.absent & set(names) else [self._with_required(state, names)]
        return [replace(state, absent=state.absent | {name}) for name in names if name not in state.required]

    def _dependencies(self, state: _Object, schema: Schema, holds: bool) -> list[_State]:
        states: list[_State] = [state]
        denied: list[_State] = []
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, wanted in schema.content.get(keyword, {}).items():
                if isinstance(wanted, list):
                    part = self.document.made((id(wanted), "required"), {"required": wanted}, schema.at(keyword))
                else:
                    part = self.document.child(schema, keyword, name)
                present = self.document.made(("present", name), {"required": [name]}, schema.at(keyword))
                if not holds:
                    denied += self._refine_all([state], ((present, True), (part, False)))
                else:
                    without = self._refine(states, present, False)
                    states = _unique([*without, *self._refine_all(states, ((present, True), (part, True)))])
                    _check_size(states, schema, (keyword,))
        return states if holds else denied

    def _property_names(self, state: _Object, schema: Schema, holds: bool) -> list[_State]:
        part = self.document.child(schema, "propertyNames")
        if holds:
            return [replace(state, names=self.goal(state.names, (part, True)), where=(schema.pointer, "propertyNames"))]
        wrong = self.string_language(self.goal((part, False)))
        return [] if wrong == EMPTY else [replace(state, some=(*state.some, wrong))]

    def _min_properties(self, state: _Object, schema: Schema, holds: bool) -> list[_State]:
        bound = schema.content["minProperties"]
        states = _counted(state, bound, None) if holds else _counted(state, 0, bound - 1)
        return [replace(each, where=(schema.at("minProperties"), "minProperties")) for each in states]

    def _max_properties(self, state: _Object, schema: Schema, holds: bool) -> list[_State]:
        bound = schema.content["maxProperties"]
        states = _counted(state, 0, bound) if holds else _counted(state, bound + 1, None)
        return [replace(each, where=(schema.at("maxProperties"), "maxProperties")) for each in states]


@dataclass(frozen=True, slots=True)
class _Rule:
    """What to do about keywords that belong together, for values of `kind` (None: of every type)."""

    keywords: tuple[str, ...]
    kind: str | None
    apply: Callable[[ShapeSolver, Any, Schema, bool], Iterable[_State]]


_RULES = (
    _Rule(("$dynamicRef", "$recursiveRef", "unevaluatedItems", "unevaluatedProperties"), None, ShapeSolver._refused),
    _Rule(("type",), None, ShapeSolver._type),
    _Rule(("enum",), None, ShapeSolver._enum),
    _Rule(("const",), None, ShapeSolver._const),
    _Rule(("minimum",), "number", ShapeSolver._minimum),
    _Rule(("maximum",), "number", ShapeSolver._maximum),
    _Rule(("exclusiveMinimum",), "number", ShapeSolver._exclusive_minimum),
    _Rule(("exclusiveMaximum",), "number", ShapeSolver._exclusive_maximum),
    _Rule(("multipleOf",), "number", ShapeSolver._multiple_of),
    _Rule(("minLength",), "string", ShapeSolver._min_length),
    _Rule(("maxLength",), "string", ShapeSolver._max_length),
    _Rule(("pattern",), "string", ShapeSolver._pattern),
    _Rule(("format",), "string", ShapeSolver._format),
    _Rule(("prefixItems", "items", "additionalItems"), "array", ShapeSolver._items),
    _Rule(("minItems",), "array", ShapeSolver._min_items),
    _Rule(("maxItems",), "array", ShapeSolver._max_items),
    _Rule(("uniqueItems",), "array", ShapeSolver._unique_items),
    _Rule(("contains",), "array", ShapeSolver._contains),
    _Rule(("properties", "patternProperties", "additionalProperties"), "object", ShapeSolver._properties),
    _Rule(("required",), "object", ShapeSolver._required),
    _Rule(("minProperties",), "object", ShapeSolver._min_properties),
    _Rule(("maxProperties",), "object", ShapeSolver._max_properties),
    _Rule(("propertyNames",), "object", ShapeSolver._property_names),
    _Rule(("$ref",), None, ShapeSolver._reference),
    _Rule(("allOf",), None, ShapeSolver._all_of),
    _Rule(("not",), None, ShapeSolver._not),
    _Rule(("dependencies", "dependentRequired", "dependentSchemas"), "object", ShapeSolver._dependencies),
    _Rule(("if",), None, ShapeSolver._if),
    _Rule(("anyOf",), None, ShapeSolver._any_of),
    _Rule(("oneOf",), None, ShapeSolver._one_of),
)

_RULE_OF = {keyword: rule for rule in _RULES for keyword in rule.keywords}
_FIRST = ("type", "enum", "const")  # they leave the least to do for the others

_NEVER: Goal = ((Schema(False, "", ""), True),)


def _goal_for(source: _Source, name: str) -> Goal:
    """What one source asks of the member `name`."""
    found = [goal for known, goal in source.properties if known == name]
    found += [goal for language, goal in source.patterns if matches(language, name)]
    return tuple(part for goal in found for part in goal) if found else source.additional


def _counted(state: Any, low: int, high: int | None) -> list[Any]:
    """`state` with its number of items or members between two more bounds."""
    low = max(low, state.low)
    high = state.high if high is None else high if state.high is None else min(high, state.high)
    return [] if high is not None and high < low else [replace(state, low=low, high=high)]


def _both_strings(a: _State, b: _State) -> _State:
    if isinstance(a, StringShape) and isinstance(b, StringShape):
        return StringShape(intersect(a.language, b.language))
    if isinstance(a, Values) and isinstance(b, Values):
        return Values("string", tuple(value for value in a.values if value in b.values))
    return a if isinstance(a, Values) else b


def _merged_strings(states: Iterable[_State]) -> list[_State]:
    values: dict[Value, None] = {}
    languages = [EMPTY]
    for state in states:
        if isinstance(state, Values):
            values.update(dict.fromkeys(state.values))
        else:
            languages.append(state.language)
    language = union(*languages)
    merged: list[_State] = [Values("string", tuple(values))] if values else []
    return merged + ([StringShape(language)] if language != EMPTY else [])


def _unique(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))


def _check_size(states: list[Any], schema: Schema, keywords: tuple[str, ...]) -> None:
    if len(states) > _MAX_STATES:
        keyword = next(keyword for keyword in keywords if keyword in schema)
        raise unsupported(schema.at(keyword), keyword, f"it makes more than {_MAX_STATES} alternatives")
