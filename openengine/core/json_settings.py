"""`JsonSettings`: a small JSON file of settings, read key by key, so that nothing in it is overlooked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openengine.core.tokenizer_files import read_json_object
from openengine.errors import InvalidArgument, UnsupportedFeature

__all__ = ["JsonSettings"]

_NO_LENGTH = 1 << 30


class JsonSettings:
    """A JSON object whose keys are taken one by one; `refuse_others` refuses what was not. A value of null is absent.

    Each method raises InvalidArgument for a value of another type or range than its name says, and UnsupportedFeature
    for one that is known and not implemented; both name the file and the key.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], *, key: str = "") -> None:
        self.path = path
        self.values = values
        self._key = key
        self._taken: set[str] = set()

    @classmethod
    def read(cls, path: Path, *, required: bool = True) -> JsonSettings:
        """The file's object; an empty one where an optional file is absent."""
        return cls(path, read_json_object(path, required=required))

    def error(self, why: str) -> InvalidArgument:
        return InvalidArgument(f"{self.path}: {self._key}{why}")

    def take(self, key: str) -> Any:
        """The value as it is."""
        self._taken.add(key)
        return self.values.get(key)

    def count(self, key: str, *, low: int = 1) -> int | None:
        """An integer of at least `low`."""
        value = self.take(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
            raise self.error(f"{key} is {value!r:.80}, expected an integer of at least {low}")
        return value

    def num_tokens(self, key: str) -> int | None:
        """A length; a number beyond any model's, as tokenizers write it, stands for none."""
        value = self.values.get(key)
        if isinstance(value, (int, float)) and value >= _NO_LENGTH:
            self.take(key)
            return None
        return self.count(key)

    def flag(self, key: str, default: bool | None) -> bool | None:
        value = self.take(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{key} is {value!r:.80}, expected true or false")
        return default if value is None else value

    def text(self, key: str) -> str | None:
        value = self.take(key)
        if value is not None and not isinstance(value, str):
            raise self.error(f"{key} is {value!r:.80}, expected a text")
        return value

    def choice(self, key: str, known: Sequence[str], default: str) -> str:
        """One of the values that are implemented."""
        value = self.take(key)
        if value is None:
            return default
        if value not in known:
            raise UnsupportedFeature(f"{self.path}: {self._key}{key} is {value!r:.80}; implemented: {', '.join(known)}")
        return value

    def mapping(self, key: str) -> JsonSettings:
        """An object within this one, to be taken from likewise; empty where it is absent."""
        value = self.take(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"{key} is {value!r:.80}, expected an object")
        return JsonSettings(self.path, value or {}, key=f"{self._key}{key}.")

    def refuse(self, key: str, *, neutral: Any = None) -> None:
        """The key may be absent or have the value that changes nothing."""
        value = self.take(key)
        if value is not None and value != neutral:
            raise UnsupportedFeature(f"{self.path}: {self._key}{key} {value!r:.80} is not implemented")

    def refuse_others(self, *, but: frozenset[str] = frozenset()) -> None:
        for key in self.values.keys() - self._taken - but:
            self.refuse(key)
