"""The works as data: token-id prompts from a fixed seed, with how many tokens each request generates.

`single`, `batch64`, `prefill` and `prefix` are the works that peers are measured with; their numbers, their seed and
the order in which they draw are fixed, so that every engine gets the same prompts. Greedy, end of sequence ignored.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["BATCH_WORKS", "SHARED_PREFIX", "Request", "arrival_times", "distinct", "make", "uniform"]

_SEED = 7
_VOCAB = 40_000  # ids are drawn from [_FIRST_ID, _VOCAB): no special tokens, and within the vocabulary of most models
_FIRST_ID = 100
SHARED_PREFIX = 512  # tokens that all prompts of `prefix` begin with


class Request(NamedTuple):
    """One prompt and the exact number of tokens it generates."""

    token_ids: list[int]
    max_tokens: int


def _batch64(draw: Callable[[int], list[int]], rng: random.Random) -> list[Request]:
    return [Request(draw(rng.randint(16, 256)), rng.randint(64, 128)) for _ in range(64)]


def _prefix(draw: Callable[[int], list[int]], _rng: random.Random) -> list[Request]:
    shared = draw(SHARED_PREFIX)
    return [Request(shared + draw(32), 32) for _ in range(32)]


_WORKS: dict[str, Callable[[Callable[[int], list[int]], random.Random], list[Request]]] = {
    "single": lambda draw, _rng: [Request(draw(64), 128)],
    "batch64": _batch64,
    "prefill": lambda draw, _rng: [Request(draw(1024), 1) for _ in range(8)],
    "prefix": _prefix,
    "long": lambda draw, _rng: [Request(draw(6000), 256)],
}

BATCH_WORKS = tuple(_WORKS)


def make(name: str, vocab_size: int) -> list[Request]:
    """The requests of a batch work. Raises KeyError for an unknown name."""
    rng = random.Random(_SEED)
    return _WORKS[name](lambda count: _draw(rng, count, vocab_size), rng)


def uniform(num_requests: int, num_prompt: int, num_output: int, vocab_size: int) -> list[Request]:
    """Requests of one size, with unlike prompts, each the beginning of the same request's longer ones."""
    rngs = (random.Random(f"{_SEED}, {index}") for index in range(num_requests))
    return [Request(_draw(rng, num_prompt, vocab_size), num_output) for rng in rngs]


def distinct(requests: list[Request], run: int, vocab_size: int, *, shared: bool = False) -> list[Request]:
    """The same requests with other first tokens, so that no earlier run's prefix fits; `shared` keeps them alike."""
    span = min(_VOCAB, vocab_size) - _FIRST_ID
    return [
        Request([_FIRST_ID + (37 * run + (0 if shared else index)) % span, *request.token_ids[1:]], request.max_tokens)
        for index, request in enumerate(requests)
    ]


def arrival_times(num_requests: int, rate: float) -> list[float]:
    """Seconds at which requests of a Poisson process of `rate` per second arrive, from a fixed seed."""
    rng = random.Random(_SEED)
    times, now = [], 0.0
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        times.append(now)
    return times


def _draw(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    end = min(_VOCAB, vocab_size)
    return [rng.randrange(_FIRST_ID, end) for _ in range(count)]
