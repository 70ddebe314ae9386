"""Rules made readable by longest match: terminals that could be taken for one another are taken apart.

The backend splits text into terminals by longest match, a grammar knows no such rule. So terminals are taken apart, down
to single characters if need be, wherever one could go on where its rule wants something else:

    P w|c   a text w of P could end here, for c may follow P
    Q w c…  but some Q that may begin where P does goes on with c: Q is taken apart
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from openengine.core.guides.grammar import Grammar
from openengine.core.guides.language import (
    EMPTY,
    NOT_EMPTY,
    Language,
    TooComplex,
    first_chars,
    intersect,
    is_empty,
    literal,
    representatives,
    union,
)
from openengine.core.guides.rule_nodes import (
    Choice,
    Loop,
    Node,
    Place,
    Ready,
    Reference,
    Sequence,
    Terminal,
    children,
    rebuilt,
)
from openengine.core.guides.work import Work
from openengine.errors import InvalidArgument

__all__ = ["Ambiguous", "LongestMatch"]

_PRODUCT_BUDGET = 300  # of states; beyond it two terminals count as in conflict: at worst one is taken apart in vain
_MAX_PAIRS = 100_000  # of places, some 13 MB of them; most grammars have a few hundred
_MAX_ROUNDS = 60  # each takes one level of the terminals apart; the tests' grammars need ten at most


class Ambiguous(InvalidArgument):
    """Where `what`, which the grammar has already, begins or ends cannot be told."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"{what} {problem}")
        self.what = what


