"""`Embedding`: rows of a table by index, for tokens and for learned positions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Embedding"]


class Embedding:
    """weight [rows, D]; `embedding(ids i64[T])` is a fresh [T, D]."""

    __slots__ = ("name", "weight")

    def __init__(self, name: str, rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.name = name
        self.weight = torch.empty(rows, width, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The stored tensor as `(name, tensor)`."""
        yield f"{self.name}.weight", self.weight

    def finish(self) -> None:
        """Nothing to derive from the stored values."""
