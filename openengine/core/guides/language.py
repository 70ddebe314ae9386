"""Regular languages over Unicode characters: built, combined, decided and written for the backend.

A `Language` is an expression with union, concatenation, repetition, intersection and complement. Questions about it
(`is_empty`, `matches`) are answered with derivatives: `L.after(c)` is what may follow a first character c. Nothing is
ever expanded into an automaton that is larger than the part a question visits, and a question that visits more than
its budget raises `TooComplex`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Final

from openengine.core.guides.work import Work

__all__ = [
    "ANY_CHAR",
    "ANY_TEXT",
    "EMPTY",
    "EPSILON",
    "NOT_EMPTY",
    "SOME_TEXT",
    "Language",
    "TooComplex",
    "chars",
    "complement",
    "concat",
    "first_chars",
    "intersect",
    "is_empty",
    "literal",
    "matches",
    "negated_ranges",
    "repeat",
    "representatives",
    "sample",
    "union",
]

Ranges = tuple[tuple[int, int], ...]

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_DEFAULT_BUDGET = 1500
_MAX_SIZE = 400_000
_SIZE_PER_TICK = 64
_RANGES_PER_PART = 16  # a class of many ranges costs as much as several parts
_PLAIN = ("concat", "union", "repeat")


class TooComplex(Exception):
    """A language has too many parts, or a question about it visited more states than its budget."""


class Language:
    """One expression; equal expressions are equal and hash alike. Made by the functions of this module only.

    kind: "chars" (parts are ranges of code points), "text" (parts[0], two characters or more), "concat", "union",
    "intersect", "not" or "repeat" (of parts[0], `low` to `high` times, None without end).  has_empty: whether the empty
    text belongs to it.  size: how many parts there are in all.  is_plain: made without intersection and complement.
    Raises TooComplex beyond 400,000 parts.
    """

    __slots__ = ("_content", "_hash", "has_empty", "high", "is_plain", "kind", "low", "parts", "size")

    def __init__(self, kind: str, parts: tuple, has_empty: bool, low: int = 0, high: int | None = 0) -> None:
        self.kind = kind
        self.parts = parts
        self.has_empty = has_empty
        self.low = low
        self.high = high
        is_leaf = kind in ("chars", "text")
        self.is_plain = is_leaf or (kind in _PLAIN and all(part.is_plain for part in parts))
        if kind == "text":
            self.size = len(parts[0])
        elif kind == "chars":
            self.size = 1 + len(parts) // _RANGES_PER_PART
        else:
            self.size = 1 + sum(part.size for part in parts)
        if self.size > _MAX_SIZE:
            raise TooComplex
        # The order of a union's or intersection's parts is that of their writing, and means nothing.
        self._content = frozenset(parts) if kind in ("union", "intersect") else parts
        self._hash = hash((kind, self._content, low, high))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Language)
            and self._hash == other._hash
            and (self.kind, self.low, self.high) == (other.kind, other.low, other.high)
            and self._content == other._content
        )

    def __repr__(self) -> str:
        bounds = f", {self.low}, {self.high}" if self.kind == "repeat" else ""
        return f"{self.kind}({', '.join(map(repr, self.parts))}{bounds})"

    @property
    def is_chars(self) -> bool:
        """Whether it is a set of single characters."""
        return self.kind == "chars"

    @property
    def fixed_text(self) -> str | None:
        """The text that is its only one, where it is written as such."""
        if self.kind == "text":
            return self.parts[0]
        if self.kind == "chars" and len(self.parts) == 1 and self.parts[0][0] == self.parts[0][1]:
            return chr(self.parts[0][0])
        return None

    def after(self, char: int, work: Work | None = None) -> Language:
        """What may follow a first character `char`. Ticks `work` once for each part that it looks into, and has it remember."""
        if work is not None:
            work.tick()
        if work is None or self.kind in ("chars", "text"):
            return _AFTER[self.kind](self, char, work)
        question = (self, char)
        found = work.known.get(question)
        if found is None:
            found = _AFTER[self.kind](self, char, work)
            work.remember(question, found, found.size)
        return found


# ---- construction ----------------------------------------------------------------------------------


def chars(ranges: Iterable[tuple[int, int]]) -> Language:
    """One character out of inclusive ranges of code points; surrogates, which no text holds, are left out."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(_without_surrogates(ranges)):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return Language("chars", tuple(merged), False)


