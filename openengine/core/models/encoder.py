"""The blocks encoders are made of, and `EncoderModel`, which runs them over whole items of any lengths.

    tokens T ─ embed + positions + types ─ norm ─ layer … layer ─ last layer's attention ─┐ rows that are wanted, R
                                                                                          └ its MLP ─ hidden [R, D]

`EncoderModel` is the encoder of 2018: learned positions, and layers that normalize the sum of input and branch. Families
of that kind differ in names, which they declare; others override what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from openengine.core.heads import TaskHead
from openengine.core.models.encoder_config import EncoderConfig
from openengine.core.models.layers import Angles, Mlp
from openengine.core.models.model import Model
from openengine.ops.activation import ACTIVATIONS
from openengine.ops.batch import EncoderBatch
from openengine.ops.linear import Linear
from openengine.ops.native import NativeLibrary
from openengine.ops.norm import LayerNorm
from openengine.ops.rope import Rope

if TYPE_CHECKING:
    from openengine.ops.encoder_attention import EncoderAttention

__all__ = ["EncoderModel", "HeadNames", "LayerNames", "SelfAttention"]


@dataclass(slots=True)
class SelfAttention:
    """Fused projection, optional rotation, attention. The output projection is left to the layer."""

    config: EncoderConfig
    attention: EncoderAttention
    window: int | None
    qkv: Linear

    def __call__(self, x: Tensor, batch: EncoderBatch, angles: Angles | None, distance_bias: Tensor | None) -> Tensor:
        """x [T, D] -> [T, D]."""
        config = self.config
        q, k, v = self.qkv(x).view(x.shape[0], 3, config.num_heads, config.head_dim).unbind(1)
        return self.attention.forward(
            q,
            k,
            v,
            batch,
            scale=config.head_dim**-0.5,
            window=self.window,
            distance_bias=distance_bias,
            angles=angles,
        )


@dataclass(slots=True)
class PostNormLayer:
    """Attention and MLP, each added to its input and the sum normalized."""

    attention: SelfAttention
    out: Linear
    attention_norm: LayerNorm
    mlp: Mlp
    mlp_norm: LayerNorm

    def __call__(self, x: Tensor, batch: EncoderBatch, distance_bias: Tensor | None, rows: Tensor | None) -> Tensor:
        """x [T, D], which is overwritten -> [T, D], or [R, D] of the `rows` i64[R] that continue after attention."""
        attended = self.attention(x, batch, None, distance_bias)
        if rows is not None:
            x, attended = x[rows], attended[rows]
        x = self.attention_norm.add(x, self.out(attended))
        return self.mlp_norm.add(x, self.mlp(x))


class PlaceEmbedding:
    """Learned positions, and token types where there are any, summed beforehand into one table.

    `embedding(rows)` is [T, D], where row `type * num_positions + position` is wanted for each token.
    """

    __slots__ = ("_positions", "_types", "positions_name", "table", "types_name")

    def __init__(
        self,
        positions_name: str,
        types_name: str,
        *,
        num_positions: int,
        num_types: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.positions_name = positions_name
        self.types_name = types_name
        self._positions = torch.empty(num_positions, width, dtype=dtype, device=device)
        self._types = torch.empty(num_types, width, dtype=dtype, device=device)
        self.table = self._positions  # until `finish`

    @property
    def num_bytes(self) -> int:
        own = 0 if self.table is self._positions else self.table.nbytes
        return self._positions.nbytes + self._types.nbytes + own

    def __call__(self, rows: Tensor) -> Tensor:
        return F.embedding(rows, self.table)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors as `(name, tensor)`."""
        yield f"{self.positions_name}.weight", self._positions
        if len(self._types):
            yield f"{self.types_name}.weight", self._types

    def finish(self) -> None:
        """Add every type to every position."""
        if len(self._types):
            sums = self._types.float()[:, None] + self._positions.float()
            self.table = sums.flatten(0, 1).to(self._positions.dtype)


class LayerNames(NamedTuple):
    """What a family calls the parts of a layer, after the name of the list and the layer's number."""

    layers: str
    qkv: tuple[str, str, str]
    out: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str


class HeadNames(NamedTuple):
    """What a family calls the parts of its heads. A vocabulary activation of None is that of the config."""

    dense: str
    activation: Callable[[Tensor], Tensor]
    out: str
    vocabulary_dense: str
    vocabulary_activation: str | None
    vocabulary_norm: str


