"""From token ids to bytes and text: the byte table of a vocabulary, and text that grows token by token.

Owns: which bytes each token contributes in the middle of a text, and holding back incomplete UTF-8.
Does not own: the vocabulary itself (tokenizer.py), stop texts (output.py).

Almost every tokenizer decodes token by token: byte-level BPE, SentencePiece with or without byte
fallback, WordPiece, plain words. For these a text is the concatenation of its tokens' bytes, so
streaming costs one table lookup and one UTF-8 decode per token. Any other decoder looks at several
tokens at once and is decoded in a bounded window (`_WindowDetokenizer`).

    ids        [ 15  |  9903  |  228 ]          9903 and 228 each hold a part of one emoji
    bytes      "hi"    f0 9f    98 80
    push ->    "hi"    ""       "😀"
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "IncrementalDetokenizer",
    "TokenSpelling",
    "TokenTable",
    "WindowTable",
    "byte_level_alphabet",
    "sentencepiece_spelling",
    "spelling_of_decoder",
]

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_WINDOW = 8  # prompt tokens kept as left context by window decoding; decoders look back one or two


class IncrementalDetokenizer(Protocol):
    """Text of one output, token by token. One thread at a time; independent of every other instance."""

    @property
    def pending(self) -> bool:
        """Whether pushed tokens have bytes that are not in the text yet."""

    def push(self, token_id: int) -> str:
        """Text that `token_id` completes; "" for a special token or while a character is incomplete."""

    def flush(self) -> str:
        """What is still held back, as U+FFFD. The next push starts a new character."""


@dataclass(frozen=True, slots=True)
class TokenSpelling:
    """How a vocabulary spells its tokens, derived from the tokenizer's decoder.

    `to_bytes` gives the mid-text bytes of an ordinary piece. `literal_added` says that added tokens
    are spelled as they read. `strips_leading_space` is true where decoding drops the one space
    that such a vocabulary puts before the first word.
    """

    to_bytes: Callable[[str], bytes]
    literal_added: bool
    strips_leading_space: bool
    special_prefix: bytes = b""


class TokenTable:
    """Bytes and text by token id, filled on first use of each id. Safe to share between threads.

    `piece` gives the vocabulary's spelling of an id, or None for an id the vocabulary lacks.
    """

    def __init__(
        self,
        piece: Callable[[int], str | None],
        spelling: TokenSpelling,
        *,
        size: int,
        special: dict[int, str],
        added: dict[int, str],
    ) -> None:
        self._piece = piece
        self._spelling = spelling
        self._special = special
        self._added = added
        self._bytes: list[bytes | None] = [None] * size
        self._text: list[str | None] = [None] * size

    def __len__(self) -> int:
        return len(self._bytes)

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes the token contributes mid-text; a special token's literal text; b"" outside the table."""
        if not 0 <= token_id < len(self._bytes):
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def text_of(self, token_id: int) -> str:
        """`bytes_of` as text, incomplete UTF-8 as U+FFFD."""
        if not 0 <= token_id < len(self._text):
            return ""
        known = self._text[token_id]
        if known is None:
            known = self._text[token_id] = self.bytes_of(token_id).decode("utf-8", "replace")
        return known

    def all_bytes(self) -> list[bytes]:
        """`bytes_of` for every id of the table, in order."""
        return [self.bytes_of(token_id) for token_id in range(len(self._bytes))]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        special, prefix = self._special, self._spelling.special_prefix
        if skip_special_tokens:
            data = b"".join([self.bytes_of(i) for i in token_ids if i not in special])
        elif prefix:
            data = b"".join([prefix + self.bytes_of(i) if i in special else self.bytes_of(i) for i in token_ids])
        else:
            data = b"".join([self.bytes_of(i) for i in token_ids])
        text = data.decode("utf-8", "replace")
        return text[1:] if self._spelling.strips_leading_space and text.startswith(" ") else text

    def detokenizer(self, prompt_ids: Sequence[int]) -> IncrementalDetokenizer:
        return _ByteDetokenizer(self, self._special, prompt_ids)

    def _spell(self, token_id: int) -> bytes:
        if (text := self._special.get(token_id)) is not None:
            return text.encode()
        if self._spelling.literal_added and (text := self._added.get(token_id)) is not None:
            return text.encode()
        piece = self._piece(token_id)
        return b"" if piece is None else self._spelling.to_bytes(piece)