def literal(text: str) -> Language:
    """Exactly `text`."""
    if len(text) == 1:
        return chars([(ord(text), ord(text))])
    return Language("text", (text,), False) if text else EPSILON


def concat(*parts: Language, work: Work | None = None) -> Language:
    flat: list[Language] = []
    for part in parts:
        if work is not None:
            work.tick()
        if part == EMPTY:
            return EMPTY
        if part.kind == "concat":
            flat.extend(part.parts)
        elif part != EPSILON:
            flat.append(part)
    if not flat:
        return EPSILON
    if len(flat) == 1:
        return flat[0]
    return Language("concat", tuple(flat), all(part.has_empty for part in flat))


def union(*parts: Language, work: Work | None = None) -> Language:
    flat: dict[Language, None] = {}
    ranges: list[tuple[int, int]] = []
    for part in parts:
        if work is not None:
            work.tick()
        for inner in part.parts if part.kind == "union" else (part,):
            if inner.is_chars:
                ranges.extend(inner.parts)
            else:
                flat[inner] = None
    if ranges:
        flat[chars(ranges)] = None
    if ANY_TEXT in flat:
        return ANY_TEXT
    members = list(flat)
    if not members:
        return EMPTY
    if len(members) == 1:
        return members[0]
    if EPSILON in flat and any(part.has_empty for part in members if part != EPSILON):
        return union(*(part for part in members if part != EPSILON))
    return Language("union", tuple(members), any(part.has_empty for part in members))


def intersect(*parts: Language) -> Language:
    flat: dict[Language, None] = {}
    for part in parts:
        flat.update(dict.fromkeys(part.parts if part.kind == "intersect" else (part,)))
    flat.pop(ANY_TEXT, None)
    if EMPTY in flat:
        return EMPTY
    sets = [part for part in flat if part.is_chars]
    if len(sets) > 1:
        for part in sets:
            del flat[part]
        flat[_common_chars(sets)] = None
    if not flat:
        return ANY_TEXT
    if EMPTY in flat:
        return EMPTY
    members = list(flat)
    if len(members) == 1:
        return members[0]
    if EPSILON in flat:
        return EPSILON if all(part.has_empty for part in members) else EMPTY
    return Language("intersect", tuple(members), all(part.has_empty for part in members))


def complement(part: Language) -> Language:
    if part.kind == "not":
        return part.parts[0]
    if part == EMPTY:
        return ANY_TEXT
    if part == ANY_TEXT:
        return EMPTY
    return Language("not", (part,), not part.has_empty)


def repeat(part: Language, low: int, high: int | None) -> Language:
    """`part` at least `low` and at most `high` times (None: without end)."""
    if high == 0 or part == EPSILON:
        return EPSILON
    if part == EMPTY:
        return EPSILON if low == 0 else EMPTY
    if (low, high) == (1, 1):
        return part
    if part.kind == "repeat" and part.low in (0, 1) and part.high is None and low <= 1 and high is None:
        return repeat(part.parts[0], min(low, part.low), None)
    return Language("repeat", (part,), low == 0 or part.has_empty, low, high)


