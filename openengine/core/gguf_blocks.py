"""The block formats of ggml: how a GGUF tensor's bytes become float32 values. Numpy only.

A format is a packed record of one block and a function from records [n] to values [n, size]. The layouts are facts
of ggml's `ggml-common.h`. Values are computed in the order of its reference code (the block's scale times the
sub-block's, times the integer, then plus or minus the minimum), so that they agree with it bit for bit.

The arithmetic goes over a chunk in few passes that numpy can vectorize: integers are put together as bytes, widened
once, and scaled in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["FORMATS", "OTHER_TYPES", "BlockFormat", "decode_blocks"]

# 256 KiB of float32: a chunk's integers, scales and values stay in the second-level cache.
_CHUNK_VALUES = 1 << 16


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One ggml type: its id, the values in a block, a block's record, and its decoder."""

    type_id: int
    size: int
    record: np.dtype
    decode: Callable[[np.ndarray, np.ndarray], None]


def decode_blocks(block_format: BlockFormat, data: np.ndarray, out: np.ndarray) -> None:
    """Decode `data`, uint8 [num_blocks * record size], into the C-contiguous float32 `out` of as many values."""
    blocks = data.view(block_format.record)
    values = out.reshape(-1, block_format.size)
    step = _CHUNK_VALUES // block_format.size
    # A scale of infinity or NaN is the file's business: it comes out as such, without a warning.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            block_format.decode(blocks[start : start + step], values[start : start + step])


def _unpack(packed: np.ndarray, bits: int, width: int) -> np.ndarray:
    """Fields of `bits` bits, lowest first, of each `width` bytes: uint8 [n, m * width] -> [n, m, 8 / bits, width]."""
    num_fields = 8 // bits
    packed = packed.reshape(len(packed), -1, width)
    fields = np.empty((len(packed), packed.shape[1], num_fields, width), np.uint8)
    for field in range(num_fields):
        np.right_shift(packed, np.uint8(field * bits), out=fields[:, :, field])
    fields &= np.uint8((1 << bits) - 1)
    return fields


def _scale(out: np.ndarray, integers: np.ndarray, scales: np.ndarray, minima: np.ndarray | None = None) -> None:
    """out = integers * scales + minima, with one scale per equal share of a row: [n, size], [n, s], [n, s]."""
    out[...] = integers.reshape(out.shape)
    groups = out.reshape(*scales.shape, -1)
    groups *= scales[..., None]
    if minima is not None:
        groups += minima[..., None]


def _floats(blocks: np.ndarray, field: str) -> np.ndarray:
    return blocks[field].astype(np.float32)[:, None]  # [n, 1]


def _plain(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:, 0] = blocks


def _bf16(blocks: np.ndarray, out: np.ndarray) -> None:
    bits = out.view(np.uint32)[:, 0]
    bits[...] = blocks
    bits <<= 16


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    q = _unpack(blocks["qs"], 4, 16).view(np.int8)
    q -= 8
    _scale(out, q, _floats(blocks, "d"))


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _scale(out, _unpack(blocks["qs"], 4, 16), _floats(blocks, "d"), _floats(blocks, "m"))


def _five_bits(blocks: np.ndarray) -> np.ndarray:
    q = _unpack(blocks["qs"], 4, 16).reshape(-1, 32)
    q |= np.unpackbits(blocks["qh"], axis=1, bitorder="little") << np.uint8(4)
    return q


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    q = _five_bits(blocks).view(np.int8)
    q -= 16
    _scale(out, q, _floats(blocks, "d"))


def _q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _scale(out, _five_bits(blocks), _floats(blocks, "d"), _floats(blocks, "m"))


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _scale(out, blocks["qs"], _floats(blocks, "d"))


def _q2_k(blocks: np.ndarray, out: np.ndarray) -> None:
    scales = blocks["scales"]
    minima = _floats(blocks, "dmin") * (scales >> 4)
    _scale(out, _unpack(blocks["qs"], 2, 32), _floats(blocks, "d") * (scales & 15), -minima)


def _q3_k(blocks: np.ndarray, out: np.ndarray) -> None:
    n = len(blocks)
    scales = _unpack(blocks["scales_low"], 4, 8).reshape(n, 16)
    scales |= _unpack(blocks["scales_high"], 2, 4).reshape(n, 16) << np.uint8(4)
    # The mask's bit is set where the value has no offset of -4: two bits below it make a number from -4 to 3.
    q = _unpack(blocks["qs"], 2, 32).reshape(n, 256)
    q |= _unpack(blocks["hmask"], 1, 32).reshape(n, 256) << np.uint8(2)
    _scale(out, q.view(np.int8) - np.int8(4), _floats(blocks, "d") * (scales.view(np.int8) - np.int8(32)))


