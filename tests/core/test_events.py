"""KV event log and runtime event bus: numbering, replay, snapshots, readers in threads and event loops."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openengine.core.blocks import BlockManager
from openengine.core.cache_keys import block_keys
from openengine.core.events import EventLog
from openengine.core.runtime_events import RuntimeEventBus
from openengine.core.subscription import wake
from openengine.errors import InvalidArgument, OutOfRange, Overloaded
from openengine.event_types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, RuntimeEventType

BLOCK = 4
ROOT = b"r" * 32


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def stored(*numbers: int, parent: int | None = None, request_id: str = "") -> KvEvent:
    event = BlockStored(
        block_hashes=tuple(map(key, numbers)),
        parent_block_hash=None if parent is None else key(parent),
        token_ids=tuple(number * BLOCK + offset for number in numbers for offset in range(BLOCK)),
        block_size=BLOCK,
    )
    return KvEvent(event=event, request_id=request_id)


def removed(*numbers: int) -> KvEvent:
    return KvEvent(event=BlockRemoved(block_hashes=tuple(map(key, numbers))))


def polled(subscription) -> list:
    found = []
    while (event := subscription.poll()) is not None:
        found.append(event)
    return found


def numbers(batches) -> list[int]:
    return [batch.sequence_number for batch in batches]


def cached_after(batches) -> set[bytes]:
    """What a reader of `batches` believes to be cached; checks that parents come first and removals are true."""
    cached: set[bytes] = set()
    for event in (item.event for batch in batches for item in batch.events):
        if isinstance(event, AllBlocksCleared):
            cached.clear()
        elif isinstance(event, BlockRemoved):
            assert cached.issuperset(event.block_hashes)
            cached.difference_update(event.block_hashes)
        else:
            assert event.parent_block_hash is None or event.parent_block_hash in cached
            assert cached.isdisjoint(event.block_hashes)
            cached.update(event.block_hashes)
    return cached


# ---- numbering -----------------------------------------------------------------------------------


def test_kv_03_batches_are_numbered_from_one_without_gaps():
    log = EventLog(10)
    subscription = log.subscribe()
    for number in range(5):
        log.append([stored(number)])
    assert numbers(polled(subscription)) == [1, 2, 3, 4, 5]
    assert log.last_sequence_number == 5


def test_kv_03_a_step_without_changes_takes_no_number():
    log = EventLog(10)
    log.append([])
    assert log.last_sequence_number == 0


def test_kv_04_timestamps_never_decrease_though_the_clock_does():
    clock = iter([100, 90, 120])
    log = EventLog(10, data_parallel_rank=3, clock=lambda: next(clock))
    subscription = log.subscribe(data_parallel_ranks=[3])
    for number in range(3):
        log.append([stored(number)])
    batches = polled(subscription)
    assert [batch.timestamp_unix_nanos for batch in batches] == [100, 100, 120]
    assert {batch.data_parallel_rank for batch in batches} == {3}


def test_kv_10_events_arrive_as_they_were_recorded():
    log = EventLog(10)
    subscription = log.subscribe()
    events = [stored(1, 2, request_id="a"), removed(1), KvEvent(event=AllBlocksCleared())]
    log.append(events)
    assert list(subscription.poll().events) == events


def test_kept_token_ids_take_four_bytes_each():
    log = EventLog(10)
    log.append([stored(*range(1000, 1100))])
    (kept,) = log._batches
    assert sys.getsizeof(kept.events[0].event.token_ids) < 4 * 100 * BLOCK + 200


# ---- replay --------------------------------------------------------------------------------------


def test_kv_05_replay_begins_at_exactly_the_number_with_the_same_content():
    log = EventLog(10)
    first = log.subscribe()
    for number in range(6):
        log.append([stored(number)])
    original = polled(first)
    late = log.subscribe(start_sequence_number=3)
    assert polled(late) == original[2:]
    log.append([removed(0)])
    assert numbers(polled(late)) == [7]


def test_kv_05_zero_is_live_only():
    log = EventLog(10)
    log.append([stored(1)])
    subscription = log.subscribe(start_sequence_number=0)
    assert polled(subscription) == []
    log.append([stored(2)])
    assert numbers(polled(subscription)) == [2]


def test_kv_05_the_next_number_is_a_valid_start():
    log = EventLog(10)
    assert polled(log.subscribe(start_sequence_number=1)) == []


@pytest.mark.parametrize("start", [1, 2, 7, 2**63])
def test_kv_06_a_start_that_is_not_kept_is_out_of_range(start):
    log = EventLog(3)
    for number in range(5):
        log.append([stored(number)])
    with pytest.raises(OutOfRange, match=r"at 3 to 6"):
        log.subscribe(start_sequence_number=start)


def test_kv_05_a_replay_of_everything_survives_what_is_appended_meanwhile():
    log = EventLog(3)
    for number in range(3):
        log.append([stored(number)])
    subscription = log.subscribe(start_sequence_number=1)
    log.append([stored(3)])
    assert numbers(polled(subscription)) == [1, 2, 3, 4]


# ---- snapshots -----------------------------------------------------------------------------------


def test_kv_07_a_snapshot_clears_then_stores_then_goes_on_live():
    log = EventLog(10)
    log.append([stored(1), stored(2)])
    log.append([removed(1)])
    subscription = log.subscribe(include_snapshot=True)
    assert polled(subscription) == []
    log.begin(subscription, [stored(2).event])
    log.append([stored(3)])
    snapshot, live = polled(subscription)
    assert snapshot.sequence_number == 2 and live.sequence_number == 3
    assert [item.event for item in snapshot.events] == [AllBlocksCleared(), stored(2).event]


def test_kv_07_an_empty_snapshot_is_sent_with_number_zero():
    log = EventLog(10)
    subscription = log.subscribe(include_snapshot=True)
    log.begin(subscription, [])
    (batch,) = polled(subscription)
    assert batch.sequence_number == 0 and [item.event for item in batch.events] == [AllBlocksCleared()]


def test_kv_07_a_large_snapshot_comes_in_parts_of_bounded_size_with_one_number():
    log = EventLog(10)
    chain = stored(*range(40_000)).event
    subscription = log.subscribe(include_snapshot=True)
    log.begin(subscription, [chain])
    batches = polled(subscription)
    assert len(batches) > 2 and set(numbers(batches)) == {0}
    parts = [item.event for batch in batches for item in batch.events][1:]
    assert all(80 * sum(len(i.event.block_hashes) for i in b.events[-1:]) <= 2**20 for b in batches)
    assert sum((part.token_ids for part in parts), ()) == chain.token_ids
    assert len(cached_after(batches)) == 40_000


def test_kv_07_a_snapshot_is_turned_into_events_by_its_reader():
    log = EventLog(10)
    subscription = log.subscribe(include_snapshot=True)
    seen = []
    log.begin(subscription, (seen.append(number) or stored(number).event for number in range(3)))
    assert seen == []
    polled(subscription)
    assert seen == [0, 1, 2]


def test_a_huge_step_is_more_than_one_batch():
    log = EventLog(10)
    subscription = log.subscribe()
    log.append([removed(*range(40_000))])
    batches = polled(subscription)
    assert numbers(batches) == list(range(1, len(batches) + 1)) and len(batches) > 1
    assert sum(len(item.event.block_hashes) for batch in batches for item in batch.events) == 40_000


def test_kv_08_a_snapshot_with_a_start_is_invalid():
    with pytest.raises(InvalidArgument, match="contradicts include_snapshot"):
        EventLog(3).subscribe(include_snapshot=True, start_sequence_number=1)


@pytest.mark.parametrize("ranks", [[1], [0, 7], ["x"]])
def test_kv_09_an_unknown_rank_is_invalid(ranks):
    with pytest.raises(InvalidArgument, match="does not exist"):
        EventLog(3).subscribe(data_parallel_ranks=ranks)


@pytest.mark.parametrize("start", [-1, True, 1.5, "1", None])
def test_a_start_that_is_no_count_is_invalid(start):
    with pytest.raises(InvalidArgument, match="start_sequence_number must be an integer"):
        EventLog(3).subscribe(start_sequence_number=start)


# ---- subscribers ---------------------------------------------------------------------------------


def test_kv_21_every_subscriber_sees_the_same():
    log = EventLog(10)
    readers = [log.subscribe() for _ in range(3)]
    for number in range(4):
        log.append([stored(number)])
    seen = [polled(reader) for reader in readers]
    assert seen[0] == seen[1] == seen[2] and len(seen[0]) == 4


def test_kv_22_a_cancelled_subscription_disturbs_nobody():
    log = EventLog(10)
    gone, other = log.subscribe(), log.subscribe()
    log.append([stored(1)])
    gone.close()
    gone.close()
    log.append([stored(2)])
    assert list(gone) == [] and numbers(polled(other)) == [1, 2]


def test_kv_25_a_reader_that_falls_behind_ends_with_overloaded():
    log = EventLog(3)
    slow, quick = log.subscribe(), log.subscribe()
    for number in range(4):
        log.append([stored(number)])
        assert numbers(polled(quick)) == [number + 1]
    with pytest.raises(Overloaded, match="batch 1 is next") as caught:
        next(slow)
    assert caught.value.retryable
    assert list(slow) == []


def test_kv_25_a_slow_replay_gets_its_batches_before_the_error():
    log = EventLog(2)
    log.append([stored(0)])
    replay = log.subscribe(start_sequence_number=1)
    for number in range(1, 4):
        log.append([stored(number)])
    assert next(replay).sequence_number == 1
    with pytest.raises(Overloaded):
        next(replay)


def test_closing_the_log_ends_subscriptions_after_what_is_kept():
    log = EventLog(10)
    subscription, waiting = log.subscribe(), log.subscribe(include_snapshot=True)
    log.append([stored(1)])
    log.close()
    assert numbers(subscription) == [1] and list(waiting) == []


def test_a_waiting_thread_sees_the_next_batch_and_the_end():
    log = EventLog(10)
    subscription, seen = log.subscribe(), []
    thread = threading.Thread(target=lambda: seen.extend(subscription), daemon=True)
    thread.start()
    log.append([stored(1)])
    log.append([stored(2)])
    log.close()
    thread.join(10)
    assert numbers(seen) == [1, 2]


def test_closing_a_subscription_releases_the_thread_that_reads_it():
    subscription = EventLog(10).subscribe()
    thread = threading.Thread(target=lambda: list(subscription), daemon=True)
    thread.start()
    subscription.close()
    thread.join(10)
    assert not thread.is_alive()


# ---- event loops ---------------------------------------------------------------------------------


class CountingLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        super().__init__()
        self.num_calls = 0

    def call_soon_threadsafe(self, *args, **kwargs):
        self.num_calls += 1
        return super().call_soon_threadsafe(*args, **kwargs)


def test_readers_in_an_event_loop_are_woken_with_one_call():
    log = EventLog(10)

    async def main():
        loop = asyncio.get_running_loop()
        readers = [asyncio.ensure_future(anext(log.subscribe())) for _ in range(5)]
        await asyncio.sleep(0)
        before = loop.num_calls
        wake(log.append([stored(1)]))
        assert loop.num_calls == before + 1
        assert numbers(await asyncio.gather(*readers)) == [1] * 5

    run_in(CountingLoop(), main())


def run_in(loop, main):
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()


def test_async_iteration_sees_everything_and_ends():
    log = EventLog(100)
    subscription = log.subscribe()

    def write():
        for number in range(50):
            wake(log.append([stored(number)]))
        log.close()

    async def main():
        writer = threading.Thread(target=write)
        writer.start()
        seen = [batch async for batch in subscription]
        writer.join()
        assert numbers(seen) == list(range(1, 51))

    asyncio.run(main())


def test_kv_22_a_cancelled_wait_leaves_nothing_behind():
    log = EventLog(10)

    async def main():
        subscription = log.subscribe()
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(anext(subscription), 0.001)
        assert not log._signal._waiting
        log.append([stored(1)])
        assert (await anext(subscription)).sequence_number == 1

    asyncio.run(main())


def test_a_closed_event_loop_is_no_trouble():
    log = EventLog(10)
    loop = asyncio.new_event_loop()
    reader = loop.create_task(anext(log.subscribe()))
    loop.run_until_complete(asyncio.sleep(0))
    waiters = log.append([stored(1)])
    reader.cancel()
    loop.run_until_complete(asyncio.gather(reader, return_exceptions=True))
    loop.close()
    assert len(waiters) == 1
    wake(waiters)


# ---- exactness -----------------------------------------------------------------------------------


def test_no_batch_is_lost_or_doubled_between_replay_and_live():
    log, count = EventLog(10_000), 3000
    results: list[tuple[int, list[int]]] = []

    def read(seed: int) -> None:
        chosen = random.Random(seed)
        while log.last_sequence_number < chosen.randrange(count):
            pass
        last = log.last_sequence_number
        start = chosen.choice([0, max(1, last)])
        subscription = log.subscribe(start_sequence_number=start)
        results.append((start, numbers(subscription)))

    threads = [threading.Thread(target=read, args=(seed,), daemon=True) for seed in range(8)]
    for thread in threads:
        thread.start()
    for number in range(count):
        log.append([removed(number)])
    log.close()
    for thread in threads:
        thread.join(30)
    assert len(results) == 8
    for start, seen in results:
        first = seen[0] if seen else count + 1
        assert seen == list(range(first, count + 1)) and start in (0, first)


@settings(deadline=None, database=None, max_examples=40)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_kv_23_any_snapshot_with_what_follows_tells_the_present_cache(steps, chosen):
    blocks = BlockManager(8, BLOCK, root_key=ROOT)
    log = EventLog(1000)
    from_start = log.subscribe()
    snapshots = []

    def append():
        log.append(blocks.take_events())

    for step in steps:
        run_prompt(blocks, step, chosen)
        if step == 9:
            blocks.clear()
        if chosen.random() < 0.3:
            subscription = log.subscribe(include_snapshot=True)
            append()
            log.begin(subscription, blocks.snapshot())
            snapshots.append(subscription)
        append()
    present = set(blocks._block_of)
    assert cached_after(polled(from_start)) == present
    for subscription in snapshots:
        assert cached_after(polled(subscription)) == present


def run_prompt(blocks, prefix, chosen):
    ids = [prefix % 3] * BLOCK + [chosen.randrange(4) for _ in range(BLOCK)]
    keys = block_keys(ROOT, ids, BLOCK)
    found = blocks.match(keys, ids, len(ids))
    blocks.take(found)
    table = [*found, *blocks.allocate(2 - len(found))]
    for index in range(2):
        blocks.publish(
            table[index], keys[index], keys[index - 1] if index else None, ids[index * BLOCK : (index + 1) * BLOCK]
        )
    blocks.release(table)


# ---- runtime events ------------------------------------------------------------------------------

FORWARD, BATCH, QUEUE, TRANSFER = RuntimeEventType


def test_rte_01_types_select_and_none_is_all():
    bus = RuntimeEventBus("e")
    some, everything = bus.subscribe([QUEUE, "batch"]), bus.subscribe()
    for event_type in RuntimeEventType:
        bus.emit(event_type, {})
    assert [event.type for event in polled(some)] == [BATCH, QUEUE]
    assert [event.type for event in polled(everything)] == list(RuntimeEventType)


@pytest.mark.parametrize("types", [["unspecified"], [None], "queue", 3])
def test_rte_01_an_unknown_type_is_invalid(types):
    with pytest.raises(InvalidArgument, match="runtime event types"):
        RuntimeEventBus("e").subscribe(types)


def test_rte_03_ids_are_unique_and_times_never_decrease():
    clock = iter([5, 3, 9])
    bus = RuntimeEventBus("engine", clock=lambda: next(clock))
    subscription = bus.subscribe([QUEUE])
    for _ in range(3):
        bus.emit(QUEUE, {"num_queued": 2})
    events = polled(subscription)
    assert len({event.event_id for event in events}) == 3 and all(event.event_id for event in events)
    assert [event.timestamp_unix_nanos for event in events] == [5, 5, 9]
    assert events[0].attributes == {"num_queued": "2"}


def test_rte_05_a_slow_reader_loses_the_oldest_and_is_told_how_many():
    bus = RuntimeEventBus("e", queue_size=3)
    slow, quick = bus.subscribe(), bus.subscribe([QUEUE])
    for number in range(5):
        bus.emit(QUEUE, {"n": number})
        assert [event.attributes for event in polled(quick)] == [{"n": str(number)}]
    assert [event.attributes for event in polled(slow)] == [{"n": "2", "dropped": "2"}, {"n": "3"}, {"n": "4"}]
    bus.emit(QUEUE, {"n": 5})
    assert slow.poll().attributes == {"n": "5"}


def test_rte_05_events_cost_nothing_without_readers():
    bus = RuntimeEventBus("e")
    assert not bus.wanted
    bus.emit(QUEUE, {"n": 1})
    assert bus._num_emitted == 0 and bus.flush() == []


def test_rte_05_a_reader_that_left_is_no_reader():
    bus = RuntimeEventBus("e")
    closed, other = bus.subscribe([QUEUE]), bus.subscribe([BATCH])
    closed.close()
    assert bus.wanted == {BATCH}
    bus.emit(BATCH, {})
    assert len(polled(other)) == 1 and polled(closed) == []


def test_rte_05_a_dropped_subscription_is_forgotten():
    bus = RuntimeEventBus("e")
    subscription = bus.subscribe([QUEUE])
    del subscription
    gc.collect()
    bus.emit(QUEUE, {})
    assert not bus.wanted and not bus._queues


def test_runtime_readers_wake_at_the_flush():
    bus = RuntimeEventBus("e")

    async def main():
        loop = asyncio.get_running_loop()
        readers = [asyncio.ensure_future(anext(bus.subscribe())) for _ in range(3)]
        await asyncio.sleep(0)
        before = loop.num_calls
        bus.emit(QUEUE, {})
        bus.emit(BATCH, {})
        assert loop.num_calls == before
        wake(bus.flush())
        assert loop.num_calls == before + 1
        assert [event.type for event in await asyncio.gather(*readers)] == [QUEUE] * 3

    run_in(CountingLoop(), main())


def test_closing_the_bus_ends_its_readers():
    bus = RuntimeEventBus("e")
    subscription = bus.subscribe()
    bus.emit(QUEUE, {})
    bus.close()
    assert [event.type for event in subscription] == [QUEUE]
    assert not bus.wanted and list(bus.subscribe()) == [] and not bus.wanted
