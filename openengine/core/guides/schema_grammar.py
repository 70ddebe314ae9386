"""A JSON Schema as rules of the backend's grammar.

    text ─ SchemaDocument ─ ShapeSolver ─ goals that some value meets ─ one rule per goal

Members of an object come in the order of their declaration, then those that are not declared. A goal that no value
meets is left out wherever it is optional, so that no output can run into a dead end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from openengine.core.guides.grammar import Grammar, GrammarTooLarge
from openengine.core.guides.json_text import (
    CLOSE_ARRAY,
    CLOSE_OBJECT,
    COMMA,
    OPEN_ARRAY,
    OPEN_OBJECT,
    json_string,
    key_of,
)
from openengine.core.guides.language import EMPTY, Language, TooComplex, intersect, literal, union
from openengine.core.guides.numbers import NotRegular, NumberRange, number_texts, texts_of
from openengine.core.guides.schema_arrays import ArrayMachine
from openengine.core.guides.schema_members import MemberWriter, check_optional, repeated
from openengine.core.guides.schema_multiples import TooManyRemainders, add_multiples
from openengine.core.guides.schema_shapes import (
    ArrayShape,
    Demand,
    Goal,
    NumberShape,
    ObjectShape,
    Shape,
    StringShape,
    Values,
)
from openengine.core.guides.schema_solver import ShapeSolver
from openengine.core.guides.schema_source import TOO_COMPLEX, SchemaDocument, unsupported
from openengine.core.guides.work import Work
from openengine.errors import InvalidArgument

__all__ = ["SchemaRules", "add_schema"]

_MAX_GOALS = 20_000  # each becomes a rule, of some hundred bytes
_MAX_TRIED_GOALS = 500  # of rules that are written to see whether they can be, which takes as long as writing them
_MAX_TRIED_BYTES = 4 << 20
_TICKS_PER_RULE = 32  # writing one takes that much longer than a small step
_MAX_NESTED = 200  # each optional item is a rule within that of the one before
_MAX_LISTED = 1500  # each is one of the 2000 items that the backend follows at one place of a text
_NOTES = ("$comment", "$defs", "$id", "$schema", "default", "definitions", "description", "examples", "title")


@dataclass(frozen=True, slots=True)
class SchemaRules:
    """The symbol of a schema's values, and the shapes that they have."""

    symbol: str
    shapes: tuple[Shape, ...]


def add_schema(grammar: Grammar, content: Any, work: Work) -> SchemaRules:
    """Add the rules of a JSON schema (as `parse_json` gives it).

    Raises InvalidArgument naming a JSON pointer and keyword when it is malformed, unsupported, or no value meets it.
    """
    solver = ShapeSolver(SchemaDocument(content, work), work)
    goal = solver.goal(Demand(solver.document.root, True))
    writer = _Writer(grammar, solver, _Productive(solver, goal, _Tried(solver).can_write))
    if not writer.productive.has(goal):
        raise _no_value(content)
    shapes = tuple(filter(writer.productive.shape_is, solver.shapes(goal)))
    return SchemaRules(writer.write(goal), shapes)


def _no_value(content: dict[str, Any] | bool) -> InvalidArgument:
    if content is False:
        keyword, why = "false", "it is false, which allows nothing; the schema of any value is true"
    else:
        keywords = [key for key in content if key not in _NOTES]
        keyword = keywords[0]
        why = f"together its keywords ({', '.join(keywords):.200}) allow nothing; loosen one, or what it refers to"
    return InvalidArgument(f"no value meets the JSON schema at #: {why}", details={"pointer": "", "keyword": keyword})


class _Tried:
    """Tells whether rules for what meets a goal can be written: they are, and thrown away."""

    def __init__(self, solver: ShapeSolver) -> None:
        self._solver = solver
        self._known: dict[Goal, bool] = {}

    def can_write(self, goal: Goal) -> bool:
        if goal not in self._known:
            try:
                # What it leads to is written too, and so need not be tried first.
                productive = _Productive(self._solver, goal, lambda _: True, most=_MAX_TRIED_GOALS)
                if productive.has(goal):
                    _Writer(Grammar(max_bytes=_MAX_TRIED_BYTES), self._solver, productive).write(goal)
                self._known.update(dict.fromkeys(productive.goals, True))
            except (InvalidArgument, GrammarTooLarge, TooComplex, RecursionError):
                self._known[goal] = False
        return self._known[goal]


