"""Tokenizers of every kind from a directory: encoding, special tokens, identity, and files that are damaged."""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, processors

from openengine.core.tokenizer import load_tokenizer, tokenizer_from_gguf
from openengine.errors import InvalidArgument, UnsupportedFeature
from tests.tokenizer_kinds import (
    KINDS,
    REVERSIBLE,
    SPECIAL,
    TEXTS,
    byte_gguf,
    byte_level,
    sentencepiece_gguf,
    write_tokenizer,
)

# ---- encode --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_directory_encodes_as_the_tokenizers_package_does(kinds, text):
    assert kinds["byte_level"].encode(text) == byte_level().encode(text).ids


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_directory_and_gguf_give_the_same_ids(kinds, text):
    assert kinds["sentencepiece"].encode(text) == kinds["gguf_scores"].encode(text)


@pytest.mark.parametrize("name", KINDS)
def test_tok_04_empty_text_gives_only_added_special_tokens(kinds, name):
    tokenizer = kinds[name]
    assert tokenizer.encode("", add_special_tokens=False) == []
    assert set(tokenizer.encode("")) <= set(tokenizer.special_tokens)


@pytest.mark.parametrize("name", KINDS)
def test_tok_05_no_tokens_decode_to_empty_text(kinds, name):
    assert kinds[name].decode([]) == ""


@pytest.mark.parametrize("name", KINDS)
def test_tok_08_special_text_becomes_ordinary_tokens_when_not_parsed(kinds, name):
    tokenizer = kinds[name]
    parsed = tokenizer.encode("the</s>the", add_special_tokens=False)
    assert 2 in parsed
    ordinary = tokenizer.encode("the</s>the", add_special_tokens=False, parse_special_tokens=False)
    assert not set(ordinary) & (set(tokenizer.special_tokens) - {tokenizer.unk_token_id})
    if name in REVERSIBLE:
        assert tokenizer.decode(ordinary) == "the</s>the"


@pytest.mark.parametrize("name", KINDS)
def test_batch_encoding_equals_encoding_alone(kinds, name):
    tokenizer = kinds[name]
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


@pytest.mark.parametrize("name", REVERSIBLE)
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30).filter(lambda t: "▁" not in t and "<" not in t))
def test_tok_12_detokenize_undoes_tokenize(kinds, name, text):
    assert kinds[name].decode(kinds[name].encode(text)) == text


@pytest.mark.parametrize("name", REVERSIBLE)
def test_tok_11_offsets_are_ordered_byte_ranges_of_the_text(kinds, name):
    text = "Grüße 你好 😀 the</s>x"
    ids, offsets = kinds[name].encode_with_offsets(text)
    assert ids == kinds[name].encode(text) and len(ids) == len(offsets)
    assert all(0 <= a <= b <= len(text.encode()) for a, b in offsets)
    assert offsets == sorted(offsets)
    assert text.encode()[slice(*offsets[ids.index(2)])] == b"</s>"


def test_offset_of_a_token_that_comes_from_no_text_is_empty_and_in_order(tmp_path):
    flags = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": True}
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, byte_level(), **flags))
    _, offsets = tokenizer.encode_with_offsets("the")
    assert offsets[0] == (0, 0) and offsets[-1] == (3, 3)


# ---- BOS, EOS, special tokens --------------------------------------------------------------------


@pytest.mark.parametrize(("bos", "eos"), [(True, True), (True, False), (False, True), (False, False)])
def test_config_flags_decide_about_bos_and_eos(tmp_path, bos, eos):
    flags = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": bos, "add_eos_token": eos}
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, byte_level(), **flags))
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == [1] * bos + plain + [2] * eos
    assert tokenizer.adds_bos is bos


def test_post_processor_of_the_file_stays_where_the_config_has_no_say(tmp_path):
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    for flags in ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, {"add_eos_token": False}):
        assert load_tokenizer(write_tokenizer(tmp_path, backend, **flags)).encode("the")[-1] == 2