class LongestMatch:
    """Takes terminals apart until longest match reads every text of the grammar, then writes the rules."""

    def __init__(self, grammar: Grammar, rules: dict[str, Node], start: str, work: Work) -> None:
        self._grammar = grammar
        self._rules = rules
        self._start = start
        self._work = work
        self._places: list[Place] = []
        self._nullable: set[str] = set()
        self._first: dict[str, frozenset[int]] = {}
        self._follow: dict[str, frozenset[int]] = {}
        self._after: dict[int, frozenset[int]] = {}  # which places may come right after each
        self._first_chars: dict[Language, Language] = {}
        self._meeting: dict[tuple[Language, Language], bool] = {}
        self._going_on: dict[tuple[Language, Language, Language], bool] = {}

    def write(self) -> str:
        """Add the rules; returns the symbol of the first. Raises InvalidArgument where they stay ambiguous."""
        for _ in range(_MAX_ROUNDS):
            self._places = []
            self._rules = {name: self._numbered(node) for name, node in self._rules.items()}
            self._find_first()
            self._find_follow()
            apart = self._conflicts()
            if not apart:
                return self._write()
            self._rules = {name: self._dissolved(node, apart) for name, node in self._rules.items()}
        raise InvalidArgument("the grammar is too ambiguous: its terminals cannot be told apart")

    def _numbered(self, node: Node) -> Node:
        def number(leaf: Terminal | Ready | Reference) -> Node:
            if isinstance(leaf, Reference):
                return leaf
            self._places.append(Place(len(self._places), leaf))
            return self._places[-1]

        return rebuilt(node, number)

    def _dissolved(self, node: Node, apart: set[int]) -> Node:
        def dissolve(leaf: Place | Reference) -> Node:
            if isinstance(leaf, Reference):
                return leaf
            return _taken_apart(leaf.part) if leaf.index in apart else leaf.part

        return rebuilt(node, dissolve)

    # ---- conflicts

    def _conflicts(self) -> set[int]:
        """The places whose terminals must be taken apart."""
        found: set[int] = set()
        for a, b in self._together():
            for place, other in ((self._places[a], self._places[b]), (self._places[b], self._places[a])):
                after = union(*(self._chars_of(self._places[index].part) for index in self._after[place.index]))
                if isinstance(place.part, Ready):
                    self._check_end(place.part, after)
                elif isinstance(other.part, Ready):
                    if intersect(self._chars_of(place.part), other.part.first) != EMPTY:
                        raise Ambiguous(
                            other.part.what,
                            "cannot be told from another text that may stand in its place; put a text that begins with "
                            "another character before one of them",
                        )
                elif not other.part.language.is_chars and self._goes_on(
                    place.part.language, after, other.part.language
                ):
                    found.add(other.index)
        return found

    def _check_end(self, ready: Ready, after: Language) -> None:
        if intersect(ready.more, after) != EMPTY:
            raise Ambiguous(
                ready.what,
                "may go on with the characters of what follows it, so its end is not clear; put a separator that no number "
                "has, such as a space, between them",
            )

    def _together(self) -> list[tuple[int, int]]:
        """The pairs of places that may begin at the same point of a text."""
        firsts = sorted(self._first[self._start])
        pending = list(itertools.combinations_with_replacement(firsts, 2))
        seen = set(pending)
        for a, b in pending:
            self._work.tick()
            if len(pending) > _MAX_PAIRS:
                raise InvalidArgument("the grammar is too complex: too many of its parts may stand in the same place")
            if a != b and not self._meet(self._places[a].part, self._places[b].part):
                continue
            for pair in itertools.product(self._after[a], self._after[b]):
                pair = (min(pair), max(pair))
                if pair not in seen:
                    seen.add(pair)
                    pending.append(pair)
        return pending

    def _meet(self, a: Terminal | Ready, b: Terminal | Ready) -> bool:
        """Whether some text may be either."""
        if isinstance(a, Ready) or isinstance(b, Ready):
            return intersect(self._chars_of(a), self._chars_of(b)) != EMPTY
        if a.language == b.language:
            return True
        key = (a.language, b.language) if hash(a.language) < hash(b.language) else (b.language, a.language)
        if key not in self._meeting:
            both = intersect(*(intersect(language, NOT_EMPTY) if language.has_empty else language for language in key))
            try:
                self._meeting[key] = not is_empty(both, self._work, budget=_PRODUCT_BUDGET)
            except TooComplex:
                self._meeting[key] = True
        return self._meeting[key]

    def _goes_on(self, part: Language, after: Language, other: Language) -> bool:
        """Whether a text of `part` that may end before some c in `after` can go on with c as a text of `other`."""
        key = (part, after, other)
        if key not in self._going_on:
            self._going_on[key] = after != EMPTY and self._goes_on_in_product(part, after, other)
        return self._going_on[key]

    def _goes_on_in_product(self, part: Language, after: Language, other: Language) -> bool:
        """As `_goes_on`, by following both languages together; True also where that takes too long."""
        seen: set[tuple[Language, Language]] = set()  # without the start: a text that leads back to it is judged too
        pending = [(part, other)]
        is_start = True
        for ours, theirs in pending:
            self._work.tick(1 + (ours.size + theirs.size) // 64)
            if ours.has_empty and not is_start and intersect(self._first_of_language(theirs), after) != EMPTY:
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

    def _chars_of(self, part: Terminal | Ready) -> Language:
        """The characters that `part` may begin with."""
        return part.first if isinstance(part, Ready) else self._first_of_language(part.language)

    def _first_of_language(self, language: Language) -> Language:
        found = self._first_chars.get(language)
        if found is None:
            found = self._first_chars[language] = first_chars(language, self._work)
        return found

    # ---- what comes first and next

    def _find_first(self) -> None:
        self._nullable, self._first = set(), dict.fromkeys(self._rules, frozenset())
        changed = True
        while changed:
            changed = False
            for name, node in self._rules.items():
                first = self._first[name] | self._first_of(node)
                is_new = name not in self._nullable and self._is_nullable(node)
                if is_new:
                    self._nullable.add(name)
                changed = changed or is_new or first != self._first[name]
                self._first[name] = first

    def _find_follow(self) -> None:
        self._after = dict.fromkeys(range(len(self._places)), frozenset())
        self._follow = {self._start: frozenset()}
        before = None
        while before != self._follow:
            before = dict(self._follow)
            for name in before:
                self._spread(self._rules[name], self._follow[name])

    def _is_nullable(self, node: Node) -> bool:
        self._work.tick()
        if isinstance(node, Place):
            return isinstance(node.part, Terminal) and node.part.language.has_empty
        if isinstance(node, Reference):
            return node.name in self._nullable
        if isinstance(node, Sequence):
            return all(map(self._is_nullable, node.parts))
        if isinstance(node, Choice):
            return any(map(self._is_nullable, node.parts))
        return node.low == 0 or self._is_nullable(node.inner)

    def _first_of(self, node: Node) -> frozenset[int]:
        self._work.tick()
        if isinstance(node, Place):
            return frozenset((node.index,))
        if isinstance(node, Reference):
            return self._first[node.name]
        found: frozenset[int] = frozenset()
        for part in children(node):
            found |= self._first_of(part)
            if isinstance(node, Sequence) and not self._is_nullable(part):
                break
        return found

    def _spread(self, node: Node, follow: frozenset[int]) -> None:
        """Note what may come after each place and rule in `node` when `follow` may come after the whole."""
        self._work.tick()
        if isinstance(node, Place):
            self._after[node.index] |= follow
        elif isinstance(node, Reference):
            self._follow[node.name] = self._follow.get(node.name, frozenset()) | follow
        elif isinstance(node, Choice):
            for part in node.parts:
                self._spread(part, follow)
        elif isinstance(node, Loop):
            self._spread(node.inner, follow if node.high == 1 else follow | self._first_of(node.inner))
        else:
            for part in reversed(node.parts):
                self._spread(part, follow)
                follow = self._first_of(part) | (follow if self._is_nullable(part) else frozenset())

    # ---- writing

    def _write(self) -> str:
        names = {name: self._grammar.new_rule() for name in self._follow}
        for name, rule in names.items():
            node = self._rules[name]
            alternatives = node.parts if isinstance(node, Choice) else (node,)
            self._grammar.define(rule, [self._text(part, names) for part in alternatives])
        return names[self._start]

    def _text(self, node: Node, names: Mapping[str, str]) -> str:
        if isinstance(node, Place):
            return node.part.symbol if isinstance(node.part, Ready) else self._grammar.symbol(node.part.language)
        if isinstance(node, Reference):
            return names[node.name]
        if isinstance(node, Sequence):
            return " ".join(self._text(part, names) for part in node.parts) or '""'
        if isinstance(node, Choice):
            return f"({' | '.join(self._text(part, names) for part in node.parts)})"
        bounds = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.low, node.high))
        if bounds is None:
            bounds = f"{{{node.low},{'' if node.high is None else node.high}}}"
        return f"({self._text(node.inner, names)}){bounds}"


def _taken_apart(terminal: Terminal) -> Node:
    """One level of structure less in a terminal and more in its rule."""
    if not isinstance(terminal.node, Language):
        return _taken_apart(terminal.node) if isinstance(terminal.node, Terminal) else terminal.node
    language = terminal.language
    if language.kind == "text":
        return Sequence(tuple(Terminal(char, char) for char in map(literal, language.parts[0])))
    parts = tuple(Terminal(part, part) for part in language.parts if isinstance(part, Language))
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
