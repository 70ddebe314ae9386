"""openengine: an inference engine for language models in Python and PyTorch.

Every public name is here and is imported when it is first used, so that `import openengine` costs
nothing: neither torch nor any optional package comes with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openengine.core.config import EngineConfig
    from openengine.core.guides.compiled import CompiledGuide
    from openengine.core.tokenizer import load_tokenizer
    from openengine.demo import demo_model
    from openengine.engine import Engine
    from openengine.errors import *
    from openengine.event_types import *
    from openengine.handle import EventStream, Handle
    from openengine.options import build_request
    from openengine.results import *
    from openengine.service_types import *
    from openengine.task_results import *
    from openengine.task_types import *
    from openengine.tasks import TaskHandle
    from openengine.tokenizer_types import *
    from openengine.types import *

__version__ = "0.1.0"

__all__ = [
    "AbortRequest",
    "AbortResponse",
    "AbortStatus",
    "AllBlocksCleared",
    "AllCandidates",
    "ArtifactNotFound",
    "BlockCacheKey",
    "BlockRemoved",
    "BlockStored",
    "CacheKeyContext",
    "CacheKeyGroup",
    "CacheKeySpec",
    "CacheKeyTestVector",
    "Cancelled",
    "CandidateTokenSelection",
    "CandidateTokenSelectionMode",
    "ChoiceConstraint",
    "ClassificationOutput",
    "ClassifyCapabilities",
    "ClassifyOptions",
    "ClassifyRequest",
    "ClassifyResponse",
    "CompiledGuide",
    "ComputeCacheKeysRequest",
    "ComputeCacheKeysResponse",
    "DenseFloatTensor",
    "DetokenizeOptions",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "DrainRequest",
    "DrainResponse",
    "DrainState",
    "Draining",
    "DuplicateRequest",
    "EmbedCapabilities",
    "EmbedOptions",
    "EmbedRequest",
    "EmbedResponse",
    "EmbeddingEncoding",
    "EmbeddingOutput",
    "Engine",
    "EngineConfig",
    "EngineInfo",
    "EngineRole",
    "EventStream",
    "FinishReason",
    "GenerateEvent",
    "GenerateRequest",
    "GenerationCapabilities",
    "GenerationFinished",
    "GenerationOutput",
    "GenerationResult",
    "GetCacheKeySpecRequest",
    "GetKvEventSourcesRequest",
    "GetKvEventSourcesResponse",
    "GetLoadRequest",
    "GetModelInfoRequest",
    "GetTokenizerArtifactsRequest",
    "GetTokenizerInfoRequest",
    "GuidedDecoding",
    "GuidedDecodingCapabilities",
    "GuidedDecodingMode",
    "Handle",
    "HealthCheck",
    "HealthRequest",
    "HealthResponse",
    "HealthState",
    "IncompleteOutput",
    "InternalError",
    "InvalidArgument",
    "JsonObjectConstraint",
    "KvConnectorInfo",
    "KvEndpoint",
    "KvEvent",
    "KvEventBatch",
    "KvEventSource",
    "KvOptions",
    "KvSessionNotFound",
    "KvSessionRef",
    "KvTransferFailed",
    "ListLorasResponse",
    "LoadInfo",
    "LoadLoraRequest",
    "LoadLoraResponse",
    "LogProb",
    "LogprobCapabilities",
    "LoraAdapter",
    "LoraConflict",
    "LoraNotFound",
    "MediaIdentity",
    "MediaItem",
    "Modality",
    "ModelInfo",
    "ModelNotFound",
    "MultimodalTaskInput",
    "OpenEngineError",
    "OutOfRange",
    "Overloaded",
    "ParallelismInfo",
    "PreconditionFailed",
    "PrefillReady",
    "PromptEmbeddingIdentity",
    "PromptOutput",
    "RankLoadInfo",
    "RequestNotFound",
    "RequestTooLarge",
    "ResponseOptions",
    "RoleMismatch",
    "RuntimeEvent",
    "RuntimeEventType",
    "SamplingParams",
    "ScoreCandidateOutput",
    "ScoreCapabilities",
    "ScoreGroup",
    "ScoreGroupOutput",
    "ScoreNormalization",
    "ScoreOptions",
    "ScoreRequest",
    "ScoreResponse",
    "SparseFloatTensor",
    "SpecialToken",
    "StopCondition",
    "StopMatch",
    "StoppingOptions",
    "StorageMedium",
    "SubscribeKvEventsRequest",
    "SubscribeRuntimeEventsRequest",
    "TaskCapabilities",
    "TaskHandle",
    "TaskInput",
    "TaskInputType",
    "TaskOutputGranularity",
    "TaskRequestContext",
    "TaskUsage",
    "TaskValueSemantics",
    "Timing",
    "TokenInfo",
    "TokenOutput",
    "TokenSpan",
    "TokenizeOptions",
    "TokenizeRequest",
    "TokenizeResponse",
    "TokenizerArtifact",
    "TokenizerArtifactChunk",
    "TokenizerCapabilities",
    "TokenizerChanged",
    "TokenizerInfo",
    "TokenizerOperation",
    "TruncationSide",
    "Unauthenticated",
    "UnloadLoraRequest",
    "UnloadLoraResponse",
    "Unreachable",
    "UnsupportedFeature",
    "UnsupportedTask",
    "Usage",
    "build_request",
    "demo_model",
    "load_tokenizer",
]

# Where the names live that are in none of the modules that offer values and errors.
_HOMES = {
    "CompiledGuide": "core.guides.compiled",
    "Engine": "engine",
    "EngineConfig": "core.config",
    "EventStream": "handle",
    "Handle": "handle",
    "TaskHandle": "tasks",
    "build_request": "options",
    "demo_model": "demo",
    "load_tokenizer": "core.tokenizer",
}
_VALUES = (
    "errors",
    "types",
    "results",
    "task_types",
    "task_results",
    "service_types",
    "event_types",
    "tokenizer_types",
)


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'openengine' has no attribute {name!r}")
    for home in (_HOMES[name],) if name in _HOMES else _VALUES:
        module = importlib.import_module(f"openengine.{home}")
        if hasattr(module, name):
            value = globals()[name] = getattr(module, name)
            return value
    raise AttributeError(f"openengine.__all__ names {name!r}, which no module defines")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
