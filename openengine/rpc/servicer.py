"""`OpenEngineServicer`: the contract's service over an `Engine`: convert in, one call, convert out.

Owns the acceptance boundary: what a call raises before it was accepted is a gRPC status, what happens later is one
terminal `EngineError`. Does not own policy: the engine judges every request.

    Generate      worker thread: convert, validate, tokenize, submit ──▶ event loop: one message per event
    Embed, …      worker thread: as above ──▶ event loop: wait ──▶ worker thread: convert
    subscriptions headers at acceptance ──▶ events until the client, the engine or the subscription ends
    Drain         a thread of its own: a drain that was promised goes on when its reader leaves

A client that cancels, vanishes or runs into its deadline cancels the handler's task, and that ends the request.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import Message

from openengine import (
    CandidateTokenSelection,
    DrainResponse,
    Engine,
    GenerateRequest,
    Handle,
    InternalError,
    InvalidArgument,
    OpenEngineError,
    TaskHandle,
)
from openengine.rpc import openengine_pb2 as pb
from openengine.rpc import openengine_pb2_grpc
from openengine.rpc.convert import (
    arguments,
    from_proto,
    generate_error,
    generate_response,
    kv_events_response,
    runtime_events_response,
    stream_error,
    to_proto,
)
from openengine.rpc.errors import ACCEPTED_HEADERS, ERROR_TRAILER, status_of, to_engine_error
from openengine.rpc.metrics import Metrics, RequestMetrics

__all__ = ["OpenEngineServicer", "Unreadable", "in_thread", "refuse_errors"]

_log = logging.getLogger("openengine.rpc")
_T = TypeVar("_T")
_H = TypeVar("_H", Handle, TaskHandle)
_MAX_STATUS_CHARS = 600  # gRPC drops a status whose headers exceed 8 KiB, and a character may take nine bytes of them
_CANDIDATE_BYTES = 32  # of one candidate in a message, at the least
_VALUE_BYTES = 4  # of one value of a tensor

Context = grpc.aio.ServicerContext


@dataclass(frozen=True, slots=True)
class Unreadable:
    """In place of a request whose bytes are no message."""

    problem: str


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


async def in_thread(pool: ThreadPoolExecutor | None, function: Callable[..., _T], *args: Any) -> _T:
    """Run what may take long away from the event loop; without a pool in the event loop's own."""
    return await asyncio.get_running_loop().run_in_executor(pool, functools.partial(function, *args))


