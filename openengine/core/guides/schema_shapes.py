"""Shapes: what is asked of values of one JSON type. Arrays and objects speak of their parts by goals.

A *goal* is a conjunction of demands. See schema_solver.py for how shapes are worked out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from openengine.core.guides.language import ANY_TEXT, EMPTY, Language, intersect, union
from openengine.core.guides.numbers import NumberRange
from openengine.core.guides.schema_source import Schema, unsupported
from openengine.core.guides.schema_values import Value

__all__ = [
    "ANY_VALUE",
    "ArrayShape",
    "Contains",
    "Demand",
    "Goal",
    "MemberRule",
    "NumberShape",
    "ObjectDraft",
    "ObjectShape",
    "Shape",
    "State",
    "StringShape",
    "Values",
    "both_strings",
    "check_size",
    "counted",
    "merged_strings",
    "unique",
]

_MAX_STATES = 1000  # of one schema; each may double with the next keyword, and becomes rules of its own


class Demand(NamedTuple):
    """That `schema` holds for a value, or that it does not."""

    schema: Schema
    holds: bool


Goal: TypeAlias = tuple[Demand, ...]
"""Demands in the order of their writing, which is the order of declared properties."""


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
    """Between `low` and `high` items meet `goal`; `others` is its negation.

    where: pointer and keyword that ask for it.
    """

    goal: Goal
    others: Goal
    low: int
    high: int | None
    where: tuple[str, str] = field(compare=False)


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
class MemberRule:
    """The three keywords of one schema that divide an object's members among them."""

    properties: tuple[tuple[str, Goal], ...] = ()
    patterns: tuple[tuple[Language, Goal], ...] = ()
    additional: Goal = ()


@dataclass(frozen=True, slots=True)
class ObjectDraft:
    """An object shape under construction; `some` are sets of names of which one must be present."""

    sources: tuple[MemberRule, ...] = ()
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

    low, high: bounds on the number of members.  some: sets of names, of each of which one of the
    others must be there.
    """

    declared: tuple[tuple[str, Goal, bool], ...]
    others: tuple[tuple[Language, Goal], ...]
    low: int
    high: int | None
    some: tuple[Language, ...]
    where: tuple[str, str]
    kind = "object"


Shape: TypeAlias = Values | NumberShape | StringShape | ArrayShape | ObjectShape
State: TypeAlias = Values | NumberShape | StringShape | ArrayShape | ObjectDraft
"""A shape under construction."""

ANY_VALUE: dict[str, State] = {
    "null": Values("null", (Value.of(None),)),
    "boolean": Values("boolean", (Value.of(False), Value.of(True))),
    "number": NumberShape(NumberRange()),
    "string": StringShape(),
    "array": ArrayShape(),
    "object": ObjectDraft(),
}
"""Any value of each JSON type."""


def counted(state: Any, low: int, high: int | None) -> list[Any]:
    """`state` with its number of items or members between two more bounds."""
    low = max(low, state.low)
    high = state.high if high is None else high if state.high is None else min(high, state.high)
    return [] if high is not None and high < low else [replace(state, low=low, high=high)]


def check_size(states: list[State], schema: Schema, keywords: tuple[str, ...]) -> None:
    """Raises InvalidArgument when there are more alternatives than anyone wants to tell apart."""
    if len(states) > _MAX_STATES:
        keyword = next(keyword for keyword in keywords if keyword in schema)
        raise unsupported(schema.at(keyword), keyword, f"it makes more than {_MAX_STATES} alternatives")


def both_strings(a: State, b: State) -> State:
    """What meets both; the values of a list are judged by the caller."""
    if isinstance(a, StringShape) and isinstance(b, StringShape):
        return StringShape(intersect(a.language, b.language))
    if isinstance(a, Values) and isinstance(b, Values):
        return Values("string", tuple(value for value in a.values if value in b.values))
    return a if isinstance(a, Values) else b


def merged_strings(states: Iterable[State]) -> list[State]:
    """Alternatives for strings as one language and one list of values."""
    values: dict[Value, None] = {}
    languages = [EMPTY]
    for state in states:
        if isinstance(state, Values):
            values.update(dict.fromkeys(state.values))
        else:
            languages.append(state.language)
    language = union(*languages)
    merged: list[State] = [Values("string", tuple(values))] if values else []
    return merged + ([StringShape(language)] if language != EMPTY else [])


def unique(items: Iterable[Any]) -> list[Any]:
    """`items` without repetition, in order."""
    return list(dict.fromkeys(items))
