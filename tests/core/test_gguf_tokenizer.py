"""Tokenizers from the metadata of GGUF files: the ids of what they were written from, splits, BOS."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from openengine.core.gguf_tokenizer import PRE_TOKENIZERS
from openengine.core.tokenizer import tokenizer_from_gguf
from openengine.errors import InvalidArgument, UnsupportedFeature
from tests.tokenizer_kinds import (
    TEXTS,
    byte_gguf,
    byte_level,
    sentencepiece_gguf,
)


@pytest.mark.parametrize("text", TEXTS)
def test_gguf_byte_level_encodes_as_the_tokenizer_it_was_written_from(kinds, text):
    assert kinds["gguf_bytes"].encode(text) == byte_level().encode(text).ids


@pytest.mark.parametrize("add_prefix", [True, False])
@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("the qunick.\n\t  09é你😀ßж"), max_size=40))
def test_gguf_scores_merge_as_sentencepiece_does(processor, sp_model, add_prefix, text):
    import sentencepiece

    reference = processor
    if not add_prefix:  # ModelProto.normalizer_spec.add_dummy_prefix = false, appended
        reference = sentencepiece.SentencePieceProcessor(model_proto=sp_model + b"\x1a\x02\x18\x00")
    ours = tokenizer_from_gguf(sentencepiece_gguf(processor, add_space_prefix=add_prefix, add_bos_token=False))
    assert ours.encode(text) == reference.encode(text)


def test_runs_of_spaces_stored_as_spaces_become_one_token(processor):
    metadata = sentencepiece_gguf(processor, add_space_prefix=False, add_bos_token=False)
    size = len(metadata["tokenizer.ggml.tokens"])
    for key, values in (("tokens", ["  ", "   "]), ("scores", [-1000.0] * 2), ("token_type", [4, 4])):
        metadata[f"tokenizer.ggml.{key}"] = [*metadata[f"tokenizer.ggml.{key}"], *values]
    tokenizer = tokenizer_from_gguf(metadata)
    assert size in tokenizer.encode("the  the") and size + 1 in tokenizer.encode("the   the")
    assert tokenizer.decode(tokenizer.encode("the   the")) == "the   the"


def test_unknown_pre_tokenizer_is_refused_by_name():
    with pytest.raises(UnsupportedFeature, match="made-up-pre"):
        tokenizer_from_gguf(byte_gguf(byte_level(), pre="made-up-pre"))


def test_unknown_vocabulary_kind_is_refused_by_name(processor):
    with pytest.raises(UnsupportedFeature, match="rwkv"):
        tokenizer_from_gguf(sentencepiece_gguf(processor, model="rwkv"))


def test_missing_tokens_are_refused_naming_the_key():
    with pytest.raises(InvalidArgument, match=r"tokenizer\.ggml\.tokens"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "gpt2"})


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_loses_no_text(pre):
    tokenizer = tokenizer_from_gguf(byte_gguf(byte_level(), pre=pre))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'ll", " pay", " 2024", "  ", " x", "!!"]),
        ("smollm", ["I", "'ll", " pay", " ", "2", "0", "2", "4", "  ", " x", "!!"]),
        ("llama-bpe", ["I", "'ll", " pay", " ", "202", "4", "  ", " x", "!!"]),
        ("qwen2", ["I", "'ll", " pay", " ", "2", "0", "2", "4", "  ", " x", "!!"]),
        ("tekken", ["I", "'ll", " pay", " ", "2", "0", "2", "4", "  ", " x", "!!"]),
        ("gpt-4o", ["I'll", " pay", " ", "202", "4", "  ", " x", "!!"]),
        ("deepseek-llm", ["I", "'", "ll", " pay", " ", "2024", "  ", " x", "!!"]),
        ("falcon", ["I", "'", "ll", " pay", " ", "202", "4", "  ", " x", "!!"]),
    ],
)
def test_pre_tokenizer_splits_at_the_places_its_vocabulary_was_trained_on(pre, pieces):
    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PRE_TOKENIZERS[pre]]
    split = pre_tokenizers.Sequence(steps).pre_tokenize_str("I'll pay 2024   x!!")
    assert [piece for piece, _ in split] == pieces


def test_gguf_bos_follows_the_file_and_else_the_kind(processor):
    assert tokenizer_from_gguf(sentencepiece_gguf(processor)).adds_bos
    assert not tokenizer_from_gguf(sentencepiece_gguf(processor, add_bos_token=False)).adds_bos
    assert not tokenizer_from_gguf(byte_gguf(byte_level())).adds_bos
    assert tokenizer_from_gguf(byte_gguf(byte_level(), pre="llama-bpe")).adds_bos
    assert tokenizer_from_gguf(byte_gguf(byte_level(), add_eos_token=True)).encode("")[-1] == 2
