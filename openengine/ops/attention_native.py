"""Attention by the compiled kernels: the CPU backend where the library is there; `TorchAttention` is its twin.

One native call per layer rotates, writes the cache and attends, for decode rows and prompts alike. The layout of the
cache, which both sides must agree on, is drawn in `csrc/attention.cpp`; this module holds its Python form, and the
structures of `csrc/attention.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from openengine.errors import InvalidArgument, UnsupportedFeature
from openengine.ops.batch import ForwardBatch
from openengine.ops.kv_cache import KvCache, KvSpec
from openengine.ops.native import native_absence, native_library

__all__ = ["NativeAttention", "TiledKvCache"]

_TILE = 16  # tokens
_MAX_HEAD_DIM = 256
_DTYPES = (torch.float32, torch.bfloat16)


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query_starts", "context_lens", "block_tables", "slots")),
        *((name, c_int32) for name in ("num_tokens", "num_seqs", "table_stride", "block_size")),
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "is_bfloat16", "num_threads")),
    )


class _Plan(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("window", "num_items", "num_merges", "num_partials", "is_small", "num_together")),
        *((name, c_int64) for name in ("scratch_bytes", "partial_bytes")),
        *((name, c_void_p) for name in ("items", "merges")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "cos", "sin", "keys", "values", "out")),
        *((name, c_int32) for name in ("q_stride", "k_stride", "v_stride", "rotary_dim")),
        *((name, c_float) for name in ("scale", "softcap")),
    )


_ITEM_INTS, _MERGE_INTS = 6, 4


@dataclass(frozen=True, slots=True)
class _Prepared:
    """One step, with what its structures point to."""

    step: _Step
    plans: dict[int | None, _Plan]
    kept: list[Tensor]
    workspace: int


class TiledKvCache(KvCache):
    """A cache in tiles of 16 tokens of one head, in the layout of the native kernels.

    Element (token t, dimension d) of a tile lies at `[d // P, t, d % P]` of a key tile `[head_dim / P, 16, P]` and at
    `[t // P, d, t % P]` of a value tile `[16 / P, head_dim, P]`, where P elements make 32 bits.
    """

    def __init__(self, spec: KvSpec, num_blocks: int, block_size: int) -> None:
        super().__init__(spec, num_blocks, block_size, heads_first=True)

    def export_blocks(self, block_ids: Sequence[int]) -> Tensor:
        """See `KvCache.export_blocks`."""
        data = self._data.index_select(2, self._index(block_ids))
        num_layers, kinds, count, num_heads, block_size, head_dim = data.shape
        blocks = data.new_empty(num_layers, kinds, count, block_size, num_heads, head_dim)
        for tiles, view in _pairs(data, blocks):
            view.copy_(tiles)
        return blocks

    def import_blocks(self, block_ids: Sequence[int], blocks: Tensor) -> None:
        """See `KvCache.import_blocks`."""
        self._check_import(block_ids, blocks)
        blocks = blocks.to(self.spec.device)
        data = blocks.new_empty(blocks.transpose(3, 4).shape)
        for tiles, view in _pairs(data, blocks):
            tiles.copy_(view)
        self._data.index_copy_(2, self._index(block_ids), data)


class NativeAttention:
    """The native backend, for float32 and bfloat16 on a CPU.

    `level` is for the tests: it names the instruction set, by default the best this CPU has.
    Raises UnsupportedFeature if the library or the level is absent or the dtype has no kernels.
    """

    name = "native"
    block_size = 32

    def __init__(self, dtype: torch.dtype, *, level: str | None = None) -> None:
        library = native_library()
        if library is None:
            raise UnsupportedFeature(f"{native_absence()}, or use kernels='torch'")
        if dtype not in _DTYPES:
            raise UnsupportedFeature(f"the native kernels attend in float32 and bfloat16, not {dtype}; use kernels='torch'")
        self._plan = library.function("attention_plan", c_void_p, c_void_p, level=level)
        self._attend = library.function("attention", c_void_p, c_void_p, c_void_p, c_void_p, level=level)
        self._workspace = torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def check_sizes(*, head_dim: int | None, block_size: int | None) -> None:
        """Raises UnsupportedFeature for sizes without kernels; None stands for any."""
        for name, value, most in (("head_dim", head_dim, _MAX_HEAD_DIM), ("block_size", block_size, None)):
            if value is not None and (value % _TILE or (most and value > most)):
                limit = f" up to {most}" if most else ""
                raise UnsupportedFeature(
                    f"{name} {value} is not a multiple of {_TILE}{limit}, as the native kernels need; use kernels='torch'"
                )

    def allocate(self, spec: KvSpec, num_blocks: int, block_size: int) -> TiledKvCache:
        """A cache in tiles. Raises UnsupportedFeature for sizes without kernels."""
        self.check_sizes(head_dim=spec.head_dim, block_size=block_size)
        return TiledKvCache(spec, num_blocks, block_size)

    def prepare(self, batch: ForwardBatch, *, windows: Sequence[int | None]) -> None:
        """List, for each window, the items of work that the threads share."""
        tensors = (batch.cu_seqlens_q, batch.seq_lens, batch.block_tables, batch.slot_mapping)
        batch.scratch["native"] = tuple(tensor.contiguous() for tensor in tensors)
        batch.scratch["windows"] = windows

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: ForwardBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        angles: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        prepared = batch.scratch.get("prepared")
        if prepared is None:
            prepared = batch.scratch["prepared"] = self._prepare(batch, q.shape[1])
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype)
        q, k, v = _rows(q), _rows(k), _rows(v)
        cos, sin = angles if angles is not None else (None, None)
        arguments = _Layer(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            cos.data_ptr() if cos is not None else None,
            sin.data_ptr() if sin is not None else None,
            batch.kv.key(layer).data_ptr(),
            batch.kv.value(layer).data_ptr(),
            out.data_ptr(),
            q.stride(0),
            k.stride(0),
            v.stride(0),
            cos.shape[-1] if cos is not None else 0,
            scale,
            softcap or 0.0,
        )
        step, plans, workspace = prepared
        self._attend(step, plans[window], ctypes.byref(arguments), workspace)
        return out

    def _prepare(self, batch, num_heads):
        starts, lens, tables, slots = batch.scratch["native"]
        spec = batch.kv.spec
        step = _Step(starts.data_ptr(), lens.data_ptr(), tables.data_ptr(), slots.data_ptr(), batch.num_tokens, batch.num_seqs, tables.shape[1], batch.kv.block_size,
          num_heads, spec.num_kv_heads, spec.head_dim, int(spec.dtype==torch.bfloat16), torch.get_num_threads())
        plans = {}; kept=[step]; need = 0
        for window in batch.scratch["windows"]:
            plan = _Plan(window or 0)
            self._plan(ctypes.byref(step), ctypes.byref(plan))
            room = torch.empty(plan.num_items * _ITEM_INTS + plan.num_merges * _MERGE_INTS, dtype=torch.int32)
            plan.items = room.data_ptr()
            plan.merges = room.data_ptr() + plan.num_items * _ITEM_INTS * 4
            self._plan(ctypes.byref(step), ctypes.byref(plan))
            plans[window] = ctypes.byref(plan); kept += [room, plan]
            need = max(need, step.num_threads * plan.scratch_bytes + plan.num_partials * plan.partial_bytes)
        if self._workspace.numel() < need:
            self._workspace = torch.empty(need, dtype=torch.uint8)
        batch.scratch["kept"] = kept
        return ctypes.byref(step), plans, self._workspace.data_ptr()


def _rows(x: Tensor) -> Tensor:
    """x [T, heads, head_dim] with its heads side by side."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _pairs(data: Tensor, blocks: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Views of `data` in this layout and of `blocks` in the exported one that show the same keys, and the same values."""
    packed = 4 // data.dtype.itemsize
    num_layers, _, count, num_heads, block_size, head_dim = data.shape
    tiles = (num_layers, count, num_heads, block_size // _TILE)
    keys = data[:, 0].unflatten(-2, (-1, _TILE)).view(*tiles, head_dim // packed, _TILE, packed)
    values = data[:, 1].unflatten(-2, (-1, _TILE)).view(*tiles, _TILE // packed, head_dim, packed)
    tokens = blocks.unflatten(3, (-1, _TILE)).permute(1, 0, 2, 5, 3, 4, 6)  # [2, layers, blocks, heads, tiles, 16, head_dim]
    return [
        (keys, tokens[0].unflatten(-1, (-1, packed)).transpose(-3, -2)),
        (values, tokens[1].unflatten(-2, (-1, packed)).transpose(-2, -1)),
    ]
