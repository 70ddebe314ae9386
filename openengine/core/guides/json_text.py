"""How JSON values are written under a guide: strings, punctuation and bounded white space.

White space is optional and bounded: one space after a colon; one space, or a line break with at most 32 spaces or tabs,
after an opening bracket or a comma and before a closing bracket. Strings are written as `json.dumps(…,
ensure_ascii=False)` writes them; where nothing restricts a string, every escape of JSON is legal too.

Owns how a language over characters becomes one over their writing. Numbers are numbers.py's, and what stands between the
punctuation is schema_grammar.py's.
"""

from __future__ import annotations

import json
from typing import Final

from openengine.core.guides.language import (
    ANY_CHAR,
    ANY_TEXT,
    EPSILON,
    Language,
    chars,
    complement,
    concat,
    intersect,
    literal,
    matches,
    repeat,
    union,
)

__all__ = ["CLOSE_ARRAY", "CLOSE_OBJECT", "COMMA", "OPEN_ARRAY", "OPEN_OBJECT", "json_string", "key_of"]

_INDENT = repeat(chars([(0x20, 0x20), (0x09, 0x09)]), 0, 32)
_SPACE = repeat(literal(" "), 0, 1)
_GAP = union(EPSILON, literal(" "), concat(literal("\n"), _INDENT))

OPEN_OBJECT: Final = concat(literal("{"), _GAP)
CLOSE_OBJECT: Final = concat(_GAP, literal("}"))
OPEN_ARRAY: Final = concat(literal("["), _GAP)
CLOSE_ARRAY: Final = concat(_GAP, literal("]"))
COMMA: Final = concat(literal(","), _GAP)
_COLON = concat(literal(":"), _SPACE)
_QUOTE = literal('"')

_SHORT = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
_RAW = chars([(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF)])


def _escapes(wanted: Language) -> Language:
    """The escapes of those characters of `wanted` that cannot be written as they are."""
    codes = [code for code in (*range(0x20), 0x22, 0x5C) if matches(wanted, chr(code))]
    short = chars((ord(_SHORT[code]),) * 2 for code in codes if code in _SHORT)
    long = [f"{code:02x}" for code in codes if code not in _SHORT]
    high = [concat(literal(first), chars((ord(t[1]),) * 2 for t in long if t[0] == first)) for first in "01"]
    return concat(literal("\\"), union(short, concat(literal("u00"), union(*high))))


_CHAR = union(_RAW, _escapes(ANY_CHAR))


def _any_escape() -> Language:
    hexadecimal = chars([(0x30, 0x39), (0x41, 0x46), (0x61, 0x66)])
    d, high, low = (chars((ord(c), ord(c)) for c in group) for group in ("dD", "89abAB", "cdefCDEF"))
    octal = chars([(0x30, 0x37)])
    not_d = chars([(0x30, 0x39), (0x41, 0x43), (0x45, 0x46), (0x61, 0x63), (0x65, 0x66)])
    single = union(concat(not_d, repeat(hexadecimal, 3, 3)), concat(d, octal, repeat(hexadecimal, 2, 2)))
    pair = concat(d, high, repeat(hexadecimal, 2, 2), literal("\\u"), d, low, repeat(hexadecimal, 2, 2))
    short = chars((ord(c), ord(c)) for c in '"\\/bfnrt')
    return concat(literal("\\"), union(short, concat(literal("u"), union(single, pair))))


_FREE_CHAR = union(_RAW, _any_escape())
_VALID = repeat(_CHAR, 0, None)


def json_string(language: Language) -> Language:
    """JSON strings whose value belongs to `language`."""
    return concat(_QUOTE, _written(language), _QUOTE)


def key_of(language: Language) -> Language:
    """The names of `language` as keys of an object, with the colon."""
    return concat(json_string(language), _COLON)


def _written(language: Language) -> Language:
    if language.kind == "repeat" and language.parts[0] == ANY_CHAR:
        return repeat(_FREE_CHAR, language.low, language.high)
    return _Writer().write(language)


class _Writer:
    """Maps a language over values to the language of their texts. Writing is one to one, so all operations carry over."""

    def __init__(self) -> None:
        self._done: dict[Language, Language] = {}

    def write(self, language: Language) -> Language:
        known = self._done.get(language)
        if known is None:
            known = self._done[language] = self._write(language)
        return known

    def _write(self, language: Language) -> Language:
        if language.is_chars:
            return union(intersect(language, _RAW), _escapes(language))
        if language.kind == "text":
            return literal(json.dumps(language.parts[0], ensure_ascii=False)[1:-1])
        if language == ANY_TEXT:
            return _VALID
        parts = [self.write(part) for part in language.parts]
        if language.kind == "concat":
            return concat(*parts)
        if language.kind == "union":
            return union(*parts)
        if language.kind == "repeat":
            return repeat(parts[0], language.low, language.high)
        if language.kind == "intersect":
            return intersect(*parts)
        return intersect(_VALID, complement(parts[0]))
