"""From a schema to shapes: `ShapeSolver.shapes(goal)` gives the alternatives of a goal.

A value meets a goal, a conjunction of demands (schema, holds or not), exactly if it meets one of its alternatives. A shape
speaks of one JSON type, and of the parts of arrays and objects by goals again, so recursion and references need no
special case:

    allOf, $ref            the demands of one goal             not                the same keywords, negated
    anyOf, type            alternatives                        if, dependencies   (if and then) or (not if and else)
    oneOf                  alternatives, each without those of the others that it does not exclude by itself
"""

from __future__ import annotations

from collections.abc import Iterable

from openengine.core.guides.language import (
    ANY_TEXT,
    EMPTY,
    Language,
    TooComplex,
    complement,
    intersect,
    is_empty,
    literal,
    matches,
    union,
)
from openengine.core.guides.schema_keywords import Rule, rules_of
from openengine.core.guides.schema_shapes import (
    ANY_VALUE,
    ArrayShape,
    Demand,
    Goal,
    MemberRule,
    NumberShape,
    ObjectDraft,
    ObjectShape,
    Shape,
    State,
    StringShape,
    Values,
    both_strings,
    check_size,
    merged_strings,
    unique,
)
from openengine.core.guides.schema_source import TOO_COMPLEX, TYPES, Schema, SchemaDocument, circular, unsupported
from openengine.core.guides.schema_values import Validator, Value
from openengine.core.guides.work import Work

__all__ = ["ShapeSolver"]

_MAX_CLASSES = 64
_LOOK_DEPTH = 6  # how far into nested values; what is beyond is taken to be possible, which is only less thrifty
_TICKS_PER_SCHEMA = 8  # what it asks of one type takes that much longer than a small step


