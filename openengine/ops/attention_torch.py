"""Attention in plain PyTorch: the CPU backend, the fallback on CUDA, and the twin of every native kernel.

One idea serves decode and prefill: the G query heads that share a KV head become G query rows, so
nothing is repeated and every step is a batched matrix product.

    decode    a bucket of B sequences        q [B*N, G, H]      k, v [B*N, S, H]
    prefill   c queries of one sequence      q [N, c*G, H]      k, v [N, S, H]

    T tokens · N KV heads · G query heads per KV head · H head size · S keys · X, R batch and rows of a product

Keys are gathered by block, after the step's own were written. A window bounds what is gathered; a
bucket holds sequences of like length, about as many as a core's cache takes; prefill goes through
its queries in chunks, so no score matrix outgrows the cache.

On CPU matrix products and a softmax are 1.2 to 3.5 times as fast as scaled_dot_product_attention
(measured with AVX-512; for float16 the products are float32), but for a few scores, where the count
of operations decides. Products of bfloat16 round the scores to bfloat16, as an eager model does; in
all other cases scores are float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from openengine.ops.batch import ForwardBatch
from openengine.ops.kv_cache import KvCache, KvSpec
from openengine.ops.rope import rotate_

__all__ = ["TorchAttention"]

# Measured on CPU: so much is gathered and so large a score matrix is read again while still in cache, one more
# bucket costs what gathering this much padding does, and so few scores are not worth the operations of a product.
# Accelerators want fewer, larger kernels.
_BUCKET_BYTES = 16 << 20
_PADDING_BYTES = 512 << 10
_SCORE_BYTES = 8 << 20
_FEW_SCORES = 8192
_MIN_CHUNK, _MAX_CHUNK = 16, 128
_ACCELERATOR_FACTOR = 64
_ACCELERATOR_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Decode rows that are attended together."""

    rows: slice  # in the plan's order
    pages: Tensor  # i64[2 * B * N * blocks], what to gather, keys first
    stale: Tensor | None  # i64, gathered rows past their sequence's end, where anything may lie
    bias: Tensor | None  # [B*N, 1, S], 0 or -inf; None if every sequence sees all that is gathered


@dataclass(frozen=True, slots=True)
class _Prefill:
    """The queries of one sequence."""

    row: int  # of its first query
    query_len: int
    context_len: int
    base: int  # position of the first gathered token
    pages: Tensor  # i64[2 * N * blocks]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the layers of one window gather."""

    order: Tensor | None  # i64[num_decodes], decode rows by bucket; None if that is their own order
    buckets: tuple[_Bucket, ...]
    prefills: tuple[_Prefill, ...]


