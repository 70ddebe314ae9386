"""Filling models from checkpoints.

    path or hub id ─ open_checkpoint ─ Checkpoint (config, tokens, file list; no weights) ─ load_model ─ Model

Every tensor of a checkpoint is used or knowingly ignored, and every weight of a model is filled: anything else is an
error that lists the names. Weights are copied tensor by tensor into their final place, cast on the way.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from openengine.core.checkpoint import DTYPES, Checkpoint, WeightSource, listed, open_checkpoint
from openengine.core.models import CausalLM, EncoderConfig, Model, ModelConfig, model_class
from openengine.core.models.native_forward import NativeForward
from openengine.errors import InvalidArgument, UnsupportedFeature
from openengine.ops.linear import PackedPart
from openengine.ops.native import native_library

if TYPE_CHECKING:
    from openengine.ops.attention import AttentionBackend
    from openengine.ops.encoder_attention import EncoderAttention

__all__ = ["Checkpoint", "WeightSource", "load_model", "open_checkpoint"]

logger = logging.getLogger(__name__)


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend | EncoderAttention,
    max_model_len: int | None = None,
    quantization: str | None = None,
    kernels: str = "auto",
    as_embedder: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Build the model and fill it; memory peaks near its final size.

    The result is a `CausalLM` for a decoder's config, an `EncoderModel` for an encoder's, and `backend` the attention
    of that kind. With `as_embedder` it has no head, whatever the config says, and a stored head is left out.

    `quantization` is None or "int8": weights are then quantized row by row as they are read. `kernels` is "torch", or
    anything else to use compiled kernels where they are there and serve.

    `max_model_len` is the greatest sequence length in tokens to be run (default: the model's own); frequencies of
    dynamic and longrope rotary embeddings depend on it. `progress(done, total)` is called with bytes filled.

    Raises:
        InvalidArgument: the checkpoint lacks a tensor, has one too many, or one of another shape; or
            `max_model_len` exceeds the table of a model with learned positions.
        UnsupportedFeature: tensors are stored in a type that is not supported.
    """
    config = replace(checkpoint.config, head_kind="none", num_labels=0) if as_embedder else checkpoint.config
    if dtype not in DTYPES.values():
        raise UnsupportedFeature(f"dtype {dtype} is not supported; supported: {', '.join(DTYPES)}")
    max_length = max_model_len or config.max_position_embeddings
    if not config.ropes and max_length > config.max_position_embeddings:
        raise InvalidArgument(
            f"max_model_len {max_length} exceeds the {config.max_position_embeddings} positions this model has learned"
        )
    kind = model_class(config)
    with checkpoint.weights() as stored:
        sources = _canonical_names(stored, kind, (*kind.ignored(config), *(kind.HEADS if as_embedder else ())))
        tied = _is_tied(sources, kind, config)
        _place_head(sources, kind, tied)
        _check_size(checkpoint.path, sources, config)
        model = kind(
            config,
            backend,
            dtype=dtype,
            device=device,
            max_length=max_length,
            tied=tied,
            quantization=quantization,
            native=None if kernels == "torch" or device.type != "cpu" else native_library(),
        )
        destinations = dict(model.tensors())
        _check(checkpoint.path, sources, destinations)
        done, total = 0, sum(tensor.nbytes for tensor in destinations.values())
        for name, destination in destinations.items():
            if isinstance(destination, PackedPart):
                destination.fill(sources[name].chunks())
            else:
                sources[name].copy_to(destination)
            done += destination.nbytes
            if progress is not None:
                progress(done, total)
    model.finish()
    if isinstance(model, CausalLM) and NativeForward.serves(model):
        model.native_forward = NativeForward(model)
    return model


def _canonical_names(
    stored: Mapping[str, WeightSource], kind: type[Model], ignored: tuple[str, ...]
) -> dict[str, WeightSource]:
    """Sources by the model's own names: without the prefixes that wrappers add, and without what is not needed."""
    sources: dict[str, WeightSource] = {}
    for name, source in stored.items():
        short = re.sub(f"^{kind.PREFIX}", "", name)
        for pattern, now in kind.RENAMED:
            short = re.sub(pattern, now, short)
        if any(re.fullmatch(pattern, short) for pattern in ignored):
            continue
        if short in sources:
            raise InvalidArgument(f"two tensors of the checkpoint stand for {short!r}; one of them is {name!r}")
        sources[short] = source
    return sources


def _is_tied(sources: Mapping[str, WeightSource], kind: type[Model], config: ModelConfig | EncoderConfig) -> bool:
    """Whether the head is the embedding: what is stored decides, the config's flag only warns."""
    if config.head_kind not in ("causal_lm", "masked_lm"):
        return False
    head, embed = sources.get(f"{kind.HEAD}.weight"), sources.get(f"{kind.EMBED}.weight")
    if head is None:
        if not config.tie_word_embeddings:
            logger.warning("the config says that head and embedding differ, but no head is stored: using the embedding")
        return True
    if embed is None or head.shape != embed.shape:
        return False
    if head.holds_same(embed):
        return True
    if config.tie_word_embeddings:
        logger.warning("the config says that the head is the embedding, but a different head is stored: using the head")
    return False


def _place_head(sources: dict[str, WeightSource], kind: type[Model], tied: bool) -> None:
    """Name the parts of the head over the vocabulary after the weight that holds them."""
    head, shared = f"{kind.HEAD}.bias", kind.TIED_BIAS
    # Of two biases, the head's own counts where it has a weight of its own, else the other.
    order = (head, shared) if f"{kind.HEAD}.weight" in sources else (shared, head)
    biases = [source for name in order if (source := sources.pop(name, None)) is not None]
    if tied:
        sources.pop(f"{kind.HEAD}.weight", None)
    if biases:
        sources[f"{kind.EMBED if tied else kind.HEAD}.bias"] = biases[0]


def _check_size(path: Path, sources: Mapping[str, WeightSource], config: ModelConfig | EncoderConfig) -> None:
    """Refuse a config far larger than what is stored, before anything of that size is allocated."""
    wanted = config.num_values
    stored = sum(math.prod(source.shape) for source in sources.values())
    if wanted > 2 * stored + (1 << 20):
        raise InvalidArgument(
            f"the weights in {path} do not fit its config: it speaks of some {wanted} values, the files hold {stored}"
        )


def _check(path: Path, sources: Mapping[str, WeightSource], destinations: Mapping[str, Tensor | PackedPart]) -> None:
    problems = []
    if missing := [name for name in destinations if name not in sources]:
        problems.append(f"missing {listed(missing)}")
    if unexpected := [name for name in sources if name not in destinations]:
        problems.append(f"unexpected {listed(unexpected)}")
    wrong = [
        f"{name} {list(sources[name].shape)}, expected {list(tensor.shape)}"
        for name, tensor in destinations.items()
        if name in sources and tuple(sources[name].shape) != tuple(tensor.shape)
    ]
    if wrong:
        problems.append(f"of another shape than the config says {listed(wrong)}")
    if problems:
        raise InvalidArgument(f"the weights in {path} do not fit its config: {'; '.join(problems)}")
