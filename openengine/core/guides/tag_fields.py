"""The members of the objects that a structural tag is made of: read with their types, and named by pointer in errors."""

from __future__ import annotations

from typing import Any

from openengine.errors import InvalidArgument

__all__ = ["check_keys", "flag_of", "list_of", "located", "text_of", "texts_of", "wrong"]


def wrong(pointer: str, problem: str) -> InvalidArgument:
    """What to raise where the tag itself is malformed."""
    return InvalidArgument(
        f"the structural tag is malformed at {pointer or '#'}: it {problem}", details={"pointer": pointer}
    )


def located(problem: str, pointer: str) -> InvalidArgument:
    """What to raise where what the tag holds is refused."""
    return InvalidArgument(f"{problem} (in the structural tag at {pointer or '#'})", details={"pointer": pointer})


def check_keys(content: dict[str, Any], pointer: str, known: set[str]) -> None:
    """Raises InvalidArgument for members that are not `known`."""
    unknown = sorted(content.keys() - known)
    if unknown:
        raise wrong(pointer, f"has {', '.join(unknown):.100}, but only {', '.join(sorted(known))} are known there")


def text_of(content: dict[str, Any], key: str, pointer: str) -> str:
    if not isinstance(content.get(key), str):
        raise wrong(f"{pointer}/{key}", "must be a string")
    return content[key]


def list_of(content: dict[str, Any], key: str, pointer: str) -> list[Any]:
    """A list that is not empty."""
    value = content.get(key)
    if not isinstance(value, list) or not value:
        raise wrong(f"{pointer}/{key}", "must be a list that is not empty")
    return value


def texts_of(content: dict[str, Any], key: str, pointer: str, *, optional: bool = False) -> list[str]:
    """A list of texts, none of them empty; `optional`: the list may be empty or absent."""
    if optional and key not in content:
        return []
    value = content.get(key)
    if (
        not isinstance(value, list)
        or not all(isinstance(each, str) and each for each in value)
        or not (value or optional)
    ):
        raise wrong(f"{pointer}/{key}", "must be a list of texts, none of them empty")
    return value


def flag_of(content: dict[str, Any], key: str, pointer: str) -> bool:
    value = content.get(key, False)
    if not isinstance(value, bool):
        raise wrong(f"{pointer}/{key}", "must be true or false")
    return value
