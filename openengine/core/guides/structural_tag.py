"""Structural tags: text with structure where a trigger begins it. Both JSON forms:

    {"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}
    {"type": "structural_tag", "format": {"type": "const_string" | "json_schema" | "regex" | "grammar" | "tag" |
                                          "sequence" | "or" | "any_text" | "triggered_tags" | "tags_with_separator", ...}}

Free text runs up to the first trigger in it, and then one of the tags that begin with it must follow. Other free text runs
up to the first occurrence of what ends it: the end of its tag, or the constant or tag that comes next in its sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from openengine.core.guides.context_free import add_rules
from openengine.core.guides.gbnf import parse_gbnf
from openengine.core.guides.grammar import Grammar
from openengine.core.guides.language import (
    ANY_CHAR,
    ANY_TEXT,
    EMPTY,
    EPSILON,
    Language,
    chars,
    complement,
    concat,
    intersect,
    literal,
    repeat,
    union,
)
from openengine.core.guides.regex import full_match
from openengine.core.guides.rule_nodes import Choice, Loop, Node, Ready, Reference, Sequence
from openengine.core.guides.schema_grammar import add_schema
from openengine.core.guides.schema_source import parse_json
from openengine.core.guides.work import Work
from openengine.errors import InvalidArgument

__all__ = ["add_structural_tag"]

_MAX_DEPTH = 60
_SOME_TEXT = repeat(ANY_CHAR, 1, None)
_STARTS = {"null": "n", "boolean": "tf", "number": "-0123456789", "string": '"', "array": "[", "object": "{"}
_NUMBER_GOES_ON = chars((ord(char),) * 2 for char in "0123456789.eE")


def add_structural_tag(grammar: Grammar, text: str, work: Work) -> str:
    """Add the rules of a structural tag; returns its symbol. Raises InvalidArgument with a JSON pointer."""
    content = parse_json(text, "the structural tag")
    if not isinstance(content, dict) or content.get("type") != "structural_tag":
        raise _wrong("", 'must be an object with "type": "structural_tag"')
    builder = _Builder(grammar, work)
    if "format" in content:
        _check_keys(content, "", {"type", "format"})
        node = builder.node(content["format"], "/format")
    else:
        _check_keys(content, "", {"type", "structures", "triggers"})
        structures = _list(content, "structures", "")
        tags = [builder.structure(each, f"/structures/{index}") for index, each in enumerate(structures)]
        node = builder.triggered(tags, _texts(content, "triggers", ""), "")
    builder.rules["root"] = node
    return add_rules(grammar, builder.rules, "root", work)


class _Builder:
    """Formats to grammar nodes; `rules` holds those of grammars inside."""

    def __init__(self, grammar: Grammar, work: Work) -> None:
        self.rules: dict[str, Node] = {}
        self._grammar = grammar
        self._work = work
        self._num_grammars = 0

    def node(self, content: Any, pointer: str) -> Node:
        kind = content.get("type") if isinstance(content, dict) else None
        known = _FORMATS.get(kind) if isinstance(kind, str) else None
        if known is None:
            raise _wrong(pointer, f"must be an object whose type is one of {', '.join(_FORMATS)}, not {kind!r:.60}")
        if pointer.count("/") > _MAX_DEPTH:
            raise _wrong(pointer, f"is nested more than {_MAX_DEPTH} levels deep")
        build, keys = known
        _check_keys(content, pointer, {"type", *keys})
        return build(self, content, pointer)

    def structure(self, content: Any, pointer: str) -> tuple[str, Node]:
        """The beginning of a tag of the older form, and what follows it."""
        if not isinstance(content, dict):
            raise _wrong(pointer, "must be an object with begin, schema and end")
        _check_keys(content, pointer, {"begin", "schema", "end"})
        schema = content.get("schema")
        if isinstance(schema, str):
            schema = parse_json(schema, f"the schema of the structural tag at {pointer}/schema")
        inner = self._schema(schema, f"{pointer}/schema")
        return _text(content, "begin", pointer), Sequence((inner, literal(_text(content, "end", pointer))))

    def triggered(
        self,
        tags: list[tuple[str, Node]],
        triggers: list[str],
        pointer: str,
        *,
        excludes: Iterable[str] = (),
        at_least_one: bool = False,
        stop_after_first: bool = False,
    ) -> Node:
        """Free text with tags: `begin` and the rest of each."""
        if not triggers or not all(triggers):
            raise _wrong(f"{pointer}/triggers", "must be a list of texts, none of them empty")
        stop = _within(union(*map(literal, [*triggers, *excludes])))
        heads: dict[str, list[Node]] = {}
        for begin, rest in tags:
            ends = [begin.index(trigger) + len(trigger) for trigger in triggers if begin.startswith(trigger)]
            if not ends:
                raise _wrong(pointer, f"the tag that begins with {begin!r:.60} begins with none of the triggers")
            heads.setdefault(begin[: min(ends)], []).append(Sequence((literal(begin[min(ends) :]), rest)))
        unfinished = complement(concat(stop, _SOME_TEXT))
        opened = [
            Sequence((lead, Choice(tuple(rests))))
            for head, rests in heads.items()
            if (lead := intersect(concat(ANY_TEXT, literal(head)), unfinished)) != EMPTY
        ]
        tagged: Node = Choice(tuple(opened)) if opened else EMPTY
        text = complement(stop)
        if stop_after_first:
            return tagged if at_least_one else Choice((tagged, text))
        return Sequence((Loop(tagged, int(at_least_one), None), text))

    # ---- one format each

    def _const_string(self, content: dict[str, Any], pointer: str) -> Node:
        return literal(_text(content, "value", pointer))

    def _json_schema(self, content: dict[str, Any], pointer: str) -> Node:
        return self._schema(content.get("json_schema"), f"{pointer}/json_schema")

    def _schema(self, content: Any, pointer: str) -> Ready:
        if not isinstance(content, dict | bool):
            raise _wrong(pointer, "must be a JSON schema")
        try:
            rules = add_schema(self._grammar, content, self._work)
        except InvalidArgument as exc:
            raise InvalidArgument(f"{exc.message} (in the structural tag at {pointer})", details=exc.details) from None
        first = chars((ord(char),) * 2 for kind in rules.kinds for char in _STARTS[kind])
        more = _NUMBER_GOES_ON if "number" in rules.kinds else EMPTY
        return Ready(rules.symbol, first, more, f"the JSON value of the structural tag at {pointer}")

    def _regex(self, content: dict[str, Any], pointer: str) -> Node:
        return full_match(_text(content, "pattern", pointer))

    def _grammar_rules(self, content: dict[str, Any], pointer: str) -> Node:
        self._num_grammars += 1
        prefix = f"{self._num_grammars}:"
        for name, node in parse_gbnf(_text(content, "grammar", pointer)).items():
            self.rules[prefix + name] = _renamed(node, prefix)
        return Reference(f"{prefix}root")

    def _tag(self, content: dict[str, Any], pointer: str) -> Node:
        begin, rest = self._tag_parts(content, pointer)
        return Sequence((literal(begin), rest))

    def _tag_parts(self, content: Any, pointer: str) -> tuple[str, Node]:
        if not isinstance(content, dict) or content.get("type", "tag") != "tag":
            raise _wrong(pointer, "must be a tag: an object with begin, content and end")
        _check_keys(content, pointer, {"type", "begin", "content", "end"})
        ends = [content["end"]] if isinstance(content.get("end"), str) else _texts(content, "end", pointer)
        end = union(*map(literal, ends))
        inner = content.get("content")
        if isinstance(inner, dict) and inner.get("type") == "any_text" and not end.has_empty:
            excluded = _texts(inner, "excludes", f"{pointer}/content", optional=True)
            return _text(content, "begin", pointer), self._until(end, excluded)
        return _text(content, "begin", pointer), Sequence((self.node(inner, f"{pointer}/content"), end))

    def _sequence(self, content: dict[str, Any], pointer: str) -> Node:
        elements = content.get("elements")
        nodes = self._elements(content, pointer)
        for index, (element, following) in enumerate(itertools.pairwise(elements)):
            if element["type"] == "any_text" and (stop := _fixed_beginning(following)):
                # The text and what ends it are one part, so that the end is where it first occurs.
                excluded = _texts(element, "excludes", f"{pointer}/elements/{index}", optional=True)
                nodes[index] = self._until(literal(stop), excluded)
                nodes[index + 1] = self._without_beginning(following, f"{pointer}/elements/{index + 1}")
        return Sequence(tuple(nodes))

    def _until(self, end: Language, excluded: Iterable[str]) -> Language:
        """Text up to the first `end`, and that end."""
        stop = union(end, *map(literal, excluded))
        return intersect(concat(ANY_TEXT, end), complement(concat(_within(stop), _SOME_TEXT)))

    def _without_beginning(self, content: dict[str, Any], pointer: str) -> Node:
        return EPSILON if content["type"] == "const_string" else self._tag_parts(content, pointer)[1]

    def _or(self, content: dict[str, Any], pointer: str) -> Node:
        return Choice(tuple(self._elements(content, pointer)))

    def _elements(self, content: dict[str, Any], pointer: str) -> list[Node]:
        elements = _list(content, "elements", pointer)
        return [self.node(each, f"{pointer}/elements/{index}") for index, each in enumerate(elements)]

    def _any_text(self, content: dict[str, Any], pointer: str) -> Node:
        excluded = _texts(content, "excludes", pointer, optional=True)
        return complement(_within(union(*map(literal, excluded)))) if excluded else ANY_TEXT

    def _triggered_tags(self, content: dict[str, Any], pointer: str) -> Node:
        tags = [
            self._tag_parts(each, f"{pointer}/tags/{index}")
            for index, each in enumerate(_list(content, "tags", pointer))
        ]
        return self.triggered(
            tags,
            _texts(content, "triggers", pointer),
            pointer,
            excludes=_texts(content, "excludes", pointer, optional=True),
            at_least_one=_flag(content, "at_least_one", pointer),
            stop_after_first=_flag(content, "stop_after_first", pointer),
        )

    def _tags_with_separator(self, content: dict[str, Any], pointer: str) -> Node:
        tags = [
            self._tag(each, f"{pointer}/tags/{index}") for index, each in enumerate(_list(content, "tags", pointer))
        ]
        tag, separator = Choice(tuple(tags)), literal(_text(content, "separator", pointer))
        more = EPSILON if _flag(content, "stop_after_first", pointer) else Loop(Sequence((separator, tag)), 0, None)
        return Loop(Sequence((tag, more)), int(_flag(content, "at_least_one", pointer)), 1)


_FORMATS: dict[str, tuple[Callable[[_Builder, dict[str, Any], str], Node], tuple[str, ...]]] = {
    "const_string": (_Builder._const_string, ("value",)),
    "json_schema": (_Builder._json_schema, ("json_schema",)),
    "regex": (_Builder._regex, ("pattern",)),
    "grammar": (_Builder._grammar_rules, ("grammar",)),
    "tag": (_Builder._tag, ("begin", "content", "end")),
    "sequence": (_Builder._sequence, ("elements",)),
    "or": (_Builder._or, ("elements",)),
    "any_text": (_Builder._any_text, ("excludes",)),
    "triggered_tags": (
        _Builder._triggered_tags,
        ("triggers", "tags", "excludes", "at_least_one", "stop_after_first"),
    ),
    "tags_with_separator": (_Builder._tags_with_separator, ("tags", "separator", "at_least_one", "stop_after_first")),
}


def _fixed_beginning(content: dict[str, Any]) -> str:
    """The text that a format begins with, where it is written in it."""
    key = {"const_string": "value", "tag": "begin"}.get(content["type"])
    return content[key] if key else ""


def _within(inner: Language) -> Language:
    """Texts that contain one of `inner`."""
    return concat(ANY_TEXT, inner, ANY_TEXT)


def _renamed(node: Node, prefix: str) -> Node:
    if isinstance(node, Reference):
        return Reference(prefix + node.name)
    if isinstance(node, Sequence | Choice):
        return type(node)(tuple(_renamed(part, prefix) for part in node.parts))
    return Loop(_renamed(node.inner, prefix), node.low, node.high) if isinstance(node, Loop) else node


def _wrong(pointer: str, problem: str) -> InvalidArgument:
    return InvalidArgument(
        f"the structural tag is malformed at {pointer or '#'}: it {problem}", details={"pointer": pointer}
    )


def _check_keys(content: dict[str, Any], pointer: str, known: set[str]) -> None:
    unknown = sorted(content.keys() - known)
    if unknown:
        raise _wrong(pointer, f"has {', '.join(unknown):.100}, but only {', '.join(sorted(known))} are known there")


def _text(content: dict[str, Any], key: str, pointer: str) -> str:
    if not isinstance(content.get(key), str):
        raise _wrong(f"{pointer}/{key}", "must be a string")
    return content[key]


def _list(content: dict[str, Any], key: str, pointer: str) -> list[Any]:
    value = content.get(key)
    if not isinstance(value, list) or not value:
        raise _wrong(f"{pointer}/{key}", "must be a list that is not empty")
    return value


def _texts(content: dict[str, Any], key: str, pointer: str, *, optional: bool = False) -> list[str]:
    if optional and key not in content:
        return []
    value = content.get(key)
    if (
        not isinstance(value, list)
        or not all(isinstance(each, str) and each for each in value)
        or not (value or optional)
    ):
        raise _wrong(f"{pointer}/{key}", "must be a list of texts, none of them empty")
    return value


def _flag(content: dict[str, Any], key: str, pointer: str) -> bool:
    value = content.get(key, False)
    if not isinstance(value, bool):
        raise _wrong(f"{pointer}/{key}", "must be true or false")
    return value
