"""What a request gives as a guide: which of the kinds it is, and whether it is well formed on its face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from openengine.errors import InvalidArgument
from openengine.types import GuidedDecoding

__all__ = ["only_guide"]

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
