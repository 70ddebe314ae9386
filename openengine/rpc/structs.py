"""`google.protobuf.Struct` as a dict that keeps types: text, booleans, null, lists, objects; every number a double."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.struct_pb2 import Struct, Value

__all__ = ["fill_struct", "read_struct"]

_LARGEST_EXACT = 2**53  # beyond it not every integer is a double


def read_struct(struct: Struct) -> dict[str, Any]:
    """The fields of `struct`; numbers are floats. Raises ValueError for a value of no kind."""
    return {key: _read_value(value, key) for key, value in struct.fields.items()}


def fill_struct(struct: Struct, values: Mapping[str, Any]) -> None:
    """Set the fields of `struct`. An integer that no double holds, or a value of another type, becomes its text."""
    for key, value in values.items():
        _fill_value(struct.fields[str(key)], value)


def _read_value(value: Value, key: str) -> Any:
    kind = value.WhichOneof("kind")
    if kind is None:
        raise ValueError(f"has no value for {key!r}")
    if kind == "null_value":
        return None
    if kind == "struct_value":
        return read_struct(value.struct_value)
    if kind == "list_value":
        return [_read_value(item, key) for item in value.list_value.values]
    return getattr(value, kind)


def _fill_value(target: Value, value: Any) -> None:
    if hasattr(value, "tolist"):  # numpy's scalars and arrays
        value = value.tolist()
    if value is None:
        target.null_value = 0
    elif isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, float) or (isinstance(value, int) and abs(value) <= _LARGEST_EXACT):
        target.number_value = value
    elif isinstance(value, Mapping):
        target.struct_value.SetInParent()
        fill_struct(target.struct_value, value)
    elif isinstance(value, (list, tuple)):
        target.list_value.SetInParent()
        for item in value:
            _fill_value(target.list_value.values.add(), item)
    else:
        target.string_value = str(value)