class _ByteDetokenizer:
    """Exact for vocabularies whose tokens contribute fixed bytes."""

    __slots__ = ("_from_prompt", "_special", "_table", "_tail")

    def __init__(self, table: TokenTable, special: dict[int, str], prompt_ids: Sequence[int]) -> None:
        self._table = table
        self._special = special
        self._tail = _incomplete_tail(table, special, prompt_ids)
        self._from_prompt = bool(self._tail)

    @property
    def pending(self) -> bool:
        return bool(self._tail) and not self._from_prompt

    def push(self, token_id: int) -> str:
        if token_id in self._special:
            return ""
        data = self._table.bytes_of(token_id)
        if not data:
            return ""
        text, used = codecs.utf_8_decode(self._tail + data, "replace", False)
        # The prompt's half character was not continued: its U+FFFD is prompt text, which is never repeated.
        if self._from_prompt and _starts_anew(self._tail, data):
            text = text[1:]
        self._from_prompt = False
        self._tail = (self._tail + data)[used:]
        return text

    def flush(self) -> str:
        text = self._tail.decode("utf-8", "replace") if self.pending else ""
        self._tail, self._from_prompt = b"", False
        return text


class _WindowDetokenizer:
    """For decoders that look at neighbours: decode a short window with and without the new tokens.

    The window starts at tokens whose text is out already, so the decoder sees the context it needs,
    and ends at the newest token. What the longer decoding adds is new text.
    """

    __slots__ = ("_decode", "_ids", "_num_emitted", "_special")

    def __init__(
        self, decode: Callable[[Sequence[int]], str], special: dict[int, str], prompt_ids: Sequence[int]
    ) -> None:
        self._decode = decode
        self._special = special
        self._ids = [i for i in prompt_ids[-_WINDOW:] if i not in special]
        self._num_emitted = len(self._ids)

    @property
    def pending(self) -> bool:
        return self._num_emitted < len(self._ids)

    def push(self, token_id: int) -> str:
        if token_id in self._special:
            return ""
        self._ids.append(token_id)
        text = self._new_text()
        if text.endswith("\ufffd"):
            return ""
        self._advance()
        return text

    def flush(self) -> str:
        text = self._new_text() if self.pending else ""
        self._advance()
        return text

    def _new_text(self) -> str:
        before = self._decode(self._ids[: self._num_emitted])
        return self._decode(self._ids)[len(before) :]

    def _advance(self) -> None:
        self._ids = self._ids[-_WINDOW:]
        self._num_emitted = len(self._ids)


class WindowTable(TokenTable):
    """A table for decoders that look at neighbours: every question goes through the backend's own `decode`."""

    def __init__(
        self,
        decode: Callable[[Sequence[int], bool], str],
        *,
        size: int,
        special: dict[int, str],
    ) -> None:
        self._decode = decode
        ordinary = [i for i in range(size) if i not in special and decode([i], True)]
        # Mid-text means after a finished word where the decoder knows words: two of it are not run together.
        separate = (i for i in ordinary if decode([i, i], True) != 2 * decode([i], True))
        self._anchor = next(separate, ordinary[0] if ordinary else 0)
        super().__init__(
            lambda token_id: "", TokenSpelling(str.encode, False, False), size=size, special=special, added={}
        )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._decode(token_ids, skip_special_tokens)

    def detokenizer(self, prompt_ids: Sequence[int]) -> IncrementalDetokenizer:
        return _WindowDetokenizer(lambda ids: self._decode(ids, True), self._special, prompt_ids)

    def _spell(self, token_id: int) -> bytes:
        if (text := self._special.get(token_id)) is not None:
            return text.encode()
        before = self._decode([self._anchor], False)
        return self._decode([self._anchor, token_id], False)[len(before) :].encode()


