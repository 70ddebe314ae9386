"""GBNF grammars: `name ::= alternatives`, start symbol `root`.

Literals and character classes know the escapes \\n \\r \\t \\\\ \\" \\[ \\] \\- \\^ \\' \\/ \\0 \\xHH \\uHHHH \\UHHHHHHHH; `.` is any
character; `( ) | * + ?` are as in regular expressions; `{m} {m,} {,n} {m,n}` repeat; `#` begins a comment. A rule ends where
the next one begins, so alternatives may stand on several lines.
"""

from __future__ import annotations

import re
from typing import NoReturn

from openengine.core.guides.context_free import add_rules
from openengine.core.guides.grammar import Grammar
from openengine.core.guides.language import ANY_CHAR, EPSILON, chars, literal, negated_ranges
from openengine.core.guides.rule_nodes import Choice, Loop, Node, Reference, Sequence
from openengine.core.guides.work import Work
from openengine.errors import InvalidArgument

__all__ = ["add_gbnf", "parse_gbnf"]

_MAX_DEPTH = 100
_MAX_REPEAT = 10_000
_SPACE = re.compile(r"\s+|#[^\n]*")  # a piece of it
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_COUNT = re.compile(r"\{\s*(?:([0-9]{1,9})\s*)?(?:(,)\s*(?:([0-9]{1,9})\s*)?)?\}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", **{char: char for char in "\\\"'[]-^/"}}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def add_gbnf(grammar: Grammar, text: str, work: Work) -> str:
    """Add the rules of a GBNF grammar; returns the symbol of `root`. Raises InvalidArgument with line and column."""
    return add_rules(grammar, parse_gbnf(text), "root", work)


def parse_gbnf(text: str) -> dict[str, Node]:
    """The rules by name. Raises InvalidArgument with line and column."""
    return _Parser(text).parse()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def parse(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip()
        while self._at < len(self._text):
            start = self._at
            name = _NAME.match(self._text, self._at)
            if name is None:
                self._fail("expected the name of a rule")
            self._at = name.end()
            self._skip()
            if not self._take("::="):
                self._fail(f"expected '::=' after the name {name.group()!r}")
            if name.group() in rules:
                self._fail(f"the rule {name.group()!r} is defined twice", start)
            rules[name.group()] = self._choice()
            self._skip()
            if self._peek() == ")":
                self._fail("unmatched ')'")
        if "root" not in rules:
            raise InvalidArgument("the grammar has no rule named 'root', which it starts with")
        return rules

    def _choice(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._fail(f"groups nested more than {_MAX_DEPTH} deep")
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        self._depth -= 1
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        self._skip()
        while self._peek() not in ("", "|", ")"):
            name = _NAME.match(self._text, self._at)
            if name is not None and self._text.startswith("::=", self._after_space(name.end())):
                break  # the next rule
            parts.append(self._repeated())
            self._skip()
        if not parts:
            return EPSILON
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self) -> Node:
        node = self._atom()
        while True:
            start = self._at
            self._skip()
            bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._peek())
            if bounds is not None:
                self._at += 1
            elif self._peek() == "{":
                bounds = self._count()
            else:
                self._at = start
                return node
            node = Loop(node, *bounds)

    def _count(self) -> tuple[int, int | None]:
        start = self._at
        count = _COUNT.match(self._text, self._at)
        low, comma, high = count.groups(default="") if count else ("", "", "")
        if not low and not high:
            self._fail("a repetition is written {m}, {m,}, {,n} or {m,n}")
        self._at = count.end()
        least, most = int(low or 0), (int(high) if high else None) if comma else int(low)
        if most is not None and most < least:
            self._fail(f"the repetition {count.group()} has its bounds in the wrong order", start)
        if max(least, most or 0) > _MAX_REPEAT:
            self._fail(f"a repetition count over {_MAX_REPEAT}", start)
        return least, most

    def _atom(self) -> Node:
        start, char = self._at, self._peek()
        if char == '"':
            return self._literal()
        if char == "[":
            return self._class()
        if char == "(":
            self._at += 1
            node = self._choice()
            self._skip()
            if not self._take(")"):
                self._fail("missing ')' for the group", start)
            return node
        if char == ".":
            self._at += 1
            return ANY_CHAR
        name = _NAME.match(self._text, self._at)
        if name is None:
            what = "a token by id or name" if char in "<!" else repr(char)
            self._fail(f"{what} is not supported here")
        self._at = name.end()
        return Reference(name.group())

    def _literal(self) -> Node:
        start = self._at
        self._at += 1
        found: list[str] = []
        while not self._take('"'):
            if self._peek() in ("", "\n"):
                self._fail("missing '\"' at the end of the literal", start)
            found.append(self._char())
        return literal("".join(found))

    def _class(self) -> Node:
        start = self._at
        self._at += 1
        is_negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            if not self._peek():
                self._fail("missing ']' for the character class", start)
            at = self._at
            low = high = ord(self._char())
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = ord(self._char())
            if high < low:
                self._fail("a character range has its ends in the wrong order", at)
            ranges.append((low, high))
        return chars(negated_ranges(ranges) if is_negated else ranges)

    def _char(self) -> str:
        char = self._peek()
        self._at += 1
        if char != "\\":
            return char
        start, kind = self._at - 1, self._peek()
        self._at += 1
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        width = _HEX_DIGITS.get(kind)
        digits = self._text[self._at : self._at + width] if width else ""
        if not width or len(digits) < width or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
            self._fail(f"the escape \\{kind} is not known or malformed", start)
        self._at += width
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            self._fail(f"the escape \\{kind}{digits} is no character", start)
        return chr(code)

    def _skip(self) -> None:
        self._at = self._after_space(self._at)

    def _after_space(self, at: int) -> int:
        while piece := _SPACE.match(self._text, at):
            at = piece.end()
        return at

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _fail(self, what: str, position: int | None = None) -> NoReturn:
        position = self._at if position is None else position
        line = self._text.count("\n", 0, position) + 1
        column = position - (self._text.rfind("\n", 0, position) + 1) + 1
        raise InvalidArgument(f"the grammar is malformed at line {line}, column {column}: {what}")
