"""Attention of encoders: every token of an item sees every other, and none of another item.

    tokens      |-- item 0 --|---- item 1 ----|- … -|   T tokens, no padding
    cu_seqlens  0            n0               …     T

`window` counts the tokens seen on each side: query i sees keys j with |i - j| <= window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from openengine.errors import InvalidArgument, UnsupportedFeature
from openengine.ops.batch import EncoderBatch
from openengine.ops.encoder_attention_native import NativeEncoderAttention
from openengine.ops.rope import rotate_

__all__ = ["EncoderAttention", "TorchEncoderAttention", "select_encoder_attention"]

_KERNELS = ("auto", "native", "torch")


class EncoderAttention(Protocol):
    """Full attention inside each item of a ragged batch. One of them serves one thread: it reuses its workspaces."""

    name: str

    def prepare(self, batch: EncoderBatch, windows: Sequence[int | None]) -> None:
        """Fill `batch.scratch` once per step; `windows` are the distinct windows of the model's layers."""
        ...

    def forward(
        self,
        q: Tensor,  # [T, heads, head_dim], as are k and v: views with any stride between rows
        k: Tensor,
        v: Tensor,
        batch: EncoderBatch,
        *,
        scale: float,
        window: int | None = None,
        distance_bias: Tensor | None = None,
        angles: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attend within each item -> `[T, heads * head_dim]`.

        `distance_bias` float32 [heads, 2 * max_len - 1] adds entry `j - i + max_len - 1` to the scaled score of query i
        and key j. With `angles`, those of `Rope.angles`, q and k are rotated first; the tensors themselves may change
        or not. Needs `prepare` on the same batch with this window, and a context without gradients.
        """
        ...


def select_encoder_attention(
    device: torch.device, dtype: torch.dtype, kernels: str, *, head_dim: int | None = None
) -> EncoderAttention:
    """The attention for `kernels`: `auto` is native on a CPU where that can run, else torch.

    A `head_dim` of None is one that all have kernels for. Raises UnsupportedFeature if the kernels asked for by name
    cannot run here, InvalidArgument for an unknown name.
    """
    if kernels not in _KERNELS:
        raise InvalidArgument(f"kernels {kernels!r} is unknown for an encoder; choose one of {', '.join(_KERNELS)}")
    if kernels == "torch":
        return TorchEncoderAttention()
    try:
        NativeEncoderAttention.check(device, head_dim=head_dim)
        return NativeEncoderAttention(dtype)
    except UnsupportedFeature:
        if kernels == "native":
            raise
        return TorchEncoderAttention()


class TorchEncoderAttention:
    """PyTorch's scaled_dot_product_attention, for every dtype and device, on items of one length at a time."""

    name = "torch"

    def prepare(self, batch: EncoderBatch, windows: Sequence[int | None]) -> None:
        """Find the rows of the items of each length."""
        lens, device = np.asarray(batch.lens), batch.input_ids.device
        starts = np.cumsum(lens) - lens
        rows = {int(n): starts[lens == n, None] + np.arange(n) for n in np.unique(lens)}
        batch.scratch["rows"] = {n: torch.from_numpy(of_length).to(device) for n, of_length in rows.items()}
        batch.scratch["masks"] = {}

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: EncoderBatch,
        *,
        scale: float,
        window: int | None = None,
        distance_bias: Tensor | None = None,
        angles: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `EncoderAttention.forward`."""
        rotate_(q, k, angles)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for length, rows in batch.scratch["rows"].items():
            mask = _mask(batch, length, window, distance_bias, q.dtype)
            items = (x[rows].transpose(1, 2) for x in (q, k, v))  # [items, heads, length, head_dim]
            out[rows] = F.scaled_dot_product_attention(*items, attn_mask=mask, scale=scale).transpose(1, 2)
        return out.view(q.shape[0], -1)


def _mask(
    batch: EncoderBatch, length: int, window: int | None, distance_bias: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """What is added to the scores of one item: [1 or heads, length, length], or None for nothing."""
    if window is not None and window >= length - 1:
        window = None
    if window is None and distance_bias is None:
        return None
    masks, key = batch.scratch["masks"], (length, window, id(distance_bias))
    if key not in masks:  # kept with the bias, so that no other one gets its id
        masks[key] = distance_bias, _make_mask(length, window, distance_bias, batch.input_ids.device).to(dtype)
    return masks[key][1]


def _make_mask(length: int, window: int | None, distance_bias: Tensor | None, device: torch.device) -> Tensor:
    mask = torch.zeros(1, length, length, device=device)
    if distance_bias is not None:
        middle = distance_bias.shape[1] // 2  # where i == j
        # Row r of what is unfolded starts at distance r - (length - 1): it is that of query length - 1 - r.
        mask = distance_bias[:, middle - length + 1 : middle + length].unfold(1, length, 1).flip(1)
    if window is not None:
        positions = torch.arange(length, device=device)
        mask = mask.masked_fill((positions[:, None] - positions).abs() > window, -torch.inf)
    return mask
