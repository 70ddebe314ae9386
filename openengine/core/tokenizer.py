"""Text to token ids and back: one `Tokenizer` over every kind of vocabulary.

Owns: checking callers' input, the ids with a role (BOS, EOS, …), the tokenizer's identity, chat prompts.
Does not own: the vocabularies (hf_tokenizer.py, sentencepiece_tokenizer.py), bytes and streaming
(detokenizer.py), rendering of chat templates (chat.py).

    directory ── tokenizer.json ──> HuggingFaceVocabulary ──┐
              ├─ vocab.txt … ─────> HuggingFaceVocabulary   │
              └─ *.model ─────────> SentencePieceVocabulary ├─> Tokenizer ─> ids, text, IncrementalDetokenizer
    GGUF metadata ── gguf_tokenizer > HuggingFaceVocabulary ┘
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from openengine.core.chat import render_chat_template
from openengine.core.detokenizer import IncrementalDetokenizer, TokenTable
from openengine.core.gguf_tokenizer import gguf_chat_templates, gguf_special_ids, vocabulary_from_gguf
from openengine.core.hf_tokenizer import load_huggingface
from openengine.core.legacy_tokenizer import find_legacy_files, load_legacy
from openengine.core.sentencepiece_tokenizer import find_sentencepiece_model, load_sentencepiece
from openengine.core.tokenizer_files import DEFAULT_TEMPLATE, TokenizerFiles, is_present
from openengine.errors import InvalidArgument, UnsupportedFeature
from openengine.validation import check_encodable

__all__ = ["IncrementalDetokenizer", "Tokenizer", "load_tokenizer", "tokenizer_from_gguf"]

_BEHAVIOUR = 1
"""Part of every fingerprint: raise it when this code gives other ids or other text for the same files."""

_DEFAULT_OPTIONS = {"add_special_tokens": True, "parse_special_tokens": True, "skip_special_tokens": True}


class _Vocabulary(Protocol):
    """What a tokenizer needs of a vocabulary. Immutable and thread safe."""

    format: str
    size: int
    special_tokens: dict[int, str]
    table: TokenTable

    def token_id(self, text: str) -> int | None: ...

    def encode_batch(self, texts: Sequence[str], *, add_special: bool, parse_special: bool) -> list[list[int]]: ...

    def encode_with_spans(
        self, text: str, *, add_special: bool, parse_special: bool
    ) -> tuple[list[int], list[tuple[int, int]]]: ...

    def fewest_tokens(self, text: str) -> int: ...

    def identity(self) -> dict[str, Any]: ...


@dataclass(frozen=True, eq=False, repr=False)
class Tokenizer:
    """Text to token ids and back. Immutable and safe to use from many threads.

    `bos_token_id` and its like are None where the vocabulary has no such token; `eot_token_id` ends a turn
    (GGUF only). `named_tokens` maps "bos_token" and its like to texts, for chat templates.
    """

    vocabulary: _Vocabulary
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    unk_token_id: int | None = None
    eot_token_id: int | None = None
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Tokenizer(format={self.format!r}, vocab_size={self.vocab_size})"

    @property
    def format(self) -> str:
        """ "huggingface-tokenizers" or "sentencepiece"."""
        return self.vocabulary.format

    @property
    def vocab_size(self) -> int:
        """Size of the tokenizer's own table; the model's output may be wider."""
        return self.vocabulary.size

    @property
    def special_tokens(self) -> dict[int, str]:
        """Texts of the special tokens by ascending id."""
        return self.vocabulary.special_tokens

    @property
    def chat_template(self) -> str | None:
        """The default chat template, if there is one."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    @functools.cached_property
    def fingerprint(self) -> str:
        """ "sha256:" and 64 hex digits over everything that can change an id or a text."""
        roles = {name: getattr(self, name) for name in _ROLE_IDS}
        content = {
            "behaviour": _BEHAVIOUR,
            "format": self.format,
            "size": self.vocab_size,
            "special": self.special_tokens,
            "roles": roles,
            "options": _DEFAULT_OPTIONS,
            "vocabulary": self.vocabulary.identity(),
        }
        return "sha256:" + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @functools.cached_property
    def adds_bos(self) -> bool:
        """Whether `encode` puts BOS before a text by default."""
        return self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

    # ---- text to ids

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; "" gives only what `add_special_tokens` adds.

        With `parse_special_tokens=False`, text that spells a special token becomes ordinary tokens.

        Raises: InvalidArgument when `text` is not a str or holds lone surrogates.
        """
        _check_text(text)
        return self.vocabulary.encode_batch([text], add_special=add_special_tokens, parse_special=parse_special_tokens)[
            0
        ]

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of `len(encode(text))` that costs next to nothing; 0 where the vocabulary gives none.

        A text of N bytes has at least N / B tokens, B being the bytes of the longest token.
        """
        _check_text(text)
        return self.vocabulary.fewest_tokens(text)

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, parse_special_tokens: bool = True
    ) -> list[list[int]]:
        """`encode` of each text, in order. Raises: InvalidArgument naming the index of the bad text."""
        for index, text in enumerate(texts):
            _check_text(text, f"texts[{index}]")
        return self.vocabulary.encode_batch(texts, add_special=add_special_tokens, parse_special=parse_special_tokens)

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and for each the byte range [start, end) of the UTF-8 text it comes from.

        Ranges are in order; a token that comes from no text has an empty one. Tokens that share a
        character (the parts of an emoji) each cover all of it.
        """
        _check_text(text)
        ids, spans = self.vocabulary.encode_with_spans(
            text, add_special=add_special_tokens, parse_special=parse_special_tokens
        )
        byte_at = list(range(len(text) + 1)) if text.isascii() else _byte_positions(text)
        offsets, start, end = [], 0, 0
        for first, last in spans:
            start, end = (max(start, byte_at[first]), max(end, byte_at[last])) if last > first else (end, end)
            offsets.append((start, end))
        return ids, offsets

    # ---- ids to text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids outside the table give nothing.

        Each incomplete or invalid stretch of UTF-8 becomes one U+FFFD, as in streaming and in `bytes.decode`.
        A vocabulary that writes a space before the first word loses that space here, and only here.
        """
        return self.vocabulary.table.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> IncrementalDetokenizer:
        """Text of what follows `prompt_ids`, token by token; prompt text is never repeated."""
        return self.vocabulary.table.detokenizer(prompt_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes the token contributes mid-text; a special token's literal text; b"" outside the table."""
        return self.vocabulary.table.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, incomplete UTF-8 as U+FFFD."""
        return self.vocabulary.table.text_of(token_id)

    def all_token_bytes(self) -> list[bytes]:
        """`token_bytes` of every id of the table, in order."""
        return self.vocabulary.table.all_bytes()

    def ends_with_incomplete_utf8(self, token_ids: Sequence[int]) -> bool:
        """Whether the bytes of `token_ids` stop in the middle of a character."""
        detokenizer = self.detokenizer()
        for token_id in token_ids:
            detokenizer.push(token_id)
        return detokenizer.pending

    # ---- chat

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt text that the model's chat template writes for `messages`.

        `chat_template` is a name of `chat_templates` or a template; by default the "tool_use" one when there
        are tools and the model has it, else "default".

        Raises: InvalidArgument for malformed messages or when the template refuses them; UnsupportedFeature
        when the model has no chat template.
        """
        return render_chat_template(
            self._choose_template(
                chat_template, with_tools=tools is not None and (not hasattr(tools, "__len__") or len(tools) > 0)
            ),
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self.named_tokens,
            **template_kwargs,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Ids of `apply_chat_template`. The template alone decides about BOS, so there is never a second one."""
        text = self.apply_chat_template(messages, tools, add_generation_prompt, **template_kwargs)
        return self.encode(text, add_special_tokens=False)

    def starts_with_bos(self, text: str) -> bool:
        """Whether `text` spells BOS at its start, so that encoding it with special tokens may double it."""
        bos = None if self.bos_token_id is None else self.special_tokens.get(self.bos_token_id)
        return bool(bos) and text.startswith(bos)

    def _choose_template(self, wanted: str | None, *, with_tools: bool) -> str:
        if wanted is not None:
            return self.chat_templates.get(wanted, wanted)
        template = self.chat_templates.get("tool_use") if with_tools else None
        template = template if template is not None else self.chat_template
        if template is not None:
            return template
        named = f"; it has the named ones {', '.join(sorted(self.chat_templates))}" if self.chat_templates else ""
        raise UnsupportedFeature(
            f"this model has no default chat template{named}. Pass chat_template=..., or use generate() with a prompt"
        )


_ROLE_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "eot_token_id")


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a Hugging Face directory.

    Raises: InvalidArgument naming the file that is missing, damaged or contradicts another.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise InvalidArgument(f"{directory} is not a directory; a tokenizer is read from the model's directory")
    files = TokenizerFiles.read(directory)
    named = files.named
    if is_present(directory / "tokenizer.json"):
        vocabulary: _Vocabulary = load_huggingface(files)
    elif (model := find_sentencepiece_model(directory)) is not None:
        vocabulary = load_sentencepiece(model, files)
    elif find_legacy_files(directory) is not None:
        vocabulary, named = load_legacy(files)
    else:
        raise InvalidArgument(
            f"{directory} has neither tokenizer.json nor a SentencePiece file (tokenizer.model); add one of them, "
            "for example with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    roles = ("bos", "eos", "pad", "unk")
    ids = {f"{role}_token_id": _named_id(vocabulary, named.get(f"{role}_token")) for role in roles}
    return Tokenizer(vocabulary, **ids, named_tokens=named, chat_templates=files.chat_templates)


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file carries in its metadata (`tokenizer.*` keys).

    Raises: InvalidArgument for missing or malformed keys; UnsupportedFeature for a vocabulary kind or
    pre-tokenizer that is not known.
    """
    vocabulary = vocabulary_from_gguf(metadata)
    ids = gguf_special_ids(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    return Tokenizer(
        vocabulary,
        **{name: ids.get(name.removesuffix("_token_id")) for name in _ROLE_IDS},
        named_tokens={f"{role}_token": str(tokens[token_id]) for role, token_id in ids.items()},
        chat_templates=gguf_chat_templates(metadata),
    )


def _named_id(vocabulary: _Vocabulary, text: str | None) -> int | None:
    return None if text is None else vocabulary.token_id(text)


def _check_text(text: object, name: str = "text") -> None:
    if not isinstance(text, str):
        raise InvalidArgument(f"{name} is a {type(text).__name__}, expected a str")
    check_encodable(name, text)


def _byte_positions(text: str) -> list[int]:
    positions, at = [0], 0
    for char in text:
        at += len(char.encode())
        positions.append(at)
    return positions
