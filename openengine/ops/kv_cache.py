"""`KvCache`: the paged key and value memory of one model, and how blocks are copied and moved.

Owns the memory and its layout. Does not own which block belongs to whom (the block manager does)
or how attention reads it (the backend that allocated it does).

    slot = block * block_size + offset       where one token's key and value live, in every layer

Blocks leave and enter in one fixed layout, so that engines with unlike caches can exchange them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openengine.errors import InvalidArgument
from openengine.ops import huge_pages

__all__ = ["KvCache", "KvSpec"]


@dataclass(frozen=True, slots=True)
class KvSpec:
    """What one token leaves behind: `num_layers` times a key and a value of `[num_kv_heads, head_dim]`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class KvCache:
    """Keys and values of `num_blocks` blocks of `block_size` tokens, one tensor for all layers.

    A block is stored as `[block_size, num_kv_heads, head_dim]`, or with `heads_first` as
    `[num_kv_heads, block_size, head_dim]`. The memory starts uninitialized: a slot nobody wrote
    may hold NaN, and no reader may let it matter.

    Raises InvalidArgument if a size is below 1.
    """

    def __init__(self, spec: KvSpec, num_blocks: int, block_size: int, *, heads_first: bool = False) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise InvalidArgument(f"{name} is {value}; a KV cache needs at least 1")
        self.spec = spec
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.heads_first = heads_first
        inner = (spec.num_kv_heads, block_size) if heads_first else (block_size, spec.num_kv_heads)
        shape = (spec.num_layers, 2, num_blocks, *inner, spec.head_dim)
        # A tensor made in inference mode could only be written in inference mode; a KV transfer may run outside.
        with torch.inference_mode(False):
            if spec.device.type == "cpu":
                num_bytes = math.prod(shape) * spec.dtype.itemsize
                self._data = huge_pages.empty(num_bytes).view(spec.dtype).view(shape)
            else:
                self._data = torch.empty(shape, dtype=spec.dtype, device=spec.device)
            self._layers = self._data.unbind()
            self._keys = self._data[:, 0].unbind()
            self._values = self._data[:, 1].unbind()

    @staticmethod
    def bytes_per_block(spec: KvSpec, block_size: int) -> int:
        """Bytes that one block takes in all layers."""
        return spec.num_layers * 2 * block_size * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize

    def key(self, layer: int) -> Tensor:
        """The layer's keys, a view of `[num_blocks, *block, head_dim]` in the layout of this cache."""
        return self._keys[layer]

    def value(self, layer: int) -> Tensor:
        """The layer's values, a view shaped like `key`."""
        return self._values[layer]

    def pair(self, layer: int) -> Tensor:
        """The layer's keys and values as one contiguous view `[2, num_blocks, *block, head_dim]`."""
        return self._layers[layer]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks `(source, destination)` in every layer; all sources are read before any is written."""
        if not pairs:
            return
        sources, destinations = torch.tensor(pairs, dtype=torch.int64, device=self.spec.device).unbind(1)
        self._data.index_copy_(2, destinations, self._data.index_select(2, sources))

    def export_blocks(self, block_ids: Sequence[int]) -> Tensor:
        """A copy of the blocks as `[num_layers, 2, len(block_ids), block_size, num_kv_heads, head_dim]`, keys first."""
        blocks = self._data.index_select(2, self._index(block_ids))
        return blocks.transpose(3, 4).contiguous() if self.heads_first else blocks

    def import_blocks(self, block_ids: Sequence[int], blocks: Tensor) -> None:
        """Write blocks laid out as `export_blocks` gives them, from any device.

        Raises InvalidArgument if shape or dtype differ from what this cache holds.
        """
        self._check_import(block_ids, blocks)
        blocks = blocks.to(self.spec.device)
        self._data.index_copy_(2, self._index(block_ids), blocks.transpose(3, 4) if self.heads_first else blocks)

    def _check_import(self, block_ids: Sequence[int], blocks: Tensor) -> None:
        spec = self.spec
        expected = (spec.num_layers, 2, len(block_ids), self.block_size, spec.num_kv_heads, spec.head_dim)
        if tuple(blocks.shape) != expected or blocks.dtype != spec.dtype:
            raise InvalidArgument(
                f"imported blocks are {blocks.dtype} {tuple(blocks.shape)}, this cache takes {spec.dtype} {expected}; "
                "both sides need the same model, dtype and block_size"
            )

    def _index(self, block_ids: Sequence[int]) -> Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self.spec.device)
