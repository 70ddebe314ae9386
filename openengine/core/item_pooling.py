"""`ItemPooling`: from hidden rows to the results of tasks' items, for both runners.

Items of equal work are pooled together, so that a step of many small requests costs as much as one of a large one. Owns the
rows of earlier chunks where an item needs more than its last row. Does not own what pooling is (pooler.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from openengine.core.sequence import Sequence
from openengine.core.step_plan import ScheduledSeq
from openengine.core.task_work import TaskWork

if TYPE_CHECKING:
    from openengine.core.pooler import Pooler

__all__ = ["ItemPooling"]


class ItemPooling:
    """Written by the loop thread only."""

    def __init__(self, pooler: Pooler) -> None:
        self._pooler = pooler
        self._kept: dict[int, list[Tensor]] = {}  # by slot: hidden rows [n, D] of the chunks before

    def rows(self, item: ScheduledSeq) -> range:
        """Rows of the chunk, from its own start, whose hidden states are needed."""
        wanted = self._pooler.rows(item.seq.group.task.kind)
        if wanted == "all":
            return range(item.num_tokens)
        if wanted == "first":
            return range(0 if item.start else 1)
        return range(item.num_tokens - 1, item.num_tokens) if item.pools else range(0)

    def drop(self, slot: int) -> None:
        """Forget the rows of an item that was preempted or has ended."""
        self._kept.pop(slot, None)

    def collect(self, chunks: list[tuple[ScheduledSeq, Tensor]]) -> list[tuple[Sequence, np.ndarray]]:
        """Results of the items that these chunks complete; `chunks` have the hidden rows [n, D] that `rows` asked for."""
        complete: dict[TaskWork, list[tuple[Sequence, Tensor]]] = {}
        for item, rows in chunks:
            seq = item.seq
            if not item.pools:
                if len(rows):
                    self._kept.setdefault(seq.slot, []).append(rows.clone())
                continue
            earlier = self._kept.pop(seq.slot, None)
            rows = rows if earlier is None else torch.cat([*earlier, rows])
            complete.setdefault(seq.group.task, []).append((seq, rows))
        results = []
        for work, items in complete.items():
            sequences = [seq for seq, _rows in items]
            results += self.pool(work, torch.cat([rows for _seq, rows in items]), sequences)
        return results

    def pool(self, work: TaskWork, hidden: Tensor, sequences: list[Sequence]) -> list[tuple[Sequence, np.ndarray]]:
        """Results of items of equal work; `hidden` [N, D] holds their rows one after another: all, or one each."""
        lens = [seq.num_prompt for seq in sequences]
        skipped = [seq.item.num_skipped for seq in sequences]
        values = self._pooler.pool(work, hidden, lens, skipped=skipped if any(skipped) else None)
        return list(zip(sequences, values, strict=True))
