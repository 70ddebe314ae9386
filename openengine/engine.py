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
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from openengine import __version__
from openengine.assembly import Machinery, assemble, limits_of, task_preparer
from openengine.batches import aadmit, arun_batch, cancel_and_wait, check_on_error, failed, named_item, run_batch
from openengine.core.admission import RequestPreparer, as_token_ids, sampling_defaults
from openengine.core.cache_key_service import CacheKeyService
from openengine.core.config import EngineConfig
from openengine.core.guided import CompiledGuide, GuideCompiler, NoGuides, guide_compiler
from openengine.core.loop import EngineLoop, LoopState
from openengine.core.runtime_events import RuntimeEventBus
from openengine.core.sequence import SequenceGroup
from openengine.core.subscription import Subscription
from openengine.core.task_capabilities import NoGeneration
from openengine.core.tokenizer_service import TokenizerService
from openengine.errors import (
    Draining,
    DuplicateRequest,
    InvalidArgument,
    ModelNotFound,
    OpenEngineError,
    PreconditionFailed,
)
from openengine.handle import EventStream, Handle, LateStream
from openengine.loading import LoadedModel, attributes, load, start_line
from openengine.options import (
    Prompt,
    batch_items,
    build_guide,
    build_request,
    check_options,
    is_single_prompt,
    request_id_of,
    suggest,
    take_chat_options,
)
from openengine.service import Services
from openengine.service_types import (
    GetKvEventSourcesResponse,
    KvConnectorInfo,
    KvEventBatch,
    ListLorasResponse,
    LoadLoraResponse,
    RuntimeEvent,
    RuntimeEventType,
    UnloadLoraResponse,
)
from openengine.task_types import (
    ClassificationOutput,
    ClassifyRequest,
    ClassifyResponse,
    EmbeddingOutput,
    EmbedRequest,
    EmbedResponse,
    ScoreRequest,
    ScoreResponse,
)
from openengine.tasks import PreparedTask, TaskHandle, Tasks
from openengine.tokenizer_types import CacheKeySpec, ComputeCacheKeysResponse, TokenizerArtifactChunk, TokenizerInfo
from openengine.types import (
    AbortResponse,
    CandidateTokenSelectionMode,
    DrainResponse,
    DrainState,
    EngineInfo,
    EngineRole,
    GenerateRequest,
    GenerationCapabilities,
    GenerationResult,
    GuidedDecoding,
    GuidedDecodingCapabilities,
    HealthCheck,
    HealthResponse,
    HealthState,
    KvSessionRef,
    LoadInfo,
    LogprobCapabilities,
    ModelInfo,
    ParallelismInfo,
    SamplingParams,
    StoppingOptions,
)

__all__ = ["Engine"]

