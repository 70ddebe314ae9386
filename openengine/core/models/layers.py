"""The blocks decoders are made of, and `CausalLM`, which runs them over one flat batch.

    tokens T ─ embed ─ layer … layer ─ last layer's attention ─┐ rows whose logits are wanted, R
                                                               └ its MLP ─ norm ─ hidden [R, D] ─ head ─ logits [R, V]

A layer hands on the residual stream and the branch not yet added to it, so that the addition can be part of the next
norm. Families subclass `CausalLM` and say what a layer consists of; weights are tensors filled by the loader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from openengine.core.models.config import ModelConfig
from openengine.core.models.model import Model
from openengine.ops.batch import ForwardBatch
from openengine.ops.linear import Linear
from openengine.ops.native import NativeLibrary
from openengine.ops.norm import HeadNorm, LayerNorm, RmsNorm
from openengine.ops.rope import Rope

if TYPE_CHECKING:
    from openengine.core.models.native_forward import NativeForward
    from openengine.ops.attention import AttentionBackend

__all__ = ["Attention", "CausalLM", "DecoderLayer", "GatedMlp", "Mlp"]

Norm = RmsNorm | LayerNorm
Angles = tuple[Tensor, Tensor]


@dataclass(slots=True)
class Attention:
    """Fused projection, optional head norm, optional rotation, attention, output projection."""

    layer: int
    config: ModelConfig
    backend: AttentionBackend
    qkv: Linear
    out: Linear
    norm: HeadNorm | None = None

    def __call__(self, x: Tensor, batch: ForwardBatch, angles: Sequence[Angles]) -> Tensor:
        """x [T, D] -> [T, D]. `angles` holds those of each rotary embedding of the model, maybe none."""
        config = self.config
        sizes = (config.num_heads, config.num_kv_heads)
        heads = self.qkv(x).view(x.shape[0], -1, config.head_dim)
        if self.norm is None:
            q, k, v = heads.split_with_sizes((*sizes, config.num_kv_heads), 1)
        else:
            qk, v = heads.split_with_sizes((sum(sizes), config.num_kv_heads), 1)
            q, k = self.norm(qk).split_with_sizes(sizes, 1)
        attended = self.backend.forward(
            self.layer,
            q,
            k,
            v,
            batch,
            scale=config.attention_scale,
            window=config.windows[self.layer],
            softcap=config.attention_softcap,
            angles=angles[config.layer_ropes[self.layer]] if angles else None,
        )
        return self.out(attended)


class GatedMlp:
    """`down(activation(gate(x)) * up(x))`."""

    __slots__ = ("activation", "down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x, activation=self.activation))


class Mlp:
    """`down(activation(up(x)))`."""

    __slots__ = ("activation", "down", "up")

    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        self.up = up
        self.down = down
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.up(x, activation=self.activation))


@dataclass(slots=True)
class DecoderLayer:
    """Norm, attention, norm, MLP, each branch added to the residual; `*_out_norm` apply to a branch before that."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: GatedMlp | Mlp
    attention_out_norm: Norm | None = None
    mlp_out_norm: Norm | None = None

    def __call__(
        self,
        residual: Tensor,
        branch: Tensor | None,
        batch: ForwardBatch,
        angles: Sequence[Angles],
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """residual [T, D] is changed in place; `branch` is still to be added to it, as is the one returned.

        With `rows` i64[R] only those continue after attention, and both results are [R, D].
        """
        branch = self.attention(self.attention_norm.add(residual, branch), batch, angles)
        if rows is not None:
            residual, branch = residual[rows], branch[rows]
        if self.attention_out_norm is not None:
            branch = self.attention_out_norm(branch)
        branch = self.mlp(self.mlp_norm.add(residual, branch))
        if self.mlp_out_norm is not None:
            branch = self.mlp_out_norm(branch)
        return residual, branch


class CausalLM(Model):
    """A decoder with a head over the vocabulary, or with another head or none where its config says so.

    `max_length` is the greatest sequence length in tokens that will be run; see `ops.rope` for what depends on it.
    With `tied`, the head is also the table of token embeddings.
    """

    IGNORED = (r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)",)  # stored but derived
    HEADS = (r"lm_head\..*", r"score\..*")
    NORM, TOKEN_CLASSIFIER = "norm", "score"
    config: ModelConfig

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_length: int,
        tied: bool,
        quantization: str | None = None,
        native: NativeLibrary | None = None,
    ) -> None:
        super().__init__(config, dtype=dtype, device=device, quantization=quantization, native=native)
        self.backend = backend
        self.native_forward: NativeForward | None = None  # all layers in one call, where every part has a kernel
        self._ropes = [Rope(rope, max_length, device=device) for rope in config.ropes]
        # Checkpoints multiply in the model's dtype, so the factor is rounded to it first.
        self._embed_scale = config.embed_scale and torch.tensor(config.embed_scale, dtype=dtype).item()
        self.embed = self._tables(tied=tied, head=self.head_kind == "causal_lm")
        self.layers = [self._layer(index) for index in range(config.num_layers)]
        self.norm = self._norm(self.NORM)
        if self.head_kind == "sequence_classification":
            self.task_head = self._classifier("score", pooling="last", bias=False)
        elif self.head_kind == "token_classification":
            self.task_head = self._classifier(self.TOKEN_CLASSIFIER, pooling=None)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run the tokens; the final norm's output at `batch.logits_rows`, [R, D]."""
        residual, branch = self._embed(batch), None
        angles = [rope.angles(batch.positions) for rope in self._ropes]
        if self.native_forward is not None:
            return self.native_forward(batch, residual, angles)
        rows = None if batch.logits_rows.shape[0] == batch.num_tokens else batch.logits_rows
        for layer in self.layers[:-1]:
            residual, branch = layer(residual, branch, batch, angles, None)
        residual, branch = self.layers[-1](residual, branch, batch, angles, rows)
        return self.norm.add(residual, branch)

    def logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """hidden [R, D] -> float32 [R, V], soft-capped where the model says so. For `head_kind` "causal_lm".

        `out` f32[>= R, V] is memory that the result may take.
        """
        assert self.head is not None, "a model without a head over the vocabulary has no logits"
        logits = self.head(hidden, dtype=torch.float32, out=out)
        if self.config.final_softcap is not None:
            logits.div_(self.config.final_softcap).tanh_().mul_(self.config.final_softcap)
        return logits

    def _layer(self, index: int) -> DecoderLayer:
        raise NotImplementedError

    def _norm(self, name: str) -> Norm:
        raise NotImplementedError

    def _embed(self, batch: ForwardBatch) -> Tensor:
        embedded = self.embed(batch.input_ids)
        return embedded if self._embed_scale is None else embedded.mul_(self._embed_scale)

    def _attention(self, index: int, prefix: str, *, norm: HeadNorm | None = None) -> Attention:
        config = self.config
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {f"{prefix}.q_proj": q_rows, f"{prefix}.k_proj": kv_rows, f"{prefix}.v_proj": kv_rows}
        return Attention(
            index,
            config,
            self.backend,
            qkv=self._linear(config.hidden_size, parts, bias=config.qkv_bias),
            out=self._linear(q_rows, {f"{prefix}.o_proj": config.hidden_size}, bias=config.attention_output_bias),
            norm=norm,
        )

    def _gated_mlp(self, prefix: str) -> GatedMlp:
        config = self.config
        width = config.intermediate_size
        return GatedMlp(
            self._linear(
                config.hidden_size,
                {f"{prefix}.gate_proj": width, f"{prefix}.up_proj": width},
                bias=config.mlp_bias,
                gated=True,
            ),
            self._linear(width, {f"{prefix}.down_proj": config.hidden_size}, bias=config.mlp_bias),
            config.activation,
        )

    def _head_norm(self, prefix: str, *, offset: float = 0.0) -> HeadNorm:
        config = self.config
        parts = {f"{prefix}.q_norm": config.num_heads, f"{prefix}.k_norm": config.num_kv_heads}
        return self._add(
            HeadNorm(parts, config.head_dim, config.norm_eps, offset=offset, device=self.device, native=self._native)
        )
