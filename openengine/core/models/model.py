"""`Model`: what decoders and encoders share: modules with weights, and how a loader fills them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from openengine.core.heads import Pooling, TaskHead
from openengine.core.models.config import ModelConfig
from openengine.core.models.encoder_config import EncoderConfig
from openengine.ops.embedding import Embedding
from openengine.ops.linear import Linear, PackedPart
from openengine.ops.native import NativeLibrary
from openengine.ops.norm import LayerNorm, RmsNorm

__all__ = ["Model", "Module"]


class Module(Protocol):
    """Weights and what is computed with them."""

    @property
    def num_bytes(self) -> int: ...

    def tensors(self) -> Iterator[tuple[str, Tensor | PackedPart]]: ...

    def finish(self) -> None: ...


_Module = TypeVar("_Module", bound=Module)


class Model:
    """Modules with weights, filled through `tensors`; then `finish` is called once. Subclasses compute with them.

    Weights are allocated on construction, uninitialized. Names are those of Hugging Face checkpoints without what
    `PREFIX` matches. `quantization` is that of the matrix products, but for a classifier's few; `native` holds compiled kernels
    to use where they serve.

    What a head needs is in `task_head`, but for that of a causal model, which is `head` and has `logits`; a head over
    the vocabulary is in `head` in either case. A model with `head_kind` "none" has neither.
    """

    PREFIX = r"((model|transformer|language_model)\.)*"
    IGNORED: tuple[str, ...] = ()  # tensors that are stored but not needed, as patterns of names
    HEADS: tuple[str, ...] = ()  # tensors of any head, as patterns
    RENAMED: tuple[tuple[str, str], ...] = ()  # patterns of older names, and what stands for them now
    EMBED, HEAD = "embed_tokens", "lm_head"  # the tables of tokens that go in and of those that come out
    TIED_BIAS = ""  # the bias of a head whose weight is the table of tokens that go in

    def __init__(
        self,
        config: ModelConfig | EncoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantization: str | None = None,
        native: NativeLibrary | None = None,
    ) -> None:
        self.config = config
        self.windows = config.windows
        self.head_kind = config.head_kind
        self.dtype = dtype
        self.device = device
        self.quantization = quantization
        self.head: Linear | None = None
        self.task_head: TaskHead | None = None
        self._native = native
        self._modules: list[Module] = []

    @classmethod
    def ignored(cls, config: ModelConfig | EncoderConfig) -> tuple[str, ...]:
        """Patterns of the tensors that a checkpoint with this config may hold and that are not needed."""
        return cls.IGNORED

    @property
    def num_bytes(self) -> int:
        """Memory the weights take."""
        return sum(module.num_bytes for module in self._modules)

    @property
    def matrix_kernels(self) -> str:
        """What multiplies: "native", "onednn" or "torch"."""
        return ", ".join(sorted({linear.weights.kernels for linear in self.linears()}))

    def tensors(self) -> Iterator[tuple[str, Tensor | PackedPart]]:
        """Every stored tensor as `(name, view)`; a view has the stored shape, and writing it sets the weight.

        After `finish` they are there to be read.
        """
        for module in self._modules:
            yield from module.tensors()

    def linears(self) -> Iterator[Linear]:
        """Every matrix product, the head over the vocabulary last."""
        yield from (module for module in self._modules if isinstance(module, Linear) and module is not self.head)
        if self.head is not None:
            yield self.head

    def finish(self) -> None:
        """Derive what depends on the stored values; call once, after all are in."""
        for module in self._modules:
            module.finish()

    def _tables(self, *, tied: bool, head: bool, bias: bool = False) -> Callable[[Tensor], Tensor]:
        """The embedding of tokens: i64[T] -> a fresh [T, D]. With `head` also the head over the vocabulary.

        With `tied`, one weight is both.
        """
        width, rows = self.config.hidden_size, self.config.vocab_size
        if head:
            self.head = self._linear(width, {self.EMBED if tied else self.HEAD: rows}, bias=bias, table=tied)
            if tied:
                return self.head.rows
        return self._embedding(self.EMBED, rows)

    def _classifier(
        self,
        name: str,
        *,
        pooling: Pooling | None,
        bias: bool = True,
        dense: Linear | None = None,
        activation: Callable[[Tensor], Tensor] | None = None,
        norm: LayerNorm | None = None,
    ) -> TaskHead:
        num_labels = self.config.num_labels
        out = self._linear(self.config.hidden_size, {name: num_labels}, bias=bias, quantized=False)
        return TaskHead(pooling, num_labels, out, dense, activation, norm)

    def _rms_norm(self, name: str, *, offset: float = 0.0) -> RmsNorm:
        width, eps = self.config.hidden_size, self.config.norm_eps
        return self._add(RmsNorm(name, width, eps, offset=offset, device=self.device, native=self._native))

    def _layer_norm(self, name: str, *, bias: bool = True) -> LayerNorm:
        width, eps = self.config.hidden_size, self.config.norm_eps
        return self._add(LayerNorm(name, width, eps, bias=bias, device=self.device, native=self._native))

    def _embedding(self, name: str, rows: int) -> Embedding:
        return self._add(Embedding(name, rows, self.config.hidden_size, dtype=self.dtype, device=self.device))

    def _linear(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        transposed: bool = False,
        table: bool = False,
        gated: bool = False,
        quantized: bool = True,
    ) -> Linear:
        return self._add(
            Linear.empty(
                in_features,
                parts,
                bias=bias,
                transposed=transposed,
                table=table,
                gated=gated,
                dtype=self.dtype,
                device=self.device,
                quantization=self.quantization if quantized else None,
                native=self._native,
            )
        )

    def _add(self, module: _Module) -> _Module:
        self._modules.append(module)
        return module
