"""Scheduling of embed, classify and score requests, without a model: whole items, chunks over KV, both beside generation."""

from __future__ import annotations

import random

import numpy as np
import pytest

from openengine.core.encoder_scheduler import EncoderScheduler
from openengine.core.sequence import SequenceGroup, SequenceState
from openengine.core.task_kinds import TaskKind
from openengine.core.task_work import TaskItem, TaskWork
from openengine.errors import InternalError
from openengine.types import FinishReason
from tests.core.test_scheduler import BLOCK, make_group, make_scheduler

EMBED = TaskWork(TaskKind.EMBED)
LABELS = TaskWork(TaskKind.LABELS, (1, 2))


def make_task(*prompts, work=EMBED, arrival=0, priority=0, shared=0) -> SequenceGroup:
    """A request whose items are these token ids, or so many, and begin with the same `shared` ones."""
    ids = [np.arange(100, 100 + p) if isinstance(p, int) else np.array(p) for p in prompts]
    items = tuple(TaskItem(item.astype(np.int32), num_shared=shared) for item in ids)
    group = SequenceGroup.of_task(f"t{arrival}", work, items, priority=priority)
    group.arrival = arrival
    return group


def step(scheduler, token=7):
    """One step; whatever samples gets `token`, whatever pools is over."""
    plan = scheduler.schedule()
    scheduler.check()
    for seq in plan.admitted:
        seq.group.start_time = 0.0
    samples = [seq for item in plan.scheduled for seq in item.samples]
    for delta in scheduler.commit(plan, [token] * len(samples)):
        if delta.reason is not None:
            scheduler.finish(delta.seq, delta.reason)
    for item in plan.scheduled:
        if item.pools and not item.seq.is_finished:
            assert item.seq.num_computed == item.seq.num_tokens == item.seq.num_prompt
            scheduler.finish(item.seq, FinishReason.STOP)
    scheduler.check()
    return plan


def run(scheduler, max_steps=10_000) -> int:
    for count in range(max_steps):
        if not scheduler.has_work:
            return count
        step(scheduler)
    raise AssertionError("the scheduler never became idle")


def shape(plan) -> list[tuple[str, int, int]]:
    return [(item.seq.group.request_id, item.seq.index, item.num_tokens) for item in plan.scheduled]


# ---- encoders ------------------------------------------------------------------------------------


def test_items_are_packed_whole_by_their_tokens():
    scheduler, group = EncoderScheduler(max_num_batched_tokens=16), make_task(6, 6, 6, 2, 12)
    scheduler.add(group)
    assert shape(step(scheduler)) == [("t0", 0, 6), ("t0", 1, 6)]
    assert shape(step(scheduler)) == [("t0", 2, 6), ("t0", 3, 2)]
    assert shape(step(scheduler)) == [("t0", 4, 12)]
    assert group.is_finished and not scheduler.has_work and not scheduler.num_waiting_tokens


def test_an_item_longer_than_a_step_has_one_of_its_own():
    scheduler = EncoderScheduler(max_num_batched_tokens=8)
    scheduler.add(make_task(3, 20, 3))
    scheduler.add(make_task(4, arrival=1))
    assert [shape(step(scheduler)) for _ in range(3)] == [
        [("t0", 0, 3), ("t1", 0, 4)],
        [("t0", 1, 20)],
        [("t0", 2, 3)],
    ]


def test_a_short_request_does_not_wait_for_a_long_one():
    scheduler = EncoderScheduler(max_num_batched_tokens=16)
    scheduler.add(make_task(*[4] * 100))
    step(scheduler)
    scheduler.add(make_task(5, arrival=1))
    scheduler.add(make_task(2, arrival=2))
    assert shape(step(scheduler)) == [("t0", 4, 4), ("t0", 5, 4), ("t2", 0, 2), ("t1", 0, 5)]


def test_larger_priority_runs_first_and_shares_with_no_other():
    scheduler = EncoderScheduler(max_num_batched_tokens=8)
    scheduler.add(make_task(4, 4))
    scheduler.add(make_task(4, 4, 4, arrival=1, priority=1))
    assert shape(step(scheduler)) == [("t1", 0, 4), ("t1", 1, 4)]
    assert shape(step(scheduler)) == [("t1", 2, 4), ("t0", 0, 4)]


