"""The backend's grammar text: rules over terminals, terminals over languages.

The backend reads text by longest match among the terminals that may come next, so whoever adds terminals sees to it that
none can be continued where another rule would stop it.
"""

from __future__ import annotations

import re

from openengine.core.guides.language import ANY_CHAR, EMPTY, EPSILON, NOT_EMPTY, Language, intersect

__all__ = ["Grammar", "GrammarTooLarge"]

_TEXT = "/(?s:.)*/"
_MAX_DEPTH = 2500
_RULE_NAME = re.compile(r"\br[0-9]+\b")
_MAX_CONJUNCTS = 10  # the backend follows all of them at once, and its work may double with each
_DENIED_CONJUNCT = 0.25  # a text that breaks it is easily found
_MAX_UNROLLED = 250_000
_NESTED = 60  # deeper expressions get a terminal of their own, which keeps the text and the backend's recursion flat


class GrammarTooLarge(Exception):
    """The grammar exceeds its limit in bytes, its rules refer to one another in too long a chain, or a terminal would cost
    the backend more work or memory than can be bounded: it combines too many expressions, or nests large repetitions."""


class Grammar:
    """Rules and terminals under construction. `text(start)` is the whole."""

    def __init__(self, *, max_bytes: int) -> None:
        self._lines: list[str] = []
        self._terminals: dict[Language, str] = {}
        self._num_rules = 0
        self._free_bytes = max_bytes

    def new_rule(self) -> str:
        """A name for a rule that `define` will get."""
        self._num_rules += 1
        return f"r{self._num_rules}"

    def define(self, name: str, alternatives: list[str]) -> str:
        """Make `name` stand for any of `alternatives`, each a sequence of symbols; returns the name."""
        assert alternatives, f"rule {name} derives nothing"
        self._write(f"{name}: {' | '.join(dict.fromkeys(alternatives))}")
        return name

    def rule(self, alternatives: list[str]) -> str:
        """A new rule."""
        return self.define(self.new_rule(), alternatives)

    def symbol(self, language: Language) -> str:
        """What derives exactly the texts of `language`, which must not be empty."""
        assert language != EMPTY, "a terminal that matches nothing"
        if language == EPSILON:
            return '""'
        if language.has_empty:
            return f"({self._terminal(intersect(language, NOT_EMPTY))})?"
        return self._terminal(language)

    def text(self, start: str) -> str:
        """The grammar with `start` as its first symbol. Raises GrammarTooLarge."""
        self._check_depth(start)
        return "\n".join([f"start: {start}", *self._lines, ""])

    def _check_depth(self, start: str) -> None:
        """The backend follows references with its own stack, and would end the process with it."""
        references = {}
        for line in self._lines:
            name, _, body = line.partition(":")
            if name[0] == "r":
                references[name] = _RULE_NAME.findall(body)
        seen: set[str] = set()
        path = [iter(_RULE_NAME.findall(start))]
        while path:
            name = next(path[-1], None)
            if name is None:
                path.pop()
            elif name not in seen:
                seen.add(name)
                path.append(iter(references[name]))
                if len(path) > _MAX_DEPTH:
                    raise GrammarTooLarge

    def _terminal(self, language: Language) -> str:
        name = self._terminals.get(language)
        if name is None:
            if _conjuncts(language) > _MAX_CONJUNCTS or _unrolled(language) > _MAX_UNROLLED:
                raise GrammarTooLarge
            expression = self._expression(language, 0)
            name = self._terminals[language] = f"T{len(self._terminals)}"
            self._write(f"{name}: {expression}")
        return name

    def _expression(self, language: Language, depth: int) -> str:
        """A terminal expression: regular expressions between slashes, combined by the grammar's own operators."""
        if language.is_plain:
            return f"/{_regex(language)}/"
        if depth > _NESTED:
            return self._terminal(language)
        if language.kind in ("not", "intersect"):
            parts = language.parts if language.kind == "intersect" else (language,)
            wanted = [self._expression(part, depth + 1) for part in parts if part.kind != "not"]
            denied = [self._expression(part.parts[0], depth + 1) for part in parts if part.kind == "not"]
            # The backend complements over bytes. Text is wanted, so there must be something that says so.
            return f"({' & '.join((wanted or [_TEXT]) + [f'~({each})' for each in denied])})"
        parts = [self._expression(part, depth + 1) for part in language.parts]
        if language.kind == "union":
            return f"({' | '.join(parts)})"
        if language.kind == "repeat":
            return f"({parts[0]}){_bounds(language)}"
        return f"({' '.join(parts)})"

    def _write(self, line: str) -> None:
        self._free_bytes -= len(line) + 1
        if self._free_bytes < 0:
            raise GrammarTooLarge
        self._lines.append(line)


def _conjuncts(language: Language, *, denied: bool = False) -> float:
    """How many infinite expressions must hold at once, at most, anywhere in `language` (or in what is not)."""
    if language.is_plain:
        return (_DENIED_CONJUNCT if _has_loop(language) else 0) if denied else 1
    if language.kind == "not":
        return _conjuncts(language.parts[0], denied=not denied)
    join = sum if language.kind == ("union" if denied else "intersect") else max
    return join(_conjuncts(part, denied=denied) for part in language.parts)


def _has_loop(language: Language) -> bool:
    if language.kind in ("chars", "text"):
        return False
    return language.kind == "repeat" or any(map(_has_loop, language.parts))


def _unrolled(language: Language) -> int:
    """The largest product of repetition counts that stand in one another."""
    if language.kind in ("chars", "text"):
        return 1
    inner = max(map(_unrolled, language.parts), default=1)
    return inner * max(language.low, language.high or 1) if language.kind == "repeat" else inner


def _regex(language: Language) -> str:
    if language.is_chars:
        return _class(language)
    if language.kind == "text":
        return "".join(map(_char, map(ord, language.parts[0])))
    if language == EPSILON:
        return "(?:)"  # an empty pattern would begin a comment
    if language.kind == "concat":
        return "".join(map(_grouped, language.parts))
    if language.kind == "union":
        return "|".join(map(_regex, language.parts)) if EPSILON not in language.parts else _optional(language)
    return f"{_grouped(language.parts[0])}{_bounds(language)}"


def _optional(language: Language) -> str:
    rest = [part for part in language.parts if part != EPSILON]
    return f"(?:{'|'.join(map(_regex, rest))})?"


def _grouped(language: Language) -> str:
    text = _regex(language)
    return text if language.is_chars else f"(?:{text})"


def _bounds(language: Language) -> str:
    low, high = language.low, language.high
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    return "?" if (low, high) == (0, 1) else f"{{{low}}}" if low == high else f"{{{low},{high}}}"


def _class(language: Language) -> str:
    if language == ANY_CHAR:
        return "(?s:.)"
    assert language.parts, "a class without characters"
    if len(language.parts) == 1 and language.parts[0][0] == language.parts[0][1]:
        return _char(language.parts[0][0])
    ranges = (_char(low) if low == high else f"{_char(low)}-{_char(high)}" for low, high in language.parts)
    return f"[{''.join(ranges)}]"


def _char(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:x}}}"
