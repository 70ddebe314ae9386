"""Context-free grammars over characters, as rules and terminals of the backend that read them without ambiguity.

The backend splits text into terminals by longest match, a grammar knows no such rule. So the largest regular parts become
terminals first, and are taken apart, down to single characters if need be, wherever a terminal could go on where its rule
wants something else:

    P w|c   a text w of P could end here, for c may follow P
    Q w c…  but some Q goes on with c: Q is taken apart
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from openengine.core.guides.grammar import Grammar
from openengine.core.guides.language import (
    EMPTY,
    EPSILON,
    Language,
    TooComplex,
    concat,
    first_chars,
    intersect,
    is_empty,
    repeat,
    representatives,
    union,
)
from openengine.core.guides.work import Work
from openengine.errors import InvalidArgument

__all__ = ["Choice", "Loop", "Node", "Ready", "Reference", "Sequence", "add_rules"]

_PRODUCT_BUDGET = 300
_MAX_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class Reference:
    """A rule by name."""

    name: str


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


@dataclass(frozen=True, slots=True)
class Ready:
    """A symbol that the grammar has already, whose texts begin with `first` and may go on, once complete, with `more`."""

    symbol: str
    first: Language
    more: Language
    what: str


@dataclass(frozen=True, slots=True)
class _Terminal:
    """A regular part: its language, and the structure into which it can be taken apart."""

    language: Language
    node: Node = field(compare=False)


Node = Language | Reference | Sequence | Choice | Loop | Ready | _Terminal


def add_rules(grammar: Grammar, rules: Mapping[str, Node], start: str, work: Work) -> str:
    """Add what `start` derives; returns its symbol.

    Raises InvalidArgument when a rule that is reached is missing, when `start` derives nothing, or when parts that the
    grammar has already cannot be told from what follows them.
    """
    reached = _reached(rules, start)
    productive = _productive(reached)
    if start not in productive:
        raise InvalidArgument(f"no text derives from the rule {start!r}: each of its alternatives goes on without end")
    reached = {name: _pruned(node, productive) for name, node in reached.items() if name in productive}
    return _Lexing(grammar, _with_terminals(reached), start, work).write()


def _children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Sequence | Choice):
        return node.parts
    return (node.inner,) if isinstance(node, Loop) else ()


def _references(node: Node) -> Iterator[str]:
    pending = [node]
    while pending:
        node = pending.pop()
        if isinstance(node, Reference):
            yield node.name
        pending.extend(_children(node))


def _reached(rules: Mapping[str, Node], start: str) -> dict[str, Node]:
    found: dict[str, Node] = {}
    pending = [start]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        if name not in rules:
            raise InvalidArgument(f"the grammar has no rule {name!r}, which it {'starts with' if name == start else 'refers to'}")
        found[name] = rules[name]
        pending.extend(_references(rules[name]))
    return found


def _productive(rules: Mapping[str, Node]) -> set[str]:
    found: set[str] = set()
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, node in rules.items():
        for other in dict.fromkeys(_references(node)):
            users[other].append(name)
    pending = list(rules)
    while pending:
        name = pending.pop()
        if name not in found and _derives(rules[name], found):
            found.add(name)
            pending.extend(users[name])
    return found


def _derives(node: Node, productive: set[str]) -> bool:
    if isinstance(node, Reference):
        return node.name in productive
    if isinstance(node, Sequence):
        return all(_derives(part, productive) for part in node.parts)
    if isinstance(node, Choice):
        return any(_derives(part, productive) for part in node.parts)
    if isinstance(node, Loop):
        return node.low == 0 or _derives(node.inner, productive)
    return isinstance(node, Ready) or node != EMPTY


def _pruned(node: Node, productive: set[str]) -> Node:
    """`node`, which is productive, without its unproductive alternatives."""
    if isinstance(node, Sequence):
        return Sequence(tuple(_pruned(part, productive) for part in node.parts))
    if isinstance(node, Choice):
        return Choice(tuple(_pruned(part, productive) for part in node.parts if _derives(part, productive)))
    if isinstance(node, Loop):
        return Loop(_pruned(node.inner, productive), node.low, node.high) if _derives(node.inner, productive) else EPSILON
    return node


# ---- the largest regular parts ---------------------------------------------------------------------


def _with_terminals(rules: dict[str, Node]) -> dict[str, Node]:
    """Rules whose largest regular parts are terminals; a rule that does not recur is put into those that refer to it."""
    regular: dict[str, _Terminal] = {}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, node in rules.items():
        for other in dict.fromkeys(_references(node)):
            users[other].append(name)
    pending = list(rules)
    while pending:
        name = pending.pop()
        if name not in regular and isinstance(merged := _merge(rules[name], regular), _Terminal):
            regular[name] = merged
            pending.extend(users[name])
    return {name: _merge(node, regular) for name, node in rules.items()}


def _merge(node: Node, regular: Mapping[str, _Terminal]) -> Node:
    if isinstance(node, Language):
        return _Terminal(node, node)
    if isinstance(node, Reference):
        return regular.get(node.name, node)
    if isinstance(node, Loop):
        inner = _merge(node.inner, regular)
        loop = Loop(inner, node.low, node.high)
        return _Terminal(repeat(inner.language, node.low, node.high), loop) if isinstance(inner, _Terminal) else loop
    if isinstance(node, Ready | _Terminal):
        return node
    parts = [_merge(part, regular) for part in node.parts]
    groups: list[Node] = []
    for is_regular, group in itertools.groupby(parts, lambda part: isinstance(part, _Terminal)):
        members = tuple(group)
        if is_regular and len(members) > 1:
            join = concat if isinstance(node, Sequence) else union
            groups.append(_Terminal(join(*(part.language for part in members)), type(node)(members)))
        else:
            groups.extend(members)
    return groups[0] if len(groups) == 1 else type(node)(tuple(groups))


def _taken_apart(terminal: _Terminal) -> Node:
    """One level of structure less in a terminal and more in its rule."""
    if not isinstance(terminal.node, Language):
        return _taken_apart(terminal.node) if isinstance(terminal.node, _Terminal) else terminal.node
    language = terminal.language
    parts = tuple(_Terminal(part, part) for part in language.parts if isinstance(part, Language))
    if language.kind == "concat":
        return Sequence(parts)
    if language.kind == "union":
        return Choice(parts)
    if language.kind == "repeat":
        return Loop(parts[0], language.low, language.high)
    raise InvalidArgument(
        "the grammar combines a regular expression that has lookaheads with parts that cannot be told from it; "
        "write it without lookaheads"
    )


def _replaced(node: Node, apart: set[_Terminal]) -> Node:
    if isinstance(node, _Terminal):
        return _taken_apart(node) if node in apart else node
    if isinstance(node, Sequence | Choice):
        return type(node)(tuple(_replaced(part, apart) for part in node.parts))
    return Loop(_replaced(node.inner, apart), node.low, node.high) if isinstance(node, Loop) else node


class _Lexing:
    """Takes terminals apart until longest match reads every text of the grammar, then writes the rules."""

    def __init__(self, grammar: Grammar, rules: dict[str, Node], start: str, work: Work) -> None:
        self._grammar = grammar
        self._rules = rules
        self._start = start
        self._work = work
        self._nullable: set[str] = set()
        self._first: dict[str, Language] = {}
        self._follow: dict[str, Language] = {}
        self._after: dict[_Terminal | Ready, Language] = {}  # what may follow each terminal
        self._firsts: dict[Language, Language] = {}
        self._checked: dict[tuple[Language, Language, Language], bool] = {}

    def write(self) -> str:
        for _ in range(_MAX_ROUNDS):
            self._analyse()
            apart = self._conflicts()
            if not apart:
                return self._write()
            self._rules = {name: _replaced(node, apart) for name, node in self._rules.items()}
        raise InvalidArgument("the grammar is too ambiguous: its terminals cannot be told apart")

    def _conflicts(self) -> set[_Terminal]:
        for part, after in self._after.items():
            if isinstance(part, Ready) and not is_empty(intersect(part.more, after), self._work):
                raise InvalidArgument(
                    f"{part.what} may go on with the characters of what follows it, so its end is not clear; "
                    "put a separator that no number has, such as a space, between them"
                )
        terminals = [part for part in self._after if isinstance(part, _Terminal)]
        return {
            other
            for other in terminals
            if not other.language.is_chars
            and any(self._goes_on(part.language, self._after[part], other.language) for part in terminals)
        }

    def _goes_on(self, part: Language, after: Language, other: Language) -> bool:
        """Whether a text of `part` that may end before some c in `after` can go on with c as a text of `other`."""
        key = (part, after, other)
        if key not in self._checked:
            self._checked[key] = after != EMPTY and self._product(part, after, other)
        return self._checked[key]

    def _product(self, part: Language, after: Language, other: Language) -> bool:
        seen = {(part, other)}
        pending = [(part, other)]
        is_start = True
        for ours, theirs in pending:
            self._work.tick()
            if ours.has_empty and not is_start and intersect(self._first_chars(theirs), after) != EMPTY:
                return True
            is_start = False
            for char in representatives(ours, theirs):
                pair = (ours.after(char), theirs.after(char))
                if EMPTY not in pair and pair not in seen:
                    seen.add(pair)
                    pending.append(pair)
            if len(pending) > _PRODUCT_BUDGET:
                return True
        return False

    def _first_chars(self, language: Language) -> Language:
        found = self._firsts.get(language)
        if found is None:
            try:
                found = first_chars(language, self._work)
            except TooComplex:
                raise InvalidArgument("the grammar is too complex: one of its regular parts has too many states") from None
            self._firsts[language] = found
        return found

    # ---- what comes first and next

    def _analyse(self) -> None:
        self._nullable, self._first, self._follow, self._after = set(), {}, {}, {}
        changed = True
        while changed:
            changed = False
            for name, node in self._rules.items():
                first = union(self._first.get(name, EMPTY), self._first_of(node))
                if first != self._first.get(name) or (name not in self._nullable and self._is_nullable(node)):
                    changed = True
                    self._first[name] = first
                    if self._is_nullable(node):
                        self._nullable.add(name)
        self._follow = {self._start: EMPTY}
        changed = True
        while changed:
            before = dict(self._follow)
            for name in list(self._follow):
                self._spread(self._rules[name], self._follow[name])
            changed = before != self._follow

    def _is_nullable(self, node: Node) -> bool:
        self._work.tick()
        if isinstance(node, _Terminal):
            return node.language.has_empty
        if isinstance(node, Reference):
            return node.name in self._nullable
        if isinstance(node, Sequence):
            return all(map(self._is_nullable, node.parts))
        if isinstance(node, Choice):
            return any(map(self._is_nullable, node.parts))
        return isinstance(node, Loop) and (node.low == 0 or self._is_nullable(node.inner))

    def _first_of(self, node: Node) -> Language:
        self._work.tick()
        if isinstance(node, _Terminal):
            return self._first_chars(node.language)
        if isinstance(node, Reference):
            return self._first.get(node.name, EMPTY)
        if isinstance(node, Ready):
            return node.first
        if isinstance(node, Sequence):
            found = [EMPTY]
            for part in node.parts:
                found.append(self._first_of(part))
                if not self._is_nullable(part):
                    break
            return union(*found)
        return union(*map(self._first_of, _children(node)))

    def _spread(self, node: Node, follow: Language) -> None:
        """Note what may follow each terminal and rule in `node` when `follow` may follow the whole."""
        self._work.tick()
        if isinstance(node, _Terminal | Ready):
            self._after[node] = union(self._after.get(node, EMPTY), follow)
        elif isinstance(node, Reference):
            self._follow[node.name] = union(self._follow.get(node.name, EMPTY), follow)
        elif isinstance(node, Choice):
            for part in node.parts:
                self._spread(part, follow)
        elif isinstance(node, Loop):
            self._spread(node.inner, follow if node.high == 1 else union(follow, self._first_of(node.inner)))
        else:
            for part in reversed(node.parts):
                self._spread(part, follow)
                follow = union(self._first_of(part), follow) if self._is_nullable(part) else self._first_of(part)

    # ---- writing

    def _write(self) -> str:
        names = {name: self._grammar.new_rule() for name in self._follow}
        for name, rule in names.items():
            node = self._rules[name]
            alternatives = node.parts if isinstance(node, Choice) else (node,)
            self._grammar.define(rule, [self._text(part, names) for part in alternatives])
        return names[self._start]

    def _text(self, node: Node, names: Mapping[str, str]) -> str:
        if isinstance(node, _Terminal):
            return self._grammar.symbol(node.language)
        if isinstance(node, Reference):
            return names[node.name]
        if isinstance(node, Ready):
            return node.symbol
        if isinstance(node, Sequence):
            return " ".join(self._text(part, names) for part in node.parts) or '""'
        if isinstance(node, Choice):
            return f"({' | '.join(self._text(part, names) for part in node.parts)})"
        bounds = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.low, node.high))
        if bounds is None:
            bounds = f"{{{node.low},{'' if node.high is None else node.high}}}"
        return f"({self._text(node.inner, names)}){bounds}"
