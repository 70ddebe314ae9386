"""A vocabulary run by the `sentencepiece` package: a directory with a `.model` file and no tokenizer.json.

Owns: cutting a text at special and added tokens, BOS and EOS, the space before the first word.
Does not own: validation of callers' input (tokenizer.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from openengine.core.detokenizer import TokenTable, sentencepiece_spelling
from openengine.core.tokenizer_files import TokenizerFiles, is_present
from openengine.errors import InvalidArgument, UnsupportedFeature

__all__ = ["SentencePieceVocabulary", "find_sentencepiece_model", "load_sentencepiece"]

_MODEL_NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model")

# Classes whose ids are the model file's own ids. Others (XLM-R, Camembert, mBART, …) shift or reorder them.
_PLAIN_CLASSES = frozenset({"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "T5Tokenizer"})

# ModelProto.normalizer_spec (field 3) { add_dummy_prefix (field 3): false }. Protobuf merges a message that is
# appended to another and the last value wins, so this switches the prefix off without a protobuf library.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceVocabulary:
    """`sentencepiece.SentencePieceProcessor` behind the vocabulary protocol of tokenizer.py. Thread safe.

    `legacy` puts the space that starts a word before every stretch of text, as Llama's first tokenizers did;
    otherwise only the start of the text gets it. `added` are tokens the model file lacks.
    """

    format = "sentencepiece"

    def __init__(
        self,
        model: bytes,
        *,
        special: dict[int, str],
        added: dict[int, str],
        bos_id: int | None,
        eos_id: int | None,
        legacy: bool = True,
    ) -> None:
        self._first = _processor(model)
        self._later = self._first if legacy else _processor(model + _NO_DUMMY_PREFIX)
        self._digest = hashlib.sha256(model).hexdigest()
        self._bos = [] if bos_id is None else [bos_id]
        self._eos = [] if eos_id is None else [eos_id]
        self._legacy = legacy
        self._added = dict(sorted(added.items()))
        self.special_tokens = dict(sorted(special.items()))
        self._ids = {text: i for i, text in (self._added | self.special_tokens).items()}
        self._cut_all = _cutter(self._ids)
        self._cut_added = _cutter(text for i, text in self._added.items() if i not in special)
        self.size = max(self._first.get_piece_size(), *(i + 1 for i in (*added, *special)), 0)
        self.table = self._make_table()

    def token_id(self, text: str) -> int | None:
        if (token_id := self._ids.get(text)) is not None:
            return token_id
        token_id = self._first.piece_to_id(text)
        return token_id if self._first.id_to_piece(token_id) == text else None

    def encode_batch(self, texts: Sequence[str], *, add_special: bool, parse_special: bool) -> list[list[int]]:
        batch = []
        for text in texts:
            ids = [i for part in self._parts(text, parse_special) for i in self._encode_part(*part)]
            batch.append([*self._bos, *ids, *self._eos] if add_special else ids)
        return batch

    def encode_with_spans(
        self, text: str, *, add_special: bool, parse_special: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and the span of characters that each comes from; tokens from no text have (0, 0).

        Raises: UnsupportedFeature where the model rewrites the text, so that places in it cannot be told.
        """
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for start, part, token_id in self._parts(text, parse_special):
            if token_id is not None:
                ids.append(token_id)
                spans.append((start, start + len(part)))
                continue
            part_ids = self._processor_at(start).encode(part)
            ids += part_ids
            spans += [(start + first, start + last) for first, last in self._spans_of(part, part_ids)]
        if not add_special:
            return ids, spans
        return [*self._bos, *ids, *self._eos], [*[(0, 0)] * len(self._bos), *spans, *[(0, 0)] * len(self._eos)]

    def fewest_tokens(self, text: str) -> int:
        return 0  # the model file's normalizer may drop any number of spaces

    def identity(self) -> dict[str, Any]:
        return {
            "source": self._digest,
            "added": self._added,
            "bos": self._bos,
            "eos": self._eos,
            "legacy": self._legacy,
        }

    def _parts(self, text: str, parse_special: bool) -> Iterator[tuple[int, str, int | None]]:
        """(start, text, id of the whole-token it is, if it is one), in order; nothing for empty stretches."""
        cutter, start = self._cut_all if parse_special else self._cut_added, 0
        for match in cutter.finditer(text) if cutter else ():
            if match.start() > start:
                yield start, text[start : match.start()], None
            yield match.start(), match[0], self._ids[match[0]]
            start = match.end()
        if start < len(text):
            yield start, text[start:], None

    def _encode_part(self, start: int, part: str, token_id: int | None) -> list[int]:
        return [token_id] if token_id is not None else self._processor_at(start).encode(part)

    def _processor_at(self, start: int) -> Any:
        return self._first if start == 0 else self._later

    def _spans_of(self, part: str, ids: list[int]) -> list[tuple[int, int]]:
        """Spans by the tokens' own bytes, which are the text's unless the model normalizes it."""
        char_of = [index for index, char in enumerate(part) for _ in range(len(char.encode()))]
        pieces = [self.table.bytes_of(i) for i in ids]
        prefix = len(b"".join(pieces)) - len(char_of)  # the space before the first word, or nothing
        if b"".join(pieces) != b" " * prefix + part.encode():
            raise UnsupportedFeature("offsets are not available: this SentencePiece model normalizes its input")
        spans, at = [], -prefix
        for piece in pieces:
            first, at = max(at, 0), at + len(piece)
            spans.append((char_of[first], char_of[at - 1] + 1) if at > first else (0, 0))
        return spans

    def _make_table(self) -> TokenTable:
        processor, size = self._first, self._first.get_piece_size()

        def piece(token_id: int) -> str | None:
            if (text := self._added.get(token_id)) is not None:
                return text
            return processor.id_to_piece(token_id) if token_id < size else None

        bare = self._later if not self._legacy else _processor(processor.serialized_model_proto() + _NO_DUMMY_PREFIX)
        adds_prefix = processor.encode("a") != bare.encode("a")
        has_bytes = any(processor.is_byte(i) for i in range(size))
        spelling = sentencepiece_spelling(byte_fallback=has_bytes, strips_leading_space=adds_prefix)
        return TokenTable(piece, spelling, size=self.size, special=self.special_tokens, added=self._added)