def test_sentencepiece_adds_bos_unless_the_config_says_otherwise(tmp_path, sp_model):
    (tmp_path / "tokenizer.model").write_bytes(sp_model)
    assert load_tokenizer(tmp_path).encode("")[:1] == [1]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "add_eos_token": True}))
    assert load_tokenizer(tmp_path).encode("") == [2]


def test_sentencepiece_added_tokens_are_kept_whole(tmp_path, sp_model):
    (tmp_path / "tokenizer.model").write_bytes(sp_model)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": 420}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 421 and tokenizer.token_text(420) == "<tool>"
    assert 420 in tokenizer.encode("the<tool>the", parse_special_tokens=False)
    assert tokenizer.decode(tokenizer.encode("the <tool>")) == "the <tool>"


@pytest.mark.parametrize("legacy", [True, False])
def test_only_legacy_sentencepiece_puts_a_space_after_a_special_token(tmp_path, sp_model, legacy):
    (tmp_path / "tokenizer.model").write_bytes(sp_model)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": legacy}))
    tokenizer = load_tokenizer(tmp_path)
    after = tokenizer.encode("</s>the", add_special_tokens=False)[1:]
    assert "".join(map(tokenizer.token_text, after)) == (" the" if legacy else "the")
    assert "".join(map(tokenizer.token_text, tokenizer.encode("the", add_special_tokens=False))) == " the"


def test_named_special_tokens_are_special_even_when_the_vocabulary_file_forgets(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, byte_level(), eos_token="<think>"))
    assert "<think>" in tokenizer.special_tokens.values()
    assert tokenizer.decode(tokenizer.encode("a<think>b")) == "ab"


def test_listed_special_tokens_are_added_where_missing_and_else_stay_what_they_are(tmp_path):
    size = byte_level().get_vocab_size()
    listed = ["<think>", "<more>"]
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, byte_level(), additional_special_tokens=listed))
    assert tokenizer.encode("<more>") == [size] and tokenizer.special_tokens[size] == "<more>"
    assert tokenizer.decode(tokenizer.encode("a<think>b<more>")) == "a<think>b"


def test_tokens_of_the_config_extend_the_vocabulary(tmp_path):
    size = byte_level().get_vocab_size()
    decoder = {str(size): {"content": "<new>", "special": True}}
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, byte_level(), added_tokens_decoder=decoder))
    assert tokenizer.encode("<new>") == [size] and tokenizer.vocab_size == size + 1


def test_config_that_contradicts_the_vocabulary_is_refused(tmp_path):
    directory = write_tokenizer(tmp_path, byte_level(), added_tokens_decoder={"7000": {"content": "<new>"}})
    with pytest.raises(InvalidArgument, match="7000"):
        load_tokenizer(directory)


def test_padding_and_truncation_of_the_file_are_off(tmp_path):
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, backend))
    assert tokenizer.encode("the quick brown fox") == byte_level().encode("the quick brown fox").ids


