"""`EventLog`: what changed in the prefix cache, numbered, kept for a while and read by any number of subscribers.

    append ──▶ │ 41 │ 42 │ 43 │ 44 │ 45 │     the last `capacity` batches, shared by all readers
                      ▲              ▲
                  subscription   subscription       a place in the log; one that falls out of it ends with Overloaded

A subscriber is a number: it never slows the writer, and one that is left behind costs nothing. Owns numbering, replay and
the size of batches. Does not own the cache (blocks.py) nor waiting (subscription.py).
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from openengine.core.subscription import Signal, Subscription, Waiter, wake
from openengine.errors import InvalidArgument, OutOfRange, Overloaded
from openengine.event_types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch

__all__ = ["EventLog"]

# Bounds one batch, so that it fits into a message (4 MB is gRPC's default): four bytes for a token id, 64 for a block.
_MAX_BATCH_BYTES = 1 << 20
_TOKEN_BYTES, _BLOCK_BYTES = 4, 64


class EventLog:
    """The last `capacity` batches of KV events of one data-parallel rank, numbered from 1 without gaps.

    `append`, `begin` and `close` are for the loop thread, `subscribe` is for anyone. `clock` gives Unix nanoseconds.
    """

    def __init__(self, capacity: int, *, data_parallel_rank: int = 0, clock: Callable[[], int] = time.time_ns) -> None:
        assert capacity > 0, "an engine without KV events has no log"
        self.capacity = capacity
        self.data_parallel_rank = data_parallel_rank
        self._clock = clock
        self._signal = Signal()
        self._batches: deque[KvEventBatch] = deque(maxlen=capacity)  # packed
        self._last_number = 0
        self._last_time = 0

    @property
    def last_sequence_number(self) -> int:
        """Number of the newest batch, 0 before the first."""
        return self._last_number

    def append(self, events: Sequence[KvEvent]) -> list[Waiter]:
        """Number and keep what changed in a step, in one batch unless it is huge. Returns whom to `wake`."""
        if not events:
            return []
        packed = [_pack(event) for event in events]
        with self._signal.lock:
            now = self._now()
            for batch in _batches(packed):
                self._last_number += 1
                self._batches.append(self._batch(self._last_number, now, batch))
            return self._signal.notify()

    def subscribe(
        self,
        *,
        include_snapshot: bool = False,
        start_sequence_number: int = 0,
        data_parallel_ranks: Sequence[int] = (),
    ) -> Subscription[KvEventBatch]:
        """Batches from `start_sequence_number` on, or from now on for 0.

        With `include_snapshot` the stream begins once the loop thread has called `begin`. Raises InvalidArgument for a
        rank that is not this one or for both a snapshot and a start, OutOfRange for a start that is not kept.
        """
        self._check_ranks(data_parallel_ranks)
        _check_count("start_sequence_number", start_sequence_number)
        if not include_snapshot:
            return Subscription(self._signal, self._place(start_sequence_number))
        if start_sequence_number:
            raise InvalidArgument(
                f"start_sequence_number {start_sequence_number} contradicts include_snapshot, which has a start of its own; "
                "leave one of them out"
            )
        return Subscription(self._signal, _Place(self))

    def begin(self, subscription: Subscription[KvEventBatch], stored: Iterable[BlockStored]) -> None:
        """Give a subscription that waits for its snapshot the present cache, parents before children.

        Everything that has changed must have been appended. `stored` may be lazy: the reader consumes it.
        """
        place = subscription.source
        assert isinstance(place, _Place) and place.number is None, (
            "only a snapshot subscription has a beginning to come"
        )
        with self._signal.lock:
            number, now = self._last_number, self._now()
            events = itertools.chain([AllBlocksCleared()], stored)
            batches = _batches(KvEvent(event=event) for event in events)
            place.earlier = (self._batch(number, now, batch) for batch in batches)
            place.number = number + 1  # last: from here on the reader takes
        wake(self._signal.notify())

    def close(self) -> None:
        """End every subscription after what is kept for it."""
        wake(self._signal.close())

    def _place(self, start: int) -> _Place:
        with self._signal.lock:
            following = self._last_number + 1
            first = following - len(self._batches)
            if start == 0:
                return _Place(self, following)
            if not first <= start <= following:
                raise OutOfRange(
                    f"start_sequence_number {start} is not kept: replay can begin at {first} to {following}; "
                    "subscribe with include_snapshot to get the present cache instead"
                )
            # Held by the subscription, since the oldest would be overtaken before its reader gets to them.
            kept = list(itertools.islice(self._batches, start - first, None))
            return _Place(self, following, map(_unpack, kept))

    def _at(self, number: int) -> KvEventBatch | None:
        """The kept batch of that number, None when it is still to come. Raises Overloaded when it is gone."""
        with self._signal.lock:
            first = self._last_number - len(self._batches) + 1
            if number > self._last_number:
                return None
            if number >= first:
                return self._batches[number - first]
        raise Overloaded(
            f"the reader fell behind: batch {number} is next and the log of {self.capacity} batches begins at {first}; "
            "subscribe again with include_snapshot, and read faster or raise event_buffer_size"
        )

    def _batch(self, number: int, now: int, events: tuple[KvEvent, ...]) -> KvEventBatch:
        return KvEventBatch(
            sequence_number=number,
            timestamp_unix_nanos=now,
            data_parallel_rank=self.data_parallel_rank,
            events=events,
        )

    def _now(self) -> int:
        self._last_time = max(self._last_time, self._clock())
        return self._last_time

    def _check_ranks(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank != self.data_parallel_rank:
                raise InvalidArgument(
                    f"data_parallel_rank {rank!r:.80} does not exist here; the engine has rank {self.data_parallel_rank} only"
                )


class _Place:
    """A place in the log: `earlier` batches that the subscription holds itself, then those from `number` on.

    `number` is None while a snapshot is still to come.
    """

    __slots__ = ("_log", "earlier", "number")

    def __init__(self, log: EventLog, number: int | None = None, earlier: Iterator[KvEventBatch] | None = None) -> None:
        self._log = log
        self.number = number
        self.earlier = iter(()) if earlier is None else earlier

    def take(self) -> KvEventBatch | None:
        number = self.number
        if number is None:
            return None
        batch = next(self.earlier, None)
        if batch is not None:
            return batch
        batch = self._log._at(number)
        if batch is None:
            return None
        self.number = number + 1
        return _unpack(batch)

    def close(self) -> None:
        self.earlier = iter(())


# ---- batches -------------------------------------------------------------------------------------


def _batches(events: Iterable[KvEvent]) -> Iterator[tuple[KvEvent, ...]]:
    """`events` in order, in as few batches as their size allows."""
    batch: list[KvEvent] = []
    num_bytes = 0
    for event in itertools.chain.from_iterable(map(_pieces, events)):
        size = _num_blocks(event) * _bytes_per_block(event)
        if batch and num_bytes + size > _MAX_BATCH_BYTES:
            yield tuple(batch)
            batch, num_bytes = [], 0
        batch.append(event)
        num_bytes += size
    if batch:
        yield tuple(batch)


def _pieces(event: KvEvent) -> Iterator[KvEvent]:
    """`event`, or several that say the same where it alone is too large for a batch."""
    num_blocks, most = _num_blocks(event), max(1, _MAX_BATCH_BYTES // _bytes_per_block(event))
    if num_blocks <= most:
        yield event
        return
    for start in range(0, num_blocks, most):
        yield replace(event, event=_part(event.event, start, start + most))


def _part(event: BlockStored | BlockRemoved, start: int, stop: int) -> BlockStored | BlockRemoved:
    hashes = event.block_hashes[start:stop]
    if isinstance(event, BlockRemoved):
        return replace(event, block_hashes=hashes)
    extras = event.extra_keys[start:stop]
    return replace(
        event,
        block_hashes=hashes,
        parent_block_hash=event.block_hashes[start - 1] if start else event.parent_block_hash,
        token_ids=event.token_ids[start * event.block_size : stop * event.block_size],
        extra_keys=extras if any(extras) else (),
    )


def _num_blocks(event: KvEvent) -> int:
    return 0 if isinstance(event.event, AllBlocksCleared) else len(event.event.block_hashes)


def _bytes_per_block(event: KvEvent) -> int:
    is_stored = isinstance(event.event, BlockStored)
    return _BLOCK_BYTES + (_TOKEN_BYTES * event.event.block_size if is_stored else 0)


def _pack(event: KvEvent) -> KvEvent:
    """With 4 bytes for a token id, where a tuple takes 36: thousands of batches are kept, mostly for nobody."""
    if not isinstance(event.event, BlockStored):
        return event
    return replace(event, event=replace(event.event, token_ids=array("I", event.event.token_ids)))


def _unpack(batch: KvEventBatch) -> KvEventBatch:
    events = (
        replace(event, event=replace(event.event, token_ids=tuple(event.event.token_ids)))
        if isinstance(event.event, BlockStored)
        else event
        for event in batch.events
    )
    return replace(batch, events=tuple(events))


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgument(f"{name} must be an integer of at least 0, not {value!r:.80}")
