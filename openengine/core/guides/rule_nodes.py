"""What the rules of a context-free grammar are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from openengine.core.guides.language import Language

__all__ = [
    "Choice",
    "Loop",
    "Node",
    "Place",
    "Ready",
    "Reference",
    "Sequence",
    "Terminal",
    "children",
    "rebuilt",
    "references",
]


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
class Terminal:
    """A regular part: its language, and the structure into which it can be taken apart."""

    language: Language
    node: Node = field(compare=False)


@dataclass(frozen=True, slots=True)
class Place:
    """One occurrence of a terminal, or of a symbol that the grammar has already."""

    index: int
    part: Terminal | Ready


Node: TypeAlias = "Language | Reference | Sequence | Choice | Loop | Ready | Terminal | Place"


def children(node: Node) -> tuple[Node, ...]:
    """The nodes that `node` is made of; none for a leaf."""
    if isinstance(node, Sequence | Choice):
        return node.parts
    return (node.inner,) if isinstance(node, Loop) else ()


def references(node: Node) -> Iterator[str]:
    """The names of the rules that `node` refers to."""
    pending = [node]
    while pending:
        node = pending.pop()
        if isinstance(node, Reference):
            yield node.name
        pending.extend(children(node))


def rebuilt(node: Node, change: Callable[[Any], Node]) -> Node:
    """`node` with `change` made to each of its leaves, references too."""
    if isinstance(node, Sequence | Choice):
        return type(node)(tuple(rebuilt(part, change) for part in node.parts))
    if isinstance(node, Loop):
        return Loop(rebuilt(node.inner, change), node.low, node.high)
    return change(node)
