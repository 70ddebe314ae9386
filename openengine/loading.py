"""From a configuration to everything an engine is made of that comes from a checkpoint.

Weights and tokenizer are read in the caller's thread, the digest of the files is computed beside them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from openengine.core.config import EngineConfig
from openengine.core.loader import Checkpoint, load_model, open_checkpoint
from openengine.core.memory import is_out_of_memory, one_openmp_thread, usable_cpus
from openengine.core.models import Model
from openengine.core.runner import KvPoolSize, size_kv_pool
from openengine.core.task_profile import TaskProfile, read_task_profile
from openengine.core.tokenizer import Tokenizer
from openengine.errors import InvalidArgument, UnsupportedFeature
from openengine.ops.attention import AttentionBackend, select_backend
from openengine.ops.encoder_attention import EncoderAttention, select_encoder_attention
from openengine.ops.kv_cache import KvCache, KvSpec
from openengine.ops.linear import preferred_dtype
from openengine.progress import check_progress, progress_bar

__all__ = ["LoadedModel", "attributes", "load", "start_line"]

_log = logging.getLogger("openengine")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything an engine is made of that comes from a checkpoint. `names`: those requests may use, canonical first.

    `backend` is the attention of the model's kind. An encoder has no KV cache, hence no `spec` and no `pool`. `max_len`
    bounds the tokens of a task's item.
    """

    model: Model
    tokenizer: Tokenizer
    backend: AttentionBackend | EncoderAttention
    spec: KvSpec | None
    pool: KvPoolSize | None
    revision: str
    names: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    generation_config: Mapping[str, Any]
    load_seconds: float
    profile: TaskProfile
    device: torch.device
    dtype: torch.dtype
    max_len: int


def load(config: EngineConfig, progress: bool | None) -> LoadedModel:
    """Read a checkpoint; tokenizer and digest are computed beside the weights."""
    check_progress(progress)
    started = time.monotonic()
    _check_threads(config.num_threads)
    checkpoint = open_checkpoint(config.model_path, progress=bool(progress))
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    model_config = checkpoint.config
    profile = read_task_profile(checkpoint)
    if config.score_template is not None and (profile.is_encoder or not profile.scores_pairs):
        raise InvalidArgument(f"score_template is for decoders that score, not for {model_config.architecture}")
    spec = None
    if profile.is_encoder:
        _check_encoder_options(config, model_config.max_position_embeddings)
        backend = select_encoder_attention(device, dtype, config.kernels, head_dim=model_config.head_dim)
    else:
        backend = select_backend(
            device, dtype, config.kernels, head_dim=model_config.head_dim, block_size=config.block_size
        )
        spec = KvSpec(model_config.num_layers, model_config.num_kv_heads, model_config.head_dim, dtype, device)
    revision = _InThread(lambda: checkpoint.revision)
    with (
        torch.inference_mode(),
        one_openmp_thread(),
        progress_bar(progress, desc=f"loading {checkpoint.path.name}", unit="B") as bar,
        _weights_fit(checkpoint.path.name),
    ):
        model = load_model(
            checkpoint,
            dtype=dtype,
            device=device,
            backend=backend,
            max_model_len=config.max_model_len,
            quantization=config.quantization,
            kernels=config.kernels,
            as_embedder=profile.head_kind != model_config.head_kind,
            progress=bar,
        )
    if model.quantization == "int8" and "native" not in model.matrix_kernels:
        _log.warning(
            "int8 runs without native kernels here, slower than no quantization; leave quantization out for speed"
        )
    tokenizer = checkpoint.load_tokenizer()
    longest = model_config.max_position_embeddings
    pool = None if spec is None else size_kv_pool(config, spec, longest, backend.block_size)
    wanted = config.max_model_len or profile.max_length or longest
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        backend=backend,
        spec=spec,
        pool=pool,
        revision=revision.result(),
        names=_model_names(config, checkpoint),
        eos_token_ids=_eos_token_ids(checkpoint, tokenizer),
        generation_config=checkpoint.generation_config,
        load_seconds=time.monotonic() - started,
        profile=profile,
        device=device,
        dtype=dtype,
        max_len=min(wanted, longest) if pool is None else min(wanted, pool.max_model_len),
    )