class OpenEngineServicer(openengine_pb2_grpc.OpenEngineServicer):
    """Serves `engine`. `threads` run what blocks; `max_message_bytes` bounds what a response may need.

    `on_stop_accepting` is called, in the event loop, when a drain has made the engine refuse new requests.
    """

    def __init__(
        self,
        engine: Engine,
        threads: ThreadPoolExecutor,
        *,
        max_message_bytes: int,
        metrics: Metrics | None = None,
        on_stop_accepting: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._engine = engine
        self._threads = threads
        self._max_message_bytes = max_message_bytes
        self._metrics = metrics
        self._on_stop_accepting = on_stop_accepting

    # ---- inference -------------------------------------------------------------------------------

    @refuse_errors
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        handle = await self._accept(request)
        meter = RequestMetrics(self._metrics)
        try:
            await context.send_initial_metadata(ACCEPTED_HEADERS)
            while True:
                try:
                    event = await handle.anext_event()
                except OpenEngineError as exc:
                    meter.end(exc.code, handle.usage)
                    await context.write(generate_error(handle.request_id, exc, handle.usage))
                    return
                if event is None:
                    return
                meter.see(event)
                await context.write(generate_response(handle.request_id, event))
        finally:
            handle.cancel()
            meter.end("DISCONNECTED")

    async def _accept(self, request: pb.GenerateRequest) -> Handle:
        try:
            if request.HasField("guided"):  # no thread of the few waits for a guide to be compiled
                return await self._engine.asubmit(await in_thread(self._threads, self._read, request))
            return await self._submit_in_thread(self._submit, request)
        except OpenEngineError as exc:
            RequestMetrics(self._metrics).end(exc.code)
            raise

    async def _submit_in_thread(self, submit: Callable[[Message], _H], request: Message) -> _H:
        """Submit in a worker thread. A client that leaves meanwhile has its request cancelled as soon as it exists."""
        future = self._threads.submit(submit, request)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_cancel_late)
            raise
        finally:
            # An error refers to this frame: with the future in it, a refused prompt would stay until the next collection.
            del future

    def _submit(self, message: pb.GenerateRequest) -> Handle:
        return self._engine.submit(self._read(message))

    def _read(self, message: pb.GenerateRequest) -> GenerateRequest:
        self._engine.check_accepting()
        request = from_proto(message)
        self._check_response_size(request)
        return request

    def _check_response_size(self, request: GenerateRequest) -> None:
        """The candidates of a prompt come in one message, those of an output token in another."""
        response = request.response
        if response.output_candidates is not None:
            self._check_message("output_candidates", response.output_candidates, 1)
        if response.prompt_candidates is not None and self._width(response.prompt_candidates) > 1:
            num_scored = self._num_prompt_tokens(request) - (response.prompt_logprob_start or 0)
            self._check_message("prompt_candidates", response.prompt_candidates, num_scored)

    def _num_prompt_tokens(self, request: GenerateRequest) -> int:
        if request.token_ids is not None:
            return len(request.token_ids)
        prompt = request.prompt or ""
        limit = self._engine.model_info().max_context_length
        # Of a prompt that cannot fit the engine says more, and without tokenizing it.
        return (
            0 if self._engine.tokenizer_service.fewest_tokens(prompt) >= limit else len(self._engine.tokenize(prompt))
        )

    def _check_message(self, name: str, selection: CandidateTokenSelection, num_positions: int) -> None:
        num_bytes = self._width(selection) * num_positions * _CANDIDATE_BYTES
        if num_bytes > self._max_message_bytes:
            raise InvalidArgument(
                f"{name}: {self._width(selection)} candidates at {num_positions} positions make a message of some {num_bytes} "
                f"bytes, the limit is {self._max_message_bytes}; ask for fewer, or start the server with a larger limit"
            )

    def _width(self, selection: CandidateTokenSelection) -> int:
        if selection.all is not None:
            return self._engine.tokenizer_service.vocab_size
        return len(selection.token_ids) if selection.token_ids is not None else selection.top_n or 0

    @refuse_errors
    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        return await self._run_task(request)

    @refuse_errors
    async def Classify(self, request: pb.ClassifyRequest, context: Context) -> pb.ClassifyResponse:
        return await self._run_task(request)

    @refuse_errors
    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        return await self._run_task(request)

    async def _run_task(self, request: Message) -> Message:
        """No thread waits while the task runs; those of the pool tokenize before it and convert after it."""
        meter = RequestMetrics(self._metrics)
        handle = None
        try:
            handle = await self._submit_in_thread(self._submit_task, request)
            await handle.await_end()
            response = await in_thread(self._threads, handle.result)
            meter.end_task(response.usage)
            return await in_thread(self._threads, to_proto, response)
        except OpenEngineError as exc:
            meter.end(exc.code)
            raise
        finally:
            if handle is not None:
                handle.cancel()
            meter.end("DISCONNECTED")

    def _submit_task(self, message: Message) -> TaskHandle:
        self._engine.check_accepting()
        task = self._engine.prepare_task(from_proto(message))
        num_bytes = _VALUE_BYTES * task.num_values
        if num_bytes > self._max_message_bytes:
            raise InvalidArgument(
                f"{task.num_values} values make a message of some {num_bytes} bytes, the limit is {self._max_message_bytes}; "
                "send fewer inputs at a time, or start the server with a larger limit"
            )
        return self._engine.submit_task(task)

    # ---- discovery and load ----------------------------------------------------------------------

    @refuse_errors
    async def GetEngineInfo(self, request: pb.GetEngineInfoRequest, context: Context) -> pb.EngineInfo:
        return to_proto(self._engine.info())

    @refuse_errors
    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.ModelInfo:
        return to_proto(self._engine.model_info(**arguments(from_proto(request))))

    @refuse_errors
    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.LoadInfo:
        return to_proto(self._engine.load_info(**arguments(from_proto(request))))

    # ---- health, abort, drain --------------------------------------------------------------------

    @refuse_errors
    async def Health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        options = arguments(from_proto(request))
        if not request.include_inference_probe:
            return to_proto(self._engine.health(**options))
        # A probe waits for the engine, and not in a thread that requests need.
        return to_proto(await in_thread(None, lambda: self._engine.health(**options)))

    @refuse_errors
    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        return to_proto(self._engine.abort(**arguments(from_proto(request))))

    @refuse_errors
    async def Drain(self, request: pb.DrainRequest, context: Context) -> None:
        options = arguments(from_proto(request))
        reports = _Reports(self._engine.drain_events(**options))
        try:
            await context.send_initial_metadata(ACCEPTED_HEADERS)
            if request.stop_accepting_new_requests and self._on_stop_accepting is not None:
                await self._on_stop_accepting()
            while (report := await reports.get()) is not None:
                is_report = isinstance(report, DrainResponse)
                await context.write(to_proto(report) if is_report else stream_error(pb.DrainResponse, report))
        finally:
            reports.is_wanted = request.abort_after_deadline and request.HasField("deadline_ms")

    # ---- LoRA ------------------------------------------------------------------------------------

    @refuse_errors
    async def LoadLora(self, request: pb.LoadLoraRequest, context: Context) -> pb.LoadLoraResponse:
        self._engine.check_accepting()
        adapter = from_proto(request).adapter
        load = functools.partial(
            self._engine.load_lora, adapter.lora_name, adapter.source_path, lora_id=adapter.lora_id
        )
        return to_proto(await in_thread(self._threads, load))

    @refuse_errors
    async def UnloadLora(self, request: pb.UnloadLoraRequest, context: Context) -> pb.UnloadLoraResponse:
        return to_proto(self._engine.unload_lora(from_proto(request).lora_name))

    @refuse_errors
    async def ListLoras(self, request: pb.ListLorasRequest, context: Context) -> pb.ListLorasResponse:
        return to_proto(self._engine.list_loras())

    # ---- KV and runtime events -------------------------------------------------------------------

    @refuse_errors
    async def GetKvConnectorInfo(self, request: pb.GetKvConnectorInfoRequest, context: Context) -> pb.KvConnectorInfo:
        return to_proto(self._engine.kv_connector_info())

    @refuse_errors
    async def GetKvEventSources(
        self, request: pb.GetKvEventSourcesRequest, context: Context
    ) -> pb.GetKvEventSourcesResponse:
        return to_proto(self._engine.kv_event_sources(**arguments(from_proto(request))))

    @refuse_errors
    async def SubscribeKvEvents(self, request: pb.SubscribeKvEventsRequest, context: Context) -> None:
        events = self._engine.kv_events(**arguments(from_proto(request)))
        await _follow(events, context, kv_events_response, pb.SubscribeKvEventsResponse)

    @refuse_errors
    async def SubscribeRuntimeEvents(self, request: pb.SubscribeRuntimeEventsRequest, context: Context) -> None:
        events = self._engine.runtime_events(**arguments(from_proto(request)))
        await _follow(events, context, runtime_events_response, pb.SubscribeRuntimeEventsResponse)


