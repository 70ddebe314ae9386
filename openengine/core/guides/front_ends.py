"""From a guide to the grammar: which of its kinds a request gives, whether it is well formed, and who reads it.

    json_schema, json_object   schema_grammar.py        ebnf_grammar     gbnf.py
    regex                      regex.py                 structural_tag   structural_tag.py

A choice is the union of its texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from openengine.core.guides.gbnf import add_gbnf
from openengine.core.guides.grammar import Grammar
from openengine.core.guides.language import is_empty, literal, union
from openengine.core.guides.regex import full_match
from openengine.core.guides.schema_grammar import add_schema
from openengine.core.guides.schema_source import parse_json
from openengine.core.guides.structural_tag import add_structural_tag
from openengine.core.guides.work import Work
from openengine.errors import InvalidArgument
from openengine.types import GuidedDecoding

__all__ = ["add_guide", "only_guide"]

_BACKEND = "llguidance"
_KINDS = ("json_schema", "regex", "ebnf_grammar", "structural_tag", "choice", "json_object")


def only_guide(guide: GuidedDecoding) -> tuple[str, str]:
    """Which guide it is, and its source. Raises InvalidArgument unless there is exactly one that is well formed."""
    if guide.backend not in ("", _BACKEND):
        raise InvalidArgument(f"guided.backend {guide.backend!r:.60} is not known; leave it empty or use {_BACKEND!r}")
    given = [kind for kind in _KINDS if getattr(guide, kind) is not None]
    if len(given) != 1:
        named = ", ".join(given) if given else "none"
        raise InvalidArgument(f"guided needs exactly one of {', '.join(_KINDS)}; given: {named}")
    (kind,) = given
    if kind == "choice":
        return kind, "".join(_checked_choices(guide.choice.choices))
    return kind, "" if kind == "json_object" else _checked_text(getattr(guide, kind), kind)


def add_guide(grammar: Grammar, guide: GuidedDecoding, kind: str, work: Work) -> str:
    """Add what the guide of this kind allows; returns its symbol.

    Raises InvalidArgument for what is malformed or unsupported; GrammarTooLarge, TooComplex or CompileTimeout beyond a limit.
    """
    return _FRONT_ENDS[kind](grammar, guide, work)


def _checked_choices(choices: Sequence[str]) -> Sequence[str]:
    if not choices:
        raise InvalidArgument("guided.choice.choices is empty; give at least one text")
    seen: set[str] = set()
    for index, choice in enumerate(choices):
        if not _checked_text(choice, f"choice.choices[{index}]"):
            raise InvalidArgument(f"guided.choice.choices[{index}] is empty; a choice has at least one character")
        if choice in seen:
            raise InvalidArgument(f"guided.choice.choices[{index}] {choice!r:.60} is there twice")
        seen.add(choice)
    return choices


def _checked_text(text: object, name: str) -> str:
    if not isinstance(text, str):
        hint = f"; use json.dumps, or the keyword {name}=, which takes a dict" if isinstance(text, Mapping) else ""
        raise InvalidArgument(f"guided.{name} must be a string, not {type(text).__name__}{hint}")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidArgument(
            f"guided.{name} holds a lone surrogate at position {exc.start}, which is no character"
        ) from None
    return text


def _add_json_schema(grammar: Grammar, guide: GuidedDecoding, work: Work) -> str:
    return add_schema(grammar, parse_json(guide.json_schema, "the JSON schema"), work).symbol


def _add_regex(grammar: Grammar, guide: GuidedDecoding, work: Work) -> str:
    language = full_match(guide.regex, work)
    if is_empty(language, work):
        hint = (
            "; a lookahead or anchor in it excludes everything"
            if any(mark in guide.regex for mark in ("(?", "^", "$"))
            else ""
        )
        raise InvalidArgument(f"the regular expression {guide.regex!r:.80} matches no text{hint}")
    return grammar.symbol(language)


_FRONT_ENDS: dict[str, Callable[[Grammar, GuidedDecoding, Work], str]] = {
    "json_schema": _add_json_schema,
    "regex": _add_regex,
    "ebnf_grammar": lambda grammar, guide, work: add_gbnf(grammar, guide.ebnf_grammar, work),
    "structural_tag": lambda grammar, guide, work: add_structural_tag(grammar, guide.structural_tag, work),
    "choice": lambda grammar, guide, _: grammar.symbol(union(*map(literal, guide.choice.choices))),
    "json_object": lambda grammar, _, work: add_schema(grammar, {"type": "object"}, work).symbol,
}
