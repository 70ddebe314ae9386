"""Oracles: the plainest form of what the engine computes fast, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["naive_attention"]


def naive_attention(
    q: Tensor,  # [Q, num_heads, head_dim], the last Q tokens of the sequence
    k: Tensor,  # [S, num_kv_heads, head_dim], all its tokens
    v: Tensor,  # [S, num_kv_heads, head_dim]
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # [Q, num_heads, head_dim]
    """Causal attention of one sequence with every step written out, in `dtype`."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.to(dtype).repeat_interleave(group, 1)
    scores = torch.einsum("qhd,shd->hqs", q, k) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    query = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None]
    key = torch.arange(k.shape[0])[None]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return torch.einsum("hqs,shd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
