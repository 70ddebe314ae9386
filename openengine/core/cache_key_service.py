"""`CacheKeyService`: what a client needs to compute cache keys itself, and the keys for one that cannot.

Owns: checking a caller's context, the published spec and its test vectors. Does not own: the encoding (cache_keys.py).
The keys are those that the prefix cache and the KV events use.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Collection

import numpy as np

from openengine.core import cache_keys
from openengine.errors import InvalidArgument, LoraNotFound, PreconditionFailed, UnsupportedTask
from openengine.tokenizer_types import (
    BlockCacheKey,
    CacheKeyContext,
    CacheKeyGroup,
    CacheKeySpec,
    CacheKeyTestVector,
    ComputeCacheKeysResponse,
    MediaIdentity,
)

__all__ = ["NO_CONTEXT", "CacheKeyService"]

NO_CONTEXT = CacheKeyContext()
_VECTOR_IDS = (1, 23, 24, 255, 256, 65535, 65536, 7)  # both sides of every length of an encoded integer


class CacheKeyService:
    """Cache keys of one engine. Immutable and thread safe.

    `root_key` is the one that the prefix cache starts from. `loras` gives the names of the adapters that are loaded, None
    where the engine takes none.
    """

    def __init__(
        self,
        *,
        model: str,
        vocab_size: int,
        block_size: int,
        root_key: bytes,
        model_revision: str,
        tokenizer_fingerprint: str,
        loras: Callable[[], Collection[str]] | None = None,
        supports_media: bool = False,
    ) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._root_key = root_key
        self._model_revision = model_revision
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._loras = loras
        self._supports_media = supports_media

    @functools.cached_property
    def spec(self) -> CacheKeySpec:
        """The profile with everything that this engine's keys depend on, and test vectors."""
        group = CacheKeyGroup(group_idx=0, block_size=self._block_size, kind="full_attention", root_key=self._root_key)
        return CacheKeySpec(
            model=self._model,
            profile=cache_keys.PROFILE,
            version=cache_keys.PROFILE_VERSION,
            fingerprint=self._fingerprint(group),
            tokenizer_fingerprint=self._tokenizer_fingerprint,
            model_revision=self._model_revision,
            client_computable=bool(self._model_revision and self._tokenizer_fingerprint),
            engine_computable=True,
            hash_algorithm=cache_keys.HASH_ALGORITHM,
            serialization=cache_keys.SERIALIZATION,
            key_encoding=cache_keys.KEY_ENCODING,
            key_bytes=cache_keys.KEY_BYTES,
            groups=(group,),
            extra_key_kinds=self._extra_key_kinds(),
            test_vectors=tuple(self._test_vectors()),
        )

    def check_expected(self, profile: str, version: int, fingerprint: str) -> None:
        """Raises PreconditionFailed for a profile, version or fingerprint that is given and not this one."""
        spec = self.spec
        pairs = (("profile", profile, spec.profile), ("profile_version", version, spec.version))
        for name, expected, actual in (*pairs, ("fingerprint", fingerprint, spec.fingerprint)):
            if expected and expected != actual:
                raise PreconditionFailed(
                    f"expected_{name} is {expected!r:.100}, this engine has {actual!r}; fetch the cache-key spec again"
                )

    def compute(self, token_ids: np.ndarray, context: CacheKeyContext = NO_CONTEXT) -> ComputeCacheKeysResponse:
        """The keys of the full blocks of `token_ids` (i64 [N]).

        Raises InvalidArgument for a context that no request of this engine can have, UnsupportedTask for an adapter where
        there are none, LoraNotFound for one that is not loaded.
        """
        self._check_context(context, len(token_ids))
        spec, block_size = self.spec, self._block_size
        inner = _key_context(context)
        keys = cache_keys.block_keys(self._root_key, token_ids, block_size, inner)
        extras = (() if inner is None else inner.extra_keys(index, block_size) for index in range(len(keys)))
        return ComputeCacheKeysResponse(
            keys=tuple(
                BlockCacheKey(block_index=index, value=key, extra_keys=extra)
                for index, (key, extra) in enumerate(zip(keys, extras, strict=True))
            ),
            profile=spec.profile,
            version=spec.version,
            fingerprint=spec.fingerprint,
            block_size=block_size,
            token_count=len(token_ids),
            trailing_tokens=len(token_ids) % block_size,
            key_encoding=spec.key_encoding,
        )

    # ---- the spec --------------------------------------------------------------------------------

    def _fingerprint(self, group: CacheKeyGroup) -> str:
        content = [
            cache_keys.PROFILE,
            cache_keys.PROFILE_VERSION,
            cache_keys.HASH_ALGORITHM,
            cache_keys.SERIALIZATION,
            cache_keys.KEY_ENCODING,
            cache_keys.KEY_BYTES,
            self._tokenizer_fingerprint,
            self._model_revision,
            [group.group_idx, group.block_size, group.kind, group.sliding_window, group.root_key.hex()],
        ]
        return "sha256:" + hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def _extra_key_kinds(self) -> tuple[str, ...]:
        produced = {"salt": True, "lora": self._loras is not None, "mm": self._supports_media}
        return tuple(kind for kind in cache_keys.EXTRA_KEY_KINDS if produced.get(kind))

    def _test_vectors(self) -> list[CacheKeyTestVector]:
        size = self._block_size
        # Two full blocks and, where blocks are longer than a token, a part of a third.
        ids = tuple(
            (_VECTOR_IDS[index % len(_VECTOR_IDS)] + index) % self._vocab_size for index in range(2 * size + size // 2)
        )
        contexts = {"two full blocks": NO_CONTEXT, "salt": CacheKeyContext(cache_salt="tenant-a")}
        if self._loras is not None:
            contexts["adapter"] = CacheKeyContext(lora_names=("adapter-1",))
        if self._supports_media:
            item = MediaIdentity("item-1", token_offset=size // 2, token_count=size)
            contexts["media item"] = CacheKeyContext(media=(item,))
        vectors = [self._vector(name, ids, context) for name, context in contexts.items()]
        return [*vectors, self._vector("no tokens", (), NO_CONTEXT)]

    def _vector(self, name: str, ids: tuple[int, ...], context: CacheKeyContext) -> CacheKeyTestVector:
        keys = cache_keys.block_keys(self._root_key, ids, self._block_size, _key_context(context))
        return CacheKeyTestVector(name=name, token_ids=ids, expected_keys=tuple(keys), context=context)

    # ---- the context -----------------------------------------------------------------------------

    def _check_context(self, context: CacheKeyContext, num_tokens: int) -> None:
        if not isinstance(context, CacheKeyContext):
            raise InvalidArgument(f"context must be a CacheKeyContext, not {context!r:.80}")
        if context.group_idx != 0:
            raise InvalidArgument(
                f"group_idx {context.group_idx!r:.80} does not exist; this engine has KV group 0 only"
            )
        self._check_loras(context.lora_names)
        if context.cache_salt is not None:
            _check_name("cache_salt", context.cache_salt)
        if context.prompt_embeddings:
            raise InvalidArgument("prompt_embeddings: this engine takes no prompt embeddings; leave them out")
        if context.media and not self._supports_media:
            raise InvalidArgument("media: the model takes text only; leave it out")
        end = 0
        for item in sorted(context.media, key=lambda item: item.token_offset):
            _check_name("media identity", item.identity)
            if item.token_count < 1 or item.token_offset < end or item.token_offset + item.token_count > num_tokens:
                raise InvalidArgument(
                    f"media item {item.identity!r:.80} with {item.token_count} tokens at {item.token_offset}: a run has a token "
                    f"or more, lies within the {num_tokens} of the prompt and overlaps no other"
                )
            end = item.token_offset + item.token_count

    def _check_loras(self, names: Collection[str]) -> None:
        if not names:
            return
        if self._loras is None:
            raise UnsupportedTask(
                f"lora_names {sorted(names)!r:.80}: this engine serves no LoRA adapters; leave them out"
            )
        for name in names:
            _check_name("lora name", name)
        if len(set(names)) > 1:
            raise InvalidArgument(
                f"lora_names has {len(set(names))} adapters, a request of this engine has at most one"
            )
        for name in names:
            if name not in self._loras():
                raise LoraNotFound(f"no adapter {name!r:.80} is loaded; load it first")


def _key_context(context: CacheKeyContext) -> cache_keys.CacheKeyContext | None:
    if context == NO_CONTEXT:
        return None
    return cache_keys.CacheKeyContext(
        lora_names=context.lora_names,
        media=context.media,
        cache_salt=context.cache_salt,
        prompt_embeddings=context.prompt_embeddings,
    )


def _check_name(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"{name} must be a text that is not empty, not {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name} {value!r:.80} holds a lone surrogate, which is no character") from None
