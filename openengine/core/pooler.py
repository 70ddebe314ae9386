"""`Pooler`: from the hidden rows of finished items to the raw array of each (`TaskKind` says which).

Owns: which rows a task needs, pooling, Dense layers, the model's head over them, sparse weights, label logits.
Does not own: normalizing, cutting, softmax, labels' names (task_output.py); the heads themselves (heads.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from openengine.core.task_kinds import TaskKind
from openengine.core.task_specs import EmbeddingSpec
from openengine.core.task_work import TaskWork
from openengine.ops.pooling import edge_rows, pool

__all__ = ["Pooler", "RowChoice"]

RowChoice = Literal["first", "last", "all"]

_EDGES: dict[tuple[str, ...], RowChoice] = {("cls",): "first", ("last",): "last"}
_CHUNK_BYTES = 32 << 20  # of float32 logits over the vocabulary at a time


class Pooler:
    """What follows the forward pass of one model. `spec` says how it embeds, if it does.

    `model` has `task_head` (heads.py), None without one, and `logits` where it has a head over the vocabulary.
    """

    def __init__(self, model: Any, spec: EmbeddingSpec | None) -> None:
        self._model = model
        self._spec = spec
        self._dense = [] if spec is None else [dense.to(model.device) for dense in spec.dense]

    def rows(self, kind: TaskKind) -> RowChoice:
        """Which of an item's hidden rows `pool` needs."""
        if kind is TaskKind.LABELS:
            return "last"
        if kind.is_per_token or kind is TaskKind.EMBED_SPARSE:
            return "all"
        if kind is TaskKind.EMBED:
            rows = _EDGES.get(self._spec.pooling, "all")
            return rows if rows == "last" or self._spec.include_prompt else "all"
        return _EDGES.get((self._model.task_head.pooling,), "all")

    @torch.inference_mode()
    def pool(
        self, work: TaskWork, hidden: Tensor, lens: Sequence[int], *, skipped: Sequence[int] | None = None
    ) -> list[np.ndarray]:
        """The array of each item, in order.

        hidden: [T, D], all rows of all items, or [B, D], the one row of each that `rows(work.kind)` names.
        lens: each item's number of tokens.  skipped: of how many leading ones pooling is to take no notice, where the
        spec leaves prompts out; None is of none.
        """
        kind = work.kind
        if kind is TaskKind.LABELS:
            return self._labels(self._edges(hidden, lens, last=True), work.label_ids)
        if kind is TaskKind.EMBED_TOKENS:
            return _split(hidden.float(), lens)
        if kind is TaskKind.CLASSIFY_TOKENS:
            return _split(self._model.task_head(hidden), lens)
        if kind is TaskKind.EMBED_SPARSE:
            return list(self._sparse(hidden, lens))
        if kind is TaskKind.EMBED:
            return list(self._embeddings(hidden, lens, skipped).cpu().numpy())
        head = self._model.task_head
        if head.pooling == "mean":
            vectors = pool(hidden, lens, ("mean",)).to(hidden.dtype)
        else:
            vectors = self._edges(hidden, lens, last=head.pooling == "last")
        return list(head(vectors).cpu().numpy())

    def _edges(self, hidden: Tensor, lens: Sequence[int], *, last: bool) -> Tensor:
        if len(hidden) == len(lens):
            return hidden
        return hidden[torch.tensor(edge_rows(lens, last=last), device=hidden.device)]

    def _embeddings(self, hidden: Tensor, lens: Sequence[int], skipped: Sequence[int] | None) -> Tensor:
        """f32 [B, dimension]"""
        spec = self._spec
        if self.rows(TaskKind.EMBED) == "all":
            vectors = pool(hidden, lens, spec.pooling, skipped=None if spec.include_prompt else skipped)
        else:
            vectors = self._edges(hidden, lens, last=spec.pooling == ("last",)).float()
        for dense in self._dense:
            vectors = dense(vectors)
        return vectors

    def _sparse(self, hidden: Tensor, lens: Sequence[int]) -> Iterator[np.ndarray]:
        """f32 [2, N] of each item: entries of the vocabulary, ascending, and their weights, all above 0."""
        spec, head = self._spec.sparse, self._model.task_head
        assert head.num_labels < 1 << 24, "a float32 holds every entry's number"
        owners, ends = np.repeat(np.arange(len(lens)), lens), np.cumsum(lens)
        step = max(1, _CHUNK_BYTES // (4 * head.num_labels))
        weights = torch.zeros(head.num_labels, device=hidden.device)
        for start in range(0, len(hidden), step):
            values = head(hidden[start : start + step]).relu_()
            if spec.is_sum:
                values = spec.saturate(values)
            end = start + len(values)
            for item in range(owners[start], owners[end - 1] + 1):
                rows = values[max(start, ends[item] - lens[item]) - start : ends[item] - start]
                weights = weights + rows.sum(0) if spec.is_sum else torch.maximum(weights, rows.amax(0))
                if ends[item] <= end:
                    yield _nonzero(weights if spec.is_sum else spec.saturate(weights))
                    weights = torch.zeros_like(weights)

    def _labels(self, hidden: Tensor, label_ids: Sequence[int]) -> list[np.ndarray]:
        ids = torch.tensor(label_ids, device=hidden.device)
        step = max(1, _CHUNK_BYTES // (4 * self._model.config.vocab_size))
        parts = []
        for rows in hidden.split(step):
            logits = self._model.logits(rows)
            parts.append(torch.cat([logits[:, ids], torch.logsumexp(logits, 1, keepdim=True)], 1))
        return list(torch.cat(parts).cpu().numpy())


def _split(values: Tensor, lens: Sequence[int]) -> list[np.ndarray]:
    """Copies, so that no item keeps the rows of the others."""
    return [rows.copy() for rows in np.split(values.cpu().numpy(), np.cumsum(lens)[:-1])]


def _nonzero(weights: Tensor) -> np.ndarray:
    values = weights.cpu().numpy()
    (indices,) = values.nonzero()
    return np.stack([indices.astype(np.float32), values[indices]])
