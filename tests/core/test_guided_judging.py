"""Texts judged under a guide: the same in however many pieces, within the time of a guide, or refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("llguidance")

from guided_tools import byte_compiler

from openengine.core.guides.compiler import GuideCompiler
from openengine.errors import InvalidArgument, PreconditionFailed
from tests.guided_cases import AMBIGUOUS, RECURSIVE, regex


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> Iterator[GuideCompiler]:
    compiler = byte_compiler(tmp_path_factory.mktemp("bytes"))
    yield compiler
    compiler.close()


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


def test_a_guide_under_which_the_backend_judges_no_text_says_so(tmp_path):
    from llguidance import LLParserLimits

    compiler = byte_compiler(tmp_path)
    guide = compiler.compile(regex("[a-z]{1,40}"))
    guide._backend._text_limits = LLParserLimits(max_grammar_size=1, verbose_errors=False)
    for judge in (guide.accepts, guide.accepts_prefix):
        with pytest.raises(
            InvalidArgument, match="texts cannot be judged under this guide: it has more than 1 symbols"
        ):
            judge("a")
    compiler.close()


def test_a_closed_engine_judges_no_text_unless_it_did_before(tmp_path):
    compiler = byte_compiler(tmp_path)
    judged, other = compiler.compile(regex("a")), compiler.compile(regex("b"))
    assert judged.accepts("a")
    compiler.close()
    assert judged.accepts("a") and not judged.accepts("b")
    with pytest.raises(PreconditionFailed, match="closed"):
        other.accepts("b")
