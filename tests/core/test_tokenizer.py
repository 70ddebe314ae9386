"""Tokenizers of every kind, trained here on a few sentences."""

from __future__ import annotations

import io
import json
import threading

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from openengine.core.gguf_tokenizer import PRE_TOKENIZERS
from openengine.core.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf
from openengine.errors import InvalidArgument, UnsupportedFeature

CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "def f(x):\n    return x * 2\n\n\tif x > 10:  pass\n",
    "Grüße aus Köln, naïve café! Привет мир, 你好世界, 日本語, 한국어 😀👍🏽",
    "the then there they them this that those these 0123456789 2024 12 345",
] * 4

TEXTS = [
    "",
    " ",
    "the",
    " the then",
    "the  quick   brown",
    "\n\n\tdef f(x):\n        return x",
    "Grüße 你好 😀👨‍👩‍👧 Привет",
    "12 345 2024-01-02",
    "x" * 50,
    "zß€𝒳�",
    "they're",
]

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("é!", normalized=False)])
    return backend


def unigram() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=160, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def wordpiece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def word_suffix() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def word_level() -> tokenizers.Tokenizer:
    words = sorted({word for text in CORPUS for word in text.split()})
    backend = tokenizers.Tokenizer(
        models.WordLevel({w: i for i, w in enumerate([*SPECIAL, *words])}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(SPECIAL)
    return backend


def write(directory, backend, **config):
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def byte_gguf(backend, pre="gpt-2", **keys):
    model = json.loads(backend.to_str())["model"]
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    added = backend.get_added_tokens_decoder()
    types = [1 if i not in added else 3 if added[i].special else 4 for i in range(len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def sentencepiece_gguf(processor, **keys):
    ids = range(processor.get_piece_size())
    kinds = [
        2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1
        for i in ids
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


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
        build.__name__: load_tokenizer(write(root / build.__name__, build()))
        for build in (byte_level, unigram, wordpiece, word_suffix, word_level)
    }
    (root / "sp").mkdir()
    (root / "sp" / "tokenizer.model").write_bytes(sp_model)
    made["sentencepiece"] = load_tokenizer(root / "sp")
    made["gguf_bytes"] = tokenizer_from_gguf(byte_gguf(byte_level()))
    made["gguf_scores"] = tokenizer_from_gguf(sentencepiece_gguf(processor))
    return made


KINDS = (
    "byte_level",
    "unigram",
    "wordpiece",
    "word_suffix",
    "word_level",
    "sentencepiece",
    "gguf_bytes",
    "gguf_scores",
)
REVERSIBLE = ("byte_level", "sentencepiece", "gguf_bytes", "gguf_scores")


def streamed(tokenizer, ids, prompt=()):
    detokenizer = tokenizer.detokenizer(prompt)
    return "".join([detokenizer.push(i) for i in ids]) + detokenizer.flush()


# ---- encode


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_directory_encodes_as_the_tokenizers_package_does(kinds, text):
    assert kinds["byte_level"].encode(text) == byte_level().encode(text).ids


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


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_directory_and_gguf_give_the_same_ids(kinds, text):
    assert kinds["sentencepiece"].encode(text) == kinds["gguf_scores"].encode(text)


def test_runs_of_spaces_stored_as_spaces_become_one_token(processor):
    metadata = sentencepiece_gguf(processor, add_space_prefix=False, add_bos_token=False)
    size = len(metadata["tokenizer.ggml.tokens"])
    for key, values in (("tokens", ["  ", "   "]), ("scores", [-1000.0] * 2), ("token_type", [4, 4])):
        metadata[f"tokenizer.ggml.{key}"] = [*metadata[f"tokenizer.ggml.{key}"], *values]
    tokenizer = tokenizer_from_gguf(metadata)
    assert size in tokenizer.encode("the  the") and size + 1 in tokenizer.encode("the   the")
    assert tokenizer.decode(tokenizer.encode("the   the")) == "the   the"


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
    tokenizer = load_tokenizer(write(tmp_path, byte_level(), **flags))
    _, offsets = tokenizer.encode_with_offsets("the")
    assert offsets[0] == (0, 0) and offsets[-1] == (3, 3)


# ---- BOS, EOS, special tokens


@pytest.mark.parametrize(("bos", "eos"), [(True, True), (True, False), (False, True), (False, False)])
def test_config_flags_decide_about_bos_and_eos(tmp_path, bos, eos):
    flags = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": bos, "add_eos_token": eos}
    tokenizer = load_tokenizer(write(tmp_path, byte_level(), **flags))
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == [1] * bos + plain + [2] * eos
    assert tokenizer.adds_bos is bos


def test_post_processor_of_the_file_stays_where_the_config_has_no_say(tmp_path):
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    for flags in ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, {"add_eos_token": False}):
        assert load_tokenizer(write(tmp_path, backend, **flags)).encode("the")[-1] == 2


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
    tokenizer = load_tokenizer(write(tmp_path, byte_level(), eos_token="<think>"))
    assert "<think>" in tokenizer.special_tokens.values()
    assert tokenizer.decode(tokenizer.encode("a<think>b")) == "ab"


def test_listed_special_tokens_are_added_where_missing_and_else_stay_what_they_are(tmp_path):
    size = byte_level().get_vocab_size()
    listed = ["<think>", "<more>"]
    tokenizer = load_tokenizer(write(tmp_path, byte_level(), additional_special_tokens=listed))
    assert tokenizer.encode("<more>") == [size] and tokenizer.special_tokens[size] == "<more>"
    assert tokenizer.decode(tokenizer.encode("a<think>b<more>")) == "a<think>b"


def test_tokens_of_the_config_extend_the_vocabulary(tmp_path):
    size = byte_level().get_vocab_size()
    decoder = {str(size): {"content": "<new>", "special": True}}
    tokenizer = load_tokenizer(write(tmp_path, byte_level(), added_tokens_decoder=decoder))
    assert tokenizer.encode("<new>") == [size] and tokenizer.vocab_size == size + 1


def test_config_that_contradicts_the_vocabulary_is_refused(tmp_path):
    directory = write(tmp_path, byte_level(), added_tokens_decoder={"7000": {"content": "<new>"}})
    with pytest.raises(InvalidArgument, match="7000"):
        load_tokenizer(directory)


def test_padding_and_truncation_of_the_file_are_off(tmp_path):
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    tokenizer = load_tokenizer(write(tmp_path, backend))
    assert tokenizer.encode("the quick brown fox") == byte_level().encode("the quick brown fox").ids


def test_ids_with_a_role(kinds):
    tokenizer = kinds["byte_level"]
    ids = (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert ids == (0, 1, 2, 2)
    assert tokenizer.special_tokens == dict(enumerate(SPECIAL))


# ---- GGUF


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


# ---- bytes and text of tokens


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


# ---- streaming


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


# ---- identity


def test_tok_03_fingerprint_is_the_same_for_the_same_files_and_follows_any_change(tmp_path, processor):
    one = load_tokenizer(write(tmp_path / "a", byte_level()))
    assert one.fingerprint == load_tokenizer(tmp_path / "a").fingerprint
    assert one.fingerprint.startswith("sha256:") and len(one.fingerprint) == 71
    flags = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    with_bos = load_tokenizer(write(tmp_path / "b", byte_level(), **flags))
    other_special = load_tokenizer(write(tmp_path / "c", byte_level(), additional_special_tokens=["<more>"]))
    normalized = byte_level()
    normalized.normalizer = normalizers.NFC()
    changed = load_tokenizer(write(tmp_path / "d", normalized))
    gguf = [tokenizer_from_gguf(sentencepiece_gguf(processor, **keys)) for keys in ({}, {"add_space_prefix": False})]
    prints = [t.fingerprint for t in (one, with_bos, other_special, changed, *gguf)]
    assert len(set(prints)) == len(prints)


def test_fingerprint_does_not_depend_on_the_chat_template(tmp_path):
    one = load_tokenizer(write(tmp_path / "a", byte_level()))
    other = load_tokenizer(write(tmp_path / "b", byte_level(), chat_template="x"))
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


# ---- bad input


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
    write(tmp_path, byte_level())
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
    write(tmp_path, byte_level())
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
    write(tmp_path, byte_level())
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
