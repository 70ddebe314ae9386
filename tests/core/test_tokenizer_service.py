"""The tokenizer service: identity, artifacts that rebuild the tokenizer, options, and cache keys for any client."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import normalizers

from openengine.core.cache_key_service import CacheKeyService
from openengine.core.cache_keys import block_keys, root_key
from openengine.core.loader import open_checkpoint
from openengine.core.tokenizer import load_tokenizer, tokenizer_from_gguf
from openengine.core.tokenizer_service import TokenizerService
from openengine.errors import (
    ArtifactNotFound,
    InvalidArgument,
    LoraNotFound,
    ModelNotFound,
    OpenEngineError,
    PreconditionFailed,
    UnsupportedTask,
)
from openengine.tokenizer_types import (
    CacheKeyContext,
    DetokenizeOptions,
    MediaIdentity,
    PromptEmbeddingIdentity,
    TokenizeOptions,
    TokenizerOperation,
)
from tests.tokenizer_kinds import (
    KINDS,
    REVERSIBLE,
    TEXTS,
    byte_gguf,
    byte_level,
    write_tokenizer,
)

REVISION = "sha256:" + "11" * 32
BLOCK = 4


def service_of(tokenizer, *, vocab_size=None, prefix_cache=True, **options):
    vocab_size = vocab_size or tokenizer.vocab_size + 64
    keys = CacheKeyService(
        model="model-id",
        vocab_size=vocab_size,
        block_size=BLOCK,
        root_key=root_key(REVISION, tokenizer.fingerprint, BLOCK),
        model_revision=REVISION,
        tokenizer_fingerprint=tokenizer.fingerprint,
        loras=options.pop("loras", None),
        supports_media=options.pop("supports_media", False),
    )
    return TokenizerService(
        tokenizer,
        names=("model-id", "alias"),
        vocab_size=vocab_size,
        eos_token_ids=(2,),
        cache_keys=keys if prefix_cache else None,
        **options,
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    flags = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("byte_level"), byte_level(), **flags))


@pytest.fixture(scope="module")
def service(tokenizer):
    return service_of(tokenizer)


def status_of(call) -> str:
    with pytest.raises(OpenEngineError) as caught:
        call()
    return caught.value.grpc_status


# ---- identity ------------------------------------------------------------------------------------


def test_tok_02_info_tells_who_the_tokenizer_is(service, tokenizer):
    info = service.info()
    assert re.fullmatch("sha256:[0-9a-f]{64}", info.fingerprint)
    assert (info.model, info.format, info.vocab_size) == ("model-id", tokenizer.format, tokenizer.vocab_size + 64)
    assert (info.bos_token_id, info.eos_token_ids, info.pad_token_id, info.unk_token_id) == (1, (2,), 2, 0)
    ids = [token.token_id for token in info.special_tokens]
    assert ids == sorted(ids) and {i: t.content for i, t in zip(ids, info.special_tokens)} == tokenizer.special_tokens


def test_tok_02_every_answer_names_the_same_fingerprint(service):
    spec = service.cache_key_spec()
    named = {
        service.info().fingerprint,
        service.capabilities().fingerprint,
        service.tokenize("x").fingerprint,
        service.detokenize([5]).fingerprint,
        next(service.artifacts()).fingerprint,
        spec.tokenizer_fingerprint,
    }
    assert named == {service.fingerprint}


def test_tok_02_no_id_of_the_tokenizer_reaches_the_width_of_the_model(tokenizer):
    narrow = service_of(tokenizer, vocab_size=3)
    info = narrow.info()
    assert [token.token_id for token in info.special_tokens] == [0, 1, 2]
    assert status_of(lambda: narrow.tokenize("<|im_start|>")) == "INVALID_ARGUMENT"


def test_tok_03_the_same_files_give_the_same_identity(tmp_path, tokenizer):
    flags = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    again = service_of(load_tokenizer(write_tokenizer(tmp_path, byte_level(), **flags)))
    assert again.info() == service_of(tokenizer).info()
    assert again.cache_key_spec() == service_of(tokenizer).cache_key_spec()


def test_tok_16_names_of_the_model(service):
    assert service.info(model="alias") == service.info(model="model-id") == service.info()
    calls = (
        lambda model: service.info(model=model),
        lambda model: service.artifacts(model=model),
        lambda model: service.tokenize("x", model=model),
        lambda model: service.detokenize([5], model=model),
        lambda model: service.cache_key_spec(model=model),
        lambda model: service.cache_keys(text="x", model=model),
    )
    for call in calls:
        assert status_of(lambda call=call: call("")) == "INVALID_ARGUMENT"
        with pytest.raises(ModelNotFound):
            call("other")


def test_tok_17_another_expected_fingerprint_is_a_failed_precondition(service):
    for call in (
        lambda **expected: service.artifacts(**expected),
        lambda **expected: service.tokenize("x", **expected),
        lambda **expected: service.detokenize([5], **expected),
    ):
        with pytest.raises(PreconditionFailed):
            call(expected_fingerprint="sha256:" + "0" * 64)
        call(expected_fingerprint=service.fingerprint)


def test_tok_18_defaults_and_effective_options_are_complete(service):
    info = service.info()
    absent = {name for name in info.default_tokenize_options.__dataclass_fields__
              if getattr(info.default_tokenize_options, name) is None}  # fmt: skip
    assert absent == {"max_tokens"}
    assert service.tokenize("x").effective_options == info.default_tokenize_options
    assert service.detokenize([5]).effective_options == info.default_detokenize_options
    assert info.default_detokenize_options == DetokenizeOptions(skip_special_tokens=True, clean_up_spaces=False)
    given = TokenizeOptions(max_tokens=3, add_special_tokens=False)
    effective = service.tokenize("the then", given).effective_options
    assert effective == replace(info.default_tokenize_options, max_tokens=3, add_special_tokens=False)


def test_tok_20_operations_that_are_not_listed_fail_the_precondition(tokenizer):
    plain = service_of(tokenizer, prefix_cache=False)
    assert plain.info().operations == plain.capabilities().operations
    assert set(plain.info().operations) == {"tokenize", "detokenize", "artifacts"}
    assert status_of(plain.cache_key_spec) == "FAILED_PRECONDITION"
    assert status_of(lambda: plain.cache_keys(text="x")) == "FAILED_PRECONDITION"
    assert plain.capabilities().cache_key_profile == ""


def test_cky_12_capabilities_agree_with_info_and_spec(service):
    capabilities, info, spec = service.capabilities(), service.info(), service.cache_key_spec()
    assert capabilities.operations == info.operations == tuple(TokenizerOperation)
    assert (capabilities.artifact_format, capabilities.artifacts_available) == (info.format, True)
    assert (capabilities.cache_key_profile, capabilities.cache_key_profile_version) == (spec.profile, spec.version)
    assert capabilities.cache_keys_client_computable and capabilities.cache_keys_engine_computable


# ---- tokenize ------------------------------------------------------------------------------------


def test_tok_04_empty_text_is_valid_and_absent_text_is_not(service):
    assert service.tokenize("").token_ids == (1,)
    assert service.tokenize("", TokenizeOptions(add_special_tokens=False)).token_ids == ()
    assert status_of(lambda: service.tokenize(None)) == "INVALID_ARGUMENT"


@pytest.mark.parametrize("text", TEXTS)
def test_tok_06_and_07_ids_are_those_of_a_prompt_and_special_tokens_are_optional(service, tokenizer, text):
    answer = service.tokenize(text)
    assert list(answer.token_ids) == tokenizer.encode(text) and answer.untruncated_count == len(answer.token_ids)
    bare = service.tokenize(text, TokenizeOptions(add_special_tokens=False))
    assert answer.token_ids == (1, *bare.token_ids)


def test_tok_08_special_text_is_ordinary_when_not_parsed(service):
    parsed = service.tokenize("the</s>")
    assert parsed.token_ids[-1] == 2
    ordinary = service.tokenize("the</s>", TokenizeOptions(parse_special_tokens=False))
    assert 2 not in ordinary.token_ids and service.detokenize(ordinary.token_ids).text == "the</s>"


@pytest.mark.parametrize("max_tokens", [0, 1, 3, 1000])
def test_tok_09_truncation_keeps_an_end_of_the_full_result(service, max_tokens):
    full = service.tokenize("the quick brown fox", return_offsets=True)
    for side, kept in (
        ("right", slice(0, max_tokens)),
        ("left", slice(max(0, len(full.token_ids) - max_tokens), None)),
    ):
        options = TokenizeOptions(max_tokens=max_tokens, truncation_side=side)
        cut = service.tokenize("the quick brown fox", options, return_offsets=True)
        assert cut.token_ids == full.token_ids[kept] and cut.offsets == full.offsets[kept]
        assert cut.untruncated_count == len(full.token_ids)


@pytest.mark.parametrize(
    "options",
    [
        TokenizeOptions(truncation_side="middle"),
        TokenizeOptions(truncation_side=0),
        TokenizeOptions(max_tokens=-1),
        TokenizeOptions(max_tokens=True),
        TokenizeOptions(max_tokens=2**32),
        TokenizeOptions(normalize=1),
        TokenizeOptions(add_special_tokens="yes"),
        DetokenizeOptions(),
        None,
    ],
)
def test_tok_10_malformed_options_are_invalid(service, options):
    assert status_of(lambda: service.tokenize("x", options)) == "INVALID_ARGUMENT"


def test_tok_10_a_normalizer_that_the_vocabulary_needs_cannot_be_turned_off(kinds):
    off = TokenizeOptions(normalize=False)
    for name in ("sentencepiece", "gguf_scores"):
        assert status_of(lambda name=name: service_of(kinds[name]).tokenize("x", off)) == "INVALID_ARGUMENT"
    plain = service_of(kinds["byte_level"])
    assert plain.tokenize("the", off).token_ids == plain.tokenize("the").token_ids


def test_tok_10_normalize_false_leaves_the_characters_as_they_are(tmp_path):
    backend = byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, backend))
    service, plain = service_of(tokenizer), load_tokenizer(write_tokenizer(tmp_path / "plain", byte_level()))
    for text in ("The</s>the", "Cafe\u0301"):
        for parse in (True, False):
            options = TokenizeOptions(normalize=False, parse_special_tokens=parse)
            answer = service.tokenize(text, options, return_offsets=True)
            assert list(answer.token_ids) == plain.encode(text, parse_special_tokens=parse)
            assert answer.effective_options.normalize is False
        assert list(service.tokenize(text).token_ids) == plain.encode(backend.normalizer.normalize_str(text))


@pytest.mark.parametrize("name", REVERSIBLE)
def test_tok_11_one_span_per_token_in_order_inside_the_text(kinds, name):
    text = "Grüße 😀 the</s>x"
    answer = service_of(kinds[name]).tokenize(text, return_offsets=True)
    assert len(answer.offsets) == len(answer.token_ids)
    spans = [(span.start, span.end) for span in answer.offsets]
    assert spans == sorted(spans) and all(0 <= a <= b <= len(text.encode()) for a, b in spans)
    assert service_of(kinds[name]).tokenize(text).offsets == ()


def test_tok_15_the_same_call_gives_the_same_answer(service):
    assert service.tokenize("the then", return_offsets=True) == service.tokenize("the then", return_offsets=True)
    assert service.cache_keys(text="the then " * 9) == service.cache_keys(text="the then " * 9)


def test_a_text_over_the_limit_is_invalid(tokenizer):
    limited = service_of(tokenizer, max_input_bytes=8)
    assert limited.info().max_input_bytes == 8
    assert limited.tokenize("ééab" + "cd").untruncated_count
    for call in (limited.tokenize, lambda text: limited.cache_keys(text=text)):
        with pytest.raises(InvalidArgument, match="text has 9 bytes, the limit is 8"):
            call("éé" + "abcde")


def test_the_limit_of_a_text_admits_every_prompt_that_fits_and_a_mebibyte(kinds):
    assert service_of(kinds["byte_level"], max_model_len=8).max_input_bytes == 1 << 20
    for tokenizer in kinds.values():
        longest = max(tokenizer.all_token_bytes(), key=len)
        limit = service_of(tokenizer, max_model_len=1 << 20).info().max_input_bytes
        assert len(longest) << 20 <= limit <= 256 << 20


@pytest.mark.parametrize("text", [b"x", 3, "\ud800"])
def test_a_text_that_is_none_is_invalid(service, text):
    assert status_of(lambda: service.tokenize(text)) == "INVALID_ARGUMENT"


# ---- detokenize ----------------------------------------------------------------------------------


def test_tok_05_no_tokens_are_an_empty_text(service):
    answer = service.detokenize([])
    assert answer.text == "" and not answer.ends_with_incomplete_utf8


@pytest.mark.parametrize("name", REVERSIBLE)
@pytest.mark.parametrize("text", ["the  quick\n", "Grüße 你好 😀", " x"])
def test_tok_12_detokenize_undoes_tokenize(kinds, name, text):
    service = service_of(kinds[name])
    assert service.detokenize(service.tokenize(text).token_ids).text == text


def test_tok_13_special_tokens_are_skipped_or_shown(service):
    ids = service.tokenize("the</s>").token_ids
    assert service.detokenize(ids).text == "the"
    assert service.detokenize(ids, DetokenizeOptions(skip_special_tokens=False)).text == "<s>the</s>"


def test_tok_14_ids_outside_the_model_are_invalid_and_padding_ids_are_nothing(service, tokenizer):
    width = tokenizer.vocab_size + 64
    assert service.detokenize([width - 1]).text == ""
    for bad in ([width], [-1], [2**40], [1.5], [True], "1"):
        assert status_of(lambda bad=bad: service.detokenize(bad)) == "INVALID_ARGUMENT"


def test_tok_10_clean_up_of_spaces_is_refused(service):
    assert status_of(lambda: service.detokenize([5], DetokenizeOptions(clean_up_spaces=True))) == "INVALID_ARGUMENT"


def test_tok_19_an_incomplete_character_is_replaced_and_told(service):
    ids = service.tokenize("the 😀").token_ids
    part = service.detokenize(ids[:-1])
    assert part.text == "the \ufffd" and part.ends_with_incomplete_utf8
    assert not service.detokenize(ids).ends_with_incomplete_utf8
    replacement = service.detokenize(service.tokenize("\ufffd").token_ids)
    assert replacement.text == "\ufffd" and not replacement.ends_with_incomplete_utf8
    shown = service.detokenize([*ids[:-1], 2], DetokenizeOptions(skip_special_tokens=False))
    assert shown.text.endswith("</s>") and not shown.ends_with_incomplete_utf8


# ---- artifacts -----------------------------------------------------------------------------------


def fetch(service, directory, **options):
    directory.mkdir(parents=True, exist_ok=True)
    contents: dict[str, bytes] = {}
    for chunk in service.artifacts(**options):
        contents[chunk.name] = contents.get(chunk.name, b"") + chunk.data
    for name, data in contents.items():
        (directory / name).write_bytes(data)
    return load_tokenizer(directory)


@pytest.mark.parametrize("max_chunk_bytes", [None, 7, 1000, 2**32 - 1])
def test_art_01_02_and_05_chunks_are_the_announced_files(service, max_chunk_bytes):
    announced = {artifact.name: artifact for artifact in service.info().artifacts}
    assert list(announced) == sorted(announced)
    data: dict[str, bytes] = {}
    last: list[str] = []
    for chunk in service.artifacts(max_chunk_bytes=max_chunk_bytes):
        artifact = announced[chunk.name]
        assert chunk.offset == len(data.get(chunk.name, b"")) and chunk.name not in last
        assert (chunk.total_size, chunk.sha256) == (artifact.total_size, artifact.sha256)
        assert 0 < len(chunk.data) <= min(max_chunk_bytes or 2**20, 2**20)
        data[chunk.name] = data.get(chunk.name, b"") + chunk.data
        last += [chunk.name] * chunk.last
    assert last == list(announced)
    for name, content in data.items():
        assert (len(content), hashlib.sha256(content).hexdigest()) == (
            announced[name].total_size,
            announced[name].sha256,
        )


def test_art_03_names_select_in_the_order_of_the_list(service):
    names = [artifact.name for artifact in service.info().artifacts]
    assert {chunk.name for chunk in service.artifacts(names=names[:1])} == {names[0]}
    reversed_order = [chunk.name for chunk in service.artifacts(names=names[::-1])]
    assert list(dict.fromkeys(reversed_order)) == names
    with pytest.raises(ArtifactNotFound):
        service.artifacts(names=["vocab.txt"])
    with pytest.raises(ArtifactNotFound):
        service.artifacts(names=[names[0], "."])


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "/etc/passwd", "a\\b", "a\0", "tokenizer.json/", 3, None])
def test_art_04_paths_are_invalid(service, name):
    assert status_of(lambda: service.artifacts(names=[name])) == "INVALID_ARGUMENT"


def test_art_04_a_repeated_name_or_a_bare_text_is_invalid(service):
    for names in (["tokenizer.json", "tokenizer.json"], "tokenizer.json", 3):
        assert status_of(lambda names=names: service.artifacts(names=names)) == "INVALID_ARGUMENT"


@pytest.mark.parametrize("size", [0, -1, True, 1.5, 2**32])
def test_art_05_a_chunk_size_that_is_none_is_invalid(service, size):
    assert status_of(lambda: service.artifacts(max_chunk_bytes=size)) == "INVALID_ARGUMENT"


def test_art_06_another_fingerprint_gives_no_chunk(service):
    assert status_of(lambda: service.artifacts(expected_fingerprint="sha256:0")) == "FAILED_PRECONDITION"


def test_art_07_leaving_a_transfer_is_harmless(service):
    chunks = service.artifacts(max_chunk_bytes=10)
    next(chunks)
    chunks.close()
    assert list(service.artifacts())


def assert_same_tokenizer(one, other, texts=TEXTS):
    for text in [*texts, "the</s>the<|im_start|>user", "<s>the"]:
        for add in (True, False):
            for parse in (True, False):
                options = {"add_special_tokens": add, "parse_special_tokens": parse}
                assert one.encode(text, **options) == other.encode(text, **options), (text, options)
    assert one.special_tokens == other.special_tokens
    for skip in (True, False):
        ids = list(range(0, one.vocab_size, max(1, one.vocab_size // 1000)))
        assert one.decode(ids, skip_special_tokens=skip) == other.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", KINDS)
def test_art_08_the_artifacts_rebuild_the_tokenizer(kinds, name, tmp_path):
    original = kinds[name]
    rebuilt = fetch(service_of(original), tmp_path)
    assert rebuilt.format == original.format
    assert_same_tokenizer(original, rebuilt)


@pytest.mark.parametrize("flags", [{"add_bos_token": True}, {"add_eos_token": True, "add_bos_token": False}])
def test_art_08_rules_of_the_config_are_in_the_artifacts(tmp_path, flags):
    config = {"tokenizer_class": "LlamaTokenizer", "additional_special_tokens": ["<tool>"], **flags}
    original = load_tokenizer(write_tokenizer(tmp_path / "original", byte_level(), **config))
    assert_same_tokenizer(original, fetch(service_of(original), tmp_path / "copy"), [*TEXTS, "the<tool>x"])


@pytest.mark.parametrize("legacy", [True, False])
def test_art_08_sentencepiece_settings_are_in_the_artifacts(tmp_path, sp_model, legacy):
    folder = tmp_path / "original"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(sp_model)
    added = {"420": {"content": "<tool>"}, "421": {"content": "<|im_start|>", "special": True}}
    config = {"legacy": legacy, "add_bos_token": False, "add_eos_token": True, "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    original = load_tokenizer(folder)
    rebuilt = fetch(service_of(original), tmp_path / "copy")
    assert_same_tokenizer(original, rebuilt, [*TEXTS, "the <tool>the"])
    assert rebuilt.encode("") == [2]


def test_art_08_a_role_played_by_an_ordinary_token_makes_it_no_special_one(tmp_path):
    backend = byte_level()
    original = tokenizer_from_gguf(byte_gguf(backend, padding_token_id=backend.token_to_id("the")))
    assert_same_tokenizer(original, fetch(service_of(original), tmp_path))


@pytest.mark.parametrize("name", ["byte_level", "unigram", "wordpiece", "gguf_bytes", "gguf_scores"])
def test_art_08_transformers_reads_the_artifacts(kinds, name, tmp_path):
    transformers = pytest.importorskip("transformers")
    fetch(service_of(kinds[name]), tmp_path)
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert reader(text)["input_ids"] == kinds[name].encode(text)


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_art_08_a_gguf_model_gives_the_artifacts_of_its_tokenizer(request, model, tmp_path):
    original = open_checkpoint(str(request.getfixturevalue(model))).load_tokenizer()
    assert_same_tokenizer(original, fetch(service_of(original), tmp_path), [*TEXTS, "<start_of_turn>user\nHi"])


# ---- cache keys: a client of its own, written from the contract ----------------------------------


def cbor(value) -> bytes:
    """Deterministic CBOR of what a key hashes, by the definition."""
    if value is None:
        return b"\xf6"
    major, number, tail = {
        int: lambda v: (0, v, b""),
        bytes: lambda v: (2, len(v), v),
        str: lambda v: (3, len(v.encode()), v.encode()),
    }.get(type(value), lambda v: (4, len(v), b"".join(map(cbor, v))))(value)
    if number < 24:
        return bytes([major << 5 | number]) + tail
    code = next(code for code in range(4) if number < 1 << (8 << code))
    return bytes([major << 5 | 24 + code]) + number.to_bytes(1 << code, "big") + tail


def client_keys(spec, ids, context=CacheKeyContext()):
    (group,) = spec.groups
    size, parent, keys = group.block_size, group.root_key, []
    for index in range(len(ids) // size):
        extra = [f"lora:{name}" for name in sorted(set(context.lora_names))]
        for item in sorted(context.media, key=lambda item: item.token_offset):
            offset = item.token_offset - index * size
            if offset < size and offset + item.token_count > 0:
                extra.append(f"mm:{item.identity}@{offset}")
        if context.cache_salt and index == 0:
            extra.append("salt:" + hashlib.sha256(context.cache_salt.encode()).hexdigest())
        block = [int(token_id) for token_id in ids[index * size : (index + 1) * size]]
        parent = hashlib.sha256(cbor([parent, block, extra or None])).digest()
        keys.append(parent)
    return tuple(keys)


FULL = {"loras": lambda: {"adapter-1", "adapter-2"}, "supports_media": True}


def test_cky_01_and_02_the_spec_is_complete(service, tokenizer):
    spec = service.cache_key_spec()
    assert (spec.profile, spec.version) == ("openengine.block-chain.sha256-cbor", 1)
    assert (spec.hash_algorithm, spec.serialization) == ("sha256", "cbor-deterministic")
    assert (spec.key_encoding, spec.key_bytes) == ("bytes", 32)
    assert re.fullmatch("sha256:[0-9a-f]{64}", spec.fingerprint) and spec.model_revision == REVISION
    (group,) = spec.groups
    assert (group.group_idx, group.block_size, group.kind, group.sliding_window) == (0, BLOCK, "full_attention", 0)
    assert group.root_key == root_key(REVISION, tokenizer.fingerprint, BLOCK)
    assert spec.client_computable and spec.engine_computable
    assert spec.extra_key_kinds == ("salt",)
    assert service_of(tokenizer, **FULL).cache_key_spec().extra_key_kinds == ("lora", "mm", "salt")


def test_cky_01_the_fingerprint_changes_with_whatever_changes_a_key(tokenizer):
    parts = {
        "model_revision": REVISION,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "block_size": BLOCK,
        "root_key": b"r" * 32,
    }
    others = {
        "model_revision": "sha256:0",
        "tokenizer_fingerprint": "sha256:1",
        "block_size": 8,
        "root_key": b"q" * 32,
    }
    variants = [parts, *({**parts, name: value} for name, value in others.items())]
    specs = [CacheKeyService(model="m", vocab_size=99, **variant).spec for variant in variants]
    assert len({spec.fingerprint for spec in specs}) == len(specs)
    assert CacheKeyService(model="m", vocab_size=99, **parts, **FULL).spec.fingerprint == specs[0].fingerprint


@pytest.mark.parametrize("options", [{}, FULL])
def test_cky_03_a_client_computes_the_test_vectors(tokenizer, options):
    service = service_of(tokenizer, **options)
    spec = service.cache_key_spec()
    vectors = {vector.name: vector for vector in spec.test_vectors}
    assert {"two full blocks", "salt", "no tokens"} <= vectors.keys()
    assert ({"adapter", "media item"} <= vectors.keys()) is bool(options)
    for vector in spec.test_vectors:
        assert client_keys(spec, vector.token_ids, vector.context) == vector.expected_keys
        computed = service.cache_keys(tokens=vector.token_ids, context=vector.context)
        assert tuple(key.value for key in computed.keys) == vector.expected_keys
    assert len(vectors["two full blocks"].expected_keys) == 2 and len(vectors["two full blocks"].token_ids) == 10
    assert spec == service_of(tokenizer, **options).cache_key_spec()


def test_cky_02_client_keys_equal_the_engines(tokenizer):
    service = service_of(tokenizer, **FULL)
    ids = service.tokenize("the quick brown fox jumps over the lazy dog " * 3).token_ids
    media = (MediaIdentity("b", 7, 9), MediaIdentity("a", 2, 3))
    for context in (
        CacheKeyContext(),
        CacheKeyContext(cache_salt="s"),
        CacheKeyContext(lora_names=("adapter-2", "adapter-2"), cache_salt="ü", media=media),
    ):
        answer = service.cache_keys(tokens=ids, context=context)
        assert tuple(key.value for key in answer.keys) == client_keys(service.cache_key_spec(), ids, context)


@pytest.mark.parametrize(
    "expected",
    [
        {"expected_profile": "other"},
        {"expected_profile_version": 2},
        {"expected_fingerprint": "sha256:0"},
    ],
)
def test_cky_04_another_expected_profile_is_a_failed_precondition(service, expected):
    assert status_of(lambda: service.cache_keys(text="the", **expected)) == "FAILED_PRECONDITION"
    spec = service.cache_key_spec()
    service.cache_keys(
        text="the",
        expected_profile=spec.profile,
        expected_profile_version=spec.version,
        expected_fingerprint=spec.fingerprint,
    )


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 11])
def test_cky_05_only_full_blocks_have_keys(service, count):
    answer = service.cache_keys(tokens=list(range(5, 5 + count)))
    assert [key.block_index for key in answer.keys] == list(range(count // BLOCK))
    assert (answer.token_count, answer.trailing_tokens, answer.block_size) == (count, count % BLOCK, BLOCK)
    assert answer.key_encoding == "bytes"


def test_cky_06_a_salt_changes_every_key_and_is_not_revealed(service):
    ids = list(range(5, 17))
    plain, salted = (
        service.cache_keys(tokens=ids, context=context)
        for context in (CacheKeyContext(), CacheKeyContext(cache_salt="tenant"))
    )
    assert not {key.value for key in plain.keys} & {key.value for key in salted.keys}
    assert [len(key.extra_keys) for key in salted.keys] == [1, 0, 0]
    assert "tenant" not in salted.keys[0].extra_keys[0]


@pytest.mark.parametrize(
    "context",
    [
        CacheKeyContext(cache_salt=""),
        CacheKeyContext(cache_salt="\ud800"),
        CacheKeyContext(group_idx=1),
        CacheKeyContext(media=(MediaIdentity("a", 0, 1),)),
        CacheKeyContext(prompt_embeddings=(PromptEmbeddingIdentity(0, b"x" * 32),)),
        None,
    ],
)
def test_cky_06_a_context_that_no_request_can_have_is_invalid(service, context):
    assert status_of(lambda: service.cache_keys(tokens=[5] * 8, context=context)) == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    "context",
    [
        CacheKeyContext(lora_names=("adapter-1", "adapter-2")),
        CacheKeyContext(lora_names=("",)),
        CacheKeyContext(media=(MediaIdentity("", 0, 1),)),
        CacheKeyContext(media=(MediaIdentity("a", 0, 0),)),
        CacheKeyContext(media=(MediaIdentity("a", 7, 2),)),
        CacheKeyContext(media=(MediaIdentity("a", 0, 3), MediaIdentity("b", 2, 3))),
    ],
)
def test_cky_06_a_malformed_context_is_invalid(tokenizer, context):
    service = service_of(tokenizer, **FULL)
    assert status_of(lambda: service.cache_keys(tokens=[5] * 8, context=context)) == "INVALID_ARGUMENT"


def test_cky_08_text_gives_the_keys_of_its_tokens(service):
    text = "the quick brown fox jumps over"
    assert service.cache_keys(text=text) == service.cache_keys(tokens=service.tokenize(text).token_ids)


def test_cky_08_the_input_is_exactly_one_of_text_and_tokens(service):
    assert status_of(service.cache_keys) == "INVALID_ARGUMENT"
    assert status_of(lambda: service.cache_keys(text="", tokens=[])) == "INVALID_ARGUMENT"
    assert status_of(lambda: service.cache_keys(tokens=[10**6])) == "INVALID_ARGUMENT"


def test_cky_10_adapters_must_be_loaded_and_need_an_engine_that_takes_them(service, tokenizer):
    context = CacheKeyContext(lora_names=("adapter-9",))
    with pytest.raises(UnsupportedTask):
        service.cache_keys(text="the", context=context)
    assert UnsupportedTask.grpc_status == "FAILED_PRECONDITION"
    with pytest.raises(LoraNotFound):
        service_of(tokenizer, **FULL).cache_keys(text="the", context=context)


def test_cky_13_the_keys_of_a_prefix_are_a_prefix_of_the_keys(service):
    ids = np.arange(5, 45)
    keys = service.cache_keys(tokens=ids).keys
    for count in (0, 7, 16, 39):
        assert service.cache_keys(tokens=ids[:count]).keys == keys[: count // BLOCK]


def test_cky_07_keys_are_those_that_the_prefix_cache_uses(service, tokenizer):
    ids = service.tokenize("the quick brown fox jumps over").token_ids
    expected = block_keys(root_key(REVISION, tokenizer.fingerprint, BLOCK), ids, BLOCK)
    assert [key.value for key in service.cache_keys(tokens=ids).keys] == expected
