"""What the tokenizer service takes and gives, with the OpenEngine contract's names in snake case.

All are frozen dataclasses; `None` means "absent", and `model=None` the engine's own. The fields of a request are the
keywords of the `Engine` method that it calls. Meanings: requirements TOK, ART and CKY of the contract. Nothing is
validated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openengine.types import NameEnum

__all__ = [
    "BlockCacheKey",
    "CacheKeyContext",
    "CacheKeyGroup",
    "CacheKeySpec",
    "CacheKeyTestVector",
    "ComputeCacheKeysRequest",
    "ComputeCacheKeysResponse",
    "DetokenizeOptions",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "GetCacheKeySpecRequest",
    "GetTokenizerArtifactsRequest",
    "GetTokenizerInfoRequest",
    "MediaIdentity",
    "PromptEmbeddingIdentity",
    "SpecialToken",
    "TokenSpan",
    "TokenizeOptions",
    "TokenizeRequest",
    "TokenizeResponse",
    "TokenizerArtifact",
    "TokenizerArtifactChunk",
    "TokenizerCapabilities",
    "TokenizerInfo",
    "TokenizerOperation",
    "TruncationSide",
]


# ---- identity and artifacts ----------------------------------------------------------------------


class TokenizerOperation(NameEnum):
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    ARTIFACTS = "artifacts"
    CACHE_KEY_SPEC = "cache_key_spec"
    COMPUTE_CACHE_KEYS = "compute_cache_keys"


class TruncationSide(NameEnum):
    """The side that loses tokens."""

    LEFT = "left"
    RIGHT = "right"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerCapabilities:
    """What ModelInfo says about the tokenizer service. Empty `artifact_format` and `cache_key_profile`: none."""

    fingerprint: str
    operations: tuple[TokenizerOperation, ...] = ()
    artifact_format: str = ""
    artifacts_available: bool | None = None
    cache_key_profile: str = ""
    cache_key_profile_version: int = 0
    cache_keys_client_computable: bool | None = None
    cache_keys_engine_computable: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GetTokenizerInfoRequest:
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialToken:
    token_id: int
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerArtifact:
    """A file of the tokenizer: its plain name, size in bytes and SHA-256 in hex."""

    name: str
    total_size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeOptions:
    """`max_tokens` keeps so many ids, special tokens included; 0 keeps none."""

    add_special_tokens: bool | None = None
    parse_special_tokens: bool | None = None
    max_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    normalize: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeOptions:
    skip_special_tokens: bool | None = None
    clean_up_spaces: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerInfo:
    """Who the tokenizer is. `fingerprint` changes when an answer could; `vocab_size` is the model output's width."""

    model: str
    fingerprint: str
    format: str
    vocab_size: int
    revision: str = ""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    unk_token_id: int | None = None
    special_tokens: tuple[SpecialToken, ...] = ()
    operations: tuple[TokenizerOperation, ...] = ()
    artifacts: tuple[TokenizerArtifact, ...] = ()
    default_tokenize_options: TokenizeOptions = TokenizeOptions()
    default_detokenize_options: DetokenizeOptions = DetokenizeOptions()
    max_input_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GetTokenizerArtifactsRequest:
    """No names: every artifact. An empty `expected_fingerprint` is not checked."""

    model: str | None = None
    names: tuple[str, ...] = ()
    expected_fingerprint: str = ""
    max_chunk_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerArtifactChunk:
    """`data` stands at `offset` of the artifact; size and digest are the whole artifact's."""

    fingerprint: str
    name: str
    offset: int
    total_size: int
    sha256: str
    data: bytes
    last: bool


# ---- tokenize and detokenize ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """`text=None` is invalid, an empty text is not."""

    model: str | None = None
    text: str | None = None
    options: TokenizeOptions = TokenizeOptions()
    expected_fingerprint: str = ""
    return_offsets: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Byte offsets into the UTF-8 text; equal for a token that no text stands for."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeResponse:
    """`untruncated_count` is the number of ids before truncation; `effective_options` are those applied."""

    token_ids: tuple[int, ...]
    untruncated_count: int
    fingerprint: str
    offsets: tuple[TokenSpan, ...] = ()
    effective_options: TokenizeOptions = TokenizeOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest:
    model: str | None = None
    token_ids: tuple[int, ...] = ()
    options: DetokenizeOptions = DetokenizeOptions()
    expected_fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeResponse:
    """An incomplete character at the end of `text` is U+FFFD, and is told by `ends_with_incomplete_utf8`."""

    text: str
    fingerprint: str
    effective_options: DetokenizeOptions = DetokenizeOptions()
    ends_with_incomplete_utf8: bool = False


# ---- cache keys ----------------------------------------------------------------------------------


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
    """What beside the token ids decides a sequence's keys. `cache_salt=None` is no salt."""

    lora_names: tuple[str, ...] = ()
    cache_salt: str | None = None
    media: tuple[MediaIdentity, ...] = ()
    prompt_embeddings: tuple[PromptEmbeddingIdentity, ...] = ()
    group_idx: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GetCacheKeySpecRequest:
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKeyGroup:
    """One KV group; `root_key` is the parent of its first blocks, `sliding_window=0` is none."""

    group_idx: int
    block_size: int
    kind: str
    root_key: bytes
    sliding_window: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKeyTestVector:
    name: str
    token_ids: tuple[int, ...]
    expected_keys: tuple[bytes, ...]
    context: CacheKeyContext = CacheKeyContext()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKeySpec:
    """Everything a client needs to compute the keys itself. `fingerprint` changes whenever a key could."""

    model: str
    profile: str
    version: int
    fingerprint: str
    tokenizer_fingerprint: str
    model_revision: str
    client_computable: bool | None = None
    engine_computable: bool | None = None
    hash_algorithm: str = ""
    serialization: str = ""
    key_encoding: str = ""
    key_bytes: int = 0
    groups: tuple[CacheKeyGroup, ...] = ()
    extra_key_kinds: tuple[str, ...] = ()
    test_vectors: tuple[CacheKeyTestVector, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeCacheKeysRequest:
    """Exactly one of `text` and `tokens`. Empty or zero `expected_*` are not checked."""

    model: str | None = None
    text: str | None = None
    tokens: Sequence[int] | None = None
    context: CacheKeyContext = CacheKeyContext()
    expected_profile: str = ""
    expected_profile_version: int = 0
    expected_fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCacheKey:
    block_index: int
    value: bytes
    extra_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeCacheKeysResponse:
    """One key per full block; `trailing_tokens` are in the partial last block, which has none."""

    keys: tuple[BlockCacheKey, ...]
    profile: str
    version: int
    fingerprint: str
    block_size: int
    token_count: int
    trailing_tokens: int
    key_encoding: str
