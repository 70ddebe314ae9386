"""Sequences under a guide: their masks, what must come, where they may end, and the guides that they cannot follow."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("llguidance")

from guided_tools import EOS, OTHER_EOS, byte_compiler, legal_tokens, start_after

from openengine.core.guides.compiler import GuideCompiler
from openengine.core.guides.work import StepTime
from openengine.errors import InternalError, InvalidArgument
from openengine.types import GuidedDecoding
from tests.guided_cases import AMBIGUOUS, RECURSIVE, choice, regex

EXTRA = (b"ab", b"abc", b"b1", b'{"', b"12", b"")
AB, ABC, B1 = OTHER_EOS + 1, OTHER_EOS + 2, OTHER_EOS + 3


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> Iterator[GuideCompiler]:
    compiler = byte_compiler(tmp_path_factory.mktemp("bytes"), extra=EXTRA[:-1], vocab_size=300)
    yield compiler
    compiler.close()


# ---- masks -----------------------------------------------------------------------------------------


def test_gde_05_g22_a_choice_that_begins_another_is_reachable_and_so_is_the_other(compiler):
    guide = compiler.compile(choice("a", "ab", "b"))
    assert legal_tokens(compiler, guide.start()) == [ord("a"), ord("b"), AB]
    assert legal_tokens(compiler, start_after(guide, "a")) == [ord("b"), EOS, OTHER_EOS]
    assert legal_tokens(compiler, start_after(guide, "ab")) == [EOS, OTHER_EOS]


def test_a_token_across_a_boundary_is_legal_only_where_the_guide_goes_on_with_it(compiler):
    guide = compiler.compile(regex("ab[0-9]"))
    assert ABC not in legal_tokens(compiler, guide.start())
    assert B1 in legal_tokens(compiler, start_after(compiler.compile(regex("(a|x)b[0-9]")), "a"))


def test_g18_after_the_last_digit_only_the_ends_are_legal(compiler):
    state = compiler.compile(regex("[0-9]{3}")).start()
    for position in range(3):
        assert not state.may_end and not state.is_complete and EOS not in legal_tokens(compiler, state)
        state.accept(ord("0") + position)
    assert state.may_end and state.is_complete
    assert legal_tokens(compiler, state) == [EOS, OTHER_EOS]


def test_g19_every_end_token_is_illegal_until_the_guide_may_end(compiler):
    guide = compiler.compile(GuidedDecoding(json_schema='{"type": "object"}'))
    for text in ("", "{", '{"a', '{"a": 1', '{"a": [1]'):
        assert not {EOS, OTHER_EOS} & set(legal_tokens(compiler, start_after(guide, text))), text
    assert legal_tokens(compiler, start_after(guide, "{}")) == [EOS, OTHER_EOS]


def test_stop_ids_of_a_request_are_illegal_until_the_guide_may_end(compiler):
    guide = compiler.compile(regex("a+"))
    assert ord("b") not in legal_tokens(compiler, compiler.compile(regex("[abc]c")).start(stop_token_ids=[ord("b")]))
    assert 299 not in legal_tokens(compiler, guide.start(stop_token_ids=[299]))
    state = guide.start([ord("a")], stop_token_ids=[299])
    assert {299, EOS, ord("a")} <= set(legal_tokens(compiler, state))
    state.accept(299)


def test_ids_without_text_are_never_legal(compiler):
    guide = compiler.compile(regex("(.|\n)*"))
    tokens = set(legal_tokens(compiler, guide.start()))
    assert {ord("a"), AB, EOS} <= tokens and not tokens & set(range(OTHER_EOS + len(EXTRA), 300))


def test_characters_of_several_bytes_are_built_byte_by_byte(compiler):
    guide = compiler.compile(choice("é", "ê"))
    assert legal_tokens(compiler, guide.start(list("é".encode()[:1]))) == [0xA9, 0xAA]


def test_gde_12_masks_of_a_batch_do_not_mix(compiler):
    first, second = compiler.compile(regex("[0-9]+")).start(), compiler.compile(choice("x")).start()
    out = np.zeros((4, -(-300 // 32)), np.int32)
    first.accept(ord("1"))
    complete = compiler.fill_masks([first, None, second, first.copy()], out)
    rows = [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:300]).tolist() for row in out]
    assert rows[1] == list(range(300)) and rows[2] == [ord("x")]
    assert rows[0] == rows[3] and EOS in rows[0] and ord("7") in rows[0]
    assert complete.tolist() == [False] * 4


def test_a_copy_goes_its_own_way(compiler):
    state = compiler.compile(regex("ab|ac")).start([ord("a")])
    twin = state.copy()
    state.accept(ord("b"))
    assert state.is_complete and not twin.is_complete
    twin.accept(ord("c"))
    assert twin.is_complete


def test_a_state_is_rebuilt_from_its_tokens_after_preemption(compiler):
    guide = compiler.compile(GuidedDecoding(json_schema='{"type": "array", "items": {"type": "integer"}}'))
    state = guide.start()
    for token in b"[12, 3":
        state.accept(token)
    assert legal_tokens(compiler, state) == legal_tokens(compiler, guide.start(list(b"[12, 3")))


def test_a_token_against_the_guide_is_an_internal_error(compiler):
    state = compiler.compile(regex("[0-9]")).start()
    with pytest.raises(InternalError, match="token 97 is not legal"):
        state.accept(ord("a"))
    with pytest.raises(InternalError, match="token 256"):
        compiler.compile(regex("[0-9]")).start().accept(EOS)


def test_forced_tokens_are_those_that_must_follow(compiler):
    state = compiler.compile(regex("[0-9]xyzxyz")).start([ord("1")])
    assert bytes(state.forced[::-1]) == b"xyzxyz"
    while state.forced:
        assert legal_tokens(compiler, state) == state.forced[-1:]
        state.accept(state.forced[-1])
    assert legal_tokens(compiler, state) == [EOS, OTHER_EOS]


def test_a_stop_id_is_never_forced(compiler):
    state = compiler.compile(regex("[0-9]xyz")).start([ord("1")], stop_token_ids=[ord("y")])
    assert state.forced == [ord("x")]


def test_a_state_leaves_a_token_unless_all_that_may_come_ends_the_output_too_early(compiler):
    guide, forced = compiler.compile(regex("xy?")), compiler.compile(regex("[0-9]xyz"))
    assert not guide.leaves_token(guide.start(stop_token_ids=[ord("x")]))
    assert guide.leaves_token(guide.start([ord("x")]), min_tokens_left=True)
    assert guide.leaves_token(start_after(guide, "xy"), min_tokens_left=True)  # complete, so it may end
    state = forced.start([ord("1")], stop_token_ids=[ord("z")])
    assert state.forced and forced.leaves_token(state, min_tokens_left=True)


def test_where_eos_is_ignored_it_is_legal_only_when_nothing_else_is(compiler):
    guide = compiler.compile(regex("a{1,2}"))
    assert legal_tokens(compiler, guide.start([ord("a")], ignore_eos=True)) == [ord("a")]
    assert legal_tokens(compiler, guide.start([ord("a")] * 2, ignore_eos=True)) == [EOS, OTHER_EOS]


@pytest.mark.parametrize("pattern", ["", "(?!aaa)a{1,3}", "a(?!b)b?"])
def test_a_guide_that_may_only_end_is_complete_and_eos_legal_though_it_is_ignored(compiler, pattern):
    state = compiler.compile(regex(pattern)).start(ignore_eos=True)
    mask = np.zeros((1, -(-300 // 32)), np.int32)
    for _ in range(4):
        (is_complete,) = compiler.fill_masks([state], mask)
        tokens = legal_tokens(compiler, state)
        if tokens == [EOS, OTHER_EOS]:
            assert is_complete
            return
        assert tokens and not is_complete
        state.accept(tokens[0])
    raise AssertionError("the guide never ends")


# ---- guides that cannot be followed to the end -----------------------------------------------------


def test_a_guide_that_reaches_a_limit_in_an_output_raises_what_is_too_large(compiler):
    state = compiler.compile(RECURSIVE).start()
    other = state.copy()
    with pytest.raises(InvalidArgument, match="cannot be followed any further.*the limit is 2000") as caught:
        for _ in range(4000):
            state.accept(ord("a"))
    assert "items" not in caught.value.message and "write x ::= item*" in caught.value.message
    mask = np.full((2, -(-300 // 32)), -1, np.int32)
    complete = compiler.fill_masks([state, other], mask)
    assert state.error in caught.value.message and not mask[0].any() and not complete.any()
    assert other.error is None and ord("a") in legal_tokens(compiler, other)


def test_a_mask_that_reaches_a_limit_ends_its_state_only(tmp_path, monkeypatch):
    monkeypatch.setattr("openengine.core.guides.backend._STEP_ITEMS", 200)
    compiler = byte_compiler(tmp_path)
    state = compiler.compile(RECURSIVE).start()
    other, mask = state.copy(), np.zeros((2, -(-compiler.vocab_size // 32)), np.int32)
    while state.error is None:
        compiler.fill_masks([state, other], mask)
        if state.error is None:
            state.accept(ord("a"))
    assert "more than 200 readings" in state.error and not mask[0].any() and mask[1].any()
    assert isinstance(state.exhausted(state.error), InvalidArgument)
    compiler.close()


def test_an_ambiguous_guide_ends_once_its_time_is_up_in_a_batch_and_alone(compiler):
    guide, quick = compiler.compile(AMBIGUOUS), compiler.compile(regex("[a-z]*"))
    for num_others in (0, 8):
        state, others = guide.start(), [quick.start() for _ in range(num_others)]
        mask = np.zeros((1 + num_others, -(-300 // 32)), np.int32)
        with pytest.raises(InvalidArgument, match=r"s of CPU time more than 10 ms a token, the limit is 0.25 s"):
            for _ in range(1000):
                compiler.fill_masks([state, *others], mask)
                if state.error is not None:
                    raise state.exhausted(state.error)
                for each in (state, *others):
                    each.accept(ord("a"))
        assert all(other.error is None and other.may_end for other in others)


def test_a_state_that_is_rebuilt_is_not_charged_again(compiler, monkeypatch):
    charged: list[float] = []
    monkeypatch.setattr(StepTime, "next_token", lambda self, seconds: charged.append(seconds))
    guide = compiler.compile(regex("[a-z]*"))
    charged.clear()
    state = guide.start([ord("a")] * 50)
    assert charged == []
    state.accept(ord("a"))
    assert len(charged) == 1
