"""Scheduling policy, without a model: the test plays the runner and hands tokens back."""

from __future__ import annotations

import random

import numpy as np
import pytest

from openengine.core.blocks import BlockManager
from openengine.core.cache_keys import root_key
from openengine.core.scheduler import Scheduler
from openengine.core.sequence import SequenceGroup, SequenceState
from openengine.core.step_plan import StepPlan
from openengine.errors import InternalError
from openengine.types import FinishReason, ResponseOptions, SamplingParams, StoppingOptions

BLOCK = 4


def make_scheduler(num_blocks=64, *, slots=8, budget=32, prefix_cache=True) -> Scheduler:
    blocks = BlockManager(num_blocks, BLOCK, root_key=root_key("m", "t", BLOCK), enable_prefix_cache=prefix_cache)
    return Scheduler(blocks, max_num_seqs=slots, max_num_batched_tokens=budget)


def make_group(prompt, *, max_tokens=8, n=1, priority=0, arrival=0, **kwargs) -> SequenceGroup:
    prompt_ids = np.array(prompt if not isinstance(prompt, int) else range(100, 100 + prompt), dtype=np.int32)
    return SequenceGroup(
        request_id=f"r{arrival}",
        prompt_ids=prompt_ids,
        sampling=SamplingParams(num_sequences=n),
        stopping=StoppingOptions(max_tokens=max_tokens),
        response=ResponseOptions(),
        seed=0,
        max_len=len(prompt_ids) + max_tokens,
        stop_token_ids=frozenset(kwargs.pop("stop", ())),
        eos_token_ids=frozenset(kwargs.pop("eos", ())),
        sink=None,
        priority=priority,
        arrival=arrival,
        **kwargs,
    )


def step(scheduler: Scheduler, token=7) -> StepPlan:
    """One step whose every sample is `token` (or `token(seq)`); ends what reached its length or a stop."""
    plan = scheduler.schedule()
    scheduler.check()
    samples = [seq for item in plan.scheduled for seq in item.samples]
    tokens = [token(seq) if callable(token) else token for seq in samples]
    for delta in scheduler.commit(plan, tokens):
        if delta.reason is not None:
            scheduler.finish(delta.seq, delta.reason, delta.stop_match)
    scheduler.check()
    return plan


def run(scheduler: Scheduler, max_steps=10_000, **kwargs) -> int:
    for count in range(max_steps):
        if not scheduler.has_work:
            return count
        step(scheduler, **kwargs)
    raise AssertionError("the scheduler never became idle")


def test_a_prompt_is_computed_then_decoded_one_token_a_step():
    scheduler, group = make_scheduler(), make_group(6, max_tokens=3)
    scheduler.add(group)
    assert [step(scheduler).num_tokens for _ in range(3)] == [6, 1, 1]
    assert group.is_finished and group.leader.finish_reason is FinishReason.LENGTH
    assert scheduler.blocks.num_used == 0


def test_a_long_prompt_is_chunked_to_the_budget():
    scheduler = make_scheduler()
    scheduler.add(make_group(80, max_tokens=1))
    assert [step(scheduler).num_tokens for _ in range(3)] == [32, 32, 16]


def test_decode_rows_come_first():
    scheduler = make_scheduler()
    scheduler.add(make_group(4, arrival=1))
    step(scheduler)
    scheduler.add(make_group(range(500, 520), arrival=2))
    plan = step(scheduler)
    assert [item.num_tokens for item in plan.scheduled] == [1, 20] and plan.num_decodes == 1


def test_a_short_prompt_behind_a_long_one_starts_at_once():
    scheduler = make_scheduler(256)
    scheduler.add(make_group(range(1000, 1800), arrival=1))
    step(scheduler)
    short = make_group(range(16), arrival=2)
    scheduler.add(short)
    step(scheduler)
    assert short.leader.num_output == 1


