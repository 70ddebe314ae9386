"""`EngineConfig`: everything that can be set about an engine, in one frozen value."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from openengine.errors import InvalidArgument, UnsupportedFeature
from openengine.service_types import EngineRole
from openengine.types import SamplingParams
from openengine.validation import checked_type

__all__ = ["EngineConfig"]

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,4})?")
_KERNELS = ("auto", "native", "torch", "flash")

_LEAST = {"event_buffer_size": 0, "max_model_len": 2}  # a prompt and its output; all others from 1 on
_REQUIRED = ("event_buffer_size", "max_num_seqs", "max_queued_requests", "tensor_parallel_size", "guide_max_bytes")
_MAX_GUIDE_TIMEOUT_S = 3600
# Far above any use, and low enough that no table of that size brings the process down.
_LIMITS = {
    "max_num_seqs": 1 << 16,
    "max_num_batched_tokens": 1 << 24,
    "max_queued_requests": 1 << 31,
    "event_buffer_size": 1 << 31,
    "tensor_parallel_size": 1 << 10,
    "num_threads": 1 << 12,
    "max_model_len": 1 << 31,
    "block_size": 1 << 16,
    "num_kv_blocks": 1 << 48,
    "guide_max_bytes": 1 << 30,
}
_DECODER_STEP, _ENCODER_STEP = 512, 2048  # tokens; an encoder gains nothing from more, and its caches lose


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine; `None` lets the engine choose from the model and the machine.

    model_path: a directory of safetensors, a .gguf file, or a hub id.
    served_model_name, aliases: further names that requests may use for the model.
    dtype: "auto" is bfloat16 where the device multiplies it natively, else float32.
    quantization: "int8" multiplies in 8-bit integers on a CPU, weights and activations; None as `dtype` says.
    device: "auto", "cpu", "cuda" or "cuda:N".
    seed: makes requests without a seed reproducible in order of arrival; None draws fresh entropy.
    num_threads: intra-op threads of the engine's own thread, at most as many as there are CPUs for this process; None
    leaves torch's setting alone.
    max_model_len: longest prompt + output, in tokens; None is the least of model and KV pool.
    max_num_seqs: sequences that run at once, of a model with a KV cache.  max_num_batched_tokens: tokens computed per
    step; None is 512, or max_num_seqs if that is more, and 2048 for an encoder, whose items are computed whole.
    max_queued_requests: accepted requests that may wait before `submit` raises Overloaded.
    block_size: tokens per KV block; None asks the backend.  num_kv_blocks: size of the KV pool; None takes
    kv_memory_fraction of the memory that is free after loading (None: a quarter on a CPU, and there at most 4 GiB; 0.85
    on a GPU), never more than max_num_seqs x max_model_len needs.
    event_buffer_size: batches of KV events kept for replay and slow subscribers; 0 switches KV events off.
    kernels: "auto", "native", "torch" or "flash".
    default_sampling: used for what a request leaves open.  generation_config: whether the
    checkpoint's own generation_config.json comes after that.
    score_template: how a decoder is asked about a query and a document, where its files do not say: a known template
    ("qwen3-reranker") or a text with {query}, {document} and perhaps {instruction}, which a causal model answers by
    "yes" or "no" and a classification head scores.
    guide_timeout_s, guide_max_bytes: limits of compiling one guide, and of its source in UTF-8.
    guide_jump_ahead: append the tokens that a guide forces without a step for each; changes no output.
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
    max_num_batched_tokens: int | None = None
    max_queued_requests: int = 4096
    block_size: int | None = None
    num_kv_blocks: int | None = None
    kv_memory_fraction: float | None = None
    enable_prefix_cache: bool = True
    event_buffer_size: int = 10000
    kernels: str = "auto"
    default_sampling: SamplingParams = SamplingParams()
    generation_config: bool = True
    score_template: str | None = None
    guide_timeout_s: float = 10.0
    guide_max_bytes: int = 512 * 1024
    guide_jump_ahead: bool = True

    def __post_init__(self) -> None:
        for name in ("model_path", "device"):
            checked_type(name, getattr(self, name), str)
        for name in ("served_model_name", "quantization", "score_template"):
            checked_type(name, getattr(self, name), str | None)
        for name in ("enable_prefix_cache", "generation_config", "guide_jump_ahead"):
            checked_type(name, getattr(self, name), bool)
        checked_type("default_sampling", self.default_sampling, SamplingParams)
        if not isinstance(self.aliases, (tuple, list)) or not all(isinstance(alias, str) for alias in self.aliases):
            raise InvalidArgument(f"aliases must be a sequence of str, not {self.aliases!r:.80}")
        if self.served_model_name is not None:
            _check_name("served_model_name", self.served_model_name)
        for alias in self.aliases:
            _check_name("aliases", alias)
        if not _DEVICE.fullmatch(self.device):
            raise InvalidArgument(f"device {self.device!r:.80} is unknown; use 'auto', 'cpu', 'cuda' or 'cuda:N'")
        if self.dtype == "int8":
            raise InvalidArgument(
                "dtype 'int8' is no dtype to compute in; use quantization='int8', and dtype for the rest"
            )
        _check_choice("dtype", self.dtype, _DTYPES)
        _check_choice("kernels", self.kernels, _KERNELS)
        _check_choice("role", self.role, tuple(EngineRole))
        self._check_numbers()
        self._refuse_unsupported()

    def _check_numbers(self) -> None:
        for name, high in _LIMITS.items():
            if getattr(self, name) is not None or name in _REQUIRED:
                _check_integer(name, getattr(self, name), low=_LEAST.get(name, 1), high=high)
        if self.seed is not None:
            _check_integer("seed", self.seed, low=0, high=2**64 - 1)
        fraction = self.kv_memory_fraction
        is_number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
        if fraction is not None and not (is_number and 0 < fraction <= 1):
            raise InvalidArgument(f"kv_memory_fraction must be a number in (0, 1], not {fraction!r:.80}")
        if fraction is not None and self.num_kv_blocks is not None:
            raise InvalidArgument(
                f"num_kv_blocks {self.num_kv_blocks} and kv_memory_fraction {fraction} both size the KV pool; leave one out"
            )
        timeout = self.guide_timeout_s
        is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        if not (is_number and 0 < timeout <= _MAX_GUIDE_TIMEOUT_S):
            raise InvalidArgument(
                f"guide_timeout_s must be a number in (0, {_MAX_GUIDE_TIMEOUT_S}], not {timeout!r:.80}"
            )
        count = self.default_sampling.num_sequences
        if isinstance(count, int) and count > self.max_num_seqs:
            raise InvalidArgument(
                f"default_sampling: num_sequences {count} exceeds max_num_seqs {self.max_num_seqs}; lower the first or raise "
                "the second"
            )
        if self.max_num_batched_tokens is not None and self.max_num_seqs > self.max_num_batched_tokens:
            raise InvalidArgument(
                f"max_num_seqs {self.max_num_seqs} exceeds max_num_batched_tokens {self.max_num_batched_tokens}: a step "
                "computes at least one token for each running sequence; lower the first or raise the second"
            )

    def _refuse_unsupported(self) -> None:
        if self.role != EngineRole.AGGREGATED:
            raise UnsupportedFeature(f"role {str(self.role)!r} is not supported yet; use role='aggregated'")
        if self.quantization not in (None, "int8"):
            raise UnsupportedFeature(f"quantization {self.quantization!r} is not supported; use 'int8' or None")
        if self.tensor_parallel_size != 1:
            raise UnsupportedFeature(f"tensor_parallel_size {self.tensor_parallel_size} is not supported yet; use 1")

    def tokens_per_step(self, *, is_encoder: bool) -> int:
        """`max_num_batched_tokens`, chosen where it was left open."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return _ENCODER_STEP if is_encoder else max(_DECODER_STEP, self.max_num_seqs)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls))


def _check_name(field: str, name: str) -> None:
    if not (name.strip() and name.isprintable()):
        raise InvalidArgument(f"{field}: {name!r:.80} is empty or not printable; give a name or leave it out")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgument(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r:.80}")


def _check_integer(name: str, value: object, *, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        limit = f"of at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidArgument(f"{name} must be an integer {limit}, not {value!r:.80}")