class _Productive:
    """The goals, of all that `root` leads to, that some finite value meets. Raises InvalidArgument for more than `most`."""

    def __init__(
        self, solver: ShapeSolver, root: Goal, can_write: Callable[[Goal], bool], most: int = _MAX_GOALS
    ) -> None:
        self._solver = solver
        self._can_write = can_write
        self._machines: dict[ArrayShape, ArrayMachine] = {}
        self._users: dict[Goal, list[Goal]] = {root: []}
        self._true: set[Goal] = set()
        pending = [root]
        for goal in pending:
            solver.work.tick()
            with _named(goal):
                parts = list(dict.fromkeys(self._parts(goal)))
            for inner in parts:
                if inner not in self._users:
                    self._users[inner] = []
                    pending.append(inner)
                    if len(pending) > most:
                        raise unsupported(*_where(goal), f"with it the schema has more than {most} parts")
                self._users[inner].append(goal)
        # From the leaves up: a goal is looked at again each time one of its parts turns out to be productive.
        while pending:
            goal = pending.pop()
            solver.work.tick()
            if goal not in self._true and any(map(self.shape_is, solver.shapes(goal))):
                self._true.add(goal)
                pending.extend(self._users[goal])

    @property
    def goals(self) -> Iterable[Goal]:
        """All that `root` leads to."""
        return self._users

    def has(self, goal: Goal) -> bool:
        """Whether some value meets `goal`."""
        return goal in self._true

    def machine(self, shape: ArrayShape) -> ArrayMachine:
        if shape not in self._machines:
            self._machines[shape] = ArrayMachine(shape, self._solver, self._can_write)
        return self._machines[shape]

    def _parts(self, goal: Goal) -> Iterator[Goal]:
        for shape in self._solver.shapes(goal):
            if isinstance(shape, ArrayShape):
                if shape.contains or shape.unique:
                    yield from self.machine(shape).goals
                else:
                    yield from shape.prefix if shape.high is None else shape.prefix[: shape.high]
                    if shape.high is None or shape.high > len(shape.prefix):
                        yield shape.items
            elif isinstance(shape, ObjectShape):
                check_optional(shape)  # before all those members are worked out
                yield from (inner for _, inner, _ in shape.declared)
                yield from (inner for _, inner in shape.others)

    def shape_is(self, shape: Shape) -> bool:
        """Whether some value has this shape."""
        if isinstance(shape, ArrayShape):
            if shape.contains or shape.unique:
                return self.machine(shape).is_productive(self.has)
            return self.max_items(shape) is None or self.max_items(shape) >= shape.low
        if isinstance(shape, ObjectShape):
            if not all(self.has(goal) for _, goal, is_required in shape.declared if is_required):
                return False
            declared = sum(self.has(goal) for _, goal, _ in shape.declared)
            others = [language for language, goal in shape.others if self.has(goal)]
            if not all(
                any(not self._solver.surely_empty(intersect(wanted, each)) for each in others) for wanted in shape.some
            ):
                return False
            required = sum(is_required for _, _, is_required in shape.declared) + bool(shape.some)
            return (shape.high is None or required <= shape.high) and (bool(others) or declared >= shape.low)
        return True

    def max_items(self, shape: ArrayShape) -> int | None:
        """How many items an array can have, None without end."""
        for index, goal in enumerate(shape.prefix):
            if not self.has(goal):
                return index if shape.high is None else min(index, shape.high)
        if not self.has(shape.items):
            return len(shape.prefix) if shape.high is None else min(len(shape.prefix), shape.high)
        return shape.high


