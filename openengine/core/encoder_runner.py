"""`EncoderRunner`: executes a step plan of an encoder: items → one flat batch → model → results.

Owns the model and its attention. There is no KV cache, no slot and nothing to sample.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch

from openengine.core.item_pooling import ItemPooling
from openengine.core.runner import StepResult
from openengine.core.sequence import Sequence
from openengine.core.step_plan import StepPlan
from openengine.core.task_work import TaskWork
from openengine.ops.batch import EncoderBatch

if TYPE_CHECKING:
    from openengine.core.models.encoder import EncoderModel
    from openengine.core.pooler import Pooler
    from openengine.ops.encoder_attention import EncoderAttention

__all__ = ["EncoderRunner"]


class EncoderRunner:
    """Runs one model on one device. Called by the loop thread only, inside `torch.inference_mode`."""

    def __init__(
        self, model: EncoderModel, attention: EncoderAttention, pooler: Pooler, *, device: torch.device
    ) -> None:
        self._model = model
        self._attention = attention
        self._pooler = pooler
        self._pooling = ItemPooling(pooler)
        self._device = device
        self._windows = tuple(dict.fromkeys(model.windows))

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute `plan`: every item of it becomes its result."""
        if not plan.scheduled:
            return StepResult(None)
        order: dict[TaskWork, int] = {}
        sequences = [item.seq for item in plan.scheduled]
        for seq in sequences:
            order.setdefault(seq.group.task, len(order))
        if len(order) > 1:  # items of equal work have neighbouring rows
            sequences.sort(key=lambda seq: order[seq.group.task])
        batch = _build(sequences, self._device)
        self._attention.prepare(batch, self._windows)
        works = [(work, list(items)) for work, items in groupby(sequences, key=lambda seq: seq.group.task)]
        counts, rows = self._choose_rows(works)
        hidden = self._model.forward(batch, None if rows is None else torch.from_numpy(rows).to(self._device))
        results = []
        for (work, items), part in zip(works, hidden.split(counts)):
            results += self._pooling.pool(work, part, items)
        return StepResult(None, results)

    def close(self) -> None:
        """Nothing works beside the loop's thread."""

    def _choose_rows(self, works: list[tuple[TaskWork, list[Sequence]]]) -> tuple[list[int], np.ndarray | None]:
        """How many hidden rows each work needs, and which of the batch these are; None is all of them."""
        rows, offset, is_all = [], 0, True
        for work, items in works:
            lens = np.fromiter((seq.num_prompt for seq in items), np.int64, len(items))
            ends = offset + np.cumsum(lens)
            wanted = self._pooler.rows(work.kind)
            is_all = is_all and wanted == "all"
            if wanted == "all":
                rows.append(np.arange(offset, ends[-1]))
            else:
                rows.append(ends - lens if wanted == "first" else ends - 1)
            offset = int(ends[-1])
        return [len(part) for part in rows], None if is_all else np.concatenate(rows)


def _build(sequences: list[Sequence], device: torch.device) -> EncoderBatch:
    """The flat batch of whole items."""
    items = [seq.item for seq in sequences]
    lens = np.fromiter((len(item.token_ids) for item in items), np.int64, len(items))
    offsets = np.zeros(len(items) + 1, dtype=np.int32)
    np.cumsum(lens, out=offsets[1:])
    token_types = None
    if any(item.token_types is not None for item in items):
        types = [np.zeros(len(i.token_ids), np.int32) if i.token_types is None else i.token_types for i in items]
        token_types = torch.from_numpy(np.concatenate(types).astype(np.int64)).to(device)
    positions = np.arange(offsets[-1], dtype=np.int64) - np.repeat(offsets[:-1], lens)
    return EncoderBatch(
        input_ids=torch.from_numpy(np.concatenate([item.token_ids for item in items]).astype(np.int64)).to(device),
        positions=torch.from_numpy(positions).to(device),
        token_types=token_types,
        cu_seqlens=torch.from_numpy(offsets).to(device),
        lens=lens.tolist(),
    )
