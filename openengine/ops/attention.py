"""The seam between a decoder layer and the attention kernels: the backend protocol and its selection.

A backend owns the layout of the KV cache it allocates and what it prepares per step; it holds no
request state. `window` counts keys: query position i sees key positions i - window < j <= i.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from openengine.errors import InvalidArgument, UnsupportedFeature
from openengine.ops.attention_flash import FlashAttention
from openengine.ops.attention_native import NativeAttention
from openengine.ops.attention_torch import TorchAttention
from openengine.ops.batch import ForwardBatch
from openengine.ops.kv_cache import KvCache, KvSpec
from openengine.ops.native import native_library

__all__ = ["AttentionBackend", "select_backend"]

_log = logging.getLogger("openengine")
_KERNELS = ("auto", "native", "torch", "flash")


class AttentionBackend(Protocol):
    """Causal attention of a ragged batch over a paged KV cache.

    `block_size` is the preferred default. One backend serves one thread: it reuses its workspaces.
    """

    name: str
    block_size: int

    def allocate(self, spec: KvSpec, num_blocks: int, block_size: int) -> KvCache:
        """A cache in this backend's layout. Raises UnsupportedFeature or InvalidArgument for sizes it cannot serve."""
        ...

    def prepare(self, batch: ForwardBatch, *, windows: Sequence[int | None]) -> None:
        """Fill `batch.scratch` once per step; `windows` are the distinct windows of the model's layers."""
        ...

    def forward(
        self,
        layer: int,
        q: Tensor,  # [T, num_heads, head_dim]
        k: Tensor,  # [T, num_kv_heads, head_dim]
        v: Tensor,  # [T, num_kv_heads, head_dim]
        batch: ForwardBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        angles: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Write k and v to the cache, then attend over each sequence's cached tokens -> `[T, num_heads * head_dim]`.

        All in the cache's dtype. With `softcap` a score becomes `softcap * tanh(score * scale / softcap)`.
        With `angles`, those of `Rope.angles`, q and k are rotated first; the tensors themselves may change or not.
        Needs `prepare` on the same batch with this window, and a context without gradients.
        """
        ...


def select_backend(
    device: torch.device,
    dtype: torch.dtype,
    kernels: str,
    *,
    head_dim: int | None = None,
    block_size: int | None = None,
) -> AttentionBackend:
    """The backend for `kernels`: `auto` is flash on CUDA and native on a CPU where these can run, else torch.

    A size that is None is one that every backend has kernels for. Raises UnsupportedFeature if the kernels asked for by
    name cannot run here, InvalidArgument for an unknown name.
    """
    if kernels not in _KERNELS:
        raise InvalidArgument(f"kernels {kernels!r} is unknown; choose one of {', '.join(_KERNELS)}")
    if kernels == "torch":
        return TorchAttention()
    is_native = kernels == "native" or (kernels == "auto" and device.type == "cpu")
    try:
        if is_native:
            NativeAttention.check(device, head_dim=head_dim, block_size=block_size)
            return NativeAttention(dtype)
        FlashAttention.check_device(device)
        return FlashAttention(dtype)
    except UnsupportedFeature as exc:
        if kernels != "auto":
            raise
        if is_native and native_library() is not None:  # its absence says so for itself
            said = str(exc).removesuffix("; use kernels='torch'")  # which is what happens
            _log.warning("%s. Attention runs in PyTorch, which is slower", said)
        return TorchAttention()
