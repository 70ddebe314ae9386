"""What a model costs in bytes read and operations done, and the least time a machine could take for that.

    prompt tokens    operations / GEMM rate                             weights are read once per chunk: small
    decode step      bytes of weights and of the rows' KV / bandwidth   one row
                     the same + operations / GEMM rate                  several rows

The sum is no strict bound, since reading and computing can overlap; it is what kernels reach that do neither badly.
`decode_bound_s` is one: kernels run one after the other, and none takes less than the longer of the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.bench.machine import Machine
from tests.bench.workload import Request

__all__ = ["ModelCost"]


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Sizes of a decoder. `windows`: the attention window of each layer, None for all tokens.

    `layer_weights` counts the elements of all linear layers but the head, `head_weights` those of the head;
    `weight_item_bytes` is the size of one. `kv_token_bytes` is what one token takes in all layers.
    """

    vocab_size: int
    layer_weights: int
    head_weights: int
    weight_item_bytes: int
    kv_token_bytes: int
    query_width: int  # query heads x head size
    windows: tuple[int | None, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one step reads."""
        return (self.layer_weights + self.head_weights) * self.weight_item_bytes

    def prompt_operations(self, num_tokens: int, start: int = 0) -> float:
        """Operations of prompt tokens [start, start + num_tokens) and of one row of logits."""
        pairs = sum(_sum_visible(start, start + num_tokens, window) for window in self.windows)
        return 2.0 * (self.layer_weights * num_tokens + self.head_weights) + 4.0 * self.query_width * pairs

    def decode_operations(self, contexts: Sequence[float]) -> float:
        """Operations of one token for each context (tokens seen, itself included)."""
        return self._product_operations(len(contexts)) + self._attention_operations(contexts)

    def decode_bytes(self, contexts: Iterable[float]) -> float:
        """Bytes one decode step reads: all weights, and each row's visible KV."""
        return self.weight_bytes + self._kv_bytes(contexts)

    def decode_s(self, contexts: Sequence[float], machine: Machine) -> float:
        """Seconds of one decode step with a row for each context."""
        seconds = self.decode_bytes(contexts) / machine.read_rate
        return seconds if len(contexts) == 1 else seconds + self.decode_operations(contexts) / machine.gemm_rate

    def decode_bound_s(self, contexts: Sequence[float], gemm_rate: float, read_rate: float) -> float:
        """Seconds below which no decode step can be whose matrix products and attention follow one another."""
        products = max(self._product_operations(len(contexts)) / gemm_rate, self.weight_bytes / read_rate)
        attention = max(self._attention_operations(contexts) / gemm_rate, self._kv_bytes(contexts) / read_rate)
        return products + attention

    def batch_s(self, requests: Sequence[Request], machine: Machine, *, shared_prefix: int = 0) -> float:
        """Seconds of requests that run together; the first `shared_prefix` tokens of all prompts are computed once."""
        operations = self.prompt_operations(shared_prefix) if shared_prefix else 0.0
        for request in requests:
            operations += self.prompt_operations(len(request.token_ids) - shared_prefix, shared_prefix)
        seconds = operations / machine.gemm_rate
        for step in range(1, max(request.max_tokens for request in requests)):
            contexts = [len(request.token_ids) + step for request in requests if request.max_tokens > step]
            seconds += self.decode_s(contexts, machine)
        return seconds

    def _product_operations(self, num_rows: int) -> float:
        return 2.0 * (self.layer_weights + self.head_weights) * num_rows

    def _attention_operations(self, contexts: Iterable[float]) -> float:
        return 4.0 * self.query_width * sum(_visible(c, window) for c in contexts for window in self.windows)

    def _kv_bytes(self, contexts: Iterable[float]) -> float:
        layer_bytes = self.kv_token_bytes / len(self.windows)
        return layer_bytes * sum(_visible(c, window) for c in contexts for window in self.windows)


def _visible(context: float, window: int | None) -> float:
    return context if window is None else min(context, window)


def _sum_visible(start: int, end: int, window: int | None) -> float:
    """Keys seen by the queries at positions [start, end), summed."""
    if window is None or end <= window:
        return (start + 1 + end) * (end - start) / 2
    growing = _sum_visible(start, window, None) if start < window else 0.0
    return growing + window * (end - max(start, window))
