"""`Client`: a remote engine with the method names and types of `Engine`, over gRPC.

    engine = Engine("path")  ──▶  engine = Client("host:50051")

Owns: channels, the check of the server's revision, statuses and terminal errors as exceptions, joining events to results.
Does not own: messages (convert.py). What a method means is said at the method of `Engine` with its name.

What differs from an engine in process: the chat template is the server's own business, so there is no `chat`; a batch is
not checked as a whole before it runs; `astream` raises a refusal when its first event is asked for; results have no timing.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NoReturn, TypeVar

import grpc
import numpy as np
from google.protobuf.message import Message

from openengine import (
    AbortRequest,
    AbortResponse,
    CacheKeySpec,
    ClassifyRequest,
    ClassifyResponse,
    ComputeCacheKeysRequest,
    ComputeCacheKeysResponse,
    DetokenizeOptions,
    DetokenizeRequest,
    DrainRequest,
    DrainResponse,
    EmbedRequest,
    EmbedResponse,
    EngineInfo,
    EngineRole,
    GenerateEvent,
    GenerateRequest,
    GenerationFinished,
    GenerationOutput,
    GenerationResult,
    GetCacheKeySpecRequest,
    GetKvEventSourcesRequest,
    GetKvEventSourcesResponse,
    GetLoadRequest,
    GetModelInfoRequest,
    GetTokenizerArtifactsRequest,
    GetTokenizerInfoRequest,
    HealthRequest,
    HealthResponse,
    InternalError,
    InvalidArgument,
    KvConnectorInfo,
    KvEventBatch,
    KvSessionRef,
    ListLorasResponse,
    LoadInfo,
    LoadLoraRequest,
    LoadLoraResponse,
    LoraAdapter,
    ModelInfo,
    OpenEngineError,
    Overloaded,
    PrefillReady,
    PromptOutput,
    RuntimeEvent,
    RuntimeEventType,
    SamplingParams,
    ScoreRequest,
    ScoreResponse,
    SubscribeKvEventsRequest,
    SubscribeRuntimeEventsRequest,
    TokenizeOptions,
    TokenizerArtifactChunk,
    TokenizeRequest,
    TokenizerInfo,
    TokenOutput,
    UnloadLoraRequest,
    UnloadLoraResponse,
    UnsupportedFeature,
    build_request,
)
from openengine.rpc import openengine_pb2 as pb
from openengine.rpc import openengine_pb2_grpc, tokenizer_pb2_grpc
from openengine.rpc.convert import from_proto, to_proto
from openengine.rpc.errors import ACCEPTED_HEADERS, ERROR_TRAILER, error_of_status, from_engine_error

__all__ = ["Client", "RemoteHandle", "RemoteStream"]

_REVISION = 1  # of the contract that this client speaks
_TESTED_REVISIONS = range(1, 2)
_TESTED_RELEASES = {"d0f29fec31f31db5cfd49cf3e0f67da84d10c709"}
_WINDOW = 64  # requests of one batch in flight at a time
_T = TypeVar("_T")


class Client:
    """An engine behind `target` ("host:port"), safe from many threads and event loops.

    `model` names the one that requests mean, None the server's first. `token` is sent as a bearer token. `tls_ca` (PEM)
    trusts a server's certificate, and `tls_cert` with `tls_key` show one of ours; `tls=True` alone trusts the system's
    authorities. `timeout_s` bounds every call but streams.

    Raises UnsupportedFeature for a server outside the revisions that this client was tested with, and what the connection
    ends with.
    """

    def __init__(
        self,
        target: str,
        *,
        model: str | None = None,
        token: str | None = None,
        tls: bool = False,
        tls_ca: bytes | None = None,
        tls_cert: bytes | None = None,
        tls_key: bytes | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._target = target
        self._credentials = None
        if tls or tls_ca is not None or tls_cert is not None:
            self._credentials = grpc.ssl_channel_credentials(tls_ca, tls_key, tls_cert)
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._timeout_s = timeout_s
        self._options = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
        self._channel = self._open(grpc)
        self._finalizer = weakref.finalize(self, self._channel.close)
        self._stub = openengine_pb2_grpc.OpenEngineStub(self._channel)
        self._tokenizer = tokenizer_pb2_grpc.OpenEngineTokenizerStub(self._channel)
        self._aio_stubs: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()
        try:
            info = self.info()
            _check_revision(info)
        except BaseException:
            self.close()
            raise
        self._model = model or info.supported_models[0]

    # ---- generation ------------------------------------------------------------------------------

    def generate(
        self, prompts: Any, sampling: SamplingParams | None = None, *, on_error: str = "raise", **options: Any
    ) -> GenerationResult | list[GenerationResult]:
        """One result for a prompt, a list for a batch; see `Engine.generate`."""
        if _is_batch(prompts):
            results = dict(self.as_completed(prompts, sampling, on_error=on_error, **options))
            return [results[index] for index in range(len(results))]
        _check_on_error(on_error)
        request = self._request(prompts, sampling, options)
        try:
            return self._run(request, [])
        except OpenEngineError as exc:
            if on_error == "raise":
                raise
            return GenerationResult(request_id=request.request_id, error=exc)

    def as_completed(
        self, prompts: Iterable[Any], sampling: SamplingParams | None = None, *, on_error: str = "raise", **options: Any
    ) -> Iterator[tuple[int, GenerationResult]]:
        """Yield (index, result) as each finishes; leaving early cancels the rest. See `Engine.as_completed`."""
        _check_on_error(on_error)
        requests = [self._request(prompt, sampling, options) for prompt in prompts]
        handles: list[RemoteHandle] = []
        pool = ThreadPoolExecutor(min(_WINDOW, max(1, len(requests))), thread_name_prefix="openengine-client")
        try:
            futures = {pool.submit(self._run, request, handles): index for index, request in enumerate(requests)}
            for future in as_completed(futures):
                index, error = futures[future], future.exception()
                if error is None:
                    yield index, future.result()
                elif on_error == "return" and isinstance(error, OpenEngineError):
                    yield index, GenerationResult(request_id=requests[index].request_id, error=error)
                else:
                    raise error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for handle in handles:
                handle.cancel()

    def stream(self, prompt: Any, sampling: SamplingParams | None = None, **options: Any) -> RemoteHandle:
        """Events as they come; leaving early cancels the request."""
        return self.submit(prompt, sampling, **options)

    def submit(self, request: Any, sampling: SamplingParams | None = None, **options: Any) -> RemoteHandle:
        """Start one request; what this raises was not accepted."""
        return self._submit(self._request(request, sampling, options))

    async def agenerate(
        self, prompts: Any, sampling: SamplingParams | None = None, *, on_error: str = "raise", **options: Any
    ) -> GenerationResult | list[GenerationResult]:
        """`generate` for an event loop. Cancelling the task cancels the requests."""
        _check_on_error(on_error)
        window = asyncio.Semaphore(_WINDOW)

        async def run(prompt: Any) -> GenerationResult:
            request = self._request(prompt, sampling, options)
            try:
                async with window:
                    return await self._arun(request)
            except OpenEngineError as exc:
                if on_error == "raise":
                    raise
                return GenerationResult(request_id=request.request_id, error=exc)

        if not _is_batch(prompts):
            return await run(prompts)
        tasks = [asyncio.ensure_future(run(prompt)) for prompt in prompts]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def astream(
        self, prompt: Any, sampling: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[GenerateEvent]:
        """Events for `async for`; cancelling the task, or closing the iterator, cancels the request."""
        call = self._aio_stub().Generate(to_proto(self._request(prompt, sampling, options)), metadata=self._metadata)
        try:
            async for response in call:
                yield from_proto(response)
        except grpc.RpcError as exc:
            _raise(exc)
        finally:
            call.cancel()

    # ---- tasks -----------------------------------------------------------------------------------

    def embed(self, request: EmbedRequest) -> EmbedResponse:
        return self._task(self._stub.Embed, request)

    def classify(self, request: ClassifyRequest) -> ClassifyResponse:
        return self._task(self._stub.Classify, request)

    def score(self, request: ScoreRequest) -> ScoreResponse:
        return self._task(self._stub.Score, request)

    # ---- discovery, load, health, lifecycle ------------------------------------------------------

    def info(self) -> EngineInfo:
        return self._unary(self._stub.GetEngineInfo, pb.GetEngineInfoRequest())

    def model_info(self, model: str | None = None) -> ModelInfo:
        return self._unary(self._stub.GetModelInfo, GetModelInfoRequest(model=self._model if model is None else model))

    def load_info(self, *, include_per_rank: bool = False) -> LoadInfo:
        return self._unary(self._stub.GetLoad, GetLoadRequest(include_per_rank=include_per_rank))

    def health(
        self, *, include_inference_probe: bool = False, model: str | None = None, role: EngineRole | None = None
    ) -> HealthResponse:
        request = HealthRequest(include_inference_probe=include_inference_probe, model=model, role=role)
        return self._unary(self._stub.Health, request)

    def abort(
        self, request_id: str | None = None, *, kv_session: KvSessionRef | None = None, all_requests: bool = False
    ) -> AbortResponse:
        request = AbortRequest(request_id=request_id, kv_session=kv_session, all_requests=all_requests)
        return self._unary(self._stub.Abort, request)

    def drain(self, **options: Any) -> None:
        """Wait until nothing is in flight; options as for `drain_events`."""
        for _report in self.drain_events(**options):
            pass

    def drain_events(
        self,
        *,
        stop_accepting_new_requests: bool = True,
        deadline_ms: int | None = None,
        abort_after_deadline: bool = False,
    ) -> RemoteStream[DrainResponse]:
        request = DrainRequest(
            stop_accepting_new_requests=stop_accepting_new_requests,
            deadline_ms=deadline_ms,
            abort_after_deadline=abort_after_deadline,
        )
        return self._stream(self._stub.Drain, request)

    def load_lora(self, lora_name: str, source_path: str, *, lora_id: int) -> LoadLoraResponse:
        adapter = LoraAdapter(lora_id=lora_id, lora_name=lora_name, source_path=source_path)
        return self._unary(self._stub.LoadLora, LoadLoraRequest(adapter=adapter))

    def unload_lora(self, lora_name: str) -> UnloadLoraResponse:
        return self._unary(self._stub.UnloadLora, UnloadLoraRequest(lora_name=lora_name))

    def list_loras(self) -> ListLorasResponse:
        return self._unary(self._stub.ListLoras, pb.ListLorasRequest())

    # ---- KV and runtime events -------------------------------------------------------------------

    def kv_connector_info(self) -> KvConnectorInfo:
        return self._unary(self._stub.GetKvConnectorInfo, pb.GetKvConnectorInfoRequest())

    def kv_event_sources(self, *, data_parallel_ranks: Sequence[int] = ()) -> GetKvEventSourcesResponse:
        request = GetKvEventSourcesRequest(data_parallel_ranks=tuple(data_parallel_ranks))
        return self._unary(self._stub.GetKvEventSources, request)

    def kv_events(
        self, *, include_snapshot: bool = False, start_sequence_number: int = 0, data_parallel_ranks: Sequence[int] = ()
    ) -> RemoteStream[KvEventBatch]:
        request = SubscribeKvEventsRequest(
            include_snapshot=include_snapshot,
            start_sequence_number=start_sequence_number,
            data_parallel_ranks=tuple(data_parallel_ranks),
        )
        return self._stream(self._stub.SubscribeKvEvents, request)

    def runtime_events(self, types: Iterable[RuntimeEventType] = ()) -> RemoteStream[RuntimeEvent]:
        return self._stream(self._stub.SubscribeRuntimeEvents, SubscribeRuntimeEventsRequest(types=tuple(types)))

    # ---- tokenizer -------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True) -> list[int]:
        options = TokenizeOptions(add_special_tokens=add_special_tokens, parse_special_tokens=parse_special_tokens)
        request = TokenizeRequest(model=self._model, text=text, options=options)
        return list(self._unary(self._tokenizer.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        options = DetokenizeOptions(skip_special_tokens=skip_special_tokens)
        request = DetokenizeRequest(model=self._model, token_ids=tuple(token_ids), options=options)
        return self._unary(self._tokenizer.Detokenize, request).text

    def tokenizer_info(self) -> TokenizerInfo:
        return self._unary(self._tokenizer.GetTokenizerInfo, GetTokenizerInfoRequest(model=self._model))

    def tokenizer_artifacts(self, names: Sequence[str] = (), **options: Any) -> RemoteStream[TokenizerArtifactChunk]:
        """Chunks of the tokenizer's files. Whoever installs a file checks its size and digest first."""
        request = GetTokenizerArtifactsRequest(model=self._model, names=tuple(names), **options)
        return self._stream(self._tokenizer.GetTokenizerArtifacts, request)

    def cache_key_spec(self) -> CacheKeySpec:
        return self._unary(self._tokenizer.GetCacheKeySpec, GetCacheKeySpecRequest(model=self._model))

    def cache_keys(
        self, *, text: str | None = None, tokens: Sequence[int] | None = None, **options: Any
    ) -> ComputeCacheKeysResponse:
        request = ComputeCacheKeysRequest(model=self._model, text=text, tokens=tokens, **options)
        return self._unary(self._tokenizer.ComputeCacheKeys, request)

    # ---- the connection --------------------------------------------------------------------------

    def close(self) -> None:
        """End every call and the connection. Calling it again does nothing."""
        self._finalizer()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self._target!r}, model={self._model!r})"

    def _open(self, kind: Any) -> Any:
        if self._credentials is None:
            return kind.insecure_channel(self._target, options=self._options)
        return kind.secure_channel(self._target, self._credentials, options=self._options)

    def _aio_stub(self) -> Any:
        event_loop = asyncio.get_running_loop()
        stub = self._aio_stubs.get(event_loop)
        if stub is None:
            stub = self._aio_stubs[event_loop] = openengine_pb2_grpc.OpenEngineStub(self._open(grpc.aio))
        return stub

    def _unary(self, method: Any, request: Any) -> Any:
        message = request if isinstance(request, Message) else to_proto(request)
        try:
            return from_proto(method(message, timeout=self._timeout_s, metadata=self._metadata))
        except grpc.RpcError as exc:
            _raise(exc)

    def _task(self, method: Any, request: Any) -> Any:
        context = request.context
        named = replace(
            context,
            request_id=_fresh_id(context.request_id),
            model=self._model if context.model is None else context.model,
        )
        return self._unary(method, replace(request, context=named))

    def _stream(self, method: Any, request: Any) -> RemoteStream[Any]:
        return RemoteStream(method(to_proto(request), metadata=self._metadata))

    def _submit(self, request: GenerateRequest) -> RemoteHandle:
        return RemoteHandle(request.request_id, self._stream(self._stub.Generate, request))

    def _request(self, prompt: Any, sampling: SamplingParams | None, options: dict[str, Any]) -> GenerateRequest:
        request = build_request(prompt, sampling, options)
        model = self._model if request.model is None else request.model
        return replace(request, request_id=_fresh_id(request.request_id), model=model)

    def _run(self, request: GenerateRequest, handles: list[RemoteHandle]) -> GenerationResult:
        while True:
            try:
                handle = self._submit(request)
            except Overloaded as exc:
                time.sleep(_delay_s(exc))
                continue
            handles.append(handle)
            with handle:
                return handle.result()

    async def _arun(self, request: GenerateRequest) -> GenerationResult:
        while True:
            call = self._aio_stub().Generate(to_proto(request), metadata=self._metadata)
            collected = _Collected(request.request_id)
            try:
                async for response in call:
                    collected.add(from_proto(response))
                return collected.result()
            except grpc.RpcError as exc:
                error = _error(exc)
                if not isinstance(error, Overloaded):
                    raise error from None
                delay_s = _delay_s(error)
            finally:
                call.cancel()
            await asyncio.sleep(delay_s)