def test_what_ends_before_its_step_is_passed_over():
    scheduler = EncoderScheduler(max_num_batched_tokens=8)
    group, other = make_task(4, 4, 4, 4), make_task(4, arrival=1)
    scheduler.add(group)
    scheduler.add(other)
    step(scheduler)
    for seq in group.sequences[2:]:
        scheduler.finish(seq, FinishReason.CANCELLED)
    scheduler.check()
    assert scheduler.num_running_groups == 1 and scheduler.num_waiting_tokens == 4
    assert shape(step(scheduler)) == [("t0", 1, 4)] and not scheduler.has_work


def test_a_failed_step_ends_the_request_and_reset_ends_all():
    scheduler = EncoderScheduler(max_num_batched_tokens=4)
    group, other = make_task(4, 4), make_task(4, arrival=1)
    scheduler.add(group)
    scheduler.add(other)
    scheduler.schedule()
    for seq in group.sequences:
        scheduler.fail(seq, InternalError("no"))
    scheduler.check()
    assert scheduler.num_waiting_tokens == 4 and group.leader.state is SequenceState.FAILED
    scheduler.reset()
    assert other.is_finished and not scheduler.has_work


# ---- decoders ------------------------------------------------------------------------------------


def test_items_of_a_decoder_are_chunked_and_pool_once():
    scheduler, group = make_scheduler(), make_task(80)
    scheduler.add(group)
    plans = [step(scheduler) for _ in range(3)]
    assert [plan.num_tokens for plan in plans] == [32, 32, 16]
    assert [plan.scheduled[0].pools for plan in plans] == [False, False, True]
    assert group.is_finished and scheduler.blocks.num_used == 0


def test_every_item_of_a_group_runs_for_itself_beside_generation():
    scheduler = make_scheduler()
    scheduler.add(make_group(4, max_tokens=3, arrival=1))
    scheduler.add(make_task([1, 2, 3], [4, 5], [6], arrival=2))
    plan = step(scheduler)
    assert sorted(shape(plan)) == [("r1", 0, 4), ("t2", 0, 3), ("t2", 1, 2), ("t2", 2, 1)]
    assert run(scheduler) == 2, "generation goes on"


def test_a_shared_prefix_is_computed_once_and_counted_as_cached():
    scheduler = make_scheduler(256, budget=64)
    query = list(range(100, 100 + 4 * BLOCK))
    group = make_task(*(query + [200 + i] * 3 for i in range(20)), work=LABELS)
    scheduler.add(group)
    total = 0
    while scheduler.has_work:
        total += step(scheduler).num_tokens
    assert total == len(query) + 3 * 20
    assert group.num_cached_tokens == 19 * len(query)
    assert group.usage.prompt_tokens == 20 * (len(query) + 3)


@pytest.mark.parametrize("num_query", [4 * BLOCK + 3, 2, BLOCK])
def test_a_query_that_ends_within_a_block_is_computed_once_to_the_token(num_query):
    scheduler = make_scheduler(256, budget=64)
    query = list(range(100, 100 + num_query))
    group = make_task(*(query + [200 + i] * 2 for i in range(20)), work=LABELS, shared=num_query)
    scheduler.add(group)
    first = step(scheduler)
    assert first.num_tokens == num_query + 2 and not first.block_copies, "the others wait for it"
    total = first.num_tokens
    while scheduler.has_work:
        plan = step(scheduler)
        total += plan.num_tokens
        assert len(plan.block_copies) == (len(plan.admitted) if num_query % BLOCK else 0)
    assert total == num_query + 2 * 20 and group.num_cached_tokens == 19 * num_query
    assert scheduler.blocks.num_used == 0, "nothing stays held"


def test_held_prefixes_are_given_up_where_memory_is_short():
    scheduler = make_scheduler(6, slots=4, budget=16)
    prefix = list(range(100, 106))
    group = make_task(prefix + [1], prefix + [2] * 14, prefix + [3] * 16, prefix + [4], work=LABELS, shared=6)
    other = make_group([1, 2, 3], max_tokens=12, arrival=1)
    scheduler.add(group)
    scheduler.add(other)
    run(scheduler)
    assert group.is_finished and other.is_finished and scheduler.blocks.num_used == 0


