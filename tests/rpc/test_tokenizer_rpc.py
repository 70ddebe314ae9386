"""The tokenizer service over a socket: TOK, ART and CKY of the requirements."""

from __future__ import annotations

import hashlib

import grpc
import pytest

from openengine.rpc import openengine_pb2 as pb
from openengine.rpc import tokenizer_pb2 as tok
from tests.rpc.scripted_server import VOCAB_SIZE, VOCABULARY
from tests.rpc.serving import request, run, status

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
PRECOND = grpc.StatusCode.FAILED_PRECONDITION
M = {"model": "scripted"}


@pytest.fixture(scope="module")
def service(server):
    return server.tokenizer


@pytest.fixture(scope="module")
def info(service):
    return service.GetTokenizerInfo(tok.GetTokenizerInfoRequest(**M))


@pytest.fixture(scope="module")
def spec(service):
    return service.GetCacheKeySpec(tok.GetCacheKeySpecRequest(**M))


def tokenize(service, text, options=None, **fields):
    return service.Tokenize(
        tok.TokenizeRequest(text=text, options=tok.TokenizeOptions(**(options or {})), **M, **fields)
    )


# ---- TOK -----------------------------------------------------------------------------------------


def test_tok_01_20_every_operation_is_listed_and_works(service, info):
    assert sorted(info.operations) == [1, 2, 3, 4, 5]
    assert len(tok.DESCRIPTOR.services_by_name["OpenEngineTokenizer"].methods) == 6


def test_tok_02_03_cky_12_one_identity_in_every_answer(server, service, info, spec):
    assert info.fingerprint.startswith("sha256:") and len(info.fingerprint) == 71
    capabilities = server.stub.GetModelInfo(pb.GetModelInfoRequest(model="scripted")).tokenizer
    answers = [tokenize(service, "a"), service.Detokenize(tok.DetokenizeRequest(token_ids=[1], **M)), capabilities]
    assert {answer.fingerprint for answer in answers} == {info.fingerprint} == {spec.tokenizer_fingerprint}
    assert info.vocab_size == VOCAB_SIZE and list(info.eos_token_ids) == [0]
    assert [(token.token_id, token.content) for token in info.special_tokens] == [(0, "<eos>")]
    assert (capabilities.artifact_format, capabilities.cache_key_profile) == (info.format, spec.profile)
    assert capabilities.cache_key_profile_version == spec.version
    assert capabilities.cache_keys_client_computable == spec.client_computable


def test_tok_04_05_empty_is_valid_and_absent_is_not(service):
    assert not tokenize(service, "").token_ids
    assert status(lambda: service.Tokenize(tok.TokenizeRequest(**M))) is INVALID
    assert service.Detokenize(tok.DetokenizeRequest(**M)).text == ""


def test_tok_06_it_is_the_engines_own_tokenization(server, service):
    text = "a cab é.<eos>"
    ran = run(server.stub, request(text, max_tokens=0, response__return_prompt_logprobs=True))
    assert list(tokenize(service, text).token_ids) == [token.token_id for token in ran.prompt.tokens]


def test_tok_08_special_text_can_be_ordinary(service):
    # The tokenizer has no letters "<" and ">", so what is left of the ordinary text are its letters.
    assert 0 in tokenize(service, "a<eos>").token_ids
    assert 0 not in tokenize(service, "aeos", {"parse_special_tokens": False}).token_ids


@pytest.mark.parametrize(("side", "expected"), [(1, "cde"), (2, "abc")])
def test_tok_09_truncation_keeps_a_prefix_or_a_suffix(service, side, expected):
    answer = tokenize(service, "abcde", {"max_tokens": 3, "truncation_side": side})
    assert [VOCABULARY[i] for i in answer.token_ids] == list(expected) and answer.untruncated_count == 5
    assert not tokenize(service, "abcde", {"max_tokens": 0}).token_ids


def test_tok_10_an_option_it_cannot_honour_is_refused(service):
    assert status(lambda: tokenize(service, "a", {"truncation_side": 0})) is INVALID
    options = tok.DetokenizeOptions(clean_up_spaces=True)
    assert status(lambda: service.Detokenize(tok.DetokenizeRequest(token_ids=[1], options=options, **M))) is INVALID


def test_tok_11_offsets_are_bytes_in_order(service):
    answer = tokenize(service, "abc", return_offsets=True)
    assert [(span.start, span.end) for span in answer.offsets] == [(0, 1), (1, 2), (2, 3)]


