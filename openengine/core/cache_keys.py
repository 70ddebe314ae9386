"""Cache keys: profile `openengine.block-chain.sha256-cbor`, version 1.

    root_key ──> key[0] = H(root,   ids of block 0, extras of block 0)
                 key[1] = H(key[0], ids of block 1, extras of block 1)        H = SHA-256 of deterministic CBOR
                 …                                                            a partial last block has no key

The same keys name blocks in the prefix cache, in KV events and in the tokenizer service, and any
client can compute them. Owns the encoding; which blocks are cached is `blocks.py`'s business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from openengine.errors import InvalidArgument

__all__ = [
    "EXTRA_KEY_KINDS",
    "HASH_ALGORITHM",
    "KEY_BYTES",
    "KEY_ENCODING",
    "PROFILE",
    "PROFILE_VERSION",
    "SERIALIZATION",
    "CacheKeyContext",
    "MediaIdentity",
    "PromptEmbeddingIdentity",
    "block_key",
    "block_keys",
    "extra_keys",
    "root_key",
]

PROFILE = "openengine.block-chain.sha256-cbor"
PROFILE_VERSION = 1
HASH_ALGORITHM = "sha256"
SERIALIZATION = "cbor-deterministic"
KEY_ENCODING = "bytes"
KEY_BYTES = 32
EXTRA_KEY_KINDS = ("lora", "mm", "salt", "embeds")

_UINT32_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class MediaIdentity:
    """A media item: its uuid or `sha256:<hex>`, and the run of placeholder tokens it fills."""

    identity: str
    token_offset: int
    token_count: int


@dataclass(frozen=True, slots=True)
class PromptEmbeddingIdentity:
    """The SHA-256 (32 bytes) of the embeddings that one block has in place of token ids."""

    block_index: int
    sha256: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKeyContext:
    """What beside the token ids decides a sequence's KV. `cache_salt=None` is no salt."""

    lora_names: tuple[str, ...] = ()
    media: tuple[MediaIdentity, ...] = ()
    cache_salt: str | None = None
    prompt_embeddings: tuple[PromptEmbeddingIdentity, ...] = ()

    def extra_keys(self, block_index: int, block_size: int) -> tuple[str, ...]:
        """The extras of one block; see the function of that name."""
        return extra_keys(
            block_index,
            block_size,
            lora_names=self.lora_names,
            media=self.media,
            cache_salt=self.cache_salt,
            prompt_embeddings=self.prompt_embeddings,
        )


def root_key(
    model_revision: str,
    tokenizer_fingerprint: str,
    block_size: int,
    group_idx: int = 0,
    kind: str = "full_attention",
    sliding_window: int = 0,
) -> bytes:
    """The parent of every first block: 32 bytes that change with any of the arguments."""
    parts = (model_revision, tokenizer_fingerprint, block_size, group_idx, kind, sliding_window)
    return hashlib.sha256(_encode(("openengine.cache-root/1", *parts))).digest()


def extra_keys(
    block_index: int,
    block_size: int,
    *,
    lora_names: Sequence[str] = (),
    media: Sequence[MediaIdentity] = (),
    cache_salt: str | None = None,
    prompt_embeddings: Sequence[PromptEmbeddingIdentity] = (),
) -> tuple[str, ...]:
    """The tagged extras of block `block_index`, in the profile's order; () when there are none.

    Raises InvalidArgument for an empty salt or a digest that has not 32 bytes.
    """
    if cache_salt == "":
        raise InvalidArgument("cache_salt is empty; leave it out to share the cache, or give a non-empty salt")
    # Python orders text by code point, which is the order of its UTF-8 bytes.
    extras = [f"lora:{name}" for name in sorted(set(lora_names))]
    start = block_index * block_size
    for item in sorted(media, key=lambda item: item.token_offset):
        if item.token_offset < start + block_size and item.token_offset + item.token_count > start:
            extras.append(f"mm:{item.identity}@{item.token_offset - start}")
    if cache_salt is not None and block_index == 0:
        extras.append(f"salt:{hashlib.sha256(cache_salt.encode()).hexdigest()}")
    for embedding in prompt_embeddings:
        if len(embedding.sha256) != 32:
            raise InvalidArgument(
                f"the prompt embeddings of block {embedding.block_index} have a digest of {len(embedding.sha256)} "
                "bytes; give their SHA-256, which has 32"
            )
        if embedding.block_index == block_index:
            extras.append(f"embeds:{embedding.sha256.hex()}")
    return tuple(extras)


