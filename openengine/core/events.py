"""KV events and runtime events: written by the loop thread, read from any thread or event loop.

    append ──▶ EventLog   │ 41 │ 42 │ 43 │ 44 │ 45 │     the last `capacity` batches, shared by all readers
                                 ▲              ▲
                             subscription   subscription       a place in the log; one that falls out of it ends

    emit ────▶ RuntimeEventBus ──▶ a bounded queue per subscription, whose oldest event gives way and is counted

Subscribers never slow the writer, and one that is left behind costs nothing. Owns numbering, replay and waiting. Does not
own the cache that the KV events tell of (blocks.py).
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from openengine.errors import InvalidArgument, OpenEngineError, OutOfRange, Overloaded
from openengine.service_types import KvEventBatch, RuntimeEvent, RuntimeEventType
from openengine.types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

__all__ = ["EventLog", "RuntimeEventBus", "Subscription", "Waiter", "wake"]

Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]
T = TypeVar("T")
_T_co = TypeVar("_T_co", covariant=True)

# Bounds one batch, so that it fits into a message (4 MB is gRPC's default): four bytes for a token id, 64 for a block.
_MAX_BATCH_BYTES = 1 << 20
_TOKEN_BYTES, _BLOCK_BYTES = 4, 64


def wake(waiters: Iterable[Waiter]) -> None:
    """Release those who wait in event loops, with one call into each loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for event_loop, future in waiters:
        by_loop.setdefault(event_loop, []).append(future)
    for event_loop, futures in by_loop.items():
        try:
            event_loop.call_soon_threadsafe(_resolve, futures)
        except RuntimeError:
            pass  # the reader closed its event loop: nobody waits any more


