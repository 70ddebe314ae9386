"""`Engine`: the facade. Validates in the caller's thread, wires the parts together, owns their lifetime.

Engine ── RequestPreparer (validate, tokenize)            caller's thread
   └───── EngineLoop ── Scheduler ── BlockManager         the loop's thread
               └─────── ModelRunner ── CausalLM, KvCache, Sampler
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from openengine.assembly import (
    assemble,
    engine_loop,
    generation_parts,
    limits_of,
    task_preparer,
    tokenizer_service,
)
from openengine.batches import aadmit, arun_batch, arun_one, check_on_error, run_batch, run_one
from openengine.core.admission import as_token_ids
from openengine.core.config import EngineConfig
from openengine.core.guides.compiled import CompiledGuide
from openengine.core.guides.compiler import GuideCompiler, NoGuides
from openengine.core.loop import EngineLoop
from openengine.core.sequence import SequenceGroup
from openengine.core.subscription import Subscription
from openengine.core.task_capabilities import NoGeneration
from openengine.core.tokenizer_service import TokenizerService
from openengine.discovery import Discovery, generation_capabilities
from openengine.errors import InvalidArgument, PreconditionFailed
from openengine.event_types import GetKvEventSourcesResponse, KvEventBatch, RuntimeEvent, RuntimeEventType
from openengine.handle import EventStream, Handle, LateStream
from openengine.health import aprobe, as_probe, overall, probe, probe_request, readiness
from openengine.loading import LoadedModel, load, start_line
from openengine.options import (
    Prompt,
    build_guide,
    check_options,
    is_single_prompt,
    request_id_of,
    suggest,
    take_chat_options,
)
from openengine.requests import Requests
from openengine.results import GenerationResult
from openengine.service import Services
from openengine.service_types import (
    AbortResponse,
    DrainResponse,
    EngineInfo,
    EngineRole,
    HealthCheck,
    HealthResponse,
    KvConnectorInfo,
    ListLorasResponse,
    LoadInfo,
    LoadLoraResponse,
    ModelInfo,
    UnloadLoraResponse,
)
from openengine.task_results import (
    ClassificationOutput,
    ClassifyResponse,
    EmbeddingOutput,
    EmbedResponse,
    ScoreResponse,
)
from openengine.task_types import ClassifyRequest, EmbedRequest, ScoreRequest
from openengine.tasks import PreparedTask, TaskHandle, Tasks
from openengine.tokenizer_types import CacheKeySpec, ComputeCacheKeysResponse, TokenizerArtifactChunk, TokenizerInfo
from openengine.types import GenerateRequest, GuidedDecoding, KvSessionRef, SamplingParams
from openengine.validation import check_flag

__all__ = ["Engine"]

_log = logging.getLogger("openengine")


class Engine:
    """One model, loaded and running in this process.

    `model_path` is a directory of safetensors, a .gguf file or a hub id; keywords are the fields of
    `EngineConfig`. `progress` shows a bar while loading (None: in notebooks and terminals).

    Safe from many threads and event loops at once. `close()`, `with`, dropping the last reference and
    interpreter exit all stop the loop and give the memory back.

    Raises ModelNotFound, InvalidArgument or UnsupportedFeature, saying what is wrong and what would work.
    """

    def __init__(self, model_path: str | os.PathLike[str], *, progress: bool | None = None, **options: Any) -> None:
        config = _config(model_path, options)
        self._wire(config, load(config, progress))

    def _wire(self, config: EngineConfig, loaded: LoadedModel) -> None:
        """Put the parts together and start the loop."""
        instance_id = str(uuid.uuid4())
        limits = limits_of(config, loaded)
        tasks = task_preparer(config, loaded)
        preparer, guides = generation_parts(config, loaded, limits, abilities=tasks.abilities)
        machinery = assemble(config, loaded, guides)
        self._loop = engine_loop(config, loaded, machinery, instance_id)
        self._limits, self._preparer, self._guides = limits, preparer, guides
        self._tokenizer = loaded.tokenizer
        self._tokenizer_service = tokenizer_service(loaded, machinery, limits)
        self._requests = Requests(preparer, guides, self._loop)
        self._tasks = Tasks(
            tasks,
            self._loop.check_accepting,
            tokens_per_step=config.tokens_per_step(is_encoder=loaded.profile.is_encoder),
        )
        self._services = Services(self._loop)
        self._discovery = Discovery(
            config,
            loaded,
            limits,
            instance_id=instance_id,
            generation=generation_capabilities(limits, preparer, guides),
            tasks=tasks.capabilities,
            kv_log=machinery.kv_log,
        )
        # Of a batch, how many are in flight: enough to keep every slot busy, and within the queue.
        self._window = min(4 * config.max_num_seqs, config.max_queued_requests)
        self._loop.start()
        self._finalizer = weakref.finalize(self, _shut_down, guides, self._loop)
        _log.info("%s", start_line(self._discovery.info.attributes))

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
        """Generate for one prompt (one result) or a batch (a list of results, in order).

        A prompt is text, token ids or a `GenerateRequest`; `messages` is one chat in place of a prompt.
        Keywords: every field of SamplingParams, StoppingOptions, ResponseOptions and KvOptions, and
        `stop`, `stop_token_ids`, `logprobs=N`, `prompt_logprobs=N`, `priority`, `request_id`, ….
        Every item is validated before anything runs: `on_error="raise"` then runs nothing and names the
        item, "return" puts a result with `error` in its place. Ctrl-C cancels this call's requests only.
        """
        prompts, options = self._with_messages(prompts, messages, options)
        if is_single_prompt(prompts):
            check_on_error(on_error)
            check_options(sampling, options)

            def start() -> Handle[GenerationResult]:
                request = self._requests.one(prompts, sampling, options)
                return self._admit(self._requests.prepare(request), wait=True)

            return run_one(start, request_id_of(prompts, options), on_error=on_error)
        results: dict[int, GenerationResult] = dict(
            self.as_completed(prompts, sampling, progress=progress, on_error=on_error, **options)
        )
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
        """Run a batch of any size and yield (index, result) as each finishes. Options as for `generate`.

        Leaving the iteration early cancels what is still running.
        """
        items = self._requests.batch(prompts, sampling, options, on_error=on_error)
        return run_batch(self._admit, items, window=self._window, on_error=on_error, progress=progress)

    def chat(
        self, messages: Sequence[Any], sampling: SamplingParams | None = None, **options: Any
    ) -> GenerationResult | list[GenerationResult]:
        """`generate(messages=messages)`: answer a chat, rendered with the model's own template."""
        return self.generate(None, sampling, messages=messages, **options)

    def stream(
        self,
        prompt: Prompt | None = None,
        sampling: SamplingParams | None = None,
        *,
        messages: Sequence[Any] | None = None,
        **options: Any,
    ) -> EventStream:
        """Start one request and iterate its events as they come; each has `.text`. Leaving early cancels it."""
        return EventStream(self.submit(prompt, sampling, messages=messages, **options))

    def astream(
        self,
        prompt: Prompt | None = None,
        sampling: SamplingParams | None = None,
        *,
        messages: Sequence[Any] | None = None,
        **options: Any,
    ) -> EventStream:
        """`stream` for `async for`; cancelling the task cancels the request. The prompt is tokenized before it returns.

        A request with a guide begins, or is refused, when its first event is asked for: a guide takes time to compile.
        """
        prompt, options = self._with_messages(prompt, messages, options)
        request = self._requests.one(prompt, sampling, options)
        if request.guided is None:
            return EventStream(self._admit(self._requests.prepare(request), keep_events=True))
        return LateStream(lambda: self._asubmit(request))

    async def agenerate(
        self,
        prompts: Prompt | Iterable[Prompt] | None = None,
        sampling: SamplingParams | None = None,
        *,
        messages: Sequence[Any] | None = None,
        on_error: str = "raise",
        **options: Any,
    ) -> GenerationResult | list[GenerationResult]:
        """`generate` for an event loop, which stays free meanwhile. Cancelling the task cancels the requests."""
        prompts, options = await asyncio.to_thread(self._with_messages, prompts, messages, options)
        if not is_single_prompt(prompts):
            items = await self._requests.abatch(prompts, sampling, options, on_error=on_error)
            admit = functools.partial(aadmit, self._admit)
            return await arun_batch(admit, items, window=self._window, on_error=on_error)
        check_on_error(on_error)
        check_options(sampling, options)

        async def start() -> Handle[GenerationResult]:
            request = self._requests.one(prompts, sampling, options)
            return await aadmit(self._admit, await self._requests.aprepare(request))

        return await arun_one(start, request_id_of(prompts, options), on_error=on_error)

    def submit(
        self,
        request: Prompt | None = None,
        sampling: SamplingParams | None = None,
        *,
        messages: Sequence[Any] | None = None,
        **options: Any,
    ) -> Handle[GenerationResult]:
        """Start one request and return its handle at once.

        What this raises was not accepted; what goes wrong later, the handle raises.
        """
        prompt, options = self._with_messages(request, messages, options)
        return self._admit(self._requests.prepare(self._requests.one(prompt, sampling, options)), keep_events=True)

    async def asubmit(
        self,
        request: Prompt | None = None,
        sampling: SamplingParams | None = None,
        *,
        messages: Sequence[Any] | None = None,
        **options: Any,
    ) -> Handle[GenerationResult]:
        """`submit` for an event loop, which stays free while the prompt is tokenized and a guide compiled."""
        prompt, options = await asyncio.to_thread(self._with_messages, request, messages, options)
        return await self._asubmit(self._requests.one(prompt, sampling, options))

    async def _asubmit(self, request: GenerateRequest) -> Handle[GenerationResult]:
        return self._admit(await self._requests.aprepare(request), keep_events=True)

    # ---- guides ----------------------------------------------------------------------------------

    def compile_guide(self, guide: GuidedDecoding | None = None, **options: Any) -> CompiledGuide:
        """Compile a guide, to check texts with `.accepts(text)` or to give it to many requests as `guided=`; waits for it.

        A `GuidedDecoding`, or one of the keywords of `generate`: `json_schema`, `regex`, `choice`, `grammar`,
        `structural_tag`, `json_object=True`. Raises InvalidArgument or UnsupportedFeature as a request with it would.
        """
        return self._guides.compile(build_guide(guide, options))

    async def acompile_guide(self, guide: GuidedDecoding | None = None, **options: Any) -> CompiledGuide:
        """`compile_guide` for an event loop."""
        return await asyncio.wrap_future(self._guides.submit(build_guide(guide, options)))

    # ---- embed, classify, score: see tasks.py ----------------------------------------------------

    def embed(self, inputs: Any, *, progress: bool | None = None, **options: Any) -> EmbedResponse | EmbeddingOutput:
        """Vectors of a text or a list of token ids (an `EmbeddingOutput`), of a list of either (an `EmbedResponse`, which has
        the usage too), or of an `EmbedRequest`.

        Keywords: `normalize`, `dimensions`, `granularity` ("sequence" or "token"), `encoding`, `prompt` or `prompt_name`,
        `truncate` ("error", "left", "right"), `priority`, `request_id`. A list of any length is checked as a whole before
        anything runs, and keeps its order. Ctrl-C cancels this call's requests only.

        Raises UnsupportedTask for a model that does not embed, saying what it does; InvalidArgument naming the item.
        """
        return self._tasks.run(self._admit, self._tasks.embed(inputs, options), progress)

    def classify(
        self, inputs: Any, *, progress: bool | None = None, **options: Any
    ) -> ClassifyResponse | ClassificationOutput:
        """Classes of texts, or of their tokens: a `ClassificationOutput` or `ClassifyResponse`. All else as for `embed`.

        Keywords: `output_semantics` ("probabilities", "logits", "log_probabilities"), `granularity`, `truncate`, ….
        """
        return self._tasks.run(self._admit, self._tasks.classify(inputs, options), progress)

    def score(
        self, query: Any, candidates: Any = None, *, progress: bool | None = None, **options: Any
    ) -> ScoreResponse:
        """How well each candidate answers the query: a query and its candidates, a list of queries with one candidate or a
        list of them for each, or a `ScoreRequest`.

        Keywords: `labels` or `label_token_ids` (a causal model's next token), `instruction`, `output_semantics`,
        `normalization`, `truncate`, `priority`, `request_id`.
        """
        return self._tasks.run(self._admit, self._tasks.score(query, candidates, options), progress)

    async def aembed(self, inputs: Any, **options: Any) -> EmbedResponse | EmbeddingOutput:
        """`embed` for an event loop, which stays free meanwhile. Cancelling the task cancels the requests."""
        return await self._tasks.arun(self._admit, await asyncio.to_thread(self._tasks.embed, inputs, options))

    async def aclassify(self, inputs: Any, **options: Any) -> ClassifyResponse | ClassificationOutput:
        """`classify` for an event loop."""
        return await self._tasks.arun(self._admit, await asyncio.to_thread(self._tasks.classify, inputs, options))

    async def ascore(self, query: Any, candidates: Any = None, **options: Any) -> ScoreResponse:
        """`score` for an event loop."""
        call = await asyncio.to_thread(self._tasks.score, query, candidates, options)
        return await self._tasks.arun(self._admit, call)

    def prepare_task(self, request: EmbedRequest | ClassifyRequest | ScoreRequest) -> PreparedTask:
        """Check and tokenize one request of the contract, for `submit_task`."""
        return self._tasks.prepare(request)

    def submit_task(self, request: EmbedRequest | ClassifyRequest | ScoreRequest | PreparedTask) -> TaskHandle:
        """Start one request of the contract and return its handle at once. What this raises was not accepted."""
        return self._tasks.submit(self._admit, request)

    # ---- tokens and templates --------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with the defaults exactly what `generate(text)` runs."""
        check_flag("add_special_tokens", add_special_tokens)
        check_flag("parse_special_tokens", parse_special_tokens)
        return self._tokenizer.encode(
            text, add_special_tokens=add_special_tokens, parse_special_tokens=parse_special_tokens
        )

    def detokenize(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; an incomplete character at the end becomes U+FFFD."""
        is_sized = hasattr(token_ids, "__len__") or not isinstance(token_ids, Iterable)
        ids = as_token_ids(token_ids if is_sized else list(token_ids)).tolist()
        for token_id in ids:
            if not 0 <= token_id < self._limits.vocab_size:
                raise InvalidArgument(f"token id {token_id} is outside the vocabulary of {self._limits.vocab_size}")
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Any], tools: Sequence[Any] | None = None, **template_kwargs: Any
    ) -> list[int]:
        """Token ids of `messages` rendered with the checkpoint's chat template, with one BOS where it has one."""
        return self._tokenizer.encode_chat(messages, tools=tools, **template_kwargs)

    # ---- discovery -------------------------------------------------------------------------------

    def info(self) -> EngineInfo:
        """Who serves: version, role, model names; `attributes` says device, dtype, kernels and memory."""
        return self._discovery.info

    def model_info(self, model: str | None = None) -> ModelInfo:
        """What the model can do and how much fits. Raises ModelNotFound for a name that is not served."""
        return self._discovery.model_info(model, self._tokenizer_service)

    def load_info(self, *, include_per_rank: bool = False) -> LoadInfo:
        """The scheduler's load after the latest step; `include_per_rank` adds it by data-parallel rank."""
        return self._services.load(include_per_rank)

    def health(
        self, *, include_inference_probe: bool = False, model: str | None = None, role: EngineRole | None = None
    ) -> HealthResponse:
        """Readiness; with `include_inference_probe` one token is computed, leaving nothing cached."""
        checks = self._readiness(model, role)
        if include_inference_probe:
            checks.append(probe(self._loop, self._start_probe))
        return HealthResponse(overall(checks), tuple(checks))

    async def ahealth(
        self, *, include_inference_probe: bool = False, model: str | None = None, role: EngineRole | None = None
    ) -> HealthResponse:
        """`health` for an event loop. Cancelling the task ends the probe."""
        checks = self._readiness(model, role)
        if include_inference_probe:
            checks.append(await aprobe(self._loop, self._start_probe))
        return HealthResponse(overall(checks), tuple(checks))

    # ---- KV cache, events, tokenizer service -----------------------------------------------------

    @property
    def tokenizer_service(self) -> TokenizerService:
        """The tokenizer in the contract's terms, with options, fingerprints and expectations."""
        return self._tokenizer_service

    def kv_events(
        self, *, include_snapshot: bool = False, start_sequence_number: int = 0, data_parallel_ranks: Sequence[int] = ()
    ) -> Subscription[KvEventBatch]:
        """What enters and leaves the prefix cache, for `for` or `async for`, from now on; or from a kept sequence number on,
        or after the present cache. Raises PreconditionFailed (off), InvalidArgument or OutOfRange."""
        return self._loop.subscribe_kv_events(
            include_snapshot=include_snapshot,
            start_sequence_number=start_sequence_number,
            data_parallel_ranks=data_parallel_ranks,
        )

    def runtime_events(self, types: Iterable[RuntimeEventType] = ()) -> Subscription[RuntimeEvent]:
        """Steps, batches and the queue as they happen, of these types (all for none). A slow reader loses the oldest."""
        return self._loop.subscribe_runtime_events(types)

    def kv_connector_info(self) -> KvConnectorInfo:
        """How KV state goes to other engines: an aggregated engine has no connector."""
        return self._discovery.info.kv_connector

    def kv_event_sources(self, *, data_parallel_ranks: Sequence[int] = ()) -> GetKvEventSourcesResponse:
        """Where others can read the KV events; nowhere before a server has called `advertise`."""
        return self._discovery.kv_event_sources(data_parallel_ranks)

    def advertise(self, host: str, port: int) -> None:
        """Name the address at which a gRPC server offers this engine; discovery repeats it."""
        self._discovery.advertise(host, port)

    def tokenizer_info(self) -> TokenizerInfo:
        """The tokenizer's identity, special tokens, files and default options."""
        return self._tokenizer_service.info()

    def tokenizer_artifacts(self, names: Sequence[str] = (), **options: Any) -> Iterator[TokenizerArtifactChunk]:
        """The files that rebuild the tokenizer, in chunks; options as for `TokenizerService.artifacts`."""
        return self._tokenizer_service.artifacts(names=names, **options)

    def cache_key_spec(self) -> CacheKeySpec:
        """What it takes to compute the prefix cache's keys elsewhere."""
        return self._tokenizer_service.cache_key_spec()

    def cache_keys(
        self, *, text: str | None = None, tokens: Sequence[int] | None = None, **options: Any
    ) -> ComputeCacheKeysResponse:
        """The keys of a prompt's full blocks; options as for `TokenizerService.cache_keys`."""
        return self._tokenizer_service.cache_keys(text=text, tokens=tokens, **options)

    # ---- what this engine does not do ------------------------------------------------------------

    def load_lora(self, lora_name: str, source_path: str, *, lora_id: int | None = None) -> LoadLoraResponse:
        """Raises UnsupportedTask: this engine serves no adapters, and so with `unload_lora` and `list_loras`."""
        self._services.refuse_lora(starts_work=True)

    def unload_lora(self, lora_name: str) -> UnloadLoraResponse:
        self._services.refuse_lora()

    def list_loras(self) -> ListLorasResponse:
        self._services.refuse_lora()

    # ---- lifecycle -------------------------------------------------------------------------------

    def abort(
        self, request_id: str | None = None, *, kv_session: KvSessionRef | None = None, all_requests: bool = False
    ) -> AbortResponse:
        """Cancel one request, a KV session, or every request. Outputs end with `finish_reason="cancelled"`.

        Raises InvalidArgument unless exactly one target is given, RequestNotFound and KvSessionNotFound for unknown ones.
        """
        return AbortResponse(self._services.abort(request_id, kv_session, all_requests))

    def drain(
        self,
        *,
        stop_accepting_new_requests: bool = True,
        deadline_ms: int | None = None,
        abort_after_deadline: bool = False,
    ) -> None:
        """Wait until nothing is in flight. Stopping to accept is final for this engine.

        At the deadline, what runs is cancelled with `abort_after_deadline`; else Draining is raised and the work goes on.
        """
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
    ) -> Iterator[DrainResponse]:
        """`drain` with its progress: STARTED, IN_PROGRESS at least once a second, COMPLETE."""
        return self._services.drain(
            stop_accepting=stop_accepting_new_requests,
            deadline_ms=deadline_ms,
            abort_after_deadline=abort_after_deadline,
        )

    def check_accepting(self) -> None:
        """Raises Draining where a drain has stopped new requests, PreconditionFailed on a closed engine."""
        self._loop.check_accepting()

    def clear_prefix_cache(self) -> None:
        """Forget every cached prompt block. Running requests keep theirs."""
        self._loop.call(lambda scheduler: scheduler.blocks.clear())

    def close(self) -> None:
        """Cancel what runs, stop the loop and give the memory back. Calling it again does nothing."""
        closed = _Closed()
        self._tokenizer = self._tokenizer_service = self._preparer = self._guides = closed
        self._requests.preparer = self._requests.guides = self._tasks.preparer = closed
        self._finalizer()
        self._loop.close()  # a second caller waits for the first

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("an Engine cannot be pickled; pickle its EngineConfig and create the engine where it runs")

    def __repr__(self) -> str:
        info = self._discovery.info
        return f"Engine({info.supported_models[0]!r}, {info.attributes['device']}, {self._loop.state.value})"

    # ---- private ---------------------------------------------------------------------------------

    def _with_messages(
        self, prompt: Any, messages: Sequence[Any] | None, options: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        tools, template_kwargs = take_chat_options(prompt, messages, options)
        if messages is None:
            return prompt, options
        if isinstance(self._preparer, NoGeneration):
            self._loop.check_accepting()
            # Before its tokenizer is blamed for having no template.
            self._preparer.refuse(options.get("request_id"), options.get("model"))
        return self.apply_chat_template(messages, tools, **template_kwargs), options

    def _admit(self, group: SequenceGroup, *, keep_events: bool = False, wait: bool = False) -> Handle[Any]:
        handle: Handle[Any] = Handle(group, self._cancel, keep_events=keep_events)
        group.sink = handle
        try:
            self._loop.admit(group, wait=wait)
        except BaseException:  # an interrupt may come when it has just been accepted
            handle.cancel()
            raise
        return handle

    def _cancel(self, group: SequenceGroup) -> None:
        self._loop.abort_group(group)

    def _readiness(self, model: str | None, role: EngineRole | None) -> list[HealthCheck]:
        checks = readiness(self._loop, role)
        self._discovery.check_model(model)
        return checks

    def _start_probe(self) -> Handle[Any]:
        generates = not isinstance(self._preparer, NoGeneration)
        group = self._preparer.prepare(probe_request()) if generates else self._tasks.preparer.probe()
        return self._admit(as_probe(group))


def _shut_down(guides: GuideCompiler | NoGuides, loop: EngineLoop) -> None:
    guides.close()
    loop.close()


class _Closed:
    """Stands in for what a closed engine has given back."""

    def __getattr__(self, name: str) -> Any:
        raise PreconditionFailed("the engine is closed; create a new Engine")


def _config(model_path: str | os.PathLike[str], options: Mapping[str, Any]) -> EngineConfig:
    known = set(EngineConfig.field_names()) - {"model_path"}
    for name in options:
        if name not in known:
            raise InvalidArgument(f"unknown engine option {name!r}{suggest(name, known)}")
    if not isinstance(model_path, (str, os.PathLike)):
        raise InvalidArgument(f"model_path must be a path or a hub id, not {model_path!r}")
    return EngineConfig(os.fspath(model_path), **options)
