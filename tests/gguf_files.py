"""GGUF files for tests, written byte by byte, and the metadata of tiny models of every architecture."""

from __future__ import annotations

import struct
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from openengine.core.gguf import GgufFile
from openengine.core.gguf_models import hf_config

# ---- writing test files ----------------------------------------------------------------------------


# name: (ggml type id, values per block, bytes per block)
TYPES = MappingProxyType(
    {
        "F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2), "F64": (28, 1, 8), "I8": (24, 1, 1), "I16": (25, 1, 2),
        "I32": (26, 1, 4), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24),
        "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144),
        "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "IQ4_NL": (20, 32, 18), "IQ4_XS": (23, 256, 136),
    }
)  # fmt: skip
QUANTIZED = [name for name, (_, size, _) in TYPES.items() if size > 1]


class Typed:
    """A metadata value with its type id and its bytes, for what `encode` does not choose by itself."""

    def __init__(self, type_id: int, data: bytes) -> None:
        self.type_id, self.data = type_id, data


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def encode(value: Any) -> tuple[int, bytes]:
    match value:
        case Typed():
            return value.type_id, value.data
        case bool():
            return 7, bytes([value])
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, text(value)
        case np.ndarray():
            type_id = {"uint8": 0, "int32": 5, "float32": 6, "bool": 7, "uint64": 10, "float64": 12}[value.dtype.name]
            return 9, struct.pack("<IQ", type_id, value.size) + value.tobytes()
        case list():
            items = [encode(item) for item in value]
            return 9, struct.pack("<IQ", items[0][0], len(items)) + b"".join(data for _, data in items)
    raise TypeError(type(value))


def header(version: int, num_tensors: int, num_metadata: int) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, num_tensors, num_metadata)


def tensor_info(name: str, shape: tuple[int, ...], type_id: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], type_id, offset)


def gguf_bytes(
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray | tuple[str, tuple[int, ...], bytes]] | None = None,
    *,
    version: int = 3,
) -> bytes:
    """A whole file. A tensor is a float32 array, or (type, shape, data)."""
    alignment = metadata.get("general.alignment", 32)
    alignment = 32 if isinstance(alignment, Typed) else alignment
    infos, data = b"", b""
    for name, tensor in (tensors or {}).items():
        if isinstance(tensor, np.ndarray):
            tensor = ("F32", tensor.shape, np.ascontiguousarray(tensor, np.float32).tobytes())
        type_name, shape, raw = tensor
        infos += tensor_info(name, shape, TYPES[type_name][0], len(data))
        data += raw + bytes(-len(raw) % alignment)
    fields = b""
    for key, value in metadata.items():
        type_id, raw = encode(value)
        fields += text(key) + struct.pack("<I", type_id) + raw
    head = header(version, len(tensors or {}), len(metadata)) + fields + infos
    return head + bytes(-len(head) % alignment) + data


def write_gguf(folder: Path, *args: Any, name: str = "model.gguf", **kwargs: Any) -> Path:
    path = folder / name
    path.write_bytes(gguf_bytes(*args, **kwargs))
    return path


def random_blocks(type_name: str, num_values: int, seed: int = 0) -> bytes:
    """Any bytes are valid blocks; their scales include infinities, NaN and subnormals."""
    _, size, num_bytes = TYPES[type_name]
    return np.random.default_rng(seed).bytes(num_values // size * num_bytes)


# ---- Hugging Face terms ----------------------------------------------------------------------------


HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, CONTEXT = 32, 48, 3, 4, 2, 8, 40, 64
EPS = 2.0**-17
TOKEN_IDS = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 0}


def decoder_metadata(architecture: str, **extra: Any) -> dict[str, Any]:
    fields = {
        "vocab_size": VOCAB,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": EPS,
        "rope.freq_base": 50000.0,
        **extra,
    }
    return {
        "general.architecture": architecture,
        "general.name": "tiny",
        **{f"{architecture}.{key}": value for key, value in fields.items() if value is not None},
        **TOKEN_IDS,
    }


def gpt2_metadata() -> dict[str, Any]:
    fields = {
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": 4 * HIDDEN,
        "attention.head_count": HEADS,
        "attention.layer_norm_epsilon": EPS,
    }
    return {
        "general.architecture": "gpt2",
        "general.name": "tiny",
        **{f"gpt2.{key}": value for key, value in fields.items()},
        **TOKEN_IDS,
    }


def embedding() -> dict[str, np.ndarray]:
    return {"token_embd.weight": np.zeros((VOCAB, HIDDEN))}


def config_of(folder: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> dict[str, Any]:
    with GgufFile(write_gguf(folder, metadata, embedding() if tensors is None else tensors)) as file:
        return hf_config(file.metadata, file.tensors)


def metadata_of(architecture: str) -> dict[str, Any]:
    if architecture == "gpt2":
        return gpt2_metadata()
    extra: dict[str, Any] = {"attention.sliding_window": 16} if architecture.startswith("gemma") else {}
    if architecture == "gemma3":
        extra |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    return decoder_metadata(architecture, **extra)