def test_a_leader_that_ends_leaves_its_prefix_to_the_next():
    scheduler = make_scheduler()
    prefix = list(range(100, 106))
    group = make_task(*(prefix + [i] * 40 for i in range(3)), work=LABELS, shared=6)
    scheduler.add(group)
    scheduler.schedule()
    scheduler.finish(group.leader, FinishReason.CANCELLED)
    scheduler.check()
    run(scheduler)
    assert group.is_finished and scheduler.blocks.num_used == 0


def test_work_that_needs_every_row_takes_nothing_from_the_cache():
    scheduler = make_scheduler()
    for arrival in range(2):
        group = make_task(12, work=TaskWork(TaskKind.EMBED_TOKENS, keeps_rows=True), arrival=arrival)
        scheduler.add(group)
        assert step(scheduler).num_tokens == 12 and group.num_cached_tokens == 0


def test_a_preempted_item_starts_again_and_its_cached_tokens_count_once():
    scheduler = make_scheduler(8, budget=16)
    scheduler.add(make_group([1, 2, 3], max_tokens=26, arrival=1))
    step(scheduler)
    group = make_task(28, arrival=2)
    scheduler.add(group)
    preempted = []
    while scheduler.has_work:
        preempted += step(scheduler).preempted
    assert group.is_finished and group.num_cached_tokens == 0


@pytest.mark.parametrize("seed", range(6))
def test_generation_and_tasks_mixed_at_random_lose_no_block(seed):
    draw = random.Random(seed)
    scheduler = make_scheduler(draw.choice((24, 40, 64)), slots=draw.choice((2, 5, 8)), budget=draw.choice((8, 32)))
    groups = []
    for arrival in range(60):
        prompts = [[draw.randrange(3) for _ in range(draw.randrange(1, 30))] for _ in range(draw.randrange(1, 5))]
        work = draw.choice((EMBED, LABELS, TaskWork(TaskKind.EMBED_TOKENS, keeps_rows=True)))
        if draw.random() < 0.5:
            shared = draw.choice((0, 0, 1, 3, 6, 9)) if work is LABELS and len(prompts) > 1 else 0
            prompts = [[7] * shared + prompt for prompt in prompts]
            group = make_task(*prompts, work=work, arrival=arrival, priority=draw.randrange(2), shared=shared)
        else:
            outputs = draw.randrange(1, 3) if scheduler._max_num_seqs > 2 else 1
            group = make_group(prompts[0], max_tokens=draw.randrange(0, 12), n=outputs, arrival=arrival)
        groups.append(group)
        scheduler.add(group)
        for _ in range(draw.randrange(4)):
            step(scheduler, token=draw.randrange(3))
        if draw.random() < 0.2:
            for seq in draw.choice(groups).sequences:
                if not seq.is_finished:
                    scheduler.finish(seq, FinishReason.CANCELLED)
            scheduler.check()
    run(scheduler)
    assert all(group.is_finished for group in groups) and scheduler.blocks.num_used == 0
    assert all((group.num_cached_tokens or 0) <= group.num_prompt for group in groups)


@pytest.mark.parametrize("seed", range(6))
def test_encoder_items_mixed_at_random_run_once_each(seed):
    draw = random.Random(seed)
    scheduler, seen, groups = EncoderScheduler(max_num_batched_tokens=32), [], []
    for arrival in range(80):
        lens = [draw.randrange(1, 50) for _ in range(draw.randrange(1, 9))]
        groups.append(make_task(*lens, arrival=arrival, priority=draw.randrange(3)))
        scheduler.add(groups[-1])
        for _ in range(draw.randrange(3)):
            seen += [item.seq for item in step(scheduler).scheduled]
        if draw.random() < 0.2:
            for seq in draw.choice(groups).sequences:
                if not seq.is_finished:
                    scheduler.finish(seq, FinishReason.CANCELLED)
            scheduler.check()
    while scheduler.has_work:
        plan = step(scheduler)
        assert plan.num_tokens <= 32 or len(plan.scheduled) == 1
        seen += [item.seq for item in plan.scheduled]
    assert len(seen) == len(set(seen)) and all(group.is_finished for group in groups)
    assert all(
        seq.finish_reason is FinishReason.CANCELLED or seq in seen for group in groups for seq in group.sequences
    )