_log = logging.getLogger("openengine")
_SCHEMA_RELEASE = "d0f29fec31f31db5cfd49cf3e0f67da84d10c709"  # source commit of the contract's revision 1
_PROBE_TIMEOUT_S = 60.0
_PROBE_PRIORITY = 2**31 - 1
_LOOP_TO_HEALTH = {
    LoopState.STARTING: HealthState.STARTING,
    LoopState.READY: HealthState.READY,
    LoopState.DEGRADED: HealthState.DEGRADED,
    LoopState.DRAINING: HealthState.DRAINING,
    LoopState.STOPPED: HealthState.NOT_READY,
}


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
        self._config = config
        self._instance_id = str(uuid.uuid4())
        self._tokenizer = loaded.tokenizer
        self._model_names = loaded.names
        self._profile = loaded.profile
        self._limits = limits_of(config, loaded)
        preparer = task_preparer(config, loaded)
        defaults, default_max_tokens = sampling_defaults(
            config.default_sampling, loaded.generation_config if config.generation_config else {}
        )
        self._guides: GuideCompiler | NoGuides = NoGuides("the model does not generate text")
        self._preparer: RequestPreparer | NoGeneration = NoGeneration(preparer.abilities)
        if loaded.profile.generates:
            self._guides = guide_compiler(
                self._tokenizer,
                self._limits.vocab_size,
                loaded.eos_token_ids,
                timeout_s=config.guide_timeout_s,
                max_bytes=config.guide_max_bytes,
            )
            self._preparer = RequestPreparer(
                self._tokenizer,
                self._limits,
                defaults=defaults,
                default_max_tokens=default_max_tokens,
                seed=config.seed,
                guides=self._guides,
                jump_ahead=config.guide_jump_ahead,
            )
        machinery = assemble(config, loaded, self._guides if isinstance(self._guides, GuideCompiler) else None)
        kv_log = machinery.kv_log
        self._loop = EngineLoop(
            machinery.scheduler,
            machinery.runner,
            token_text=self._tokenizer.token_text,
            max_queued_requests=config.max_queued_requests,
            num_threads=config.num_threads,
            instance_id=self._instance_id,
            kv_log=kv_log,
            runtime_events=RuntimeEventBus(self._instance_id),
        )
        self._tasks = Tasks(
            preparer,
            self._loop.check_accepting,
            tokens_per_step=config.tokens_per_step(is_encoder=loaded.profile.is_encoder),
        )
        self._services = Services(self._loop, _tokenizer_service(loaded, machinery), kv_log)
        self._attributes = attributes(loaded)
        self._loop.start()
        self._finalizer = weakref.finalize(self, _shut_down, self._guides, self._loop)
        _log.info("%s", start_line(self._attributes))

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
            handle = None
            try:
                request = self._build_single(prompts, sampling, options)
                handle = self._admit(self._prepare(request), keep_events=False, wait=True)
                return handle.result()
            except OpenEngineError as exc:
                if on_error == "raise":
                    raise
                return failed(request_id_of(prompts, options), exc)
            except BaseException:
                cancel_and_wait([handle] if handle else [])
                raise
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
        requests = self._build_batch(prompts, sampling, on_error, options)
        self._preparer.warn(requests)
        items = self._prepare_batch(requests, on_error)
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
        request = self._build_single(prompt, sampling, options)
        if request.guided is None:
            return EventStream(self._admit(self._prepare(request), keep_events=True))
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
            requests = await asyncio.to_thread(self._build_batch, prompts, sampling, on_error, options)
            self._preparer.warn(requests)
            requests = await self._with_guides(requests, on_error)
            items = await asyncio.to_thread(self._prepare_batch, requests, on_error)
            start = functools.partial(aadmit, self._admit)
            return await arun_batch(start, items, window=self._window, on_error=on_error)
        check_on_error(on_error)
        check_options(sampling, options)
        handle = None
        try:
            request = self._build_single(prompts, sampling, options)
            handle = await aadmit(self._admit, await self._aprepare(request))
            return await handle.aresult()
        except OpenEngineError as exc:
            if on_error == "raise":
                raise
            return failed(request_id_of(prompts, options), exc)
        except BaseException:
            if handle is not None:
                handle.cancel()
            raise

    def submit(
        self,
        request: Prompt | None = None,
        sampling: SamplingParams | None = None,
        *,
        messages: Sequence[Any] | None = None,
        **options: Any,
    ) -> Handle:
        """Start one request and return its handle at once.

        What this raises was not accepted; what goes wrong later, the handle raises.
        """
        prompt, options = self._with_messages(request, messages, options)
        return self._admit(self._prepare(self._build_single(prompt, sampling, options)), keep_events=True)

    async def asubmit(
        self,
        request: Prompt | None = None,
        sampling: SamplingParams | None = None,
        *,
        messages: Sequence[Any] | None = None,
        **options: Any,
    ) -> Handle:
        """`submit` for an event loop, which stays free while the prompt is tokenized and a guide compiled."""
        prompt, options = await asyncio.to_thread(self._with_messages, request, messages, options)
        return await self._asubmit(self._build_single(prompt, sampling, options))

    async def _asubmit(self, request: GenerateRequest) -> Handle:
        return self._admit(await self._aprepare(request), keep_events=True)

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
        return EngineInfo(
            engine_name="openengine",
            engine_version=__version__,
            role=EngineRole.AGGREGATED,
            instance_id=self._instance_id,
            supported_models=self._model_names,
            parallelism=ParallelismInfo(
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
                data_parallel_size=1,
                data_parallel_rank=0,
                data_parallel_start_rank=0,
            ),
            schema_revision=1,
            minimum_client_revision=1,
            schema_release=_SCHEMA_RELEASE,
            kv_connector=self.kv_connector_info(),
            attributes=self._attributes,
        )

    def model_info(self, model: str | None = None) -> ModelInfo:
        """What the model can do and how much fits. Raises ModelNotFound for a name that is not served."""
        self._check_model(model)
        limits = self._limits
        return ModelInfo(
            model_id=self._model_names[0],
            served_model_name=self._config.served_model_name or self._model_names[0],
            served_model_aliases=self._config.aliases,
            max_context_length=limits.max_model_len,
            kv_block_size=limits.block_size or None,
            total_kv_blocks=limits.num_kv_blocks or None,
            max_running_requests=None if self._profile.is_encoder else self._config.max_num_seqs,
            max_batched_tokens=self._config.tokens_per_step(is_encoder=self._profile.is_encoder),
            supports_text_input=True,
            supports_token_ids_input=True,
            generation=self._generation_capabilities() if self._profile.generates else None,
            supports_lora=False,
            supports_multimodal=False,
            tasks=self._tasks.preparer.capabilities,
            tokenizer=self._services.tokenizer.capabilities(),
        )

    def _generation_capabilities(self) -> GenerationCapabilities:
        logprobs = LogprobCapabilities(
            supported=True,
            candidate_selection_modes=tuple(CandidateTokenSelectionMode),
            max_top_n=self._preparer.max_top_n,
        )
        return GenerationCapabilities(
            prompt_logprobs=logprobs,
            output_logprobs=logprobs,
            guided_decoding=GuidedDecodingCapabilities(supported=bool(self._guides.modes), modes=self._guides.modes),
            max_num_sequences=self._limits.max_num_sequences,
            supports_priority=True,
            supports_stop_in_output=True,
            supports_cache_salt=True,
            supports_prefix_cache_bypass=True,
        )

    def load_info(self, *, include_per_rank: bool = False) -> LoadInfo:
        """The scheduler's load after the latest step; `include_per_rank` adds it by data-parallel rank."""
        return self._services.load(include_per_rank)

    def health(
        self, *, include_inference_probe: bool = False, model: str | None = None, role: EngineRole | None = None
    ) -> HealthResponse:
        """Readiness; with `include_inference_probe` one token is computed, leaving nothing cached."""
        state = _LOOP_TO_HEALTH[self._loop.state] if self._loop.is_here else HealthState.NOT_READY
        checks = [HealthCheck("scheduler", state), HealthCheck("model", state)]
        if role is not None and role not in tuple(EngineRole):
            raise InvalidArgument(f"role must be one of {', '.join(EngineRole)}, not {role!r:.80}")
        if role is not None and role != EngineRole.AGGREGATED:
            message = f"expected {role}, this engine is {EngineRole.AGGREGATED}"
            checks.append(HealthCheck("role", HealthState.NOT_READY, message))
        elif role is not None:
            checks.append(HealthCheck("role", HealthState.READY))
        self._check_model(model)
        if include_inference_probe:
            checks.append(self._probe())
        not_ready = [check for check in checks if check.state is HealthState.NOT_READY]
        return HealthResponse(HealthState.NOT_READY if not_ready else state, tuple(checks))

    # ---- KV cache, events, tokenizer service: see service.py -------------------------------------

    @property
    def tokenizer_service(self) -> TokenizerService:
        """The tokenizer in the contract's terms, with options, fingerprints and expectations."""
        return self._services.tokenizer

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
        return self._loop.runtime_events.subscribe(types)

    def kv_connector_info(self) -> KvConnectorInfo:
        """How KV state goes to other engines: an aggregated engine has no connector."""
        return self._services.kv_connector_info()

    def kv_event_sources(self, *, data_parallel_ranks: Sequence[int] = ()) -> GetKvEventSourcesResponse:
        """Where others can read the KV events; nowhere before a server has called `advertise`."""
        return self._services.kv_event_sources(data_parallel_ranks)

    def advertise(self, host: str, port: int) -> None:
        """Name the address at which a gRPC server offers this engine; discovery repeats it."""
        self._services.advertise(host, port)

    def tokenizer_info(self) -> TokenizerInfo:
        """The tokenizer's identity, special tokens, files and default options."""
        return self._services.tokenizer.info()

    def tokenizer_artifacts(self, names: Sequence[str] = (), **options: Any) -> Iterator[TokenizerArtifactChunk]:
        """The files that rebuild the tokenizer, in chunks; options as for `TokenizerService.artifacts`."""
        return self._services.tokenizer.artifacts(names=names, **options)

    def cache_key_spec(self) -> CacheKeySpec:
        """What it takes to compute the prefix cache's keys elsewhere."""
        return self._services.tokenizer.cache_key_spec()

    def cache_keys(
        self, *, text: str | None = None, tokens: Sequence[int] | None = None, **options: Any
    ) -> ComputeCacheKeysResponse:
        """The keys of a prompt's full blocks; options as for `TokenizerService.cache_keys`."""
        return self._services.tokenizer.cache_keys(text=text, tokens=tokens, **options)

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
        is_integer = isinstance(deadline_ms, (int, np.integer)) and not isinstance(deadline_ms, bool)
        if deadline_ms is not None and not (is_integer and deadline_ms >= 0):
            raise InvalidArgument(f"deadline_ms must be a non-negative integer, not {deadline_ms!r:.80}")
        if stop_accepting_new_requests:
            self._loop.stop_accepting()
        return self._drain_reports(deadline_ms, abort_after_deadline)

    def check_accepting(self) -> None:
        """Raises Draining where a drain has stopped new requests, PreconditionFailed on a closed engine."""
        self._loop.check_accepting()

    def clear_prefix_cache(self) -> None:
        """Forget every cached prompt block. Running requests keep theirs."""
        self._loop.call(lambda scheduler: scheduler.blocks.clear())

    def close(self) -> None:
        """Cancel what runs, stop the loop and give the memory back. Calling it again does nothing."""
        self._tokenizer = self._preparer = self._tasks.preparer = self._guides = self._services.tokenizer = _Closed()
        self._finalizer()
        self._loop.close()  # a second caller waits for the first

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("an Engine cannot be pickled; pickle its EngineConfig and create the engine where it runs")

    def __repr__(self) -> str:
        return f"Engine({self._model_names[0]!r}, {self._attributes['device']}, {self._loop.state.value})"

    # ---- private ---------------------------------------------------------------------------------

    def _with_messages(
        self, prompt: Any, messages: Sequence[Any] | None, options: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        tools, template_kwargs = take_chat_options(prompt, messages, options)
        if messages is None:
            return prompt, options
        if isinstance(self._preparer, NoGeneration):
            self._preparer.refuse()  # before its tokenizer is blamed for having no template
        return self.apply_chat_template(messages, tools, **template_kwargs), options

    @property
    def _window(self) -> int:
        return min(4 * self._config.max_num_seqs, self._config.max_queued_requests)

    def _prepare(self, request: GenerateRequest) -> SequenceGroup:
        """A draining engine says so before it judges a request, so that no prompt is tokenized in vain."""
        self._loop.check_accepting()
        return self._preparer.prepare(request)

    def _admit(self, group: SequenceGroup, *, keep_events: bool = False, wait: bool = False) -> Handle:
        handle = Handle(group, self._cancel, keep_events=keep_events)
        group.sink = handle
        try:
            self._loop.admit(group, wait=wait)
        except BaseException:  # an interrupt may come when it has just been accepted
            handle.cancel()
            raise
        return handle

    def _cancel(self, group: SequenceGroup) -> None:
        self._loop.abort_group(group)

    async def _aprepare(self, request: GenerateRequest) -> SequenceGroup:
        return await asyncio.to_thread(self._prepare, await self._with_guide(request))

    async def _with_guide(self, request: GenerateRequest) -> GenerateRequest:
        """`request` with its guide compiled; no thread waits for that."""
        if request.guided is None:
            return request
        self._loop.check_accepting()
        await asyncio.to_thread(self._preparer.check, request)
        return replace(request, guided=await asyncio.wrap_future(self._guides.submit(request.guided)))

    async def _with_guides(
        self, requests: list[GenerateRequest | GenerationResult], on_error: str
    ) -> list[GenerateRequest | GenerationResult]:
        async def compiled(
            index: int, request: GenerateRequest | GenerationResult
        ) -> GenerateRequest | GenerationResult:
            if isinstance(request, GenerationResult):
                return request
            try:
                return await self._with_guide(request)
            except OpenEngineError as exc:
                if on_error == "raise":
                    raise named_item(exc, index, len(requests)) from exc
                return failed(request_id_of(request, {}), exc)

        return list(await asyncio.gather(*(compiled(*item) for item in enumerate(requests))))

    def _build_single(self, prompt: Any, sampling: SamplingParams | None, options: dict[str, Any]) -> GenerateRequest:
        if not is_single_prompt(prompt):
            raise InvalidArgument("this takes one prompt; use generate or as_completed for a batch")
        request = build_request(prompt, sampling, options)
        self._preparer.warn([request])
        return request

    def _build_batch(
        self, prompts: Iterable[Prompt], sampling: SamplingParams | None, on_error: str, options: dict[str, Any]
    ) -> list[GenerateRequest | GenerationResult]:
        """A request for every item; a bad one is a result with its error, or raised, naming its index."""
        check_on_error(on_error)
        check_options(sampling, options)
        prompts = batch_items(prompts)
        if options.get("request_id") is not None and len(prompts) != 1:
            raise InvalidArgument(f"request_id names one request, the batch has {len(prompts)}; use GenerateRequests")
        requests: list[GenerateRequest | GenerationResult] = []
        for index, prompt in enumerate(prompts):
            try:
                requests.append(build_request(prompt, sampling, options))
            except OpenEngineError as exc:
                if on_error == "raise":
                    raise named_item(exc, index, len(prompts)) from exc
                requests.append(failed(request_id_of(prompt, options), exc))
        return requests

    def _prepare_batch(
        self, requests: list[GenerateRequest | GenerationResult], on_error: str
    ) -> list[SequenceGroup | GenerationResult]:
        """Every item checked before anything runs; a bad one is a result with its error, or raised, naming its index."""
        items: list[SequenceGroup | GenerationResult] = []
        request_ids: set[str] = set()
        for index, request in enumerate(requests):
            if isinstance(request, GenerationResult):
                items.append(request)
                continue
            try:
                group = self._prepare(request)
                self._check_unused(group.request_id, request_ids)
                items.append(group)
            except OpenEngineError as exc:
                if on_error == "raise":
                    raise named_item(exc, index, len(requests)) from exc
                items.append(failed(request_id_of(request, {}), exc))
        return items

    def _check_unused(self, request_id: str, request_ids: set[str]) -> None:
        """One batch runs in parts, so an id is looked for before any of it runs; `request_ids` are those before."""
        if request_id in request_ids:
            raise DuplicateRequest(f"request_id {request_id!r:.80} is used by an earlier item; give each item its own")
        if self._loop.is_open(request_id):
            raise DuplicateRequest(
                f"request_id {request_id!r:.80} is in flight; wait for it to finish or choose another id"
            )
        request_ids.add(request_id)

    def _drain_reports(self, deadline_ms: int | None, abort_after_deadline: bool) -> Iterator[DrainResponse]:
        deadline = None if deadline_ms is None else time.monotonic() + deadline_ms / 1000
        yield DrainResponse(DrainState.STARTED, self._loop.num_in_flight, 0)
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if self._loop.wait_idle(1.0 if left is None else max(0.0, min(1.0, left))):
                yield DrainResponse(DrainState.COMPLETE, 0, 0)
                return
            if left is None or left > 0:
                yield DrainResponse(DrainState.IN_PROGRESS, self._loop.num_in_flight, 0)
                continue
            if not abort_after_deadline:
                raise Draining(
                    f"{self._loop.num_in_flight} requests are still in flight at the deadline of {deadline_ms} ms; they go on, "
                    "drain again to wait for them or pass abort_after_deadline=True"
                )
            _log.warning("the drain's limit of %d ms cancels %d requests", deadline_ms, self._loop.num_in_flight)
            self._loop.abort_all(f"the engine drains, and its limit of {deadline_ms} ms came before the request's end")
            deadline = None

    def _probe_group(self) -> SequenceGroup:
        if not self._profile.generates:
            return self._tasks.preparer.probe()
        request = GenerateRequest(
            token_ids=[0],
            sampling=SamplingParams(temperature=0.0, num_sequences=1, seed=0),
            stopping=StoppingOptions(max_tokens=1),
        )
        return self._preparer.prepare(request)

    def _probe(self) -> HealthCheck:
        handle, num_steps = None, self._loop.num_steps
        try:
            group = self._probe_group()
            group.publish, group.is_probe, group.priority = False, True, _PROBE_PRIORITY
            handle = self._admit(group, keep_events=False)
            handle.result(timeout=_PROBE_TIMEOUT_S)
        except (OpenEngineError, TimeoutError) as exc:
            if handle is not None:
                handle.cancel()
            if isinstance(exc, TimeoutError) and self._loop.num_steps > num_steps:
                return HealthCheck("inference_probe", HealthState.READY, "busy: other requests hold every slot and run")
            return HealthCheck("inference_probe", HealthState.NOT_READY, str(exc))
        return HealthCheck("inference_probe", HealthState.READY)

    def _check_model(self, model: str | None) -> None:
        if model is not None and not (isinstance(model, str) and model in self._model_names):
            raise ModelNotFound(f"model {model!r:.80} is not served; served are {', '.join(self._model_names)}")


def _tokenizer_service(loaded: LoadedModel, machinery: Machinery) -> TokenizerService:
    vocab_size = loaded.model.config.vocab_size
    cache_keys = None
    if machinery.has_cache:
        cache_keys = CacheKeyService(
            model=loaded.names[0],
            vocab_size=vocab_size,
            block_size=loaded.pool.block_size,
            root_key=machinery.root,
            model_revision=loaded.revision,
            tokenizer_fingerprint=loaded.tokenizer.fingerprint,
        )
    return TokenizerService(
        loaded.tokenizer,
        names=loaded.names,
        vocab_size=vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        cache_keys=cache_keys,
        revision=loaded.revision,
    )


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
