"""A vocabulary run by the `tokenizers` package: from tokenizer.json, or built from GGUF metadata.

Owns: the `tokenizers.Tokenizer` and its twin that reads special-token text as ordinary text.
Does not own: how GGUF metadata becomes one (gguf_tokenizer.py), validation of callers' input (tokenizer.py).
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, normalizers, processors
from tokenizers.models import BPE

from openengine.core.detokenizer import TokenTable, WindowTable, byte_level_alphabet, spelling_of_decoder
from openengine.core.tokenizer_files import TokenizerFiles
from openengine.errors import InvalidArgument

__all__ = ["HuggingFaceVocabulary", "load_huggingface", "set_bos_eos"]


class HuggingFaceVocabulary:
    """`tokenizers.Tokenizer` behind the vocabulary protocol of tokenizer.py. Thread safe, never changed.

    `source_digest` identifies the vocabulary: a SHA-256 of the file or of the metadata it was built from.
    """

    format = "huggingface-tokenizers"

    def __init__(self, backend: tokenizers.Tokenizer, *, source_digest: str, size: int | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._source_digest = source_digest
        self._ordinary: tokenizers.Tokenizer | None = None
        self._ordinary_lock = threading.Lock()
        added = backend.get_added_tokens_decoder()
        self.size = size if size is not None else max(backend.get_vocab(True).values(), default=-1) + 1
        self.special_tokens = {i: token.content for i, token in sorted(added.items()) if token.special}
        self.table = self._make_table({i: token.content for i, token in added.items() if not token.special})

    def token_id(self, text: str) -> int | None:
        return self._backend.token_to_id(text)

    def encode_batch(self, texts: Sequence[str], *, add_special: bool, parse_special: bool) -> list[list[int]]:
        # The batch call releases the GIL, also for one text; the single call does not.
        backend = self._backend if parse_special else self._reading_special_as_text()
        return [e.ids for e in backend.encode_batch_fast(list(texts), add_special_tokens=add_special)]

    def encode_with_spans(
        self, text: str, *, add_special: bool, parse_special: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and the span of characters that each comes from; None-text tokens have (0, 0)."""
        backend = self._backend if parse_special else self._reading_special_as_text()
        encoding = backend.encode_batch([text], add_special_tokens=add_special)[0]
        return encoding.ids, encoding.offsets

    def encode_pair(self, first: str, second: str | None) -> tuple[list[int], list[int], list[int | None]]:
        """Ids of one text or of a pair, each token's type, and the text it comes from: 0, 1, None for special tokens."""
        encoding = self._backend.encode(first, second)
        return encoding.ids, encoding.type_ids, encoding.sequence_ids

    def lower_cased(self) -> HuggingFaceVocabulary:
        """A copy that lower-cases every text before anything else, except for special tokens in it."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        before = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])
        return HuggingFaceVocabulary(backend, source_digest=f"{self._source_digest}-lower", size=self.size)

    def identity(self) -> dict[str, Any]:
        backend = self._backend
        parts = {name: _state(getattr(backend, name)) for name in _PIPELINE}
        added = {i: _flags(token) for i, token in sorted(backend.get_added_tokens_decoder().items())}
        return {"source": self._source_digest, "added": added, **parts}

    def fewest_tokens(self, text: str) -> int:
        if self._spelled_bytes is None:
            return 0
        shrinking, silent = self._spelled_bytes
        return -(-len(text.encode().translate(None, silent)) // (shrinking * self._longest_token))

    @functools.cached_property
    def _spelled_bytes(self) -> tuple[int, bytes] | None:
        return _spelled_bytes(self._backend)

    @functools.cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.table.all_bytes()))

    def _make_table(self, added: dict[int, str]) -> TokenTable:
        backend, special = self._backend, self.special_tokens
        spelling = spelling_of_decoder(_state(backend.decoder))
        if spelling is not None:
            return TokenTable(backend.id_to_token, spelling, size=self.size, special=special, added=added)

        def decode(token_ids: Sequence[int], skip_special_tokens: bool) -> str:
            known = [i for i in token_ids if 0 <= i < self.size]
            return backend.decode(known, skip_special_tokens=skip_special_tokens)

        return WindowTable(decode, size=self.size, special=special)

    def _reading_special_as_text(self) -> tokenizers.Tokenizer:
        with self._ordinary_lock:
            if self._ordinary is None:
                self._ordinary = _reading_special_as_text(self._backend, self.special_tokens)
            return self._ordinary


# Other classes have these flags in their config too, and go by the post-processor alone.
_CLASSES_WITH_FLAGS = frozenset(
    {"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer", "GPTNeoXTokenizer"}
)

# Pre-tokenizers that only cut, or write a space in another way.
_CUTTING = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})
# Unicode: no composed character is shorter than a quarter of its longest equivalent (U+1FBE U+0308 U+0301, seven bytes,
# is U+0390, two), and later versions add none.
_NFC_SHRINKING = 4

_PIPELINE = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def load_huggingface(files: TokenizerFiles) -> HuggingFaceVocabulary:
    """The vocabulary of `tokenizer.json`, with the tokens and BOS/EOS rules that the other files add.

    Raises: InvalidArgument when the file is damaged or its companions contradict it.
    """
    path = files.directory / "tokenizer.json"
    if not path.is_file():
        raise InvalidArgument(f"{path} is no regular file")
    try:
        raw = path.read_bytes()
        backend = tokenizers.Tokenizer.from_buffer(raw)
    except Exception as exc:  # `tokenizers` raises bare Exception for what it cannot parse
        raise InvalidArgument(f"{path} is not a tokenizer this version of `tokenizers` can read: {exc}") from exc
    _add_tokens(backend, files)
    _follow_bos_eos_flags(backend, files)
    return HuggingFaceVocabulary(backend, source_digest=hashlib.sha256(raw).hexdigest())


def set_bos_eos(backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Make `backend` put these tokens around every text; None leaves that side bare."""
    ends = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    pair = [*single, *([f"{bos}:1"] if bos else []), "$B:1", *([f"{eos}:1"] if eos else [])]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)


