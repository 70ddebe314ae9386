"""What a server streams, as the objects that an engine in process gives: `Handle`, `EventStream`, and subscriptions.

    Starting       sends a request; once the server has accepted it, a task hands its events to a Handle as they come
    RemoteStream   a subscription, a drain, a file: read one by one as the caller asks, so that a slow reader stays slow

Owns acceptance as the client sees it and the end of a stream. Does not own the connection (connection.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from openengine import (
    AbortRequest,
    Cancelled,
    EventStream,
    GenerateEvent,
    GenerateRequest,
    GenerationFinished,
    GuidedDecoding,
    Handle,
    InternalError,
    OpenEngineError,
    Overloaded,
    PrefillReady,
    TokenOutput,
    Usage,
)
from openengine.rpc.connection import Connection, Link, call_error, outcome
from openengine.rpc.convert import from_proto, to_proto
from openengine.rpc.errors import ACCEPTED_HEADERS

__all__ = ["AsyncEventStream", "RemoteStream", "Starting"]

_ABORT_S = 5.0  # for the server to answer an abort, before the call is simply dropped
_T = TypeVar("_T")


class Starting:
    """A request on its way to a server, which accepts or refuses it. One that is abandoned is ended wherever it is by then.

    `wait`: ask again while the server's queue is full. `check` raises what speaks against sending it to the server that
    is there. Raises InvalidArgument for what does not fit the wire.
    """

    def __init__(
        self,
        connection: Connection,
        request: GenerateRequest,
        *,
        keep_events: bool = False,
        wait: bool = False,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._connection = connection
        self._keep_events = keep_events
        self._wait = wait
        self._check = check
        self._handle: Handle | None = None
        self._is_abandoned = False
        self._remote = _RemoteRequest(request)
        self._future = connection.start(self._start(to_proto(request)))

    def result(self) -> Handle:
        """Wait for acceptance. Raises what the server refuses the request with."""
        try:
            return self._future.result()
        except CancelledError:
            raise Cancelled("the client was closed") from None
        except BaseException:
            self.abandon()
            raise

    async def aresult(self) -> Handle:
        """`result` for an event loop. Cancelling the task abandons the request."""
        try:
            return await outcome(self._future)
        except asyncio.CancelledError:
            self.abandon()
            raise

    @property
    def done(self) -> bool:
        return self._future.done()

    def abandon(self) -> None:
        # Either this sees the handle, or `_start` sees the flag.
        self._is_abandoned = True
        self._future.cancel()
        if self._handle is not None:
            self._handle.cancel()

    async def _start(self, message: Message) -> Handle:
        connection, remote = self._connection, self._remote
        while True:
            try:
                call, first = await _begin(connection, connection.stub.Generate, message, self._check)
                break
            except Overloaded as exc:
                if not self._wait or exc.retry_after_ms is None:
                    raise
                await asyncio.sleep(exc.retry_after_ms / 1000)
        remote.call, remote.start_time = call, time.monotonic()
        handle = Handle(remote, lambda group: connection.post(_abort(connection, group)), keep_events=self._keep_events)
        self._handle = handle
        if self._is_abandoned:
            call.cancel()
            raise asyncio.CancelledError
        connection.spawn(_follow(call, first, remote, handle, connection.link))
        return handle


class _RemoteRequest:
    """One request at a server, with the names by which a Handle asks for what it needs.

    Times are the client's. `start_time` is that of acceptance: a server does not tell when a request left its queue.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request_id = request.request_id
        self.sampling = request.sampling
        self.stopping = request.stopping
        self.task = None
        self.guide = None if request.guided is None else _Guide(request.guided)
        self.usage: Usage | None = None
        self.arrival_time = time.monotonic()
        self.start_time: float | None = None
        self.first_token_time: float | None = None
        self.sequences: list[_Output] = []
        self.call: Any = None

    def see(self, event: GenerateEvent) -> None:
        if isinstance(event, TokenOutput):
            if self.first_token_time is None:
                self.first_token_time = time.monotonic()
            while len(self.sequences) <= event.output_index:
                self.sequences.append(_Output())
            self.sequences[event.output_index].num_output += len(event.tokens)


@dataclass(frozen=True, slots=True)
class _Guide:
    source: GuidedDecoding


class _Output:
    __slots__ = ("num_output",)

    def __init__(self) -> None:
        self.num_output = 0


async def _begin(
    connection: Connection,
    method: Callable[..., Any],
    message: Message,
    check: Callable[[], Awaitable[None]] | None = None,
) -> tuple[Any, list[Any]]:
    """A call that is accepted, and what `_accepted` says. Raises what it is refused with, and Unreachable after a timeout."""

    async def begin() -> tuple[Any, list[Any]]:
        await connection.meet()
        if check is not None:
            await check()
        call = method(message, metadata=connection.metadata)
        return call, await _accepted(call, connection.link)

    return await connection.within_timeout(begin())


async def _accepted(call: Any, link: Link) -> list[Any]:
    """The first message, if that had to be read to know whether `call` is accepted: a refused one has no headers of ours.

    Raises what it is refused with.
    """
    try:
        if set(ACCEPTED_HEADERS) <= {(key, value) for key, value in await call.initial_metadata() or ()}:
            return []
        message = await call.read()
        return [] if message is grpc.aio.EOF else [message]
    except grpc.RpcError as exc:
        raise call_error(exc, link) from None
    except asyncio.CancelledError:
        call.cancel()
        raise