class _Writer:
    """Writes one rule per goal."""

    def __init__(self, grammar: Grammar, solver: ShapeSolver, productive: _Productive) -> None:
        self._grammar = grammar
        self._solver = solver
        self.productive = productive
        self._symbols: dict[Goal, str] = {}
        self._pending: list[Goal] = []
        symbol = grammar.symbol
        self._comma = symbol(COMMA)
        self._object = (symbol(OPEN_OBJECT), symbol(CLOSE_OBJECT))
        self._array = (symbol(OPEN_ARRAY), symbol(CLOSE_ARRAY))
        self._members = MemberWriter(grammar, solver, productive.has, self._symbol)

    def write(self, root: Goal) -> str:
        start = self._symbol(root)
        while self._pending:
            goal = self._pending.pop()
            self._solver.work.tick(_TICKS_PER_RULE)
            with _named(goal):
                self._grammar.define(self._symbols[goal], self._alternatives(goal))
        return start

    def _alternatives(self, goal: Goal) -> list[str]:
        shapes = [shape for shape in self._solver.shapes(goal) if self.productive.shape_is(shape)]
        alternatives = self._scalars(shapes)
        for shape in shapes:
            if isinstance(shape, Values) and shape.kind in ("array", "object"):
                if len(shape.values) > _MAX_LISTED:
                    raise unsupported(
                        *_where(goal, "enum"),
                        f"{len(shape.values)} {shape.kind}s are listed, the limit is {_MAX_LISTED}; list fewer, or describe "
                        "them by a schema of their parts",
                    )
                alternatives.extend(self._value(value.content) for value in shape.values)
            elif isinstance(shape, ArrayShape):
                alternatives.append(self._write_array(shape, goal))
            elif isinstance(shape, ObjectShape):
                alternatives.append(self._members.write(shape))
        return alternatives

    def _symbol(self, goal: Goal) -> str:
        symbol = self._symbols.get(goal)
        if symbol is None:
            symbol = self._symbols[goal] = self._grammar.new_rule()
            self._pending.append(goal)
        return symbol

    # ---- scalars and listed values

    def _scalars(self, shapes: Iterable[Shape]) -> list[str]:
        alternatives: list[str] = []
        numbers: list[Language] = []
        strings: list[Language] = []
        listed: list[Language] = []
        for shape in shapes:
            if isinstance(shape, StringShape):
                strings.append(shape.language)
            elif isinstance(shape, NumberShape):
                try:
                    numbers.append(number_texts(shape.range, self._solver.work))
                except NotRegular:
                    alternatives.append(self._multiples(shape.range))
            elif isinstance(shape, Values) and shape.kind == "string":
                strings.extend(literal(value.content) for value in shape.values)
            elif isinstance(shape, Values) and shape.kind not in ("array", "object"):
                listed.extend(_scalar_text(value.content) for value in shape.values)
        # What is listed is one terminal, for each is one of those that the backend tells apart at one place of a text. Each
        # kind of value keeps its own where it is a large set: the backend knows such sets again.
        texts = [*numbers, json_string(union(*strings)) if strings else EMPTY, union(*listed)]
        return alternatives + [self._grammar.symbol(text) for text in texts if text != EMPTY]

    def _multiples(self, wanted: NumberRange) -> str:
        try:
            return add_multiples(self._grammar, wanted, self._solver.work)
        except TooManyRemainders as exc:
            raise unsupported(wanted.multiple_at, "multipleOf", str(exc)) from None

    def _value(self, value: Any) -> str:
        if isinstance(value, list):
            items = [self._value(item) for item in value]
            return self._sequence(self._array, items)
        if isinstance(value, dict):
            members = [
                f"{self._grammar.symbol(key_of(literal(name)))} {self._value(inner)}" for name, inner in value.items()
            ]
            return self._sequence(self._object, members)
        return self._grammar.symbol(_scalar_text(value))

    def _sequence(self, brackets: tuple[str, str], parts: list[str]) -> str:
        return f"{brackets[0]} {f' {self._comma} '.join(parts)} {brackets[1]}"

    # ---- arrays

    def _write_array(self, shape: ArrayShape, goal: Goal) -> str:
        start, end = self._array
        if shape.contains or shape.unique:
            machine = self.productive.machine(shape)
            return f"{start} {machine.write(self._grammar, self.productive.has, self._symbol, self._value, self._comma)} {end}"
        high = self.productive.max_items(shape)
        prefix = list(map(self._symbol, shape.prefix if high is None else shape.prefix[:high]))
        more_low = max(shape.low - len(prefix), 0)
        more_high = None if high is None else high - len(prefix)
        if not prefix:
            if more_high == 0:
                return f"{start} {end}"
            items = self._symbol(shape.items)
            rest = repeated(
                f"{self._comma} {items}", max(more_low - 1, 0), None if more_high is None else more_high - 1
            )
            body = f"{items} {rest}"
            return f"{start} {body} {end}" if more_low else f"{start} ({body})? {end}"
        if len(prefix) > _MAX_NESTED:
            raise unsupported(
                *_where(goal), f"it is an array of more than {_MAX_NESTED} items with schemas of their own"
            )
        rest = ""
        if more_high != 0:
            rest = repeated(f"{self._comma} {self._symbol(shape.items)}", more_low, more_high)
        for index in range(len(prefix) - 1, 0, -1):
            tail = f"{self._comma} {prefix[index]} {rest}"
            rest = tail if index < shape.low else self._grammar.rule([tail, '""'])
        body = f"{prefix[0]} {rest}"
        return f"{start} {body} {end}" if shape.low else f"{start} ({body})? {end}"


@contextmanager
def _named(goal: Goal) -> Iterator[None]:
    """Says where it was that something became too large."""
    try:
        yield
    except (GrammarTooLarge, TooComplex, RecursionError):
        raise unsupported(*_where(goal), TOO_COMPLEX) from None


def _where(goal: Goal, wanted: str = "") -> tuple[str, str]:
    """Pointer and keyword of the last schema of a goal, by and large what makes it what it is; of one that has `wanted`
    rather than of others."""
    schemas = [schema for schema, _ in reversed(goal) if isinstance(schema.content, dict)]
    schema = next((schema for schema in schemas if wanted in schema), schemas[0] if schemas else None)
    keywords = [key for key in schema.content if key not in _NOTES] if schema else []
    if not keywords:
        return "", "type"
    keyword = wanted if wanted in keywords else next((key for key in keywords if key != "type"), keywords[0])
    return schema.at(keyword), keyword


def _scalar_text(value: Any) -> Language:
    if isinstance(value, str):
        return json_string(literal(value))
    if value is None or isinstance(value, bool):
        return literal(json.dumps(value))
    return texts_of(Fraction(value))
