"""From tokens back to text: bytes of tokens, decoding whole and token by token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tokenizer_kinds import (
    KINDS,
    REVERSIBLE,
    byte_level,
    streamed,
)

# ---- bytes and text of tokens --------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_token_bytes_join_to_the_text(kinds, name):
    tokenizer = kinds[name]
    ids = tokenizer.encode("the quick brown fox", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == "the quick brown fox"
    assert tokenizer.all_token_bytes()[ids[0]] == tokenizer.token_bytes(ids[0])


@pytest.mark.parametrize("name", KINDS)
def test_ids_outside_the_table_have_no_text(kinds, name):
    tokenizer = kinds[name]
    for token_id in (tokenizer.vocab_size, tokenizer.vocab_size + 1000):
        assert tokenizer.token_bytes(token_id) == b"" and tokenizer.token_text(token_id) == ""
        assert tokenizer.decode([token_id]) == "" == streamed(tokenizer, [token_id])


def test_token_text_is_literal_for_special_tokens_and_readable_for_others(kinds):
    tokenizer = kinds["byte_level"]
    assert tokenizer.token_text(3) == "<|im_start|>" and tokenizer.token_bytes(3) == b"<|im_start|>"
    assert [tokenizer.token_text(i) for i in tokenizer.encode("é!<think>")] == ["é!", "<think>"]
    assert tokenizer.token_text(tokenizer.encode("😀")[0]).endswith("\ufffd")
    assert (
        kinds["sentencepiece"].token_text(kinds["sentencepiece"].encode("the", add_special_tokens=False)[0])[0] == " "
    )


def test_tok_13_special_text_is_present_only_when_asked_for(kinds):
    tokenizer = kinds["byte_level"]
    ids = tokenizer.encode("<|im_start|>the<|im_end|>")
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>the<|im_end|>"


def test_tok_19_incomplete_utf8_tail_becomes_a_replacement_character(kinds):
    tokenizer = kinds["byte_level"]
    ids = tokenizer.encode("a𝒳")[:-1]
    assert tokenizer.decode(ids) == "a\ufffd" and tokenizer.ends_with_incomplete_utf8(ids)
    assert not tokenizer.ends_with_incomplete_utf8(tokenizer.encode("a𝒳"))


def test_str_17_leading_space_is_dropped_by_decode_and_kept_in_output_text(kinds):
    tokenizer = kinds["sentencepiece"]
    ids = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.decode(ids) == "the"
    assert streamed(tokenizer, ids, prompt=tokenizer.encode("over")) == " the"


def test_byte_level_decode_equals_the_tokenizers_package_for_any_ids(kinds):
    backend = byte_level()
    literal = {i for i, token in backend.get_added_tokens_decoder().items() if not token.special}
    ids = [i for i in range(backend.get_vocab_size()) if i not in literal] * 2
    for start in range(0, len(ids), 7):
        assert kinds["byte_level"].decode(ids[start : start + 9]) == backend.decode(ids[start : start + 9])


# ---- streaming -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_streamed_text_equals_decoded_text_for_any_ids(kinds, name, data):
    tokenizer = kinds[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    text, decoded = streamed(tokenizer, ids), tokenizer.decode(ids)
    assert text in (decoded, " " + decoded)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_d2_interleaved_streams_do_not_disturb_each_other(kinds, name, data):
    tokenizer = kinds[name]
    token = st.integers(0, tokenizer.vocab_size - 1)
    pairs = data.draw(st.lists(st.tuples(token, token), max_size=10))
    first, second = [i for i, _ in pairs], [j for _, j in pairs]
    a, b = tokenizer.detokenizer(), tokenizer.detokenizer()
    texts = [(a.push(i), b.push(j)) for i, j in pairs]
    assert "".join(x for x, _ in texts) + a.flush() == streamed(tokenizer, first)
    assert "".join(y for _, y in texts) + b.flush() == streamed(tokenizer, second)


@pytest.mark.parametrize("name", REVERSIBLE)
def test_d2_no_half_character_is_ever_emitted(kinds, name):
    tokenizer = kinds[name]
    text = "a😀👨‍👩‍👧你€𝒳ж"
    detokenizer = tokenizer.detokenizer()
    deltas = [detokenizer.push(i) for i in tokenizer.encode(text, add_special_tokens=False)]
    assert "\ufffd" not in "".join(deltas) and "".join(deltas).strip() == text
    assert not detokenizer.pending and detokenizer.flush() == ""


@pytest.mark.parametrize("name", REVERSIBLE)
def test_d1_first_output_completes_the_character_the_prompt_began(kinds, name):
    tokenizer = kinds[name]
    ids = tokenizer.encode("the𝒳x", add_special_tokens=False)
    prompt, rest = ids[:-2], ids[-2:]
    detokenizer = tokenizer.detokenizer(prompt)
    assert not detokenizer.pending
    assert [detokenizer.push(i) for i in rest] == ["𝒳", "x"]


def test_d1_prompt_character_that_is_not_completed_is_not_repeated(kinds):
    tokenizer = kinds["byte_level"]
    half = tokenizer.encode("𝒳")[:-1]
    assert streamed(tokenizer, tokenizer.encode("x"), prompt=half) == "x"
    assert streamed(tokenizer, [], prompt=half) == ""


def test_d1_a_special_token_ends_the_prompts_character(kinds):
    tokenizer = kinds["byte_level"]
    whole = tokenizer.encode("𝒳")
    assert streamed(tokenizer, whole[-1:], prompt=[*whole[:-1], 3]) == "\ufffd"


@pytest.mark.parametrize("name", KINDS)
def test_prompt_text_is_never_repeated(kinds, name):
    tokenizer = kinds[name]
    prompt = tokenizer.encode("the quick brown fox jumps over the lazy dog", add_special_tokens=False)
    assert streamed(tokenizer, tokenizer.encode("this", add_special_tokens=False), prompt=prompt).strip() == "this"


def test_d5_flush_gives_pending_bytes_as_a_replacement_character(kinds):
    detokenizer = kinds["byte_level"].detokenizer()
    assert detokenizer.push(kinds["byte_level"].encode("𝒳")[0]) == "" and detokenizer.pending
    assert detokenizer.flush() == "\ufffd" and not detokenizer.pending and detokenizer.flush() == ""


def test_special_tokens_are_skipped_in_output_text(kinds):
    assert streamed(kinds["byte_level"], kinds["byte_level"].encode("a<|im_end|>b")) == "ab"