def test_a_short_prompt_behind_many_long_ones_starts_within_four_steps():
    scheduler = make_scheduler(4096)
    for arrival in range(6):
        scheduler.add(make_group(range(1000 * arrival + 1000, 1000 * arrival + 1800), arrival=arrival))
    step(scheduler)
    short = make_group(range(16), arrival=9)
    scheduler.add(short)
    for _ in range(4):
        step(scheduler)
    assert short.leader.num_output >= 1


def test_a_long_prompt_advances_beside_a_stream_of_short_ones():
    scheduler = make_scheduler(256, slots=4)
    long = make_group(range(1000, 1256), max_tokens=1, arrival=0)
    scheduler.add(long)
    for arrival in range(1, 40):
        scheduler.add(make_group([arrival] * 15, max_tokens=1, arrival=arrival))
        step(scheduler)
        if long.is_finished:
            break
    assert long.is_finished and arrival <= 17  # half of 32 tokens a step, at least


def test_gen_11_larger_priority_runs_first_then_arrival():
    scheduler = make_scheduler(slots=1)
    groups = [make_group([i], max_tokens=1, priority=p, arrival=i) for i, p in enumerate([0, 5, -3, 5])]
    for group in groups:
        scheduler.add(group)
    order = []
    while scheduler.has_work:
        order += [item.seq.group.arrival for item in step(scheduler).scheduled]
    assert order == [1, 3, 0, 2]


def test_growth_preempts_the_lowest_priority_then_latest_arrival():
    scheduler = make_scheduler(4)
    groups = [make_group([i] * 3, max_tokens=12, priority=p, arrival=i) for i, p in enumerate([1, 0, 1])]
    for group in groups:
        scheduler.add(group)
    preempted = []
    for _ in range(10):
        preempted += [seq.group.arrival for seq in step(scheduler).preempted]
        if preempted:
            break
    assert preempted[0] == 1
    run(scheduler)
    assert all(group.leader.num_output == 12 for group in groups)


def test_p16_a_preempted_sequence_resumes_before_equal_priority_newcomers():
    scheduler = make_scheduler(5, slots=4)
    first, second = (make_group([i] * 7, max_tokens=6, priority=5, arrival=i) for i in range(2))
    scheduler.add(first)
    scheduler.add(second)
    while second.leader.state is not SequenceState.WAITING or not second.leader.num_output:
        step(scheduler)
    newcomer = make_group([9] * 3, max_tokens=2, priority=5, arrival=2)
    scheduler.add(newcomer)
    while second.leader.state is SequenceState.WAITING:
        assert newcomer.leader.state is SequenceState.WAITING
        step(scheduler)
    run(scheduler)


def test_a_preempted_sequence_keeps_its_tokens():
    scheduler = make_scheduler(6, slots=4)
    groups = [make_group([i] * 6, max_tokens=9, arrival=i) for i in range(2)]
    for group in groups:
        scheduler.add(group)
    run(scheduler, token=lambda seq: seq.num_output)
    assert all(list(group.leader.token_ids[6:]) == list(range(9)) for group in groups)


def test_p3_a_prompt_of_whole_blocks_computes_its_last_block_again():
    scheduler = make_scheduler()
    for arrival in range(2):
        group = make_group(8, max_tokens=1, arrival=arrival)
        scheduler.add(group)
        run(scheduler)
    assert group.num_cached_tokens == 4


def test_kvo_01_bypass_reuses_nothing_and_kvo_02_still_publishes():
    scheduler = make_scheduler()
    bypassing = make_group(10, max_tokens=1, arrival=0, bypass_prefix_cache=True)
    for group in (bypassing, make_group(10, max_tokens=1, arrival=1)):
        scheduler.add(group)
        run(scheduler)
    assert bypassing.num_cached_tokens == 0 and group.num_cached_tokens == 8


