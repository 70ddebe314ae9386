"""Attention by flash-attn 2 on CUDA: one call per layer reads the paged cache in place.

Owns the translation of a `ForwardBatch` into that package's arguments and nothing else. The
package is imported when a backend is made, never before.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from openengine.errors import InvalidArgument, UnsupportedFeature
from openengine.ops.batch import ForwardBatch
from openengine.ops.kv_cache import KvCache, KvSpec
from openengine.ops.rope import rotate_

__all__ = ["FlashAttention"]

_PAGE = 256  # flash-attn 2: page_block_size must be a multiple of it
_MAX_HEAD_DIM = 256
_MIN_CAPABILITY = (8, 0)  # flash-attn 2 needs Ampere or newer
_DTYPES = (torch.float16, torch.bfloat16)


class FlashAttention:
    """The flash-attn backend for float16 and bfloat16.

    Raises UnsupportedFeature if the package is absent or too old, or for another dtype.
    """

    name = "flash"
    block_size = _PAGE

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in _DTYPES:
            raise UnsupportedFeature(
                f"flash-attn computes in float16 or bfloat16, not {str(dtype).removeprefix('torch.')}; "
                "set dtype='bfloat16', or kernels='torch' to keep the dtype"
            )
        try:
            from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
        except ImportError as exc:
            raise UnsupportedFeature(
                f"kernels 'flash' needs the package flash-attn ({exc}); "
                "pip install \"openengine-inference[flash]\", or use kernels='torch'"
            ) from exc
        for function in (flash_attn_varlen_func, flash_attn_with_kvcache):
            missing = {"block_table", "softcap"} - inspect.signature(function).parameters.keys()
            if missing:
                raise UnsupportedFeature(
                    f"{function.__name__} of the installed flash-attn lacks {', '.join(sorted(missing))}; "
                    "install flash-attn 2.6 or newer, or use kernels='torch'"
                )
        self._attend_ragged = flash_attn_varlen_func
        self._attend_decodes = flash_attn_with_kvcache

    @staticmethod
    def check_device(device: torch.device) -> None:
        """Raise UnsupportedFeature if flash-attn has no kernels for `device`."""
        if device.type != "cuda":
            raise UnsupportedFeature(f"flash-attn runs on CUDA devices, not on {device}; use kernels='torch'")
        capability = torch.cuda.get_device_capability(device)
        if capability < _MIN_CAPABILITY:
            raise UnsupportedFeature(
                f"flash-attn needs compute capability 8.0, {device} has {capability[0]}.{capability[1]}; "
                "use kernels='torch'"
            )

    def allocate(self, spec: KvSpec, num_blocks: int, block_size: int) -> KvCache:
        """A cache of `[block_size, num_kv_heads, head_dim]` pages.

        Raises InvalidArgument for a page size and UnsupportedFeature for a head size without kernels.
        """
        if block_size % _PAGE:
            raise InvalidArgument(
                f"block_size {block_size} is not a multiple of {_PAGE}, as flash-attn needs; use {_PAGE}"
            )
        if spec.head_dim % 8 or spec.head_dim > _MAX_HEAD_DIM:
            raise UnsupportedFeature(
                f"head_dim {spec.head_dim} is not a multiple of 8 up to {_MAX_HEAD_DIM}, as flash-attn needs; "
                "use kernels='torch'"
            )
        return KvCache(spec, num_blocks, block_size)

    def prepare(self, batch: ForwardBatch, *, windows: Sequence[int | None]) -> None:
        """Fill in the arguments that all layers share; a window is an argument of its own and needs nothing."""
        if batch.num_decodes == batch.num_seqs:
            return
        batch.scratch["ragged"] = {
            "cu_seqlens_q": batch.cu_seqlens_q,
            "cu_seqlens_k": F.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            "max_seqlen_q": max(batch.query_lens),
            "max_seqlen_k": max(batch.context_lens),
        }

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: ForwardBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        angles: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        rotate_(q, k, angles)
        k_cache, v_cache = batch.kv.key(layer), batch.kv.value(layer)
        k_cache.flatten(0, 1).index_copy_(0, batch.slot_mapping, k)
        v_cache.flatten(0, 1).index_copy_(0, batch.slot_mapping, v)
        options = {
            "block_table": batch.block_tables,
            "softmax_scale": scale,
            "causal": True,
            # flash-attn counts the keys left of the query, `window` counts the query's own too.
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": softcap or 0.0,
        }
        if batch.num_decodes == batch.num_seqs:
            out = self._attend_decodes(q.unsqueeze(1), k_cache, v_cache, cache_seqlens=batch.seq_lens, **options)
        else:
            out = self._attend_ragged(q, k_cache, v_cache, **batch.scratch["ragged"], **options)
        return out.reshape(q.shape[0], -1)
