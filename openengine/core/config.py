"""`EngineConfig`: everything that can be set about an engine, in one frozen value."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from openengine.errors import InvalidArgument, UnsupportedFeature
from openengine.types import EngineRole, SamplingParams

__all__ = ["EngineConfig"]

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_KERNELS = ("auto", "native", "torch", "flash")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine; `None` lets the engine choose from the model and the machine.

    model_path: a directory of safetensors, a .gguf file, or a hub id.
    served_model_name, aliases: further names that requests may use for the model.
    dtype: "auto" is bfloat16 where the device multiplies it natively, else float32.
    quantization: "int8" multiplies in 8-bit integers on a CPU, weights and activations; None as `dtype` says.
    device: "auto", "cpu", "cuda" or "cuda:N".
    seed: makes requests without a seed reproducible in order of arrival; None draws fresh entropy.
    num_threads: intra-op threads of the engine's own thread; None leaves torch's setting alone.
    max_model_len: longest prompt + output, in tokens; None is the least of model and KV pool.
    max_num_seqs: sequences that run at once.  max_num_batched_tokens: tokens computed per step.
    max_queued_requests: accepted requests that may wait before `submit` raises Overloaded.
    block_size: tokens per KV block; None asks the backend.  num_kv_blocks: size of the KV pool;
    None takes `kv_memory_fraction` of the memory that is free after loading (a quarter on a CPU,
    and there at most 4 GiB; 0.85 on a GPU), never more than max_num_seqs x max_model_len needs.
    event_buffer_size: batches of KV events kept for replay and slow subscribers; 0 switches KV events off.
    kernels: "auto", "native", "torch" or "flash".
    default_sampling: used for what a request leaves open.  generation_config: whether the
    checkpoint's own generation_config.json comes after that.
    """

    model_path: str
    served_model_name: str | None = None
    aliases: tuple[str, ...] = ()
    role: EngineRole = EngineRole.AGGREGATED
    dtype: str = "auto"
    quantization: str | None = None
    device: str = "auto"
    tensor_parallel_size: int = 1
    seed: int | None = None
    num_threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queued_requests: int = 4096
    block_size: int | None = None
    num_kv_blocks: int | None = None
    kv_memory_fraction: float | None = None
    enable_prefix_cache: bool = True
    event_buffer_size: int = 10000
    kernels: str = "auto"
    default_sampling: SamplingParams = SamplingParams()
    generation_config: bool = True

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, _DTYPES)
        _check_choice("kernels", self.kernels, _KERNELS)
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_queued_requests"):
            _check_positive(name, getattr(self, name))
        for name in ("num_threads", "max_model_len", "block_size", "num_kv_blocks"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        size = self.event_buffer_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise InvalidArgument(f"event_buffer_size must be an integer of at least 0, not {size!r}")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise InvalidArgument(
                f"max_num_seqs {self.max_num_seqs} exceeds max_num_batched_tokens {self.max_num_batched_tokens}: a step "
                "computes at least one token for each running sequence; lower the first or raise the second"
            )
        if self.kv_memory_fraction is not None and not 0 < self.kv_memory_fraction <= 1:
            raise InvalidArgument(f"kv_memory_fraction must be in (0, 1], not {self.kv_memory_fraction!r}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise InvalidArgument(f"seed must be between 0 and 2**64 - 1, not {self.seed!r}")
        self._refuse_unsupported()

    def _refuse_unsupported(self) -> None:
        if self.role != EngineRole.AGGREGATED:
            raise UnsupportedFeature(f"role {str(self.role)!r} is not supported yet; use role='aggregated'")
        if self.quantization not in (None, "int8"):
            raise UnsupportedFeature(f"quantization {self.quantization!r} is not supported; use 'int8' or None")
        if self.tensor_parallel_size != 1:
            raise UnsupportedFeature(f"tensor_parallel_size {self.tensor_parallel_size} is not supported yet; use 1")

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls))


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidArgument(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgument(f"{name} must be a positive integer, not {value!r}")
