"""`RuntimeEventBus`: what the engine does, told as it happens to whoever asked for it.

    emit ──▶ a bounded queue per subscription, whose oldest event gives way and is counted ──▶ flush wakes the readers

Nothing is kept for those who come later, and without readers an event costs one look at `wanted`.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from openengine.core.subscription import Signal, Subscription, Waiter, wake
from openengine.errors import InvalidArgument
from openengine.event_types import RuntimeEvent, RuntimeEventType

__all__ = ["RuntimeEventBus"]


class RuntimeEventBus:
    """Hands runtime events to whoever asked for their type; nothing is kept for those who come later.

    `id_prefix` makes event ids unique among engines. A subscription queues up to `queue_size` events; then the oldest gives
    way, and the next one that is read says how many did, in `attributes["dropped"]`. Events may be emitted by any thread.
    """

    def __init__(self, id_prefix: str, *, queue_size: int = 1024, clock: Callable[[], int] = time.time_ns) -> None:
        self._id_prefix = id_prefix
        self._queue_size = queue_size
        self._clock = clock
        self._signal = Signal()
        self._queues: list[weakref.ref[_Queue]] = []  # weak, so that a subscription that was dropped is no reader
        self._num_emitted = 0
        self._last_time = 0
        self._has_news = False
        self.wanted: frozenset[RuntimeEventType] = frozenset()
        """The types that somebody reads: whoever emits looks here before it collects attributes."""

    def subscribe(self, types: Iterable[RuntimeEventType] = ()) -> Subscription[RuntimeEvent]:
        """Events of these types from now on, of all types for none. Raises InvalidArgument for an unknown type."""
        source = _Queue(self, _event_types(types), self._queue_size)
        with self._signal.lock:
            self._queues.append(weakref.ref(source))
            if not self._signal.is_closed:
                self.wanted |= source.types
        return Subscription(self._signal, source)

    def emit(self, event_type: RuntimeEventType, attributes: Mapping[str, Any]) -> None:
        """Queue an event for its readers, who see it at the next `flush`. Does nothing when there are none."""
        if event_type not in self.wanted:
            return
        texts = {name: str(value) for name, value in attributes.items()}
        with self._signal.lock:
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
                self._remove()

    def flush(self) -> list[Waiter]:
        """Let readers see what was emitted: once per step. Returns whom to `wake`."""
        if not self._has_news:
            return []
        with self._signal.lock:
            self._has_news = False
            return self._signal.notify()

    def close(self) -> None:
        """End every subscription after what is queued for it."""
        with self._signal.lock:
            self.wanted = frozenset()
            waiters = self._signal.close()
        wake(waiters)

    def _remove(self, gone: _Queue | None = None) -> None:
        """Forget `gone` and the queues whose subscription was dropped."""
        with self._signal.lock:
            alive = [queue for reference in self._queues if (queue := reference()) not in (None, gone)]
            self._queues = [weakref.ref(queue) for queue in alive]
            if not self._signal.is_closed:
                self.wanted = frozenset().union(*(queue.types for queue in alive))


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
        with self._bus._signal.lock:
            if not self._events:
                return None
            event = self._events.popleft()
            num_dropped, self._num_dropped = self._num_dropped, 0
        if not num_dropped:
            return event
        return replace(event, attributes={**event.attributes, "dropped": str(num_dropped)})

    def close(self) -> None:
        self._bus._remove(self)


def _event_types(types: Iterable[RuntimeEventType]) -> frozenset[RuntimeEventType]:
    known = ", ".join(map(str, RuntimeEventType))
    try:
        return frozenset(map(RuntimeEventType, types)) or frozenset(RuntimeEventType)
    except (TypeError, ValueError):
        raise InvalidArgument(f"types must be runtime event types, not {types!r:.80}; there are {known}") from None