async def _follow(call: Any, first: list[Any], remote: _RemoteRequest, handle: Handle, link: Link) -> None:
    """Hand the events of an accepted call to its handle, the last one or an error at the end."""
    last: GenerateEvent | None = None
    error: OpenEngineError | None = None
    try:
        while True:
            response = first.pop() if first else await call.read()
            if response is grpc.aio.EOF:
                break
            if response.WhichOneof("event") == "error" and response.HasField("usage"):
                remote.usage = from_proto(response.usage)
            last = from_proto(response)
            remote.see(last)
            is_last = isinstance(last, (GenerationFinished, PrefillReady)) and last.usage is not None
            _wake(handle.deliver([last], error=None, is_last=is_last))
            if is_last:
                await call.read()  # the status; nothing else can come
                return
    except grpc.RpcError as exc:
        error = call_error(exc, link)
    except OpenEngineError as exc:
        error = exc.with_traceback(None)
    except asyncio.CancelledError:
        error = Cancelled("the call was cancelled: the client was closed, or the server answered no abort")
    except Exception as exc:
        error = InternalError(f"{type(exc).__name__}: {exc}")
    finally:
        if not handle.done:
            if error is None and not isinstance(last, (GenerationFinished, PrefillReady)):
                error = InternalError(f"the stream of request {remote.request_id!r} ended without a last event")
            _wake(handle.deliver([], error=error, is_last=True))
            call.cancel()


async def _abort(connection: Connection, remote: _RemoteRequest) -> None:
    """End a request so that its stream ends with what it has; a server that does not answer loses the call."""
    try:
        message = to_proto(AbortRequest(request_id=remote.request_id))
        await asyncio.wait_for(connection.meet(), _ABORT_S)
        await connection.stub.Abort(message, timeout=_ABORT_S, metadata=connection.metadata)
    except (grpc.RpcError, grpc.aio.UsageError, OpenEngineError, asyncio.TimeoutError):
        remote.call.cancel()


def _wake(waiters: Iterable[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]]) -> None:
    for event_loop, future in waiters:
        with contextlib.suppress(RuntimeError):  # the reader closed its event loop: nobody waits any more
            event_loop.call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class AsyncEventStream(EventStream):
    """An EventStream whose request is on its way to the server: what refuses it is raised by the first event."""

    def __init__(self, starting: Starting) -> None:
        self._starting = starting

    @property
    def handle(self) -> Handle:
        """The request's handle, waiting for the server to accept it."""
        return self._starting.result()

    async def __anext__(self) -> GenerateEvent:
        if not self._starting.done:
            await self._starting.aresult()
        return await super().__anext__()

    def close(self) -> None:
        self._starting.abandon()

    def __del__(self) -> None:
        if hasattr(self, "_starting"):
            self.close()


class RemoteStream(Generic[_T]):
    """What a server streams, for `for` or `async for`; accepted when this exists. Leaving it early, or `close`, cancels it.

    Raises the error that refused or ended it.
    """

    def __init__(self, connection: Connection, method: Callable[..., Any], request: Any) -> None:
        self._connection = connection
        self._reading: Future[Any] | None = None
        self._is_closed = False
        self._call, self._ahead = connection.run(_begin(connection, method, to_proto(request)))

    def poll(self) -> _T | None:
        """The next event if it is there already, else None."""
        if self._is_closed or not self._read().done():
            return None
        try:
            return self.__next__()
        except StopIteration:
            return None

    def close(self) -> None:
        """End the stream, also for a reader that is waiting. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._connection.post(self._cancel())

    def __iter__(self) -> RemoteStream[_T]:
        return self

    def __next__(self) -> _T:
        try:
            message = self._read().result()
        except CancelledError:
            message = grpc.aio.EOF
        except KeyboardInterrupt:
            self.close()
            raise
        return self._take(message, StopIteration)

    def __aiter__(self) -> RemoteStream[_T]:
        return self

    async def __anext__(self) -> _T:
        # Shielded, so that a reader who gives up waiting takes no event away.
        try:
            message = await asyncio.shield(asyncio.wrap_future(self._read()))
        except asyncio.CancelledError:
            if not (self._is_closed or not self._connection.is_open):
                raise
            message = grpc.aio.EOF
        return self._take(message, StopAsyncIteration)

    def _take(self, message: Any, end: type[Exception]) -> _T:
        self._reading = None
        if message is grpc.aio.EOF:
            self._is_closed = True
            raise end
        try:
            return from_proto(message)
        except OpenEngineError:
            self.close()
            raise

    def _read(self) -> Future[Any]:
        if self._reading is None and (self._is_closed or not self._connection.is_open):
            self._reading = Future()
            self._reading.set_result(grpc.aio.EOF)
        elif self._reading is None:
            self._reading = self._connection.start(self._next_message())
        return self._reading

    async def _next_message(self) -> Any:
        if self._ahead:
            return self._ahead.pop()
        try:
            return await self._call.read()
        except grpc.RpcError as exc:
            if self._is_closed:
                return grpc.aio.EOF
            raise call_error(exc, self._connection.link) from None
        except asyncio.CancelledError:
            return grpc.aio.EOF  # by `close`, or with the connection

    async def _cancel(self) -> None:
        self._call.cancel()

    def __enter__(self) -> RemoteStream[_T]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self.close()
