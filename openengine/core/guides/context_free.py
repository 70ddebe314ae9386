"""Context-free grammars over characters, as rules and terminals of the backend.

    rules ─ those that are reached and derive a text ─ loops for right recursion ─ largest regular parts as terminals
          ─ longest_match.py

Owns the way to terminals; does not own which of them must be taken apart again.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from openengine.core.guides.grammar import Grammar
from openengine.core.guides.language import EMPTY, EPSILON, Language, concat, repeat, union
from openengine.core.guides.longest_match import LongestMatch
from openengine.core.guides.rule_nodes import Choice, Loop, Node, Ready, Reference, Sequence, Terminal, references
from openengine.core.guides.work import Work
from openengine.errors import InvalidArgument

__all__ = ["add_rules"]

_MAX_TERMINAL = 500  # parts; a number, a string or a date has some twenty


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
    reached = {name: _without_right_recursion(name, node) for name, node in reached.items()}
    return LongestMatch(grammar, _with_terminals(reached), start, work).write()


def _reached(rules: Mapping[str, Node], start: str) -> dict[str, Node]:
    found: dict[str, Node] = {}
    pending = [start]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        if name not in rules:
            raise InvalidArgument(
                f"the grammar has no rule {name!r}, which it {'starts with' if name == start else 'refers to'}"
            )
        found[name] = rules[name]
        pending.extend(references(rules[name]))
    return found


def _productive(rules: Mapping[str, Node]) -> set[str]:
    found: set[str] = set()
    users = _users(rules)
    pending = list(rules)
    while pending:
        name = pending.pop()
        if name not in found and _derives(rules[name], found):
            found.add(name)
            pending.extend(users[name])
    return found


def _users(rules: Mapping[str, Node]) -> dict[str, list[str]]:
    """For each rule, those that refer to it."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, node in rules.items():
        for other in dict.fromkeys(references(node)):
            users[other].append(name)
    return users


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
        if node.high == 0 or not _derives(node.inner, productive):
            return EPSILON
        return Loop(_pruned(node.inner, productive), node.low, node.high)
    return node


# ---- right recursion -------------------------------------------------------------------------------


def _without_right_recursion(name: str, node: Node) -> Node:
    """`node`, as a loop where it is the rule `name` and refers to itself at its ends only.

    x ::= a x | b is x ::= a* b, of which the backend need not follow every x up to its end at once.
    """
    steps, ends = _split(node, name)
    steps = [step for step in steps if step != EPSILON]
    if not steps or not ends or any(name in references(part) for part in (*steps, *ends)):
        return node
    return Sequence((Loop(_choice(steps), 0, None), _choice(ends)))


def _split(node: Node, name: str) -> tuple[list[Node], list[Node]]:
    """What stands before a reference to `name` at the end of `node`, and the alternatives of `node` that have none."""
    if node == Reference(name):
        return [EPSILON], []
    if isinstance(node, Choice):
        parts = [_split(part, name) for part in node.parts]
        return [step for steps, _ in parts for step in steps], [end for _, ends in parts for end in ends]
    if isinstance(node, Loop) and (node.low, node.high) == (0, 1):
        steps, ends = _split(node.inner, name)
        return steps, [*ends, EPSILON]
    if isinstance(node, Sequence):
        *before, last = node.parts
        steps, ends = _split(last, name)
        if steps:
            return [_sequence(before, step) for step in steps], [_sequence(before, end) for end in ends]
    return [], [node]


def _choice(parts: list[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Choice(tuple(parts))


def _sequence(before: list[Node], last: Node) -> Node:
    parts = before if last == EPSILON else [*before, last]
    return parts[0] if len(parts) == 1 else Sequence(tuple(parts))


# ---- the largest regular parts ---------------------------------------------------------------------


def _with_terminals(rules: dict[str, Node]) -> dict[str, Node]:
    """Rules whose largest regular parts are terminals; a rule that does not recur is put into those that refer to it."""
    regular: dict[str, Terminal] = {}
    users = _users(rules)
    pending = list(rules)
    while pending:
        name = pending.pop()
        if name not in regular and isinstance(merged := _merge(rules[name], regular), Terminal):
            if merged.language.size > _MAX_TERMINAL:
                continue  # stays a rule: put into others it would grow with each use
            regular[name] = merged
            pending.extend(users[name])
    return {name: _merge(node, regular) for name, node in rules.items()}


def _merge(node: Node, regular: Mapping[str, Terminal]) -> Node:
    if isinstance(node, Language):
        return Terminal(node, node)
    if isinstance(node, Reference):
        return regular.get(node.name, node)
    if isinstance(node, Loop):
        inner = _merge(node.inner, regular)
        loop = Loop(inner, node.low, node.high)
        return Terminal(repeat(inner.language, node.low, node.high), loop) if isinstance(inner, Terminal) else loop
    if isinstance(node, Ready | Terminal):
        return node
    parts = [_merge(part, regular) for part in node.parts]
    groups: list[Node] = []
    for is_regular, group in itertools.groupby(parts, lambda part: isinstance(part, Terminal)):
        members = tuple(group)
        if is_regular and len(members) > 1:
            join = concat if isinstance(node, Sequence) else union
            groups.append(Terminal(join(*(part.language for part in members)), type(node)(members)))
        else:
            groups.extend(members)
    return groups[0] if len(groups) == 1 else type(node)(tuple(groups))
