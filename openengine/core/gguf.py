"""GGUF files: parse the header, map the tensors, dequantize them to float32. Numpy only.

Owns the file format and the block formats of ggml. What the metadata and the tensor names mean to a model is in
`gguf_models`. Layouts are facts of the GGUF specification (ggml `docs/gguf.md`) and of `ggml-common.h`:

    "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata:     key string | type u32 | value                              x metadata count
    tensor infos: name string | n u32 | dim u64 x n | type u32 | offset u64  x tensor count
    padding to `general.alignment`
    tensor data:  each tensor at data start + offset

Nothing in the file is trusted: every length is checked against what is left of the file before it is used.
"""

from __future__ import annotations

import itertools
import mmap
import os
import re
import stat
import struct
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, final

import numpy as np

from openengine.core.gguf_blocks import FORMATS, OTHER_TYPES, decode_blocks
from openengine.errors import ArtifactNotFound, InvalidArgument, UnsupportedFeature

__all__ = ["SUPPORTED_TYPES", "GgufFile", "GgufTensor"]

SUPPORTED_TYPES: tuple[str, ...] = tuple(FORMATS)


@dataclass(frozen=True, slots=True, eq=False)
class GgufTensor:
    """One tensor of an open file. `data` is the mapped file: it stays valid for as long as this object lives."""

    name: str
    shape: tuple[int, ...]  # row-major, the last dimension is the contiguous one (ggml lists dimensions the other way)
    type: str  # a name of `SUPPORTED_TYPES`
    data: np.ndarray  # uint8 [num_bytes], read-only

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def dequantize(self, out: np.ndarray | None = None, *, rows: slice | None = None) -> np.ndarray:
        """Values as float32 in `shape`, written to `out` if given (float32, C-contiguous, of the result's shape).

        `rows` selects a range of the first dimension of a tensor of two or more. Temporaries stay below 2 MiB.
        F64 and I32 values are rounded to float32.

        Raises:
            InvalidArgument: `out` or `rows` do not fit the tensor.
        """
        shape, data = self.shape, self.data
        if rows is not None:
            start, stop, step = rows.indices(shape[0] if shape else 0)
            if len(shape) < 2 or step != 1:
                raise InvalidArgument(f"rows {rows} of tensor {self.name!r} {shape}: needs two dimensions and step 1")
            row_bytes = data.nbytes // shape[0]
            stop = max(start, stop)
            shape, data = (stop - start, *shape[1:]), data[start * row_bytes : stop * row_bytes]
        if out is None:
            out = np.empty(shape, np.float32)
        elif out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous or not out.flags.writeable:
            raise InvalidArgument(
                f"out for tensor {self.name!r} must be a writeable C-contiguous float32 array of shape {shape}, "
                f"not {out.dtype} {out.shape}"
            )
        decode_blocks(FORMATS[self.type], data, out)
        return out