def _add_tokens(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for token_id, flags in sorted(files.added.items()):
        token = AddedToken(flags.content, **flags.as_dict())
        if flags.content not in present:
            backend.add_tokens([token])
            present[flags.content] = token
        if (actual := backend.token_to_id(flags.content)) != token_id:
            raise InvalidArgument(
                f"{files.directory}: token {flags.content!r} has id {token_id} in the tokenizer's config "
                f"and {actual} in its vocabulary; the files do not belong together"
            )
    for text in files.named.values():
        token = present.get(text, AddedToken(text, normalized=False))
        if not token.special:
            token = AddedToken(text, **{**_flags(token), "special": True})
            backend.add_special_tokens([token])
            present[text] = token
    # The vocabulary file's word on a token stands; the list only adds what is missing.
    missing = dict.fromkeys(text for text in files.extra_special if text not in present)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in missing])


def _follow_bos_eos_flags(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    """Bring the post-processor in line with add_bos_token and add_eos_token, for the classes that read them.

    Left alone when it already does what they say, since it may add more than these two.
    """
    if str(files.config.get("tokenizer_class")).removesuffix("Fast") not in _CLASSES_WITH_FLAGS:
        return
    bos, eos = files.named.get("bos_token"), files.named.get("eos_token")
    sample = backend.encode("a", add_special_tokens=True)
    first, last = (sample.tokens[end] if any(sample.special_tokens_mask[end:][:1]) else None for end in (0, -1))
    has_bos, has_eos = bos is not None and bos == first, eos is not None and eos == last
    wants_bos, wants_eos = files.flag("add_bos_token"), files.flag("add_eos_token")
    wants_bos = has_bos if wants_bos is None or bos is None else wants_bos
    wants_eos = has_eos if wants_eos is None or eos is None else wants_eos
    if (wants_bos, wants_eos) != (has_bos, has_eos):
        set_bos_eos(backend, bos=bos if wants_bos else None, eos=eos if wants_eos else None)


def _reading_special_as_text(backend: tokenizers.Tokenizer, special: dict[int, str]) -> tokenizers.Tokenizer:
    """A twin that shares the model and does not look for special tokens in the text."""
    twin = tokenizers.Tokenizer(backend.model)
    for name in _PIPELINE:
        if (part := getattr(backend, name)) is not None:
            setattr(twin, name, part)
    added = backend.get_added_tokens_decoder()
    twin.add_tokens([token for _, token in sorted(added.items())])
    if any(twin.token_to_id(token.content) != i for i, token in added.items()):
        twin = tokenizers.Tokenizer.from_str(backend.to_str())
    twin.encode_special_tokens = True

    # A model whose own vocabulary spells special tokens (Unigram above all) still finds them: take them out.
    texts = list(special.values())
    found = twin.encode_batch_fast(texts, add_special_tokens=False)
    reachable: set[str | None] = {special[i] for e in found for i in e.ids if i in special}
    reachable.discard(_unknown_token(backend))  # it stands for any text the vocabulary cannot spell
    return _without_pieces(backend, reachable) if reachable else twin


def _spelled_bytes(backend: tokenizers.Tokenizer) -> tuple[int, bytes] | None:
    """How many times longer than its tokens' bytes a text can be, beside the bytes that no token spells.

    None where a token may stand for any amount of text: only BPE over bytes is sure not to, and then neither a normalizer
    nor an added token may delete anything.
    """
    model = backend.model
    pre_tokenizers = _parts(_state(backend.pre_tokenizer), "pretokenizers")
    is_byte_level = any(part["type"] == "ByteLevel" for part in pre_tokenizers)
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if any(part["type"] not in _CUTTING or part.get("behavior") == "Removed" for part in pre_tokenizers):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    spellings = byte_level_alphabet() if is_byte_level else {byte: f"<0x{byte:02X}>" for byte in range(256)}
    # A byte that a byte-level vocabulary lacks gives no token; another one gives the unknown token for a whole stretch.
    silent = bytes(byte for byte, text in spellings.items() if model.token_to_id(text) is None)
    if not is_byte_level and (silent or not model.byte_fallback):
        return None
    shrinking = _normalizer_shrinking(_parts(_state(backend.normalizer), "normalizers"))
    return None if shrinking is None or (silent and shrinking > 1) else (shrinking, silent)


def _normalizer_shrinking(parts: list[dict[str, Any]]) -> int | None:
    shrinking = 1
    for part in parts:
        replaced = part["pattern"].get("String") if part["type"] == "Replace" else None
        if part["type"] == "NFC":
            shrinking *= _NFC_SHRINKING
        elif part["type"] != "Prepend" and not (replaced and len(part["content"].encode()) >= len(replaced.encode())):
            return None
    return shrinking


def _parts(state: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    return [inner for part in state[members] for inner in _parts(part, members)]


def _unknown_token(backend: tokenizers.Tokenizer) -> str | None:
    model = backend.model
    if (unk_id := getattr(model, "unk_id", None)) is not None:
        return backend.id_to_token(unk_id)
    return getattr(model, "unk_token", None)


def _without_pieces(backend: tokenizers.Tokenizer, pieces: set[str]) -> tokenizers.Tokenizer:
    """A copy whose model cannot produce `pieces`; every other id stays what it is."""
    state = json.loads(backend.to_str())
    model = state["model"]
    # A name no text spells by accident keeps the place of the piece in the table.
    hidden = {piece: f"\x00{n}\x00" for n, piece in enumerate(sorted(pieces))}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hidden.get(piece, piece): i for piece, i in model["vocab"].items()}
    else:
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [pair for pair in pairs if "".join(pair) not in hidden and not hidden.keys() & set(pair)]
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in hidden]
    twin = tokenizers.Tokenizer.from_str(json.dumps(state))
    twin.encode_special_tokens = True
    return twin


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _flags(token: AddedToken) -> dict[str, Any]:
    return {name: getattr(token, name) for name in ("special", "normalized", "lstrip", "rstrip", "single_word")}
