"""A tokenizer's state as the files that rebuild it, and the same tokenizer with its normalizer switched off.

The files say what the tokenizer does now, after every companion file and GGUF key was applied: `load_tokenizer` of a folder
with them gives the same ids, and so do the usual readers of the format. They are made from memory; no path is opened.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import tokenizers

from openengine.core.hf_tokenizer import HuggingFaceVocabulary
from openengine.core.sentencepiece_tokenizer import SentencePieceVocabulary
from openengine.core.tokenizer import Tokenizer

__all__ = ["tokenizer_files", "without_normalizer"]

_CONFIG_FILE = "tokenizer_config.json"
_NAMED = ("bos_token", "cls_token", "eos_token", "mask_token", "pad_token", "sep_token", "unk_token")

# Normalizers that only rewrite characters. Others write what the vocabulary is spelled in, such as ▁ for a space.
_OPTIONAL_NORMALIZERS = frozenset(
    {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Strip", "StripAccents"}
)


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Contents by plain file name, in ascending order of names."""
    vocabulary = tokenizer.vocabulary
    special = set(tokenizer.special_tokens.values())
    # A named token becomes special when it is read, so those that are not special here must stay unnamed.
    named = {name: text for name in _NAMED if (text := tokenizer.named_tokens.get(name)) in special}
    named = {**named, **_chat_template(tokenizer)}
    if isinstance(vocabulary, SentencePieceVocabulary):
        return _sentencepiece_files(vocabulary, named)
    # A class of its own could build its pipeline anew; this one takes tokenizer.json as it is.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    return {"tokenizer.json": vocabulary._backend.to_str().encode(), _CONFIG_FILE: _json(config)}


def without_normalizer(tokenizer: Tokenizer) -> Tokenizer | None:
    """`tokenizer` without its normalizer; itself where it has none, None where the vocabulary depends on it."""
    vocabulary = tokenizer.vocabulary
    if not isinstance(vocabulary, HuggingFaceVocabulary):
        return None  # the model file's normalizer is a part of it
    normalizer = vocabulary.identity()["normalizer"]
    if normalizer is None:
        return tokenizer
    if not _kinds(normalizer) <= _OPTIONAL_NORMALIZERS:
        return None
    backend = vocabulary._backend
    bare = tokenizers.Tokenizer(backend.model)
    for name in ("pre_tokenizer", "post_processor", "decoder"):
        if (part := getattr(backend, name)) is not None:
            setattr(bare, name, part)
    added = sorted(backend.get_added_tokens_decoder().items())
    bare.add_tokens([token for _, token in added])
    if any(bare.token_to_id(token.content) != token_id for token_id, token in added):
        return None  # the table has gaps, which only a file can express
    return replace(tokenizer, vocabulary=HuggingFaceVocabulary(bare, source_digest="", size=vocabulary.size))


def _chat_template(tokenizer: Tokenizer) -> dict[str, Any]:
    """The chat templates as tokenizer_config.json has them: the only one, or a list of named ones."""
    templates = tokenizer.chat_templates
    if not templates:
        return {}
    only = tokenizer.chat_template if len(templates) == 1 else None
    return {"chat_template": only or [{"name": name, "template": text} for name, text in sorted(templates.items())]}


def _sentencepiece_files(vocabulary: SentencePieceVocabulary, named: dict[str, Any]) -> dict[str, bytes]:
    state, special = vocabulary.identity(), vocabulary.special_tokens
    added = {
        str(token_id): {"content": text, "special": token_id in special}
        for token_id, text in sorted((state["added"] | special).items())
    }
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": state["legacy"],
        "add_bos_token": bool(state["bos"]),
        "add_eos_token": bool(state["eos"]),
        "added_tokens_decoder": added,
        "clean_up_tokenization_spaces": False,
        **named,
    }
    for role in ("bos", "eos"):
        if state[role]:
            config[f"{role}_token"] = special[state[role][0]]
    return {"tokenizer.model": vocabulary._first.serialized_model_proto(), _CONFIG_FILE: _json(config)}


def _kinds(normalizer: dict[str, Any]) -> set[str]:
    if normalizer["type"] != "Sequence":
        return {normalizer["type"]}
    return set().union(*map(_kinds, normalizer["normalizers"]))


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True).encode()
