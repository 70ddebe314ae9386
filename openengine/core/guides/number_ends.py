"""Where a JSON number ends: nothing in it says so, only what follows it does."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from openengine.core.guides.language import (
    ANY_TEXT,
    EMPTY,
    EPSILON,
    Language,
    TooComplex,
    chars,
    complement,
    concat,
    first_chars,
    intersect,
    representatives,
    sample,
    union,
)
from openengine.core.guides.numbers import NotRegular, number_texts, texts_of
from openengine.core.guides.schema_shapes import NumberShape, Values
from openengine.core.guides.schema_solver import ShapeSolver
from openengine.core.guides.schema_source import SchemaDocument
from openengine.core.guides.work import Work

__all__ = ["NUMBER_GOES_ON", "number_edges", "number_language", "read_twice"]

_MAX_STATES = 300
_BEGINS = chars([(0x2D, 0x2D), (0x30, 0x39)])
NUMBER_GOES_ON = chars((ord(char),) * 2 for char in "0123456789.eE")
"""What any number may go on with."""

_SOME_TEXT = complement(EPSILON)


def number_language(content: Any, work: Work) -> Language | None:
    """The texts of the numbers that meet a schema; None where they are no regular language."""
    solver = ShapeSolver(SchemaDocument(content, work), work)
    found: list[Language] = []
    for shape in solver.shapes(solver.goal((solver.document.root, True))):
        if isinstance(shape, NumberShape):
            try:
                found.append(number_texts(shape.range))
            except NotRegular:
                return None
        elif isinstance(shape, Values) and shape.kind == "number":
            found.extend(texts_of(Fraction(value.content)) for value in shape.values)
    return union(*found)


def number_edges(texts: Language | None, work: Work) -> tuple[Language, Language]:
    """The characters that numbers begin with, and those with which one that could end may go on."""
    if texts is None:
        return _BEGINS, NUMBER_GOES_ON
    try:
        more = union(*(first_chars(state, work) for _, state in _complete(texts, work)))
        return first_chars(texts, work), more
    except TooComplex:
        return _BEGINS, NUMBER_GOES_ON


def _complete(language: Language, work: Work) -> list[tuple[str, Language]]:
    """Texts of `language`, one for each thing that may follow a text of it, and that. Raises TooComplex."""
    seen = {language}
    pending = [("", language)]
    for text, state in pending:
        for char in representatives(state):
            following = state.after(char, work)
            if following != EMPTY and following not in seen:
                seen.add(following)
                pending.append((text + chr(char), following))
        if len(pending) > _MAX_STATES:
            raise TooComplex
    return [(text, state) for text, state in pending if state.has_empty]


def read_twice(texts: Language, end: Language, work: Work) -> str | None:
    """A text that begins with one of `texts` and its `end`, but with a longer one and its end too; None if there is none."""
    try:
        for text, state in _complete(texts, work):
            longer = concat(intersect(state, _SOME_TEXT), end, ANY_TEXT)
            found = sample(intersect(concat(end, ANY_TEXT), longer), work)
            if found is not None:
                return text + found
    except TooComplex:
        return ""
    return None