def block_key(parent: bytes, token_ids: Sequence[int], extra: Sequence[str] | None = None) -> bytes:
    """The 32-byte key of one full block; `parent` is the root key or the key of the block before.

    No extras (None or empty) hash as null. Raises InvalidArgument for an id outside u32.
    """
    encoded, _ = _encode_token_ids(np.asarray(token_ids, dtype=np.int64))
    return _chain(parent, _head(4, len(token_ids)), encoded, extra)


def block_keys(
    root: bytes, token_ids: Sequence[int], block_size: int, context: CacheKeyContext | None = None
) -> list[bytes]:
    """The keys of all full blocks of `token_ids` (list or integer array), in order.

    Raises InvalidArgument for an id outside u32.
    """
    num_blocks = len(token_ids) // block_size
    if num_blocks == 0:
        return []
    full = token_ids[: num_blocks * block_size]
    encoded, lengths = _encode_token_ids(np.asarray(full, dtype=np.int64))
    ends = lengths.reshape(num_blocks, block_size).sum(axis=1).cumsum().tolist()
    head = _head(4, block_size)
    keys, parent, start = [], root, 0
    for index, end in enumerate(ends):
        extra = None if context is None else context.extra_keys(index, block_size)
        parent = _chain(parent, head, encoded[start:end], extra)
        keys.append(parent)
        start = end
    return keys


def _chain(parent: bytes, ids_head: bytes, encoded_ids: bytes, extra: Sequence[str] | None) -> bytes:
    assert len(parent) == KEY_BYTES, "a block's parent is a 32-byte key"
    # 83: array of three; 58 20: byte string of 32; f6: null.
    extras = _encode(extra) if extra else b"\xf6"
    return hashlib.sha256(b"".join((b"\x83\x58\x20", parent, ids_head, encoded_ids, extras))).digest()


# ---- deterministic CBOR (RFC 8949, 4.2.1): definite lengths, shortest integers -------------------


def _encode(value: int | bytes | str | Sequence | None) -> bytes:
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _head(0, value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _head(3, len(text)) + text
    return _head(4, len(value)) + b"".join(map(_encode, value))


def _head(major: int, value: int) -> bytes:
    if value < 24:
        return bytes((major << 5 | value,))
    size_code = (value > 0xFF) + (value > 0xFFFF) + (value > 0xFFFFFFFF)
    return bytes((major << 5 | 24 + size_code,)) + value.to_bytes(1 << size_code, "big")


def _encode_token_ids(ids: np.ndarray) -> tuple[bytes, np.ndarray]:
    """The CBOR integers of `ids` (i64 [n]), concatenated, and the length of each in bytes (i64 [n])."""
    if ids.size and (ids.min() < 0 or ids.max() > _UINT32_MAX):
        bad = ids[(ids < 0) | (ids > _UINT32_MAX)][0]
        raise InvalidArgument(f"token id {bad} is outside 0..{_UINT32_MAX}")
    one, two, four = ids >= 24, ids > 0xFF, ids > 0xFFFF
    # Each row is a head byte and the id as four big-endian bytes; `used` picks the shortest form.
    rows = np.empty((ids.size, 5), dtype=np.uint8)
    rows[:, 0] = np.where(one, 24 + two.astype(np.uint8) + four, ids)
    rows[:, 1:] = ids.astype(">u4").view(np.uint8).reshape(-1, 4)
    used = np.empty(rows.shape, dtype=bool)
    used[:, 0] = True
    used[:, 1] = used[:, 2] = four
    used[:, 3] = two
    used[:, 4] = one
    return rows[used].tobytes(), used.sum(axis=1)
