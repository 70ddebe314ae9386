"""llguidance, the backend of guides: its vocabularies, matchers and masks. No other module knows it."""

from __future__ import annotations

import importlib.util
import time
from typing import Any, Protocol

import numpy as np

from openengine.errors import UnsupportedFeature

__all__ = ["MISSING", "Backend", "BackendRefused", "GuideTokenizer", "first_line", "import_backend", "is_installed"]

MISSING = 'guided decoding needs the package llguidance: pip install "openengine-inference[guided]"'

_TRIED_STEPS = 4  # what is too large for the backend shows as soon as it is followed
_MAX_MASK_S = 1.0  # every step of every request would wait for it


class GuideTokenizer(Protocol):
    """What guides need of a tokenizer."""

    special_tokens: dict[int, str]

    def all_token_bytes(self) -> list[bytes]: ...

    def encode(self, text: str, *, add_special_tokens: bool, parse_special_tokens: bool) -> list[int]: ...


class BackendRefused(Exception):
    """The backend cannot compile a grammar."""


def is_installed() -> bool:
    """Whether the library is there, without loading it."""
    return importlib.util.find_spec("llguidance") is not None


def import_backend() -> Any:
    """The library. Raises UnsupportedFeature when it is not installed."""
    try:
        import llguidance
    except ImportError as exc:
        raise UnsupportedFeature(MISSING) from exc
    return llguidance


class Backend:
    """llguidance over one vocabulary, and over plain bytes for judging texts."""

    def __init__(self, tokenizer: GuideTokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._library = import_backend()
        self.eos_token_ids = frozenset(eos_token_ids)
        vocabulary = _Vocabulary(tokenizer, vocab_size, eos_token_ids)
        wrap = self._library.TokenizerWrapper
        self._tokenizer = self._library.LLTokenizer(wrap(vocabulary), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._bytes = self._library.LLTokenizer(wrap(_Bytes()), n_vocab=257, eos_token=256, slices=[])
        self._executor = self._library.LLExecutor()
        # Three times the backend's own limit on work at the start, and five times that of a step, some 70 ms.
        self._limits = self._library.LLParserLimits(
            initial_lexer_fuel=3_000_000, step_lexer_fuel=1_000_000, verbose_errors=False
        )
        self._row_words = -(-vocab_size // 32)

    def matcher(self, grammar: str) -> Any:
        """A matcher that has shown its first masks to be within the limits. Raises BackendRefused."""
        matcher = self._new(self._tokenizer, grammar)
        self._try(matcher.deep_copy())
        return matcher

    def _try(self, matcher: Any) -> None:
        row = np.empty(self._row_words, np.int32)
        for step in range(_TRIED_STEPS):
            began = time.thread_time()
            self.fill([(matcher, 0)], row[np.newaxis])
            if not matcher.is_error() and time.thread_time() - began > _MAX_MASK_S:
                raise BackendRefused(f"it takes more than {_MAX_MASK_S:g} s to find the tokens that it allows")
            legal = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            if not matcher.is_error() and len(legal):
                token = int(legal[-(step % 2)])
                if token in self.eos_token_ids:
                    return
                matcher.consume_token(token)
            if matcher.is_error():
                raise BackendRefused(first_line(matcher.get_error()))

    def byte_matcher(self, grammar: str) -> Any:
        """A matcher whose tokens are the bytes."""
        return self._new(self._bytes, grammar)

    def fill(self, matchers: list[tuple[Any, int]], out: np.ndarray) -> None:
        """Masks of (matcher, row) pairs."""
        if len(matchers) == 1:
            ((matcher, row),) = matchers
            matcher.unsafe_compute_mask_ptr(out[row].ctypes.data, out.shape[1] * out.itemsize)
        elif matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, out.ctypes.data, out.shape[1] * out.itemsize, len(out))

    def _new(self, tokenizer: Any, grammar: str) -> Any:
        matcher = self._library.LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise BackendRefused(first_line(matcher.get_error()))
        return matcher


class _Vocabulary:
    """A tokenizer in the shape that the backend takes: bytes of every token, and how text is written."""

    def __init__(self, tokenizer: GuideTokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        tokens = tokenizer.all_token_bytes()[:vocab_size]
        special = {token for token in tokenizer.special_tokens if token < vocab_size} | set(eos_token_ids)
        # Ids without text (padding of the output layer, special tokens) can never be drawn under a guide; the ends can.
        self.tokens = [b"" if token in special else data for token, data in enumerate(tokens)]
        self.tokens += [b""] * (vocab_size - len(tokens))
        for token in special:
            self.tokens[token] = b"<special %d>" % token
        self.special_token_ids = sorted(special)
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self._encode = tokenizer.encode
        self._ids: dict[bytes, int] = {}
        for token, data in enumerate(self.tokens):
            if token not in special and data:
                self._ids.setdefault(data, token)
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        try:
            ids = self._encode(data.decode(), add_special_tokens=False, parse_special_tokens=False)
        except UnicodeDecodeError:
            return self._greedy(data)
        # A tokenizer that puts a space before the first word writes other bytes at the start of a text than within one.
        written = b"".join(self.tokens[token] for token in ids)
        return ids if written == data else self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token at each place; bytes that no token has are left out."""
        ids, at = [], 0
        while at < len(data):
            for end in range(min(at + self._longest, len(data)), at, -1):
                token = self._ids.get(data[at:end])
                if token is not None:
                    ids.append(token)
                    break
            else:
                end = at + 1
            at = end
        return ids


class _Bytes:
    """A vocabulary of all bytes."""

    tokens = (*(bytes([value]) for value in range(256)), b"<end>")
    special_token_ids = (256,)
    eos_token_id = 256
    bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def first_line(error: str) -> str:
    """The backend's message without its details."""
    if error.startswith("panic:"):
        return "it is larger than the backend can take"
    return error.strip().partition("\n")[0][:300].removesuffix("<non-verbose/>").strip()
