"""Builds a `tokenizers.Tokenizer` from the vocabulary that a GGUF file carries in its metadata.

Owns: the two vocabulary kinds of GGUF ("gpt2": byte-level BPE; "llama": SentencePiece BPE with byte
fallback) and the pre-tokenizers named by `tokenizer.ggml.pre`. Does not own: reading the file (gguf.py).

A "llama" vocabulary has scores and no merge list. SentencePiece joins the neighbours whose union has the
best score, so listing every split of each piece, pieces in order of score, gives `tokenizers` the same rule.
Facts about keys, token types and pre-tokenizer patterns: llama.cpp (`llama-vocab.cpp`) and the
tokenizer.json files of the model families it names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from openengine.core.hf_tokenizer import HuggingFaceVocabulary, set_bos_eos
from openengine.core.tokenizer_files import DEFAULT_TEMPLATE
from openengine.errors import InvalidArgument, UnsupportedFeature

__all__ = ["PRE_TOKENIZERS", "gguf_chat_templates", "gguf_special_ids", "vocabulary_from_gguf"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}"

# A word that changes from upper to lower case at most once, as in tekken and o200k.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_REST_SLASH}"
_GPT4O = rf"{_CASED % (_CONTRACTIONS + '?', _CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_REST_SLASH}"

_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CJK_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK_V3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK_V3_WORDS)
_DIGITS_GPT2 = (r"\p{N}", _GPT2)

PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4"), (_GPT2,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), (_QWEN2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_GPT2),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
}
"""Patterns by `tokenizer.ggml.pre`, each splitting the pieces that the one before left."""

# These vocabularies come from tiktoken: a word that is a token is that token, whatever the merges say.
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"})


def vocabulary_from_gguf(metadata: Mapping[str, Any]) -> HuggingFaceVocabulary:
    """The vocabulary described by the `tokenizer.ggml.*` keys of `metadata`.

    Raises: InvalidArgument when a key is missing or malformed; UnsupportedFeature for a vocabulary kind or
    pre-tokenizer that is not known here.
    """
    kind = _required(metadata, "model")
    tokens = [str(token) for token in _required(metadata, "tokens")]
    types = [int(t) for t in _optional(metadata, "token_type", [_NORMAL] * len(tokens))]
    if len(types) != len(tokens):
        raise InvalidArgument(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    try:
        if kind == "gpt2":
            backend = _byte_level(metadata, tokens)
        elif kind == "llama":
            backend = _sentencepiece(metadata, tokens, types)
        else:
            raise UnsupportedFeature(
                f"tokenizer.ggml.model is {kind!r}; supported are 'gpt2' and 'llama'. "
                "Use the model's Hugging Face directory instead"
            )
    except (TypeError, UnicodeError) as exc:
        raise InvalidArgument(f"the GGUF file's tokenizer.ggml.tokens or merges are not valid text: {exc}") from exc
    backend.add_tokens(_whole_tokens(tokens, types))
    ids = gguf_special_ids(metadata)
    bos, eos = _ends(metadata, kind, tokens, ids)
    set_bos_eos(backend, bos=bos, eos=eos)
    return HuggingFaceVocabulary(backend, source_digest=_digest(metadata, kind, tokens, types), size=len(tokens))


def gguf_special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Ids by role ("bos", "eos", "eot", "unk", "pad", …) of the roles the file names.

    Raises: InvalidArgument for an id outside the vocabulary.
    """
    size = len(_required(metadata, "tokens"))
    keys = {"bos": "bos", "eos": "eos", "eot": "eot", "unk": "unknown", "pad": "padding", "sep": "seperator"}
    found = {}
    for role, key in keys.items():
        value = _optional(metadata, f"{key}_token_id", None)
        if value is None:
            continue
        if not 0 <= int(value) < size:
            raise InvalidArgument(f"tokenizer.ggml.{key}_token_id is {value}, outside the vocabulary of {size}")
        found[role] = int(value)
    return found