class EncoderModel(Model):
    """An encoder: every token of an item sees all of them, or those near it.

    `max_length` is the greatest length in tokens of an item that will be run. With `tied`, the head over the vocabulary
    is also the table of token embeddings.
    """

    PREFIX = ""
    IGNORED = (r"embeddings\.position_ids", r"pooler\..*", r"cls\.seq_relationship\..*")
    RENAMED = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))
    EMBED, EMBED_NORM = "embeddings.word_embeddings", "embeddings.LayerNorm"
    LAYER_NAMES: LayerNames
    HEAD_NAMES: HeadNames
    config: EncoderConfig

    def __init__(
        self,
        config: EncoderConfig,
        backend: EncoderAttention,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_length: int,
        tied: bool,
        quantization: str | None = None,
        native: NativeLibrary | None = None,
    ) -> None:
        super().__init__(config, dtype=dtype, device=device, quantization=quantization, native=native)
        self._backend = backend
        self._max_length = max_length
        self._ropes = [Rope(rope, max_length, device=device) for rope in config.ropes]
        self._distance_bias: Tensor | None = None  # set by the family that has one
        self.embed = self._tables(tied=tied, head=self.head_kind == "masked_lm", bias=config.decoder_bias)
        self.places = self._place_embedding() if config.num_positions else None
        self.embed_norm = self._layer_norm(self.EMBED_NORM, bias=config.norm_bias)
        self.layers = [self._layer(index) for index in range(config.num_layers)]
        self.task_head = self._task_head()

    def forward(self, batch: EncoderBatch, rows: Tensor | None = None) -> Tensor:
        """Run the items; the hidden states [T, D], or those of the tokens `rows` i64[R] alone, [R, D]."""
        x = self._embed(batch)
        for layer in self.layers[:-1]:
            x = layer(x, batch, self._distance_bias, None)
        return self.layers[-1](x, batch, self._distance_bias, rows)

    def _embed(self, batch: EncoderBatch) -> Tensor:
        embedded = self.embed(batch.input_ids)
        return self.embed_norm.add(embedded, None if self.places is None else self.places(self._place_rows(batch)))

    def _place_rows(self, batch: EncoderBatch) -> Tensor:
        """The row of the place table for each token, i64[T]."""
        config = self.config
        rows = batch.positions
        if config.pad_token_id is not None:
            # Padding tokens within a text take the row before the first, and no place.
            counts = (batch.input_ids != config.pad_token_id).long()
            before = counts.cumsum(0)
            first = batch.cu_seqlens[:-1].long()
            lengths = batch.cu_seqlens.diff()
            start = (before[first] - counts[first]).repeat_interleave(lengths, output_size=batch.num_tokens)
            rows = (before - start) * counts + config.pad_token_id
        if batch.token_types is not None and config.num_token_types > 1:
            rows = rows + batch.token_types * config.num_positions
        return rows

    def _place_embedding(self) -> PlaceEmbedding:
        config = self.config
        return self._add(
            PlaceEmbedding(
                "embeddings.position_embeddings",
                "embeddings.token_type_embeddings",
                num_positions=config.num_positions,
                num_types=config.num_token_types,
                width=config.hidden_size,
                dtype=self.dtype,
                device=self.device,
            )
        )

    def _layer(self, index: int) -> PostNormLayer:
        names, width, inner = self.LAYER_NAMES, self.config.hidden_size, self.config.intermediate_size
        prefix = f"{names.layers}.{index}"
        return PostNormLayer(
            attention=self._self_attention(index, {f"{prefix}.{name}": width for name in names.qkv}),
            out=self._linear(width, {f"{prefix}.{names.out}": width}, bias=True),
            attention_norm=self._layer_norm(f"{prefix}.{names.attention_norm}"),
            mlp=Mlp(
                self._linear(width, {f"{prefix}.{names.up}": inner}, bias=True),
                self._linear(inner, {f"{prefix}.{names.down}": width}, bias=True),
                self.config.activation,
            ),
            mlp_norm=self._layer_norm(f"{prefix}.{names.mlp_norm}"),
        )

    def _self_attention(self, index: int, parts: dict[str, int]) -> SelfAttention:
        config = self.config
        qkv = self._linear(config.hidden_size, parts, bias=config.attention_bias)
        return SelfAttention(config, self._backend, config.windows[index], qkv)

    def _task_head(self) -> TaskHead | None:
        config, names = self.config, self.HEAD_NAMES
        if self.head_kind == "token_classification":
            return self._classifier("classifier", pooling=None)
        if self.head_kind == "sequence_classification":
            dense = self._dense(names.dense)
            return self._classifier(names.out, pooling="cls", dense=dense, activation=names.activation)
        if self.head_kind == "masked_lm":
            activation = ACTIVATIONS[names.vocabulary_activation or config.activation]
            dense, norm = self._dense(names.vocabulary_dense), self._layer_norm(names.vocabulary_norm)
            return TaskHead(None, config.vocab_size, self.head, dense, activation, norm)
        return None

    def _dense(self, name: str, *, bias: bool = True) -> Linear:
        width = self.config.hidden_size
        return self._linear(width, {name: width}, bias=bias, quantized=False)