class TorchAttention:
    """The PyTorch backend, for every dtype and device.

    `fused` makes it use scaled_dot_product_attention for all that needs no softcap, as it does off the CPU.
    """

    name = "torch"
    block_size = 32

    def __init__(self, *, fused: bool = False) -> None:
        self._fused = fused
        self._fast_bfloat16 = _has_fast_bfloat16()
        self._workspace = torch.empty(0)
        self._triangles_of: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def allocate(self, spec: KvSpec, num_blocks: int, block_size: int) -> KvCache:
        """A cache of `[num_kv_heads, block_size, head_dim]` blocks, so that the gathered blocks of a head are a matrix."""
        return KvCache(spec, num_blocks, block_size, heads_first=True)

    def prepare(self, batch: ForwardBatch, *, windows: Sequence[int | None]) -> None:
        """Find where the new keys go and, for each window, what to gather and hide."""
        block_size = batch.kv.block_size
        blocks = batch.slot_mapping.div(block_size, rounding_mode="floor")
        offsets = batch.slot_mapping - blocks * block_size
        batch.scratch["rows"] = (_pages(batch.kv, blocks) * block_size + offsets.unsqueeze(1)).flatten()
        longest = max(batch.context_lens)
        plans: dict[int | None, _Plan] = {}
        for window in windows:
            limit = window if window is not None and window < longest else None
            if limit not in plans:
                order, buckets = self._plan_decodes(batch, limit) if batch.num_decodes else (None, ())
                plans[limit] = _Plan(order, buckets, tuple(_plan_prefills(batch, limit)))
            batch.scratch["plan", window] = plans[limit]

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: ForwardBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        angles: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        rotate_(q, k, angles)
        kv, head_dim = batch.kv, q.shape[-1]
        rows = batch.scratch["rows"]
        kv.key(layer).view(-1, head_dim).index_copy_(0, rows, k.reshape(-1, head_dim))
        kv.value(layer).view(-1, head_dim).index_copy_(0, rows, v.reshape(-1, head_dim))
        pages = kv.pair(layer).view(-1, kv.block_size * head_dim)
        plan: _Plan = batch.scratch["plan", window]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if plan.buckets:
            self._decode(q, pages, plan, out, batch, scale, softcap)
        for prefill in plan.prefills:
            self._prefill(q, pages, prefill, out, batch, scale, window, softcap)
        return out.view(q.shape[0], -1)

    # ---- decode: all sequences of a bucket at once -----------------------------------------------

    def _plan_decodes(self, batch: ForwardBatch, window: int | None) -> tuple[Tensor | None, tuple[_Bucket, ...]]:
        kv, device = batch.kv, batch.kv.spec.device
        ends = np.asarray(batch.context_lens[: batch.num_decodes])
        starts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
        lengths = ends - starts // kv.block_size * kv.block_size
        order = np.argsort(-lengths, kind="stable")
        token_bytes = KvCache.bytes_per_block(kv.spec, 1) // kv.spec.num_layers
        factor = 1 if device.type == "cpu" else _ACCELERATOR_FACTOR
        splits = _split(
            lengths[order].tolist(),
            max_tokens=_BUCKET_BYTES * factor // token_bytes,
            max_padding=_PADDING_BYTES * factor // token_bytes,
        )
        if len(splits) == 1:
            order = np.arange(len(ends))
        order_on_device = torch.from_numpy(order).to(device)
        tables = batch.block_tables[order_on_device]
        buckets = tuple(
            self._plan_bucket(kv, rows, tables[rows], starts[order[rows], None], ends[order[rows], None])
            for rows in splits
        )
        return (order_on_device if len(splits) > 1 else None), buckets

    def _plan_bucket(self, kv: KvCache, rows: slice, tables: Tensor, starts: np.ndarray, ends: np.ndarray) -> _Bucket:
        spec, block_size = kv.spec, kv.block_size
        firsts = starts // block_size
        counts = (ends - 1) // block_size + 1 - firsts
        columns = np.arange(counts.max())
        # A shorter sequence repeats its first block: its own and, if it has another, full. So only last blocks are stale.
        columns_of = np.where(columns < counts, firsts + columns, firsts)
        pages = _pages(kv, tables.gather(1, torch.from_numpy(columns_of).to(spec.device)))  # [B, blocks, N]
        pages = _keys_and_values(kv, pages.transpose(1, 2))

        positions = firsts * block_size + np.arange(len(columns) * block_size)
        visible = (positions >= starts) & (positions < ends)
        if visible.all():
            return _Bucket(rows, pages, None, None)
        stale = (positions >= ends) & ((positions < (firsts + counts) * block_size) | (counts == 1))
        stale = np.broadcast_to(stale[None, :, None], (2, len(ends), spec.num_kv_heads, positions.shape[1]))
        stale = torch.from_numpy(stale.ravel().nonzero()[0]).to(spec.device)
        bias = torch.zeros(visible.shape, dtype=spec.dtype, device=spec.device)
        bias.masked_fill_(torch.from_numpy(~visible).to(spec.device), -torch.inf)
        return _Bucket(rows, pages, stale, bias.repeat_interleave(spec.num_kv_heads, 0).unsqueeze(1))

    def _decode(
        self,
        q: Tensor,
        pages: Tensor,
        plan: _Plan,
        out: Tensor,
        batch: ForwardBatch,
        scale: float,
        softcap: float | None,
    ) -> None:
        num_kv_heads, head_dim = batch.kv.spec.num_kv_heads, q.shape[-1]
        q, out = q[: batch.num_decodes], out[: batch.num_decodes]
        results = out
        if plan.order is not None:
            q, results = q.index_select(0, plan.order), torch.empty_like(out)
        for bucket in plan.buckets:
            rows = q[bucket.rows]
            size = rows.shape[0] * num_kv_heads
            gathered = self._gather(pages, bucket.pages).view(2, size, -1, head_dim)
            if bucket.stale is not None:
                gathered.view(-1, head_dim).index_fill_(0, bucket.stale, 0)
            folded = rows.reshape(size, -1, head_dim)
            fused = self._is_fused(q, softcap, num_scores=folded.shape[0] * folded.shape[1] * gathered.shape[2])
            attend = _attend_fused if fused else self._attend
            attended = attend(folded, *gathered.unbind(), bucket.bias, (), scale, softcap)
            results[bucket.rows] = attended.view(rows.shape)
        if plan.order is not None:
            out.index_copy_(0, plan.order, results)

    # ---- prefill: one sequence, a chunk of queries at a time -------------------------------------

    def _prefill(
        self,
        q: Tensor,
        pages: Tensor,
        prefill: _Prefill,
        out: Tensor,
        batch: ForwardBatch,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        num_kv_heads, head_dim = batch.kv.spec.num_kv_heads, q.shape[-1]
        keys, values = self._gather(pages, prefill.pages).view(2, num_kv_heads, -1, head_dim)
        rows = slice(prefill.row, prefill.row + prefill.query_len)
        q, out = (x[rows].unflatten(1, (num_kv_heads, -1)) for x in (q, out))  # [query_len, N, G, H]
        past, group = prefill.context_len - prefill.query_len, q.shape[2]
        if window is not None and window >= prefill.context_len:
            window = None
        fused = self._is_fused(q, softcap, num_scores=num_kv_heads * group * prefill.query_len * prefill.context_len)
        if fused and past == 0 and window is None:
            heads = (num_kv_heads, group, -1, -1)
            keys, values = (x[:, None, : prefill.context_len].expand(heads) for x in (keys, values))
            attended = F.scaled_dot_product_attention(q.permute(1, 2, 0, 3), keys, values, is_causal=True, scale=scale)
            out.copy_(attended.permute(2, 0, 1, 3))
            return
        attend = _attend_fused if fused else self._attend
        span = min(prefill.context_len, (window or prefill.context_len) + _MAX_CHUNK)
        max_chunk = _chunk(span * num_kv_heads * group * q.dtype.itemsize, q.device)
        future, behind = self._triangles(group, q.dtype, q.device)
        for start in range(0, prefill.query_len, max_chunk):
            chunk = min(max_chunk, prefill.query_len - start)
            first, end = past + start, past + start + chunk  # positions of the queries
            low = max(0, first - window + 1) if window is not None else 0
            visible = slice(low - prefill.base, end - prefill.base)
            edges = [(slice(first - low, end - low), future[: chunk * group, :chunk])]
            if window is not None:
                # The last query no longer sees the first `width` keys, the one before it one less, and so on.
                width = end - window - low
                if width > 0:
                    edges.append((slice(0, width), behind[: chunk * group, chunk - 1 - width : chunk - 1]))
            folded = q[start : start + chunk].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
            attended = attend(folded, keys[:, visible], values[:, visible], None, edges, scale, softcap)
            out[start : start + chunk] = attended.unflatten(1, (chunk, group)).transpose(0, 1)

    def _triangles(self, group: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """What row r of a chunk hides: columns after r, and columns before r; each `[chunk * group, chunk]`."""
        key = (group, dtype, device)
        if key not in self._triangles_of:
            size = _MAX_CHUNK if device.type == "cpu" else _ACCELERATOR_CHUNK
            with torch.inference_mode(False):
                square = torch.full((size, size), -torch.inf, dtype=dtype, device=device)
                self._triangles_of[key] = tuple(
                    x.repeat_interleave(group, 0) for x in (square.triu(1), square.tril(-1))
                )
        return self._triangles_of[key]

    # ---- both ------------------------------------------------------------------------------------

    def _gather(self, pages: Tensor, index: Tensor) -> Tensor:
        """The pages `index`, in the workspace: valid until the next call."""
        size = index.shape[0] * pages.shape[1]
        workspace = self._workspace
        if workspace.numel() < size or workspace.dtype != pages.dtype or workspace.device != pages.device:
            with torch.inference_mode(False):
                workspace = self._workspace = torch.empty(size * 5 // 4, dtype=pages.dtype, device=pages.device)
        return torch.index_select(pages, 0, index, out=workspace[:size].view(-1, pages.shape[1]))

    def _attend(
        self,
        q: Tensor,  # [X, R, H]
        k: Tensor,  # [X, S, H]
        v: Tensor,  # [X, S, H]
        bias: Tensor | None,  # added to all scores, [X, 1, S]
        edges: Sequence[tuple[slice, Tensor]],  # (columns, what is added to the scores there)
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        dtype = self._product_dtype(q.dtype) if softcap is None else torch.float32
        query, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if bias is not None and bias.dtype == dtype and softcap is None:
            scores = torch.baddbmm(bias, query, k.mT, alpha=scale)
        else:
            scores = torch.baddbmm(query.new_empty(()), query, k.mT, beta=0, alpha=scale)
            if softcap is not None:
                scores.div_(softcap).tanh_().mul_(softcap)
            if bias is not None:
                scores.add_(bias)
        for columns, hidden in edges:
            scores[:, :, columns].add_(hidden)
        return torch.bmm(scores.softmax(-1), v).to(q.dtype)

    def _is_fused(self, q: Tensor, softcap: float | None, *, num_scores: int) -> bool:
        if softcap is not None:
            return False
        few = num_scores <= _FEW_SCORES and self._product_dtype(q.dtype) == q.dtype
        return self._fused or few or q.device.type != "cpu"

    def _product_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What matrix products of `dtype` are computed in on CPU."""
        return dtype if dtype == torch.bfloat16 and self._fast_bfloat16 else torch.float32


def _attend_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    edges: Sequence[tuple[slice, Tensor]],
    scale: float,
    softcap: None,
) -> Tensor:
    if edges:
        bias = q.new_zeros(1, q.shape[1], k.shape[1])
        for columns, hidden in edges:
            bias[0, :, columns].add_(hidden)
    if bias is not None:
        bias = bias.expand(1, q.shape[0], -1, -1)
    return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=bias, scale=scale)[0]


def _has_fast_bfloat16() -> bool:
    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return probe is not None and probe()


def _split(lengths: list[int], *, max_tokens: int, max_padding: int) -> list[slice]:
    """Cut descending lengths into runs whose padded size and padding stay below the limits; one item always fits."""
    splits, begin, padding = [], 0, 0
    for index, length in enumerate(lengths):
        padding += lengths[begin] - length
        if index > begin and (padding > max_padding or (index + 1 - begin) * lengths[begin] > max_tokens):
            splits.append(slice(begin, index))
            begin, padding = index, 0
    return [*splits, slice(begin, len(lengths))]


def _chunk(bytes_per_query: int, device: torch.device) -> int:
    """How many queries to attend at once."""
    if device.type == "cpu":
        return max(_MIN_CHUNK, min(_MAX_CHUNK, _SCORE_BYTES // bytes_per_query))
    return max(_MIN_CHUNK, min(_ACCELERATOR_CHUNK, _SCORE_BYTES * _ACCELERATOR_FACTOR // bytes_per_query))


def _plan_prefills(batch: ForwardBatch, window: int | None) -> Iterator[_Prefill]:
    block_size, row = batch.kv.block_size, batch.num_decodes
    for index in range(batch.num_decodes, batch.num_seqs):
        query_len, context_len = batch.query_lens[index], batch.context_lens[index]
        low = 0 if window is None else max(0, context_len - query_len - window + 1)
        blocks = batch.block_tables[index, low // block_size : -(-context_len // block_size)]
        pages = _keys_and_values(batch.kv, _pages(batch.kv, blocks).T)
        yield _Prefill(row, query_len, context_len, low // block_size * block_size, pages)
        row += query_len


def _pages(kv: KvCache, blocks: Tensor) -> Tensor:
    """The page of each head in `blocks` i[...] -> i64[..., num_kv_heads]."""
    heads = torch.arange(kv.spec.num_kv_heads, device=kv.spec.device)
    return blocks.unsqueeze(-1) * kv.spec.num_kv_heads + heads


def _keys_and_values(kv: KvCache, pages: Tensor) -> Tensor:
    """Key pages, then the value pages that belong to them."""
    return torch.stack((pages, pages + kv.num_blocks * kv.spec.num_kv_heads)).flatten()
