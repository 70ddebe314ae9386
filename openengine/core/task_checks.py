"""Checks of the values in embed, classify and score requests; each gives back the value that it found right.

A check takes the name that its error shall give, and raises InvalidArgument. None passes only where a check says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from openengine.errors import InvalidArgument
from openengine.task_types import MultimodalTaskInput, TaskInput, TaskInputType
from openengine.types import NameEnum
from openengine.validation import check_encodable, check_flag, check_integer, checked_type

__all__ = [
    "check_count",
    "checked_choice",
    "checked_content",
    "checked_flag",
    "checked_integer",
    "checked_items",
    "checked_text",
]

_Enum = TypeVar("_Enum", bound=NameEnum)


def checked_content(
    where: str, item: TaskInput, allowed: Sequence[TaskInputType], seen: set[str]
) -> str | Sequence[int]:
    """The text or token ids of an input whose id is none of those `seen`."""
    if not isinstance(item.item_id, str) or not item.item_id:
        raise InvalidArgument(f"{where}: item_id {item.item_id!r:.80} must be a text that is not empty")
    checked_text(f"{where}: item_id", item.item_id)
    if item.item_id in seen:
        raise InvalidArgument(f"{where}: item_id {item.item_id!r:.80} is used twice; give each item its own")
    seen.add(item.item_id)
    given = [kind for kind in TaskInputType if getattr(item, kind.value) is not None]
    if len(given) != 1:
        raise InvalidArgument(f"{where} takes exactly one of text, token_ids and multimodal, not {len(given)} of them")
    (kind,) = given
    if kind is TaskInputType.MULTIMODAL:
        media = checked_type(f"{where}.multimodal", item.multimodal, MultimodalTaskInput).media
        if not media:
            raise InvalidArgument(f"{where}.multimodal has no media; give at least one, or a text")
    if kind not in allowed:
        raise InvalidArgument(f"{where} is {kind}; this task takes {', '.join(allowed)}")
    if kind is TaskInputType.TEXT:
        return checked_type(f"{where}.text", item.text, str)
    if isinstance(item.token_ids, str):
        raise InvalidArgument(f"{where}.token_ids must be a sequence of token ids, not the text {item.token_ids!r:.80}")
    return item.token_ids


def checked_items(name: str, values: Any, kind: type | tuple[type, ...]) -> tuple[Any, ...]:
    """A tuple of `kind`."""
    if not isinstance(values, (tuple, list)) or any(not isinstance(v, kind) or isinstance(v, bool) for v in values):
        expected = kind.__name__ if isinstance(kind, type) else kind[0].__name__
        raise InvalidArgument(f"{name} must be a tuple of {expected}, not {values!r:.80}")
    return tuple(values)


def check_count(name: str, count: int, most: int | None) -> None:
    """Between 1 and `most`; None is no limit."""
    if not count:
        raise InvalidArgument(f"{name} is empty; give at least one")
    if most is not None and count > most:
        raise InvalidArgument(f"{count} {name}, the limit of one request is {most}; send several requests")


_FIRST: Any = object()


def checked_choice(
    name: str, value: Any, kind: type[_Enum], allowed: Sequence[_Enum], default: Any = _FIRST
) -> _Enum | Any:
    """`value` as one of `allowed`; where it is None, `default`, and without one the first of them."""
    if value is None:
        return allowed[0] if default is _FIRST else default
    if not isinstance(value, str) or value not in tuple(kind):
        raise InvalidArgument(f"{name} must be one of {', '.join(kind)}, not {value!r:.80}")
    if value not in allowed:
        raise InvalidArgument(f"{name} {value!s:.80}: this model has {', '.join(allowed)}")
    return kind(value)


def checked_flag(name: str, value: Any) -> bool | None:
    """True, False or None."""
    check_flag(name, value)
    return None if value is None else bool(value)


def checked_text(name: str, value: Any) -> str:
    """A text that can be encoded."""
    check_encodable(name, checked_type(name, value, str))
    return value


def checked_integer(name: str, value: Any, low: int, high: int, *, note: str = "") -> int:
    """From `low` to `high`; `note` stands behind the range in the error."""
    if value is None:
        raise InvalidArgument(f"{name} must be an integer, not None")
    check_integer(name, value, low, high, note=note)
    return int(value)
