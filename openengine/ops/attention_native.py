"""Attention by the compiled kernels: the CPU backend where the library is there; `TorchAttention` is its twin.

One native call per layer rotates, writes the cache and attends, for decode rows and prompts alike. The layout of the
cache, which both sides must agree on, is drawn in `csrc/attention.cpp`; this module holds its Python form, and the
structures of `csrc/attention.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from openengine.errors import UnsupportedFeature
from openengine.ops.batch import ForwardBatch
from openengine.ops.kv_cache import KvCache, KvSpec
from openengine.ops.native import required_library

__all__ = ["NativeAttention", "TiledKvCache"]

_TILE = 16  # tokens
_MAX_HEAD_DIM = 256


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query_starts", "context_lens", "block_tables", "slots")),
        *((name, c_int32) for name in ("num_tokens", "num_seqs", "table_stride", "block_size")),
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "is_bfloat16", "num_threads")),
    )


class _Plan(ctypes.Structure):
    _fields_ = (
        ("wanted", c_void_p),
        ("num_wanted", c_int64),
        *((name, c_int32) for name in ("window", "num_items", "num_merges", "num_partials", "is_small")),
        ("is_joined", c_int32),
        *((name, c_int64) for name in ("scratch_bytes", "partial_bytes")),
        *((name, c_void_p) for name in ("items", "merges")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("step", "plan", "workspace")),
        *((name, c_void_p) for name in ("q", "k", "v", "cos", "sin", "keys", "values", "out")),
        *((name, c_int32) for name in ("q_stride", "k_stride", "v_stride", "rotary_dim")),
        *((name, c_float) for name in ("scale", "softcap")),
    )


_ITEM_INTS, _MERGE_INTS = 7, 4  # fields of AttentionItem and AttentionMerge


@dataclass(slots=True)
class _Prepared:
    """One step: its structure, the tensors that this points to, and the plans made so far."""

    step: _Step
    tensors: tuple[Tensor, ...]
    plans: dict[tuple[int | None, bool], tuple[_Plan, Tensor]]  # see `_plan_of`; a plan points to the tensor


class TiledKvCache(KvCache):
    """A cache in tiles of 16 tokens of one head, in the layout of the native kernels.

    Element (token t, dimension d) of a tile lies at `[d // P, t, d % P]` of a key tile `[head_dim / P, 16, P]` and at
    `[t // P, d, t % P]` of a value tile `[16 / P, head_dim, P]`, where P elements make 32 bits.
    """

    def __init__(self, spec: KvSpec, num_blocks: int, block_size: int) -> None:
        super().__init__(spec, num_blocks, block_size, heads_first=True)
        # Of each layer's keys and values.
        self.addresses = [(key.data_ptr(), value.data_ptr()) for key, value in zip(self._keys, self._values)]

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
    """The native backend, for float32 and bfloat16 on a CPU. Its name says the instruction set too.

    What a sequence gets depends neither on the batch nor on the number of threads, to the last bit. `level` is for the
    tests: it names the instruction set, by default the best this CPU has.

    Raises UnsupportedFeature if the library or the level is absent or the dtype has no kernels.
    """

    block_size = 32

    def __init__(self, dtype: torch.dtype, *, level: str | None = None) -> None:
        library = required_library(dtype)
        self.name = f"native {level or library.levels[-1]}"
        self._plan = library.function("attention_plan", level=level)
        self._attend = library.function("attention", level=level)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._arguments = _Layer()

    @staticmethod
    def check(device: torch.device, *, head_dim: int | None, block_size: int | None) -> None:
        """Raise UnsupportedFeature for a device or sizes without kernels; a size that is None is left out."""
        if device.type != "cpu":
            raise UnsupportedFeature(f"the native kernels run on CPUs, not on {device}; use kernels='torch'")
        if head_dim is not None and (head_dim % _TILE or head_dim > _MAX_HEAD_DIM):
            raise UnsupportedFeature(
                f"head_dim {head_dim} is not a multiple of {_TILE} up to {_MAX_HEAD_DIM}, as the native kernels need; "
                "use kernels='torch'"
            )
        if block_size is not None and block_size % _TILE:
            raise UnsupportedFeature(
                f"block_size {block_size} is not a multiple of {_TILE}, as the native kernels need; use {_TILE}, "
                "or kernels='torch'"
            )

    def allocate(self, spec: KvSpec, num_blocks: int, block_size: int) -> TiledKvCache:
        """A cache in tiles. Raises UnsupportedFeature for sizes without kernels."""
        self.check(spec.device, head_dim=spec.head_dim, block_size=block_size)
        return TiledKvCache(spec, num_blocks, block_size)

    def prepare(self, batch: ForwardBatch, *, windows: Sequence[int | None]) -> None:
        """Describe the step; what the layers of a window share out is listed when the first of them comes."""
        spec = batch.kv.spec
        tensors = (batch.cu_seqlens_q, batch.seq_lens, batch.block_tables, batch.slot_mapping)
        tensors = tuple(tensor.contiguous() for tensor in tensors)
        step = _Step(
            *(tensor.data_ptr() for tensor in tensors),
            num_tokens=batch.num_tokens,
            num_seqs=batch.num_seqs,
            table_stride=batch.block_tables.shape[1],
            block_size=batch.kv.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            is_bfloat16=spec.dtype == torch.bfloat16,
            num_threads=torch.get_num_threads(),
        )
        batch.scratch["native"] = _Prepared(step, tensors, {})

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
        num_tokens, num_heads, head_dim = q.shape
        out = torch.empty(num_tokens, num_heads * head_dim, dtype=q.dtype)
        prepared: _Prepared = batch.scratch["native"]
        q, k, v = _joined(q), _joined(k), _joined(v)
        call = self._arguments
        call.step, call.plan = addressof(prepared.step), self._plan_of(batch, window, num_heads, wanted=False)
        call.q, call.k, call.v, call.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        call.q_stride, call.k_stride, call.v_stride = q.stride(0), k.stride(0), v.stride(0)
        call.keys, call.values = batch.kv.addresses[layer]
        call.cos = call.sin = None
        if angles is not None:
            cos, sin = angles
            assert cos.is_contiguous() and sin.is_contiguous(), "angles must be contiguous"
            call.cos, call.sin, call.rotary_dim = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
        call.scale, call.softcap = scale, softcap or 0.0
        self._attend(byref(call))
        return out

    def described(
        self, batch: ForwardBatch, kinds: Sequence[tuple[int | None, bool]], num_heads: int
    ) -> tuple[int, list[int], int]:
        """Addresses of a prepared step: of its structure, of the plan of each kind of layer, and of the workspace.

        A kind is the window and whether only `batch.logits_rows` of the result are wanted; others may stay unwritten.
        """
        plans = [self._plan_of(batch, window, num_heads, wanted=wanted) for window, wanted in kinds]
        return addressof(batch.scratch["native"].step), plans, self._workspace.data_ptr()

    def _plan_of(self, batch: ForwardBatch, window: int | None, num_heads: int, *, wanted: bool) -> int:
        """Address of the step's plan, made when it is first asked for."""
        prepared: _Prepared = batch.scratch["native"]
        rows = batch.logits_rows if wanted and batch.logits_rows.shape[0] < batch.num_tokens else None
        key = window, rows is not None
        if key not in prepared.plans:
            prepared.plans[key] = self._make_plan(prepared.step, num_heads, window, rows)
        return addressof(prepared.plans[key][0])

    def _make_plan(
        self, step: _Step, num_heads: int, window: int | None, wanted: Tensor | None
    ) -> tuple[_Plan, Tensor]:
        step.num_heads = num_heads
        plan = _Plan(window=window or 0, num_wanted=-1)
        if wanted is not None:
            plan.wanted, plan.num_wanted = wanted.data_ptr(), wanted.shape[0]
        self._plan(byref(step), byref(plan))  # counts
        lists = torch.empty(plan.num_items * _ITEM_INTS + plan.num_merges * _MERGE_INTS, dtype=torch.int32)
        address = lists.data_ptr()
        plan.items, plan.merges = address, address + plan.num_items * _ITEM_INTS * lists.itemsize
        self._plan(byref(step), byref(plan))  # lists
        size = step.num_threads * plan.scratch_bytes + plan.num_partials * plan.partial_bytes
        if size > self._workspace.numel():
            self._workspace = torch.empty(size, dtype=torch.uint8)
            self._arguments.workspace = self._workspace.data_ptr()
        return plan, lists


def _joined(x: Tensor) -> Tensor:
    """x [T, heads, head_dim], the heads of each token side by side."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _pairs(data: Tensor, blocks: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Keys, and values: each as a view of `data`, in this layout, and the same-shaped view of exported `blocks`."""
    packed = 4 // data.dtype.itemsize
    num_layers, _, count, num_heads, block_size, head_dim = data.shape
    tiles = (num_layers, count, block_size // _TILE, num_heads)
    keys = data[:, 0].view(*tiles, head_dim // packed, _TILE, packed)
    values = data[:, 1].view(*tiles, _TILE // packed, head_dim, packed)
    tokens = blocks.unflatten(3, (-1, _TILE))  # [layers, 2, blocks, tiles, 16, heads, head_dim]
    return (
        (keys, tokens[:, 0].unflatten(5, (-1, packed)).permute(0, 1, 2, 4, 5, 3, 6)),
        (values, tokens[:, 1].unflatten(3, (-1, packed)).permute(0, 1, 2, 5, 3, 6, 4)),
    )
