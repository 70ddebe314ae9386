"""`EncoderScheduler`: `Scheduler` for models without a KV cache: whole items, packed into steps by their tokens.

An item is computed in one step and is then over, so that there are no slots, no blocks, no chunks and no preemption. A step
takes up to `max_num_batched_tokens`; a longer item has a step of its own. Of requests that wait with equal priority the
first gets at most half of a step while others wait, and of those the shortest come first:

    budget   | first request in order, at most half while others wait | the others, shortest first | whoever has more |
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from openengine.core.blocks import BlockManager
from openengine.core.sequence import Sequence, SequenceGroup, SequenceState
from openengine.core.step_plan import ScheduledSeq, StepPlan, TokenDelta
from openengine.errors import OpenEngineError
from openengine.types import FinishReason, StopMatch

__all__ = ["EncoderScheduler"]


@dataclass(slots=True, eq=False)
class _Queue:
    """One request's items that have not been planned. Those that ended meanwhile may still lie among `items`; the counts
    lack them."""

    group: SequenceGroup
    items: deque[Sequence]
    num_items: int
    num_tokens: int

    def peek(self) -> Sequence | None:
        """The first item that still waits; those before it that have ended are dropped."""
        while self.items and self.items[0].state is not SequenceState.WAITING:
            self.items.popleft()
        return self.items[0] if self.items else None


class EncoderScheduler:
    """Owns waiting and running items. Not thread safe: the loop thread calls it. Methods are those of `Scheduler`."""

    def __init__(self, *, max_num_batched_tokens: int) -> None:
        self.blocks = BlockManager(0, 1, root_key=b"", enable_prefix_cache=False, record_events=False)
        self._budget = max_num_batched_tokens
        self._queues: list[_Queue] = []  # sorted by order; each has an item
        self._running: list[Sequence] = []

    # ---- state others may read -------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._queues)

    @property
    def running(self) -> Seq[Sequence]:
        return [seq for seq in self._running if not seq.is_finished]

    @property
    def waiting(self) -> Seq[Sequence]:
        return [seq for queue in self._queues for seq in queue.items if seq.state is SequenceState.WAITING]

    @property
    def num_running_groups(self) -> int:
        """Requests that have begun and have items left."""
        started = {queue.group for queue in self._queues if queue.group.start_time is not None}
        return len(started | {seq.group for seq in self.running})

    @property
    def num_waiting_tokens(self) -> int:
        return sum(queue.num_tokens for queue in self._queues)

    # ---- a request's life ------------------------------------------------------------------------

    def add(self, group: SequenceGroup) -> None:
        """Queue an accepted group."""
        items = deque(group.sequences)
        queue = _Queue(group, items, len(items), sum(seq.num_tokens for seq in items))
        bisect.insort(self._queues, queue, key=_order)

    def finish(self, seq: Sequence, reason: FinishReason, stop_match: StopMatch | None = None) -> None:
        """End one item, waiting or running."""
        seq.finish_reason = reason
        self._end(seq, SequenceState.FINISHED)

    def fail(self, seq: Sequence, error: OpenEngineError) -> None:
        """End one item with an error."""
        seq.error = error
        self._end(seq, SequenceState.FAILED)

    def reset(self) -> None:
        """Drop every item, when a fault has made the books untrustworthy."""
        groups = [*(queue.group for queue in self._queues), *(seq.group for seq in self._running)]
        for group in dict.fromkeys(groups):
            for seq in group.sequences:
                if not seq.is_finished:
                    seq.move_to(SequenceState.FAILED)
        self._queues, self._running = [], []

    # ---- the step --------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Choose the next step's items. An empty plan means there is nothing to run."""
        plan = StepPlan()
        if self._queues:
            self._fill(plan)
            self._queues = [queue for queue in self._queues if queue.num_items]
        self._running = plan.admitted
        return plan

    def commit(self, plan: StepPlan, token_ids: Seq[int]) -> list[TokenDelta]:
        """Record that the plan's items were computed; nothing is sampled."""
        for item in plan.scheduled:
            item.seq.num_computed = item.num_tokens
        return []

    def _fill(self, plan: StepPlan) -> None:
        head, *others = self._queues
        if not others:
            self._take(head, plan, self._budget, self._budget)
            return
        others.sort(key=lambda queue: (-queue.group.priority, queue.num_tokens))
        left = self._budget
        for queue in (head, *others):
            if queue.group.priority == head.group.priority:
                left -= self._take(queue, plan, left, self._budget // 2)
        for queue in (head, *others):
            left -= self._take(queue, plan, left, left)

    def _take(self, queue: _Queue, plan: StepPlan, left: int, share: int) -> int:
        """Plan items of `queue` of up to `share` tokens, of which `left` are free. The first of a step always fits."""
        taken = 0
        while (seq := queue.peek()) is not None:
            fits = taken + seq.num_tokens <= min(left, share)
            if not fits and plan.scheduled:
                break
            queue.items.popleft()
            self._leave_queue(queue, seq)
            seq.move_to(SequenceState.RUNNING)
            plan.scheduled.append(ScheduledSeq(seq, 0, seq.num_tokens, pools=True))
            plan.admitted.append(seq)
            taken += seq.num_tokens
        return taken

    # ---- giving back -----------------------------------------------------------------------------

    def _end(self, seq: Sequence, state: SequenceState) -> None:
        if seq.state is SequenceState.WAITING:
            index = bisect.bisect_left(self._queues, seq.group.order, key=_order)
            if index < len(self._queues) and self._queues[index].group is seq.group:
                self._leave_queue(self._queues[index], seq)
                if not self._queues[index].num_items:
                    del self._queues[index]
        seq.move_to(state)

    def _leave_queue(self, queue: _Queue, seq: Sequence) -> None:
        queue.num_items -= 1
        queue.num_tokens -= seq.num_tokens

    def check(self) -> None:
        """Assert every invariant; for tests."""
        assert self._queues == sorted(self._queues, key=_order)
        for queue in self._queues:
            waiting = [seq for seq in queue.items if seq.state is SequenceState.WAITING]
            assert waiting and len(waiting) == queue.num_items
            assert queue.num_tokens == sum(seq.num_tokens for seq in waiting)


def _order(queue: _Queue) -> tuple[int, int]:
    return queue.group.order
