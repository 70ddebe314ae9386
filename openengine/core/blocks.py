"""The KV block pool: who uses which block, what the prefix cache holds, what is evicted next.

                 allocate                       publish
    blank ────────────────────> used, no key ────────────> used, cached ──┐
      ^                             │                        ^    │       │ drop, clear: used, no key
      │<────────── release ─────────┘                   take │    │ release
      │                                                      │    v
      └──────────────── evict (allocate), drop, clear ──────── free, cached

A block is free (no references) or used. A cached block is named by its cache key and carries the
token ids it was computed from. Free blocks without a key are reused first, then free cached ones,
least recently released first and, of one chain, its end before its start. So a cached block's
parent is cached too: the cache holds chains that start at the root, and every announced block can hit.

Owns ids and keys only. Not the KV memory, nor the sequences' block tables (lists of ids that the
scheduler keeps). Used by one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from openengine.core.cache_keys import PROFILE, PROFILE_VERSION
from openengine.event_types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

__all__ = ["BlockManager"]


@dataclass(slots=True, eq=False)
class _Content:
    """What a cached block holds; shared by the blocks that hold the same. Only `num_children` changes."""

    key: bytes
    parent: bytes | None
    token_ids: bytes  # u32 [block_size]
    extra: tuple[str, ...]
    lora_id: int | None
    lora_name: str | None
    num_children: int = 0  # cached contents whose parent this is


@dataclass(frozen=True, slots=True)
class _Change:
    """One change of the cache; `kind` is the event it will be part of, `content` None when all was cleared."""

    kind: type
    content: _Content | None = None
    request_id: str = ""


class BlockManager:
    """Owns blocks 0..num_blocks-1 of `block_size` tokens each.

    `root_key` is the parent from which callers derive the keys of first blocks; it names no block.
    With `record_events`, every change of the cache is kept until `take_events` fetches it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        root_key: bytes,
        enable_prefix_cache: bool = True,
        record_events: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.root_key = root_key
        self.enable_prefix_cache = enable_prefix_cache
        self._record_events = record_events
        self._refs = [0] * num_blocks
        self._contents: list[_Content | None] = [None] * num_blocks
        # Insertion order is parents first: a content enters only while its parent is there.
        self._block_of: dict[bytes, int] = {}
        # Used blocks whose content `_block_of` finds on another block; they step in when that is released.
        self._twins: dict[bytes, list[int]] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))  # free without a key; a stack
        self._reusable: OrderedDict[int, None] = OrderedDict()  # free and cached; first in, first evicted
        self._changes: list[_Change] = []

    def renewed(self) -> BlockManager:
        """An empty manager of the same pool; where events are recorded, the first says that everything is gone."""
        fresh = BlockManager(
            self.num_blocks,
            self.block_size,
            root_key=self.root_key,
            enable_prefix_cache=self.enable_prefix_cache,
            record_events=self._record_events,
        )
        fresh._record(AllBlocksCleared)
        return fresh

    # ---- accounting --------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks without a reference, cached or not."""
        return len(self._blank) + len(self._reusable)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that a prompt can hit, used or free."""
        return len(self._block_of)

    def can_allocate(self, num_new: int, reused: Sequence[int] = ()) -> bool:
        """Whether `num_new` fresh blocks are left once the matched blocks `reused` have been taken."""
        refs = self._refs
        return num_new <= self.num_free - sum(1 for block_id in reused if refs[block_id] == 0)

    # ---- prefix cache ------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes], token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """The longest run of cached blocks from the start of `token_ids`, in at most `max_tokens` tokens.

        `keys[i]` is the key of full block i. A block counts only if its own token ids are those of
        the prompt. Takes no reference, so `take` the blocks before any other call that changes the pool.
        """
        found = []
        for key in keys[: max(0, min(max_tokens, len(token_ids))) // self.block_size]:
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            found.append(block_id)
        packed = _pack(token_ids[: len(found) * self.block_size])
        step = 4 * self.block_size
        for index, block_id in enumerate(found):
            if self._contents[block_id].token_ids != packed[index * step : (index + 1) * step]:
                return found[:index]
        return found

    def publish(
        self,
        block_id: int,
        key: bytes,
        parent: bytes | None,
        token_ids: Sequence[int],
        *,
        extra: tuple[str, ...] = (),
        request_id: str = "",
        lora_id: int | None = None,
        lora_name: str | None = None,
    ) -> None:
        """Let the used, full block be found by `key`; blocks of a chain are published in order.

        `parent` is the key of the block before, None for the first. Where the key is already cached
        the older block stays the one that hits. A block whose parent is not cached (cleared or
        dropped meanwhile) could not be reached and stays without a key.
        """
        assert self._refs[block_id] > 0, f"block {block_id} is free and cannot be published"
        assert len(token_ids) == self.block_size, f"{len(token_ids)} token ids do not fill a block of {self.block_size}"
        assert parent != self.root_key, "the parent of a first block is None; the root key names no block"
        known = self._contents[block_id]
        assert known is None or known.key == key, f"block {block_id} is already published under another key"
        reachable = parent is None or parent in self._block_of
        if known is not None or not reachable or not self.enable_prefix_cache:
            return
        holder = self._block_of.get(key)
        if holder is not None:
            content = self._contents[holder]
            if content.token_ids == _pack(token_ids):
                self._contents[block_id] = content
                self._twins.setdefault(key, []).append(block_id)
            return
        content = _Content(key, parent, _pack(token_ids), extra, lora_id, lora_name)
        if parent is not None:
            self._contents[self._block_of[parent]].num_children += 1
        self._contents[block_id] = content
        self._block_of[key] = block_id
        self._record(BlockStored, content, request_id)

    def clear(self) -> bool:
        """Forget every key; used blocks stay used. Returns whether anything was cached."""
        had_any = bool(self._block_of)
        self._contents = [None] * self.num_blocks
        self._block_of.clear()
        self._twins.clear()
        self._blank.extend(self._reusable)
        self._reusable.clear()
        self._record(AllBlocksCleared)
        return had_any

    def drop_where(self, predicate: Callable[[tuple[str, ...]], bool]) -> None:
        """Forget the keys of blocks whose extra keys satisfy `predicate`, and of those that follow them."""
        self._drop(lambda content: predicate(content.extra))

    def forget(self, block_ids: Iterable[int]) -> None:
        """Forget the keys of these used blocks, whose content turned out to be no good, and of those that follow them."""
        bad = {id(self._contents[block_id]) for block_id in block_ids if self._contents[block_id] is not None}
        if bad:
            self._drop(lambda content: id(content) in bad)

    # ---- references --------------------------------------------------------------------------

    def take(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each matched block; the free ones stop being free."""
        refs = self._refs
        for block_id in block_ids:
            assert self._contents[block_id] is not None, f"block {block_id} is not cached and cannot be taken"
            if refs[block_id] == 0:
                del self._reusable[block_id]
            refs[block_id] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """`num_blocks` fresh blocks in ascending order, with one reference each; evicts cached ones if it must."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks wanted, {self.num_free} free; ask can_allocate first"
        while len(self._blank) < num_blocks:
            self._evict()
        split = len(self._blank) - num_blocks
        block_ids = self._blank[split:]
        del self._blank[split:]
        block_ids.sort()
        for block_id in block_ids:
            self._refs[block_id] = 1
        return block_ids

    def fork(self, block_ids: Iterable[int]) -> None:
        """Share used blocks: add one reference to each."""
        for block_id in block_ids:
            assert self._refs[block_id] > 0, f"block {block_id} is free and cannot be shared"
            self._refs[block_id] += 1

    def is_shared(self, block_id: int) -> bool:
        """Whether the block must be copied before it is written."""
        return self._refs[block_id] > 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block of a table (or its end), given in table order."""
        refs = self._refs
        for block_id in reversed(block_ids):
            assert refs[block_id] > 0, f"block {block_id} is released more often than it was referenced"
            refs[block_id] -= 1
            if refs[block_id] > 0:
                continue
            if self._contents[block_id] is None or self._hand_over(block_id):
                self._blank.append(block_id)
            else:
                self._reusable[block_id] = None

    # ---- events ------------------------------------------------------------------------------

    def take_events(self) -> list[KvEvent]:
        """What changed since the last call, in order; runs of one chain and request, and of removals, are one event."""
        changes, self._changes = self._changes, []
        return self._merge(changes)

    def snapshot(self) -> list[BlockStored]:
        """The present cache as stored events, parents before children."""
        contents = (self._contents[block_id] for block_id in self._block_of.values())
        return [event.event for event in self._merge(_Change(BlockStored, content) for content in contents)]

    # ---- integrity ---------------------------------------------------------------------------

    def references(self) -> dict[int, int]:
        """Reference count of every used block."""
        return {block_id: refs for block_id, refs in enumerate(self._refs) if refs}

    def check(self) -> None:
        """Assert every invariant of the pool; for tests, it visits all blocks."""
        blank, reusable = set(self._blank), set(self._reusable)
        free = {block_id for block_id, refs in enumerate(self._refs) if refs == 0}
        assert min(self._refs, default=0) >= 0, "no block has a negative reference count"
        assert len(blank) == len(self._blank) and not blank & reusable, "a block is in a free list once"
        assert blank | reusable == free, "the free lists hold exactly the blocks without a reference"
        assert self.num_free == len(free) and self.num_used == self.num_blocks - len(free)
        assert all(self._contents[block_id] is None for block_id in blank), "a blank block has no content"
        cached = set(self._block_of.values())
        twins = [block_id for blocks in self._twins.values() for block_id in blocks]
        assert len(cached) == len(self._block_of) and reusable <= cached, "a cached block has one key"
        assert len(set(twins)) == len(twins) and not cached & set(twins), "a twin is not the block that hits"
        assert cached | set(twins) == {b for b, content in enumerate(self._contents) if content is not None}
        assert not free & set(twins), "twins are used"
        children: dict[bytes, int] = {}
        seen: set[bytes | None] = {None}
        for key, block_id in self._block_of.items():
            content = self._contents[block_id]
            assert content.key == key and content.parent in seen, "parents are cached, and before their children"
            assert all(self._contents[twin] is content for twin in self._twins.get(key, ())), "twins share content"
            seen.add(key)
            if content.parent is not None:
                children[content.parent] = children.get(content.parent, 0) + 1
        assert self._twins.keys() <= self._block_of.keys() and all(self._twins.values()), "twins belong to a cached key"
        for key, block_id in self._block_of.items():
            assert self._contents[block_id].num_children == children.get(key, 0), "children are counted"

    # ---- private -----------------------------------------------------------------------------

    def _hand_over(self, block_id: int) -> bool:
        """Detach a block that lost its last reference if a used block holds the same; whether it did."""
        key = self._contents[block_id].key
        twins = self._twins.get(key)
        if twins is None:
            return False
        if self._block_of[key] == block_id:
            self._block_of[key] = twins.pop()
        else:
            twins.remove(block_id)
        if not twins:
            del self._twins[key]
        self._contents[block_id] = None
        return True

    def _evict(self) -> None:
        """Make one or more free cached blocks blank."""
        block_id = next(iter(self._reusable))
        content = self._contents[block_id]
        if content.num_children:
            # Only when a chain outlives its start, as when a sequence goes on after `clear`
            # and another one restores the keys it continues.
            self._drop(lambda other: other is content)
        else:
            self._forget(content)

    def _drop(self, predicate: Callable[[_Content], bool]) -> None:
        dropped: list[_Content] = []
        keys: set[bytes | None] = set()
        for key, block_id in self._block_of.items():
            content = self._contents[block_id]
            if content.parent in keys or predicate(content):
                dropped.append(content)
                keys.add(key)
        for content in reversed(dropped):
            self._forget(content)

    def _forget(self, content: _Content) -> None:
        block_id = self._block_of.pop(content.key)
        for holder in (block_id, *self._twins.pop(content.key, ())):
            self._contents[holder] = None
        if content.parent is not None:
            self._contents[self._block_of[content.parent]].num_children -= 1
        if self._refs[block_id] == 0:
            del self._reusable[block_id]
            self._blank.append(block_id)
        self._record(BlockRemoved, content)

    def _record(self, kind: type, content: _Content | None = None, request_id: str = "") -> None:
        if self._record_events:
            self._changes.append(_Change(kind, content, request_id))

    def _merge(self, changes: Iterable[_Change]) -> list[KvEvent]:
        runs: list[list[_Change]] = []
        for change in changes:
            if runs and _continues(runs[-1][-1], change):
                runs[-1].append(change)
            else:
                runs.append([change])
        return [self._event(run) for run in runs]

    def _event(self, run: list[_Change]) -> KvEvent:
        contents = [change.content for change in run]
        kind = run[0].kind
        if kind is AllBlocksCleared:
            event = AllBlocksCleared()
        elif kind is BlockRemoved:
            event = BlockRemoved(block_hashes=tuple(content.key for content in contents))
        else:
            event = self._stored(contents)
        return KvEvent(event=event, request_id=run[0].request_id)

    def _stored(self, chain: list[_Content]) -> BlockStored:
        extras = tuple(content.extra for content in chain)
        return BlockStored(
            block_hashes=tuple(content.key for content in chain),
            parent_block_hash=chain[0].parent,
            token_ids=tuple(_unpack(b"".join(content.token_ids for content in chain))),
            block_size=self.block_size,
            lora_id=chain[0].lora_id,
            lora_name=chain[0].lora_name,
            extra_keys=extras if any(extras) else (),
            kv_cache_spec_kind="full_attention",
            cache_key_profile=f"{PROFILE}/{PROFILE_VERSION}",
        )


def _continues(previous: _Change, change: _Change) -> bool:
    """Whether one event can tell both: a chain that one request stored, a run of removals, or of clears."""
    if change.kind is not previous.kind or change.request_id != previous.request_id:
        return False
    return change.kind is not BlockStored or change.content.parent == previous.content.key


def _pack(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype=np.uint32).tobytes()


def _unpack(packed: bytes) -> list[int]:
    return np.frombuffer(packed, dtype=np.uint32).tolist()
