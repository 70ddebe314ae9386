"""Attention of encoders by the compiled kernels (`csrc/encoder_attention.cpp`); `TorchEncoderAttention` is its twin.

One native call per layer rotates and attends, straight from the rows of the fused projection.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_float, c_int32, c_int64, c_void_p

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from openengine.errors import UnsupportedFeature
from openengine.ops.batch import EncoderBatch
from openengine.ops.native import required_library

__all__ = ["NativeEncoderAttention"]

_BLOCK, _SMALL_BLOCK = 256, 64  # queries of a unit of work: multiples of a tile, the first is BLOCK of the source
_PADDING = 64  # entries around a distance bias that a tile may read though no query and key have that distance
_MAX_HEAD_DIM = 256


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("blocks", "q", "k", "v", "out", "cos", "sin", "bias", "workspace")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride", "bias_stride", "scratch_bytes")),
        *((name, c_int32) for name in ("num_blocks", "num_heads", "head_dim", "rotary_dim", "bias_middle")),
        *((name, c_int32) for name in ("window", "is_bfloat16", "num_threads")),
        ("scale", c_float),
    )


class NativeEncoderAttention:
    """The native kernels, for float32 and bfloat16 on a CPU. Its name says the instruction set too.

    What an item gets depends neither on the batch nor on the number of threads, to the last bit. `level` is for the
    tests: it names the instruction set, by default the best this CPU has.

    Raises UnsupportedFeature if the library or the level is absent or the dtype has no kernels.
    """

    def __init__(self, dtype: torch.dtype, *, level: str | None = None) -> None:
        library = required_library(dtype)
        self.name = f"native {level or library.levels[-1]}"
        self._plan = library.function("encoder_attention_plan", c_void_p, level=level)
        self._attend = library.function("encoder_attention", c_void_p, level=level)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._call = _Call(is_bfloat16=dtype == torch.bfloat16)

    @staticmethod
    def check(device: torch.device, *, head_dim: int | None) -> None:
        """Raise UnsupportedFeature for a device or a size without kernels; a size that is None is left out."""
        if device.type != "cpu":
            raise UnsupportedFeature(f"the native kernels run on CPUs, not on {device}; use kernels='torch'")
        if head_dim is not None and head_dim > _MAX_HEAD_DIM:
            raise UnsupportedFeature(
                f"head_dim {head_dim} is above {_MAX_HEAD_DIM}, the largest of the native kernels; use kernels='torch'"
            )

    def prepare(self, batch: EncoderBatch, windows: Sequence[int | None]) -> None:
        """Cut the items into blocks of queries, those of long items first."""
        lens = np.asarray(batch.lens)
        size = _BLOCK if 4 * np.sum(-(-lens // _BLOCK)) >= torch.get_num_threads() else _SMALL_BLOCK
        order = np.argsort(-lens, kind="stable")
        counts = -(-lens[order] // size)
        items = np.repeat(order, counts)
        firsts = size * (np.arange(len(items)) - np.repeat(np.cumsum(counts) - counts, counts))
        starts = np.cumsum(lens) - lens
        blocks = np.stack((starts[items], lens[items], firsts, np.minimum(lens[items] - firsts, size)), axis=1)
        batch.scratch["blocks"] = torch.from_numpy(blocks.astype(np.int32))
        batch.scratch["bias"] = None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: EncoderBatch,
        *,
        scale: float,
        window: int | None = None,
        distance_bias: Tensor | None = None,
        angles: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `EncoderAttention.forward`."""
        num_tokens, num_heads, head_dim = q.shape
        out = torch.empty(num_tokens, num_heads * head_dim, dtype=q.dtype)
        q, k, v, blocks = _joined(q), _joined(k), _joined(v), batch.scratch["blocks"]
        call = self._call
        call.q, call.k, call.v, call.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        call.q_stride, call.k_stride, call.v_stride = q.stride(0), k.stride(0), v.stride(0)
        call.blocks, call.num_blocks = blocks.data_ptr(), len(blocks)
        call.scale, call.window = scale, -1 if window is None else window
        call.bias = call.cos = call.sin = None
        if distance_bias is not None:
            bias = _reversed(distance_bias, batch)
            call.bias, call.bias_stride = bias.data_ptr(), bias.stride(0)
            call.bias_middle = distance_bias.shape[1] // 2 + _PADDING
        if angles is not None:
            cos, sin = angles
            assert cos.is_contiguous() and sin.is_contiguous(), "angles must be contiguous"
            call.cos, call.sin, call.rotary_dim = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
        self._reserve(num_heads, head_dim)
        self._attend(byref(call))
        return out

    def _reserve(self, num_heads: int, head_dim: int) -> None:
        """Have a workspace for heads of this size and for all threads."""
        call, num_threads = self._call, torch.get_num_threads()
        if (call.num_heads, call.head_dim, call.num_threads) == (num_heads, head_dim, num_threads):
            return
        call.num_heads, call.head_dim, call.num_threads = num_heads, head_dim, num_threads
        self._plan(byref(call))
        self._workspace = torch.empty(num_threads * call.scratch_bytes, dtype=torch.uint8)
        call.workspace = self._workspace.data_ptr()


def _joined(x: Tensor) -> Tensor:
    """x [T, heads, head_dim], the heads of each token side by side."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _reversed(distance_bias: Tensor, batch: EncoderBatch) -> Tensor:
    """The bias by `i - j`, so that a vector of queries reads it in order: made once per batch for one bias."""
    made = batch.scratch["bias"]
    if made is None or made[0] is not distance_bias:
        made = batch.scratch["bias"] = distance_bias, F.pad(distance_bias.flip(1), (_PADDING, _PADDING))
    return made[1]