class RemoteStream(Generic[_T]):
    """What a server streams, for `for`. It is accepted when this exists; leaving it early, or `close`, cancels it.

    Raises the error that refused or ended it.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._ahead: list[Any] = []
        try:
            # A refused call has no headers of ours, and asking for its first message raises the refusal.
            if not set(ACCEPTED_HEADERS) <= {(key, value) for key, value in call.initial_metadata() or ()}:
                self._ahead += itertools.islice(call, 1)
        except grpc.RpcError as exc:
            _raise(exc)

    def __iter__(self) -> Iterator[_T]:
        return self

    def __next__(self) -> _T:
        try:
            return from_proto(self._ahead.pop() if self._ahead else next(self._call))
        except grpc.RpcError as exc:
            _raise(exc)
        except BaseException:
            self._call.cancel()
            raise

    def close(self) -> None:
        self._call.cancel()

    def __enter__(self) -> RemoteStream[_T]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        call = getattr(self, "_call", None)
        if call is not None:
            call.cancel()


class RemoteHandle:
    """A request that a server has accepted: iterate its events, or ask for `result()`; as `Handle` does.

    Leaving it early, in whatever way, cancels the request.
    """

    def __init__(self, request_id: str, events: RemoteStream[GenerateEvent]) -> None:
        self.request_id = request_id
        self._events = events
        self._collected = _Collected(request_id)
        self._error: OpenEngineError | None = None

    def cancel(self) -> None:
        """End the request. Its events end with Cancelled, or with what the server had sent."""
        self._events.close()

    close = cancel

    def result(self) -> GenerationResult:
        """Read what is left and return everything the request produced. Raises the error that ended it."""
        for _event in self:
            pass
        if self._error is not None:
            raise self._error
        return self._collected.result()

    def __iter__(self) -> Iterator[GenerateEvent]:
        return self

    def __next__(self) -> GenerateEvent:
        try:
            event = next(self._events)
        except OpenEngineError as exc:
            self._error = exc
            raise
        self._collected.add(event)
        return event

    def __enter__(self) -> RemoteHandle:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


# ---- private -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Collected:
    """Joins one request's events."""

    request_id: str
    events: list[GenerateEvent] = field(default_factory=list)

    def add(self, event: GenerateEvent) -> None:
        self.events.append(event)

    def result(self) -> GenerationResult:
        if not self.events:
            raise InternalError(f"the stream of request {self.request_id!r} ended without a last event")
        outputs = {e.output_index: e for e in self.events if isinstance(e, GenerationFinished)}
        last = self.events[-1]
        return GenerationResult(
            request_id=self.request_id,
            outputs=tuple(self._output(index, finished) for index, finished in sorted(outputs.items())),
            prompt=next((e.tokens for e in self.events if isinstance(e, PromptOutput)), None),
            usage=getattr(last, "usage", None),
            kv_session=last.kv_session if isinstance(last, PrefillReady) else None,
        )

    def _output(self, index: int, finished: GenerationFinished) -> GenerationOutput:
        deltas = [e for e in self.events if isinstance(e, TokenOutput) and e.output_index == index]
        return GenerationOutput(
            index=index,
            text="".join(delta.text for delta in deltas),
            tokens=tuple(token for delta in deltas for token in delta.tokens),
            finish_reason=finished.reason,
            stop_match=finished.stop_match,
        )


