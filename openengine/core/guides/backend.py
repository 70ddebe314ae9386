"""llguidance, the backend of guides: its vocabularies, matchers and masks.

No other module imports it. grammar.py, and those that put its symbols together, write its syntax; state.py and compiled.py
ask its matchers.
"""

from __future__ import annotations

import importlib.util
import re
import time
from typing import Any, Protocol

import numpy as np

from openengine.core.guides.work import StepTime
from openengine.errors import UnsupportedFeature

__all__ = [
    "MISSING",
    "Backend",
    "BackendRefused",
    "GuideTokenizer",
    "import_backend",
    "is_installed",
    "plain_error",
    "says_illegal",
]

MISSING = 'guided decoding needs the package llguidance: pip install "openengine-inference[guided]"'

_TRIED_STEPS = 4  # what is too large for the backend shows as soon as it is followed
_LEXER_FUEL = 3_000_000  # three times the backend's own limit on work at the start
_STEP_LEXER_FUEL = 1_000_000  # five times its own limit, some 70 ms
# Half of its own limit. A mask over 49,152 tokens takes up to 15,000 with the 900 optional members that a schema may have,
# and 2000 with all schemas of MaskBench.
_STEP_ITEMS = 25_000

_ILLEGAL = (
    "satisfy the grammar",
    "parser stopped",
)  # in what the backend says of a token that the guide does not allow
_PANIC = "it is larger than the backend can take"
# What the backend says of its limits, and what that means to who wrote the guide.
_MEANINGS = (
    (
        r"Current row has (\d+) items; max is (\d+)",
        (
            "at one place of the text it has {0} possible continuations, the limit is {1}; a rule that ends with itself, as in "
            "x ::= item x, adds some with each item: write x ::= item* or x ::= x item instead, and let alternatives begin with "
            "different characters"
        ),
    ),
    (
        r"Too many items \(limit (\d+)",
        (
            "the tokens that it allows at one place of the text have more than {0} readings; let alternatives begin with different "
            "characters, use fewer optional parts one after another, and no rules that repeat themselves on both sides"
        ),
    ),
    (
        r"too many expressions constructed|fuel exhausted|precomputation failed",
        (
            "its patterns are too complex to be followed together; use fewer or simpler patterns at one place, and lower counts of "
            "repetitions such as {{m,n}} or maxLength"
        ),
    ),
    (
        r"too many states: \d+ >= (\d+)",
        (
            "its patterns have more than {0} states; use fewer or simpler patterns, and lower counts of repetitions such as {{m,n}} "
            "or maxLength"
        ),
    ),
    (
        r"initial lexer configuration \(grammar\) too big \(limit for this grammar: (\d+)",
        (
            "its patterns and texts are too large together, the limit is some {0} parts; use fewer or shorter patterns, texts and "
            "names, and lower counts of repetitions such as {{m,n}} or maxLength"
        ),
    ),
    (
        r"grammar size \(number of symbols\) too big \(limit for this grammar: (\d+)",
        (
            "it has more than {0} symbols once its repetitions are written out; use fewer rules or properties, and lower counts of "
            "repetitions such as {{m,n}} or maxItems"
        ),
    ),
    (r"too deeply nested", "it is nested too deeply; use fewer groups in one another"),
)


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
        self.vocab_size = vocab_size
        self.row_words = -(-vocab_size // 32)  # i32 words of a mask
        self.eos_token_ids = frozenset(eos_token_ids)
        vocabulary = _Vocabulary(tokenizer, vocab_size, eos_token_ids)
        wrap = self._library.TokenizerWrapper
        self._tokenizer = self._library.LLTokenizer(wrap(vocabulary), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._bytes = self._library.LLTokenizer(wrap(_Bytes()), n_vocab=257, eos_token=256, slices=[])
        self._executor = self._library.LLExecutor()
        self._limits = self._library.LLParserLimits(
            initial_lexer_fuel=_LEXER_FUEL,
            step_lexer_fuel=_STEP_LEXER_FUEL,
            step_max_items=_STEP_ITEMS,
            verbose_errors=False,
        )
        # A text has no steps, which would renew the limit on work that precomputing sets.
        self._text_limits = self._library.LLParserLimits(
            initial_lexer_fuel=_LEXER_FUEL, precompute_large_lexemes=False, verbose_errors=False
        )

    def matcher(self, grammar: str) -> Any:
        """A matcher that has shown its first masks to be within the limits. Raises BackendRefused."""
        matcher = self._new(self._tokenizer, grammar, self._limits)
        self._try(matcher.deep_copy())
        return matcher

    def _try(self, matcher: Any) -> None:
        row = np.empty(self.row_words, np.int32)
        step_time = StepTime()
        for step in range(_TRIED_STEPS):
            step_time.spend(self.fill_one(matcher, row))
            if not matcher.is_error() and step_time.error:
                raise BackendRefused(f"{step_time.error}; simplify its patterns, or let it have fewer alternatives")
            legal = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            if not matcher.is_error() and len(legal):
                token = int(legal[-(step % 2)])  # the first and the last in turns
                if token in self.eos_token_ids:
                    return
                began = time.thread_time()
                matcher.consume_token(token)
                step_time.next_token(time.thread_time() - began)
            if matcher.is_error():
                raise BackendRefused(plain_error(matcher.get_error()))

    def byte_matcher(self, grammar: str) -> Any:
        """A matcher whose tokens are the bytes, without masks. Raises BackendRefused."""
        return self._new(self._bytes, grammar, self._text_limits)

    def fill(self, matchers: list[tuple[Any, int]], out: np.ndarray) -> None:
        """Masks of (matcher, row) pairs, in parallel."""
        if matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, out.ctypes.data, out.shape[1] * out.itemsize, len(out))

    def fill_one(self, matcher: Any, row: np.ndarray) -> float:
        """Mask of one matcher, by this thread; returns the seconds of CPU time that it took."""
        began = time.thread_time()
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        return time.thread_time() - began

    def _new(self, tokenizer: Any, grammar: str, limits: Any) -> Any:
        matcher = self._library.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise BackendRefused(plain_error(matcher.get_error()))
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


def says_illegal(error: str) -> bool:
    """Whether the backend's message is about a token that the guide does not allow, and not about a limit."""
    return any(words in error for words in _ILLEGAL)


def plain_error(error: str) -> str:
    """The backend's message in the terms of who wrote the guide: what is too large, the limit and the fix."""
    if error.startswith("panic:"):
        return _PANIC
    for pattern, meaning in _MEANINGS:
        if found := re.search(pattern, error):
            return meaning.format(*found.groups())
    return error.strip().partition("\n")[0][:300].removesuffix("<non-verbose/>").strip()
