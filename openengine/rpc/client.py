"""`Client`: a remote engine with the method names and types of `Engine`, over gRPC.

    engine = Engine("path")  ──▶  engine = Client("host:50051")

Owns: which calls a method makes, the check of the server's revision, batches. Does not own: the connection (connection.py),
streams (remote.py), messages (convert.py). What a method means is said at the method of `Engine` with its name.

    of Engine                                  of Client
    ----------------------------------------   -----------------------------------------------------------------
    generate, as_completed, agenerate          the same; items are checked here as far as that needs no model, before any
                                               runs; what only the server can judge (prompt length, its limits) comes in
                                               turn, with the item's index too, and cancels the rest
    stream, submit, asubmit                    the same, also EventStream and Handle
    astream                                    raises a refusal when its first event is asked for
    chat, messages=, apply_chat_template       the same; the server's tokenizer files are fetched at the first use
    results                                    timing is the client's: queue_s lasts until acceptance; sampling and stopping
                                               are what was asked for, without the server's defaults
    info … cache_keys, abort, drain, LoRA      the same; tokenizer_service is a RemoteTokenizerService
    embed, classify, score, aembed, …          the same, without `truncate` and `prompt`, which the contract does not have; of a
                                               long list the server judges one part after the other
    kv_events, runtime_events, drain_events    a RemoteStream with the methods of Subscription
    close                                      ends the connection; the engine goes on, and requests raise Cancelled
    info().attributes                          empty: the contract has no place for them
    in_process.py                              what is for the server's process, or has no call in the contract, says so
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from openengine import (
    AbortRequest,
    AbortResponse,
    CacheKeySpec,
    ClassificationOutput,
    ClassifyResponse,
    ComputeCacheKeysResponse,
    DetokenizeOptions,
    DrainRequest,
    DrainResponse,
    EmbeddingOutput,
    EmbedResponse,
    EngineInfo,
    EngineRole,
    EventStream,
    GenerationResult,
    GetKvEventSourcesRequest,
    GetKvEventSourcesResponse,
    GetLoadRequest,
    GetModelInfoRequest,
    Handle,
    HealthRequest,
    HealthResponse,
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
    RuntimeEvent,
    RuntimeEventType,
    SamplingParams,
    ScoreResponse,
    SubscribeKvEventsRequest,
    SubscribeRuntimeEventsRequest,
    TokenizeOptions,
    TokenizerArtifactChunk,
    TokenizerInfo,
    UnloadLoraRequest,
    UnloadLoraResponse,
)
from openengine.batches import arun_batch, arun_one, check_on_error, run_batch, run_one
from openengine.options import Prompt, check_options, is_single_prompt, request_id_of
from openengine.rpc import openengine_pb2 as pb
from openengine.rpc.connection import Connection
from openengine.rpc.credentials import bearer_metadata, channel_credentials, warn_of_plain_token
from openengine.rpc.in_process import InProcessOnly
from openengine.rpc.remote import AsyncEventStream, RemoteStream
from openengine.rpc.remote_tasks import RemoteTasks
from openengine.rpc.remote_tokenizer import RemoteTokenizerService
from openengine.rpc.requests import Item, Requests
from openengine.rpc.revision import check_revision, first_model
from openengine.validation import checked_type

__all__ = ["Client"]

_MAX_WINDOW = 256  # requests of one batch in flight at a time
_DEFAULT_WINDOW = 64  # where the server does not tell how many it runs


class Client(InProcessOnly):
    """An engine behind `target` ("host:port"), safe from many threads and event loops.

    `model` names the one that requests mean, None the server's first. `token` is sent as a bearer token, with a warning
    where it travels through a network in plain text. `tls_ca` (PEM) trusts a server's certificate, and `tls_cert` with
    `tls_key` show one of ours; `tls=True` alone trusts the system's authorities. `timeout_s` bounds every call; of a stream,
    such as a generation, the time until the server accepts it. `keepalive_s`: while calls wait, the server is asked so often
    for a sign of life, and is Unreachable after as long without one; None for a server that takes no such pings.

    Raises UnsupportedFeature for a server outside the revisions that this client was tested with, here and in any call that
    finds it replaced by such a one; InvalidArgument for what is no address, token, PEM or time, Unreachable where no server
    answers, Unauthenticated where it wants another token.
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
        keepalive_s: float | None = 10.0,
    ) -> None:
        _check_model(model)
        self._target = target
        credentials = channel_credentials(tls=tls, ca=tls_ca, cert=tls_cert, key=tls_key)
        self._connection = Connection(
            target,
            credentials=credentials,
            metadata=bearer_metadata(token),
            check=check_revision,
            timeout_s=timeout_s,
            keepalive_s=keepalive_s,
        )
        if token is not None and credentials is None:
            warn_of_plain_token(target)
        self._stub, self._unary = self._connection.stub, self._connection.unary
        try:
            info = self._connection.run(self._connection.meet())
            self._model = first_model(info) if model is None else model
            self._num_slots = self.model_info().max_running_requests
        except BaseException:
            self.close()
            raise
        self._tokenizer = RemoteTokenizerService(self._connection, self._model)
        self._requests = Requests(self._connection, self._tokenizer, self._model)
        self._tasks = RemoteTasks(self._connection, self._tokenizer, self._model)

    # ---- generation ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt] | None = None,
        sampling: SamplingParams | None = None,
        *,
        messages: Sequence[Any] | None = None,
        progress: bool | None = None,
        on_error: str = "raise",
        **options: Any,
    ) -> GenerationResult | list[GenerationResult]:
        requests, prompts, options = self._requests.with_messages(prompts, messages, options)
        if is_single_prompt(prompts):
            check_on_error(on_error)
            check_options(sampling, options)

            def start() -> Handle:
                return requests.admit(requests.one(prompts, sampling, options), wait=True)

            return run_one(start, request_id_of(prompts, options), on_error=on_error)
        items = requests.batch(prompts, sampling, on_error, options)
        results = dict(self._run_batch(requests, items, on_error, progress))
        return [results[index] for index in range(len(results))]

    def as_completed(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | None = None,
        *,
        progress: bool | None = None,
        on_error: str = "raise",
        **options: Any,
    ) -> Iterator[tuple[int, GenerationResult]]:
        items = self._requests.batch(prompts, sampling, on_error, options)
        return self._run_batch(self._requests, items, on_error, progress)

    def chat(
        self, messages: Sequence[Any], sampling: SamplingParams | None = None, **options: Any
    ) -> GenerationResult | list[GenerationResult]:
        return self.generate(None, sampling, messages=messages, **options)

    def stream(
        self,
        prompt: Prompt | None = None,
        sampling: SamplingParams | None = None,
        *,
        messages: Sequence[Any] | None = None,
        **options: Any,
    ) -> EventStream:
        return EventStream(self.submit(prompt, sampling, messages=messages, **options))

    def astream(
        self,
        prompt: Prompt | None = None,
        sampling: SamplingParams | None = None,
        *,
        messages: Sequence[Any] | None = None,
        **options: Any,
    ) -> EventStream:
        requests, prompt, options = self._requests.with_messages(prompt, messages, options)
        return AsyncEventStream(requests.start(requests.one(prompt, sampling, options), keep_events=True))

    async def agenerate(
        self,
        prompts: Prompt | Iterable[Prompt] | None = None,
        sampling: SamplingParams | None = None,
        *,
        messages: Sequence[Any] | None = None,
        on_error: str = "raise",
        **options: Any,
    ) -> GenerationResult | list[GenerationResult]:
        requests, prompts, options = await self._requests.awith_messages(prompts, messages, options)
        admit = partial(requests.aadmit, wait=True)
        if not is_single_prompt(prompts):
            items = await asyncio.to_thread(requests.batch, prompts, sampling, on_error, options)
            return await arun_batch(admit, items, window=self._window, on_error=on_error)
        check_on_error(on_error)
        check_options(sampling, options)

        async def start() -> Handle:
            return await admit(requests.one(prompts, sampling, options))

        return await arun_one(start, request_id_of(prompts, options), on_error=on_error)

    def submit(
        self,
        request: Prompt | None = None,
        sampling: SamplingParams | None = None,
        *,
        messages: Sequence[Any] | None = None,
        **options: Any,
    ) -> Handle:
        requests, prompt, options = self._requests.with_messages(request, messages, options)
        return requests.admit(requests.one(prompt, sampling, options), keep_events=True)

    async def asubmit(
        self,
        request: Prompt | None = None,
        sampling: SamplingParams | None = None,
        *,
        messages: Sequence[Any] | None = None,
        **options: Any,
    ) -> Handle:
        requests, prompt, options = await self._requests.awith_messages(request, messages, options)
        return await requests.aadmit(requests.one(prompt, sampling, options), keep_events=True)

    def _run_batch(
        self, requests: Requests, items: list[Item], on_error: str, progress: bool | None
    ) -> Iterator[tuple[int, GenerationResult]]:
        return run_batch(requests.admit, items, window=self._window, on_error=on_error, progress=progress)

    @property
    def _window(self) -> int:
        return min(4 * self._num_slots, _MAX_WINDOW) if self._num_slots else _DEFAULT_WINDOW

    # ---- tasks -----------------------------------------------------------------------------------

    def embed(self, inputs: Any, *, progress: bool | None = None, **options: Any) -> EmbedResponse | EmbeddingOutput:
        return self._tasks.run(self._tasks.embed(inputs, options), progress)

    def classify(
        self, inputs: Any, *, progress: bool | None = None, **options: Any
    ) -> ClassifyResponse | ClassificationOutput:
        return self._tasks.run(self._tasks.classify(inputs, options), progress)

    def score(
        self, query: Any, candidates: Any = None, *, progress: bool | None = None, **options: Any
    ) -> ScoreResponse:
        return self._tasks.run(self._tasks.score(query, candidates, options), progress)

    async def aembed(self, inputs: Any, **options: Any) -> EmbedResponse | EmbeddingOutput:
        return await self._tasks.arun(await asyncio.to_thread(self._tasks.embed, inputs, options))

    async def aclassify(self, inputs: Any, **options: Any) -> ClassifyResponse | ClassificationOutput:
        return await self._tasks.arun(await asyncio.to_thread(self._tasks.classify, inputs, options))

    async def ascore(self, query: Any, candidates: Any = None, **options: Any) -> ScoreResponse:
        return await self._tasks.arun(await asyncio.to_thread(self._tasks.score, query, candidates, options))

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
        _check_model(model)
        request = HealthRequest(include_inference_probe=include_inference_probe, model=model, role=role)
        return self._unary(self._stub.Health, request)

    async def ahealth(
        self, *, include_inference_probe: bool = False, model: str | None = None, role: EngineRole | None = None
    ) -> HealthResponse:
        options = {"include_inference_probe": include_inference_probe, "model": model, "role": role}
        return await asyncio.to_thread(self.health, **options)

    def abort(
        self, request_id: str | None = None, *, kv_session: KvSessionRef | None = None, all_requests: bool = False
    ) -> AbortResponse:
        request = AbortRequest(request_id=request_id, kv_session=kv_session, all_requests=all_requests)
        return self._unary(self._stub.Abort, request)

    def drain(
        self,
        *,
        stop_accepting_new_requests: bool = True,
        deadline_ms: int | None = None,
        abort_after_deadline: bool = False,
    ) -> None:
        for _report in self.drain_events(
            stop_accepting_new_requests=stop_accepting_new_requests,
            deadline_ms=deadline_ms,
            abort_after_deadline=abort_after_deadline,
        ):
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
        return RemoteStream(self._connection, self._stub.Drain, request)

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
        return RemoteStream(self._connection, self._stub.SubscribeKvEvents, request)

    def runtime_events(self, types: Iterable[RuntimeEventType] = ()) -> RemoteStream[RuntimeEvent]:
        request = SubscribeRuntimeEventsRequest(types=tuple(types))
        return RemoteStream(self._connection, self._stub.SubscribeRuntimeEvents, request)

    # ---- tokenizer -------------------------------------------------------------------------------

    @property
    def tokenizer_service(self) -> RemoteTokenizerService:
        """The tokenizer in the contract's terms, with options, fingerprints and expectations."""
        return self._tokenizer

    def tokenize(self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True) -> list[int]:
        options = TokenizeOptions(add_special_tokens=add_special_tokens, parse_special_tokens=parse_special_tokens)
        return list(self._tokenizer.tokenize(checked_type("text", text, str), options).token_ids)

    def detokenize(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        if isinstance(token_ids, str) or not isinstance(token_ids, Iterable):
            raise InvalidArgument(f"token_ids must be a flat sequence of integers, not {token_ids!r:.80}")
        options = DetokenizeOptions(skip_special_tokens=skip_special_tokens)
        return self._tokenizer.detokenize(tuple(token_ids), options).text

    def apply_chat_template(
        self, messages: Sequence[Any], tools: Sequence[Any] | None = None, **template_kwargs: Any
    ) -> list[int]:
        return self._tokenizer.local().encode_chat(messages, tools=tools, **template_kwargs)

    def tokenizer_info(self) -> TokenizerInfo:
        return self._tokenizer.info()

    def tokenizer_artifacts(self, names: Sequence[str] = (), **options: Any) -> RemoteStream[TokenizerArtifactChunk]:
        """Chunks of the tokenizer's files. Whoever installs a file checks its size and digest first."""
        return self._tokenizer.artifacts(names=names, **options)

    def cache_key_spec(self) -> CacheKeySpec:
        return self._tokenizer.cache_key_spec()

    def cache_keys(
        self, *, text: str | None = None, tokens: Sequence[int] | None = None, **options: Any
    ) -> ComputeCacheKeysResponse:
        return self._tokenizer.cache_keys(text=text, tokens=tokens, **options)

    # ---- the connection --------------------------------------------------------------------------

    def close(self) -> None:
        """End every call and the connection. Calling it again does nothing."""
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a Client cannot be pickled; create one where it is used")

    def __repr__(self) -> str:
        return f"Client({self._target!r}, model={self._model!r})"


def _check_model(model: str | None) -> None:
    if model is not None and not (isinstance(model, str) and model):
        raise InvalidArgument(f"model is {model!r:.80}, which names none; leave it out for the server's first")
