"""Compiling guides: which are taken, the cache and the threads, and the limits."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

pytest.importorskip("llguidance")

from guided_tools import byte_compiler, legal_tokens

from openengine.core.guides.compiler import GuideCompiler
from openengine.core.guides.grammar import Grammar
from openengine.core.guides.work import Work
from openengine.errors import InternalError, InvalidArgument, Overloaded, PreconditionFailed, UnsupportedFeature
from openengine.types import GuidedDecoding, JsonObjectConstraint
from tests.guided_cases import choice, regex


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> Iterator[GuideCompiler]:
    compiler = byte_compiler(tmp_path_factory.mktemp("bytes"))
    yield compiler
    compiler.close()


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


def test_gde_10_the_default_backend_may_be_named(compiler):
    assert compiler.compile(GuidedDecoding(regex="a", backend="llguidance")).accepts("a")


def test_a_missing_backend_names_the_package_and_the_extra(compiler, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedFeature, match=r"llguidance.*\[guided\]"):
        compiler.submit(regex("missing"))


def test_a_model_without_an_end_token_cannot_be_guided(compiler):
    with pytest.raises(UnsupportedFeature, match="end-of-sequence"):
        GuideCompiler(compiler.tokenizer, 300, [])


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


# ---- cache and threads -----------------------------------------------------------------------------


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

    def note(self: GuideCompiler, guide: GuidedDecoding, *args: object) -> object:
        compiled.append(guide)
        return compile_one(self, guide, *args)

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


# ---- limits ----------------------------------------------------------------------------------------


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


def test_the_limit_of_a_grammar_goes_by_the_bytes_of_its_guide(compiler, monkeypatch):
    monkeypatch.setattr("openengine.core.guides.compiler._LEAST_GRAMMAR_BYTES", 100)
    text = "\U0001f600" * 500  # four bytes each, nine in the grammar
    assert compiler.compile(choice(text)).accepts(text)


def test_a_guide_that_the_backend_refuses_says_what_is_too_large(compiler):
    with pytest.raises(InvalidArgument, match="regex guide cannot be compiled: its patterns are too complex"):
        compiler.compile(PATHOLOGICAL["nested_repetition"])


def test_a_failure_of_the_compiler_is_a_typed_error(compiler, monkeypatch):
    monkeypatch.setattr(Grammar, "text", lambda self, start: {}[start])
    with pytest.raises(InternalError, match="compiling the regex guide failed: KeyError"):
        compiler.compile(regex("broken"))


@pytest.mark.parametrize("name", PATHOLOGICAL)
def test_a_pathological_guide_is_compiled_or_refused_in_time_while_others_go_on(tmp_path, name):
    compiler = byte_compiler(tmp_path, timeout_s=2.0)
    running = compiler.compile(regex("[a-z]+")).start()
    outcome: list[object] = []

    def work() -> None:
        try:
            outcome.append(compiler.compile(PATHOLOGICAL[name]))
        except (InvalidArgument, Overloaded) as exc:
            outcome.append(exc)

    thread = threading.Thread(target=work)
    began = time.monotonic()
    thread.start()
    longest_step_s = 0.0
    while thread.is_alive():
        step_began = time.monotonic()
        assert ord("a") in legal_tokens(compiler, running)
        running.accept(ord("a"))
        longest_step_s = max(longest_step_s, time.monotonic() - step_began)
        time.sleep(0.001)
    assert time.monotonic() - began < 15
    assert outcome and longest_step_s < 2
    compiler.close()


def test_a_guide_that_was_given_up_keeps_nobody_from_compiling(tmp_path, monkeypatch):
    compiler = byte_compiler(tmp_path, timeout_s=0.5)
    compiler.compile(regex("warm"))
    may_end = threading.Event()
    text = Grammar.text

    def endless(self, start):
        if threading.current_thread() is not stuck.get("thread", threading.current_thread()):
            return text(self, start)
        stuck["thread"] = threading.current_thread()
        may_end.wait(30)  # without a look at the clock
        return text(self, start)

    stuck: dict[str, threading.Thread] = {}
    monkeypatch.setattr(Grammar, "text", endless)
    with pytest.raises(InvalidArgument, match="takes longer than guide_timeout_s 0.5"):
        compiler.compile(regex("never"))
    try:
        for index in range(3):
            assert compiler.compile(choice("yes", f"no {index}")).accepts("yes")
    finally:
        may_end.set()
        compiler.close()


def test_a_guide_that_waited_for_others_may_be_tried_again(tmp_path):
    compiler = byte_compiler(tmp_path, timeout_s=0.5)
    compiler.compile(regex("warm"))
    with Work(30, turns=compiler._turns), pytest.raises(Overloaded, match="of which it waited 0.[45] s for requests"):
        compiler.compile(choice("yes", "no"))
    assert compiler.compile(choice("yes", "no")).accepts("no")
    compiler.close()
