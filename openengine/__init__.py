"""openengine: an inference engine for language models in Python and PyTorch.

Every public name is here and is imported when it is first used, so that `import openengine` costs
nothing: neither torch nor any optional package comes with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openengine.demo import demo_model
    from openengine.engine import Engine
    from openengine.errors import *
    from openengine.handle import EventStream, Handle
    from openengine.types import *

__version__ = "0.1.0"

__all__ = [
    "AbortResponse",
    "AbortStatus",
    "AllBlocksCleared",
    "AllCandidates",
    "ArtifactNotFound",
    "BlockRemoved",
    "BlockStored",
    "Cancelled",
    "CandidateTokenSelection",
    "CandidateTokenSelectionMode",
    "ChoiceConstraint",
    "DrainResponse",
    "DrainState",
    "Draining",
    "DuplicateRequest",
    "Engine",
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
    "GuidedDecoding",
    "GuidedDecodingCapabilities",
    "GuidedDecodingMode",
    "Handle",
    "HealthCheck",
    "HealthResponse",
    "HealthState",
    "InternalError",
    "InvalidArgument",
    "JsonObjectConstraint",
    "KvEndpoint",
    "KvEvent",
    "KvOptions",
    "KvSessionNotFound",
    "KvSessionRef",
    "KvTransferFailed",
    "LoadInfo",
    "LogProb",
    "LogprobCapabilities",
    "LoraAdapter",
    "LoraConflict",
    "LoraNotFound",
    "MediaItem",
    "Modality",
    "ModelInfo",
    "ModelNotFound",
    "OpenEngineError",
    "OutOfRange",
    "Overloaded",
    "ParallelismInfo",
    "PreconditionFailed",
    "PrefillReady",
    "PromptOutput",
    "RankLoadInfo",
    "RequestNotFound",
    "RequestTooLarge",
    "ResponseOptions",
    "RoleMismatch",
    "SamplingParams",
    "StopCondition",
    "StopMatch",
    "StoppingOptions",
    "StorageMedium",
    "Timing",
    "TokenInfo",
    "TokenOutput",
    "TokenizerChanged",
    "UnsupportedFeature",
    "UnsupportedTask",
    "Usage",
    "demo_model",
]

# Where the names live that are in neither errors.py nor types.py.
_HOMES = {"Engine": "engine", "EventStream": "handle", "Handle": "handle", "demo_model": "demo"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'openengine' has no attribute {name!r}")
    for home in (_HOMES[name],) if name in _HOMES else ("errors", "types"):
        module = importlib.import_module(f"openengine.{home}")
        if hasattr(module, name):
            value = globals()[name] = getattr(module, name)
            return value
    raise AttributeError(f"openengine.__all__ names {name!r}, which no module defines")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
