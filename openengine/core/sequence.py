"""`Sequence`: the state of one output, or of one item of a task. `SequenceGroup`: those of one request.

Owned by the scheduler once admitted; the only writer is the loop thread. A sequence knows tokens and
blocks, not text (output.py) and not tensors (slots.py). All work is "compute n more tokens":

    token_ids     | prompt                | output so far     |
    num_computed  |------ has KV ------>|
                                          ^ num_prompt

    WAITING ──admit──▶ RUNNING ──▶ FINISHED | FAILED
       ▲──────preempt──────┘         (WAITING may also end: cancel, error)
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from openengine.core.shared_prefix import SharedPrefix
from openengine.core.subscription import Waiter
from openengine.core.task_work import TaskItem, TaskItemOutput, TaskWork
from openengine.errors import OpenEngineError
from openengine.types import (
    FinishReason,
    GenerateEvent,
    ResponseOptions,
    SamplingParams,
    StopMatch,
    StoppingOptions,
    Usage,
)

__all__ = ["Sequence", "SequenceGroup", "SequenceState", "Sink"]


class SequenceState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


_EDGES = {
    SequenceState.WAITING: {SequenceState.RUNNING, SequenceState.FINISHED, SequenceState.FAILED},
    SequenceState.RUNNING: {SequenceState.WAITING, SequenceState.FINISHED, SequenceState.FAILED},
    SequenceState.FINISHED: set(),
    SequenceState.FAILED: set(),
}
_ENDED = (
    SequenceState.FINISHED,
    SequenceState.FAILED,
)  # looked up once: enumerations are slow, and this is asked often


class Sink(Protocol):
    """Receives one request's events, in the loop thread."""

    def deliver(
        self, events: list[GenerateEvent | TaskItemOutput], *, error: OpenEngineError | None, is_last: bool
    ) -> list[Waiter]:
        """Take events; returns who waits for them in event loops. Must not block or raise."""


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """One accepted request: what every output shares.

    `sampling` holds effective values (nothing but a seed was left open; `seed` is that or fresh
    entropy). `max_len` bounds prompt + output tokens. `sink` receives the events; there is none before
    admission and after the last of them.
    `num_scored` counts prompt positions whose logprobs are known, where they were asked for.
    A probe (of health) is no client's request: neither drains nor limits nor aborts concern it.

    The group of a task has one sequence per item, each with a prompt of its own, and samples nothing; see `of_task`.
    """

    request_id: str
    prompt_ids: np.ndarray  # i32[num_prompt]
    sampling: SamplingParams
    stopping: StoppingOptions
    response: ResponseOptions
    seed: int
    max_len: int
    stop_token_ids: frozenset[int]
    eos_token_ids: frozenset[int]
    sink: Sink | None
    priority: int = 0
    cache_salt: str | None = None
    bypass_prefix_cache: bool = False
    publish: bool = True
    is_probe: bool = False
    max_len_reason: str = ""
    arrival: int = 0
    arrival_time: float = 0.0
    start_time: float | None = None
    first_token_time: float | None = None
    num_cached_tokens: int | None = None  # prompt tokens found in the cache when it first started; None without one
    score_start: int | None = None  # first prompt position whose logprob is wanted, at least 1
    num_scored: int = 0
    guide: Any = None  # CompiledGuide that every output follows
    jumps_ahead: bool = False  # whether tokens that the guide forces are appended without being drawn
    prompt_scores: list[Any] = field(default_factory=list)
    task: TaskWork | None = None
    items: tuple[TaskItem, ...] = ()
    sequences: list[Sequence] = field(default_factory=list)
    num_prompt: int = field(init=False)  # of a task: the tokens of all items

    def __post_init__(self) -> None:
        if self.task is None:
            self.num_prompt = len(self.prompt_ids)
            count = self.sampling.num_sequences or 1
            self.sequences = [Sequence(self, index, self.prompt_ids) for index in range(count)]
        else:
            self.num_prompt = sum(len(item.token_ids) for item in self.items)
            self.sequences = [Sequence(self, index, item.token_ids, item) for index, item in enumerate(self.items)]
            self._share_prefixes()
        if self.score_start is not None:
            self.num_scored = self.score_start

    def _share_prefixes(self) -> None:
        prefixes: dict[int, SharedPrefix] = {}
        for seq in self.sequences:
            if seq.item.num_shared:
                seq.shared = prefixes.setdefault(seq.item.query, SharedPrefix(seq.item.num_shared))
                seq.shared.num_pending += 1

    @classmethod
    def of_task(
        cls, request_id: str, work: TaskWork, items: tuple[TaskItem, ...], *, priority: int = 0, publish: bool = True
    ) -> SequenceGroup:
        """The group of an embed, classify or score request: nothing is sampled, and every item runs for itself."""
        return cls(
            request_id=request_id,
            prompt_ids=np.empty(0, dtype=np.int32),
            sampling=SamplingParams(num_sequences=1),
            stopping=StoppingOptions(max_tokens=0),
            response=ResponseOptions(),
            seed=0,
            max_len=max(len(item.token_ids) for item in items),
            stop_token_ids=frozenset(),
            eos_token_ids=frozenset(),
            sink=None,
            priority=priority,
            bypass_prefix_cache=work.keeps_rows,
            publish=publish,
            task=work,
            items=items,
        )

    @property
    def leader(self) -> Sequence:
        return self.sequences[0]

    @property
    def is_finished(self) -> bool:
        return all(seq.is_finished for seq in self.sequences)

    @property
    def num_output_tokens(self) -> int:
        return sum(seq.num_output for seq in self.sequences)

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        completion = self.num_output_tokens
        return Usage(self.num_prompt, completion, self.num_prompt + completion, self.num_cached_tokens)

    @property
    def order(self) -> tuple[int, int]:
        """Sorts first what runs first: larger priority, then earlier arrival."""
        return (-self.priority, self.arrival)


