"""Where a JSON number ends: nothing in it says so, only what follows it does.

Owns the questions that a structural tag asks about what stands after a number: which characters may go on with it, and
whether a text can be read in two ways. What numbers look like is numbers.py's.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from openengine.core.guides.language import (
    ANY_TEXT,
    EMPTY,
    NOT_EMPTY,
    Language,
    TooComplex,
    chars,
    concat,
    first_chars,
    intersect,
    representatives,
    sample,
    union,
)
from openengine.core.guides.numbers import NotRegular, number_texts, texts_of
from openengine.core.guides.schema_shapes import NumberShape, Shape, Values
from openengine.core.guides.work import Work

__all__ = ["NUMBER_GOES_ON", "number_edges", "number_language", "read_twice"]

_MAX_STATES = 300  # the numbers between two bounds of a schema have some dozens; each costs several derivatives
_BEGINS = chars([(0x2D, 0x2D), (0x30, 0x39)])
NUMBER_GOES_ON = chars((ord(char),) * 2 for char in "0123456789.eE")
"""What any number may go on with."""


def number_language(shapes: Iterable[Shape], work: Work) -> Language | None:
    """The texts of the numbers among `shapes`; None where they are no regular language."""
    found: list[Language] = []
    for shape in shapes:
        if isinstance(shape, NumberShape):
            try:
                found.append(number_texts(shape.range, work))
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
            longer = concat(intersect(state, NOT_EMPTY), end, ANY_TEXT)
            found = sample(intersect(concat(end, ANY_TEXT), longer), work)
            if found is not None:
                return text + found
    except TooComplex:
        return ""
    return None
