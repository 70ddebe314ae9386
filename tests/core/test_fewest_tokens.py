"""The lower bound of a text's tokens: never above what the text has, near it for huge texts, 0 where there is none."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from openengine.core.tokenizer import load_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["Ġw", "or", "Ġwor", "Ġword"]
MERGES = [("Ġ", "w"), ("o", "r"), ("Ġw", "or"), ("Ġwor", "d")]
TEXTS = st.lists(
    st.sampled_from([" word", "wor", "é", "e\u0301", "😀", "\u212b", "\u1fbe\u0308\u0301", "\x04", " ", "\n"])
)


def tokenizer(tmp_path_factory, *, normalizer=None, without=(), added=()):
    pieces = [piece for piece in (*ALPHABET, *WORDS) if piece not in without]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens(list(added))
    directory = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def bounded(tmp_path_factory):
    return {
        "plain": tokenizer(tmp_path_factory),
        "composing": tokenizer(tmp_path_factory, normalizer=normalizers.NFC()),
        "without a byte": tokenizer(tmp_path_factory, without={ALPHABET[ALPHABET.index("Ą")]}),
        "with spaces in another way": tokenizer(tmp_path_factory, normalizer=normalizers.Replace(" ", "_")),
    }


@pytest.mark.parametrize("name", ["plain", "composing", "without a byte", "with spaces in another way"])
def test_no_text_has_fewer_tokens(bounded, name):
    @settings(max_examples=200, deadline=None)
    @given(TEXTS.map("".join) | st.text())
    def check(text):
        assert bounded[name].fewest_tokens(text) <= len(bounded[name].encode(text))

    check()


def test_it_is_the_bytes_by_those_of_the_longest_token(bounded):
    assert bounded["plain"].fewest_tokens(" word" * 1000) == 1000
    assert bounded["plain"].fewest_tokens("") == 0
    assert bounded["without a byte"].fewest_tokens("\x04" * 1000) == 0, "they give no token"
    longest = "\u1fbe\u0308\u0301"
    assert len(unicodedata.normalize("NFC", longest).encode()) * 4 > len(longest.encode())


def test_a_vocabulary_whose_tokens_may_swallow_any_text_gives_none(tmp_path_factory):
    swallowing = AddedToken("<mask>", lstrip=True)
    for options in ({"added": [swallowing]}, {"normalizer": normalizers.Strip()}, {"normalizer": normalizers.NFKC()}):
        assert tokenizer(tmp_path_factory, **options).fewest_tokens(" word" * 1000) == 0
