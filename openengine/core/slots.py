"""`SlotTable`: per-sequence arrays by slot, and the step's `ForwardBatch` built from them by gathers.

A running sequence holds slot s; row s of each array is written once at admission and by small diffs
after that, so that building a batch touches no Python object per token.
"""

from __future__ import annotations

import numpy as np
import torch

from openengine.core.scheduler import StepPlan
from openengine.core.sequence import Sequence
from openengine.ops.batch import ForwardBatch
from openengine.ops.kv_cache import KvCache

__all__ = ["SlotTable"]


class SlotTable:
    """Owns tokens and block table of every running sequence, on the host. Written by the loop thread only."""

    def __init__(self, *, max_num_seqs: int, max_len: int, block_size: int) -> None:
        self._block_size = block_size
        self._tokens = np.zeros((max_num_seqs, max_len), dtype=np.int32)
        self._blocks = np.zeros((max_num_seqs, -(-max_len // block_size)), dtype=np.int32)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)

    def admit(self, seq: Sequence) -> None:
        """Write row `seq.slot` from scratch."""
        self._num_tokens[seq.slot] = self._num_blocks[seq.slot] = 0
        self.update(seq)

    def update(self, seq: Sequence) -> None:
        """Append what `seq` gained since its row was last written."""
        slot = seq.slot
        known, count = int(self._num_tokens[slot]), len(seq.token_ids)
        if known < count:
            self._tokens[slot, known:count] = seq.token_ids[known:]
            self._num_tokens[slot] = count
        known, count = int(self._num_blocks[slot]), len(seq.block_ids)
        if known < count:
            self._blocks[slot, known:count] = seq.block_ids[known:]
            self._num_blocks[slot] = count

    def replace_tail(self, seq: Sequence) -> None:
        """Rewrite the last block of `seq`, which copy on write has replaced."""
        self._blocks[seq.slot, len(seq.block_ids) - 1] = seq.block_ids[-1]

    def build(self, plan: StepPlan, logits_rows: np.ndarray, kv: KvCache, device: torch.device) -> ForwardBatch:
        """The flat batch of `plan`. `logits_rows`: i64[R], rows of the batch whose logits are wanted."""
        count = len(plan.scheduled)
        slots = np.fromiter((item.seq.slot for item in plan.scheduled), np.int64, count)
        starts = np.fromiter((item.start for item in plan.scheduled), np.int64, count)
        lens = np.fromiter((item.num_tokens for item in plan.scheduled), np.int64, count)
        ends = starts + lens
        offsets = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(lens, out=offsets[1:])

        row_slots = np.repeat(slots, lens)
        positions = np.arange(offsets[-1], dtype=np.int64) + np.repeat(starts - offsets[:-1], lens)
        block_ids = self._blocks[row_slots, positions // self._block_size].astype(np.int64)
        num_blocks = -(-int(ends.max()) // self._block_size)

        def tensor(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values).to(device)

        return ForwardBatch(
            input_ids=tensor(self._tokens[row_slots, positions].astype(np.int64)),
            positions=tensor(positions),
            slot_mapping=tensor(block_ids * self._block_size + positions % self._block_size),
            cu_seqlens_q=tensor(offsets),
            seq_lens=tensor(ends.astype(np.int32)),
            block_tables=tensor(self._blocks[slots, :num_blocks]),
            query_lens=lens.tolist(),
            context_lens=ends.tolist(),
            num_decodes=plan.num_decodes,
            logits_rows=tensor(logits_rows),
            kv=kv,
        )
