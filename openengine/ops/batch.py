"""`ForwardBatch` and `EncoderBatch`: the contracts between the scheduler's world and tensor code.

    tokens      |--- seq 0 ---|-- seq 1 --|- … -|   T tokens, no padding, decode rows first
    cu_seqlens_q 0             q0          …     T

The last `q_i` tokens of sequence i (its query) are in the batch; `seq_lens[i]` counts all its tokens
with KV after this step, so query token j of sequence i sits at position `seq_lens[i] - q_i + j`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from openengine.ops.kv_cache import KvCache

__all__ = ["EncoderBatch", "ForwardBatch"]


@dataclass(slots=True)
class ForwardBatch:
    """One step's work. T tokens, B sequences (the first `num_decodes` have one token), R logits rows, M blocks.

    `query_lens` and `context_lens` are host copies, so that no backend has to synchronize.
    `scratch` is for the attention backend: what it prepares once per step for all layers.
    """

    input_ids: Tensor  # i64[T]
    positions: Tensor  # i64[T]
    slot_mapping: Tensor  # i64[T], block * block_size + offset: where the token's KV goes
    cu_seqlens_q: Tensor  # i32[B+1]
    seq_lens: Tensor  # i32[B], tokens with KV after this step
    block_tables: Tensor  # i32[B, M], rows padded with 0
    query_lens: list[int]
    context_lens: list[int]  # equals seq_lens
    num_decodes: int
    logits_rows: Tensor  # i64[R], rows of the T tokens whose logits are wanted, ascending
    kv: KvCache
    scratch: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return len(self.query_lens)


@dataclass(slots=True)
class EncoderBatch:
    """B whole items, T tokens, for a model in which every token of an item sees every other. No KV, no padding.

    `lens` is a host copy. `scratch` is for the attention: what it prepares once per batch for all layers.
    """

    input_ids: Tensor  # i64[T]
    positions: Tensor  # i64[T], from 0 within each item; what a model adds to them is its own business
    token_types: Tensor | None  # i64[T], which text of a pair; None is 0 everywhere
    cu_seqlens: Tensor  # i32[B+1]
    lens: list[int]
    scratch: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_items(self) -> int:
        return len(self.lens)
