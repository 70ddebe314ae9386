"""What a step computes and what it gives: the values that schedulers and runners exchange. Owns no decision."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from openengine.core.sequence import Sequence
from openengine.types import FinishReason, StopMatch

__all__ = ["ScheduledSeq", "StepPlan", "TokenDelta"]


@dataclass(slots=True)
class ScheduledSeq:
    """Compute tokens [start, start + num_tokens) of `seq`.

    `samples`: the sequences that draw a token from the last row, in index order; empty inside a prompt.
    `pools`: the last chunk of a task's item, whose hidden rows become its result.
    `score`: prompt positions [a, b) whose logprobs the rows of this chunk give (row p scores token p + 1).
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: Seq[Sequence] = ()
    score: tuple[int, int] | None = None
    pools: bool = False


@dataclass(slots=True)
class StepPlan:
    """One step's work: decode rows first. `admitted` got a slot in this step, `released` slots were given up."""

    scheduled: list[ScheduledSeq] = field(default_factory=list)
    num_decodes: int = 0
    admitted: list[Sequence] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


@dataclass(slots=True)
class TokenDelta:
    """One sampled token: `row` is its place among the step's samples. `reason` ends the output, unless a stop text does first."""

    seq: Sequence
    token_id: int
    row: int
    reason: FinishReason | None = None
    stop_match: StopMatch | None = None
