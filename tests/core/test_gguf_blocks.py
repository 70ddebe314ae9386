"""Dequantized values of every GGUF type: those of the reference, whole, by rows, into place, in little memory."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from openengine.core.gguf import GgufFile
from openengine.errors import InvalidArgument
from tests.gguf_files import (
    QUANTIZED,
    random_blocks,
    write_gguf,
)


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "F64", "I8", "I16", "I32"])
def test_plain_types_become_float32(tmp_path, type_name):
    values = np.array([[0, 1, -3], [100, -128, 64]], np.float32)
    if type_name == "BF16":
        raw = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        dtype = {"F": "f", "I": "i"}[type_name[0]] + str(int(type_name[1:]) // 8)
        raw = values.astype(dtype).tobytes()
    file = GgufFile(write_gguf(tmp_path, {}, {"t": (type_name, (2, 3), raw)}))
    np.testing.assert_array_equal(file.tensors["t"].dequantize(), values)


def test_a_q8_0_block_is_its_scale_times_its_integers(tmp_path):
    integers = np.arange(-16, 16, dtype=np.int8)
    raw = np.float16(0.25).tobytes() + integers.tobytes()
    file = GgufFile(write_gguf(tmp_path, {}, {"t": ("Q8_0", (32,), raw)}))
    np.testing.assert_array_equal(file.tensors["t"].dequantize(), integers * np.float32(0.25))


@pytest.mark.parametrize("type_name", [*QUANTIZED, "F32", "F16", "BF16"])
def test_dequantized_values_equal_the_reference_bit_for_bit(tmp_path, type_name):
    oracle = pytest.importorskip("gguf")
    shape = (7, 2 * 256)
    raw = random_blocks(type_name, math.prod(shape))
    tensor = GgufFile(write_gguf(tmp_path, {}, {"t": (type_name, shape, raw)})).tensors["t"]
    rows = np.frombuffer(raw, np.uint8).reshape(7, -1)
    with np.errstate(all="ignore"):
        expected = oracle.dequantize(rows, oracle.GGMLQuantizationType[type_name]).reshape(shape)
    np.testing.assert_array_equal(tensor.dequantize(), expected)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16"])
def test_quantized_values_come_back_within_the_step_of_their_type(tmp_path, type_name):
    oracle = pytest.importorskip("gguf")
    values = np.random.default_rng(1).uniform(-1, 1, (4, 64)).astype(np.float32)
    raw = oracle.quantize(values, oracle.GGMLQuantizationType[type_name]).tobytes()
    tensor = GgufFile(write_gguf(tmp_path, {}, {"t": (type_name, values.shape, raw)})).tensors["t"]
    step = {"Q4_0": 2 / 15, "Q4_1": 2 / 15, "Q5_0": 2 / 31, "Q5_1": 2 / 31, "Q8_0": 2 / 255, "BF16": 2**-8}[type_name]
    assert np.abs(tensor.dequantize() - values).max() <= step * 1.1


@pytest.mark.parametrize("type_name", ["F32", "Q4_1", "Q6_K"])
def test_rows_equal_the_same_rows_of_the_whole(tmp_path, type_name):
    raw = random_blocks(type_name, 9 * 2 * 256)
    tensor = GgufFile(write_gguf(tmp_path, {}, {"t": (type_name, (9, 2, 256), raw)})).tensors["t"]
    whole = tensor.dequantize()
    for rows in (slice(2, 5), slice(None), slice(-1, None), slice(4, 4), slice(5, 2)):
        np.testing.assert_array_equal(tensor.dequantize(rows=rows), whole[rows])


def test_a_tensor_longer_than_a_chunk_is_dequantized_whole(tmp_path):
    num_values = 3 * 65536 + 32
    raw = random_blocks("Q4_0", num_values)
    tensor = GgufFile(write_gguf(tmp_path, {}, {"t": ("Q4_0", (num_values // 32, 32), raw)})).tensors["t"]
    by_rows = [tensor.dequantize(rows=slice(row, row + 1000)) for row in range(0, num_values // 32, 1000)]
    np.testing.assert_array_equal(tensor.dequantize(), np.concatenate(by_rows))


def test_out_is_written_and_returned(tmp_path):
    tensor = GgufFile(write_gguf(tmp_path, {}, {"t": np.arange(6).reshape(2, 3)})).tensors["t"]
    out = np.empty((2, 3), np.float32)
    assert tensor.dequantize(out) is out
    assert out.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "out", [np.empty((3, 2), np.float32), np.empty((2, 3), np.float64), np.empty((3, 2), np.float32).T]
)
def test_an_out_that_does_not_fit_is_refused(tmp_path, out):
    tensor = GgufFile(write_gguf(tmp_path, {}, {"t": np.zeros((2, 3))})).tensors["t"]
    with pytest.raises(InvalidArgument, match="C-contiguous float32 array of shape"):
        tensor.dequantize(out)


@pytest.mark.parametrize(("shape", "rows"), [((4,), slice(0, 2)), ((4, 1), slice(0, 4, 2))])
def test_rows_that_do_not_fit_are_refused(tmp_path, shape, rows):
    tensor = GgufFile(write_gguf(tmp_path, {}, {"t": np.zeros(shape)})).tensors["t"]
    with pytest.raises(InvalidArgument, match="needs two dimensions and step 1"):
        tensor.dequantize(rows=rows)


@pytest.mark.parametrize("type_name", ["Q4_K", "IQ4_XS", "BF16"])
def test_dequantizing_into_out_allocates_little(tmp_path, type_name):
    shape = (2048, 1024)
    tensor = GgufFile(write_gguf(tmp_path, {}, {"t": (type_name, shape, random_blocks(type_name, 2**21))})).tensors["t"]
    out = np.empty(shape, np.float32)
    tracemalloc.start()
    tensor.dequantize(out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20
