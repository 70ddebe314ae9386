"""Structural tags: text with structure where a trigger begins it. Both JSON forms:

    {"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}
    {"type": "structural_tag", "format": {"type": "const_string" | "json_schema" | "regex" | "grammar" | "tag" |
                                          "sequence" | "or" | "any_text" | "triggered_tags" | "tags_with_separator", ...}}

Free text runs up to the first trigger in it, and then one of the tags that begin with it must follow. In a tag, and before a
constant or a tag in a sequence, it runs up to the first occurrence of what comes next, and holds none of its `excludes`.

A number's end shows only in what follows it. Where both could go on with the same characters, the tag is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Texts
from dataclasses import dataclass, replace
from typing import Any

from openengine.core.guides.context_free import add_rules
from openengine.core.guides.gbnf import parse_gbnf
from openengine.core.guides.grammar import Grammar, GrammarTooLarge
from openengine.core.guides.language import (
    ANY_TEXT,
    EMPTY,
    EPSILON,
    SOME_TEXT,
    Language,
    TooComplex,
    chars,
    complement,
    concat,
    first_chars,
    intersect,
    is_empty,
    literal,
    union,
)
from openengine.core.guides.longest_match import Ambiguous
from openengine.core.guides.number_ends import NUMBER_GOES_ON, number_edges, number_language, read_twice
from openengine.core.guides.regex import full_match
from openengine.core.guides.rule_nodes import Choice, Loop, Node, Ready, Reference, Sequence, rebuilt
from openengine.core.guides.schema_grammar import add_schema
from openengine.core.guides.schema_source import parse_json
from openengine.core.guides.tag_fields import check_keys, flag_of, list_of, located, text_of, texts_of, wrong
from openengine.core.guides.work import Work
from openengine.errors import InvalidArgument

__all__ = ["add_structural_tag"]

_MAX_DEPTH = 60
_STARTS = {"null": "n", "boolean": "tf", "string": '"', "array": "[", "object": "{"}
_PART_BYTES = 1 << 22


def add_structural_tag(grammar: Grammar, text: str, work: Work) -> str:
    """Add the rules of a structural tag; returns its symbol. Raises InvalidArgument with a JSON pointer."""
    content = parse_json(text, "the structural tag")
    if not isinstance(content, dict) or content.get("type") != "structural_tag":
        raise wrong("", 'must be an object with "type": "structural_tag"')
    builder = _Builder(grammar, work)
    if "format" in content:
        check_keys(content, "", {"type", "format"})
        node = builder.node(content["format"], "/format")
    else:
        check_keys(content, "", {"type", "structures", "triggers"})
        structures = list_of(content, "structures", "")
        tags = [builder.structure(each, f"/structures/{index}") for index, each in enumerate(structures)]
        node = builder.triggered(tags, texts_of(content, "triggers", ""), "")
    builder.rules["root"] = node
    try:
        return add_rules(grammar, builder.final_rules(), "root", work)
    except (InvalidArgument, GrammarTooLarge, TooComplex) as exc:
        raise builder.refusal(exc) from None


@dataclass(frozen=True, slots=True)
class _Tag:
    """A tag in two parts: `begin`, and what follows it."""

    begin: str
    rest: Node
    pointer: str


class _Builder:
    """Formats to grammar nodes; `rules` holds those of grammars inside."""

    def __init__(self, grammar: Grammar, work: Work) -> None:
        self.rules: dict[str, Node] = {}
        self._grammar = grammar
        self._work = work
        self._grammars: list[tuple[str, str]] = []  # the pointer and first rule of each
        self._num_numbers = 0
        self._values: list[tuple[str, str]] = []  # the pointer and name of each JSON value
        self._texts: list[tuple[str, str, Language]] = []  # the pointer of each text without structure, what it is

    def final_rules(self) -> dict[str, Node]:
        """The rules, with what shows only when all of them are there."""
        if self._num_numbers < 2:
            return self.rules
        # Where several numbers may stand in one place, one of them may go on where another ends.
        return {name: rebuilt(node, _any_number) for name, node in self.rules.items()}

    def refusal(self, cause: Exception) -> InvalidArgument:
        """What to say when the parts do not make one grammar: the part that is to blame, where it can be told."""
        for pointer, root in self._grammars:
            try:
                add_rules(Grammar(max_bytes=_PART_BYTES), self.rules, root, self._work)
            except InvalidArgument as exc:
                return located(exc.message, pointer)
            except (GrammarTooLarge, TooComplex):
                return located("the grammar is too complex; simplify it", pointer)
        for pointer, what, language in self._texts:
            try:
                Grammar(max_bytes=_PART_BYTES).symbol(language)
            except GrammarTooLarge:
                return located(f"{what} is too complex: it asks for too much at once; simplify it", pointer)
        if not isinstance(cause, InvalidArgument):
            return located("its parts are too complex together; simplify it, or use fewer of them", "")
        for pointer, what in self._values:
            if isinstance(cause, Ambiguous) and cause.what == what:
                return InvalidArgument(cause.message, details={"pointer": pointer})
        open_texts = [(pointer, what) for pointer, what, language in self._texts if not language.is_plain]
        if not open_texts:
            return located(cause.message, "")
        named = ", or ".join(f"{what} at {pointer or '#'}" for pointer, what in open_texts[:3])
        return InvalidArgument(
            f"the structural tag cannot be kept exactly: {named} may go on where what follows it begins, so that its end is not "
            "clear; put a text between them that the first cannot hold, such as a const_string that its `excludes` name",
            details={"pointer": open_texts[0][0]},
        )

    def node(self, content: Any, pointer: str, *, ends: Texts[str] = ()) -> Node:
        """The texts of a format; of free text that has them, together with its `ends`."""
        build = self.check(content, pointer)
        return build(self, content, pointer, ends=ends) if ends else build(self, content, pointer)

    def check(self, content: Any, pointer: str) -> Callable[..., Node]:
        """What builds a format. Raises InvalidArgument when it is not known, or has members that are not."""
        kind = content.get("type") if isinstance(content, dict) else None
        known = _FORMATS.get(kind) if isinstance(kind, str) else None
        if known is None:
            raise wrong(pointer, f"must be an object whose type is one of {', '.join(_FORMATS)}, not {kind!r:.60}")
        if pointer.count("/") > _MAX_DEPTH:
            raise wrong(pointer, f"is nested more than {_MAX_DEPTH} levels deep")
        build, keys = known
        check_keys(content, pointer, {"type", *keys})
        return build

    def structure(self, content: Any, pointer: str) -> _Tag:
        """A tag of the older form."""
        if not isinstance(content, dict):
            raise wrong(pointer, "must be an object with begin, schema and end")
        check_keys(content, pointer, {"begin", "schema", "end"})
        schema = content.get("schema")
        if isinstance(schema, str):
            schema = parse_json(schema, f"the schema of the structural tag at {pointer}/schema")
        begin, end = text_of(content, "begin", pointer), text_of(content, "end", pointer)
        inner = self._schema(schema, f"{pointer}/schema")
        return _Tag(begin, self._ended(inner, [end], f"{pointer}/schema", f"{pointer}/end"), pointer)

    def triggered(
        self,
        tags: list[_Tag],
        triggers: list[str],
        pointer: str,
        *,
        excludes: Iterable[str] = (),
        at_least_one: bool = False,
        stop_after_first: bool = False,
        ends: Texts[str] = (),
    ) -> Node:
        """Free text with tags. ends: the texts that end it, where there are any; they are part of it then."""
        stops = [*triggers, *excludes]
        unfinished = complement(concat(_within(union(*map(literal, [*stops, *ends]))), SOME_TEXT))
        leads: dict[str, Language] = {}
        rests: dict[str, list[Node]] = {}
        for tag in tags:
            heads = [trigger for trigger in triggers if tag.begin.startswith(trigger)]
            if not heads:
                raise wrong(
                    f"{tag.pointer}/begin",
                    f"is {tag.begin!r:.60}, which begins with none of the triggers at {pointer}/triggers",
                )
            head = min(heads, key=len)
            if head not in leads:
                leads[head] = intersect(concat(ANY_TEXT, literal(head)), unfinished)
                if any(stop in head[:-1] for stop in (*stops, *ends)):
                    raise wrong(
                        f"{tag.pointer}/begin",
                        f"can never occur: its trigger {head!r:.60} holds another trigger, an exclude, or the end of the "
                        "text around it; use a trigger that does not",
                    )
            rests.setdefault(head, []).append(Sequence((literal(tag.begin[len(head) :]), tag.rest)))
        tagged = Choice(tuple(Sequence((leads[head], Choice(tuple(rests[head])))) for head in rests))
        if ends:
            text = self._until(ends, stops, pointer)
            closed: Node = Sequence((tagged, union(*map(literal, ends))))
        else:
            text, closed = complement(_within(union(*map(literal, stops)))), tagged
            self._texts.append((pointer, "the free text", text))
        if stop_after_first:
            return closed if at_least_one else Choice((closed, text))
        return Sequence((Loop(tagged, int(at_least_one), None), text))

    # ---- one format each

    def _const_string(self, content: dict[str, Any], pointer: str) -> Node:
        return literal(text_of(content, "value", pointer))

    def _json_schema(self, content: dict[str, Any], pointer: str) -> Node:
        return self._schema(content.get("json_schema"), f"{pointer}/json_schema")

    def _schema(self, content: Any, pointer: str) -> Ready:
        if not isinstance(content, dict | bool):
            raise wrong(pointer, "must be a JSON schema")
        try:
            rules = add_schema(self._grammar, content, self._work)
        except InvalidArgument as exc:
            # The pointer within the schema, which the message names, goes on where the tag's ends.
            details = dict(exc.details) | {"pointer": pointer + (exc.details or {}).get("pointer", "")}
            raise InvalidArgument(f"{exc.message} (in the structural tag at {pointer})", details=details) from None
        except (GrammarTooLarge, TooComplex):
            raise located("the JSON schema is too complex; simplify it", pointer) from None
        kinds = {shape.kind for shape in rules.shapes}
        first = chars((ord(char),) * 2 for kind in kinds & _STARTS.keys() for char in _STARTS[kind])
        more, texts = EMPTY, None
        has_numbers = "number" in kinds
        if has_numbers:
            self._num_numbers += 1
            texts = number_language(rules.shapes, self._work)
            head, more = number_edges(texts, self._work)
            first = union(first, head)
        what = f"the JSON value at {pointer} of the structural tag"
        self._values.append((pointer, what))
        texts = texts if kinds == {"number"} else None
        return _Value(rules.symbol, first, more, what, has_numbers=has_numbers, texts=texts)

    def _ended(self, inner: Node, ends: Texts[str], content_at: str, end_at: str) -> Node:
        """`inner` and one of `ends`. Raises InvalidArgument where the end of a number is not clear."""
        end = union(*map(literal, ends))
        if not isinstance(inner, _Value) or end.has_empty:
            return Sequence((inner, end))
        begins = first_chars(end, self._work)
        if not inner.has_numbers or intersect(NUMBER_GOES_ON, begins) == EMPTY:
            return Sequence((inner, end))
        if inner.texts is not None:
            if (example := read_twice(inner.texts, end, self._work)) is None:
                return concat(inner.texts, end)  # as one text: only all of it shows where the number ends
        else:
            clash = intersect(inner.more, begins)
            if clash == EMPTY:
                return Sequence((inner, end))
            example = chr(clash.parts[0][0])
        raise InvalidArgument(
            f"the structural tag cannot be kept exactly at {content_at}: a number of the content may go on with the "
            f"characters that the end at {end_at} begins with, as in {example!r:.60}, so where it ends is not clear; begin the "
            "end with a character that no number has, such as a space or '<', or narrow the schema",
            details={"pointer": content_at},
        )

    def _regex(self, content: dict[str, Any], pointer: str) -> Node:
        pointer, pattern = f"{pointer}/pattern", text_of(content, "pattern", pointer)
        try:
            language = full_match(pattern, self._work)
            if is_empty(language, self._work):
                raise located("the regular expression matches no text", pointer)
        except InvalidArgument as exc:
            raise exc if exc.details else located(exc.message, pointer) from None
        except TooComplex:
            raise located("the regular expression is too complex; simplify it", pointer) from None
        self._texts.append((pointer, "the regular expression", language))
        return language

    def _grammar_rules(self, content: dict[str, Any], pointer: str) -> Node:
        pointer, text = f"{pointer}/grammar", text_of(content, "grammar", pointer)
        try:
            rules = parse_gbnf(text)
        except InvalidArgument as exc:
            raise located(exc.message, pointer) from None
        prefix = f"{pointer}:"
        for name, node in rules.items():
            self.rules[prefix + name] = _renamed(node, prefix)
        self._grammars.append((pointer, f"{prefix}root"))
        return Reference(f"{prefix}root")

    def _tag(self, content: dict[str, Any], pointer: str) -> Node:
        tag = self._tag_parts(content, pointer)
        return Sequence((literal(tag.begin), tag.rest))

    def _tag_parts(self, content: Any, pointer: str) -> _Tag:
        if not isinstance(content, dict) or content.get("type", "tag") != "tag":
            raise wrong(pointer, "must be a tag: an object with begin, content and end")
        check_keys(content, pointer, {"type", "begin", "content", "end"})
        begin = text_of(content, "begin", pointer)
        is_one = isinstance(content.get("end"), str)
        ends = [text_of(content, "end", pointer)] if is_one else texts_of(content, "end", pointer)
        inner, inner_at = content.get("content"), f"{pointer}/content"
        if all(ends) and _is_free_text(inner):
            return _Tag(begin, self.node(inner, inner_at, ends=ends), pointer)
        return _Tag(begin, self._ended(self.node(inner, inner_at), ends, inner_at, f"{pointer}/end"), pointer)

    def _sequence(self, content: dict[str, Any], pointer: str) -> Node:
        elements = list_of(content, "elements", pointer)
        nodes: list[Node] = []
        is_begun = False  # whether the free text before it holds the beginning of an element
        for index, (element, following) in enumerate(itertools.pairwise([*elements, None])):
            element_at = f"{pointer}/elements/{index}"
            end = _fixed_beginning(following) if _is_free_text(element) else ""
            if is_begun:
                nodes.append(self._without_beginning(element, element_at))
            else:
                # Free text and what ends it are one part, so that the end is where it first occurs.
                nodes.append(self.node(element, element_at, ends=[end] if end else ()))
            is_begun = bool(end)
        return Sequence(tuple(nodes))

    def _until(self, ends: Texts[str], stops: Texts[str], pointer: str) -> Language:
        """Text without any of `stops` up to the first of `ends`, and that end."""
        end = union(*map(literal, ends))
        text = complement(_within(union(*map(literal, stops)))) if stops else ANY_TEXT
        ended = []
        for each in ends:
            # A stop that begins in the text may end in what would be its end.
            across = [
                concat(ANY_TEXT, literal(stop[:cut] + each))
                for stop in stops
                for cut in range(1, len(stop))
                if each.startswith(stop[cut:])
            ]
            ended.append(intersect(concat(text, literal(each)), *map(complement, across)))
        found = intersect(union(*ended), complement(concat(_within(end), SOME_TEXT)))
        self._texts.append((pointer, "the free text", found))
        return found

    def _without_beginning(self, content: Any, pointer: str) -> Node:
        """A constant or tag without the text that it begins with."""
        self.check(content, pointer)
        return EPSILON if content["type"] == "const_string" else self._tag_parts(content, pointer).rest

    def _or(self, content: dict[str, Any], pointer: str) -> Node:
        return Choice(tuple(self._elements(content, pointer)))

    def _elements(self, content: dict[str, Any], pointer: str) -> list[Node]:
        elements = list_of(content, "elements", pointer)
        return [self.node(each, f"{pointer}/elements/{index}") for index, each in enumerate(elements)]

    def _any_text(self, content: dict[str, Any], pointer: str, *, ends: Texts[str] = ()) -> Node:
        excluded = texts_of(content, "excludes", pointer, optional=True)
        if ends:
            return self._until(ends, excluded, pointer)
        text = complement(_within(union(*map(literal, excluded)))) if excluded else ANY_TEXT
        self._texts.append((pointer, "the free text", text))
        return text

    def _triggered_tags(self, content: dict[str, Any], pointer: str, *, ends: Texts[str] = ()) -> Node:
        tags = [
            self._tag_parts(each, f"{pointer}/tags/{index}")
            for index, each in enumerate(list_of(content, "tags", pointer))
        ]
        return self.triggered(
            tags,
            texts_of(content, "triggers", pointer),
            pointer,
            excludes=texts_of(content, "excludes", pointer, optional=True),
            at_least_one=flag_of(content, "at_least_one", pointer),
            stop_after_first=flag_of(content, "stop_after_first", pointer),
            ends=ends,
        )

    def _tags_with_separator(self, content: dict[str, Any], pointer: str) -> Node:
        tags = [
            self._tag(each, f"{pointer}/tags/{index}") for index, each in enumerate(list_of(content, "tags", pointer))
        ]
        tag, separator = Choice(tuple(tags)), literal(text_of(content, "separator", pointer))
        more = EPSILON if flag_of(content, "stop_after_first", pointer) else Loop(Sequence((separator, tag)), 0, None)
        return Loop(Sequence((tag, more)), int(flag_of(content, "at_least_one", pointer)), 1)


_FORMATS: dict[str, tuple[Callable[..., Node], tuple[str, ...]]] = {
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


@dataclass(frozen=True, slots=True)
class _Value(Ready):
    """A JSON value. has_numbers: whether it may be a number.  texts: all of its texts, where it can be nothing else."""

    has_numbers: bool = False
    texts: Language | None = None


def _any_number(leaf: Node) -> Node:
    return replace(leaf, more=NUMBER_GOES_ON) if isinstance(leaf, _Value) and leaf.has_numbers else leaf


def _is_free_text(content: Any) -> bool:
    return isinstance(content, dict) and content.get("type") in ("any_text", "triggered_tags")


def _fixed_beginning(content: Any) -> str:
    """The text that a format begins with, where it is written in it."""
    kind = content.get("type") if isinstance(content, dict) else None
    text = content.get({"const_string": "value", "tag": "begin"}.get(kind, "")) if isinstance(kind, str) else None
    return text if isinstance(text, str) else ""


def _within(inner: Language) -> Language:
    """Texts that contain one of `inner`."""
    return concat(ANY_TEXT, inner, ANY_TEXT)


def _renamed(node: Node, prefix: str) -> Node:
    return rebuilt(node, lambda leaf: Reference(prefix + leaf.name) if isinstance(leaf, Reference) else leaf)
