"""One call from its arrival to its end: refusals as gRPC statuses, how many may work at a time, how large an answer may be.

Owns the form of a refusal and both limits. Does not own what calls mean (servicer.py, tokenizer_servicer.py).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message

from openengine import (
    GenerateEvent,
    InternalError,
    InvalidArgument,
    OpenEngineError,
    Overloaded,
    PromptOutput,
    RequestTooLarge,
    TokenOutput,
)
from openengine.rpc import openengine_pb2 as pb
from openengine.rpc.convert import generate_response
from openengine.rpc.errors import ERROR_TRAILER, status_of, to_engine_error

__all__ = ["Context", "MessageLimit", "Unreadable", "WorkLimit", "num_entries", "refuse_errors"]

_log = logging.getLogger("openengine.rpc")
_MAX_STATUS_CHARS = 600  # gRPC drops a status whose headers exceed 8 KiB, and a character may take nine bytes of them
_RETRY_MS = 100
_LARGE_ENTRIES = 1000  # tokens and candidates of an event, a microsecond or two each
_MAX_ENTRY_BYTES = 2048  # of a token or candidate in a message: no vocabulary has tokens of a kilobyte

Context = grpc.aio.ServicerContext


@dataclass(frozen=True, slots=True)
class Unreadable:
    """In place of a request whose bytes are no message."""

    problem: str


# ---- refusals ------------------------------------------------------------------------------------


def refuse_errors(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Answer what `method` raises with a gRPC status. A method that has answered already handles its errors itself."""

    @functools.wraps(method)
    async def call(self: Any, request: Message | Unreadable, context: Context) -> Any:
        if isinstance(request, Unreadable):
            work = _refuse(context, InvalidArgument(f"the request is no message: {request.problem}"))
        else:
            work = _answer(method, method(self, request, context), context)
        # gRPC keeps the frames of a refused call until the next collection of garbage: they should hold no prompt.
        del request
        try:
            return await work
        except grpc.aio.InternalError as exc:
            # What cannot be sent any more belongs to a client that has gone; gRPC tells its task so a moment later.
            _log.debug("%s: the client has gone: %r", method.__name__, exc)
            raise asyncio.CancelledError from exc

    return call


async def _answer(method: Callable[..., Any], work: Awaitable[Any], context: Context) -> Any:
    try:
        return await work
    except OpenEngineError as exc:
        await _refuse(context, exc.with_traceback(None))
    except (asyncio.CancelledError, grpc.aio.AbortError, grpc.aio.InternalError):
        raise
    except Exception as exc:
        _log.exception("%s failed", method.__name__)
        await _refuse(context, InternalError(f"{type(exc).__name__}: {exc}"))


async def _refuse(context: Context, error: OpenEngineError) -> NoReturn:
    message = error.message
    if len(message) > _MAX_STATUS_CHARS:
        message = f"{message[:_MAX_STATUS_CHARS]}…"
    content = to_engine_error(error)
    content.message = message
    trailer = ((ERROR_TRAILER, content.SerializeToString()),)
    await context.abort(getattr(grpc.StatusCode, status_of(error)), message, trailer)


# ---- limits --------------------------------------------------------------------------------------


class WorkLimit:
    """How many calls may work at a time: those that infer, tokenize or send files; None is no limit.

    What only looks, waits for events or ends something is not counted, so that a full server can still be asked and helped.
    """

    def __init__(self, max_calls: int | None) -> None:
        self._max_calls = max_calls
        self._tasks: set[asyncio.Task[Any]] = set()

    def enter(self) -> None:
        """Count the present call until its last message is sent. Raises Overloaded where there are too many."""
        task = asyncio.current_task()
        assert task is not None, "a call is handled in a task of its own"
        if self._max_calls is not None and len(self._tasks) >= self._max_calls:
            raise Overloaded(
                f"{len(self._tasks)} calls are at work, the limit max_concurrent_rpcs is {self._max_calls}; try again later "
                "or raise the limit",
                retry_after_ms=_RETRY_MS,
            )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self, timeout: float | None) -> None:
        """Wait until the calls that work now are over, for up to `timeout` seconds."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout)


class MessageLimit:
    """Answers of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes

    def checked(self, message: Message) -> Message:
        """`message`. Raises RequestTooLarge where it is too large to be sent."""
        num_bytes = message.ByteSize()
        if num_bytes > self.max_bytes:
            raise RequestTooLarge(
                f"the answer is a message of {num_bytes} bytes, the limit is {self.max_bytes}; ask for less at a time, or start "
                "the server with a larger --max-message-bytes",
                details={"message_bytes": num_bytes, "max_message_bytes": self.max_bytes},
            )
        return message

    def is_large(self, event: GenerateEvent) -> bool:
        """Whether converting an event takes longer than other calls should wait."""
        return isinstance(event, PromptOutput) or num_entries(event) > _LARGE_ENTRIES

    def responses(self, request_id: str, event: GenerateEvent) -> Iterator[pb.GenerateResponse]:
        """One event of a generation. Tokens that are too much for one message come one by one, the text with the last.

        Raises RequestTooLarge where a single one is too large.
        """
        if isinstance(event, TokenOutput) and self._may_exceed(event):
            for token in event.tokens[:-1]:
                yield self.checked(generate_response(request_id, TokenOutput(event.output_index, (token,), "")))
            last = TokenOutput(event.output_index, event.tokens[-1:], event.text)
            yield self.checked(generate_response(request_id, last))
        elif isinstance(event, PromptOutput):
            yield self.checked(generate_response(request_id, event))
        else:
            yield generate_response(request_id, event)

    def _may_exceed(self, event: TokenOutput) -> bool:
        """Whether measuring is worth it, which costs as much as sending. What stop texts held back comes at once."""
        return num_entries(event) * _MAX_ENTRY_BYTES + 4 * len(event.text) > self.max_bytes


def num_entries(event: GenerateEvent) -> int:
    """Tokens and candidates of an output."""
    if not isinstance(event, TokenOutput):
        return 0
    return sum(1 + len(token.candidates) for token in event.tokens)
