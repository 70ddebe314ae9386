"""`Connection`: a channel to one server, run by an event loop in a thread of its own, for callers in any thread or loop.

    caller ── run(coroutine) ──▶ event loop thread ── grpc.aio ──▶ server
           ◀─ value or error ──                    ◀─ events ────

Owns the thread, the channel, credentials, and what a call's status means as an exception. Does not own messages
(convert.py) nor what a stream of them becomes (remote.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from openengine import Cancelled, InvalidArgument, OpenEngineError, PreconditionFailed
from openengine.rpc import openengine_pb2 as pb
from openengine.rpc import openengine_pb2_grpc, tokenizer_pb2_grpc
from openengine.rpc.convert import from_proto, to_proto
from openengine.rpc.errors import ERROR_TRAILER, error_of_status, from_engine_error

__all__ = ["Connection", "call_error"]

_T = TypeVar("_T")
_URL_SCHEMES = {"http", "https", "grpc", "grpcs", "tcp"}
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class Connection:
    """Calls to `target`; `credentials` None is plain text. `timeout_s` bounds every call but streams.

    It stays until `close`, or until nobody refers to it, and no event loop's end ends it. Raises InvalidArgument for what
    is no address.
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None,
        metadata: tuple[tuple[str, str], ...],
        timeout_s: float | None,
    ) -> None:
        _check_target(target)
        self.metadata = metadata
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        thread = threading.Thread(target=_serve, args=(self._loop,), name="openengine-client", daemon=True)
        thread.start()
        self._channel = asyncio.run_coroutine_threadsafe(_open(target, credentials), self._loop).result()
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
            raise PreconditionFailed("this client was created in another process; create one in each process")
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

    async def answer(self, method: Any, message: Message) -> Message:
        """The answer of a unary call, in the connection's event loop."""
        try:
            return await method(message, timeout=self._timeout_s, metadata=self.metadata)
        except grpc.RpcError as exc:
            raise call_error(exc) from None


def call_error(exc: grpc.RpcError) -> OpenEngineError:
    """What a call that ended with a status stands for."""
    for key, value in exc.trailing_metadata() or ():
        if key == ERROR_TRAILER:
            return from_engine_error(pb.EngineError.FromString(value), status=exc.code().name)
    return error_of_status(exc.code().name, exc.details() or exc.code().name)


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


def _serve(event_loop: asyncio.AbstractEventLoop) -> None:
    event_loop.run_forever()
    event_loop.run_until_complete(_end_tasks())
    event_loop.close()


async def _end_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _open(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=_OPTIONS)
    return grpc.aio.secure_channel(target, credentials, options=_OPTIONS)


def _shut_down(event_loop: asyncio.AbstractEventLoop, thread: threading.Thread, channel: grpc.aio.Channel) -> None:
    async def end() -> None:
        await channel.close()  # which cancels the calls
        event_loop.stop()

    asyncio.run_coroutine_threadsafe(end(), event_loop)
    if threading.current_thread() is not thread:  # the collector may run this anywhere
        thread.join()