@contextmanager
def _weights_fit(name: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as exc:
        if not is_out_of_memory(exc):
            raise
        raise InvalidArgument(
            f"the weights of {name} do not fit into the memory that this process may still take; free memory or raise its "
            "limit, or choose dtype='bfloat16' or quantization='int8'"
        ) from exc


def _check_threads(num_threads: int | None) -> None:
    """More threads than CPUs wait for each other, and a pool that the system refuses would end the process."""
    if num_threads is not None and num_threads > usable_cpus():
        raise InvalidArgument(
            f"num_threads {num_threads} exceeds the number of CPUs that this process may use, {usable_cpus()}; lower it or leave it out"
        )


def _check_encoder_options(config: EngineConfig, longest: int) -> None:
    for name in ("block_size", "num_kv_blocks", "kv_memory_fraction"):
        if getattr(config, name) is not None:
            raise InvalidArgument(f"{name} is for models with a KV cache; an encoder has none, leave it out")
    if config.max_model_len is not None and config.max_model_len > longest:
        raise InvalidArgument(
            f"max_model_len {config.max_model_len} exceeds the {longest} tokens that the model takes; lower it"
        )


def attributes(config: EngineConfig, loaded: LoadedModel) -> dict[str, Any]:
    """What `EngineInfo.attributes` says of a loaded model, beside what the contract has fields for."""
    pool = loaded.pool
    facts = {
        "architecture": loaded.model.config.architecture,
        "device": str(loaded.device),
        "num_threads": config.num_threads or torch.get_num_threads(),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "kernels": loaded.backend.name,
        "matrix_kernels": loaded.model.matrix_kernels,
        "quantization": loaded.model.quantization,
        "weight_bytes": loaded.model.num_bytes,
    }
    if pool is not None:
        facts |= {
            "kv_bytes": KvCache.bytes_per_block(loaded.spec, pool.block_size) * pool.num_blocks,
            "kv_tokens": pool.num_tokens,
            "kv_block_size": pool.block_size,
        }
    longest = pool.max_model_len if loaded.profile.generates else loaded.max_len
    return {**facts, "max_model_len": longest, "load_seconds": round(loaded.load_seconds, 3)}


def start_line(facts: Mapping[str, Any]) -> str:
    cache = ""
    if "kv_tokens" in facts:
        cache = f"KV cache of {facts['kv_tokens']} tokens ({facts['kv_bytes'] / 2**20:.0f} MiB), "
    arithmetic = f"{facts['quantization']} and {facts['dtype']}" if facts["quantization"] else facts["dtype"]
    return (
        f"{facts['architecture']} in {arithmetic} on {facts['device']} ({facts['kernels']} kernels): "
        f"{facts['weight_bytes'] / 2**20:.0f} MiB of weights, {cache}context {facts['max_model_len']}, "
        f"loaded in {facts['load_seconds']:.1f} s"
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise InvalidArgument(f"device {name!r} is unknown; use 'auto', 'cpu', 'cuda' or 'cuda:N'") from exc
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedFeature(f"device {name!r} is not supported; use 'cpu' or 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedFeature(f"device {name!r}: torch sees no GPU here; use device='cpu'")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return preferred_dtype(device)
    return getattr(torch, name)


def _model_names(config: EngineConfig, checkpoint: Checkpoint) -> tuple[str, ...]:
    names = (config.model_path, config.served_model_name, *config.aliases, checkpoint.path.name)
    return tuple(dict.fromkeys(name for name in names if name))


def _eos_token_ids(checkpoint: Checkpoint, tokenizer: Any) -> tuple[int, ...]:
    """The checkpoint's own list; where it has none, the tokenizer's EOS token."""
    if checkpoint.eos_token_ids:
        return checkpoint.eos_token_ids
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


class _InThread:
    """Runs `function` beside the caller; `result()` waits for it and raises what it raised."""

    def __init__(self, function: Any) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function: Any) -> None:
        try:
            self._value = function()
        except BaseException as exc:
            self._error = exc

    def result(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value
