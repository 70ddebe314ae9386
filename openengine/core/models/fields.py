"""`Fields`: typed reading of a checkpoint's config, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openengine.errors import InvalidArgument

__all__ = ["Fields"]

# Beyond any model, and small enough that a damaged config allocates nothing absurd.
_MAX_LAYERS = 4096
_MAX_SIZE = 1 << 27
# Within single precision, in which the values are used.
_LEAST_NUMBER, _MAX_NUMBER = 1e-30, 1e30


class Fields:
    """Values by name. A value of None counts as absent; `where` begins every message.

    Each method raises InvalidArgument for a value of another type or range than its name says.
    """

    def __init__(self, values: Mapping[str, Any], *, where: str = "config") -> None:
        self.values = values
        self.where = where

    def integer(self, name: str) -> int:
        value = self.integer_or_none(name)
        if value is None:
            raise InvalidArgument(f"{self.where} has no '{name}', an integer")
        return value

    def integer_or_none(self, name: str) -> int | None:
        value = self.values.get(name)
        if value is None:
            return None
        limit = _MAX_LAYERS if "layer" in name else _MAX_SIZE
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise InvalidArgument(f"{self.where}: '{name}' is {value!r:.80}, expected an integer from 1 to {limit}")
        return value

    def number(self, name: str) -> float:
        value = self.number_or_none(name)
        if value is None:
            raise InvalidArgument(f"{self.where} has no '{name}', a number")
        return value

    def number_or_none(self, name: str) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _in_range(value):
            raise InvalidArgument(
                f"{self.where}: '{name}' is {value!r:.80}, expected a number from {_LEAST_NUMBER:g} to {_MAX_NUMBER:g}"
            )
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InvalidArgument(f"{self.where}: '{name}' is {value!r}, expected true or false")
        return value

    def text_or_none(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise InvalidArgument(f"{self.where}: '{name}' is {value!r}, expected a name")
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        value = self.values.get(name)
        if not isinstance(value, (list, tuple)) or len(value) != length:
            raise InvalidArgument(f"{self.where}: '{name}' is {value!r}, expected a list of {length} numbers")
        if not all(isinstance(item, (int, float)) and not isinstance(item, bool) and _in_range(item) for item in value):
            raise InvalidArgument(f"{self.where}: '{name}' holds something other than numbers above 0: {value!r:.200}")
        return tuple(float(item) for item in value)


def _in_range(value: float) -> bool:
    return _LEAST_NUMBER <= value <= _MAX_NUMBER
