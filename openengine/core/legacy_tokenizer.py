"""Vocabularies of encoders in the files from before tokenizer.json: WordPiece's vocab.txt, and vocab.json with merges.txt.

    vocab.txt                  BERT, DistilBERT, ELECTRA, MPNet    one token a line, its number the id
    vocab.json + merges.txt    RoBERTa                             byte-level BPE

Owns what those files leave unsaid, which is the tokenizer class's: the class comes from tokenizer_config.json, else from
config.json's model_type. A class that is not known is refused, since it may split texts in another way.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from openengine.core.hf_tokenizer import HuggingFaceVocabulary
from openengine.core.tokenizer_files import TokenizerFiles, is_present, read_json_object
from openengine.errors import InvalidArgument, UnsupportedFeature

__all__ = ["find_legacy_files", "load_legacy"]

_BERT = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
_ROBERTA = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "sep": "</s>", "pad": "<pad>", "cls": "<s>", "mask": "<mask>"}
_MPNET = {**_ROBERTA, "unk": "[UNK]"}
_WORDPIECE = {"bert": _BERT, "distilbert": _BERT, "electra": _BERT, "mpnet": _MPNET}


def find_legacy_files(directory: Path) -> tuple[Path, ...] | None:
    """The vocabulary's files, if the directory has them."""
    if is_present(directory / "vocab.txt"):
        return (directory / "vocab.txt",)
    pair = (directory / "vocab.json", directory / "merges.txt")
    return pair if all(map(is_present, pair)) else None


def load_legacy(files: TokenizerFiles) -> tuple[HuggingFaceVocabulary, dict[str, str]]:
    """The vocabulary, and the texts of its special tokens by name ("cls_token", …).

    Raises: InvalidArgument for damaged files, UnsupportedFeature for the files of a tokenizer class that is not known.
    """
    paths = find_legacy_files(files.directory)
    kind = _kind(files)
    known = [*_WORDPIECE] if len(paths) == 1 else ["roberta"]
    if kind not in known:
        raise UnsupportedFeature(
            f"{files.directory} has no tokenizer.json, and {' and '.join(path.name for path in paths)} of a {kind} tokenizer "
            f"cannot be read; {', '.join(known)} can. Add a tokenizer.json: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    defaults = _WORDPIECE.get(kind, _ROBERTA)
    named = {f"{role}_token": text for role, text in defaults.items()} | files.named
    try:
        backend = _wordpiece(paths[0], files, named) if len(paths) == 1 else _byte_level(paths)
    except (OSError, ValueError) as exc:
        raise InvalidArgument(f"{paths[0]} is not a readable vocabulary: {exc}; download it again") from exc
    missing = [text for text in named.values() if backend.token_to_id(text) is None]
    if missing:
        raise InvalidArgument(f"{paths[0]} lacks the special token {missing[0]!r}")
    special = dict.fromkeys([*named.values(), *(token.content for token in files.added.values())])
    backend.add_special_tokens([_special(text, kind, named) for text in special])
    backend.post_processor = _around(kind, named, backend)
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
    return HuggingFaceVocabulary(backend, source_digest=digest), named


def _kind(files: TokenizerFiles) -> str:
    name = files.config.get("tokenizer_class")
    if not name:
        return str(read_json_object(files.directory / "config.json", required=False).get("model_type"))
    return str(name).removesuffix("Fast").removesuffix("Tokenizer").lower()


def _wordpiece(path: Path, files: TokenizerFiles, named: dict[str, str]) -> tokenizers.Tokenizer:
    lines = path.read_text("utf-8").split("\n")
    vocabulary = {line.rstrip("\r"): index for index, line in enumerate(lines[:-1] if lines[-1] == "" else lines)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=named["unk_token"]))
    lower_case = files.flag("do_lower_case")
    chinese = files.flag("tokenize_chinese_chars")
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=True if lower_case is None else lower_case,
        handle_chinese_chars=True if chinese is None else chinese,
        strip_accents=files.flag("strip_accents"),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def _byte_level(paths: tuple[Path, ...]) -> tokenizers.Tokenizer:
    vocabulary, merges = models.BPE.read_file(*map(str, paths))
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _special(text: str, kind: str, named: dict[str, str]) -> AddedToken:
    takes_space = kind in ("roberta", "mpnet") and text == named["mask_token"]
    return AddedToken(text, lstrip=takes_space, normalized=False, special=True)


def _around(kind: str, named: dict[str, str], backend: tokenizers.Tokenizer) -> processors.PostProcessor:
    cls, sep = ((text, backend.token_to_id(text)) for text in (named["cls_token"], named["sep_token"]))
    if _WORDPIECE.get(kind) is _BERT:
        return processors.BertProcessing(sep, cls)
    return processors.RobertaProcessing(sep, cls, add_prefix_space=False)
