"""`Scheduler`: decides what each step computes, and is the only writer of sequences and blocks.

A step has a budget of `max_num_batched_tokens`. Decodes (one token each) come first; what is left is
shared by the prompts still being computed:

    budget   | decodes | first prompt in order, at most half while others wait | the others, shortest first |

so that a long prompt always advances, yet a short one behind it starts within a few steps. A waiting
group is admitted, in order, when slots and blocks for its whole prompt are free; admission never
preempts. When a decode finds no free block, the running sequence that is last in order (lowest
priority, then latest arrival) goes back to waiting; it keeps its tokens and computes them again, mostly
from the prefix cache. A prompt whose next block is being computed by another sequence right now waits
for that block instead of computing it twice.

`num_sequences > 1`: the leader computes the prompt, its last logits row is sampled for every output, and
the followers then share its blocks; whoever first writes into a shared block gets a copy of its own.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence as Seq

from openengine.core.blocks import BlockManager
from openengine.core.cache_keys import CacheKeyContext, block_key, block_keys, extra_keys
from openengine.core.sequence import Sequence, SequenceGroup, SequenceState
from openengine.core.shared_prefix import PrefixHolds, SharedPrefix
from openengine.core.step_plan import ScheduledSeq, StepPlan, TokenDelta
from openengine.errors import OpenEngineError
from openengine.types import FinishReason, StopMatch

__all__ = ["Scheduler"]


class Scheduler:
    """Owns waiting and running sequences, slots and blocks. Not thread safe: the loop thread calls it."""

    def __init__(self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._waiting: list[Sequence] = []  # sorted by order; a group not yet started is its leader
        self._running: list[Sequence] = []  # sorted by order
        self._computing: dict[bytes, list[Sequence]] = {}  # who computes the prompt block of a key, not yet published
        self._released_slots: list[int] = []
        self._prefixes = PrefixHolds(blocks)

    # ---- state others may read -------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def running(self) -> Seq[Sequence]:
        return self._running

    @property
    def waiting(self) -> Seq[Sequence]:
        return self._waiting

    @property
    def num_running_groups(self) -> int:
        """Requests with a running sequence."""
        return len({id(seq.group) for seq in self._running})

    @property
    def num_waiting_tokens(self) -> int:
        """Known tokens of sequences that wait."""
        return sum(seq.num_tokens for seq in self._waiting)

    # ---- a request's life ------------------------------------------------------------------------

    def add(self, group: SequenceGroup) -> None:
        """Queue an accepted group."""
        group.num_cached_tokens = 0 if self.blocks.enable_prefix_cache else None
        if group.task is None:
            self._extend_keys(group.leader)
            bisect.insort(self._waiting, group.leader, key=_order)
        else:
            self._waiting += group.sequences
            self._waiting.sort(key=_order)

    def finish(self, seq: Sequence, reason: FinishReason, stop_match: StopMatch | None = None) -> None:
        """End one output, waiting or running, and give back what it holds."""
        seq.finish_reason, seq.stop_match = reason, stop_match
        self._end(seq, SequenceState.FINISHED)

    def fail(self, seq: Sequence, error: OpenEngineError) -> None:
        """End one output with an error. What it computed may be wrong, so its blocks leave the prefix cache."""
        seq.error = error
        self.blocks.forget(seq.block_ids)
        self._end(seq, SequenceState.FAILED)

    def reset(self) -> None:
        """Drop every sequence and start with empty books, when a fault has made them untrustworthy."""
        for seq in {id(seq): seq for head in [*self._running, *self._waiting] for seq in head.group.sequences}.values():
            if not seq.is_finished:
                seq.block_ids, seq.slot = [], -1
                seq.move_to(SequenceState.FAILED)
        self.blocks = self.blocks.renewed()
        self._prefixes = PrefixHolds(self.blocks)
        self._free_slots = list(range(self._max_num_seqs - 1, -1, -1))
        self._waiting, self._running, self._computing = [], [], {}
        self._released_slots = list(self._free_slots)

    # ---- the step --------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Choose the next step's work and allocate its blocks. An empty plan means there is nothing to run."""
        plan = StepPlan()
        self._schedule_decodes(plan)
        self._admit(plan)
        self._schedule_prompts(plan)
        plan.released, self._released_slots = self._released_slots, []
        return plan

    def commit(self, plan: StepPlan, token_ids: Seq[int]) -> list[TokenDelta]:
        """Record what the step computed. `token_ids`: one per sampled row, in the order of the plan.

        Returns one delta per sampled token, plus one with `token_id` -1 for an output that may have no tokens.
        """
        deltas: list[TokenDelta] = []
        row = 0
        for item in plan.scheduled:
            seq = item.seq
            if seq.is_finished:  # failed while the step ran
                row += len(item.samples)
                continue
            seq.num_computed += item.num_tokens
            if item.score is not None:
                seq.group.num_scored = item.score[1]
            self._publish(seq)
            self._prefixes.hold(seq)
            for sampled in item.samples:
                if not sampled.is_forked:
                    self._fork(seq, sampled)
                deltas.append(self._append(sampled, int(token_ids[row]), row))
                row += 1
            if seq.group.task is not None:
                continue  # its result is no token
            if not item.samples and seq.num_computed == seq.num_tokens and seq.group.stopping.max_tokens == 0:
                for output in seq.group.sequences:
                    deltas.append(TokenDelta(output, -1, -1, FinishReason.LENGTH))
        self._prefixes.release()
        return deltas

    # ---- decodes ---------------------------------------------------------------------------------

    def _schedule_decodes(self, plan: StepPlan) -> None:
        index = 0
        while index < len(self._running):
            seq = self._running[index]
            if seq.is_forked and seq.num_output:
                if not self._grow(seq, plan):
                    continue  # preempted: the next sequence is at the same index
                if _is_decode(seq):
                    plan.scheduled.append(ScheduledSeq(seq, seq.num_computed, 1, (seq,)))
            index += 1
        plan.num_decodes = len(plan.scheduled)

    def _grow(self, seq: Sequence, plan: StepPlan) -> bool:
        """Make the blocks of the tokens to compute writable by `seq` alone. False when `seq` itself was preempted."""
        first = seq.num_computed // self.blocks.block_size
        num_new = self._num_blocks(seq.num_tokens) - len(seq.block_ids)
        needs_copy = first < len(seq.block_ids) and self.blocks.is_shared(seq.block_ids[first])
        while self.blocks.num_free < num_new + needs_copy:
            if self._prefixes.release(everything=True):
                continue
            victim = self._running[-1]
            self._preempt(victim, plan)
            if victim is seq:
                return False
            needs_copy = needs_copy and self.blocks.is_shared(seq.block_ids[first])
        if needs_copy:
            (block_id,) = self.blocks.allocate(1)
            plan.block_copies.append((seq.block_ids[first], block_id))
            self.blocks.release([seq.block_ids[first]])
            seq.block_ids[first] = block_id
        if num_new > 0:
            seq.block_ids += self.blocks.allocate(num_new)
        return True

    def _preempt(self, seq: Sequence, plan: StepPlan) -> None:
        """Send `seq` back to waiting. A leader that has not forked yet takes its followers along."""
        if not seq.is_forked:
            seq = seq.group.leader
        for member in _unforked_group(seq):
            self._release(member)
            self._running.remove(member)
            member.move_to(SequenceState.WAITING)
            plan.preempted.append(member)
        bisect.insort(self._waiting, seq, key=_order)

    # ---- admission -------------------------------------------------------------------------------

    def _admit(self, plan: StepPlan) -> None:
        if plan.preempted:
            return  # memory is short: let the step free some first
        index = 0
        while index < len(self._waiting) and self._free_slots:
            seq = self._waiting[index]
            if self._is_awaited(seq) or self._prefixes.is_awaited(seq):
                index += 1
                continue
            members = _unforked_group(seq)
            if len(members) > len(self._free_slots):
                return
            self._extend_keys(seq)
            reused = self._match(seq)
            seq.awaited_key = self._next_key(seq, len(reused))
            if self._is_awaited(seq):
                index += 1
                continue
            prefix = self._prefixes.find(seq, len(reused) * self.blocks.block_size)
            if prefix is not None:
                reused = prefix.block_ids[: prefix.length // self.blocks.block_size]
            num_new = self._num_blocks(seq.num_tokens) - len(reused)
            if not self.blocks.can_allocate(num_new, reused):
                if not self._running and self._prefixes.release(everything=True):
                    continue
                return
            del self._waiting[index]
            self._start(seq, members, reused, num_new, plan, prefix)

    def _match(self, seq: Sequence) -> list[int]:
        group = seq.group
        limit = seq.num_tokens - 1
        if group.score_start is not None:  # row p scores token p + 1, so it must be computed
            limit = min(limit, group.num_scored - 1)
        if group.bypass_prefix_cache and not seq.num_output:
            limit = 0
        return self.blocks.match(seq.block_keys, seq.token_ids, limit)

    def _next_key(self, seq: Sequence, num_matched: int) -> bytes | None:
        """The key of the first block that `seq` would have to compute though another prompt may have it too."""
        group = seq.group
        if group.bypass_prefix_cache or group.score_start is not None or num_matched >= len(seq.block_keys):
            return None
        return seq.block_keys[num_matched] if (num_matched + 1) * self.blocks.block_size < seq.num_tokens else None

    def _is_awaited(self, seq: Sequence) -> bool:
        """Whether a sequence that runs before `seq` anyway is computing its next block; a later one may never get to it."""
        return any(other.order < seq.order for other in self._computing.get(seq.awaited_key, ()))

    def _start(
        self,
        seq: Sequence,
        members: list[Sequence],
        reused: list[int],
        num_new: int,
        plan: StepPlan,
        prefix: SharedPrefix | None,
    ) -> None:
        if prefix is None:
            self.blocks.take(reused)
        else:
            self.blocks.fork(reused)
        seq.block_ids = [*reused, *self.blocks.allocate(num_new)]
        seq.num_computed = len(reused) * self.blocks.block_size
        if prefix is not None and prefix.length > seq.num_computed:  # the rest of it lies within a block
            plan.block_copies.append((prefix.block_ids[len(reused)], seq.block_ids[len(reused)]))
            seq.num_computed = prefix.length
        seq.num_published = len(reused)
        seq.awaited_key = None
        seq.num_announced = len(seq.block_keys)
        for key in seq.block_keys[seq.num_published :]:
            self._computing.setdefault(key, []).append(seq)
        if seq.num_cached is None:  # later hits are on its own work
            self._prefixes.begin(seq)
            seq.num_cached = seq.num_computed
            if self.blocks.enable_prefix_cache:
                seq.group.num_cached_tokens += seq.num_computed
        for member in members:
            member.slot = self._free_slots.pop()
            member.move_to(SequenceState.RUNNING)
            bisect.insort(self._running, member, key=_order)
            plan.admitted.append(member)

    # ---- prompts ---------------------------------------------------------------------------------

    def _schedule_prompts(self, plan: StepPlan) -> None:
        if plan.num_decodes == len(self._running):
            return
        admitted = set(map(id, plan.admitted))  # one resumed with a single token left missed the decodes
        prompts = [seq for seq in self._running if seq.is_forked and (not _is_decode(seq) or id(seq) in admitted)]
        budget = self._budget - plan.num_decodes
        if not prompts or budget <= 0:
            return
        head, *others = prompts
        others.sort(key=lambda seq: (-seq.group.priority, _remaining(seq)))
        shares = dict.fromkeys([head, *others], 0)
        for cap in (max(1, budget // 2), budget):  # then whoever can use what is left
            for seq, share in shares.items():
                more = max(0, min(_remaining(seq) - share, cap - share, budget))
                shares[seq] += more
                budget -= more
        plan.scheduled.extend(self._chunk(seq, share) for seq, share in shares.items() if share)

    def _chunk(self, seq: Sequence, num_tokens: int) -> ScheduledSeq:
        group, end = seq.group, seq.num_computed + num_tokens
        item = ScheduledSeq(seq, seq.num_computed, num_tokens)
        if end == seq.num_tokens and group.task is not None:
            item.pools = True
        elif end == seq.num_tokens and group.stopping.max_tokens != 0:
            item.samples = _unforked_group(seq)
        if group.score_start is not None and seq.index == 0:
            first, last = max(group.num_scored, seq.num_computed + 1), min(end + 1, group.num_prompt)
            if first < last:
                item.score = (first, last)
        return item

    # ---- commit ----------------------------------------------------------------------------------

    def _fork(self, leader: Sequence, follower: Sequence) -> None:
        self.blocks.fork(leader.block_ids)
        follower.block_ids = list(leader.block_ids)
        follower.block_keys = list(leader.block_keys)
        follower.num_cached = 0
        follower.num_computed = leader.num_computed
        follower.num_published = leader.num_published
        follower.is_forked = True

    def _append(self, seq: Sequence, token_id: int, row: int) -> TokenDelta:
        group = seq.group
        seq.token_ids.append(token_id)
        delta = TokenDelta(seq, token_id, row)
        is_guided = seq.guide_state is not None  # then no end is drawn before the guide is complete and wants one
        if is_guided or seq.num_output >= (group.stopping.min_tokens or 0):
            if token_id in group.stop_token_ids:
                delta.reason, delta.stop_match = FinishReason.STOP, StopMatch(stop_token_id=token_id)
            elif token_id in group.eos_token_ids and (is_guided or not group.stopping.ignore_eos):
                delta.reason, delta.stop_match = FinishReason.STOP, StopMatch(eos_token_id=token_id)
        if delta.reason is None and seq.num_tokens >= group.max_len:
            delta.reason = FinishReason.LENGTH
        return delta

    def append_forced(self, seq: Sequence, token_id: int) -> FinishReason | None:
        """Append a token that nothing but its guide decides, to be computed in a later step; LENGTH when it is the last."""
        return self._append(seq, token_id, -1).reason

    def _publish(self, seq: Sequence) -> None:
        """Enter the blocks that became full into the prefix cache."""
        block_size = self.blocks.block_size
        num_full = seq.num_computed // block_size
        if num_full == seq.num_published or not seq.group.publish or not self.blocks.enable_prefix_cache:
            return
        self._extend_keys(seq)
        for index in range(seq.num_published, num_full):
            key = seq.block_keys[index]
            self.blocks.publish(
                seq.block_ids[index],
                key,
                seq.block_keys[index - 1] if index else None,
                seq.token_ids[index * block_size : (index + 1) * block_size],
                extra=extra_keys(index, block_size, cache_salt=seq.group.cache_salt),
                request_id=seq.group.request_id,
            )
            if index < seq.num_announced:
                self._retract(key, seq)
        seq.num_published = num_full

    def _extend_keys(self, seq: Sequence) -> None:
        """Keys of all full blocks of the tokens known so far; each is computed once."""
        if not self.blocks.enable_prefix_cache or not seq.group.publish:
            return
        block_size, keys = self.blocks.block_size, seq.block_keys
        if not keys:
            context = CacheKeyContext(cache_salt=seq.group.cache_salt)
            keys += block_keys(self.blocks.root_key, seq.token_ids, block_size, context)
        for index in range(len(keys), seq.num_tokens // block_size):
            parent = keys[-1] if keys else self.blocks.root_key
            extra = extra_keys(index, block_size, cache_salt=seq.group.cache_salt)
            keys.append(block_key(parent, seq.token_ids[index * block_size : (index + 1) * block_size], extra))

    # ---- giving back -----------------------------------------------------------------------------

    def _end(self, seq: Sequence, state: SequenceState) -> None:
        if seq.state is SequenceState.RUNNING:
            self._running.remove(seq)
            self._release(seq)
        elif seq in self._waiting:
            self._waiting.remove(seq)
            if seq.num_cached is None:
                self._prefixes.skip(seq)
        seq.move_to(state)
        self._prefixes.release()

    def _release(self, seq: Sequence) -> None:
        for key in seq.block_keys[seq.num_published : seq.num_announced]:
            self._retract(key, seq)
        seq.num_announced = 0
        self.blocks.release(seq.block_ids)
        seq.block_ids = []
        seq.num_computed = seq.num_published = 0
        seq.guide_state = None
        self._free_slots.append(seq.slot)
        self._released_slots.append(seq.slot)
        seq.slot = -1

    def _retract(self, key: bytes, seq: Sequence) -> None:
        computers = self._computing[key]
        computers.remove(seq)
        if not computers:
            del self._computing[key]

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.blocks.block_size)

    def check(self) -> None:
        """Assert every invariant between sequences, slots and blocks; for tests."""
        self.blocks.check()
        slots = [seq.slot for seq in self._running]
        assert sorted(slots + self._free_slots) == list(range(self._max_num_seqs))
        assert self._running == sorted(self._running, key=_order)
        assert self._waiting == sorted(self._waiting, key=_order)
        references = Counter(block_id for seq in self._running for block_id in seq.block_ids)
        assert references + self._prefixes.references() == self.blocks.references()
        for seq in self._running:
            assert len(seq.block_ids) * self.blocks.block_size >= seq.num_computed
        announced = Counter(
            (key, id(seq)) for seq in self._running for key in seq.block_keys[seq.num_published : seq.num_announced]
        )
        assert announced == Counter((key, id(seq)) for key, computers in self._computing.items() for seq in computers)


def _order(seq: Sequence) -> tuple[int, int, int]:
    return seq.order


def _remaining(seq: Sequence) -> int:
    return seq.num_tokens - seq.num_computed


def _is_decode(seq: Sequence) -> bool:
    return seq.num_output > 0 and seq.num_tokens - seq.num_computed == 1


def _unforked_group(seq: Sequence) -> list[Sequence]:
    """`seq` and, when it is a leader still computing the prompt, the followers that wait for it."""
    if seq.index:
        return [seq]
    return [seq, *(other for other in seq.group.sequences[1:] if not other.is_forked and not other.is_finished)]