async def _follow(events: Any, context: Context, response: Callable[[Any], Message], kind: type[Message]) -> None:
    """Send the events of an accepted subscription until it ends; an error is its last response."""
    with events:
        await context.send_initial_metadata(ACCEPTED_HEADERS)
        try:
            async for event in events:
                await context.write(response(event))
        except OpenEngineError as exc:
            await context.write(stream_error(kind, exc))


class _Reports:
    """A drain's reports, made in a thread of their own and read by one task; an error is the last one.

    Without `is_wanted` the drain ends with its reader's next report; with it, it runs to its end, unread.
    """

    def __init__(self, reports: Iterator[DrainResponse]) -> None:
        self.is_wanted = True
        self._reports = reports
        self._event_loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[DrainResponse | OpenEngineError | None] = asyncio.Queue()
        threading.Thread(target=self._run, name="openengine-drain", daemon=True).start()

    async def get(self) -> DrainResponse | OpenEngineError | None:
        return await self._queue.get()

    def _run(self) -> None:
        try:
            for report in self._reports:
                self._put(report)
                if not self.is_wanted:
                    return
        except OpenEngineError as exc:
            self._put(exc)
        except Exception as exc:
            _log.exception("a drain failed")
            self._put(InternalError(f"{type(exc).__name__}: {exc}"))
        self._put(None)

    def _put(self, report: DrainResponse | OpenEngineError | None) -> None:
        try:
            self._event_loop.call_soon_threadsafe(self._queue.put_nowait, report)
        except RuntimeError:
            pass  # the server's event loop has ended: nobody reads any more


def _cancel_late(future: Future[Any]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().cancel()