class Sequence:
    """One output, or one item. `slot` is -1 unless running; a follower (an output of index > 0) has no blocks until the
    leader forks."""

    __slots__ = (
        "awaited_key",
        "block_ids",
        "block_keys",
        "error",
        "finish_reason",
        "group",
        "guide_state",
        "index",
        "is_forked",
        "item",
        "num_announced",
        "num_cached",
        "num_computed",
        "num_prompt",
        "num_published",
        "shared",
        "slot",
        "state",
        "stop_match",
        "stream",
        "token_ids",
    )

    def __init__(self, group: SequenceGroup, index: int, prompt_ids: np.ndarray, item: TaskItem | None = None) -> None:
        self.group = group
        self.index = index
        self.item = item
        self.shared: SharedPrefix | None = None
        self.num_prompt = len(prompt_ids)
        self.token_ids = array("i", prompt_ids.tobytes())
        self.num_cached: int | None = None  # prompt tokens found in the cache when it first started for itself
        self.num_computed = 0
        self.state = SequenceState.WAITING
        self.slot = -1
        self.is_forked = index == 0 or item is not None  # whether it computes for itself
        self.block_ids: list[int] = []
        self.block_keys: list[bytes] = []
        self.num_published = 0
        self.num_announced = 0  # of its keys, how many the scheduler lists as being computed or published
        self.awaited_key: bytes | None = None  # of the block another sequence was computing when it last was looked at
        self.finish_reason: FinishReason | None = None
        self.stop_match: StopMatch | None = None
        self.error: OpenEngineError | None = None
        self.stream: Any = None
        self.guide_state: Any = None  # GuideState while it holds a slot, where its group has a guide

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def is_finished(self) -> bool:
        return self.state in _ENDED

    @property
    def order(self) -> tuple[int, int, int]:
        return (*self.group.order, self.index)

    def move_to(self, state: SequenceState) -> None:
        assert state in _EDGES[self.state], f"{self.group.request_id}[{self.index}]: {self.state} -> {state}"
        self.state = state

    def __repr__(self) -> str:
        return (
            f"Sequence({self.group.request_id}[{self.index}], {self.state.value}, slot={self.slot}, "
            f"{self.num_computed}/{len(self.token_ids)} tokens, {len(self.block_ids)} blocks)"
        )