def test_kvo_03_a_salt_separates_the_cache():
    scheduler = make_scheduler()
    cached = []
    for arrival, salt in enumerate([None, "a", "b", "a", None]):
        group = make_group(10, max_tokens=1, arrival=arrival, cache_salt=salt)
        scheduler.add(group)
        run(scheduler)
        cached.append(group.num_cached_tokens)
    assert cached == [0, 0, 0, 8, 8]


def test_prompts_with_a_common_prefix_that_arrive_together_compute_it_once():
    scheduler = make_scheduler(256, budget=64)
    groups = [make_group([*range(100, 140), 1000 + i], max_tokens=1, arrival=i) for i in range(6)]
    for group in groups:
        scheduler.add(group)
    total = 0
    while scheduler.has_work:
        total += step(scheduler).num_tokens
    assert total == 41 + 5 * 1


def test_a_waiting_prompt_never_waits_for_a_block_of_one_that_runs_after_it():
    scheduler = make_scheduler(1024, budget=16)
    low = make_group(range(100, 400), max_tokens=1, priority=0, arrival=0)
    scheduler.add(low)
    step(scheduler)
    high = make_group([*range(100, 400), 7], max_tokens=1, priority=9, arrival=1)
    scheduler.add(high)
    for arrival in range(2, 60):  # a stream in between that keeps the low one from advancing much
        scheduler.add(make_group([arrival] * 30, max_tokens=1, priority=5, arrival=arrival))
        step(scheduler)
    assert high.is_finished


def test_what_one_prompt_cannot_use_of_a_step_goes_to_the_others():
    scheduler = make_scheduler(1024, budget=64)
    scheduler.add(make_group([1, 2, 3], max_tokens=1, arrival=0))
    scheduler.add(make_group(range(100, 900), max_tokens=1, arrival=1))
    assert step(scheduler).num_tokens == 64


def test_cached_tokens_of_a_preempted_prompt_are_not_its_own_work():
    scheduler = make_scheduler(8, slots=3, budget=4)
    first = make_group([1] * 4, max_tokens=14, priority=1, arrival=0)
    second = make_group(range(100, 124), max_tokens=1, arrival=1)
    scheduler.add(first)
    scheduler.add(second)
    preempted = []
    while scheduler.has_work:
        plan = step(scheduler)
        for seq in plan.admitted:
            seq.group.start_time = 0.0
        preempted += plan.preempted
    assert preempted == [second.leader] and second.num_cached_tokens == 0


def test_a_cancelled_prompt_releases_those_that_wait_for_its_blocks():
    scheduler = make_scheduler(256)
    first, second = (make_group([*range(100, 180), i], max_tokens=1, arrival=i) for i in range(2))
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    scheduler.finish(first.leader, FinishReason.CANCELLED)
    run(scheduler)
    assert second.leader.num_output == 1


def test_num_sequences_share_the_prompt_and_copy_the_partial_block():
    scheduler = make_scheduler()
    group = make_group(6, max_tokens=4, n=3)
    scheduler.add(group)
    plan = step(scheduler, token=lambda seq: seq.index)
    assert len(plan.scheduled) == 1 and len(plan.scheduled[0].samples) == 3
    assert scheduler.blocks.num_used == 2
    plan = step(scheduler, token=lambda seq: seq.index)
    assert len(plan.block_copies) == 2  # the last holder writes in place
    run(scheduler, token=lambda seq: seq.index)
    assert [list(seq.token_ids[6:]) for seq in group.sequences] == [[0] * 4, [1] * 4, [2] * 4]
    assert scheduler.blocks.num_used == 0


def test_num_sequences_wait_until_as_many_slots_are_free():
    scheduler = make_scheduler(slots=3)
    scheduler.add(make_group([1], max_tokens=2, arrival=0))
    step(scheduler)
    group = make_group([2], max_tokens=1, n=3, arrival=1)
    scheduler.add(group)
    step(scheduler)
    assert group.num_output_tokens == 0
    run(scheduler)
    assert group.num_output_tokens == 3


