"""A decoder's layers as one native call: `NativeForward`, for models all of whose parts have native kernels.

It computes what the layers compute when they are called one by one, which stays the description of the model and serves
every other device and dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from openengine.core.models.layers import Attention, CausalLM, DecoderLayer, GatedMlp, Mlp
from openengine.ops.attention_native import NativeAttention
from openengine.ops.batch import ForwardBatch
from openengine.ops.linear import Linear
from openengine.ops.linear_native import NativeWeights
from openengine.ops.native import native_library
from openengine.ops.program import ALL, WANTED, NativeProgram, Place

__all__ = ["NativeForward"]


class NativeForward:
    """`model`'s layers and final norm: `(batch, embedded [T, D], angles) -> hidden [R, D]`."""

    def __init__(self, model: CausalLM) -> None:
        config = model.config
        self._config = config
        self.program = NativeProgram(native_library(), model.backend, config.hidden_size, model.dtype)
        buffer = self.program.buffer
        heads = config.num_heads + 2 * config.num_kv_heads
        self._normed, self._branch = buffer(config.hidden_size), buffer(config.hidden_size)
        self._branch_normed = buffer(config.hidden_size)
        self._kept = buffer(config.hidden_size)
        self._qkv = buffer(heads * config.head_dim)
        self._normed_heads = buffer((config.num_heads + config.num_kv_heads) * config.head_dim)
        self._attended, self._kept_attended = (buffer(config.num_heads * config.head_dim) for _ in range(2))
        self._inner = buffer(config.intermediate_size)
        residual, branch = self.program.source, None
        for layer in model.layers:
            residual, branch = self._layer(layer, residual, branch, ALL if layer is not model.layers[-1] else WANTED)
        self.program.norm(model.norm, residual, branch, self.program.result, WANTED)

    @staticmethod
    def serves(model: CausalLM) -> bool:
        """Whether every part of every layer has a native kernel: what products have, the rest has too."""
        return isinstance(model.backend, NativeAttention) and all(
            isinstance(linear.weights, NativeWeights) for layer in model.layers for linear in _linears(layer)
        )

    def __call__(self, batch: ForwardBatch, embedded: Tensor, angles: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        return self.program.run(batch, embedded, angles)

    def _layer(self, layer: DecoderLayer, residual: Place, branch: Place | None, rows: int) -> tuple[Place, Place]:
        program = self.program
        program.norm(layer.attention_norm, residual, branch, self._normed)
        self._attention(layer.attention, rows)
        branch = self._branch
        if rows == WANTED:
            program.take(residual, self._kept)
            residual = self._kept
        if layer.attention_out_norm is not None:
            program.norm(layer.attention_out_norm, branch, None, self._branch_normed, rows)
            branch = self._branch_normed
        program.norm(layer.mlp_norm, residual, branch, self._normed, rows)
        self._mlp(layer.mlp, rows)
        branch = self._branch
        if layer.mlp_out_norm is not None:
            program.norm(layer.mlp_out_norm, branch, None, self._branch_normed, rows)
            branch = self._branch_normed
        return residual, branch

    def _mlp(self, mlp: GatedMlp | Mlp, rows: int) -> None:
        up = mlp.gate_up if isinstance(mlp, GatedMlp) else mlp.up
        self.program.product(up.weights, self._normed, self._inner, rows, activation=mlp.activation)
        self.program.product(mlp.down.weights, self._inner, self._branch, rows)

    def _attention(self, attention: Attention, rows: int) -> None:
        program, config = self.program, self._config
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        program.product(attention.qkv.weights, self._normed, self._qkv)
        q = program.part(self._qkv, 0, q_width)
        k = program.part(self._qkv, q_width, kv_width)
        v = program.part(self._qkv, q_width + kv_width, kv_width)
        if attention.norm is not None:
            program.head_norm(attention.norm, self._qkv, self._normed_heads)
            q, k = program.part(self._normed_heads, 0, q_width), program.part(self._normed_heads, q_width, kv_width)
        rope = config.layer_ropes[attention.layer] if config.ropes else None
        program.attention(
            q,
            k,
            v,
            self._attended,
            rows,
            num_heads=config.num_heads,
            scale=config.attention_scale,
            window=config.windows[attention.layer],
            softcap=config.attention_softcap,
            rope=rope,
        )
        attended = self._attended
        if rows == WANTED:
            program.take(attended, self._kept_attended)
            attended = self._kept_attended
        program.product(attention.out.weights, attended, self._branch, rows)


def _linears(layer: DecoderLayer) -> tuple[Linear, ...]:
    up = layer.mlp.gate_up if isinstance(layer.mlp, GatedMlp) else layer.mlp.up
    return layer.attention.qkv, layer.attention.out, up, layer.mlp.down
