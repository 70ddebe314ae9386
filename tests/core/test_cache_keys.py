"""The cache-key profile: published test vectors, its encoding, and what a key depends on."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openengine.core.cache_keys import (
    CacheKeyContext,
    MediaIdentity,
    PromptEmbeddingIdentity,
    _encode,
    _encode_token_ids,
    block_key,
    block_keys,
    extra_keys,
    root_key,
)
from openengine.errors import InvalidArgument

REVISION = "sha256:" + "11" * 32
TOKENIZER = "sha256:" + "22" * 32
ROOT = bytes.fromhex("b9179742556b6c44427558eb3c6919c23a1e7db82d20fb76f3a44de39b56aa31")
IDS = [1, 23, 24, 255, 256, 65535, 65536, 4294967295, 7]
SALT_DIGEST = "80a707af7dc77ee1228f9127180f3964835e5beb4c4ab0d812f0fe7593579b3a"
PLAIN = CacheKeyContext()
SALTED = CacheKeyContext(cache_salt="tenant-a")
ADAPTED = CacheKeyContext(lora_names=("adapter-1",))
EVERYTHING = CacheKeyContext(
    lora_names=("adapter-1",), cache_salt="tenant-a", media=(MediaIdentity("img-1", token_offset=2, token_count=4),)
)

# No deadline, so that a busy machine fails nothing; no database, so that a run leaves no files.
randomized = settings(deadline=None, database=None, max_examples=60)

token_ids = st.lists(
    st.one_of(
        st.integers(0, 2**32 - 1),
        st.sampled_from([0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1]),
    ),
    max_size=40,
)


# ---- the published vectors -----------------------------------------------------------------------


def test_cky_03_root_key_is_the_published_one():
    assert root_key(REVISION, TOKENIZER, 4) == ROOT


def test_cky_03_first_block_hashes_the_published_bytes():
    encoded = "835820b9179742556b6c44427558eb3c6919c23a1e7db82d20fb76f3a44de39b56aa31840117181818fff6"
    assert block_key(ROOT, IDS[:4]) == hashlib.sha256(bytes.fromhex(encoded)).digest()
    assert _encode((ROOT, IDS[:4], None)).hex() == encoded


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (
            PLAIN,
            [
                "4b57a51b99187ab3d9482b2612002ae3d610ceb910026b91d02dc797c4b2cac1",
                "8bf5cfdcd9b397923b47455a63b97d0ef35f11931a75d9b52e4d264f8c292e11",
            ],
        ),
        (
            SALTED,
            [
                "cfbbec53d0a1151461064f5d9cdb26796ae9a6ebac444f6e36dd586a2180ce88",
                "142cd05b0523f400df1c99e906e3e5adb29dc0346ef25df561693c584565315c",
            ],
        ),
        (
            ADAPTED,
            [
                "db0281f9eb89a2f4cbeb00b35b2c2b75e6b0f6fac10e6a1d89c6782111868cb0",
                "1bd4c76c1aed675f589e155bfc723bb882e2424267da3c6e0b246a5c3c3bc9e5",
            ],
        ),
        (
            EVERYTHING,
            [
                "12d1e7b263726a30e9440adae4d10a127bbf57bc88aa6fb643d9c01a99fffaf5",
                "d9ab280bd1b9b9dc7c8781ed8e042245f91d93af57ec9beb551ac2c85f620138",
            ],
        ),
    ],
    ids=["no context", "salt", "adapter", "adapter, salt and media"],
)
def test_cky_03_keys_are_the_published_ones(context, expected):
    assert [key.hex() for key in block_keys(ROOT, IDS, 4, context)] == expected


def test_cky_03_extras_are_the_published_ones():
    assert EVERYTHING.extra_keys(0, 4) == ("lora:adapter-1", "mm:img-1@2", f"salt:{SALT_DIGEST}")
    assert EVERYTHING.extra_keys(1, 4) == ("lora:adapter-1", "mm:img-1@-2")


@pytest.mark.parametrize("count", [0, 3])
def test_cky_05_less_than_a_block_has_no_key(count):
    assert block_keys(ROOT, IDS[:count], 4) == []


# ---- the chain -----------------------------------------------------------------------------------


@randomized
@given(token_ids, st.integers(1, 7))
def test_cky_13_keys_of_a_prefix_are_a_prefix_of_the_keys(ids, cut):
    keys = block_keys(ROOT, ids, 3, SALTED)
    shorter = block_keys(ROOT, ids[:-cut], 3, SALTED)
    assert keys[: len(shorter)] == shorter


@randomized
@given(token_ids)
def test_keys_of_a_prompt_equal_keys_extended_block_by_block(ids):
    parent, chain = ROOT, []
    for index in range(len(ids) // 4):
        parent = block_key(parent, ids[index * 4 : index * 4 + 4], EVERYTHING.extra_keys(index, 4))
        chain.append(parent)
    assert block_keys(ROOT, ids, 4, EVERYTHING) == chain


@randomized
@given(token_ids)
def test_array_and_list_have_the_same_keys(ids):
    expected = block_keys(ROOT, ids, 4)
    assert block_keys(ROOT, np.array(ids, dtype=np.int64), 4) == expected
    assert block_keys(ROOT, np.array(ids, dtype=np.uint32), 4) == expected


def test_kv_12_any_change_of_one_token_changes_its_key_and_all_later_ones():
    keys = block_keys(ROOT, IDS[:8], 2)
    changed = block_keys(ROOT, [*IDS[:3], 99, *IDS[4:8]], 2)
    assert [a == b for a, b in zip(keys, changed, strict=True)] == [True, False, False, False]


@pytest.mark.parametrize(
    "other",
    [
        SALTED,
        ADAPTED,
        CacheKeyContext(lora_names=("adapter-2",)),
        CacheKeyContext(lora_names=("adapter-1", "adapter-2")),
        CacheKeyContext(cache_salt="adapter-1"),
        CacheKeyContext(media=(MediaIdentity("img-1", 0, 1),)),
        CacheKeyContext(prompt_embeddings=(PromptEmbeddingIdentity(0, b"\x01" * 32),)),
    ],
)
def test_kvo_08_cky_06_context_of_the_first_block_changes_every_key(other):
    keys, changed = block_keys(ROOT, IDS, 4), block_keys(ROOT, IDS, 4, other)
    assert not set(keys) & set(changed)


def test_adapter_and_salt_of_one_name_do_not_collide():
    adapter = block_keys(ROOT, IDS, 4, CacheKeyContext(lora_names=("x",)))
    assert not set(adapter) & set(block_keys(ROOT, IDS, 4, CacheKeyContext(cache_salt="x")))


def test_p8_media_changes_no_key_before_its_first_block():
    cat, dog = (CacheKeyContext(media=(MediaIdentity(name, token_offset=5, token_count=1),)) for name in ("cat", "dog"))
    equal = [a == b for a, b in zip(block_keys(ROOT, IDS, 2, cat), block_keys(ROOT, IDS, 2, dog), strict=True)]
    assert equal == [True, True, False, False]


def test_root_key_changes_with_each_of_its_parts():
    parts = (REVISION, TOKENIZER, 4, 0, "full_attention", 0)
    others = ("sha256:33", "sha256:44", 8, 1, "sliding_window", 512)
    roots = {root_key(*parts[:i], other, *parts[i + 1 :]) for i, other in enumerate(others)}
    assert len(roots | {root_key(*parts)}) == 7


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_an_id_outside_u32_is_refused_by_name(bad):
    with pytest.raises(InvalidArgument, match=f"token id {bad} "):
        block_keys(ROOT, [1, bad], 2)


# ---- extras --------------------------------------------------------------------------------------


def test_adapters_are_a_set_in_utf8_order():
    names = ("é", "b", "\U0001f600", "b", "\uffee", "B")
    expected = tuple(f"lora:{name}" for name in sorted(set(names), key=str.encode))
    assert extra_keys(3, 4, lora_names=names) == expected


def test_media_is_in_position_order_on_the_blocks_it_overlaps():
    media = [MediaIdentity("late", 9, 1), MediaIdentity("early", 3, 5), MediaIdentity("none", 4, 0)]
    assert [extra_keys(index, 4, media=media) for index in range(4)] == [
        ("mm:early@3",),
        ("mm:early@-1",),
        ("mm:late@1",),
        (),
    ]


def test_media_run_ending_at_a_boundary_does_not_reach_the_next_block():
    assert extra_keys(1, 4, media=[MediaIdentity("img", 0, 4)]) == ()


def test_kv_18_salt_is_on_the_first_block_only_and_not_in_clear():
    assert extra_keys(0, 4, cache_salt="tenant-a") == (f"salt:{SALT_DIGEST}",)
    assert extra_keys(1, 4, cache_salt="tenant-a") == ()


def test_embeddings_come_last_on_their_own_block():
    embeds = [PromptEmbeddingIdentity(1, b"\xab" * 32)]
    assert extra_keys(0, 4, prompt_embeddings=embeds) == ()
    assert extra_keys(1, 4, lora_names=["a"], prompt_embeddings=embeds) == ("lora:a", "embeds:" + "ab" * 32)


def test_kvo_03_empty_salt_and_short_digests_are_refused():
    with pytest.raises(InvalidArgument, match="cache_salt"):
        extra_keys(0, 4, cache_salt="")
    with pytest.raises(InvalidArgument, match="5 bytes"):
        extra_keys(0, 4, prompt_embeddings=[PromptEmbeddingIdentity(0, b"short")])


def test_empty_extras_hash_as_null():
    assert block_key(ROOT, IDS[:4], ()) == block_key(ROOT, IDS[:4], None)


# ---- encoding ------------------------------------------------------------------------------------

cbor_values = st.recursive(
    st.none() | st.integers(0, 2**64 - 1) | st.binary(max_size=300) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=30),
    max_leaves=10,
)


@randomized
@given(cbor_values)
def test_encoding_decodes_to_the_value_in_the_shortest_form(value):
    encoded = _encode(value)
    decoded, end = _decode(encoded, 0)
    assert decoded == value and end == len(encoded)


@randomized
@given(token_ids)
def test_vectorized_ids_equal_the_scalar_encoding(ids):
    encoded, lengths = _encode_token_ids(np.array(ids, dtype=np.int64))
    pieces = [_encode(token_id) for token_id in ids]
    assert encoded == b"".join(pieces)
    assert lengths.tolist() == [len(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("value", "encoded"),
    # RFC 8949, appendix A
    [
        (0, "00"),
        (10, "0a"),
        (23, "17"),
        (24, "1818"),
        (100, "1864"),
        (1000, "1903e8"),
        (1000000, "1a000f4240"),
        (1000000000000, "1b000000e8d4a51000"),
        (18446744073709551615, "1bffffffffffffffff"),
        (None, "f6"),
        (b"", "40"),
        (b"\x01\x02\x03\x04", "4401020304"),
        ("", "60"),
        ("IETF", "6449455446"),
        ("\u00fc", "62c3bc"),
        ([], "80"),
        ([1, [2, 3], [4, 5]], "8301820203820405"),
        (list(range(1, 26)), "98190102030405060708090a0b0c0d0e0f101112131415161718181819"),
    ],
)
def test_encoding_equals_the_examples_of_the_rfc(value, encoded):
    assert _encode(value).hex() == encoded


def _decode(data: bytes, start: int):
    """A strict reader: refuses any integer or length that is not in its shortest form."""
    major, low = data[start] >> 5, data[start] & 31
    start += 1
    if major == 7:
        assert low == 22
        return None, start
    number = low
    if low >= 24:
        size = {24: 1, 25: 2, 26: 4, 27: 8}[low]
        number = int.from_bytes(data[start : start + size], "big")
        assert number >= {1: 24, 2: 2**8, 4: 2**16, 8: 2**32}[size]
        start += size
    if major == 0:
        return number, start
    if major in (2, 3):
        raw = data[start : start + number]
        return raw if major == 2 else raw.decode(), start + number
    assert major == 4
    items = []
    for _ in range(number):
        item, start = _decode(data, start)
        items.append(item)
    return items, start
