"""`OpenEngineServicer`: the contract's service over an `Engine`: convert in, one call, convert out.

Owns the acceptance boundary: what a call raises before it was accepted is a gRPC status, what happens later is one
terminal `EngineError`. Does not own policy (the engine judges every request), nor the form of refusals and the limits of
calls and messages (calls.py).

    Generate      worker thread: convert, validate, tokenize, submit ──▶ event loop: one message per event, large ones
                  converted in a worker thread
    Embed, …      worker thread: as above ──▶ event loop: wait ──▶ worker thread: convert
    subscriptions headers at acceptance ──▶ events until the client, the engine or the subscription ends
    Health        in the event loop: a probe ends with the call that asked for it
    Drain         a thread of its own: a drain that was promised goes on when its reader leaves

A client that cancels, vanishes or runs into its deadline cancels the handler's task, and that ends the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

from google.protobuf.message import Message

from openengine import (
    CandidateTokenSelection,
    ClassifyRequest,
    DrainResponse,
    EmbedRequest,
    Engine,
    GenerateEvent,
    GenerateRequest,
    Handle,
    InternalError,
    InvalidArgument,
    OpenEngineError,
    Overloaded,
    ScoreRequest,
    TaskHandle,
    TaskUsage,
)
from openengine.rpc import openengine_pb2 as pb
from openengine.rpc import openengine_pb2_grpc
from openengine.rpc.calls import Context, MessageLimit, WorkLimit, num_entries, refuse_errors
from openengine.rpc.convert import (
    arguments,
    from_proto,
    generate_error,
    kv_events_response,
    runtime_events_response,
    stream_error,
    to_proto,
)
from openengine.rpc.errors import ACCEPTED_HEADERS
from openengine.rpc.metrics import Metrics, RequestMetrics, usage_of
from openengine.rpc.workers import Workers

__all__ = ["OpenEngineServicer"]

_log = logging.getLogger("openengine.rpc")
_H = TypeVar("_H", Handle, TaskHandle)
_NUM_SUBMITTING = 8  # each may keep the memory of the largest prompt it has tokenized
_NUM_ANSWERING = 2
# In a message, on average. A token or candidate is its id, a double, a rank, tags and lengths, and its text.
_ENTRY_BYTES = 32
_VALUE_BYTES = 4  # of one value of a tensor
_UNREAD_MESSAGES = 4  # of the largest size: so much of one request's large events may wait to be read
_LOOK_S = 0.5  # how often a reader who does not read is looked at


class OpenEngineServicer(openengine_pb2_grpc.OpenEngineServicer):
    """Serves `engine` within the limits `work` and `messages`.

    `on_stop_accepting` is called, in the event loop, when a drain has made the engine refuse new requests.
    """

    def __init__(
        self,
        engine: Engine,
        work: WorkLimit,
        messages: MessageLimit,
        *,
        metrics: Metrics | None = None,
        on_stop_accepting: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._engine = engine
        self._work = work
        self._messages = messages
        self._metrics = metrics
        self._on_stop_accepting = on_stop_accepting
        self._submitting = Workers(_NUM_SUBMITTING, "openengine-submit")
        self._answering = Workers(_NUM_ANSWERING, "openengine-answer")

    def close(self) -> None:
        """End the threads."""
        self._submitting.close()
        self._answering.close()

    # ---- inference -------------------------------------------------------------------------------

    @refuse_errors
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        handle = await self._accept(self._start_generating(request))
        meter = RequestMetrics(self._metrics)
        how = "DISCONNECTED"
        try:
            handle.stream_only()
            await context.send_initial_metadata(ACCEPTED_HEADERS)
            while (event := await handle.anext_event()) is not None:
                meter.see(event)
                if self._messages.is_large(event):
                    await self._write_large(context, handle, event)
                    continue
                for response in self._messages.responses(handle.request_id, event):
                    await context.write(response)
        except OpenEngineError as exc:
            how = exc.code
            handle.cancel()  # it may be only this answer that cannot be sent
            with contextlib.suppress(OpenEngineError):
                await handle.aresult()
            await context.write(generate_error(handle.request_id, exc, usage_of(handle)))
        finally:
            handle.cancel()
            meter.end_with(handle, how)

    async def _write_large(self, context: Context, handle: Handle, event: GenerateEvent) -> None:
        """Write an event that is converted in a thread, since a large vocabulary's candidates would hold up all calls."""
        for response in await self._answering.run(lambda: list(self._messages.responses(handle.request_id, event))):
            await self._write_watched(context, handle, response)

    async def _write_watched(self, context: Context, handle: Handle, response: pb.GenerateResponse) -> None:
        """Raises Overloaded where the events behind `response` come faster than they are converted or read: they would fill
        the memory."""
        limit = _UNREAD_MESSAGES * self._messages.max_bytes
        error = None
        writing = asyncio.ensure_future(context.write(response))
        try:
            while not writing.done():
                await asyncio.wait({writing}, timeout=_LOOK_S)
                unread = handle.unread_events()
                num_bytes = _ENTRY_BYTES * sum(map(num_entries, unread))
                if num_bytes > limit:
                    handle.cancel()
                    handle.drop_unread()
                    error = Overloaded(
                        f"{len(unread)} events of some {num_bytes} bytes waited to be sent, the limit is {limit} bytes; ask "
                        "for fewer candidates, or read faster"
                    )
            await writing
        finally:
            writing.cancel()
        if error is not None:
            raise error

    async def _accept(self, start: Awaitable[_H]) -> _H:
        """What `start` accepts. What it refuses is counted, and nothing else is."""
        try:
            return await start
        except OpenEngineError as exc:
            if self._metrics is not None:
                self._metrics.refuse(exc.code)
            raise

    async def _start_generating(self, request: pb.GenerateRequest) -> Handle:
        self._enter()
        if request.HasField("guided"):  # no thread of the few waits for a guide to be compiled
            return await self._engine.asubmit(await self._submitting.run(self._read, request))
        return await self._submitting.run(self._submit, request, when_left=Handle.cancel)

    def _enter(self) -> None:
        self._engine.check_accepting()  # a draining engine says so before anything else
        self._work.enter()

    def _submit(self, message: pb.GenerateRequest) -> Handle:
        return self._engine.submit(self._read(message))

    def _read(self, message: pb.GenerateRequest) -> GenerateRequest:
        self._engine.check_accepting()  # it may have begun to drain while this waited for a thread
        try:
            request = from_proto(message)
            # Of most vocabularies the engine tells by the length alone that a prompt cannot fit, and says more of it.
            if request.prompt and not self._engine.tokenizer_service.fewest_tokens(request.prompt):
                self._check_texts([("prompt", request.prompt)])
        except InvalidArgument:
            names = pb.GenerateRequest(request_id=message.request_id, model=message.model)
            self._check_names(names, self._engine.submit)
            raise
        self._check_response_size(request)
        return request

    def _check_names(self, names: Message, judge: Callable[[Any], object]) -> None:
        """Raise what outranks a wrong field: a missing or unknown name, then what the model cannot do.

        names: the request with nothing but its names, so that `judge` raises that, or else only that it is empty.
        """
        try:
            judge(from_proto(names))
        except InvalidArgument as exc:
            if exc.details.get("field"):
                raise

    def _check_texts(self, texts: Iterable[tuple[str, str | None]]) -> None:
        """A text that cannot fit is refused without tokenizing it, which takes a thread's time and much memory."""
        for name, text in texts:
            if text is not None:
                self._engine.tokenizer_service.check_text(text, name)

    def _check_response_size(self, request: GenerateRequest) -> None:
        """The candidates of a prompt come in one message, those of an output token in another."""
        response = request.response
        if response.output_candidates is not None:
            self._check_estimate("output_candidates", response.output_candidates, 1)
        candidates = response.prompt_candidates
        if candidates is None and not response.return_prompt_logprobs:
            return
        entries, start = 1 + self._width(candidates), response.prompt_logprob_start or 0
        most = len(request.token_ids) if request.token_ids is not None else len((request.prompt or "").encode()) + 1
        if most * entries * _ENTRY_BYTES > self._messages.max_bytes:  # else there is no need to tokenize
            num_tokens = self._num_prompt_tokens(request)
            name = "return_prompt_logprobs" if candidates is None else "prompt_candidates"
            self._check_estimate(name, candidates, num_tokens - start, num_tokens)

    def _num_prompt_tokens(self, request: GenerateRequest) -> int:
        if request.token_ids is not None:
            return len(request.token_ids)
        prompt = request.prompt or ""
        limit = self._engine.model_info().max_context_length
        # Of a prompt that cannot fit the engine says more, and without tokenizing it.
        return (
            0 if self._engine.tokenizer_service.fewest_tokens(prompt) >= limit else len(self._engine.tokenize(prompt))
        )

    def _check_estimate(
        self, name: str, selection: CandidateTokenSelection | None, num_positions: int, num_tokens: int = 1
    ) -> None:
        width = self._width(selection)
        num_bytes = (width * num_positions + num_tokens) * _ENTRY_BYTES
        if num_bytes > self._messages.max_bytes:
            raise InvalidArgument(
                f"{name}: {width} candidates at {num_positions} positions of {num_tokens} tokens make a message of some "
                f"{num_bytes} bytes, the limit is {self._messages.max_bytes}; ask for fewer, or start the server with a larger "
                "limit"
            )

    def _width(self, selection: CandidateTokenSelection | None) -> int:
        if selection is None:
            return 0
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
        """No thread waits while the task runs; those of the pools tokenize before it and convert after it."""
        handle = await self._accept(self._start_task(request))
        meter = RequestMetrics(self._metrics)
        try:
            await handle.await_end()
            message, usage = await self._answering.run(self._task_answer, handle)
            meter.end_task(usage)
            return message
        except OpenEngineError as exc:
            meter.end(exc.code)
            raise
        finally:
            handle.cancel()
            meter.end("DISCONNECTED")

    async def _start_task(self, request: Message) -> TaskHandle:
        self._enter()
        return await self._submitting.run(self._submit_task, request, when_left=TaskHandle.cancel)

    def _submit_task(self, message: Any) -> TaskHandle:
        self._engine.check_accepting()  # it may have begun to drain while this waited for a thread
        try:
            request = from_proto(message)
            self._check_texts(_task_texts(request))
        except InvalidArgument:
            context = pb.TaskRequestContext(request_id=message.context.request_id, model=message.context.model)
            self._check_names(type(message)(context=context), self._engine.prepare_task)
            raise
        task = self._engine.prepare_task(request)
        num_bytes = _VALUE_BYTES * task.num_values
        if num_bytes > self._messages.max_bytes:
            raise InvalidArgument(
                f"{task.num_values} values make a message of some {num_bytes} bytes, the limit is {self._messages.max_bytes}; "
                "send fewer inputs at a time, or start the server with a larger limit"
            )
        return self._engine.submit_task(task)

    def _task_answer(self, handle: TaskHandle) -> tuple[Message, TaskUsage]:
        response = handle.result()
        return self._messages.checked(to_proto(response)), response.usage

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
        return to_proto(await self._engine.ahealth(**arguments(from_proto(request))))

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
            reports.goes_on_unread = request.abort_after_deadline and request.HasField("deadline_ms")

    # ---- LoRA ------------------------------------------------------------------------------------

    @refuse_errors
    async def LoadLora(self, request: pb.LoadLoraRequest, context: Context) -> pb.LoadLoraResponse:
        self._engine.check_accepting()
        adapter = from_proto(request).adapter
        return to_proto(self._engine.load_lora(adapter.lora_name, adapter.source_path, lora_id=adapter.lora_id))

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
        await self._follow(events, context, kv_events_response, pb.SubscribeKvEventsResponse)

    @refuse_errors
    async def SubscribeRuntimeEvents(self, request: pb.SubscribeRuntimeEventsRequest, context: Context) -> None:
        events = self._engine.runtime_events(**arguments(from_proto(request)))
        await self._follow(events, context, runtime_events_response, pb.SubscribeRuntimeEventsResponse)

    async def _follow(
        self, events: Any, context: Context, response: Callable[[Any], Message], kind: type[Message]
    ) -> None:
        """Send the events of an accepted subscription until it ends; an error is its last response."""
        with events:
            await context.send_initial_metadata(ACCEPTED_HEADERS)
            try:
                async for event in events:
                    await context.write(self._messages.checked(response(event)))
            except OpenEngineError as exc:
                await context.write(stream_error(kind, exc))


class _Reports:
    """A drain's reports, made in a thread of their own and read by one task; an error is the last one.

    Without `goes_on_unread` the drain ends with its reader's next report; with it, it runs to its end, unread.
    """

    def __init__(self, reports: Iterator[DrainResponse]) -> None:
        self.goes_on_unread = True
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
                if not self.goes_on_unread:
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


def _task_texts(request: EmbedRequest | ClassifyRequest | ScoreRequest) -> Iterator[tuple[str, str | None]]:
    """The texts of a request, and where they are."""
    if not isinstance(request, ScoreRequest):
        yield from ((f"inputs[{index}].text", item.text) for index, item in enumerate(request.inputs))
        return
    for index, group in enumerate(request.groups):
        yield f"groups[{index}].query.text", group.query and group.query.text
        for number, item in enumerate(group.candidates):
            yield f"groups[{index}].candidates[{number}].text", item.text