def byte_level_alphabet() -> dict[int, str]:
    """The printable character that byte-level BPE (GPT-2) writes for each byte.

    Printable Latin-1 bytes stand for themselves; the others take the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(0x100 + n) for n, b in enumerate(others)}


def spelling_of_decoder(decoder: dict[str, Any] | None) -> TokenSpelling | None:
    """The spelling behind a `tokenizers` decoder given as its JSON state, or None if it is not token by token."""
    if decoder is None:
        return _word_spelling("")
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [part["type"] for part in parts]
    if set(kinds) <= {"ByteLevel", "Fuse"} and "ByteLevel" in kinds:
        return TokenSpelling(_byte_level_bytes(), literal_added=True, strips_leading_space=False)
    if kinds == ["WordPiece"]:
        return _word_spelling(parts[0]["prefix"])
    return _sentencepiece_decoder(parts)


def sentencepiece_spelling(*, space: str = "▁", byte_fallback: bool, strips_leading_space: bool) -> TokenSpelling:
    def to_bytes(piece: str) -> bytes:
        if byte_fallback and (byte := _BYTE_PIECE.match(piece)):
            return bytes([int(byte[1], 16)])
        return piece.replace(space, " ").encode()

    return TokenSpelling(to_bytes, literal_added=False, strips_leading_space=strips_leading_space)


def _sentencepiece_decoder(parts: list[dict[str, Any]]) -> TokenSpelling | None:
    space, byte_fallback, strips = None, False, False
    for part in parts:
        kind = part["type"]
        if kind == "Metaspace":
            space, strips = part["replacement"], part.get("prepend_scheme", "always") != "never"
        elif kind == "Replace" and part["content"] == " " and len(part["pattern"].get("String", "")) == 1:
            space = part["pattern"]["String"]
        elif kind == "Strip" and (part["content"], part["start"], part["stop"]) == (" ", 1, 0):
            strips = True
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind != "Fuse":
            return None
    if space is None:
        return None
    return sentencepiece_spelling(space=space, byte_fallback=byte_fallback, strips_leading_space=strips)


def _word_spelling(continuation: str) -> TokenSpelling:
    """Whole words, each with a space before it, except pieces that start with `continuation`."""

    def to_bytes(piece: str) -> bytes:
        if continuation and piece.startswith(continuation):
            return piece[len(continuation) :].encode()
        return b" " + piece.encode()

    return TokenSpelling(to_bytes, literal_added=False, strips_leading_space=True, special_prefix=b" ")


def _byte_level_bytes() -> Callable[[str], bytes]:
    # str.translate to Latin-1 keeps the per-character work in C.
    to_latin1 = {ord(char): chr(byte) for byte, char in byte_level_alphabet().items()}
    alphabet = frozenset(map(chr, to_latin1))

    def to_bytes(piece: str) -> bytes:
        # A piece outside the alphabet stands for itself as a whole, as in `tokenizers`.
        return piece.translate(to_latin1).encode("latin-1") if alphabet.issuperset(piece) else piece.encode()

    return to_bytes


def _incomplete_tail(table: TokenTable, special: dict[int, str], prompt_ids: Sequence[int]) -> bytes:
    """The bytes of a character that the prompt begins and does not finish (at most three)."""
    tail = b""
    for token_id in reversed(prompt_ids):
        if token_id in special or len(tail) > 3:
            break
        tail = table.bytes_of(token_id) + tail
    return tail[codecs.utf_8_decode(tail, "replace", False)[1] :]


def _starts_anew(tail: bytes, data: bytes) -> bool:
    return codecs.utf_8_decode(tail + data[:1], "replace", False)[0].startswith("\ufffd")