class Subscription(Generic[T]):
    """A stream of events, for `for` or `async for`; one reader at a time. It ends with the engine, or by `close`.

    Raises Overloaded, as its last word, when the reader fell behind what is kept. Leaving it early disturbs nobody.
    """

    def __init__(self, signal: _Signal, source: _Source[T]) -> None:
        self._signal = signal
        self._source = source
        self._is_closed = False

    def poll(self) -> T | None:
        """The next event if it is there already, else None."""
        if self._is_closed:
            return None
        try:
            return self._source.take()
        except OpenEngineError:
            self.close()
            raise

    def close(self) -> None:
        """End the stream, also for a reader that is waiting. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._source.close()
            wake(self._signal.notify())

    def __iter__(self) -> Subscription[T]:
        return self

    def __next__(self) -> T:
        while True:
            # Both are read before the source, so that whatever comes after that is seen in the next round.
            version, is_last = self._signal.version, self._signal.is_closed
            event = self.poll()
            if event is not None:
                return event
            if is_last or self._is_closed:
                raise StopIteration
            self._signal.wait(version)

    def __aiter__(self) -> Subscription[T]:
        return self

    async def __anext__(self) -> T:
        while True:
            version, is_last = self._signal.version, self._signal.is_closed
            event = self.poll()
            if event is not None:
                return event
            if is_last or self._is_closed:
                raise StopAsyncIteration
            await self._signal.wait_async(version)

    def __enter__(self) -> Subscription[T]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class EventLog:
    """The last `capacity` batches of KV events of one data-parallel rank, numbered from 1 without gaps.

    `append`, `begin` and `close` are for the loop thread, `subscribe` is for anyone. `clock` gives Unix nanoseconds.
    """

    def __init__(self, capacity: int, *, data_parallel_rank: int = 0, clock: Callable[[], int] = time.time_ns) -> None:
        assert capacity > 0, "an engine without KV events has no log"
        self.capacity = capacity
        self.data_parallel_rank = data_parallel_rank
        self._clock = clock
        self._signal = _Signal()
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
        with self._signal.changed:
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
        place = subscription._source
        assert isinstance(place, _Place) and place.number is None, (
            "only a snapshot subscription has a beginning to come"
        )
        with self._signal.changed:
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
        with self._signal.changed:
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
        with self._signal.changed:
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


class RuntimeEventBus:
    """Hands runtime events to whoever asked for their type; nothing is kept for those who come later.

    `id_prefix` makes event ids unique among engines. A subscription queues up to `queue_size` events; then the oldest gives
    way, and the next one that is read says how many did, in `attributes["dropped"]`. Events may be emitted by any thread.
    """

    def __init__(self, id_prefix: str, *, queue_size: int = 1024, clock: Callable[[], int] = time.time_ns) -> None:
        self._id_prefix = id_prefix
        self._queue_size = queue_size
        self._clock = clock
        self._signal = _Signal()
        self._queues: list[weakref.ref[_Queue]] = []  # weak, so that a subscription that was dropped is no reader
        self._num_emitted = 0
        self._last_time = 0
        self._has_news = False
        self.wanted: frozenset[RuntimeEventType] = frozenset()
        """The types that somebody reads: whoever emits looks here before it collects attributes."""

    def subscribe(self, types: Iterable[RuntimeEventType] = ()) -> Subscription[RuntimeEvent]:
        """Events of these types from now on, of all types for none. Raises InvalidArgument for an unknown type."""
        source = _Queue(self, _event_types(types), self._queue_size)
        with self._signal.changed:
            self._queues.append(weakref.ref(source))
            self._update_wanted()
        return Subscription(self._signal, source)

    def emit(self, event_type: RuntimeEventType, attributes: Mapping[str, Any]) -> None:
        """Queue an event for its readers, who see it at the next `flush`. Does nothing when there are none."""
        if event_type not in self.wanted:
            return
        texts = {name: str(value) for name, value in attributes.items()}
        with self._signal.changed:
            self._num_emitted += 1
            self._last_time = max(self._last_time, self._clock())
            event = RuntimeEvent(
                event_id=f"{self._id_prefix}-{self._num_emitted}",
                timestamp_unix_nanos=self._last_time,
                type=event_type,
                attributes=texts,
            )
            queues = [reference() for reference in self._queues]
            for queue in queues:
                if queue is not None and event_type in queue.types:
                    queue.put(event)
                    self._has_news = True
            if None in queues:
                self._update_wanted()

    def flush(self) -> list[Waiter]:
        """Let readers see what was emitted: once per step. Returns whom to `wake`."""
        if not self._has_news:
            return []
        with self._signal.changed:
            self._has_news = False
            return self._signal.notify()

    def close(self) -> None:
        """End every subscription after what is queued for it."""
        self.wanted = frozenset()
        wake(self._signal.close())

    def _remove(self, queue: _Queue) -> None:
        with self._signal.changed:
            self._queues = [reference for reference in self._queues if reference() is not queue]
            self._update_wanted()

    def _update_wanted(self) -> None:
        alive = [queue for reference in self._queues if (queue := reference()) is not None]
        self._queues = [weakref.ref(queue) for queue in alive]
        is_open = not self._signal.is_closed
        self.wanted = frozenset().union(*(queue.types for queue in alive)) if is_open else frozenset()


# ---- what a subscription reads from --------------------------------------------------------------


class _Source(Protocol[_T_co]):
    def take(self) -> _T_co | None:
        """The next event, None when there is none yet."""

    def close(self) -> None: ...


class _Signal:
    """What one writer and its readers share: a lock, a count of what happened, and who waits for more."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.version = 0
        self.is_closed = False
        self._waiting: list[Waiter] = []

    def notify(self) -> list[Waiter]:
        """Something happened: release the readers in threads, return those in event loops."""
        with self.changed:
            self.version += 1
            self.changed.notify_all()
            waiting, self._waiting = self._waiting, []
            return waiting

    def close(self) -> list[Waiter]:
        with self.changed:
            self.is_closed = True
            return self.notify()

    def wait(self, version: int) -> None:
        """Until more has happened than `version` counted."""
        with self.changed:
            self.changed.wait_for(lambda: self.version != version)

    async def wait_async(self, version: int) -> None:
        event_loop = asyncio.get_running_loop()
        waiter = (event_loop, event_loop.create_future())
        with self.changed:
            if self.version != version:
                return
            self._waiting.append(waiter)
        try:
            await waiter[1]
        finally:
            with self.changed:
                if waiter in self._waiting:  # cancelled
                    self._waiting.remove(waiter)


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


class _Queue:
    """Runtime events of `types` that one subscription has yet to read."""

    __slots__ = ("__weakref__", "_bus", "_events", "_num_dropped", "types")

    def __init__(self, bus: RuntimeEventBus, types: frozenset[RuntimeEventType], size: int) -> None:
        self._bus = bus
        self.types = types
        self._events: deque[RuntimeEvent] = deque(maxlen=size)
        self._num_dropped = 0

    def put(self, event: RuntimeEvent) -> None:
        self._num_dropped += len(self._events) == self._events.maxlen
        self._events.append(event)

    def take(self) -> RuntimeEvent | None:
        with self._bus._signal.changed:
            if not self._events:
                return None
            event = self._events.popleft()
            num_dropped, self._num_dropped = self._num_dropped, 0
        if not num_dropped:
            return event
        return replace(event, attributes={**event.attributes, "dropped": str(num_dropped)})

    def close(self) -> None:
        self._bus._remove(self)


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


# ---- callers' input ------------------------------------------------------------------------------


def _event_types(types: Iterable[RuntimeEventType]) -> frozenset[RuntimeEventType]:
    known = ", ".join(map(str, RuntimeEventType))
    try:
        return frozenset(map(RuntimeEventType, types)) or frozenset(RuntimeEventType)
    except (TypeError, ValueError):
        raise InvalidArgument(f"types must be runtime event types, not {types!r:.80}; there are {known}") from None


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgument(f"{name} must be an integer of at least 0, not {value!r:.80}")


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