def _check_revision(info: EngineInfo) -> None:
    revision, minimum = info.schema_revision, info.minimum_client_revision
    if minimum > _REVISION or revision not in _TESTED_REVISIONS or info.schema_release not in _TESTED_RELEASES:
        raise UnsupportedFeature(
            f"the server speaks revision {revision} ({info.schema_release!r:.60}) and takes clients from {minimum} on; this "
            f"client speaks {_REVISION} and was tested with {_TESTED_REVISIONS.start} to {_TESTED_REVISIONS.stop - 1}"
        )


def _is_batch(prompts: Any) -> bool:
    if isinstance(prompts, (str, GenerateRequest)):
        return False
    if hasattr(prompts, "__len__") and len(prompts):
        return not isinstance(prompts[0], (int, np.integer))
    return True


def _check_on_error(on_error: str) -> None:
    if on_error not in ("raise", "return"):
        raise InvalidArgument(f"on_error must be 'raise' or 'return', not {on_error!r:.80}")


def _fresh_id(request_id: str | None) -> str:
    return str(uuid.uuid4()) if request_id is None else request_id


def _delay_s(exc: Overloaded) -> float:
    """How long to wait before the next attempt. Raises `exc` again where no attempt helps."""
    if not exc.retryable or exc.retry_after_ms is None:
        raise exc
    return exc.retry_after_ms / 1000


def _raise(exc: grpc.RpcError) -> NoReturn:
    raise _error(exc) from None


def _error(exc: grpc.RpcError) -> OpenEngineError:
    for key, value in exc.trailing_metadata() or ():
        if key == ERROR_TRAILER:
            return from_engine_error(pb.EngineError.FromString(value), status=exc.code().name)
    return error_of_status(exc.code().name, exc.details() or exc.code().name)
