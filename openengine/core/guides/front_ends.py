"""From a guide to the grammar: who reads which kind.

    json_schema, json_object   schema_grammar.py        ebnf_grammar     gbnf.py
    regex                      regex.py                 structural_tag   structural_tag.py

A choice is the union of its texts.
"""

from __future__ import annotations

from collections.abc import Callable

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

__all__ = ["add_guide"]


def add_guide(grammar: Grammar, guide: GuidedDecoding, kind: str, work: Work) -> str:
    """Add what the guide of this kind allows; returns its symbol.

    Raises InvalidArgument for what is malformed or unsupported; GrammarTooLarge, TooComplex or CompileTimeout beyond a limit.
    """
    return _FRONT_ENDS[kind](grammar, guide, work)


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
