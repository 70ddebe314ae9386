"""GGUF models in Hugging Face terms: the config, the parameters' names and values, the generation defaults.

Owns what llama.cpp's converter (`convert_hf_to_gguf.py`) did to each architecture, and undoes it, so that everything
after the loader knows one vocabulary of names and one layout. The file format itself is in `gguf`, what the metadata says
of each family in `gguf_config`.

What the converter changes in values:
    llama    rows of q and k are permuted for rotary pairs that lie side by side; Llama 3's rope scaling becomes the
             tensor `rope_freqs.weight`
    gemma    norm weights are stored plus one
    gpt2     the four projections are transposed (the checkpoint's Conv1D keeps them as [in, out])
A tied output matrix is left out of the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from openengine.core.gguf import GgufFile, GgufTensor
from openengine.core.gguf_config import (
    GgufFields,
    gemma2_config,
    gemma3_config,
    gpt2_config,
    llama_config,
    qwen_config,
    refuse_variations,
)
from openengine.errors import InvalidArgument, UnsupportedFeature

__all__ = ["CONFIG_TENSORS", "SUPPORTED_ARCHITECTURES", "HfTensor", "generation_defaults", "hf_config", "hf_tensors"]

# Tensors that are configuration: `hf_config` reads them, `hf_tensors` leaves them out.
CONFIG_TENSORS = frozenset({"rope_freqs.weight"})


@dataclass(frozen=True, slots=True, eq=False)
class HfTensor:
    """One parameter under its Hugging Face name, still in the file until `load`."""

    name: str
    shape: tuple[int, ...]  # in the Hugging Face layout
    source: GgufTensor
    _relayout: Callable[[np.ndarray], np.ndarray] | None = None
    _offset: float = 0.0

    def chunks(self, max_values: int) -> Iterator[tuple[slice, np.ndarray]]:
        """Ranges of the first dimension with their values, float32, of about `max_values` each.

        Each array is overwritten by the next. A tensor whose layout differs from the file's comes whole.
        """
        if self._relayout is not None or len(self.shape) < 2:
            yield slice(None), self.load()
            return
        num_rows, row_values = self.shape[0], math.prod(self.shape[1:])
        step = max(1, min(num_rows, max_values // row_values))
        buffer = np.empty((step, *self.shape[1:]), np.float32)
        for start in range(0, num_rows, step):
            rows = slice(start, min(start + step, num_rows))
            values = self.source.dequantize(buffer[: rows.stop - rows.start], rows=rows)
            if self._offset:
                values += np.float32(self._offset)
            yield rows, values

    def load(self, out: np.ndarray | None = None) -> np.ndarray:
        """Values as C-contiguous float32 in `shape`: a new array, or `out` (C-contiguous float32 of that shape).

        Raises:
            InvalidArgument: `out` does not fit.
        """
        if self._relayout is None:
            values = self.source.dequantize(out)
        elif out is None:
            values = np.ascontiguousarray(self._relayout(self.source.dequantize()))
        elif out.shape != self.shape or out.dtype != np.float32:
            raise InvalidArgument(f"out for {self.name!r} must be float32 {self.shape}, not {out.dtype} {out.shape}")
        else:
            values = out
            values[...] = self._relayout(self.source.dequantize())
        if self._offset:
            values += np.float32(self._offset)
        return values


def hf_config(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """The `config.json` this model would have, in the keys of its transformers config class (version 5).

    Rotary parameters are in `rope_parameters` (one dict, or one per layer type for Gemma 3). Numbers stored as
    float32 are given as such, so an epsilon of 1e-5 reads 9.999999747378752e-06.

    Raises:
        InvalidArgument: a needed key is absent or has the wrong type.
        UnsupportedFeature: an architecture that is not in `SUPPORTED_ARCHITECTURES`, or a variation of one.
    """
    family = _family(metadata)
    fields = GgufFields(metadata, _architecture(metadata))
    refuse_variations(fields)
    config = family.config(fields, tensors)
    config["vocab_size"] = _embedding(tensors).shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    ids = generation_defaults(metadata)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config[key] = ids.get(key)
    return config


def hf_tensors(gguf: GgufFile) -> list[HfTensor]:
    """Every parameter of the file, in file order, to be loaded one by one.

    Raises:
        InvalidArgument: a shape that contradicts the metadata.
        UnsupportedFeature: tensors whose name means nothing to the architecture (all are listed).
    """
    family = _family(gguf.metadata)
    fields = GgufFields(gguf.metadata, _architecture(gguf.metadata))
    num_layers = fields.integer("block_count")
    known, unknown = [], []
    for name, tensor in gguf.tensors.items():
        if name in CONFIG_TENSORS:
            continue
        if (parsed := _parse_name(name, family, num_layers)) is None:
            unknown.append(name)
            continue
        hf_name, part = parsed
        known.append(family.restore(hf_name, part, tensor, fields))
    if unknown:
        raise UnsupportedFeature(
            f"GGUF architecture {fields.architecture!r} with {num_layers} layers has no use for {len(unknown)} tensors: "
            + ", ".join(unknown),
            details={"tensors": unknown},
        )
    return known


def generation_defaults(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The file's `generation_config.json`: only keys that the file sets.

    `eos_token_id` is a list: the end of sequence first, then the ends of turn and of message. `bos_token_id` and
    `pad_token_id` are numbers. Recommended sampling parameters (`general.sampling.*`) appear as `temperature`,
    `top_k`, `top_p` and `min_p`, together with `do_sample`.
    """
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom", "bos", "padding")}
    for name, token_id in ids.items():
        if token_id is not None and type(token_id) is not int:
            raise InvalidArgument(f"GGUF metadata tokenizer.ggml.{name}_token_id {token_id!r} is not a token id")
    defaults: dict[str, Any] = {}
    # dict.fromkeys keeps the order and drops repeats: the end of turn often is the end of sequence.
    if ends := list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None)):
        defaults["eos_token_id"] = ends
    for name, key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if ids[name] is not None:
            defaults[key] = ids[name]
    sampling = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    for key, name in sampling.items():
        if (value := metadata.get(f"general.sampling.{name}")) is not None:
            defaults |= {key: value, "do_sample": True}
    return defaults