def find_sentencepiece_model(directory: Path) -> Path | None:
    """The directory's SentencePiece file: one of the usual names, else its only `.model` file."""
    for name in _MODEL_NAMES:
        if is_present(directory / name):
            return directory / name
    others = sorted(directory.glob("*.model"))
    return others[0] if len(others) == 1 else None


def load_sentencepiece(path: Path, files: TokenizerFiles) -> SentencePieceVocabulary:
    """The vocabulary of the SentencePiece file `path`; BOS and EOS as the config says, else as Llama does.

    Raises: InvalidArgument for a damaged file; UnsupportedFeature without the `sentencepiece` package, or for
    a tokenizer class whose ids are not the file's.
    """
    name = str(files.config.get("tokenizer_class") or "LlamaTokenizer").removesuffix("Fast")
    if name not in _PLAIN_CLASSES:
        raise UnsupportedFeature(
            f"{files.directory}: tokenizer_class {name} does not use the ids of {path.name}; "
            "save the tokenizer with its tokenizer.json (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    try:
        model = path.read_bytes()
        processor = _processor(model)
    except (OSError, RuntimeError, TypeError) as exc:
        raise InvalidArgument(f"{path} is not a SentencePiece model: {exc}") from exc

    size = processor.get_piece_size()
    pieces = {i: processor.id_to_piece(i) for i in range(size) if processor.is_control(i) or processor.is_unknown(i)}
    added = {i: flags.content for i, flags in files.added.items() if i >= size}
    for i, flags in files.added.items():
        if i < size and flags.special:
            pieces[i] = flags.content
    by_text = {text: i for i, text in (added | pieces).items()}
    named = {role: by_text.get(text) for role, text in files.named.items()}
    special = pieces | {i: added[i] for i in added if files.added[i].special or added[i] in files.extra_special}
    special |= {i: files.named[role] for role, i in named.items() if i is not None}

    is_t5 = name == "T5Tokenizer"
    bos, eos = (_end(processor, named, role) for role in ("bos", "eos"))
    add_bos, add_eos = files.flag("add_bos_token"), files.flag("add_eos_token")
    return SentencePieceVocabulary(
        model,
        special=special,
        added=added,
        bos_id=bos if (not is_t5 if add_bos is None else add_bos) else None,
        eos_id=eos if (is_t5 if add_eos is None else add_eos) else None,
        legacy=files.flag("legacy") is not False,
    )


def _end(processor: Any, named: dict[str, int | None], role: str) -> int | None:
    stated = named.get(f"{role}_token")
    own = getattr(processor, f"{role}_id")()
    return stated if stated is not None else own if own >= 0 else None


def _processor(model: bytes) -> Any:
    try:
        import sentencepiece
    except ImportError as exc:
        raise UnsupportedFeature(
            "this tokenizer is a SentencePiece model and needs the sentencepiece package: "
            'pip install "openengine-inference[sentencepiece]"'
        ) from exc
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def _cutter(texts: Any) -> re.Pattern[str] | None:
    """Matches the longest of `texts` at each place; None for no texts."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None