@final
class GgufFile:
    """A GGUF model: metadata and tensors of one file, or of all parts of a split one (any part may be named).

    The tensors are mapped, not read. `close()` (or leaving the `with` block, or dropping the object) lets go of the
    mapping; tensors taken out before keep theirs until they are dropped as well.

    Attributes:
        paths: every part, in order.
        version: the format's version, 2 or 3.
        metadata: scalars as int, float, bool and str; arrays of strings (or of arrays) as list; others as numpy.
            Of a split file, the first part's.
        tensors: by name, in file order.

    Raises:
        ArtifactNotFound: the file, or a part of a split file, does not exist.
        InvalidArgument: not a GGUF file of version 2 or 3, truncated or corrupt; names the file and the byte.
        UnsupportedFeature: a tensor type that is not in `SUPPORTED_TYPES`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if sys.byteorder != "little":
            raise UnsupportedFeature("GGUF files are little-endian; this machine is big-endian")
        path = Path(path)
        part = _read_part(path)
        count = _split_field(part, "split.count", 1)
        self.paths = [path] if count <= 1 else _sibling_paths(path, count)
        parts = [part if sibling == path else _read_part(sibling) for sibling in self.paths]
        if count > 1:
            _check_split(parts, count)
        self.version = parts[0].version
        self.metadata: dict[str, Any] = parts[0].metadata
        self.tensors: dict[str, GgufTensor] = {}
        for part in parts:
            if twice := self.tensors.keys() & part.tensors.keys():
                raise InvalidArgument(f"{part.path}: tensor {min(twice)!r} is also in an earlier part")
            self.tensors.update(part.tensors)

    def close(self) -> None:
        """Forget the tensors, and with them the mapping. Idempotent."""
        self.tensors = {}

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GgufFile({str(self.paths[0])!r}, version={self.version}, {len(self.tensors)} tensors)"


# ---------------------------------------------------------------------------------------------------------- parsing

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4  # GGML_MAX_DIMS
_MAX_ARRAY_DEPTH = 4
# Longer arrays and strings are corruption, whatever the file's size: the largest real ones, vocabularies and their
# merges, have less than 2**20 items. It bounds what a flipped bit can make us allocate.
_MAX_ITEMS = 1 << 24
_LARGEST_ALIGNMENT = 1 << 20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
# Metadata type id -> numpy's character for it; booleans are bytes that must be 0 or 1.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Part:
    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Position in a mapped file. Reads advance it, and check first that the file has what they ask for."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.offset = 0

    def error(self, what: str, *, offset: int | None = None) -> InvalidArgument:
        offset = self.offset if offset is None else offset
        return InvalidArgument(f"{self.path}: {what}, at byte {offset}", details={"offset": offset})

    def skip(self, num_bytes: int, what: str) -> int:
        """Advance, and return where we were."""
        offset = self.offset
        if num_bytes > self.size - offset:
            raise self.error(f"{what} needs {num_bytes} bytes but the file ends at {self.size}: truncated or corrupt")
        self.offset += num_bytes
        return offset

    def u32(self, what: str) -> int:
        return _U32.unpack_from(self.buffer, self.skip(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack_from(self.buffer, self.skip(8, what))[0]

    def count(self, what: str, item_bytes: int) -> int:
        """A number of items that take at least `item_bytes` each."""
        offset = self.offset
        count = self.u64(what)
        limit = min(_MAX_ITEMS, (self.size - self.offset) // item_bytes)
        if count > limit:
            raise self.error(f"{what} {count} exceeds {limit}, the most that can follow: corrupt", offset=offset)
        return count

    def string(self, what: str) -> str:
        length = self.count(f"length of {what}", 1)
        offset = self.skip(length, what)
        try:
            return str(self.buffer[offset : self.offset], "utf-8")
        except UnicodeDecodeError as exc:
            raise self.error(f"{what} is not UTF-8 ({exc.reason}): corrupt", offset=offset) from exc

    def strings(self, count: int, what: str) -> list[str]:
        """`string` for a whole array: vocabularies have 250,000 of them, so this loop has no calls of ours."""
        buffer, size, offset = self.buffer, self.size, self.offset
        length_at = _U64.unpack_from
        values = []
        try:
            for _ in range(count):
                start = offset + 8
                end = start + length_at(buffer, offset)[0]
                if end > size:
                    raise self.error(f"a string of {what} ends at {end}, past the file's {size}", offset=offset)
                values.append(str(buffer[start:end], "utf-8"))
                offset = end
        except struct.error as exc:
            raise self.error(f"{what} is cut off by the end of the file", offset=offset) from exc
        except UnicodeDecodeError as exc:
            raise self.error(f"a string of {what} is not UTF-8 ({exc.reason}): corrupt", offset=offset) from exc
        self.offset = offset
        return values

    def value(self, type_id: int, what: str) -> Any:
        if type_id == _STRING:
            return self.string(what)
        if type_id == _ARRAY:
            return self.array(what, 1)
        return self.scalars(type_id, 1, what)[0].item()

    def array(self, what: str, depth: int) -> Any:
        offset = self.offset
        type_id = self.u32(f"item type of {what}")
        if type_id == _STRING:
            return self.strings(self.count(f"length of {what}", 8), what)
        if type_id == _ARRAY:
            if depth == _MAX_ARRAY_DEPTH:
                raise self.error(f"{what} nests arrays more than {_MAX_ARRAY_DEPTH} deep: corrupt", offset=offset)
            return [self.array(what, depth + 1) for _ in range(self.count(f"length of {what}", 12))]
        return self.scalars(type_id, None, what).copy()

    def scalars(self, type_id: int, count: int | None, what: str) -> np.ndarray:
        """A view of `count` numbers, or of as many as the count in front of them says."""
        offset = self.offset
        if type_id not in _SCALARS:
            raise self.error(f"{what} has the unknown metadata type {type_id}: corrupt", offset=offset)
        dtype = np.dtype("<" + _SCALARS[type_id])
        if count is None:
            count = self.count(f"length of {what}", dtype.itemsize)
        start = self.skip(count * dtype.itemsize, what)
        values = np.frombuffer(self.buffer, dtype, count, start)
        if type_id == _BOOL:
            if values.size and values.max() > 1:
                raise self.error(f"{what} holds a boolean that is neither 0 nor 1: corrupt", offset=start)
            values = values.view(np.bool_)
        return values


def _read_part(path: Path) -> _Part:
    cursor = _Cursor(path, _map_file(path))
    version = _read_magic(cursor)
    num_tensors = cursor.count("tensor count", 24)  # the shortest entries: an empty name, no dimensions; an empty key
    num_metadata = cursor.count("metadata count", 13)
    metadata: dict[str, Any] = {}
    for _ in range(num_metadata):
        offset = cursor.offset
        key = cursor.string("a metadata key")
        if key in metadata:
            raise cursor.error(f"metadata key {key!r} occurs twice", offset=offset)
        metadata[key] = cursor.value(cursor.u32(f"type of {key!r}"), f"metadata {key!r}")
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment {alignment!r} is not a power of two up to {_LARGEST_ALIGNMENT}")
    return _Part(path, version, metadata, _read_tensors(cursor, num_tensors, alignment))


def _map_file(path: Path) -> mmap.mmap:
    try:
        # Asked before opening: opening a FIFO would wait for its writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InvalidArgument(f"{path}: is not a regular file; name the .gguf file itself")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise InvalidArgument(f"{path}: is empty, not a GGUF file, at byte 0")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as exc:
        raise ArtifactNotFound(f"{path}: no such file") from exc
    except OSError as exc:
        raise InvalidArgument(f"{path}: cannot be read: {exc.strerror or exc}") from exc


def _read_magic(cursor: _Cursor) -> int:
    start = cursor.skip(4, "the magic number")
    magic = cursor.buffer[start:4]
    if magic != _MAGIC:
        raise cursor.error(f"not a GGUF file: it starts with {magic!r} instead of {_MAGIC!r}", offset=start)
    version = cursor.u32("the version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = f"{swapped} in big-endian byte order" if swapped in _VERSIONS else f"{version}"
        raise cursor.error(
            f"GGUF version {what} is not supported, only little-endian versions 2 and 3: convert the model again",
            offset=4,
        )
    return version


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, GgufTensor]:
    infos: dict[str, tuple[tuple[int, ...], str, int, int]] = {}  # name: shape, type, offset, where the entry is
    for _ in range(num_tensors):
        at = cursor.offset
        name = cursor.string("a tensor name")
        if name in infos:
            raise cursor.error(f"tensor {name!r} occurs twice", offset=at)
        num_dims = cursor.u32(f"dimension count of tensor {name!r}")
        if num_dims > _MAX_DIMS:
            raise cursor.error(f"tensor {name!r} has {num_dims} dimensions, more than {_MAX_DIMS}", offset=at)
        shape = tuple(cursor.u64(f"a dimension of tensor {name!r}") for _ in range(num_dims))[::-1]
        if 0 in shape:
            raise cursor.error(f"tensor {name!r} has the shape {shape}: corrupt", offset=at)
        type_id = cursor.u32(f"type of tensor {name!r}")
        infos[name] = (shape, _type_name(cursor.path, name, type_id), cursor.u64(f"offset of tensor {name!r}"), at)

    data_start = -(-cursor.offset // alignment) * alignment
    spans = []
    tensors = {}
    for name, (shape, type_name, offset, at) in infos.items():
        block_format = FORMATS[type_name]
        num_blocks, rest = divmod(prod(shape), block_format.size)
        if rest or (shape and shape[-1] % block_format.size):
            raise cursor.error(
                f"tensor {name!r} {shape}: rows are no multiple of the {block_format.size} values of a {type_name} block",
                offset=at,
            )
        start = data_start + offset
        num_bytes = num_blocks * block_format.record.itemsize
        if offset % alignment:
            raise cursor.error(f"tensor {name!r} lies at offset {offset}, no multiple of {alignment}", offset=at)
        if start + num_bytes > cursor.size:
            raise cursor.error(
                f"tensor {name!r} {shape} {type_name} takes bytes {start} to {start + num_bytes} but the file ends at "
                f"{cursor.size}: truncated or corrupt",
                offset=at,
            )
        spans.append((start, start + num_bytes, name, at))
        data = np.frombuffer(cursor.buffer, np.uint8, num_bytes, start)
        tensors[name] = GgufTensor(name, shape, type_name, data)
    spans.sort()
    for (_, end, first, _), (start, _, second, at) in itertools.pairwise(spans):
        if start < end:
            raise cursor.error(f"tensors {first!r} and {second!r} overlap: corrupt", offset=at)
    return tensors


def _type_name(path: Path, tensor: str, type_id: int) -> str:
    for name, block_format in FORMATS.items():
        if block_format.type_id == type_id:
            return name
    raise UnsupportedFeature(
        f"{path}: tensor {tensor!r} has type {OTHER_TYPES.get(type_id, 'unknown')} (id {type_id}); supported are "
        f"{', '.join(SUPPORTED_TYPES)}: choose another quantization of this model"
    )


# ------------------------------------------------------------------------------------------------------ split files


def _split_field(part: _Part, key: str, default: int) -> int:
    value = part.metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise InvalidArgument(f"{part.path}: {key} {value!r} is not a count")
    return value


def _sibling_paths(path: Path, count: int) -> list[Path]:
    name = _PART_NAME.fullmatch(path.name)
    if name is None or int(name["total"]) != count:
        raise InvalidArgument(
            f"{path}: is one of {count} parts, whose names must end in -00001-of-{count:05}.gguf and so on; "
            "restore the original file names"
        )
    paths = [path.with_name(f"{name['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if missing := [str(sibling) for sibling in paths if not sibling.exists()]:
        raise ArtifactNotFound(f"{path}: is one of {count} parts, of which {len(missing)} are missing: {missing[0]}")
    return paths


def _check_split(parts: list[_Part], count: int) -> None:
    for index, part in enumerate(parts):
        number, total = _split_field(part, "split.no", 0), _split_field(part, "split.count", 1)
        if (number, total) != (index, count):
            raise InvalidArgument(
                f"{part.path}: says it is part {number + 1} of {total}, where {index + 1} of {count} belongs"
            )
    found = sum(len(part.tensors) for part in parts)
    expected = _split_field(parts[0], "split.tensors.count", found)
    if found != expected:
        raise InvalidArgument(f"{parts[0].path}: split.tensors.count is {expected} but the parts have {found} tensors")
