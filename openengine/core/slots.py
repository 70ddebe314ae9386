"""`SlotTable`: per-sequence arrays by slot, and the step's `ForwardBatch` built from them by gathers.

A running sequence holds slot s; row s of each array is written once at admission and by small diffs
after that, so that building a batch touches no Python object per token.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from openengine.core.sequence import Sequence
from openengine.core.step_plan import StepPlan
from openengine.ops.batch import ForwardBatch
from openengine.ops.kv_cache import KvCache

__all__ = ["SlotTable"]


class SlotTable:
    """Owns tokens and block table of every running sequence, on the host. Written by the loop thread only."""

    def __init__(self, *, max_num_seqs: int, max_len: int, block_size: int) -> None:
        self._block_size = block_size
        self._tokens = np.zeros((max_num_seqs, max_len), dtype=np.int32)
        self._blocks = np.zeros((max_num_seqs, -(-max_len // block_size)), dtype=np.int32)
        # Lists, which are read one by one, and that several times faster than arrays.
        self._num_tokens = [0] * max_num_seqs
        self._num_blocks = [0] * max_num_seqs

    def admit(self, seq: Sequence) -> None:
        """Write row `seq.slot` from scratch."""
        self._num_tokens[seq.slot] = self._num_blocks[seq.slot] = 0
        self.update([seq])

    def update(self, seqs: Iterable[Sequence]) -> None:
        """Append what sequences gained since their rows were last written."""
        num_tokens, num_blocks = self._num_tokens, self._num_blocks
        places, tokens = [], []  # of those that gained one token, as decodes do
        for seq in seqs:
            slot = seq.slot
            known, count = num_tokens[slot], len(seq.token_ids)
            if count - known == 1:
                places.append(slot * self._tokens.shape[1] + known)
                tokens.append(seq.token_ids[known])
            elif known < count:
                self._tokens[slot, known:count] = seq.token_ids[known:]
            num_tokens[slot] = count
            known, count = num_blocks[slot], len(seq.block_ids)
            if known < count:
                self._blocks[slot, known:count] = seq.block_ids[known:]
                num_blocks[slot] = count
        if places:
            self._tokens.reshape(-1)[places] = tokens

    def replace_tail(self, seq: Sequence, start: int) -> None:
        """Rewrite the blocks of `seq` from that of position `start` on, which copy on write has replaced."""
        first = start // self._block_size
        self._blocks[seq.slot, first : len(seq.block_ids)] = seq.block_ids[first:]

    def build(self, plan: StepPlan, logits_rows: np.ndarray, kv: KvCache, device: torch.device) -> ForwardBatch:
        """The flat batch of `plan`. `logits_rows`: i64[R], rows of the batch whose logits are wanted."""
        count = len(plan.scheduled)
        slots = np.fromiter((item.seq.slot for item in plan.scheduled), np.int64, count)
        starts = np.fromiter((item.start for item in plan.scheduled), np.int64, count)
        if plan.num_decodes == count:
            lens, offsets = np.ones(count, np.int64), np.arange(count + 1, dtype=np.int32)
            row_slots, positions = slots, starts
        else:
            lens = np.fromiter((item.num_tokens for item in plan.scheduled), np.int64, count)
            offsets = np.zeros(count + 1, dtype=np.int32)
            np.cumsum(lens, out=offsets[1:])
            row_slots = np.repeat(slots, lens)
            positions = np.arange(offsets[-1], dtype=np.int64) + np.repeat(starts - offsets[:-1], lens)
        ends = starts + lens
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
