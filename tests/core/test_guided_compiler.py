"""Compiling guides, the masks of sequences under them, and the limits."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError

import numpy as np
import pytest

pytest.importorskip("llguidance")

from guided_tools import EOS, OTHER_EOS, byte_compiler, legal_tokens, start_after

from openengine.core.guides.backend import plain_error
from openengine.core.guides.compiler import GuideCompiler
from openengine.core.guides.grammar import Grammar
from openengine.core.guides.work import CompileTimeout, StepTime, Work
from openengine.core.guides.workers import Workers
from openengine.errors import InternalError, InvalidArgument, PreconditionFailed, UnsupportedFeature
from openengine.types import ChoiceConstraint, GuidedDecoding, JsonObjectConstraint

EXTRA = (b"ab", b"abc", b"b1", b'{"', b"12", b"")
AB, ABC, B1 = OTHER_EOS + 1, OTHER_EOS + 2, OTHER_EOS + 3


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> Iterator[GuideCompiler]:
    compiler = byte_compiler(tmp_path_factory.mktemp("bytes"), extra=EXTRA[:-1], vocab_size=300)
    yield compiler
    compiler.close()


def choice(*texts: str) -> GuidedDecoding:
    return GuidedDecoding(choice=ChoiceConstraint(texts))


def regex(pattern: str) -> GuidedDecoding:
    return GuidedDecoding(regex=pattern)


def grammar(text: str) -> GuidedDecoding:
    return GuidedDecoding(ebnf_grammar=text)


AMBIGUOUS = grammar('root ::= root root root | root root | [a-z] | ""')
# Right recursion over two rules: each letter may close all that were opened before, in eight ways.
_CLOSED = " | ".join(f'"a" x "{digit}"' for digit in range(8))
RECURSIVE = grammar(f'root ::= "a" x | {_CLOSED} | ""\nx ::= root')


# ---- which guides are taken ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guide", "said"),
    [
        (GuidedDecoding(), "given: none"),
        (GuidedDecoding(regex="a", json_object=JsonObjectConstraint()), "given: regex, json_object"),
        (choice(), "choices is empty"),
        (choice("a", ""), "choices[1] is empty"),
        (choice("a", "b", "a"), "choices[2] 'a' is there twice"),
        (choice("\ud800"), "lone surrogate at position 0"),
        (GuidedDecoding(regex="a", backend="xgrammar"), "backend 'xgrammar'"),
        (regex("[a-"), "position 0"),
        (regex("(?=a)b"), "lookahead"),
        (regex("a" * 600_000), "guide_max_bytes"),
    ],
)
def test_g1_g3_gde_08_gde_09_gde_10_a_malformed_guide_is_refused(compiler, guide, said):
    with pytest.raises(InvalidArgument) as caught:
        compiler.compile(guide)
    assert said in caught.value.message


def test_g4_anchors_and_empty_alternatives_are_harmless(compiler):
    assert compiler.compile(regex("^(.*)$")).accepts("a b")
    assert compiler.compile(regex("^(|.*)$")).accepts("")


def test_gde_10_the_default_backend_may_be_named(compiler):
    assert compiler.compile(GuidedDecoding(regex="a", backend="llguidance")).accepts("a")


def test_a_missing_backend_names_the_package_and_the_extra(compiler, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedFeature, match=r"llguidance.*\[guided\]"):
        compiler.submit(regex("missing"))


def test_a_model_without_an_end_token_cannot_be_guided(compiler):
    with pytest.raises(UnsupportedFeature, match="end-of-sequence"):
        GuideCompiler(compiler.tokenizer, 300, [])


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


def test_a_compiled_guide_is_a_guide_of_its_own_compiler_only(compiler, tmp_path):
    guide = compiler.compile(regex("own[0-9]"))
    assert compiler.compile(guide) is guide and guide.source == regex("own[0-9]")
    assert pickle.loads(pickle.dumps(guide)) == guide.source
    other = byte_compiler(tmp_path)
    with pytest.raises(InvalidArgument, match="another engine"):
        other.compile(guide)
    other.close()
    with pytest.raises(PreconditionFailed, match="closed"):
        other.compile(regex("late"))


def test_a_forked_process_is_told_so_instead_of_waiting_for_workers_that_it_has_not(tmp_path, monkeypatch):
    compiler = byte_compiler(tmp_path)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(PreconditionFailed, match="another process"):
        compiler.compile(regex("a"))
    monkeypatch.undo()
    compiler.close()


# ---- judging texts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 255, 256, 257, 5000])
def test_a_text_is_judged_the_same_in_however_many_pieces(compiler, length):
    guide = compiler.compile(regex("(ab|é)*a?"))
    text = ("abé" * length)[:length]
    assert guide.accepts(text) and guide.accepts_prefix(text)
    assert not guide.accepts(text + "x") and not guide.accepts_prefix(text + "x")
    exact = compiler.compile(regex(f"a{{{length}}}")) if length else compiler.compile(regex(""))
    assert exact.accepts("a" * length) and not exact.accepts_prefix("a" * (length + 1))


@pytest.mark.parametrize("text", [b"a", bytearray(b"a"), None, 5, ["a"]], ids=repr)
def test_what_is_no_str_is_refused_as_a_text(compiler, text):
    guide = compiler.compile(regex("a"))
    for judge in (guide.accepts, guide.accepts_prefix):
        with pytest.raises(InvalidArgument, match=f"must be a str, not {type(text).__name__}"):
            judge(text)


def test_a_text_that_takes_too_long_to_judge_is_refused_and_other_threads_go_on(tmp_path):
    compiler = byte_compiler(tmp_path, timeout_s=0.5)
    guide, seen, done = compiler.compile(AMBIGUOUS), [], threading.Event()

    def count() -> None:
        while not done.is_set():
            seen.append(time.monotonic())
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    began = time.monotonic()
    with pytest.raises(InvalidArgument, match=r"longer than guide_timeout_s 0.5: \d+ of 5000 bytes"):
        guide.accepts("a" * 5000)
    assert time.monotonic() - began < 10
    done.set()
    thread.join()
    assert sum(time_s >= began for time_s in seen) > 20
    assert guide.accepts("a" * 20)
    compiler.close()


def test_a_text_that_is_too_complex_to_judge_is_refused(compiler):
    guide = compiler.compile(RECURSIVE)
    assert guide.accepts("a" * 100 + "7") and not guide.accepts("a" * 100 + "b")
    with pytest.raises(InvalidArgument, match="too complex to judge.*the limit is 2000.*write x ::= item"):
        guide.accepts("a" * 4000)


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


def test_the_time_of_a_guide_is_made_up_for_by_quick_tokens():
    spent = StepTime()
    for _ in range(100):
        spent.spend(0.08)  # of a mask; and then of tokens that leave most of what they have
        assert not any(spent.next_token(0.001) for _ in range(10)) and spent.error is None
    twin = spent.copy()
    assert [twin.next_token(0.06) for _ in range(6)] == [False] * 5 + [True]
    assert "took 0.30 s" in twin.error and spent.error is None


def test_a_state_that_is_rebuilt_is_not_charged_again(compiler, monkeypatch):
    charged: list[float] = []
    monkeypatch.setattr(StepTime, "next_token", lambda self, seconds: charged.append(seconds))
    guide = compiler.compile(regex("[a-z]*"))
    charged.clear()
    state = guide.start([ord("a")] * 50)
    assert charged == []
    state.accept(ord("a"))
    assert len(charged) == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("Parser Error: Current row has 2001 items; max is 2000; consider", "2001 possible continuations, the limit is 2000"),
        ("parser error: Too many items (limit 50; mask); try avoiding", "more than 50 readings"),
        ("lexer error: too many expressions constructed", "its patterns are too complex to be followed together"),
        ("fuel exhausted when checking relevance of lexemes (9)", "{m,n}"),
        ("lexer precomputation failed; either increase limits.initial_lexer_fuel", "fewer or simpler patterns"),
        ("lexer error: too many states: 70 >= 70", "more than 70 states"),
        ("at 1(2): initial lexer configuration (grammar) too big (limit for this grammar: 80)", "the limit is some 80 parts"),
        ("at 1(2): grammar size (number of symbols) too big (limit for this grammar: 90)", "more than 90 symbols"),
        ("panic: index out of bounds", "larger than the backend can take"),
        ("something else\nwith details", "something else"),
    ],
)  # fmt: skip
def test_what_the_backend_refuses_is_named_in_the_terms_of_the_guide(error, said):
    found = plain_error(error)
    assert said in found and "\n" not in found
    assert not any(word in found for word in ("fuel", "items;", "lexer", "lexeme", "row"))


def test_a_guide_that_the_backend_refuses_says_what_is_too_large(compiler):
    with pytest.raises(InvalidArgument, match="regex guide cannot be compiled: its patterns are too complex"):
        compiler.compile(PATHOLOGICAL["nested_repetition"])


# ---- cache, threads, limits ------------------------------------------------------------------------


def test_a_guide_is_compiled_once(compiler):
    first = compiler.compile(regex("cached[0-9]"))
    assert compiler.compile(regex("cached[0-9]")) is first
    futures = [compiler.submit(regex("cached[a-z]")) for _ in range(5)]
    assert len({id(future.result()) for future in futures}) == 1


def test_cancelling_one_wait_leaves_the_others(compiler):
    futures = [
        compiler.submit(GuidedDecoding(json_schema=json.dumps({"enum": [f"v{i}" for i in range(2000)]})))
        for _ in range(2)
    ]
    futures[0].cancel()
    assert futures[1].result().accepts('"v7"')


@pytest.fixture
def busy(tmp_path, monkeypatch) -> Iterator[tuple[GuideCompiler, list[GuidedDecoding], threading.Event]]:
    """A compiler whose workers wait for an event, with the guides that it compiles after it."""
    compiled: list[GuidedDecoding] = []
    compile_one = GuideCompiler._compile

    def note(self: GuideCompiler, guide: GuidedDecoding, kind: str) -> object:
        compiled.append(guide)
        return compile_one(self, guide, kind)

    monkeypatch.setattr(GuideCompiler, "_compile", note)
    monkeypatch.setattr("openengine.core.guides.workers._SLOW_S", 60.0)
    compiler, release = byte_compiler(tmp_path), threading.Event()
    for _ in range(2):
        compiler._workers.submit(release.wait, 30)
    yield compiler, compiled, release
    release.set()
    compiler.close()


def test_a_guide_for_which_nobody_waits_any_longer_is_never_compiled(busy):
    compiler, compiled, release = busy
    left = [compiler.submit(regex("left")) for _ in range(3)]
    kept = [compiler.submit(regex("kept")) for _ in range(3)]
    assert all(future.cancel() for future in (*left, *kept[1:]))
    again = compiler.submit(regex("came back"))
    assert again.cancel()
    again = compiler.submit(regex("came back"))
    release.set()
    assert kept[0].result().accepts("kept") and again.result().accepts("came back")
    assert sorted(guide.regex for guide in compiled) == ["came back", "kept"]
    assert compiler.compile(regex("left")).accepts("left")


def test_a_guide_that_is_being_compiled_goes_on_for_the_cache_when_nobody_waits(busy, monkeypatch):
    compiler, compiled, release = busy
    began, go_on, text = threading.Event(), threading.Event(), Grammar.text

    def slow_text(self: Grammar, start: str) -> str:
        began.set()
        go_on.wait(30)
        return text(self, start)

    monkeypatch.setattr(Grammar, "text", slow_text)
    release.set()
    future = compiler.submit(regex("begun"))
    assert began.wait(30) and future.cancel()
    go_on.set()
    assert compiler.compile(regex("begun")).accepts("begun") and compiled == [regex("begun")]


def test_whoever_does_not_cancel_gets_the_guide_whatever_others_do(tmp_path):
    compiler = byte_compiler(tmp_path)
    wrong: list[object] = []

    def come_and_go(seed: int) -> None:
        for step in range(60):
            future = compiler.submit(regex(f"shared{step % 7}[0-9]{{{1 + step // 7}}}"))
            if (step + seed) % 3:
                future.cancel()
                continue
            try:
                if not future.result(30).accepts(f"shared{step % 7}" + "1" * (1 + step // 7)):
                    wrong.append(step)
            except (CancelledError, Exception) as exc:
                wrong.append(exc)

    threads = [threading.Thread(target=come_and_go, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    compiler.close()


def test_a_quick_job_does_not_wait_for_slow_ones_and_their_substitutes_end():
    workers, release = Workers(2, name="test-substitutes"), threading.Event()
    slow = [workers.submit(release.wait, 30) for _ in range(4)]
    assert workers.submit(lambda: 5).result(10) == 5
    assert not any(future.done() for future in slow)
    release.set()
    assert all(future.result(10) for future in slow)
    deadline = time.monotonic() + 10
    while sum(thread.name == "test-substitutes" for thread in threading.enumerate()) > 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert workers.submit(lambda: 6).result(10) == 6
    workers.close()


def test_slow_jobs_get_six_substitutes_at_most(monkeypatch):
    monkeypatch.setattr("openengine.core.guides.workers._SLOW_S", 0.01)
    workers, release, begun = Workers(2, name="test-most"), threading.Event(), []

    def wait() -> None:
        begun.append(threading.current_thread())
        release.wait(30)

    slow = [workers.submit(wait) for _ in range(12)]
    deadline = time.monotonic() + 10
    while len(begun) < 8:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(begun) == 8
    release.set()
    for future in slow:
        future.result(10)
    assert len(begun) == 12 and len(set(begun)) == 8
    workers.close()


def test_work_lets_others_run_and_ends_in_time():
    now = [0.0]
    work = Work(1, lambda: now[0])
    work.take_turns()
    now[0] = 1.5
    with pytest.raises(CompileTimeout):
        work.take_turns()


def test_a_refusal_is_not_remembered_as_a_guide(compiler):
    for _ in range(2):
        with pytest.raises(InvalidArgument):
            compiler.compile(regex("(forgotten"))


def all_of(count: int) -> GuidedDecoding:
    parts = [{"anyOf": [{"pattern": f"a{i}"}, {"pattern": f"b{i}"}]} for i in range(count)]
    return GuidedDecoding(json_schema=json.dumps({"type": "string", "allOf": parts}))


def denied_denials(count: int) -> GuidedDecoding:
    parts = [{"not": {"pattern": f"a{i}"}} for i in range(count)]
    return GuidedDecoding(json_schema=json.dumps({"type": "string", "not": {"anyOf": parts}}))


@pytest.mark.parametrize(
    "guide", [all_of(26), denied_denials(26), regex("a{1000}{1000}")], ids=["all_of", "denied_denials", "repetitions"]
)
def test_what_would_cost_the_backend_without_bounds_never_reaches_it(compiler, guide):
    began = time.monotonic()
    with pytest.raises(InvalidArgument, match="too complex"):
        compiler.compile(guide)
    assert time.monotonic() - began < 5


def test_several_patterns_at_once_are_a_guide(compiler):
    guide = compiler.compile(all_of(6))
    text = '"' + "".join(f"a{i}" for i in range(6)) + '"'
    assert guide.accepts(text) and not guide.accepts(text.replace("a3", ""))


def test_a_failure_of_the_compiler_is_a_typed_error(compiler, monkeypatch):
    monkeypatch.setattr(Grammar, "text", lambda self, start: {}[start])
    with pytest.raises(InternalError, match="compiling the regex guide failed: KeyError"):
        compiler.compile(regex("broken"))


PATHOLOGICAL = {
    "nested_repetition": regex("((a?){60}){60}(a{60}){60}"),
    "exponential_regex": regex("(x+x+)+y(.*a){60}(a|b)*a(a|b){60}"),
    "nested_groups": GuidedDecoding(ebnf_grammar="root ::= " + "(" * 5000),
    "doubling_rules": GuidedDecoding(
        ebnf_grammar="root ::= x0\n" + "\n".join(f"x{i} ::= x{i + 1} x{i + 1}" for i in range(40)) + '\nx40 ::= "a"'
    ),
    "a_chain_of_rules": GuidedDecoding(
        ebnf_grammar="root ::= x0\n"
        + "\n".join(f'x{i} ::= "(" x{i + 1} root? | "b"' for i in range(1500))
        + '\nx1500 ::= "a"'
    ),
    "many_alternatives": choice(*(f"choice {i}" for i in range(10_000))),
    "a_large_schema": GuidedDecoding(json_schema=json.dumps({"enum": ["x" * 100 + str(i) for i in range(10_000)]})),
    "a_deep_schema": GuidedDecoding(json_schema='{"items":' * 3000 + "{}" + "}" * 3000),
    "many_conditions": GuidedDecoding(
        json_schema=json.dumps({"type": "object", "dependentRequired": {f"a{i}": [f"b{i}"] for i in range(40)}})
    ),
}


@pytest.mark.parametrize("name", PATHOLOGICAL)
def test_a_pathological_guide_is_compiled_or_refused_in_time_while_others_go_on(tmp_path, name):
    compiler = byte_compiler(tmp_path, timeout_s=2.0)
    running = compiler.compile(regex("[a-z]+")).start()
    outcome: list[object] = []

    def work() -> None:
        try:
            outcome.append(compiler.compile(PATHOLOGICAL[name]))
        except InvalidArgument as exc:
            outcome.append(exc)

    thread = threading.Thread(target=work)
    began = time.monotonic()
    thread.start()
    num_steps = 0
    while thread.is_alive():
        assert ord("a") in legal_tokens(compiler, running)
        running.accept(ord("a"))
        num_steps += 1
        time.sleep(0.001)
    assert time.monotonic() - began < 15
    assert outcome and num_steps >= 0
    compiler.close()