def test_tok_12_13_14_detokenize(service):
    text = "thecab."
    assert service.Detokenize(tok.DetokenizeRequest(token_ids=tokenize(service, text).token_ids, **M)).text == text
    keep = tok.DetokenizeOptions(skip_special_tokens=False)
    assert service.Detokenize(tok.DetokenizeRequest(token_ids=[1, 0], options=keep, **M)).text == "a<eos>"
    assert service.Detokenize(tok.DetokenizeRequest(token_ids=[1, 0], **M)).text == "a"
    assert status(lambda: service.Detokenize(tok.DetokenizeRequest(token_ids=[VOCAB_SIZE], **M))) is INVALID


def test_tok_15_18_answers_repeat_and_effective_options_are_complete(service, info):
    first, again = tokenize(service, "abc"), tokenize(service, "abc")
    assert first == again
    for options in (first.effective_options, info.default_tokenize_options):
        for name in ("add_special_tokens", "parse_special_tokens", "truncation_side", "normalize"):
            assert options.HasField(name)


def test_tok_16_the_model_is_required_and_known(service):
    for method, kind in (
        (service.GetTokenizerInfo, tok.GetTokenizerInfoRequest),
        (service.Tokenize, tok.TokenizeRequest),
        (service.Detokenize, tok.DetokenizeRequest),
        (service.GetCacheKeySpec, tok.GetCacheKeySpecRequest),
        (service.ComputeCacheKeys, tok.ComputeCacheKeysRequest),
        (service.GetTokenizerArtifacts, tok.GetTokenizerArtifactsRequest),
    ):
        assert status(lambda: method(kind())) is INVALID
        assert status(lambda: method(kind(model="nobody"))) is NOT_FOUND


def test_tok_17_another_fingerprint_is_a_failed_precondition(service, info):
    assert status(lambda: tokenize(service, "a", expected_fingerprint="sha256:00")) is PRECOND
    assert tokenize(service, "a", expected_fingerprint=info.fingerprint).token_ids


def test_tok_19_an_incomplete_character_is_told(service):
    answer = service.Detokenize(tok.DetokenizeRequest(token_ids=[1, 28], **M))
    assert answer.text == "a\ufffd" and answer.ends_with_incomplete_utf8


# ---- ART -----------------------------------------------------------------------------------------


def artifacts(service, **fields):
    return list(service.GetTokenizerArtifacts(tok.GetTokenizerArtifactsRequest(**M, **fields)))


