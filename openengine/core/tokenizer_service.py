"""`TokenizerService`: the model's tokenizer and cache keys as a service, in the contract's terms.

    info · artifacts · tokenize · detokenize      over `Tokenizer` (tokenizer.py, tokenizer_export.py)
    cache_key_spec · cache_keys                   over `CacheKeyService`

Every answer is a function of the request and the fingerprint. Owns: validation, options, truncation, chunks. It takes no
request ids, is never aborted and works while the engine drains.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from openengine.core.admission import as_token_ids
from openengine.core.cache_key_service import NO_CONTEXT, CacheKeyService
from openengine.core.tokenizer import Tokenizer
from openengine.core.tokenizer_export import tokenizer_files, without_normalizer
from openengine.errors import ArtifactNotFound, InvalidArgument, PreconditionFailed, UnsupportedFeature
from openengine.names import check_served
from openengine.tokenizer_types import (
    CacheKeyContext,
    CacheKeySpec,
    ComputeCacheKeysResponse,
    DetokenizeOptions,
    DetokenizeResponse,
    SpecialToken,
    TokenizeOptions,
    TokenizerArtifact,
    TokenizerArtifactChunk,
    TokenizerCapabilities,
    TokenizeResponse,
    TokenizerInfo,
    TokenizerOperation,
    TokenSpan,
    TruncationSide,
)

__all__ = ["TokenizerService"]

_Options = TypeVar("_Options", TokenizeOptions, DetokenizeOptions)

_MAX_CHUNK_BYTES = 1 << 20
_LEAST_INPUT_BYTES = 1 << 20  # texts are also tokenized to be cut into parts that fit
_BYTES_PER_TOKEN = 64  # of a tokenizer that says nothing of its longest token
_SAMPLE_CHARS = 1 << 16
_UINT32_MAX = 2**32 - 1
_DEFAULT_TOKENIZE = TokenizeOptions(
    add_special_tokens=True, parse_special_tokens=True, truncation_side=TruncationSide.RIGHT, normalize=True
)
_DEFAULT_DETOKENIZE = DetokenizeOptions(skip_special_tokens=True, clean_up_spaces=False)
_CACHE_KEY_OPERATIONS = frozenset({TokenizerOperation.CACHE_KEY_SPEC, TokenizerOperation.COMPUTE_CACHE_KEYS})


class TokenizerService:
    """Tokenizer and cache keys of one model. Immutable and safe from many threads.

    `names` are those a request may use for the model, the canonical one first. `vocab_size` is the width of the model's
    output. `revision` is for people. Without `cache_keys` the model has no cache-key profile. `max_input_bytes` bounds the
    UTF-8 of a text; None is what the `max_model_len` tokens of a context may spell at the most, and 1 MiB at the least.

    Every call takes `model`: None is this one. Raises InvalidArgument for an empty name, ModelNotFound for one that is not
    served, PreconditionFailed for an expected fingerprint or profile that is not the present one, or an operation that
    `info().operations` does not list.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        names: Sequence[str],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        cache_keys: CacheKeyService | None = None,
        revision: str = "",
        max_model_len: int = 0,
        max_input_bytes: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._names = tuple(names)
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._cache_keys = cache_keys
        self._revision = revision
        self._max_model_len = max_model_len
        self._max_input_bytes = max_input_bytes

    # ---- identity --------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """The tokenizer's identity: "sha256:" and 64 hex digits, the same after a restart with the same files."""
        return self._tokenizer.fingerprint

    @property
    def vocab_size(self) -> int:
        """Width of the model's output."""
        return self._vocab_size

    @functools.cached_property
    def max_input_bytes(self) -> int:
        """The longest text of a call, in UTF-8. What admits every prompt, a few of these texts do not fill the memory."""
        if self._max_input_bytes is not None:
            return self._max_input_bytes
        return max(_LEAST_INPUT_BYTES, self._max_model_len * self._bytes_per_token())

    def _bytes_per_token(self) -> int:
        sample = "a" * _SAMPLE_CHARS
        fewest = self._tokenizer.fewest_tokens(sample)
        return -(-len(sample) // fewest) if fewest else _BYTES_PER_TOKEN

    @functools.cached_property
    def operations(self) -> tuple[TokenizerOperation, ...]:
        return tuple(op for op in TokenizerOperation if self._cache_keys or op not in _CACHE_KEY_OPERATIONS)

    def capabilities(self) -> TokenizerCapabilities:
        """What ModelInfo tells about this service; cheap, it makes no artifacts."""
        spec = self._cache_keys.spec if self._cache_keys else None
        return TokenizerCapabilities(
            fingerprint=self.fingerprint,
            operations=self.operations,
            artifact_format=self._tokenizer.format,
            artifacts_available=True,
            cache_key_profile=spec.profile if spec else "",
            cache_key_profile_version=spec.version if spec else 0,
            cache_keys_client_computable=bool(spec and spec.client_computable),
            cache_keys_engine_computable=bool(spec and spec.engine_computable),
        )

    def info(self, *, model: str | None = None) -> TokenizerInfo:
        """Identity, special tokens, artifacts and defaults. The first call makes the artifacts (a second for large ones)."""
        self.check_model(model)
        tokenizer = self._tokenizer
        return TokenizerInfo(
            model=self._names[0],
            fingerprint=self.fingerprint,
            revision=self._revision,
            format=tokenizer.format,
            vocab_size=self._vocab_size,
            bos_token_id=self._known(tokenizer.bos_token_id),
            eos_token_ids=self._eos_token_ids,
            pad_token_id=self._known(tokenizer.pad_token_id),
            unk_token_id=self._known(tokenizer.unk_token_id),
            special_tokens=tuple(
                SpecialToken(token_id=token_id, content=content)
                for token_id, content in sorted(tokenizer.special_tokens.items())
                if token_id < self._vocab_size
            ),
            operations=self.operations,
            artifacts=self._artifacts,
            default_tokenize_options=_DEFAULT_TOKENIZE,
            default_detokenize_options=_DEFAULT_DETOKENIZE,
            max_input_bytes=self.max_input_bytes,
        )

    # ---- artifacts -------------------------------------------------------------------------------

    def artifacts(
        self,
        *,
        names: Sequence[str] = (),
        expected_fingerprint: str = "",
        max_chunk_bytes: int | None = None,
        model: str | None = None,
    ) -> Iterator[TokenizerArtifactChunk]:
        """The files that rebuild the tokenizer, all or those in `names`, in chunks of at most 1 MiB.

        Checks everything before it returns. Raises InvalidArgument for a name that is no plain file name or is repeated, and
        for chunks of no bytes; ArtifactNotFound for a name that is not listed in `info()`.
        """
        self.check_model(model)
        _check_file_names(names)
        _check_count("max_chunk_bytes", max_chunk_bytes, minimum=1)
        self._check_fingerprint(expected_fingerprint)
        for name in names:
            if name not in self._files:
                raise ArtifactNotFound(f"no artifact {name!r:.80}; there are {', '.join(self._files)}")
        wanted = [artifact for artifact in self._artifacts if not names or artifact.name in names]
        return self._chunks(wanted, min(max_chunk_bytes or _MAX_CHUNK_BYTES, _MAX_CHUNK_BYTES))

    def _chunks(self, artifacts: Sequence[TokenizerArtifact], step: int) -> Iterator[TokenizerArtifactChunk]:
        for artifact in artifacts:
            data, size = self._files[artifact.name], artifact.total_size
            for offset in range(0, max(size, 1), step):
                yield TokenizerArtifactChunk(
                    fingerprint=self.fingerprint,
                    name=artifact.name,
                    offset=offset,
                    total_size=size,
                    sha256=artifact.sha256,
                    data=data[offset : offset + step],
                    last=offset + step >= size,
                )

    @functools.cached_property
    def _files(self) -> dict[str, bytes]:
        return dict(sorted(tokenizer_files(self._tokenizer).items()))

    @functools.cached_property
    def _artifacts(self) -> tuple[TokenizerArtifact, ...]:
        return tuple(
            TokenizerArtifact(name=name, total_size=len(data), sha256=hashlib.sha256(data).hexdigest())
            for name, data in self._files.items()
        )

    # ---- text and ids ----------------------------------------------------------------------------

    def tokenize(
        self,
        text: str | None,
        options: TokenizeOptions = _DEFAULT_TOKENIZE,
        *,
        expected_fingerprint: str = "",
        return_offsets: bool | None = None,
        model: str | None = None,
    ) -> TokenizeResponse:
        """Ids of `text`; with the defaults exactly those that generation runs for it as a prompt.

        Raises InvalidArgument for an absent or too long text, a malformed option, or a text that spells a token which the
        model has not; UnsupportedFeature for an option that this tokenizer cannot honour.
        """
        self.check_model(model)
        options = _effective(options, _DEFAULT_TOKENIZE)
        side = _truncation_side(options.truncation_side)
        _check_count("max_tokens", options.max_tokens, minimum=0)
        self.check_text(text)
        self._check_fingerprint(expected_fingerprint)
        tokenizer = self._tokenizer if options.normalize else self._without_normalizer()
        flags = {name: getattr(options, name) for name in ("add_special_tokens", "parse_special_tokens")}
        if return_offsets:
            ids, spans = tokenizer.encode_with_offsets(text, **flags)
        else:
            ids, spans = tokenizer.encode(text, **flags), []
        self._check_ids(np.asarray(ids, dtype=np.int64))
        kept = _kept(len(ids), options.max_tokens, side)
        return TokenizeResponse(
            token_ids=tuple(ids[kept]),
            untruncated_count=len(ids),
            fingerprint=self.fingerprint,
            offsets=tuple(TokenSpan(start=start, end=end) for start, end in spans[kept]),
            effective_options=options,
        )

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the tokens of `text` as a prompt, without tokenizing it; 0 where the tokenizer gives none."""
        return self._tokenizer.fewest_tokens(text)

    def detokenize(
        self,
        token_ids: Sequence[int],
        options: DetokenizeOptions = _DEFAULT_DETOKENIZE,
        *,
        expected_fingerprint: str = "",
        model: str | None = None,
    ) -> DetokenizeResponse:
        """Text of `token_ids`; ids that only pad the model's output give nothing.

        Raises InvalidArgument for ids that the model has not and malformed options; UnsupportedFeature for
        `clean_up_spaces`.
        """
        self.check_model(model)
        options = _effective(options, _DEFAULT_DETOKENIZE)
        ids = as_token_ids(token_ids)
        self.check_num_tokens(len(ids))
        self._check_ids(ids)
        self._check_fingerprint(expected_fingerprint)
        if options.clean_up_spaces:
            raise UnsupportedFeature("clean_up_spaces: this tokenizer has no clean-up of spaces; leave it out")
        listed = ids.tolist()
        text = self._tokenizer.decode(listed, skip_special_tokens=options.skip_special_tokens)
        return DetokenizeResponse(
            text=text,
            fingerprint=self.fingerprint,
            effective_options=options,
            ends_with_incomplete_utf8=text.endswith("\ufffd") and self._tokenizer.ends_with_incomplete_utf8(listed),
        )

    def _without_normalizer(self) -> Tokenizer:
        bare = self._bare_tokenizer
        if bare is None:
            raise UnsupportedFeature(
                "normalize=False: the vocabulary is spelled in what the normalizer writes, so it cannot be turned off; "
                "leave the option out"
            )
        return bare

    @functools.cached_property
    def _bare_tokenizer(self) -> Tokenizer | None:
        return without_normalizer(self._tokenizer)

    # ---- cache keys ------------------------------------------------------------------------------

    def cache_key_spec(self, *, model: str | None = None) -> CacheKeySpec:
        """What a client needs to compute the keys itself."""
        self.check_model(model)
        return self._key_service(TokenizerOperation.CACHE_KEY_SPEC).spec

    def cache_keys(
        self,
        *,
        text: str | None = None,
        tokens: Sequence[int] | None = None,
        context: CacheKeyContext = NO_CONTEXT,
        expected_profile: str = "",
        expected_profile_version: int = 0,
        expected_fingerprint: str = "",
        model: str | None = None,
    ) -> ComputeCacheKeysResponse:
        """The keys of the full blocks of `text` (tokenized as a prompt is) or `tokens`; `expected_*` are the spec's.

        Raises InvalidArgument for none or both of the inputs and for a context that no request here can have; UnsupportedTask
        and LoraNotFound for adapters.
        """
        self.check_model(model)
        keys = self._key_service(TokenizerOperation.COMPUTE_CACHE_KEYS)
        if (text is None) == (tokens is None):
            raise InvalidArgument("cache keys take exactly one of text and tokens")
        if text is not None:
            self.check_text(text)
        elif hasattr(tokens, "__len__"):
            self.check_num_tokens(len(tokens))
        keys.check_expected(expected_profile, expected_profile_version, expected_fingerprint)
        ids = as_token_ids(self._tokenizer.encode(text) if text is not None else tokens)
        self._check_ids(ids)
        return keys.compute(ids, context)

    def _key_service(self, operation: TokenizerOperation) -> CacheKeyService:
        if self._cache_keys is None:
            raise PreconditionFailed(f"{operation} is not offered: the engine has no prefix cache; create it with one")
        return self._cache_keys

    # ---- checks ----------------------------------------------------------------------------------

    def check_model(self, model: str | None) -> None:
        """Raises InvalidArgument for an empty name, ModelNotFound for one that is not served."""
        if model == "":
            raise InvalidArgument("model is empty; name one that is served")
        check_served(model, self._names)

    def _check_fingerprint(self, expected: str) -> None:
        if expected and expected != self.fingerprint:
            raise PreconditionFailed(
                f"expected_fingerprint is {expected!r:.100}, the tokenizer's is {self.fingerprint}; fetch its info again"
            )

    def check_text(self, text: str | None, name: str = "text") -> None:
        """Raises InvalidArgument for an absent or too long text, which the error calls `name`."""
        if text is None:
            raise InvalidArgument(f"{name} is absent; an empty text is fine")
        limit = self.max_input_bytes
        if limit and isinstance(text, str) and 4 * len(text) > limit:
            size = len(text.encode("utf-8", "surrogatepass"))
            if size > limit:
                raise InvalidArgument(f"{name} has {size} bytes, the limit is {limit}; shorten it, or send it in parts")

    def check_num_tokens(self, num_tokens: int) -> None:
        """Raises InvalidArgument for more token ids than the longest text has bytes."""
        limit = self.max_input_bytes
        if limit and num_tokens > limit:
            raise InvalidArgument(f"{num_tokens} token ids, the limit is {limit}; send them in parts")

    def _check_ids(self, ids: np.ndarray) -> None:
        if ids.size and (ids.min() < 0 or ids.max() >= self._vocab_size):
            bad = int(ids[(ids < 0) | (ids >= self._vocab_size)][0])
            raise InvalidArgument(f"token id {bad} is outside the vocabulary of {self._vocab_size}")

    def _known(self, token_id: int | None) -> int | None:
        return token_id if token_id is not None and token_id < self._vocab_size else None


def _effective(options: _Options, defaults: _Options) -> _Options:
    """`options` with the defaults for what they leave open. Raises InvalidArgument for a flag that is none."""
    if type(options) is not type(defaults):
        raise InvalidArgument(f"options must be {type(defaults).__name__}, not {options!r:.80}")
    values = {}
    for name in defaults.__dataclass_fields__:
        given, default = getattr(options, name), getattr(defaults, name)
        if given is not None and isinstance(default, bool) and not isinstance(given, bool):
            raise InvalidArgument(f"{name} must be True or False, not {given!r:.80}")
        values[name] = default if given is None else given
    return type(defaults)(**values)


def _truncation_side(side: object) -> TruncationSide:
    try:
        return TruncationSide(side)
    except ValueError:
        raise InvalidArgument(f"truncation_side must be 'left' or 'right', not {side!r:.80}") from None


def _kept(count: int, max_tokens: int | None, side: TruncationSide) -> slice:
    if max_tokens is None or max_tokens >= count:
        return slice(0, count)
    return slice(0, max_tokens) if side is TruncationSide.RIGHT else slice(count - max_tokens, count)


def _check_file_names(names: object) -> None:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise InvalidArgument(f"names must be a sequence of artifact names, not {names!r:.80}")
    seen: set[str] = set()
    for name in names:
        # Names are compared with a list and never joined to a path; a caller who sends a path has another idea of them.
        if not isinstance(name, str) or not name or name == ".." or any(char in name for char in "/\\\0"):
            raise InvalidArgument(f"artifact name {name!r:.80} must be one plain file name, as tokenizer info lists it")
        if name in seen:
            raise InvalidArgument(f"names has {name!r:.80} twice; name each artifact once")
        seen.add(name)


def _check_count(name: str, value: object, *, minimum: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _UINT32_MAX:
        raise InvalidArgument(f"{name} must be an integer between {minimum} and {_UINT32_MAX}, not {value!r:.80}")
