"""The syntax of regular expressions: text to nodes, whose parts without anchors and lookaheads are languages already.

Owns what ECMA 262, Python and Rust agree on; what they read differently (`a{,2}`) is refused. `\\d`, `\\w` and `\\s` are
ASCII classes (`\\s` in a schema also holds Unicode's spaces, as ECMA says). What has no meaning as a set of texts
(`\\b`, back references, lookbehind) is refused by name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from openengine.core.guides.language import EPSILON, Language, chars, concat, literal, negated_ranges, repeat, union
from openengine.core.guides.unicode_categories import category_ranges
from openengine.core.guides.work import Work
from openengine.errors import InvalidArgument

__all__ = ["Choice", "Look", "Loop", "Mark", "Node", "Sequence", "parse_regex", "shown"]

_MAX_DEPTH = 120
_MAX_REPEAT = 100_000
_MAX_COUNT_DIGITS = 20
_MAX_MARKS = 4000  # each copies what follows it
_RANGES_PER_TICK = 16
_COUNT = re.compile(r"\{([0-9, ]+)\}")
_BOUNDS = re.compile(r"([0-9]+)(,?)([0-9]*)")
_HEX = re.compile(r"[0-9A-Fa-f]{1,8}")
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})")
_DIGIT = ((0x30, 0x39),)
_WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_ASCII_SPACE = ((0x09, 0x0D), (0x20, 0x20))
_ECMA_SPACE = (
    *_ASCII_SPACE,
    *((char, char) for char in (0xA0, 0x1680, 0x202F, 0x205F, 0x3000, 0xFEFF)),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
)
_CONTROL_ESCAPES = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_FLAGS = {
    "i": "case-insensitive matching",
    "m": "multi-line mode",
    "s": "dot-all mode",
    "x": "verbose mode",
    "u": "(?u)",
}


class Mark(Enum):
    """Parts of an expression that match no character."""

    START = "^"
    END = "$"


@dataclass(frozen=True, slots=True)
class Look:
    """`(?=inner)`, or `(?!inner)` when negative."""

    inner: Node
    negative: bool


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    inner: Node
    low: int
    high: int | None
    position: int


Node = Language | Mark | Look | Sequence | Choice | Loop
"""What has no anchor or lookahead in it is a Language."""


def parse_regex(pattern: str, work: Work, *, ecma: bool) -> Node:
    """The syntax of `pattern`, in the dialect of JSON Schema or the common one.

    Raises InvalidArgument with the position and what is wrong there; TooComplex, CompileTimeout.
    """
    return _Parser(pattern, work, ecma=ecma).parse()


def shown(pattern: str) -> str:
    """`pattern` as messages show it."""
    return repr(pattern if len(pattern) <= 80 else pattern[:77] + "...")


class _Parser:
    """Text to syntax."""

    def __init__(self, pattern: str, work: Work, *, ecma: bool) -> None:
        self._text = pattern
        self._work = work
        self._at = 0
        self._ecma = ecma
        self._depth = 0
        self._ignore_case = False
        self._num_marks = 0
        self._known: dict[str, Language] = {}  # by their writing
        self._properties: dict[str, tuple[tuple[int, int], ...]] = {}

    def parse(self) -> Node:
        if self._take("(?i)"):
            self._ignore_case = True
        node = self._choice()
        if self._at < len(self._text):
            raise self._error("unmatched ')'")
        return node

    def _choice(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"groups nested more than {_MAX_DEPTH} deep")
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        self._depth -= 1
        plain = [part for part in parts if isinstance(part, Language)]
        others = [part for part in parts if not isinstance(part, Language)]
        if not others:
            return union(*plain, work=self._work)
        if plain:
            others.append(union(*plain, work=self._work))
        return others[0] if len(others) == 1 else Choice(tuple(others))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._text) and self._peek() not in "|)":
            parts.append(self._repeated())
        joined: list[Node] = []
        for is_plain, group in itertools.groupby(parts, lambda part: isinstance(part, Language)):
            members = list(group)
            joined.extend([self._concat(members)] if is_plain else members)
        if not joined:
            return EPSILON
        return joined[0] if len(joined) == 1 else Sequence(tuple(joined))

    def _concat(self, parts: Iterable[Language]) -> Language:
        """One after the other; characters that stand side by side as one text, of which there may be very many."""
        found: list[Language] = []
        text: list[str] = []
        for part in parts:
            self._work.tick()
            if part.fixed_text is not None:
                text.append(part.fixed_text)
                continue
            found += [literal("".join(text)), part]
            text.clear()
        return concat(*found, literal("".join(text)), work=self._work)

    def _repeated(self) -> Node:
        self._work.tick()
        start = self._at
        node = self._atom()
        depth = 0
        while (bounds := self._quantifier()) is not None:
            depth += 1
            if depth > _MAX_DEPTH:
                raise self._error(f"more than {_MAX_DEPTH} repetitions of one another", start)
            if isinstance(node, Mark | Look):
                raise self._error("nothing to repeat", start)
            if self._at > start and self._take("+"):
                raise self._error("possessive quantifiers are not supported")
            self._take("?")  # laziness chooses between matches, not between texts
            node = repeat(node, *bounds) if isinstance(node, Language) else Loop(node, *bounds, start)
        return node

    def _quantifier(self) -> tuple[int, int | None] | None:
        for char, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(char):
                return bounds
        if self._peek() != "{":
            return None
        start = self._at
        count = _COUNT.match(self._text, start)
        if count is None:
            return None  # a literal brace
        bounds = _BOUNDS.fullmatch(count[1])
        if bounds is None:
            raise self._error(
                f"{count[0]:.40} is a repetition in some dialects and literal text in others; "
                "write both bounds without spaces, as in {0,2}, or \\{ for the brace itself",
                start,
            )
        low, comma, high = bounds.groups()
        self._at = count.end()
        if max(len(low), len(high)) > _MAX_COUNT_DIGITS:
            raise self._error(f"a repetition count over {_MAX_REPEAT}", start)
        least, most = int(low), (int(high) if high else None) if comma else int(low)
        if max(least, most or 0) > _MAX_REPEAT:
            raise self._error(f"a repetition count over {_MAX_REPEAT}", start)
        if most is not None and most < least:
            raise self._error(f"the repetition {{{low},{high}}} has its bounds in the wrong order", start)
        return least, most

    def _atom(self) -> Node:
        char = self._text[self._at]
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        start = self._at
        if char == "{" and self._quantifier() is not None:
            raise self._error("nothing to repeat", start)
        self._at += 1
        if char in "^$":
            return self._mark(Mark(char), start)
        if char == ".":
            ends = (0x0A, 0x0D, 0x2028, 0x2029) if self._ecma else (0x0A,)
            if char not in self._known:
                self._known[char] = chars(negated_ranges((end, end) for end in ends))
            return self._known[char]
        if char == "\\":
            return self._escape()
        if char in "*+?":
            raise self._error("nothing to repeat", self._at - 1)
        if char not in self._known:
            self._known[char] = self._chars([(ord(char), ord(char))])
        return self._known[char]

    def _group(self) -> Node:
        start = self._at
        self._at += 1
        look: bool | None = None
        if self._take("?"):
            if self._take("=") or self._take("!"):
                look = self._text[self._at - 1] == "!"
            elif self._take("<=") or self._take("<!"):
                raise self._error("lookbehind is not supported", start)
            elif self._take("P<") or self._take("<"):
                end = self._text.find(">", self._at)
                if end < 0 or not self._text[self._at : end].replace("$", "_").isidentifier():
                    raise self._error("a group name is malformed", start)
                self._at = end + 1
            elif not self._take(":"):
                flag = _FLAGS.get(self._peek(), "this kind of group")
                raise self._error(f"{flag} is not supported here", start)
        node = self._choice()
        if not self._take(")"):
            raise self._error("missing ')' for the group", start)
        return node if look is None else self._mark(Look(node, look), start)

    def _mark(self, node: Mark | Look, start: int) -> Mark | Look:
        self._num_marks += 1
        if self._num_marks > _MAX_MARKS:
            raise self._error(f"more than {_MAX_MARKS} anchors and lookaheads", start)
        return node

    def _class(self) -> Language:
        start = self._at
        self._at += 1
        negative = self._take("^")
        ranges: dict[tuple[int, int], None] = {}
        # ECMA's [] matches nothing; elsewhere a leading ']' is a character. Both are rare and told apart by the dialect.
        if self._peek() == "]" and not self._ecma:
            self._at += 1
            ranges[0x5D, 0x5D] = None
        while not self._take("]"):
            if self._at >= len(self._text):
                raise self._error("missing ']' for the character class", start)
            if not self._ecma and (self._text.startswith(("[:", "&&", "--", "~~"), self._at)):
                raise self._error(f"{self._text[self._at : self._at + 2]!r} in a character class is not supported")
            at = self._at
            low = self._class_member()
            self._work.tick(1 + len(low) // _RANGES_PER_TICK)
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._class_member()
                if len(low) > 1 or low[0][0] != low[0][1] or len(high) > 1 or high[0][0] != high[0][1]:
                    if not self._ecma:
                        raise self._error("a character class has a range between classes", at)
                    ranges |= dict.fromkeys([*low, (0x2D, 0x2D), *high])  # ECMA's reading of [\w-.]
                    continue
                if high[0][0] < low[0][0]:
                    raise self._error("a character range has its ends in the wrong order", at)
                ranges[low[0][0], high[0][0]] = None
            else:
                ranges |= dict.fromkeys(low)
        result = self._chars(list(ranges))
        return chars(negated_ranges(result.parts)) if negative else result

    def _class_member(self) -> list[tuple[int, int]]:
        char = self._text[self._at]
        self._at += 1
        if char != "\\":
            return [(ord(char), ord(char))]
        if self._take("b"):
            return [(8, 8)]
        if self._take("x") or self._take("u"):
            # Not as a language, which holds no surrogates: they may be the ends of a range.
            return [(self._code_point(self._text[self._at - 1], self._at - 2),) * 2]
        escaped = self._escape(in_class=True)
        return list(escaped.parts)

    def _escape(self, *, in_class: bool = False) -> Node:
        start = self._at - 1
        if self._at >= len(self._text):
            raise self._error("a backslash at the end", start)
        char = self._text[self._at]
        self._at += 1
        space = _ECMA_SPACE if self._ecma else _ASCII_SPACE
        classes = {"d": _DIGIT, "w": _WORD, "s": space}
        if char.lower() in classes:
            ranges = classes[char.lower()]
            return chars(ranges if char.islower() else negated_ranges(ranges))
        if char in "pP":
            ranges = self._property(start)
            if self._ignore_case and not in_class:
                raise self._error("case-insensitive matching beyond ASCII is not supported", start)
            written = self._text[start : self._at]
            if written not in self._known:
                self._known[written] = chars(ranges if char == "p" else negated_ranges(ranges))
            self._work.tick(1 + len(ranges) // _RANGES_PER_TICK)
            return self._known[written]
        if char in "xu":
            return self._chars([(self._code_point(char, start),) * 2])
        if char in _CONTROL_ESCAPES and not (char == "0" and self._peek().isdecimal()):
            return chars([(_CONTROL_ESCAPES[char],) * 2])
        if char == "c" and self._peek().isascii() and self._peek().isalpha():
            self._at += 1
            return chars([(ord(self._text[self._at - 1]) % 32,) * 2])
        if char in "AzZ" and not in_class:
            return self._mark(Mark.START if char == "A" else Mark.END, start)
        if char in "bB":
            raise self._error(f"the word boundary \\{char} is not supported", start)
        if char.isdecimal() or char == "k":
            raise self._error(f"the back reference or octal escape \\{char} is not supported", start)
        if char.isalpha():
            raise self._error(f"the escape \\{char} is not supported", start)
        return chars([(ord(char), ord(char))])

    def _code_point(self, kind: str, start: int) -> int:
        if self._take("{"):
            end = self._text.find("}", self._at)
            digits = self._text[self._at : end] if end > 0 else ""
            self._at = end + 1
        else:
            width = 2 if kind == "x" else 4
            digits = self._text[self._at : self._at + width]
            self._at += width
            if len(digits) < width:
                digits = ""
        value = int(digits, 16) if _HEX.fullmatch(digits) else -1
        if not 0 <= value <= 0x10FFFF:
            raise self._error(f"the escape \\{kind} is malformed", start)
        if 0xD800 <= value < 0xDC00 and self._text.startswith("\\u", self._at):
            low = _LOW_SURROGATE.match(self._text, self._at)
            if low is None:
                raise self._error("the escape \\u holds half of a surrogate pair", start)
            self._at = low.end()
            return 0x10000 + (value - 0xD800) * 0x400 + int(low[1], 16) - 0xDC00
        return value

    def _property(self, start: int) -> tuple[tuple[int, int], ...]:
        name = self._peek()
        self._at += 1
        if name == "{":
            end = self._text.find("}", self._at)
            name = self._text[self._at : end] if end > 0 else ""
            self._at = end + 1
        if name not in self._properties:
            self._properties[name] = category_ranges(name, self._work)
        if not self._properties[name]:
            raise self._error(f"the Unicode property {name!r:.60} is not supported (general categories are)", start)
        return self._properties[name]

    def _chars(self, ranges: list[tuple[int, int]]) -> Language:
        if not self._ignore_case:
            return chars(ranges)
        folded = list(ranges)
        for low, high in ranges:
            if high > 0x7F and (low, high) != (0x80, 0x10FFFF):
                raise self._error("case-insensitive matching beyond ASCII is not supported")
            for first, last, shift in ((0x41, 0x5A, 32), (0x61, 0x7A, -32)):
                if max(low, first) <= min(high, last):
                    folded.append((max(low, first) + shift, min(high, last) + shift))
        return chars(folded)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _error(self, what: str, position: int | None = None) -> InvalidArgument:
        position = self._at if position is None else position
        return InvalidArgument(f"the regular expression {shown(self._text)} is refused at position {position}: {what}")
