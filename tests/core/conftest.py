"""One tokenizer of every kind, for the tests of tokenizers and of what they serve."""

from __future__ import annotations

import io

import pytest

from openengine.core.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf
from tests.tokenizer_kinds import (
    CORPUS,
    byte_gguf,
    byte_level,
    sentencepiece_gguf,
    unigram,
    word_level,
    word_suffix,
    wordpiece,
    write_tokenizer,
)


@pytest.fixture(scope="session")
def sp_model() -> bytes:
    sentencepiece = pytest.importorskip("sentencepiece")
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=out,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return out.getvalue()


@pytest.fixture(scope="session")
def processor(sp_model):
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=sp_model)


@pytest.fixture(scope="session")
def kinds(tmp_path_factory, sp_model, processor) -> dict[str, Tokenizer]:
    """One tokenizer of every kind, by name."""
    root = tmp_path_factory.mktemp("tokenizers")
    made = {
        build.__name__: load_tokenizer(write_tokenizer(root / build.__name__, build()))
        for build in (byte_level, unigram, wordpiece, word_suffix, word_level)
    }
    (root / "sp").mkdir()
    (root / "sp" / "tokenizer.model").write_bytes(sp_model)
    made["sentencepiece"] = load_tokenizer(root / "sp")
    made["gguf_bytes"] = tokenizer_from_gguf(byte_gguf(byte_level()))
    made["gguf_scores"] = tokenizer_from_gguf(sentencepiece_gguf(processor))
    return made
