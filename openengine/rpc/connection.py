"""`Connection`: a channel to one server, run by an event loop in a thread of its own, for callers in any thread or loop.

    caller ── run(coroutine) ──▶ event loop thread ── grpc.aio ──▶ server
           ◀─ value or error ──                    ◀─ events ────

    connected ──▶ meet: GetEngineInfo, checked ──▶ calls ──▶ connection lost ──▶ the next call connects, and meets first

Owns the thread, the channel, which server is at its end, time limits, and what a call's status means as an exception.
Does not own messages (convert.py), credentials (credentials.py) nor what a stream becomes (remote.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from openengine import Cancelled, EngineInfo, InvalidArgument, OpenEngineError, PreconditionFailed, Unreachable
from openengine.rpc import openengine_pb2 as pb
from openengine.rpc import openengine_pb2_grpc, tokenizer_pb2_grpc
from openengine.rpc.convert import from_proto, to_proto
from openengine.rpc.errors import ERROR_TRAILER, error_of_status, from_engine_error

__all__ = ["Connection", "Link", "call_error", "outcome"]

_T = TypeVar("_T")
_URL_SCHEMES = {"http", "https", "grpc", "grpcs", "tcp"}
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # gRPC waits up to two minutes between attempts, and fails every call meanwhile: a server that is back is to be found.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_grpc_pid: int | None = None  # of the process that uses gRPC, whose threads no fork copies
_SETTLE_S = 0.25  # for gRPC to be done with the calls of a closed channel
_NO_FORKS = "gRPC does not survive a fork; create the client in the new process, and start that with multiprocessing's method 'spawn'"


class Link:
    """How often a channel has lost its connection: at the end of the next one there may be another server.

    A channel that lost its connection makes no other before the next call, so seeing it before each call is enough.
    """

    def __init__(self) -> None:
        self.num_losses = 0
        self._is_ready = False

    def see(self, *, is_ready: bool) -> None:
        if self._is_ready and not is_ready:
            self.num_losses += 1
        self._is_ready = is_ready


class Connection:
    """Calls to `target`; `credentials` None is plain text.

    `check` raises what speaks against a server, each time one is met: at first, and after the connection was lost.
    `timeout_s` bounds a call, and of a stream the time until it is accepted. `keepalive_s`: how often the server is asked
    for a sign of life while calls wait for it, and how long it may take to give one; None never asks.

    It stays until `close`, or until nobody refers to it, and no event loop's end ends it. Raises InvalidArgument for what
    is no address or no time.
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None,
        metadata: tuple[tuple[str, str], ...],
        check: Callable[[EngineInfo], None],
        timeout_s: float | None,
        keepalive_s: float | None,
    ) -> None:
        _check_target(target)
        _check_seconds("timeout_s", timeout_s)
        _check_seconds("keepalive_s", keepalive_s)
        _claim_grpc()
        self.metadata = metadata
        self._check = check
        self._timeout_s = timeout_s
        self.link = Link()
        self._met: tuple[int, EngineInfo] | None = None  # the link's number of losses then, and who answered
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        thread = threading.Thread(target=_serve, args=(self._loop,), name="openengine-client", daemon=True)
        thread.start()
        opening = _open(target, credentials, keepalive_s)
        self._channel = asyncio.run_coroutine_threadsafe(opening, self._loop).result()
        self._finalizer = weakref.finalize(self, _shut_down, self._loop, thread, self._channel)
        self.stub = openengine_pb2_grpc.OpenEngineStub(self._channel)
        self.tokenizer_stub = tokenizer_pb2_grpc.OpenEngineTokenizerStub(self._channel)

    @property
    def is_open(self) -> bool:
        return self._finalizer.alive

    def start(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run `coroutine` in the connection's event loop. Raises PreconditionFailed when that is gone."""
        if os.getpid() != self._pid:
            coroutine.close()
            raise PreconditionFailed(f"this client was created in another process, and {_NO_FORKS}")
        if not self.is_open:
            coroutine.close()
            raise PreconditionFailed("the client is closed; create a new Client")
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # closed meanwhile
            coroutine.close()
            raise PreconditionFailed("the client is closed; create a new Client") from None

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """`start` and wait for the value. An interrupt of the caller cancels the coroutine."""
        future = self.start(coroutine)
        try:
            return future.result()
        except CancelledError:
            raise Cancelled("the client was closed") from None
        except BaseException:
            future.cancel()
            raise

    def post(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run `coroutine` some time, also from a destructor. Does nothing when the connection is gone."""
        if os.getpid() == self._pid and self.is_open:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.spawn, coroutine)
                return
        coroutine.close()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run `coroutine` beside the caller's, which runs in the connection's event loop; kept until it ends."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def unary(self, method: Any, request: Any) -> Any:
        """The answer of a unary call, as a value; `request` is a value or a message."""
        message = request if isinstance(request, Message) else to_proto(request)
        return from_proto(self.run(self.answer(method, message)))

    def close(self) -> None:
        """End every call and the connection. Calling it again does nothing."""
        self._finalizer()

    # ---- in the connection's event loop ------------------------------------------------------------

    async def meet(self) -> EngineInfo:
        """The server that calls go to. It is asked who it is when that can have changed: the connection was lost meanwhile.

        Raises what `check` raises, and what ends a call.
        """
        try:
            self.link.see(is_ready=self._channel.get_state() is grpc.ChannelConnectivity.READY)
        except grpc.aio.UsageError:
            raise Cancelled("the client was closed") from None
        while self._met is None or self._met[0] != self.link.num_losses:
            num_losses = self.link.num_losses
            try:
                message = pb.GetEngineInfoRequest()
                response = await self.stub.GetEngineInfo(message, timeout=self._timeout_s, metadata=self.metadata)
            except grpc.RpcError as exc:
                raise self._error(exc) from None
            self.link.see(is_ready=True)
            info = from_proto(response)
            self._check(info)
            self._met = num_losses, info
        return self._met[1]

    async def answer(self, method: Any, message: Message) -> Message:
        """The answer of a unary call."""

        async def ask() -> Message:
            await self.meet()
            try:
                # The limit goes along, so that the server gives up too.
                return await method(message, timeout=self._timeout_s, metadata=self.metadata)
            except grpc.RpcError as exc:
                raise self._error(exc, self.link) from None

        return await self.within_timeout(ask())

    async def within_timeout(self, work: Awaitable[_T]) -> _T:
        """What `work` gives. Raises Unreachable when it takes longer than `timeout_s`, and cancels it."""
        try:
            return await asyncio.wait_for(work, self._timeout_s)
        except asyncio.TimeoutError:
            raise _unanswered(self._timeout_s) from None

    def _error(self, exc: grpc.RpcError, link: Link | None = None) -> OpenEngineError:
        if self._timeout_s is not None and exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return _unanswered(self._timeout_s)
        return call_error(exc, link)


async def outcome(future: Future[_T]) -> _T:
    """What a future of `Connection.start` gives, for the caller's event loop. Cancelling the caller leaves it running."""
    mine = asyncio.wrap_future(future)
    await asyncio.wait({mine})  # which is cancelled with the caller alone
    if mine.cancelled():
        raise Cancelled("the client was closed")
    return mine.result()


def call_error(exc: grpc.RpcError, link: Link | None) -> OpenEngineError:
    """What a call that ended with a status stands for. `link` had a connection when it began; None: it had to make one."""
    for key, value in exc.trailing_metadata() or ():
        if key == ERROR_TRAILER:
            return from_engine_error(pb.EngineError.FromString(value), status=exc.code().name)
    status, text = exc.code().name, exc.details() or exc.code().name
    if link is not None and status == Unreachable.grpc_status:
        link.see(is_ready=False)  # the channel itself may hear of it later
        return Unreachable(
            "the connection to the server was lost before the call had ended: the server stopped, gave no sign of life, or "
            f"the network between failed; what is not answered has to be sent again; gRPC says: {text}",
            details={"grpc_status": status},
        )
    return error_of_status(status, text)


def _unanswered(timeout_s: float) -> Unreachable:
    return Unreachable(
        f"the server did not answer within timeout_s={timeout_s:g}: it is busy, or not reached; give Client(timeout_s=…) more, "
        "None waits as long as it takes"
    )


def _claim_grpc() -> None:
    """Note that this process uses gRPC. Refuses one that was forked from a user of it: its calls would hang or crash."""
    global _grpc_pid
    if _grpc_pid not in (None, os.getpid()):
        raise PreconditionFailed(f"this process was forked from one that had used a client, and {_NO_FORKS}")
    _grpc_pid = os.getpid()


def _check_target(target: str) -> None:
    """gRPC takes a URL for the name of a machine, and says much later that it found none."""
    if not isinstance(target, str) or not target:
        raise InvalidArgument(f"the server's address is a text such as 'localhost:50051', not {target!r:.80}")
    scheme, separator, rest = target.partition("://")
    if separator and scheme.lower() in _URL_SCHEMES:
        raise InvalidArgument(
            f"the server's address is 'host:port', not the URL {target!r:.200}: write {rest.split('/')[0]!r:.100}, and tls=True "
            "where it speaks TLS"
        )


def _check_seconds(name: str, value: float | None) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise InvalidArgument(f"{name} is a number of seconds above 0, or None for none, not {value!r:.80}")


def _serve(event_loop: asyncio.AbstractEventLoop) -> None:
    event_loop.run_forever()
    event_loop.run_until_complete(_end_tasks())
    event_loop.close()


async def _end_tasks() -> None:
    """With the channel closed, tasks end of themselves; one cut short would leave gRPC to report to a closed event loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=_SETTLE_S)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _open(
    target: str, credentials: grpc.ChannelCredentials | None, keepalive_s: float | None
) -> grpc.aio.Channel:
    options = _OPTIONS
    if keepalive_s is not None:
        keepalive_ms = max(1, round(1000 * keepalive_s))
        options += (
            ("grpc.keepalive_time_ms", keepalive_ms),
            ("grpc.keepalive_timeout_ms", keepalive_ms),
            ("grpc.http2.ping_timeout_ms", keepalive_ms),  # the longer of the two counts
            ("grpc.http2.max_pings_without_data", 0),  # a subscription may be silent for hours
        )
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


def _shut_down(event_loop: asyncio.AbstractEventLoop, thread: threading.Thread, channel: grpc.aio.Channel) -> None:
    async def end() -> None:
        await channel.close()  # which cancels the calls
        event_loop.stop()

    asyncio.run_coroutine_threadsafe(end(), event_loop)
    if threading.current_thread() is not thread:  # the collector may run this anywhere
        thread.join()