def test_the_tokens_named_for_a_role_have_their_ids_of_the_vocabulary(kinds):
    tokenizer = kinds["byte_level"]
    ids = (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert ids == (0, 1, 2, 2)
    assert tokenizer.special_tokens == dict(enumerate(SPECIAL))


# ---- identity ------------------------------------------------------------------------------------


def test_tok_03_fingerprint_is_the_same_for_the_same_files_and_follows_any_change(tmp_path, processor):
    one = load_tokenizer(write_tokenizer(tmp_path / "a", byte_level()))
    assert one.fingerprint == load_tokenizer(tmp_path / "a").fingerprint
    assert one.fingerprint.startswith("sha256:") and len(one.fingerprint) == 71
    flags = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    with_bos = load_tokenizer(write_tokenizer(tmp_path / "b", byte_level(), **flags))
    other_special = load_tokenizer(write_tokenizer(tmp_path / "c", byte_level(), additional_special_tokens=["<more>"]))
    normalized = byte_level()
    normalized.normalizer = normalizers.NFC()
    changed = load_tokenizer(write_tokenizer(tmp_path / "d", normalized))
    gguf = [tokenizer_from_gguf(sentencepiece_gguf(processor, **keys)) for keys in ({}, {"add_space_prefix": False})]
    prints = [t.fingerprint for t in (one, with_bos, other_special, changed, *gguf)]
    assert len(set(prints)) == len(prints)


def test_fingerprint_does_not_depend_on_the_chat_template(tmp_path):
    one = load_tokenizer(write_tokenizer(tmp_path / "a", byte_level()))
    other = load_tokenizer(write_tokenizer(tmp_path / "b", byte_level(), chat_template="x"))
    assert one.fingerprint == other.fingerprint


def test_threads_encode_alike(kinds):
    tokenizer, results = kinds["gguf_bytes"], []
    expected = [tokenizer.encode(text, parse_special_tokens=False) for text in TEXTS]
    fresh = tokenizer_from_gguf(byte_gguf(byte_level()))

    def work():
        results.append([fresh.encode(text, parse_special_tokens=False) for text in TEXTS])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [None, 5, b"bytes", ["list"]])
def test_text_that_is_not_a_str_is_refused(kinds, text):
    with pytest.raises(InvalidArgument, match="expected a str"):
        kinds["byte_level"].encode(text)


def test_lone_surrogates_are_refused_with_their_position(kinds):
    with pytest.raises(InvalidArgument, match="position 2"):
        kinds["byte_level"].encode("ab\ud800c")
    with pytest.raises(InvalidArgument, match=r"texts\[1\]"):
        kinds["byte_level"].encode_batch(["ok", "\udfff"])


def test_directory_without_a_tokenizer_says_what_is_needed(tmp_path):
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_path_that_is_no_directory_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="not a directory"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_damaged_file_is_named(tmp_path, name):
    write_tokenizer(tmp_path, byte_level())
    (tmp_path / name).write_text('{"half": ')
    with pytest.raises(InvalidArgument, match=name.replace(".", r"\.")):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
    ],
)
def test_a_link_that_leads_nowhere_is_named_and_no_absent_file(tmp_path, name):
    write_tokenizer(tmp_path, byte_level())
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(InvalidArgument, match=name.replace(".", r"\.")):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.txt"])
def test_a_vocabulary_that_is_a_link_to_nowhere_is_named(tmp_path, name):
    (tmp_path / name).symlink_to("nowhere")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({} if "model" in name else {"tokenizer_class": "Bert"}))
    with pytest.raises(InvalidArgument, match=name.replace(".", r"\.")):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"additional_special_tokens": 5}, "expected a list"),
        ({"extra_special_tokens": "<x>"}, "expected a list"),
        ({"added_tokens_decoder": {"9" * 5000: {"content": "<x>"}}}, "expected an id"),
        ({"added_tokens_decoder": {"3": {"content": "<x>", "special": "false"}}}, "expected true or false"),
        ({"pad_token": "\ud800"}, "lone surrogate"),
        ({"chat_template": 5}, "chat_template"),
        ({"chat_template": {"default": None}}, "both texts"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_ill_typed_key_of_the_tokenizers_config_is_named(tmp_path, changes, message):
    write_tokenizer(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(changes))
    with pytest.raises(InvalidArgument, match=message):
        load_tokenizer(tmp_path)


def test_damaged_sentencepiece_file_is_named(tmp_path):
    pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(InvalidArgument, match=r"tokenizer\.model"):
        load_tokenizer(tmp_path)


def test_sentencepiece_class_with_its_own_ids_is_refused_by_name(tmp_path, sp_model):
    (tmp_path / "sentencepiece.bpe.model").write_bytes(sp_model)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "XLMRobertaTokenizer"}))
    with pytest.raises(UnsupportedFeature, match="XLMRobertaTokenizer"):
        load_tokenizer(tmp_path)
