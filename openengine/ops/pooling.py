"""One vector per item from the hidden rows of its tokens. Pure functions over ragged rows, in float32.

    rows    |--- item 0 ---|-- item 1 --| … |     T rows, no padding
    skipped |xx            |x           |         leading tokens of an item that do not count (an instruction)

An item's vector is made of its own rows in their order, whatever stands beside them. What the modes mean is that of
sentence-transformers' pooling module.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["POOLING_MODES", "edge_rows", "pool"]

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "last")


def pool(hidden: Tensor, lens: Sequence[int], modes: Sequence[str], *, skipped: Sequence[int] | None = None) -> Tensor:
    """hidden [T, D] of items with `lens` rows each (1 or more) -> f32 [B, D * len(modes)], the modes side by side.

    cls, last: the first row that counts, the last row.  max: by component.  mean: sum / n.  mean_sqrt_len: sum / sqrt(n).
    weightedmean: weighted with 1, 2, 3, …, counted from the item's start.  `skipped` counts each item's leading rows that
    do not count; one row always does.
    """
    assert len(hidden) == sum(lens), "hidden has a row for every token"
    pooling = _Pooling(hidden, lens, skipped)
    return torch.cat([pooling.vectors(mode) for mode in modes], 1)


def edge_rows(lens: Sequence[int], *, last: bool) -> list[int]:
    """The index of each item's first or last row."""
    rows, end = [], 0
    for count in lens:
        rows.append(end + count - 1 if last else end)
        end += count
    return rows


class _Pooling:
    """The rows of one call, and what several modes need of them."""

    def __init__(self, hidden: Tensor, lens: Sequence[int], skipped: Sequence[int] | None) -> None:
        self._hidden = hidden
        self._lens = list(lens)
        self._skipped = [min(skip, count - 1) for skip, count in zip(skipped or [0] * len(lens), lens)]
        self._counts = [count - skip for count, skip in zip(self._lens, self._skipped)]
        self._ids = _item_ids(self._counts, hidden.device)
        self._sums: Tensor | None = None
        self._rows: Tensor | None = None

    def vectors(self, mode: str) -> Tensor:
        """f32 [B, D]"""
        if mode in ("cls", "last"):
            rows = edge_rows(self._lens, last=mode == "last")
            if mode == "cls":
                rows = [row + skip for row, skip in zip(rows, self._skipped)]
            return self._hidden[torch.tensor(rows, device=self._hidden.device)].float()
        if mode == "max":
            return self._reduce("max", self._counted())
        if mode == "weightedmean":
            return self._weighted_mean()
        if self._sums is None:
            self._sums = self._sum(self._counted())
        counts = torch.tensor(self._counts, dtype=torch.float32, device=self._hidden.device)[:, None]
        return self._sums / (counts.sqrt() if mode == "mean_sqrt_len" else counts)

    def _counted(self) -> Tensor:
        """f32: the rows that count."""
        if self._rows is None:
            rows = self._hidden
            if any(self._skipped):
                rows = rows[self._positions()[0]]
            self._rows = rows.float()
        return self._rows

    def _positions(self) -> tuple[Tensor, Tensor]:
        """Of the rows that count: their indices, and their positions in their items."""
        device = self._hidden.device
        starts = torch.tensor(edge_rows(self._lens, last=False), device=device)
        skipped = torch.tensor(self._skipped, device=device)
        first = torch.tensor(edge_rows(self._counts, last=False), device=device)
        within = torch.arange(len(self._ids), device=device) - first[self._ids] + skipped[self._ids]
        return starts[self._ids] + within, within

    def _weighted_mean(self) -> Tensor:
        weights = (self._positions()[1] + 1).float()[:, None]
        totals = [
            (count + skip + 1) * (count + skip) / 2 - skip * (skip + 1) / 2
            for count, skip in zip(self._counts, self._skipped)
        ]
        totals = torch.tensor(totals, dtype=torch.float32, device=self._hidden.device)[:, None]
        return self._sum(self._counted() * weights) / totals

    def _sum(self, rows: Tensor) -> Tensor:
        if rows.device.type == "cpu":
            sums = torch.zeros(len(self._lens), rows.shape[1])
            return sums.index_add_(0, self._ids, rows)  # several times faster, and in the order of the rows
        return self._reduce("sum", rows)

    def _reduce(self, how: str, rows: Tensor) -> Tensor:
        counts = torch.tensor(self._counts, device=rows.device)
        return torch.segment_reduce(rows, how, lengths=counts, axis=0)


def _item_ids(lens: Sequence[int], device: torch.device) -> Tensor:
    """i64 [T]: the item that each row belongs to."""
    counts = torch.tensor(lens, dtype=torch.int64)
    return torch.repeat_interleave(torch.arange(len(lens)), counts).to(device)
