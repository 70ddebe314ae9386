"""Ragged batches for the tests of attention backends: random sequences, run through a backend and through the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openengine.ops.attention import AttentionBackend
from openengine.ops.batch import ForwardBatch
from openengine.ops.kv_cache import KvCache, KvSpec
from tests.reference import naive_attention

__all__ = ["Sequences", "make_batch"]


def make_batch(kv: KvCache, tables: list[list[int]], query_lens: list[int], context_lens: list[int]) -> ForwardBatch:
    """The batch of one step, decode rows first; `tables` name each sequence's blocks."""
    device = kv.spec.device
    num_decodes = next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens))
    assert all(n > 1 for n in query_lens[num_decodes:]), "one-token queries come first"
    positions = [p for n, end in zip(query_lens, context_lens) for p in range(end - n, end)]
    owners = [i for i, n in enumerate(query_lens) for _ in range(n)]
    slots = [tables[i][p // kv.block_size] * kv.block_size + p % kv.block_size for i, p in zip(owners, positions)]
    width = max(map(len, tables))
    return ForwardBatch(
        input_ids=torch.zeros(len(positions), dtype=torch.int64, device=device),
        positions=torch.tensor(positions, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        cu_seqlens_q=torch.tensor([0, *query_lens], device=device).cumsum(0).to(torch.int32),
        seq_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32, device=device),
        query_lens=query_lens,
        context_lens=context_lens,
        num_decodes=num_decodes,
        logits_rows=torch.arange(len(query_lens), device=device),
        kv=kv,
    )


@dataclass(frozen=True)
class Sequences:
    """Random q, k and v of whole sequences, of which the last `query_lens[i]` tokens are asked for."""

    query_lens: list[int]
    context_lens: list[int]
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    window: int | None = None
    softcap: float | None = None
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 * 0.9  # not a power of two

    def tensors(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """q, k and v of each sequence, `[context_len, heads, head_dim]`, with scores of several units.

        Sequence i depends on `seed + i` alone.
        """
        return [self._sequence(self.seed + index, length) for index, length in enumerate(self.context_lens)]

    def _sequence(self, seed: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        parts = ((self.num_heads, 2.0), (self.num_kv_heads, 1.0), (self.num_kv_heads, 1.0))
        return tuple(
            (torch.randn(length, heads, self.head_dim, generator=generator) * scale).to(self.device, self.dtype)
            for heads, scale in parts
        )

    def expected(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """What the oracle gives in `dtype`, `[T, num_heads * head_dim]`."""
        options = {"scale": self.scale, "window": self.window, "softcap": self.softcap, "dtype": dtype}
        outputs = [naive_attention(q[-n:], k, v, **options) for n, (q, k, v) in zip(self.query_lens, self.tensors())]
        return torch.cat(outputs).flatten(1)

    @torch.inference_mode()
    def attend(self, backend: AttentionBackend, block_size: int, *, fill: float = torch.nan) -> Tensor:
        """What the backend gives: cached tokens are written by a step before. Nobody wrote the slots that hold `fill`."""
        device = torch.device(self.device)
        spec = KvSpec(2, self.num_kv_heads, self.head_dim, self.dtype, device)
        counts = [-(-n // block_size) for n in self.context_lens]
        kv = backend.allocate(spec, sum(counts) + 3, block_size)
        for layer in range(spec.num_layers):
            kv.key(layer).fill_(fill)
            kv.value(layer).fill_(fill)
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(self.seed)).tolist()
        tables = [[order.pop() for _ in range(count)] for count in counts]
        cached = [n - m for n, m in zip(self.context_lens, self.query_lens)]
        earlier = sorted((i for i, n in enumerate(cached) if n), key=lambda i: cached[i] > 1)
        if earlier:
            lens = [cached[i] for i in earlier]
            batch = make_batch(kv, [tables[i] for i in earlier], lens, lens)
            self._step(backend, batch, [(i, 0, cached[i]) for i in earlier])
        batch = make_batch(kv, tables, self.query_lens, self.context_lens)
        return self._step(backend, batch, [(i, cached[i], n) for i, n in enumerate(self.context_lens)])

    def _step(self, backend: AttentionBackend, batch: ForwardBatch, spans: list[tuple[int, int, int]]) -> Tensor:
        sequences = self.tensors()
        q, k, v = (torch.cat([sequences[i][part][begin:end] for i, begin, end in spans]) for part in range(3))
        backend.prepare(batch, windows=[self.window])
        options = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        out = backend.forward(1, q, k, v, batch, **options)
        assert out.shape == (batch.num_tokens, self.num_heads * self.head_dim)
        assert out.dtype == self.dtype
        return out