def gguf_chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; the main one is "default"."""
    prefix = "tokenizer.chat_template"
    templates = {key[len(prefix) + 1 :]: str(v) for key, v in metadata.items() if key.startswith(f"{prefix}.")}
    return templates | ({DEFAULT_TEMPLATE: str(metadata[prefix])} if prefix in metadata else {})


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    name = str(_optional(metadata, "pre", "default"))
    if name not in PRE_TOKENIZERS:
        raise UnsupportedFeature(
            f"tokenizer.ggml.pre is {name!r}, whose splitting rule is not known here; supported are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. Use the model's Hugging Face directory instead"
        )
    stored = _required(metadata, "merges")
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in stored]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(_bpe(vocab, merges, ignore_merges=name in _WHOLE_WORDS_FIRST))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PRE_TOKENIZERS[name]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    # Runs of spaces are stored as they read; the model sees them after the normalizer.
    pieces = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    unk = gguf_special_ids(metadata).get("unk")
    merges = _merges_by_score(pieces, types, [float(s) for s in _required(metadata, "scores")], vocab)
    model = _bpe(
        vocab,
        merges,
        unk_token=None if unk is None else pieces[unk],
        fuse_unk=True,
        byte_fallback=_BYTE in types,
    )
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", _SPACE)
    decode: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _optional(metadata, "add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        decode.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(decode)
    return backend


def _merges_by_score(
    pieces: list[str], types: list[int], scores: list[float], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """Every way to split a piece into two pieces, best piece first, longest left part first.

    Control, unknown and byte pieces are never spelled by text. Runs of spaces come first: SentencePiece
    takes user-defined pieces before it merges anything. Other user-defined ones are matched as added tokens.
    """
    if len(scores) != len(pieces):
        raise InvalidArgument(f"tokenizer.ggml.scores has {len(scores)} entries for {len(pieces)} tokens")
    runs = [p for p, t in zip(pieces, types, strict=True) if t == _USER_DEFINED and not p.strip(_SPACE)]
    ranked = sorted((i for i, t in enumerate(types) if t in (_NORMAL, _UNUSED)), key=lambda i: -scores[i])
    # One comprehension: this loop is most of the time it takes to build a large vocabulary.
    return [
        (left, right)
        for piece in (*runs, *map(pieces.__getitem__, ranked))
        for cut in range(len(piece) - 1, 0, -1)
        if (left := piece[:cut]) in vocab and (right := piece[cut:]) in vocab
    ]


def _bpe(vocab: dict[str, int], merges: list[tuple[str, ...]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab, merges, **options)
    except (TypeError, UnicodeError):
        raise
    except Exception as exc:  # `tokenizers` raises bare Exception
        raise InvalidArgument(f"tokenizer.ggml.merges do not fit the vocabulary: {exc}") from exc


def _whole_tokens(tokens: list[str], types: list[int]) -> list[AddedToken]:
    """Tokens that are matched in the text before anything else: special ones and user-defined ones."""
    special = {_CONTROL, _UNKNOWN}
    return [
        AddedToken(token, normalized=False, special=kind in special)
        for token, kind in zip(tokens, types, strict=True)
        if token and (kind in special or (kind == _USER_DEFINED and token.strip(" ")))
    ]


def _ends(
    metadata: Mapping[str, Any], kind: str, tokens: list[str], ids: dict[str, int]
) -> tuple[str | None, str | None]:
    bos_by_default = kind == "llama" or _optional(metadata, "pre", "default") in _WHOLE_WORDS_FIRST
    wanted = {
        "bos": bool(_optional(metadata, "add_bos_token", bos_by_default and "bos" in ids)),
        "eos": bool(_optional(metadata, "add_eos_token", False)),
    }
    for role, is_wanted in wanted.items():
        if is_wanted and role not in ids:
            raise InvalidArgument(
                f"tokenizer.ggml.add_{role}_token is set, but tokenizer.ggml.{role}_token_id is missing"
            )
    bos, eos = (tokens[ids[role]] if is_wanted else None for role, is_wanted in wanted.items())
    return bos, eos


def _digest(metadata: Mapping[str, Any], kind: str, tokens: list[str], types: list[int]) -> str:
    scores = [float(s) for s in _optional(metadata, "scores", [])]
    merges = [m if isinstance(m, str) else list(m) for m in _optional(metadata, "merges", [])]
    parts = [kind, _optional(metadata, "pre", None), tokens, types, scores, merges]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(json.dumps(part, ensure_ascii=False).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    value = _optional(metadata, key, None)
    if value is None:
        raise InvalidArgument(f"the GGUF file has no tokenizer.ggml.{key}; it carries no usable tokenizer")
    return value


def _optional(metadata: Mapping[str, Any], key: str, default: Any) -> Any:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if isinstance(default, Sequence) and not isinstance(default, str) and isinstance(value, str):
        raise InvalidArgument(f"tokenizer.ggml.{key} is a text, expected an array")
    return default if value is None else value
