"""GGUF files: parsing, dequantization, corrupt input, and the translation to Hugging Face names, values and config."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from openengine.core.gguf import SUPPORTED_TYPES, GgufFile
from openengine.core.gguf_models import SUPPORTED_ARCHITECTURES, HfTensor, generation_defaults, hf_config, hf_tensors
from openengine.errors import ArtifactNotFound, InvalidArgument, UnsupportedFeature

# ------------------------------------------------------------------------------------------------- writing test files

# name: (ggml type id, values per block, bytes per block)
TYPES = MappingProxyType(
    {
        "F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2), "F64": (28, 1, 8), "I8": (24, 1, 1), "I16": (25, 1, 2),
        "I32": (26, 1, 4), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24),
        "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144),
        "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "IQ4_NL": (20, 32, 18), "IQ4_XS": (23, 256, 136),
    }
)  # fmt: skip
QUANTIZED = [name for name, (_, size, _) in TYPES.items() if size > 1]


class Typed:
    """A metadata value with its type id and its bytes, for what `encode` does not choose by itself."""

    def __init__(self, type_id: int, data: bytes) -> None:
        self.type_id, self.data = type_id, data


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def encode(value: Any) -> tuple[int, bytes]:
    match value:
        case Typed():
            return value.type_id, value.data
        case bool():
            return 7, bytes([value])
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, text(value)
        case np.ndarray():
            type_id = {"uint8": 0, "int32": 5, "float32": 6, "bool": 7, "uint64": 10, "float64": 12}[value.dtype.name]
            return 9, struct.pack("<IQ", type_id, value.size) + value.tobytes()
        case list():
            items = [encode(item) for item in value]
            return 9, struct.pack("<IQ", items[0][0], len(items)) + b"".join(data for _, data in items)
    raise TypeError(type(value))


def header(version: int, num_tensors: int, num_metadata: int) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, num_tensors, num_metadata)


def tensor_info(name: str, shape: tuple[int, ...], type_id: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], type_id, offset)


def gguf_bytes(
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray | tuple[str, tuple[int, ...], bytes]] | None = None,
    *,
    version: int = 3,
) -> bytes:
    """A whole file. A tensor is a float32 array, or (type, shape, data)."""
    alignment = metadata.get("general.alignment", 32)
    alignment = 32 if isinstance(alignment, Typed) else alignment
    infos, data = b"", b""
    for name, tensor in (tensors or {}).items():
        if isinstance(tensor, np.ndarray):
            tensor = ("F32", tensor.shape, np.ascontiguousarray(tensor, np.float32).tobytes())
        type_name, shape, raw = tensor
        infos += tensor_info(name, shape, TYPES[type_name][0], len(data))
        data += raw + bytes(-len(raw) % alignment)
    fields = b""
    for key, value in metadata.items():
        type_id, raw = encode(value)
        fields += text(key) + struct.pack("<I", type_id) + raw
    head = header(version, len(tensors or {}), len(metadata)) + fields + infos
    return head + bytes(-len(head) % alignment) + data


def write(folder: Path, *args: Any, name: str = "model.gguf", **kwargs: Any) -> Path:
    path = folder / name
    path.write_bytes(gguf_bytes(*args, **kwargs))
    return path


def random_blocks(type_name: str, num_values: int, seed: int = 0) -> bytes:
    """Any bytes are valid blocks; their scales include infinities, NaN and subnormals."""
    _, size, num_bytes = TYPES[type_name]
    return np.random.default_rng(seed).bytes(num_values // size * num_bytes)


# ------------------------------------------------------------------------------------------------------------ parsing


@pytest.mark.parametrize("version", [2, 3])
def test_every_metadata_type_is_read(tmp_path, version):
    metadata = {
        "u8": Typed(0, b"\xff"),
        "i8": Typed(1, b"\xff"),
        "u16": Typed(2, b"\xfe\xff"),
        "i16": Typed(3, b"\xfe\xff"),
        "u32": 7,
        "i32": Typed(5, struct.pack("<i", -7)),
        "f32": 0.5,
        "yes": True,
        "no": False,
        "text": "größe",
        "u64": Typed(10, struct.pack("<Q", 2**63)),
        "i64": Typed(11, struct.pack("<q", -(2**62))),
        "f64": Typed(12, struct.pack("<d", 0.1)),
        "strings": ["a", "", "▁b"],
        "numbers": np.array([3, -1], np.int32),
        "flags": np.array([True, False]),
        "nested": [np.array([1.5], np.float32), np.array([], np.float32)],
    }
    file = GgufFile(write(tmp_path, metadata, version=version))
    got = file.metadata
    assert file.version == version
    scalars = {key: got[key] for key in ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "u64", "i64", "f64")}
    assert scalars == {
        "u8": 255, "i8": -1, "u16": 65534, "i16": -2, "u32": 7, "i32": -7, "f32": 0.5,
        "u64": 2**63, "i64": -(2**62), "f64": 0.1,
    }  # fmt: skip
    assert (got["yes"], got["no"], got["text"], got["strings"]) == (True, False, "größe", ["a", "", "▁b"])
    assert got["numbers"].dtype == np.int32 and got["numbers"].tolist() == [3, -1]
    assert got["flags"].dtype == np.bool_ and got["flags"].tolist() == [True, False]
    assert [item.tolist() for item in got["nested"]] == [[1.5], []]


@pytest.mark.parametrize("alignment", [8, 32, 64])
def test_tensors_keep_order_shape_type_and_bytes(tmp_path, alignment):
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.float32(4) * np.ones(1, np.float32)
    blocks = random_blocks("Q8_0", 64)
    tensors = {"b": b, "q": ("Q8_0", (2, 32), blocks), "a": a}
    file = GgufFile(write(tmp_path, {"general.alignment": alignment}, tensors))
    assert list(file.tensors) == ["b", "q", "a"]
    assert (file.tensors["q"].shape, file.tensors["q"].type, file.tensors["q"].num_bytes) == ((2, 32), "Q8_0", 68)
    assert file.tensors["q"].data.tobytes() == blocks and not file.tensors["q"].data.flags.writeable
    np.testing.assert_array_equal(file.tensors["a"].dequantize(), a)
    np.testing.assert_array_equal(file.tensors["b"].dequantize(), b)


def test_closing_unmaps_the_file_once_no_tensor_is_held(tmp_path):
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    path = write(tmp_path, {}, {"a": np.ones(4)})
    with GgufFile(path) as file:
        tensor = file.tensors["a"]
        assert str(path) in maps.read_text()
    assert file.tensors == {}
    assert tensor.dequantize().tolist() == [1, 1, 1, 1]
    del tensor
    assert str(path) not in maps.read_text()


def test_dropping_the_object_unmaps_the_file(tmp_path):
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    path = write(tmp_path, {"n": np.arange(3, dtype=np.int32)}, {"a": np.ones(4)})
    metadata = GgufFile(path).metadata
    assert metadata["n"].tolist() == [0, 1, 2]
    assert str(path) not in maps.read_text()


# -------------------------------------------------------------------------------------------------------- dequantize


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "F64", "I8", "I16", "I32"])
def test_plain_types_become_float32(tmp_path, type_name):
    values = np.array([[0, 1, -3], [100, -128, 64]], np.float32)
    if type_name == "BF16":
        raw = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        dtype = {"F": "f", "I": "i"}[type_name[0]] + str(int(type_name[1:]) // 8)
        raw = values.astype(dtype).tobytes()
    file = GgufFile(write(tmp_path, {}, {"t": (type_name, (2, 3), raw)}))
    np.testing.assert_array_equal(file.tensors["t"].dequantize(), values)


def test_a_q8_0_block_is_its_scale_times_its_integers(tmp_path):
    integers = np.arange(-16, 16, dtype=np.int8)
    raw = np.float16(0.25).tobytes() + integers.tobytes()
    file = GgufFile(write(tmp_path, {}, {"t": ("Q8_0", (32,), raw)}))
    np.testing.assert_array_equal(file.tensors["t"].dequantize(), integers * np.float32(0.25))


@pytest.mark.parametrize("type_name", [*QUANTIZED, "F32", "F16", "BF16"])
def test_dequantized_values_equal_the_reference_bit_for_bit(tmp_path, type_name):
    oracle = pytest.importorskip("gguf")
    shape = (7, 2 * 256)
    raw = random_blocks(type_name, math.prod(shape))
    tensor = GgufFile(write(tmp_path, {}, {"t": (type_name, shape, raw)})).tensors["t"]
    rows = np.frombuffer(raw, np.uint8).reshape(7, -1)
    with np.errstate(all="ignore"):
        expected = oracle.dequantize(rows, oracle.GGMLQuantizationType[type_name]).reshape(shape)
    np.testing.assert_array_equal(tensor.dequantize(), expected)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16"])
def test_quantized_values_come_back_within_the_step_of_their_type(tmp_path, type_name):
    oracle = pytest.importorskip("gguf")
    values = np.random.default_rng(1).uniform(-1, 1, (4, 64)).astype(np.float32)
    raw = oracle.quantize(values, oracle.GGMLQuantizationType[type_name]).tobytes()
    tensor = GgufFile(write(tmp_path, {}, {"t": (type_name, values.shape, raw)})).tensors["t"]
    step = {"Q4_0": 2 / 15, "Q4_1": 2 / 15, "Q5_0": 2 / 31, "Q5_1": 2 / 31, "Q8_0": 2 / 255, "BF16": 2**-8}[type_name]
    assert np.abs(tensor.dequantize() - values).max() <= step * 1.1


@pytest.mark.parametrize("type_name", ["F32", "Q4_1", "Q6_K"])
def test_rows_equal_the_same_rows_of_the_whole(tmp_path, type_name):
    raw = random_blocks(type_name, 9 * 2 * 256)
    tensor = GgufFile(write(tmp_path, {}, {"t": (type_name, (9, 2, 256), raw)})).tensors["t"]
    whole = tensor.dequantize()
    for rows in (slice(2, 5), slice(None), slice(-1, None), slice(4, 4), slice(5, 2)):
        np.testing.assert_array_equal(tensor.dequantize(rows=rows), whole[rows])


def test_a_tensor_longer_than_a_chunk_is_dequantized_whole(tmp_path):
    num_values = 3 * 65536 + 32
    raw = random_blocks("Q4_0", num_values)
    tensor = GgufFile(write(tmp_path, {}, {"t": ("Q4_0", (num_values // 32, 32), raw)})).tensors["t"]
    by_rows = [tensor.dequantize(rows=slice(row, row + 1000)) for row in range(0, num_values // 32, 1000)]
    np.testing.assert_array_equal(tensor.dequantize(), np.concatenate(by_rows))


def test_out_is_written_and_returned(tmp_path):
    tensor = GgufFile(write(tmp_path, {}, {"t": np.arange(6).reshape(2, 3)})).tensors["t"]
    out = np.empty((2, 3), np.float32)
    assert tensor.dequantize(out) is out
    assert out.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "out", [np.empty((3, 2), np.float32), np.empty((2, 3), np.float64), np.empty((3, 2), np.float32).T]
)
def test_an_out_that_does_not_fit_is_refused(tmp_path, out):
    tensor = GgufFile(write(tmp_path, {}, {"t": np.zeros((2, 3))})).tensors["t"]
    with pytest.raises(InvalidArgument, match="C-contiguous float32 array of shape"):
        tensor.dequantize(out)


@pytest.mark.parametrize(("shape", "rows"), [((4,), slice(0, 2)), ((4, 1), slice(0, 4, 2))])
def test_rows_that_do_not_fit_are_refused(tmp_path, shape, rows):
    tensor = GgufFile(write(tmp_path, {}, {"t": np.zeros(shape)})).tensors["t"]
    with pytest.raises(InvalidArgument, match="needs two dimensions and step 1"):
        tensor.dequantize(rows=rows)


@pytest.mark.parametrize("type_name", ["Q4_K", "IQ4_XS", "BF16"])
def test_temporaries_stay_small(tmp_path, type_name):
    shape = (2048, 1024)
    tensor = GgufFile(write(tmp_path, {}, {"t": (type_name, shape, random_blocks(type_name, 2**21))})).tensors["t"]
    out = np.empty(shape, np.float32)
    tracemalloc.start()
    tensor.dequantize(out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20


# --------------------------------------------------------------------------------------------------------- split files


def write_split(folder: Path) -> list[Path]:
    paths = []
    for number in range(3):
        split = {"split.no": number, "split.count": 3, "split.tensors.count": 3}
        metadata = {"general.architecture": "llama", **split} if number == 0 else split
        name = f"m-{number + 1:05}-of-00003.gguf"
        paths.append(write(folder, metadata, {f"t{number}": np.full(2, number)}, name=name))
    return paths


@pytest.mark.parametrize("part", [0, 1, 2])
def test_any_part_opens_all_parts(tmp_path, part):
    paths = write_split(tmp_path)
    file = GgufFile(paths[part])
    assert file.paths == paths
    assert file.metadata["general.architecture"] == "llama"
    assert {name: tensor.dequantize().tolist() for name, tensor in file.tensors.items()} == {
        "t0": [0, 0],
        "t1": [1, 1],
        "t2": [2, 2],
    }


def test_a_missing_part_is_named(tmp_path):
    paths = write_split(tmp_path)
    paths[1].unlink()
    with pytest.raises(ArtifactNotFound, match="m-00002-of-00003.gguf"):
        GgufFile(paths[0])


def test_a_renamed_part_says_how_it_must_be_called(tmp_path):
    path = write_split(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(InvalidArgument, match="-00001-of-00003.gguf"):
        GgufFile(path)


def test_parts_in_the_wrong_order_are_refused(tmp_path):
    paths = write_split(tmp_path)
    first = paths[1].read_bytes()
    paths[1].write_bytes(paths[2].read_bytes())
    paths[2].write_bytes(first)
    with pytest.raises(InvalidArgument, match="says it is part 3 of 3, where 2 of 3 belongs"):
        GgufFile(paths[0])


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    paths = write_split(tmp_path)
    write(tmp_path, {"split.no": 2, "split.count": 3}, {"t0": np.zeros(2)}, name=paths[2].name)
    with pytest.raises(InvalidArgument, match="tensor 't0' is also in an earlier part"):
        GgufFile(paths[0])


def test_a_part_with_too_few_tensors_is_refused(tmp_path):
    paths = write_split(tmp_path)
    write(tmp_path, {"split.no": 2, "split.count": 3}, name=paths[2].name)
    with pytest.raises(InvalidArgument, match=r"split.tensors.count is 3 but the parts have 2"):
        GgufFile(paths[0])


# --------------------------------------------------------------------------------------------------------- broken files

HUGE = struct.pack("<Q", 2**62)

BROKEN = {
    "empty": (b"", "is empty"),
    "short": (b"GG", "truncated"),
    "magic": (b"GGML" + bytes(60), "not a GGUF file"),
    "version 1": (header(1, 0, 0), "version 1 is not supported"),
    "version 4": (header(4, 0, 0), "version 4 is not supported"),
    "big-endian": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "version 3 in big-endian"),
    "no counts": (header(3, 0, 0)[:20], "truncated"),
    "tensor count": (header(3, 2**60, 0), "tensor count"),
    "metadata count": (header(3, 0, 2**60) + bytes(64), "metadata count"),
    "key length": (header(3, 0, 1) + HUGE + bytes(64), "length of a metadata key"),
    "key bytes": (header(3, 0, 1) + text(b"\xff\xfe") + bytes(64), "not UTF-8"),
    "string length": (header(3, 0, 1) + text("k") + struct.pack("<I", 8) + HUGE + bytes(64), "length of metadata 'k'"),
    "string bytes": (gguf_bytes({"k": Typed(8, text(b"\x80"))}), "not UTF-8"),
    "metadata type": (gguf_bytes({"k": Typed(13, bytes(8))}), "unknown metadata type 13"),
    "item type": (gguf_bytes({"k": Typed(9, struct.pack("<IQ", 99, 1) + bytes(8))}), "unknown metadata type 99"),
    "array length": (gguf_bytes({"k": Typed(9, struct.pack("<I", 5) + HUGE)}), "length of metadata 'k'"),
    "strings length": (gguf_bytes({"k": Typed(9, struct.pack("<I", 8) + HUGE)}), "length of metadata 'k'"),
    "string in array": (gguf_bytes({"k": Typed(9, struct.pack("<IQ", 8, 1) + HUGE)}), "a string of metadata 'k'"),
    "text in array": (gguf_bytes({"k": [Typed(8, text(b"\xff"))]}), "not UTF-8"),
    "cut array": (gguf_bytes({"k": ["abc", "de"]})[:50], "metadata 'k'"),
    "nesting": (gguf_bytes({"k": Typed(9, struct.pack("<IQ", 9, 1) * 500)}), "nests arrays"),
    "boolean": (gguf_bytes({"k": Typed(7, b"\x02")}), "neither 0 nor 1"),
    "key twice": (header(3, 0, 2) + (text("k") + struct.pack("<IB", 0, 1)) * 2, "'k' occurs twice"),
    "alignment 0": (gguf_bytes({"general.alignment": Typed(4, bytes(4))}), "general.alignment 0"),
    "alignment 24": (gguf_bytes({"general.alignment": 24}), "general.alignment 24"),
    "alignment 2**31": (gguf_bytes({"general.alignment": Typed(4, struct.pack("<I", 2**31))}), "general.alignment"),
    "alignment text": (gguf_bytes({"general.alignment": Typed(8, text("32"))}), "general.alignment '32'"),
    "tensor twice": (header(3, 2, 0) + tensor_info("t", (1,), 0, 0) * 2 + bytes(64), "'t' occurs twice"),
    "dimensions": (header(3, 1, 0) + tensor_info("t", (1,) * 5, 0, 0) + bytes(64), "5 dimensions"),
    "no elements": (header(3, 1, 0) + tensor_info("t", (2**62, 0), 0, 0) + bytes(64), "shape"),
    "size": (header(3, 1, 0) + tensor_info("t", (2**63, 2**63), 0, 0) + bytes(64), "the file ends at"),
    "cut data": (gguf_bytes({}, {"t": np.zeros(8)})[:-8], "the file ends at"),
    "offset": (header(3, 1, 0) + tensor_info("t", (1,), 0, 2**63) + bytes(64), "the file ends at"),
    "offset unaligned": (header(3, 1, 0) + tensor_info("t", (1,), 0, 4) + bytes(64), "no multiple of 32"),
    "row": (header(3, 1, 0) + tensor_info("t", (32, 16), 2, 0) + bytes(600), "rows are no multiple of the 32 values"),
    "overlap": (
        header(3, 2, 0) + tensor_info("a", (64,), 0, 0) + tensor_info("b", (64,), 0, 128) + bytes(999),
        "'a' and 'b' overlap",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_with_its_name_and_the_byte(tmp_path, case):
    data, message = BROKEN[case]
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(InvalidArgument) as caught:
        GgufFile(path)
    assert message in caught.value.message
    assert str(path) in caught.value.message and "at byte" in caught.value.message


@pytest.mark.parametrize(("type_id", "name"), [(16, "IQ2_XXS"), (39, "MXFP4"), (4, "unknown"), (77, "unknown")])
def test_an_unsupported_type_is_refused_with_the_list_of_supported_ones(tmp_path, type_id, name):
    path = tmp_path / "model.gguf"
    path.write_bytes(header(3, 1, 0) + tensor_info("blk.0.x", (256,), type_id, 0) + bytes(999))
    with pytest.raises(UnsupportedFeature) as caught:
        GgufFile(path)
    assert f"'blk.0.x' has type {name} (id {type_id})" in caught.value.message
    assert all(supported in caught.value.message for supported in SUPPORTED_TYPES)


def test_a_path_that_is_no_file_is_refused(tmp_path):
    with pytest.raises(ArtifactNotFound, match="no such file"):
        GgufFile(tmp_path / "absent.gguf")
    with pytest.raises(InvalidArgument, match="not a regular file"):
        GgufFile(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_is_refused_without_waiting_for_a_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidArgument, match="not a regular file"):
        GgufFile(tmp_path / "pipe")


def small_model() -> bytes:
    metadata = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "flag": True,
        "tokens": ["<s>", "▁a", "bc"],
        "scores": np.array([0.0, -1.0, -2.0], np.float32),
        "nested": [["x"], ["y", "z"]],
    }
    tensors = {
        "a": np.arange(12).reshape(3, 4),
        "b": ("Q4_K", (2, 256), random_blocks("Q4_K", 512)),
        "c": ("Q8_0", (1, 2, 32), random_blocks("Q8_0", 64)),
    }
    return gguf_bytes(metadata, tensors)


def open_and_read(path: Path) -> None:
    with GgufFile(path) as file:
        for tensor in file.tensors.values():
            tensor.dequantize()


def test_every_truncation_is_refused(tmp_path):
    data = small_model()
    end = len(data) - 28  # the padding after the last tensor is no loss
    path = tmp_path / "cut.gguf"
    for length in range(0, end, 3):
        path.write_bytes(data[:length])
        with pytest.raises(InvalidArgument, match=r"cut\.gguf"):
            open_and_read(path)


def test_flipped_header_bytes_are_refused_or_parsed_and_allocate_little(tmp_path):
    data = small_model()
    header_bytes = len(data) - 12 * 4 - 16 - 288 - 68 - 28
    rng = np.random.default_rng(0)
    path = tmp_path / "flipped.gguf"
    tracemalloc.start()
    for _ in range(1500):
        flipped = bytearray(data)
        for position in rng.integers(0, header_bytes, rng.integers(1, 4)):
            flipped[position] = rng.choice([0, 1, 0x7F, 0xFF, flipped[position] ^ (1 << rng.integers(8))])
        path.write_bytes(flipped)
        try:
            open_and_read(path)
        except (InvalidArgument, UnsupportedFeature) as exc:
            assert str(path) in exc.message
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


# ------------------------------------------------------------------------------------------------- Hugging Face terms

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, CONTEXT = 32, 48, 3, 4, 2, 8, 40, 64
EPS = 2.0**-17
TOKEN_IDS = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 0}


def decoder_metadata(architecture: str, **extra: Any) -> dict[str, Any]:
    fields = {
        "vocab_size": VOCAB,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": EPS,
        "rope.freq_base": 50000.0,
        **extra,
    }
    return {
        "general.architecture": architecture,
        "general.name": "tiny",
        **{f"{architecture}.{key}": value for key, value in fields.items() if value is not None},
        **TOKEN_IDS,
    }


def gpt2_metadata() -> dict[str, Any]:
    fields = {
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": 4 * HIDDEN,
        "attention.head_count": HEADS,
        "attention.layer_norm_epsilon": EPS,
    }
    return {
        "general.architecture": "gpt2",
        "general.name": "tiny",
        **{f"gpt2.{key}": value for key, value in fields.items()},
        **TOKEN_IDS,
    }


def embedding() -> dict[str, np.ndarray]:
    return {"token_embd.weight": np.zeros((VOCAB, HIDDEN))}


def config_of(folder: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> dict[str, Any]:
    with GgufFile(write(folder, metadata, embedding() if tensors is None else tensors)) as file:
        return hf_config(file.metadata, file.tensors)


def hf_model(architecture: str, *, tied: bool = False, biased: bool = False) -> Any:
    """A random transformers model that a GGUF file of `architecture` can hold."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    common = {
        "vocab_size": VOCAB,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": [2],
        "pad_token_id": 0,
    }
    decoder = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    }
    if architecture == "llama":
        config = transformers.LlamaConfig(**common, **decoder, attention_bias=biased, mlp_bias=biased)
    elif architecture == "qwen2":
        config = transformers.Qwen2Config(**common, **decoder)
    elif architecture == "qwen3":
        config = transformers.Qwen3Config(**common, **decoder, attention_bias=biased)
    elif architecture == "gemma2":
        config = transformers.Gemma2Config(**common, **decoder, query_pre_attn_scalar=HEAD_DIM, sliding_window=16)
    elif architecture == "gemma3":
        rope = {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
        decoder |= {"rope_parameters": rope}
        config = transformers.Gemma3TextConfig(**common, **decoder, query_pre_attn_scalar=HEAD_DIM, sliding_window=16)
    else:
        config = transformers.GPT2Config(
            **common, n_embd=HIDDEN, n_inner=4 * HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=CONTEXT,
            layer_norm_epsilon=EPS,
        )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def metadata_of(architecture: str) -> dict[str, Any]:
    if architecture == "gpt2":
        return gpt2_metadata()
    extra: dict[str, Any] = {"attention.sliding_window": 16} if architecture.startswith("gemma") else {}
    if architecture == "gemma3":
        extra |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    return decoder_metadata(architecture, **extra)


def converted(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """The state dict as llama.cpp's converter writes it, with names from the reference package's own table."""
    oracle = pytest.importorskip("gguf")
    arch = next(key for key, name in oracle.MODEL_ARCH_NAMES.items() if name == architecture)
    names = oracle.get_tensor_name_map(arch, LAYERS)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if architecture == "llama" and ".self_attn.q_proj." in name:
            values = permuted(values, HEADS)
        elif architecture == "llama" and ".self_attn.k_proj." in name:
            values = permuted(values, KV_HEADS)
        elif architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        elif architecture == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            values = values.T
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    return tensors


def permuted(values: np.ndarray, num_heads: int) -> np.ndarray:
    """From rotary pairs half a head apart to pairs side by side."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


CHECKPOINTS = [
    ("llama", {}),
    ("llama", {"tied": True}),
    ("llama", {"biased": True}),
    ("qwen2", {}),
    ("qwen3", {"tied": True}),
    ("qwen3", {"biased": True}),
    ("gemma2", {"tied": True}),
    ("gemma3", {"tied": True}),
    ("gpt2", {"tied": True}),
    ("gpt2", {}),
]


@pytest.mark.parametrize(("architecture", "options"), CHECKPOINTS)
def test_a_converted_checkpoint_comes_back_in_names_values_and_config(tmp_path, architecture, options):
    model = hf_model(architecture, **options)
    path = write(tmp_path, metadata_of(architecture), converted(model, architecture))
    expected = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    with GgufFile(path) as file:
        config = hf_config(file.metadata, file.tensors)
        found = {}
        for tensor in hf_tensors(file):
            found[tensor.name] = tensor.load()
            assert found[tensor.name].shape == tensor.shape and found[tensor.name].flags.c_contiguous
    assert found.keys() == expected.keys()
    for name, values in found.items():
        # (w + 1) - 1 is rounded once.
        tolerance = 4e-7 if architecture.startswith("gemma") and name.endswith("norm.weight") else 0
        np.testing.assert_allclose(values, expected[name], rtol=0, atol=tolerance, err_msg=name)
    assert config["architectures"] == [type(model).__name__]
    # The config class completes what the file does not say; what it completes must be the checkpoint's as well.
    ours, theirs = type(model.config)(**config).to_dict(), model.config.to_dict()
    ignored = {"architectures", "dtype", "_name_or_path"}
    assert {k: v for k, v in ours.items() if k not in ignored} == {k: v for k, v in theirs.items() if k not in ignored}


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_parameters_equal_what_transformers_reads_from_the_same_file(tmp_path, architecture):
    transformers = pytest.importorskip("transformers")
    model = hf_model(architecture, tied=architecture in ("gemma2", "gemma3", "gpt2"))
    path = write(tmp_path, metadata_of(architecture), converted(model, architecture))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, config=model.config)
    expected = {name: tensor.float().numpy() for name, tensor in theirs.state_dict().items()}
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    with GgufFile(path) as file:
        found = {tensor.name: tensor.load() for tensor in hf_tensors(file)}
    assert found.keys() == expected.keys()
    for name, values in found.items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)


@pytest.mark.parametrize(
    ("architecture", "unread"),
    [
        # What transformers leaves at its class's default, whatever the file says.
        ("llama", set()),
        ("qwen2", {"head_dim"}),
        ("qwen3", {"head_dim"}),
        ("gemma2", {"query_pre_attn_scalar"}),
        ("gemma3", {"query_pre_attn_scalar", "rope_parameters"}),
    ],
)
def test_the_config_equals_what_transformers_reads_from_the_same_file(tmp_path, architecture, unread):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    config = config_of(tmp_path, metadata_of(architecture))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="model.gguf").to_dict()
    assert config.pop("architectures") and config.pop("eos_token_id") == [theirs["eos_token_id"]]
    assert {key: value for key, value in config.items() if key not in unread} == {
        key: theirs[key] for key in config if key not in unread
    }


def test_loading_into_out_gives_the_same_values(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "token_embd.weight": rng.normal(size=(VOCAB, HIDDEN)),
        "blk.0.attn_q.weight": rng.normal(size=(HIDDEN, HIDDEN)),
        "blk.0.attn_norm.weight": rng.normal(size=HIDDEN),
    }
    for architecture in ("llama", "gemma3"):
        with GgufFile(write(tmp_path, decoder_metadata(architecture), tensors)) as file:
            for tensor in hf_tensors(file):
                out = np.full(tensor.shape, np.nan, np.float32)
                assert tensor.load(out) is out
                np.testing.assert_array_equal(out, tensor.load())
                with pytest.raises(InvalidArgument, match="out for"):
                    tensor.load(np.empty((1, 1), np.float32))


@pytest.mark.parametrize(
    "name",
    [
        "blk.3.attn_q.weight",
        "blk.0.attn_qkv.weight",
        "blk.0.ffn_gate_exps.weight",
        "blk.00.attn_q.weight",
        "attn_q.weight",
        "rope_factors_long.weight",
        "blk.0.attn_q.scale",
    ],
)
def test_tensors_without_a_use_are_reported_by_name(tmp_path, name):
    file = GgufFile(write(tmp_path, decoder_metadata("llama"), embedding() | {name: np.zeros((HIDDEN, HIDDEN))}))
    with pytest.raises(UnsupportedFeature) as caught:
        hf_tensors(file)
    assert name in caught.value.message
    assert caught.value.details == {"tensors": [name]}


def test_rows_that_do_not_divide_into_heads_are_refused(tmp_path):
    tensors = embedding() | {"blk.0.attn_q.weight": np.zeros((HEADS * 2 + 1, HIDDEN))}
    file = GgufFile(write(tmp_path, decoder_metadata("llama"), tensors))
    with pytest.raises(InvalidArgument, match="does not divide into 4 heads"):
        hf_tensors(file)


def test_an_unknown_architecture_is_refused_with_the_list_of_supported_ones(tmp_path):
    with pytest.raises(UnsupportedFeature) as caught:
        config_of(tmp_path, decoder_metadata("mamba"))
    assert all(name in caught.value.message for name in ("mamba", *SUPPORTED_ARCHITECTURES))


@pytest.mark.parametrize(
    "key", ["embedding_length", "block_count", "attention.layer_norm_rms_epsilon", "attention.head_count"]
)
def test_a_missing_key_is_named(tmp_path, key):
    with pytest.raises(InvalidArgument, match=f"llama.{key} is missing"):
        config_of(tmp_path, decoder_metadata("llama", **{key: None}))


@pytest.mark.parametrize("value", ["32", 0, 2.5, True])
def test_a_size_of_the_wrong_type_is_refused(tmp_path, value):
    with pytest.raises(InvalidArgument, match=r"llama\.embedding_length .* is not an integer of at least 1"):
        config_of(tmp_path, decoder_metadata("llama", embedding_length=value))


def test_a_file_without_an_embedding_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="token_embd.weight"):
        config_of(tmp_path, decoder_metadata("llama"), {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("attention.causal", False),
        ("logit_scale", 0.5),
        ("rope.dimension_count", 4),
        ("attention.value_length", 4),
        ("rope.scaling.type", "longrope"),
        ("feed_forward_length", np.array([48, 48, 64], np.int32)),
    ],
)
def test_a_variation_of_the_architecture_is_refused_by_its_key(tmp_path, key, value):
    with pytest.raises(UnsupportedFeature, match=f"llama.{key}"):
        config_of(tmp_path, decoder_metadata("llama", **{key: value}))


def test_equal_values_for_every_layer_are_one_value(tmp_path):
    metadata = decoder_metadata("llama", feed_forward_length=np.array([48, 48, 48], np.int32))
    assert config_of(tmp_path, metadata)["intermediate_size"] == 48


def test_a_llama_file_with_a_window_is_mistral(tmp_path):
    config = config_of(tmp_path, decoder_metadata("llama", **{"attention.sliding_window": 16}))
    assert (config["architectures"], config["model_type"]) == (["MistralForCausalLM"], "mistral")
    assert config["sliding_window"] == 16


def test_a_window_is_refused_where_the_model_has_none(tmp_path):
    with pytest.raises(UnsupportedFeature, match=r"qwen2\.attention\.sliding_window 16"):
        config_of(tmp_path, decoder_metadata("qwen2", **{"attention.sliding_window": 16}))


def test_the_head_size_defaults_to_its_share_of_the_hidden_size(tmp_path):
    metadata = decoder_metadata("llama", **{"attention.key_length": None, "attention.value_length": None})
    assert config_of(tmp_path, metadata)["head_dim"] == HIDDEN // HEADS


@pytest.mark.parametrize(
    ("architecture", "layers", "scalar"),
    [("gemma2", 42, 16), ("gemma2", 46, HIDDEN // HEADS), ("gemma3", 48, 16), ("gemma3", 62, HIDDEN // HEADS)],
)
def test_only_the_27b_gemmas_scale_queries_by_their_share_of_the_hidden_size(tmp_path, architecture, layers, scalar):
    sizes = {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 16}
    config = config_of(tmp_path, decoder_metadata(architecture, block_count=layers, **sizes))
    assert config["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"rope_type": "default"}),
        ({"rope.scaling.type": "none"}, {"rope_type": "default"}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 16.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT, "beta_fast": 16.0},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 1.0, "rope.scaling.attn_factor": 2.0},
            {
                "rope_type": "yarn",
                "factor": 1.0,
                "original_max_position_embeddings": CONTEXT,
                "attention_factor": 2.0,
            },
        ),
    ],
)
def test_rope_scaling_is_read(tmp_path, fields, expected):
    config = config_of(tmp_path, decoder_metadata("llama", **fields))
    assert config["rope_parameters"] == {"rope_theta": 50000.0} | expected


def llama3_factors(factor: float, high: float = 4.0) -> np.ndarray:
    """As the converter computes them, one frequency at a time."""
    factors = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi * 50000.0 ** (i / HEAD_DIM)
        if wavelength < 8192 / high:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (high - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_frequency_factors_become_rope_parameters(tmp_path, factor):
    tensors = embedding() | {"rope_freqs.weight": llama3_factors(factor)}
    path = write(tmp_path, decoder_metadata("llama"), tensors)
    with GgufFile(path) as file:
        assert hf_config(file.metadata, file.tensors)["rope_parameters"] == {
            "rope_type": "llama3",
            "rope_theta": 50000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        assert [tensor.name for tensor in hf_tensors(file)] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("factors", [np.array([1.0, 2.0, 3.0, 8.0]), np.ones(7)])
def test_other_frequency_factors_are_refused(tmp_path, factors):
    with pytest.raises(UnsupportedFeature, match=r"rope_freqs\.weight"):
        config_of(tmp_path, decoder_metadata("llama"), embedding() | {"rope_freqs.weight": factors})


def test_generation_defaults_list_every_end_once_with_the_end_of_sequence_first():
    metadata = {
        "tokenizer.ggml.eos_token_id": 9,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.eom_token_id": 9,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
    }
    assert generation_defaults(metadata) == {"eos_token_id": [9, 3], "bos_token_id": 1, "pad_token_id": 0}


def test_generation_defaults_hold_only_what_the_file_sets():
    assert generation_defaults({}) == {}
    assert generation_defaults({"general.sampling.temp": 0.5, "general.sampling.top_k": 20}) == {
        "temperature": 0.5,
        "top_k": 20,
        "do_sample": True,
    }


def test_a_token_id_that_is_no_number_is_refused():
    with pytest.raises(InvalidArgument, match="eos_token_id '2' is not a token id"):
        generation_defaults({"tokenizer.ggml.eos_token_id": "2"})


def test_neither_module_needs_torch():
    code = "import sys, openengine.core.gguf_models; sys.exit('torch' in sys.modules or 'gguf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_chunks_are_the_whole_tensor_range_by_range(tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    values = np.arange(10 * 64, dtype=np.float32).reshape(10, 64)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("x", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(path) as file:
        tensor = HfTensor("x", (10, 64), file.tensors["x"], _offset=-1.0)
        parts = [(rows, part.copy()) for rows, part in tensor.chunks(3 * 64)]
    assert [rows.stop - rows.start for rows, _ in parts] == [3, 3, 3, 1]
    np.testing.assert_array_equal(np.concatenate([part for _, part in parts]), values - 1)
