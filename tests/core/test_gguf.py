"""GGUF files: parsing, parts, and broken files, which are refused with their name and the byte."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from openengine.core.gguf import SUPPORTED_TYPES, GgufFile
from openengine.errors import ArtifactNotFound, InvalidArgument, UnsupportedFeature
from tests.gguf_files import (
    Typed,
    gguf_bytes,
    header,
    random_blocks,
    tensor_info,
    text,
    write_gguf,
)

# ---- parsing ---------------------------------------------------------------------------------------


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
    file = GgufFile(write_gguf(tmp_path, metadata, version=version))
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
    file = GgufFile(write_gguf(tmp_path, {"general.alignment": alignment}, tensors))
    assert list(file.tensors) == ["b", "q", "a"]
    assert (file.tensors["q"].shape, file.tensors["q"].type, file.tensors["q"].num_bytes) == ((2, 32), "Q8_0", 68)
    assert file.tensors["q"].data.tobytes() == blocks and not file.tensors["q"].data.flags.writeable
    np.testing.assert_array_equal(file.tensors["a"].dequantize(), a)
    np.testing.assert_array_equal(file.tensors["b"].dequantize(), b)


def test_closing_unmaps_the_file_once_no_tensor_is_held(tmp_path):
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    path = write_gguf(tmp_path, {}, {"a": np.ones(4)})
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
    path = write_gguf(tmp_path, {"n": np.arange(3, dtype=np.int32)}, {"a": np.ones(4)})
    metadata = GgufFile(path).metadata
    assert metadata["n"].tolist() == [0, 1, 2]
    assert str(path) not in maps.read_text()


# ---- split files -----------------------------------------------------------------------------------


def write_split(folder: Path) -> list[Path]:
    paths = []
    for number in range(3):
        split = {"split.no": number, "split.count": 3, "split.tensors.count": 3}
        metadata = {"general.architecture": "llama", **split} if number == 0 else split
        name = f"m-{number + 1:05}-of-00003.gguf"
        paths.append(write_gguf(folder, metadata, {f"t{number}": np.full(2, number)}, name=name))
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
    write_gguf(tmp_path, {"split.no": 2, "split.count": 3}, {"t0": np.zeros(2)}, name=paths[2].name)
    with pytest.raises(InvalidArgument, match="tensor 't0' is also in an earlier part"):
        GgufFile(paths[0])


def test_a_part_with_too_few_tensors_is_refused(tmp_path):
    paths = write_split(tmp_path)
    write_gguf(tmp_path, {"split.no": 2, "split.count": 3}, name=paths[2].name)
    with pytest.raises(InvalidArgument, match=r"split.tensors.count is 3 but the parts have 2"):
        GgufFile(paths[0])


# ---- broken files ----------------------------------------------------------------------------------


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
