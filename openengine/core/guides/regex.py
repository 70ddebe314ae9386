"""Regular expressions to languages.

Anchors and lookaheads become language algebra: a lookahead restricts whatever comes after it. What has no such meaning
(an anchor inside a loop) is refused. The syntax is regex_syntax.py's.
"""

from __future__ import annotations

import itertools
import math
import operator

from openengine.core.guides.language import (
    ANY_TEXT,
    EMPTY,
    EPSILON,
    SOME_TEXT,
    Language,
    complement,
    concat,
    intersect,
    union,
)
from openengine.core.guides.regex_syntax import (
    Choice,
    Look,
    Loop,
    Mark,
    Node,
    Sequence,
    parse_regex,
    shown,
)
from openengine.core.guides.work import Work
from openengine.errors import InvalidArgument

__all__ = ["full_match", "search"]


def full_match(pattern: str, work: Work | None = None) -> Language:
    """The texts that `pattern` matches as a whole; `work` bounds the time that this takes.

    Raises InvalidArgument with the position and what is wrong there; TooComplex, CompileTimeout.
    """
    work = work or Work(math.inf)
    return _Compiler(pattern, work).compile(parse_regex(pattern, work, ecma=False), EPSILON, at_start=True)


def search(pattern: str, work: Work | None = None) -> Language:
    """The texts in which `pattern` matches somewhere, by the rules of JSON Schema (ECMA 262). As `full_match`."""
    work = work or Work(math.inf)
    node = parse_regex(pattern, work, ecma=True)
    compiler = _Compiler(pattern, work)
    anywhere = compiler.compile(node, ANY_TEXT, at_start=False)
    if not _has_start(node):
        return concat(ANY_TEXT, anywhere)
    return union(compiler.compile(node, ANY_TEXT, at_start=True), concat(SOME_TEXT, anywhere))


class _Compiler:
    """Syntax to language, with the language of all that follows at hand."""

    def __init__(self, pattern: str, work: Work) -> None:
        self._pattern = pattern
        self._work = work

    def compile(self, node: Node, rest: Language, *, at_start: bool) -> Language:
        """Texts that `node` and then `rest` match."""
        self._work.tick(1 + len(rest.parts))
        if isinstance(node, Language):
            return concat(node, rest)
        if node is Mark.START:
            return rest if at_start else EMPTY
        if node is Mark.END:
            return EPSILON if rest.has_empty else EMPTY
        if isinstance(node, Look):
            ahead = self.compile(node.inner, ANY_TEXT, at_start=at_start)
            return intersect(complement(ahead) if node.negative else ahead, rest)
        if isinstance(node, Choice):
            return union(*(self.compile(part, rest, at_start=at_start) for part in node.parts))
        if isinstance(node, Loop):
            return self._loop(node, rest, at_start)
        starts = [at_start]
        for part in node.parts:
            starts.append(starts[-1] and _is_zero_width(part))
        nothing_before = [True, *itertools.accumulate(map(_may_be_empty, node.parts), operator.and_)]
        for index in range(len(node.parts) - 1, -1, -1):
            part = node.parts[index]
            if starts[0] and not starts[index] and nothing_before[index] and _has_start(part):
                raise InvalidArgument(
                    f"the regular expression {shown(self._pattern)} has '^' after an optional part, which is not supported"
                )
            rest = self.compile(part, rest, at_start=starts[index])
        return rest

    def _loop(self, node: Loop, rest: Language, at_start: bool) -> Language:
        if (node.low, node.high) == (0, 1):
            return union(self.compile(node.inner, rest, at_start=at_start), rest)
        if (node.low, node.high) == (1, 1):
            return self.compile(node.inner, rest, at_start=at_start)
        raise InvalidArgument(
            f"an anchor or lookahead inside the repetition at position {node.position} of the regular expression "
            f"{shown(self._pattern)} is not supported"
        )


def _has_start(node: Node) -> bool:
    if isinstance(node, Sequence | Choice):
        return any(_has_start(part) for part in node.parts)
    if isinstance(node, Look | Loop):
        return _has_start(node.inner)
    return node is Mark.START


def _is_zero_width(node: Node) -> bool:
    if isinstance(node, Sequence | Choice):
        return all(_is_zero_width(part) for part in node.parts)
    return isinstance(node, Mark | Look)


def _may_be_empty(node: Node) -> bool:
    if isinstance(node, Language):
        return node.has_empty
    if isinstance(node, Sequence):
        return all(map(_may_be_empty, node.parts))
    if isinstance(node, Choice):
        return any(map(_may_be_empty, node.parts))
    return node.low == 0 or _may_be_empty(node.inner) if isinstance(node, Loop) else True
