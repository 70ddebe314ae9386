"""`TaskKind`: what the forward pass of one item ends in, besides sampling. Values only.

EMBED            one vector                                f32[D]
EMBED_TOKENS     a vector per token                        f32[n, D]
EMBED_SPARSE     entries of the vocabulary, their weights  f32[2, N], ascending entries
CLASSIFY         a logit per class                         f32[C]
CLASSIFY_TOKENS  a logit per token and class               f32[n, C]
SCORE            the logits of a pair                      f32[C]
LABELS           logits of some ids as the next token, and logsumexp over the vocabulary: f32[labels + 1]
"""

from __future__ import annotations

from enum import Enum

__all__ = ["TaskKind"]


class TaskKind(Enum):
    """What becomes of an item's hidden rows; the array it gives is in the module's table."""

    EMBED = "embed"
    EMBED_TOKENS = "embed_tokens"
    EMBED_SPARSE = "embed_sparse"
    CLASSIFY = "classify"
    CLASSIFY_TOKENS = "classify_tokens"
    SCORE = "score"
    LABELS = "labels"

    @property
    def task(self) -> str:
        """The contract's name of the task: "embed", "classify" or "score"."""
        return "score" if self in (TaskKind.SCORE, TaskKind.LABELS) else self.value.partition("_")[0]

    @property
    def is_per_token(self) -> bool:
        """Whether there is one result row per token of the item."""
        return self in (TaskKind.EMBED_TOKENS, TaskKind.CLASSIFY_TOKENS)