class ShapeSolver:
    """Works out shapes of the goals of one document, each once."""

    def __init__(self, document: SchemaDocument, work: Work) -> None:
        self.document = document
        self.work = work
        self._validator = Validator(document)
        self._shapes: dict[Goal, tuple[Shape, ...]] = {}
        self._may_hold: dict[tuple[Goal, str | None], bool] = {}
        self._strings: dict[Demand, list[State]] = {}
        self._empty: dict[Language, bool] = {}
        self._open: list[Demand] = []  # those being expanded, to notice references that go in circles

    def shapes(self, goal: Goal) -> tuple[Shape, ...]:
        """The alternatives of `goal`; none when no value can meet it. Raises InvalidArgument for what is unsupported."""
        known = self._shapes.get(goal)
        if known is None:
            known = self._shapes[goal] = tuple(shape for kind in TYPES for shape in self._solve(goal, kind))
        return known

    def goal(self, *parts: Demand | Goal) -> Goal:
        """A goal of demands and goals, without the demands that always hold."""
        flat: dict[Demand, None] = {}
        for part in parts:
            for demand in (part,) if isinstance(part, Demand) else part:
                content, holds = demand.schema.content, demand.holds
                if content is not holds and not (holds and content == {}):
                    flat[demand] = None
        return tuple(flat)

    def string_language(self, goal: Goal) -> Language:
        """The strings that meet `goal`."""
        found = [EMPTY]
        for shape in self._solve(goal, "string"):
            if isinstance(shape, Values):
                found.extend(literal(value.content) for value in shape.values)
            else:
                found.append(shape.language)
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

    def refine_all(self, states: list[State], goal: Goal) -> list[State]:
        for schema, holds in goal:
            states = self.refine(states, schema, holds)
        return states

    def refine(self, states: list[State], schema: Schema, holds: bool) -> list[State]:
        """The states that also meet (or do not meet) `schema`."""
        self.work.tick(_TICKS_PER_SCHEMA)
        if not states:
            return []
        if isinstance(schema.content, bool):
            return states if schema.content is holds else []
        demand = Demand(schema, holds)
        if states[0].kind == "string" and states != [ANY_VALUE["string"]]:
            # Strings need no alternatives: what a schema asks of them is one language, worked out once.
            alone = self._strings.get(demand)
            if alone is None:
                alone = self._strings[demand] = self.refine([ANY_VALUE["string"]], schema, holds)
            return merged_strings(both_strings(a, b) for a in states for b in alone)
        if demand in self._open:
            referring = (each.schema for each in reversed(self._open) if "$ref" in each.schema)
            raise circular(next(referring, schema))
        self._open.append(demand)
        try:
            new = self._assert(states, schema) if holds else self._deny(states, schema)
        finally:
            self._open.pop()
        return merged_strings(new) if states[0].kind == "string" else new

    def may_hold(self, goal: Goal, kind: str | None = None, depth: int = _LOOK_DEPTH) -> bool:
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

    def _solve(self, goal: Goal, kind: str) -> list[Shape]:
        outer, self._open = self._open, []
        try:
            states = self.refine_all([ANY_VALUE[kind]], goal)
        finally:
            self._open = outer
        values: dict[Value, None] = {}
        shapes: dict[Shape, None] = {}
        for state in states:
            if isinstance(state, Values):
                values.update(dict.fromkeys(state.values))
            elif isinstance(state, ObjectDraft):
                shapes.update(dict.fromkeys(self._finish_object(state)))
            elif isinstance(state, StringShape):
                if not self.surely_empty(state.language):
                    shapes[state] = None
            elif isinstance(state, NumberShape):
                if not state.range.is_empty():
                    shapes[state] = None
            elif state.high is None or state.low <= state.high:
                shapes[state] = None
        # A finite set is checked value by value against the whole goal, so that nothing else need be worked out for it.
        held = tuple(value for value in values if self._meets(goal, value))
        return ([Values(kind, held)] if held else []) + list(shapes)

    def _meets(self, goal: Goal, value: Value) -> bool:
        self.work.tick()
        return all(self._validator.holds(schema, value.content) is holds for schema, holds in goal)

    def _assert(self, states: list[State], schema: Schema) -> list[State]:
        for rule in rules_of(schema, is_legacy=self.document.is_legacy):
            states = self._applied(states, schema, rule, True)
        return states

    def _deny(self, states: list[State], schema: Schema) -> list[State]:
        if "dependencies" in schema and states[0].kind == "object" and self.document.has_unknown_dependencies:
            raise unsupported(
                schema.at("dependencies"),
                "dependencies",
                "the draft does not know it, so that it can be enforced but not negated, in not, oneOf, if or the like; write "
                "dependentRequired or dependentSchemas, or name draft-07 in $schema",
            )
        found: list[State] = []
        for rule in rules_of(schema, is_legacy=self.document.is_legacy):
            found = unique([*found, *self._applied(states, schema, rule, False)])
            check_size(found, schema, rule.keywords)
        return found

    def _applied(self, states: list[State], schema: Schema, rule: Rule, holds: bool) -> list[State]:
        try:
            found = unique(state for old in states for state in self._apply(old, schema, rule, holds))
        except (TooComplex, RecursionError):
            keyword = next(keyword for keyword in rule.keywords if keyword in schema)
            raise unsupported(schema.at(keyword), keyword, TOO_COMPLEX) from None
        check_size(found, schema, rule.keywords)
        return found

    def _apply(self, state: State, schema: Schema, rule: Rule, holds: bool) -> Iterable[State]:
        if rule.kind is not None and state.kind != rule.kind:
            return [state] if holds else []
        if rule.kind is not None and isinstance(state, Values):
            return [state]  # checked by value in the end
        return rule.apply(self, state, schema, holds)

    def _shape_may_hold(self, shape: Shape, depth: int) -> bool:
        if isinstance(shape, ArrayShape):
            first = [*shape.prefix[: shape.low], *([shape.items] if shape.low > len(shape.prefix) else [])]
            return all(self.may_hold(goal, None, depth) for goal in first)
        if isinstance(shape, ObjectShape):
            return all(self.may_hold(goal, None, depth) for _, goal, is_required in shape.declared if is_required)
        return True

    def _finish_object(self, state: ObjectDraft) -> list[ObjectShape]:
        """Give every member its goal; alternatives where one of several declared members may be the one required."""
        names = self.string_language(state.names) if state.names else ANY_TEXT
        sources = [(source, dict(source.properties)) for source in state.sources]
        declared: dict[str, Goal | None] = {}  # None for a member that cannot be there
        for name in (*(name for source in state.sources for name, _ in source.properties), *state.required):
            if name not in declared:
                self.work.tick()
                goal = self.goal(*(_goal_for(source, named, name, self.work) for source, named in sources))
                is_out = (
                    name in state.absent
                    or not matches(names, name, self.work)
                    or any(s.content is not h for s, h in goal if isinstance(s.content, bool))
                )
                declared[name] = None if is_out else goal
        if any(declared[name] is None for name in state.required):
            return []
        rest = intersect(names, *(complement(literal(name)) for name in (*declared, *state.absent)))
        others = self._classes(state, rest)
        present = {name: goal for name, goal in declared.items() if goal is not None}
        alternatives = [(frozenset(state.required), ())]
        for wanted in state.some:
            within = [name for name in present if matches(wanted, name, self.work)]
            alternatives = unique(
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

    def _classes(self, state: ObjectDraft, rest: Language) -> tuple[tuple[Language, Goal], ...]:
        classes: list[tuple[Language, Goal]] = [(rest, ())]
        for source in state.sources:
            split: list[tuple[Language, Goal, bool]] = [(language, goal, False) for language, goal in classes]
            for pattern, wanted in source.patterns:
                parts = []
                for language, goal, is_matched in split:
                    self.work.tick()
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


def _goal_for(source: MemberRule, named: dict[str, Goal], name: str, work: Work) -> Goal:
    """What one source, whose properties are `named`, asks of the member `name`."""
    found = [named[name]] if name in named else []
    found += [goal for language, goal in source.patterns if matches(language, name, work)]
    return tuple(part for goal in found for part in goal) if found else source.additional