def _six_bit_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and negated minima of the 8 sub-blocks of Q4_K and Q5_K, float32 [n, 8].

    Bytes 0-3 and 4-7 hold the first four scales and minima in their low six bits, and in the other two the high bits
    of the last four, whose low nibbles are in bytes 8-11.
    """
    low_scales, low_minima, rest = np.split(blocks["scales"], 3, axis=1)
    scales = np.concatenate([low_scales & 63, (rest & 15) | ((low_scales >> 2) & 48)], axis=1)
    minima = np.concatenate([low_minima & 63, (rest >> 4) | ((low_minima >> 2) & 48)], axis=1)
    return _floats(blocks, "d") * scales, -(_floats(blocks, "dmin") * minima)


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    _scale(out, _unpack(blocks["qs"], 4, 32), *_six_bit_scales(blocks))


def _q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    q = _unpack(blocks["qs"], 4, 32).reshape(-1, 256)
    q |= _unpack(blocks["qh"], 1, 32).reshape(-1, 256) << np.uint8(4)
    _scale(out, q, *_six_bit_scales(blocks))


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    q = _unpack(blocks["ql"], 4, 64).reshape(-1, 256)
    q |= _unpack(blocks["qh"], 2, 32).reshape(-1, 256) << np.uint8(4)
    q = q.view(np.int8)
    q -= 32
    _scale(out, q, _floats(blocks, "d") * blocks["scales"])


# The non-linear 4-bit code of IQ4 (kvalues_iq4nl).
_IQ4_CODE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _iq4_nl(blocks: np.ndarray, out: np.ndarray) -> None:
    _scale(out, _IQ4_CODE[_unpack(blocks["qs"], 4, 16)], _floats(blocks, "d"))


def _iq4_xs(blocks: np.ndarray, out: np.ndarray) -> None:
    scales = _unpack(blocks["scales_low"], 4, 1).reshape(-1, 8)
    scales |= _unpack(blocks["scales_high"], 2, 1).reshape(-1, 8) << np.uint8(4)
    scales = _floats(blocks, "d") * (scales.view(np.int8) - np.int8(32))
    _scale(out, _IQ4_CODE[_unpack(blocks["qs"], 4, 16)], scales)


def _record(*fields: tuple[str, str] | tuple[str, str, int]) -> np.dtype:
    return np.dtype(list(fields))


_D, _M, _DMIN = ("d", "<f2"), ("m", "<f2"), ("dmin", "<f2")

FORMATS: Mapping[str, BlockFormat] = {
    "F32": BlockFormat(0, 1, np.dtype("<f4"), _plain),
    "F16": BlockFormat(1, 1, np.dtype("<f2"), _plain),
    "BF16": BlockFormat(30, 1, np.dtype("<u2"), _bf16),
    "F64": BlockFormat(28, 1, np.dtype("<f8"), _plain),
    "I8": BlockFormat(24, 1, np.dtype("i1"), _plain),
    "I16": BlockFormat(25, 1, np.dtype("<i2"), _plain),
    "I32": BlockFormat(26, 1, np.dtype("<i4"), _plain),
    "Q4_0": BlockFormat(2, 32, _record(_D, ("qs", "u1", 16)), _q4_0),
    "Q4_1": BlockFormat(3, 32, _record(_D, _M, ("qs", "u1", 16)), _q4_1),
    "Q5_0": BlockFormat(6, 32, _record(_D, ("qh", "u1", 4), ("qs", "u1", 16)), _q5_0),
    "Q5_1": BlockFormat(7, 32, _record(_D, _M, ("qh", "u1", 4), ("qs", "u1", 16)), _q5_1),
    "Q8_0": BlockFormat(8, 32, _record(_D, ("qs", "i1", 32)), _q8_0),
    "Q2_K": BlockFormat(10, 256, _record(("scales", "u1", 16), ("qs", "u1", 64), _D, _DMIN), _q2_k),
    "Q3_K": BlockFormat(
        11,
        256,
        _record(("hmask", "u1", 32), ("qs", "u1", 64), ("scales_low", "u1", 8), ("scales_high", "u1", 4), _D),
        _q3_k,
    ),
    "Q4_K": BlockFormat(12, 256, _record(_D, _DMIN, ("scales", "u1", 12), ("qs", "u1", 128)), _q4_k),
    "Q5_K": BlockFormat(13, 256, _record(_D, _DMIN, ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)), _q5_k),
    "Q6_K": BlockFormat(14, 256, _record(("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), _D), _q6_k),
    "IQ4_NL": BlockFormat(20, 32, _record(_D, ("qs", "u1", 16)), _iq4_nl),
    "IQ4_XS": BlockFormat(
        23, 256, _record(_D, ("scales_high", "u1", 2), ("scales_low", "u1", 4), ("qs", "u1", 128)), _iq4_xs
    ),
}

# Types that exist and are not read here, to name them in a refusal.
OTHER_TYPES: Mapping[int, str] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    27: "I64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