def negated_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The code points outside `ranges`."""
    result, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            result.append((start, low - 1))
        start = max(start, high + 1)
    return result + ([(start, _LAST)] if start <= _LAST else [])


def _without_surrogates(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    first, last = _SURROGATES
    for low, high in ranges:
        if low < first:
            yield low, min(high, first - 1)
        if high > last:
            yield max(low, last + 1), high


def _common_chars(sets: list[Language]) -> Language:
    outside = [each for part in sets for each in negated_ranges(part.parts)]
    return chars(negated_ranges(outside))


EMPTY: Final = Language("chars", (), False)
EPSILON: Final = Language("concat", (), True)
ANY_CHAR: Final = chars([(0, _LAST)])
ANY_TEXT: Final = Language("repeat", (ANY_CHAR,), True, 0, None)
SOME_TEXT: Final = repeat(ANY_CHAR, 1, None)
"""One character or more, as a part of longer texts."""
NOT_EMPTY: Final = complement(EPSILON)
"""The same texts as a restriction of another language: it is gone after the first character."""

# ---- derivatives -----------------------------------------------------------------------------------


def _chars_after(self: Language, char: int, work: Work | None) -> Language:
    index = bisect_right(self.parts, (char, _LAST + 1)) - 1
    return EPSILON if index >= 0 and self.parts[index][1] >= char else EMPTY


def _text_after(self: Language, char: int, work: Work | None) -> Language:
    (text,) = self.parts
    return literal(text[1:]) if ord(text[0]) == char else EMPTY


def _concat_after(self: Language, char: int, work: Work | None) -> Language:
    results = []
    for index, part in enumerate(self.parts):
        results.append(concat(part.after(char, work), *self.parts[index + 1 :]))
        if not part.has_empty:
            break
    return union(*results)


def _repeat_after(self: Language, char: int, work: Work | None) -> Language:
    (part,) = self.parts
    rest = repeat(part, max(self.low - 1, 0), None if self.high is None else self.high - 1)
    return concat(part.after(char, work), rest)


_AFTER = {
    "chars": _chars_after,
    "text": _text_after,
    "concat": _concat_after,
    "repeat": _repeat_after,
    "union": lambda self, char, work: union(*(part.after(char, work) for part in self.parts)),
    "intersect": lambda self, char, work: intersect(*(part.after(char, work) for part in self.parts)),
    "not": lambda self, char, work: complement(self.parts[0].after(char, work)),
}


def _cuts(language: Language, found: set[int]) -> None:
    """Collect the code points at which `after` may change."""
    if language.is_chars:
        for low, high in language.parts:
            found.add(low)
            found.add(high + 1)
        return
    if language.kind == "text":
        found.update((ord(language.parts[0][0]), ord(language.parts[0][0]) + 1))
        return
    for part in language.parts:
        _cuts(part, found)
        if language.kind == "concat" and not part.has_empty:
            return


def representatives(*languages: Language) -> list[int]:
    """One character of each class of first characters that the languages tell apart."""
    found = {0}
    for language in languages:
        _cuts(language, found)
    found.discard(_LAST + 1)
    return [char if not _SURROGATES[0] <= char <= _SURROGATES[1] else _SURROGATES[1] + 1 for char in sorted(found)]


# ---- questions -------------------------------------------------------------------------------------


def matches(language: Language, text: str, work: Work | None = None) -> bool:
    """Whether `text` belongs to `language`. Ticks `work` once for each part that it looks into."""
    for char in text:
        language = language.after(ord(char), work)
        if language == EMPTY:
            return False
    return language.has_empty


def is_empty(language: Language, work: Work, *, budget: int = _DEFAULT_BUDGET) -> bool:
    """Whether no text belongs to `language`. Raises TooComplex after `budget` states."""
    if language.is_plain:
        return language == EMPTY  # nothing else is made of EMPTY: concat, union and repeat leave it out
    return sample(language, work, budget=budget) is None


def sample(language: Language, work: Work, *, budget: int = _DEFAULT_BUDGET) -> str | None:
    """Some text of `language`, None when there is none. Raises TooComplex after `budget` states."""
    if language.has_empty:
        return ""
    came_from: dict[Language, tuple[Language, int] | None] = {language: None}
    pending = [language]
    while pending:
        state = pending.pop()
        for char in representatives(state):
            work.tick(1 + state.size // _SIZE_PER_TICK)
            following = state.after(char, work)
            if following == EMPTY or following in came_from:
                continue
            came_from[following] = (state, char)
            if following.has_empty:
                return _path(came_from, following)
            pending.append(following)
            if len(came_from) > budget:
                raise TooComplex
    return None


def _path(came_from: dict[Language, tuple[Language, int] | None], state: Language) -> str:
    text: list[str] = []
    while (step := came_from[state]) is not None:
        state, char = step
        text.append(chr(char))
    return "".join(reversed(text))


def first_chars(language: Language, work: Work) -> Language:
    """The characters that texts of `language` begin with (those of texts that are not empty)."""
    cuts = representatives(language)
    ends = [*(low - 1 for low in cuts[1:]), _LAST]
    return chars(
        (low, high) for low, high in zip(cuts, ends, strict=True) if not is_empty(language.after(low, work), work)
    )