def test_num_sequences_survive_preemption_in_a_tiny_pool():
    scheduler = make_scheduler(8, slots=4)
    group = make_group(6, max_tokens=10, n=4)
    scheduler.add(group)
    run(scheduler, token=lambda seq: seq.num_output * 10 + seq.index)
    for seq in group.sequences:
        assert list(seq.token_ids[6:]) == [i * 10 + seq.index for i in range(10)]


def test_stp_03_max_tokens_zero_computes_the_prompt_and_no_token():
    scheduler = make_scheduler()
    group = make_group(6, max_tokens=0, n=2)
    scheduler.add(group)
    plan = step(scheduler)
    assert plan.num_tokens == 6 and not plan.scheduled[0].samples
    assert group.is_finished and group.num_output_tokens == 0
    assert [seq.finish_reason for seq in group.sequences] == [FinishReason.LENGTH] * 2


def test_stp_14_a_stop_id_that_is_also_eos_is_the_callers():
    scheduler = make_scheduler()
    group = make_group(3, stop=[7], eos=[7])
    scheduler.add(group)
    step(scheduler)
    assert group.leader.stop_match.stop_token_id == 7


def test_a_failed_sequence_leaves_no_block_in_the_cache():
    scheduler = make_scheduler()
    group = make_group(9, max_tokens=4)
    scheduler.add(group)
    step(scheduler)
    assert scheduler.blocks.num_cached == 2
    scheduler.fail(group.leader, InternalError("x"))
    assert scheduler.blocks.num_cached == 0 and scheduler.blocks.num_used == 0
    scheduler.check()


def test_reset_forgets_everything():
    scheduler = make_scheduler(slots=2)
    groups = [make_group(5, n=n, arrival=n) for n in (1, 2)]
    for group in groups:
        scheduler.add(group)
    step(scheduler)
    scheduler.reset()
    assert not scheduler.has_work and all(group.is_finished for group in groups)
    again = make_group(5, max_tokens=2)
    scheduler.add(again)
    run(scheduler)
    assert again.leader.num_output == 2


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_keeps_the_books(seed):
    """Submit, abort, preempt, fork and finish at random: free + used = total after every step, and nothing is lost."""
    random_ = random.Random(seed)
    scheduler = make_scheduler(
        random_.choice([10, 24, 64]), slots=random_.choice([2, 5, 8]), budget=random_.choice([8, 16, 64])
    )
    groups, open_groups = [], []
    for arrival in range(300):
        if arrival < 200 and random_.random() < 0.5:
            prompt = [random_.choice([1, 2])] * random_.randint(1, 12) + [random_.randint(3, 9)] * random_.randint(0, 8)
            group = make_group(
                prompt,
                max_tokens=random_.randint(0, 15),
                n=random_.choice([1, 1, 1, 2]),
                priority=random_.choice([0, 0, 1]),
                arrival=arrival,
                cache_salt=random_.choice([None, None, "s"]),
                bypass_prefix_cache=random_.random() < 0.1,
            )
            groups.append(group)
            open_groups.append(group)
            scheduler.add(group)
        if open_groups and random_.random() < 0.1:
            victim = open_groups.pop(random_.randrange(len(open_groups)))
            for seq in victim.sequences:
                if not seq.is_finished:
                    scheduler.finish(seq, FinishReason.CANCELLED)
            scheduler.check()
        step(scheduler, token=lambda seq: (seq.num_output * 7 + seq.index) % 11)
    run(scheduler, token=lambda seq: (seq.num_output * 7 + seq.index) % 11)
    assert scheduler.blocks.num_used == 0 and all(group.is_finished for group in groups)
    for group in groups:
        for seq in group.sequences:
            expected = [(i * 7 + seq.index) % 11 for i in range(seq.num_output)]
            assert list(seq.token_ids[group.num_prompt :]) == expected
            assert seq.finish_reason is FinishReason.CANCELLED or seq.num_tokens == group.max_len