def _architecture(metadata: Mapping[str, Any]) -> str:
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise InvalidArgument("GGUF metadata general.architecture is missing: the file holds no model")
    return architecture


def _family(metadata: Mapping[str, Any]) -> _Family:
    architecture = _architecture(metadata)
    if architecture not in _FAMILIES:
        raise UnsupportedFeature(
            f"GGUF architecture {architecture!r} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return _FAMILIES[architecture]


def _embedding(tensors: Mapping[str, GgufTensor]) -> GgufTensor:
    tensor = tensors.get("token_embd.weight")
    if tensor is None or len(tensor.shape) != 2:
        raise InvalidArgument("the GGUF file has no matrix token_embd.weight: it holds no complete model")
    return tensor


# --------------------------------------------------------------------------------------------------------- tensors

_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>0|[1-9]\d{0,5})\.)?(?P<part>[a-z_]+)\.(?P<kind>weight|bias)")


def _parse_name(name: str, family: _Family, num_layers: int) -> tuple[str, str] | None:
    """(Hugging Face name, GGUF part such as `attn_q`), or None if the architecture has no such tensor."""
    match = _TENSOR_NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match["layer"], match["part"], match["kind"]
    if layer is None:
        hf_part = family.outer.get(part)
        return None if hf_part is None else (f"{hf_part}.{kind}", part)
    hf_part = family.inner.get(part)
    if hf_part is None or int(layer) >= num_layers:
        return None
    return f"{family.layers}.{layer}.{hf_part}.{kind}", part


def _as_is(name: str, part: str, tensor: GgufTensor, fields: GgufFields) -> HfTensor:
    return HfTensor(name, tensor.shape, tensor)


def _llama_tensor(name: str, part: str, tensor: GgufTensor, fields: GgufFields) -> HfTensor:
    if part not in ("attn_q", "attn_k"):
        return HfTensor(name, tensor.shape, tensor)
    num_heads = fields.integer("attention.head_count")
    if part == "attn_k":
        num_heads = fields.integer("attention.head_count_kv", num_heads)
    num_rows = tensor.shape[0] if tensor.shape else 0
    if num_rows % (2 * num_heads):
        raise InvalidArgument(f"GGUF tensor {tensor.name!r} {tensor.shape} does not divide into {num_heads} heads")

    def split_pairs(values: np.ndarray) -> np.ndarray:
        """Rows (pair, member) of each head to rows (member, pair)."""
        pairs = values.reshape(num_heads, num_rows // num_heads // 2, 2, -1)
        return pairs.swapaxes(1, 2).reshape(values.shape)

    return HfTensor(name, tensor.shape, tensor, split_pairs)


def _gemma_tensor(name: str, part: str, tensor: GgufTensor, fields: GgufFields) -> HfTensor:
    return HfTensor(name, tensor.shape, tensor, _offset=-1.0 if part.endswith("norm") else 0.0)


def _gpt2_tensor(name: str, part: str, tensor: GgufTensor, fields: GgufFields) -> HfTensor:
    if part in ("attn_qkv", "attn_output", "ffn_up", "ffn_down") and name.endswith(".weight"):
        return HfTensor(name, tensor.shape[::-1], tensor, np.transpose)
    return HfTensor(name, tensor.shape, tensor)


# -------------------------------------------------------------------------------------------------------- families


@dataclass(frozen=True, slots=True)
class _Family:
    """How one GGUF architecture is said in Hugging Face terms."""

    config: Callable[[GgufFields, Mapping[str, GgufTensor]], dict[str, Any]]
    layers: str
    outer: Mapping[str, str]
    inner: Mapping[str, str]
    restore: Callable[[str, str, GgufTensor, GgufFields], HfTensor]


_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA = _PROJECTIONS | {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA2 = _PROJECTIONS | {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2_OUTER = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}

_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(llama_config, "model.layers", _OUTER, _LLAMA, _llama_tensor),
    "qwen2": _Family(qwen_config("Qwen2ForCausalLM", "qwen2"), "model.layers", _OUTER, _LLAMA, _as_is),
    "qwen3": _Family(qwen_config("Qwen3ForCausalLM", "qwen3"), "model.layers", _OUTER, _LLAMA | _QK_NORMS, _as_is),
    "gemma2": _Family(gemma2_config, "model.layers", _OUTER, _GEMMA2, _gemma_tensor),
    "gemma3": _Family(gemma3_config, "model.layers", _OUTER, _GEMMA2 | _QK_NORMS, _gemma_tensor),
    "gpt2": _Family(gpt2_config, "transformer.h", _GPT2_OUTER, _GPT2, _gpt2_tensor),
}

SUPPORTED_ARCHITECTURES: tuple[str, ...] = tuple(_FAMILIES)
