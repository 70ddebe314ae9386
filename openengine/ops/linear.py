"""`Linear`: one matrix product for one or several projections that share their input.

Fused projections (q, k, v; gate, up) are rows of one weight. `parts` names them, so that a loader can fill each
part in place and an adapter can find its rows. What multiplies is `weight`; nothing else may assume its layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Linear"]


class Linear:
    """`y = x @ weight.T + bias`, weight [out, in], bias [out] or None.

    `parts` maps each projection's name to its number of rows, in row order; empty for a weight that belongs to
    another module (a tied head). `transposed` says that the stored form of the weight is [in, out].
    """

    __slots__ = ("bias", "parts", "transposed", "weight")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, parts: Mapping[str, int], transposed: bool = False
    ) -> None:
        assert not parts or sum(parts.values()) == weight.shape[0], "parts must cover the rows"
        self.weight = weight
        self.bias = bias
        self.parts = dict(parts)
        self.transposed = transposed

    @classmethod
    def empty(
        cls,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        transposed: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Linear:
        """Allocate, uninitialized, for the rows that `parts` names."""
        rows = sum(parts.values())
        weight = torch.empty(rows, in_features, dtype=dtype, device=device)
        return cls(
            weight,
            torch.empty(rows, dtype=dtype, device=device) if bias else None,
            parts=parts,
            transposed=transposed,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], in x's dtype."""
        return F.linear(x, self.weight, self.bias)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each part's stored tensors as `(name, view)`: writing a view fills the part."""
        start = 0
        for name, rows in self.parts.items():
            weight = self.weight[start : start + rows]
            yield f"{name}.weight", weight.T if self.transposed else weight
            if self.bias is not None:
                yield f"{name}.bias", self.bias[start : start + rows]
            start += rows

    def finish(self) -> None:
        """Nothing to derive from the stored values."""
