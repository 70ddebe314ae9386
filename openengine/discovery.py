"""`Discovery`: who serves, what the model can do, where its events can be read.

Owns the address that discovery names. All else is fixed when the engine is put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from openengine import __version__
from openengine.core.admission import Limits, RequestPreparer
from openengine.core.cache_keys import PROFILE, PROFILE_VERSION
from openengine.core.config import EngineConfig
from openengine.core.events import EventLog
from openengine.core.guides.compiler import GuideCompiler, NoGuides
from openengine.core.task_capabilities import NoGeneration
from openengine.core.tokenizer_service import TokenizerService
from openengine.errors import InvalidArgument
from openengine.event_types import GetKvEventSourcesResponse, KvEventSource
from openengine.hosts import bare_host, check_reachable
from openengine.loading import LoadedModel, attributes
from openengine.names import check_served
from openengine.service_types import (
    EngineInfo,
    EngineRole,
    GenerationCapabilities,
    GuidedDecodingCapabilities,
    KvConnectorInfo,
    LogprobCapabilities,
    ModelInfo,
    ParallelismInfo,
)
from openengine.task_types import TaskCapabilities
from openengine.types import CandidateTokenSelectionMode, KvEndpoint

__all__ = ["RANK", "Discovery", "generation_capabilities"]

RANK = 0  # the only data-parallel rank
_SCHEMA_RELEASE = "d0f29fec31f31db5cfd49cf3e0f67da84d10c709"  # source commit of the contract's revision 1


class Discovery:
    """Answers for one engine, from any thread. `info` says who serves. `kv_log` is None where KV events are off."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        limits: Limits,
        *,
        instance_id: str,
        generation: GenerationCapabilities | None,
        tasks: TaskCapabilities | None,
        kv_log: EventLog | None,
    ) -> None:
        self.info = _engine_info(config, loaded, instance_id)
        self._model_info = _model_info(config, loaded, limits, generation, tasks)
        self._names = limits.model_names
        self._kv_log = kv_log
        self._endpoint: KvEndpoint | None = None

    def check_model(self, model: str | None) -> None:
        """Raises ModelNotFound for a name that is not served."""
        check_served(model, self._names)

    def model_info(self, model: str | None, tokenizer: TokenizerService) -> ModelInfo:
        """What the model can do, with its `tokenizer`. Raises ModelNotFound for a name that is not served."""
        self.check_model(model)
        return replace(self._model_info, tokenizer=tokenizer.capabilities())

    def advertise(self, host: str, port: int) -> None:
        """Raises InvalidArgument for what is no host, a wildcard, or a port that nobody can connect to."""
        check_reachable("host", host)
        if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
            raise InvalidArgument(f"port must be between 1 and 65535, not {port!r:.80}")
        self._endpoint = KvEndpoint(host=bare_host(host), port=port, protocol="grpc")

    def kv_event_sources(self, data_parallel_ranks: Sequence[int]) -> GetKvEventSourcesResponse:
        """Raises InvalidArgument for a rank that does not exist."""
        for rank in data_parallel_ranks:
            if rank != RANK:
                raise InvalidArgument(
                    f"data_parallel_rank {rank!r:.80} does not exist here; the engine has rank {RANK} only"
                )
        if self._kv_log is None or self._endpoint is None:
            return GetKvEventSourcesResponse()
        source = KvEventSource(
            transport="grpc",
            encoding="protobuf",
            endpoint_addr=self._endpoint,
            data_parallel_rank=RANK,
            schema_version=1,
            buffer_steps=self._kv_log.capacity,
            max_queue_size=self._kv_log.capacity,
            cache_key_profile=f"{PROFILE}/{PROFILE_VERSION}",
        )
        return GetKvEventSourcesResponse(sources=(source,))


def generation_capabilities(
    limits: Limits, preparer: RequestPreparer | NoGeneration, guides: GuideCompiler | NoGuides
) -> GenerationCapabilities | None:
    """None for a model that does not generate."""
    if isinstance(preparer, NoGeneration):
        return None
    logprobs = LogprobCapabilities(
        supported=True,
        candidate_selection_modes=tuple(CandidateTokenSelectionMode),
        max_top_n=preparer.max_top_n,
    )
    return GenerationCapabilities(
        prompt_logprobs=logprobs,
        output_logprobs=logprobs,
        guided_decoding=GuidedDecodingCapabilities(supported=bool(guides.modes), modes=guides.modes),
        max_num_sequences=limits.max_num_sequences,
        supports_priority=True,
        supports_stop_in_output=True,
        supports_cache_salt=True,
        supports_prefix_cache_bypass=True,
    )


def _engine_info(config: EngineConfig, loaded: LoadedModel, instance_id: str) -> EngineInfo:
    return EngineInfo(
        engine_name="openengine",
        engine_version=__version__,
        role=EngineRole.AGGREGATED,
        instance_id=instance_id,
        supported_models=loaded.names,
        parallelism=ParallelismInfo(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_rank=RANK,
            data_parallel_start_rank=0,
        ),
        schema_revision=1,
        minimum_client_revision=1,
        schema_release=_SCHEMA_RELEASE,
        kv_connector=KvConnectorInfo(enabled=False),
        attributes=attributes(config, loaded),
    )


def _model_info(
    config: EngineConfig,
    loaded: LoadedModel,
    limits: Limits,
    generation: GenerationCapabilities | None,
    tasks: TaskCapabilities | None,
) -> ModelInfo:
    is_encoder, generates = loaded.profile.is_encoder, loaded.profile.generates
    return ModelInfo(
        model_id=loaded.names[0],
        served_model_name=config.served_model_name or loaded.names[0],
        served_model_aliases=config.aliases,
        max_context_length=limits.max_model_len,
        kv_block_size=limits.block_size or None,
        total_kv_blocks=limits.num_kv_blocks or None,
        max_running_requests=None if is_encoder else config.max_num_seqs,
        max_batched_tokens=config.tokens_per_step(is_encoder=is_encoder),
        supports_text_input=generates,  # of generations; each task names its own kinds of input
        supports_token_ids_input=generates,
        generation=generation,
        supports_lora=False,
        supports_multimodal=False,
        tasks=tasks,
    )