def test_art_01_02_05_08_chunks_join_to_the_listed_files_which_rebuild_the_tokenizer(service, info, tmp_path):
    files: dict[str, bytes] = {}
    for chunk in artifacts(service, max_chunk_bytes=100):
        assert chunk.offset == len(files.setdefault(chunk.name, b"")) and len(chunk.data) <= 100
        files[chunk.name] += chunk.data
        assert chunk.last == (len(files[chunk.name]) == chunk.total_size)
    assert {a.name: (a.total_size, a.sha256) for a in info.artifacts} == {
        name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    from openengine.core.tokenizer import load_tokenizer

    assert load_tokenizer(tmp_path).encode("a cab é.") == list(tokenize(service, "a cab é.").token_ids)


def test_art_03_04_names(service, info):
    name = info.artifacts[0].name
    assert {chunk.name for chunk in artifacts(service, names=[name])} == {name}
    assert status(lambda: artifacts(service, names=["nothing.json"])) is NOT_FOUND
    for bad in ("../x", "a/b", "..", "", "a\0b", "a\\b"):
        assert status(lambda: artifacts(service, names=[bad])) is INVALID


def test_art_05_06_07_limits_and_cancelling(service):
    assert status(lambda: artifacts(service, max_chunk_bytes=0)) is INVALID
    assert status(lambda: artifacts(service, expected_fingerprint="sha256:00")) is PRECOND
    call = service.GetTokenizerArtifacts(tok.GetTokenizerArtifactsRequest(max_chunk_bytes=1, **M))
    next(call)
    call.cancel()
    assert artifacts(service)


# ---- CKY -----------------------------------------------------------------------------------------


def client_keys(spec, ids, salt=None):
    """Keys as a client computes them that knows the profile, and nothing but the published spec."""
    assert (spec.profile, spec.version, spec.hash_algorithm) == ("openengine.block-chain.sha256-cbor", 1, "sha256")
    (group,) = spec.groups
    keys, parent = [], group.root_key
    for index in range(len(ids) // group.block_size):
        block = ids[index * group.block_size : (index + 1) * group.block_size]
        extra = [f"salt:{hashlib.sha256(salt.encode()).hexdigest()}"] if salt and not index else None
        parent = hashlib.sha256(cbor([parent, list(block), extra])).digest()
        keys.append(parent)
    return keys


def cbor(value):
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return head(0, value)
    if isinstance(value, bytes):
        return head(2, len(value)) + value
    if isinstance(value, str):
        return head(3, len(value.encode())) + value.encode()
    return head(4, len(value)) + b"".join(map(cbor, value))


def head(major, value):
    if value < 24:
        return bytes([major << 5 | value])
    for code, size in ((24, 1), (25, 2), (26, 4)):
        if value < 1 << 8 * size:
            return bytes([major << 5 | code]) + value.to_bytes(size, "big")
    raise ValueError(value)


def compute(service, **fields):
    return service.ComputeCacheKeys(tok.ComputeCacheKeysRequest(**M, **fields))


def values(answer):
    return [key.value for key in answer.keys]


def test_cky_01_the_spec_is_complete(spec):
    assert spec.client_computable and spec.engine_computable and spec.fingerprint and spec.model_revision
    assert (spec.serialization, spec.key_encoding, spec.key_bytes) == ("cbor-deterministic", "bytes", 32)
    assert [(g.group_idx, g.block_size, g.kind, len(g.root_key)) for g in spec.groups] == [(0, 4, "full_attention", 32)]


def test_cky_02_03_client_side_keys_equal_the_engines_and_the_test_vectors(service, spec):
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert client_keys(spec, ids) == values(compute(service, tokens=tok.TokenSequence(ids=ids)))
    assert len(spec.test_vectors) >= 3
    for vector in spec.test_vectors:
        salt = vector.context.cache_salt if vector.context.HasField("cache_salt") else None
        assert client_keys(spec, vector.token_ids, salt) == list(vector.expected_keys)


def test_cky_04_another_profile_version_or_fingerprint_is_refused(service):
    tokens = tok.TokenSequence(ids=[1])
    for wrong in ({"expected_profile": "x"}, {"expected_profile_version": 2}, {"expected_fingerprint": "sha256:00"}):
        assert status(lambda: compute(service, tokens=tokens, **wrong)) is PRECOND


@pytest.mark.parametrize(("length", "num_keys", "trailing"), [(0, 0, 0), (3, 0, 3), (4, 1, 0), (9, 2, 1)])
def test_cky_05_13_partial_blocks_have_no_key_and_a_prefix_has_a_prefix_of_the_keys(
    service, length, num_keys, trailing
):
    ids = list(range(1, length + 1))
    answer = compute(service, tokens=tok.TokenSequence(ids=ids))
    assert (len(answer.keys), answer.trailing_tokens, answer.token_count) == (num_keys, trailing, length)
    longer = values(compute(service, tokens=tok.TokenSequence(ids=[*ids, *range(20, 30)])))
    assert longer[:num_keys] == values(answer)


def test_cky_06_10_contexts(service):
    tokens = tok.TokenSequence(ids=range(1, 9))
    salted = compute(service, tokens=tokens, context=tok.CacheKeyContext(cache_salt="s"))
    assert not set(values(salted)) & set(values(compute(service, tokens=tokens)))
    for impossible in (
        tok.CacheKeyContext(cache_salt=""),
        tok.CacheKeyContext(group_idx=1),
        tok.CacheKeyContext(media=[tok.MediaIdentity(identity="m", token_offset=0, token_count=1)]),
        tok.CacheKeyContext(prompt_embeddings=[tok.PromptEmbeddingIdentity(sha256=bytes(32))]),
    ):
        assert status(lambda: compute(service, tokens=tokens, context=impossible)) is INVALID
    adapter = tok.CacheKeyContext(lora_names=["a"])
    assert status(lambda: compute(service, tokens=tokens, context=adapter)) is PRECOND
    assert status(lambda: compute(service)) is INVALID


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_cky_07_08_a_client_predicts_block_hashes_and_cached_prompt_tokens(server, service, spec, salt):
    text = "predicted by a client alone"
    ids = list(tokenize(service, text).token_ids)
    expected = client_keys(spec, ids, salt)
    options = {"kv__cache_salt": salt} if salt else {}
    events = server.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
    events.initial_metadata()
    message = request(text, max_tokens=1, **options)
    run(server.stub, message)
    hashes = []
    while len(hashes) < len(expected):
        for event in next(events).batch.events:
            if event.request_id == message.request_id:
                hashes += [block.value for block in event.block_stored.block_hashes]
    events.cancel()
    assert hashes == expected
    assert run(server.stub, request(text, max_tokens=1, **options)).usage.cached_prompt_tokens == len(ids) // 4 * 4
    if salt is None:
        assert values(compute(service, text=text)) == expected


def test_cky_09_keys_repeat(service):
    tokens = tok.TokenSequence(ids=range(1, 20))
    assert compute(service, tokens=tokens) == compute(service, tokens=tokens)
