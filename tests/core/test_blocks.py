"""Policy of the block pool: matching, eviction order, sharing, and the truth of its events."""

from __future__ import annotations

import random

import pytest

from openengine.core.blocks import BlockManager
from openengine.core.cache_keys import CacheKeyContext, block_keys
from openengine.event_types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

ROOT = bytes(32)
SIZE = 4
PLAIN = CacheKeyContext()


def pool(num_blocks: int = 8, **options) -> BlockManager:
    return BlockManager(num_blocks, SIZE, root_key=ROOT, **options)


def prompt(num_blocks: int, *, first: int = 100) -> list[int]:
    return list(range(first, first + num_blocks * SIZE))


def publish_all(blocks, table, token_ids, *, start=0, context=PLAIN, request_id="r", **lora) -> list[bytes]:
    keys = block_keys(ROOT, token_ids, blocks.block_size, context)
    for index in range(start, min(len(keys), len(table))):
        blocks.publish(
            table[index],
            keys[index],
            keys[index - 1] if index else None,
            token_ids[index * blocks.block_size : (index + 1) * blocks.block_size],
            extra=context.extra_keys(index, blocks.block_size),
            request_id=request_id,
            **lora,
        )
    return keys


def run(blocks, token_ids, *, bypass=False, **how) -> list[int]:
    """Compute a whole prompt as the scheduler would and return its table."""
    keys = block_keys(ROOT, token_ids, blocks.block_size, how.get("context"))
    matched = [] if bypass else blocks.match(keys, token_ids, len(token_ids) - 1)
    num_new = -(-len(token_ids) // blocks.block_size) - len(matched)
    assert blocks.can_allocate(num_new, matched)
    blocks.take(matched)
    table = matched + blocks.allocate(num_new)
    publish_all(blocks, table, token_ids, start=len(matched), **how)
    blocks.check()
    return table


def hit(blocks, token_ids, **how) -> int:
    """How many blocks of `token_ids` the cache holds."""
    return len(blocks.match(block_keys(ROOT, token_ids, blocks.block_size, **how), token_ids, len(token_ids)))


# ---- allocation ----------------------------------------------------------------------------------


def test_fresh_pool_gives_ascending_blocks_and_counts_them():
    blocks = pool(8)
    assert blocks.allocate(3) == [0, 1, 2]
    assert (blocks.num_free, blocks.num_used, blocks.num_cached) == (5, 3, 0)
    blocks.check()


def test_released_blocks_without_a_key_are_reused_before_untouched_ones():
    blocks = pool(8)
    table = blocks.allocate(3)
    blocks.release(table)
    assert blocks.allocate(3) == table


def test_allocating_more_than_is_free_fails_and_changes_nothing():
    blocks = pool(2)
    assert not blocks.can_allocate(3)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        blocks.allocate(3)
    blocks.check()


def test_can_allocate_counts_matched_free_blocks_as_taken():
    blocks = pool(3)
    table = run(blocks, prompt(2))
    blocks.release(table)
    assert blocks.can_allocate(1, table)
    assert not blocks.can_allocate(2, table)


def test_can_allocate_does_not_count_matched_used_blocks_twice():
    blocks = pool(3)
    table = run(blocks, prompt(2))
    assert blocks.can_allocate(1, table)


def test_releasing_a_free_block_is_caught():
    blocks = pool()
    table = blocks.allocate(1)
    blocks.release(table)
    with pytest.raises(AssertionError, match="released more often"):
        blocks.release(table)


# ---- matching ------------------------------------------------------------------------------------


def test_released_prompt_hits_and_keeps_its_blocks_when_taken():
    blocks = pool()
    table = run(blocks, prompt(3))
    blocks.release(table)
    again = run(blocks, [*prompt(3), 1])
    assert again[:3] == table
    assert blocks.num_used == 4


def test_p3_prompt_of_exactly_k_blocks_recomputes_its_last_block():
    blocks = pool()
    token_ids = prompt(3)
    table = run(blocks, token_ids)
    keys = block_keys(ROOT, token_ids, SIZE)
    assert blocks.match(keys, token_ids, len(token_ids) - 1) == table[:2]
    assert blocks.match(keys, [*token_ids, 5], len(token_ids)) == table


def test_kvo_05_limit_is_rounded_down_to_whole_blocks():
    blocks = pool()
    token_ids = prompt(2)
    run(blocks, token_ids)
    keys = block_keys(ROOT, token_ids, SIZE)
    assert [len(blocks.match(keys, token_ids, limit)) for limit in (-1, 0, 3, 4, 7, 8, 99)] == [0, 0, 0, 1, 1, 2, 2]


def test_match_stops_at_the_first_block_that_differs():
    blocks = pool()
    run(blocks, prompt(3))
    assert hit(blocks, prompt(2) + prompt(1, first=900)) == 2
    assert hit(blocks, prompt(1, first=900) + prompt(2)) == 0


def test_match_takes_no_reference():
    blocks = pool()
    blocks.release(run(blocks, prompt(2)))
    assert hit(blocks, prompt(2)) == 2
    assert blocks.num_used == 0


def test_block_whose_key_collides_but_whose_tokens_differ_is_no_hit():
    blocks = pool()
    (first, second) = blocks.allocate(2)
    blocks.publish(first, b"k" * 32, None, [1, 2, 3, 4], request_id="r")
    blocks.publish(second, b"k" * 32, None, [5, 6, 7, 8], request_id="r")
    assert blocks.match([b"k" * 32], [5, 6, 7, 8], 4) == []
    assert blocks.match([b"k" * 32], [1, 2, 3, 4], 4) == [first]
    blocks.release([first])
    blocks.check()
    assert blocks.match([b"k" * 32], [1, 2, 3, 4], 4) == [first]


def test_kvo_03_kvo_08_salt_and_adapter_share_nothing_with_the_plain_prompt():
    blocks = pool()
    salted = CacheKeyContext(cache_salt="s")
    run(blocks, prompt(2))
    run(blocks, prompt(2), context=salted)
    assert hit(blocks, prompt(2), context=salted) == 2
    assert hit(blocks, prompt(2), context=CacheKeyContext(cache_salt="t")) == 0
    assert hit(blocks, prompt(2), context=CacheKeyContext(lora_names=("a",))) == 0
    assert blocks.num_cached == 4


def test_switched_off_cache_never_hits_and_tells_nothing():
    blocks = pool(enable_prefix_cache=False)
    blocks.release(run(blocks, prompt(2)))
    assert hit(blocks, prompt(2)) == 0
    assert blocks.take_events() == []
    blocks.check()


# ---- eviction ------------------------------------------------------------------------------------


def test_unhashed_blocks_are_reused_before_cached_ones():
    blocks = pool(4)
    cached = run(blocks, prompt(2))
    plain = blocks.allocate(1)
    blocks.release(cached)
    blocks.release(plain)
    blocks.allocate(2)
    assert hit(blocks, prompt(2)) == 2


def test_end_of_a_chain_is_evicted_before_its_start():
    blocks = pool(4)
    blocks.release(run(blocks, prompt(4)))
    lengths = []
    for _ in range(4):
        blocks.allocate(1)
        blocks.check()
        lengths.append(hit(blocks, prompt(4)))
    assert lengths == [3, 2, 1, 0]


def test_least_recently_used_chain_is_evicted_first():
    blocks = pool(6)
    old, new = prompt(2, first=100), prompt(2, first=200)
    blocks.release(run(blocks, old))
    blocks.release(run(blocks, new))
    blocks.release(run(blocks, [*old, 1]))
    blocks.allocate(4)
    assert (hit(blocks, old), hit(blocks, new)) == (2, 0)


def test_p4_resumed_sequence_finds_the_prefix_that_survived_its_preemption():
    blocks = pool(5)
    token_ids = prompt(4)
    blocks.release(run(blocks, token_ids))
    other = blocks.allocate(3)
    assert hit(blocks, token_ids) == 2
    blocks.release(other)
    resumed = run(blocks, token_ids)
    assert len(set(resumed)) == 4
    assert hit(blocks, token_ids) == 4


def test_used_blocks_are_never_evicted():
    blocks = pool(4)
    table = run(blocks, prompt(2))
    fresh = blocks.allocate(2)
    assert not set(table) & set(fresh)
    assert not blocks.can_allocate(1)
    assert hit(blocks, prompt(2)) == 2


# ---- sharing -------------------------------------------------------------------------------------


def test_forked_blocks_are_shared_until_all_but_one_let_go():
    blocks = pool()
    table = blocks.allocate(2)
    assert not blocks.is_shared(table[1])
    blocks.fork(table)
    blocks.fork(table)
    for shared in (True, True, False):
        assert blocks.is_shared(table[1]) is shared
        blocks.release(table)
        blocks.check()
    assert blocks.num_free == 8


def test_copy_on_write_of_a_shared_tail_leaves_the_others_alone():
    blocks = pool()
    table = run(blocks, [*prompt(1), 1])
    blocks.fork(table)
    assert blocks.is_shared(table[-1])
    (copy,) = blocks.allocate(1)
    blocks.release(table[-1:])
    assert not blocks.is_shared(table[-1])
    assert copy not in table
    blocks.release([table[0], copy])
    blocks.release(table)
    blocks.check()
    assert blocks.num_free == 8


def test_taken_blocks_are_shared_with_their_user():
    blocks = pool()
    table = run(blocks, prompt(2))
    other = run(blocks, [*prompt(2), 1])
    assert other[:2] == table
    assert blocks.is_shared(table[0])
    blocks.release(table)
    assert not blocks.is_shared(table[0])


# ---- the same content twice ----------------------------------------------------------------------


def test_second_block_of_the_same_content_changes_no_mapping_and_tells_nothing():
    blocks = pool()
    first = run(blocks, prompt(2))
    blocks.take_events()
    run(blocks, prompt(2), bypass=True)
    assert blocks.take_events() == []
    assert blocks.match(block_keys(ROOT, prompt(2), SIZE), prompt(2), 8) == first
    assert blocks.num_cached == 2


def test_content_stays_cached_on_its_twin_and_the_released_block_is_free_at_once():
    blocks = pool(4)
    first = run(blocks, prompt(2))
    second = run(blocks, prompt(2), bypass=True)
    blocks.take_events()
    blocks.release(first)
    blocks.check()
    assert blocks.allocate(2) == first
    assert blocks.match(block_keys(ROOT, prompt(2), SIZE), prompt(2), 8) == second
    assert blocks.take_events() == []


def test_released_twin_leaves_the_first_block_cached():
    blocks = pool()
    first = run(blocks, prompt(2))
    blocks.release(run(blocks, prompt(2), bypass=True))
    blocks.check()
    assert blocks.match(block_keys(ROOT, prompt(2), SIZE), prompt(2), 8) == first
    assert blocks.num_used == 2


def test_publishing_a_block_again_is_harmless_but_not_under_another_key():
    blocks = pool()
    table = run(blocks, prompt(1))
    blocks.take_events()
    publish_all(blocks, table, prompt(1))
    assert blocks.take_events() == []
    blocks.check()
    with pytest.raises(AssertionError, match="another key"):
        publish_all(blocks, table, prompt(1, first=500))


# ---- clear and drop ------------------------------------------------------------------------------


def test_kv_15_clear_forgets_all_and_frees_what_was_only_cached():
    blocks = pool(6)
    used = run(blocks, prompt(2))
    blocks.release(run(blocks, prompt(2, first=300)))
    blocks.take_events()
    assert blocks.clear() is True
    blocks.check()
    assert (blocks.num_cached, blocks.num_used, blocks.num_free) == (0, 2, 4)
    assert hit(blocks, prompt(2)) == 0
    assert blocks.take_events() == [KvEvent(event=AllBlocksCleared())]
    blocks.release(used)
    blocks.check()
    assert (blocks.num_free, blocks.clear()) == (6, False)


def test_kv_23_blocks_after_a_cleared_start_are_not_announced():
    blocks = pool()
    token_ids = prompt(3)
    table = blocks.allocate(3)
    publish_all(blocks, table[:2], token_ids)
    blocks.clear()
    blocks.take_events()
    publish_all(blocks, table, token_ids, start=2)
    assert blocks.take_events() == []
    assert blocks.num_cached == 0
    blocks.check()


def test_kv_23_used_end_of_a_chain_leaves_the_cache_with_its_evicted_start():
    blocks = pool(6)
    token_ids = prompt(3)
    table = blocks.allocate(3)
    publish_all(blocks, table[:2], token_ids)
    blocks.clear()
    other = run(blocks, token_ids[:8])
    publish_all(blocks, table, token_ids, start=2)
    assert hit(blocks, token_ids) == 3
    blocks.release(other)
    blocks.take_events()
    blocks.allocate(2)
    blocks.check()
    keys = block_keys(ROOT, token_ids, SIZE)
    (event,) = blocks.take_events()
    assert event.event.block_hashes == (keys[2], keys[1])
    assert (hit(blocks, token_ids), blocks.num_used) == (1, 5)


def test_lor_13_p7_dropping_an_adapter_removes_its_blocks_and_no_others():
    blocks = pool(8)
    adapter, other = (CacheKeyContext(lora_names=(name,)) for name in ("m", "m2"))
    running = run(blocks, prompt(2), context=adapter)
    blocks.release(run(blocks, prompt(2), context=other))
    blocks.release(run(blocks, prompt(2)))
    blocks.take_events()
    blocks.drop_where(lambda extra: "lora:m" in extra)
    blocks.check()
    removed = block_keys(ROOT, prompt(2), SIZE, adapter)
    assert blocks.take_events() == [KvEvent(event=BlockRemoved(block_hashes=(removed[1], removed[0])))]
    assert [hit(blocks, prompt(2), context=context) for context in (adapter, other, PLAIN)] == [0, 2, 2]
    blocks.release(running)
    assert blocks.num_free == 8


def test_dropping_a_block_drops_what_follows_it():
    blocks = pool()
    salted = CacheKeyContext(cache_salt="s")
    blocks.release(run(blocks, prompt(3), context=salted))
    blocks.drop_where(lambda extra: any(key.startswith("salt:") for key in extra))
    blocks.check()
    assert (blocks.num_cached, blocks.num_free) == (0, 8)


# ---- events --------------------------------------------------------------------------------------


def test_kv_10_kv_11_a_prompt_stored_by_one_request_is_one_event():
    blocks = pool()
    keys = publish_all(blocks, blocks.allocate(3), prompt(3), request_id="r7")
    stored = BlockStored(
        block_hashes=tuple(keys),
        parent_block_hash=None,
        token_ids=tuple(prompt(3)),
        block_size=SIZE,
        kv_cache_spec_kind="full_attention",
        cache_key_profile="openengine.block-chain.sha256-cbor/1",
    )
    assert blocks.take_events() == [KvEvent(event=stored, request_id="r7")]
    assert blocks.take_events() == []


def test_kv_11_continuation_names_the_block_before():
    blocks = pool()
    table = blocks.allocate(3)
    keys = publish_all(blocks, table[:2], prompt(3))
    blocks.take_events()
    publish_all(blocks, table, prompt(3), start=2)
    (event,) = blocks.take_events()
    assert (event.event.parent_block_hash, event.event.block_hashes) == (keys[1], (keys[2],))


def test_chains_and_requests_are_not_mixed_in_one_event():
    blocks = pool()
    run(blocks, prompt(2, first=100), request_id="a")
    run(blocks, prompt(2, first=200), request_id="a")
    run(blocks, [*prompt(2, first=200), *prompt(1)], request_id="b")
    events = blocks.take_events()
    assert [(event.request_id, len(event.event.block_hashes)) for event in events] == [("a", 2), ("a", 2), ("b", 1)]


def test_kv_16_kv_18_event_carries_the_adapter_and_one_tuple_of_extras_per_block():
    blocks = pool()
    context = CacheKeyContext(lora_names=("m",), cache_salt="secret")
    run(blocks, prompt(2), context=context, lora_id=3, lora_name="m")
    (event,) = blocks.take_events()
    assert (event.event.lora_id, event.event.lora_name) == (3, "m")
    assert event.event.extra_keys == (context.extra_keys(0, SIZE), ("lora:m",))
    assert "secret" not in repr(event)


def test_kv_18_block_without_extras_has_an_empty_tuple_beside_one_with():
    blocks = pool()
    run(blocks, prompt(2), context=CacheKeyContext(cache_salt="s"))
    (event,) = blocks.take_events()
    assert [len(extra) for extra in event.event.extra_keys] == [1, 0]


def test_kv_14_evicted_blocks_are_removed_in_one_event_before_the_next_is_stored():
    blocks = pool(3)
    blocks.release(run(blocks, prompt(3)))
    blocks.take_events()
    run(blocks, prompt(2, first=300))
    keys = block_keys(ROOT, prompt(3), SIZE)
    removed, stored = blocks.take_events()
    assert removed.event == BlockRemoved(block_hashes=(keys[2], keys[1]))
    assert stored.event.block_hashes == tuple(block_keys(ROOT, prompt(2, first=300), SIZE))


def test_root_key_is_refused_as_a_parent():
    blocks = pool()
    (block,) = blocks.allocate(1)
    with pytest.raises(AssertionError, match="root key"):
        blocks.publish(block, b"k" * 32, ROOT, prompt(1), request_id="r")


def test_events_that_nobody_wants_are_not_kept():
    blocks = pool(record_events=False)
    blocks.release(run(blocks, prompt(3)))
    blocks.clear()
    assert blocks.take_events() == []


def test_kv_07_snapshot_lists_the_present_cache_parents_first():
    blocks = pool(6)
    blocks.release(run(blocks, prompt(3)))
    blocks.release(run(blocks, [*prompt(2), *prompt(1, first=900)]))
    blocks.allocate(3)
    seen = {None}
    for stored in blocks.snapshot():
        assert stored.parent_block_hash in seen
        assert len(stored.token_ids) == SIZE * len(stored.block_hashes)
        seen.update(stored.block_hashes)
    assert seen == {None, *block_keys(ROOT, [*prompt(2), *prompt(1, first=900)], SIZE)}


def test_snapshot_of_an_empty_cache_is_empty():
    assert pool().snapshot() == []


# ---- many random steps ---------------------------------------------------------------------------


class Subscriber:
    """A router's view, built from events alone: key -> (parent, token ids)."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}

    def apply(self, event) -> None:
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
        elif isinstance(event, BlockRemoved):
            for key in event.block_hashes:
                del self.blocks[key]
        else:
            parent = event.parent_block_hash
            for index, key in enumerate(event.block_hashes):
                assert key not in self.blocks and (parent is None or parent in self.blocks)
                tokens = event.token_ids[index * event.block_size : (index + 1) * event.block_size]
                self.blocks[key] = (parent, tokens)
                parent = key

    def chain(self, key: bytes) -> tuple[list[bytes], list[int]]:
        keys, tokens = [], []
        while key is not None:
            parent, ids = self.blocks[key]
            keys.insert(0, key)
            tokens[:0] = ids
            key = parent
        return keys, tokens


class RandomLoad:
    """Sequences that come, grow, fork, are preempted and go, on a pool that is too small for them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.blocks = BlockManager(14, 2, root_key=ROOT)
        self.tables: list[tuple[list[int], list[int], CacheKeyContext]] = []  # table, token ids, context
        self.prompts: list[tuple[list[int], CacheKeyContext]] = []

    def step(self) -> None:
        choice = self.random.random()
        if choice < 0.40 or not self.tables:
            self.admit()
        elif choice < 0.65:
            self.grow()
        elif choice < 0.75:
            self.fork()
        elif choice < 0.96:
            table, _, _ = self.tables.pop(self.random.randrange(len(self.tables)))
            self.blocks.release(table)
        elif choice < 0.98:
            self.blocks.drop_where(lambda extra: "lora:a" in extra)
        else:
            self.blocks.clear()

    def admit(self) -> None:
        token_ids = [self.random.randrange(2) for _ in range(self.random.randrange(1, 12))]
        context = self.random.choice([PLAIN, PLAIN, CacheKeyContext(lora_names=("a",))])
        keys = block_keys(ROOT, token_ids, 2, context)
        bypass = self.random.random() < 0.3
        matched = [] if bypass else self.blocks.match(keys, token_ids, len(token_ids) - 1)
        num_new = -(-len(token_ids) // 2) - len(matched)
        if not self.blocks.can_allocate(num_new, matched):
            return
        self.blocks.take(matched)
        table = matched + self.blocks.allocate(num_new)
        publish_all(self.blocks, table, token_ids, start=len(matched), context=context)
        self.tables.append((table, token_ids, context))
        self.prompts.append((token_ids, context))

    def grow(self) -> None:
        table, token_ids, context = self.random.choice(self.tables)
        if len(token_ids) % 2 == 0:
            if not self.blocks.can_allocate(1):
                return
            table += self.blocks.allocate(1)
        elif self.blocks.is_shared(table[-1]):
            if not self.blocks.can_allocate(1):
                return
            (copy,) = self.blocks.allocate(1)
            self.blocks.release([table[-1]])
            table[-1] = copy
        token_ids.append(self.random.randrange(2))
        if len(token_ids) % 2 == 0:
            publish_all(self.blocks, table, token_ids, start=len(table) - 1, context=context)

    def fork(self) -> None:
        table, token_ids, context = self.random.choice(self.tables)
        self.blocks.fork(table)
        self.tables.append((list(table), list(token_ids), context))


@pytest.mark.parametrize("seed", range(8))
def test_kv_23_random_load_keeps_the_pool_whole_and_its_events_true(seed):
    load, subscriber, snapshot = RandomLoad(seed), Subscriber(), Subscriber()
    blocks = load.blocks
    for _ in range(250):
        load.step()
        blocks.check()
        assert blocks.num_used == len({block_id for table, _, _ in load.tables for block_id in table})
        for event in blocks.take_events():
            subscriber.apply(event.event)
        snapshot.blocks.clear()
        for stored in blocks.snapshot():
            snapshot.apply(stored)
        assert snapshot.blocks == subscriber.blocks and len(subscriber.blocks) == blocks.num_cached
        for key in subscriber.blocks:
            keys, token_ids = subscriber.chain(key)
            assert len(blocks.match(keys, token_ids, len(token_ids))) == len(keys)
        for token_ids, context in load.prompts[-10:]:
            keys = block_keys(ROOT, token_ids, 2, context)
            known = next((i for i, key in enumerate(keys) if key not in subscriber.blocks), len(keys))
            assert len(blocks.match(keys, token_ids, len(token_ids))) == known
    for table, _, _ in load.tables:
        blocks.release(table)
    blocks.check()
    assert blocks.num_free == blocks.num_blocks
