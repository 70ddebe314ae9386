"""Reading safetensors files without holding them in memory.

Tensors are read from the file straight into their destination, or through a bounded buffer when the dtype differs,
so that loading peaks at the size of what is loaded. (Mapping the file instead, as the `safetensors` package does,
counts every page that was read as resident until the file is closed.)

    length of header, u64 little endian | header, JSON | data
    header: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {...}}

Offsets count from the start of the data, which the tensors cover without gaps or overlaps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from openengine.errors import InvalidArgument, UnsupportedFeature

__all__ = ["SafetensorsFile", "StoredTensor"]

_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_CHUNK_BYTES = 8 << 20

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ITEM_BYTES = {
    **{name: dtype.itemsize for name, dtype in _FLOATS.items()},
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}


class SafetensorsFile:
    """One open file; `tensors` maps names to what is stored. Close it, or use it as a context manager.

    Raises:
        InvalidArgument: the file is not a complete safetensors file.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise InvalidArgument(f"{path} is no regular file")
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)
        except OSError as exc:
            raise InvalidArgument(f"{path} cannot be read: {exc}") from exc
        try:
            self.tensors = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _read_header(self) -> dict[str, StoredTensor]:
        num_bytes = self.path.stat().st_size
        length = int.from_bytes(self._file.read(8), "little")
        if num_bytes < 8 or length > min(num_bytes - 8, _MAX_HEADER_BYTES):
            raise self._corrupt(f"its header of {length} bytes does not fit in {num_bytes} bytes")
        try:
            header = json.loads(self._file.read(length))
            header.pop("__metadata__", None)
            tensors = {name: self._entry(name, 8 + length, **entry) for name, entry in header.items()}
        except (ValueError, TypeError, AttributeError, RecursionError) as exc:
            raise self._corrupt(f"its header is malformed ({exc})") from exc
        end = 8 + length
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
            if tensor.offset != end:
                raise self._corrupt(f"the data of {name!r} does not follow that of the tensor before it")
            end += tensor.num_bytes
        if end != num_bytes:
            raise self._corrupt(f"its tensors end at byte {end} but the file has {num_bytes}; it may be cut short")
        return tensors

    def _entry(self, name: str, start: int, *, dtype: str, shape: list[int], data_offsets: list[int]) -> StoredTensor:
        begin, end = data_offsets
        if not all(type(size) is int and size >= 0 for size in (begin, end, *shape)):
            raise ValueError(f"entry {name!r} has a shape or offset that is no size")
        if dtype in _ITEM_BYTES and end - begin != prod(shape) * _ITEM_BYTES[dtype]:
            raise ValueError(f"entry {name!r} of {dtype} {shape} has {end - begin} bytes")
        return StoredTensor(self._file, self.path, name, dtype, tuple(shape), start + begin, end - begin)

    def _corrupt(self, why: str) -> InvalidArgument:
        return InvalidArgument(f"{self.path} is not a valid safetensors file: {why}")


class StoredTensor:
    """A tensor in an open file. `dtype` is the file's name for it, `offset` counts from the start of the file."""

    __slots__ = ("_file", "_path", "dtype", "name", "num_bytes", "offset", "shape")

    def __init__(
        self, file: BinaryIO, path: Path, name: str, dtype: str, shape: tuple[int, ...], offset: int, num_bytes: int
    ) -> None:
        self._file = file
        self._path = path
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.offset = offset
        self.num_bytes = num_bytes

    def copy_to(self, destination: Tensor) -> None:
        """Write the values to `destination` of the same shape, casting them to its dtype."""
        assert destination.shape == self.shape, "the loader compares shapes first"
        direct = destination.dtype == self._float_dtype() and destination.is_contiguous()
        if direct and destination.device.type == "cpu":
            self._read_into(destination, self.offset)
            return
        for rows, values in self.chunks():
            destination[rows].copy_(values)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """The values by ranges of the first dimension, in order; each is overwritten by the next."""
        buffer: Tensor | None = None
        for rows in self._blocks():
            buffer = self._buffer(rows) if buffer is None else buffer  # the first range is the longest
            values = buffer[: rows.stop - rows.start]
            self._read_into(values, self._offset_of(rows))
            yield rows, values

    def holds_same(self, other: StoredTensor) -> bool:
        """Whether the values, of equal shapes, are equal."""
        return all(torch.equal(self._read(rows).float(), other._read(rows).float()) for rows in self._blocks())

    def _blocks(self) -> Iterator[slice]:
        """Ranges of the first dimension that fit the buffer."""
        num_rows = self.shape[0]
        step = max(1, _CHUNK_BYTES * num_rows // max(1, self.num_bytes))
        return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))

    def _read(self, rows: slice) -> Tensor:
        values = self._buffer(rows)
        self._read_into(values, self._offset_of(rows))
        return values

    def _buffer(self, rows: slice) -> Tensor:
        return torch.empty(rows.stop - rows.start, *self.shape[1:], dtype=self._float_dtype())

    def _offset_of(self, rows: slice) -> int:
        return self.offset + rows.start * (self.num_bytes // self.shape[0])

    def _float_dtype(self) -> torch.dtype:
        if self.dtype not in _FLOATS:
            raise UnsupportedFeature(
                f"{self._path}: tensor {self.name!r} is stored as {self.dtype}; supported: {', '.join(_FLOATS)}"
            )
        return _FLOATS[self.dtype]

    def _read_into(self, destination: Tensor, offset: int) -> None:
        view = memoryview(destination.reshape(-1).view(torch.uint8).numpy())
        self._file.seek(offset)
        done = 0
        while done < len(view):
            count = self._file.readinto(view[done:])
            if not count:
                raise InvalidArgument(f"{self._path} ended while {self.name!r} was read; it was cut short")
            done += count
