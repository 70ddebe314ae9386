"""Request ids, and aborts by id, of everything and by handle."""

from __future__ import annotations

import asyncio

import pytest

from openengine import (
    DuplicateRequest,
    GenerateRequest,
    GenerationFinished,
    InvalidArgument,
    RequestNotFound,
    StoppingOptions,
)
from tests.scripted import ABC, GREEDY, Gate, scripted_engine
from tests.stream_grammar import check_stream
from tests.waiting import load


def test_gen_08_p9_an_id_in_flight_is_refused_undisturbed_and_reusable_after(gated):
    first = gated.submit("abcd", request_id="x", **GREEDY)
    assert gated.gate.entered.wait(20)
    for call in (gated.submit, gated.generate, gated.stream, lambda p, **k: asyncio.run(gated.agenerate(p, **k))):
        with pytest.raises(DuplicateRequest, match="'x' is in flight"):
            call("ab", request_id="x")
    with pytest.raises(DuplicateRequest, match="item 0 of 1"):
        gated.generate(["ab"], request_id="x")
    gated.gate.opened.set()
    expected = first.result().token_ids
    assert gated.generate("abcd", request_id="x", **GREEDY).token_ids == expected


def test_gen_01_every_request_without_an_id_gets_its_own(engine):
    results = engine.generate(["ab"] * 20, max_tokens=1)
    assert len({r.request_id for r in results}) == 20


@pytest.mark.parametrize(
    "target", [{}, {"request_id": ""}, {"request_id": "x", "all_requests": True}, {"request_id": 5}, {"request_id": []}]
)
def test_abt_01_abort_takes_exactly_one_target(engine, target):
    with pytest.raises(InvalidArgument):
        engine.abort(**target)


def test_abt_02_an_unknown_request_is_not_found(engine):
    with pytest.raises(RequestNotFound, match="'nobody'"):
        engine.abort("nobody")


def test_abt_04_07_08_aborting_a_running_and_a_queued_request_leaves_others_alone(tmp_path):
    gate = Gate()
    with scripted_engine(tmp_path, gate, ABC, max_num_seqs=2) as engine:
        running, other = (
            engine.submit("abcd", request_id=name, num_sequences=1, **GREEDY) for name in ("run", "other")
        )
        assert gate.entered.wait(20)
        queued = engine.submit("abcd", request_id="queue", num_sequences=2, **GREEDY)
        assert engine.abort("run").status == "aborted" and engine.abort("queue").status == "aborted"
        gate.opened.set()
        for handle, count in ((running, 1), (queued, 2)):
            events = list(handle)
            check_stream(events, count, prompt_tokens=4)
            finishes = [e for e in events if isinstance(e, GenerationFinished)]
            assert [f.reason for f in finishes] == ["cancelled"] * count and finishes[-1].usage is not None
        assert other.result().token_ids == engine.generate("abcd", request_id="run", **GREEDY).token_ids
        assert load(engine) == (0, 0, 0)


def test_abt_04_outputs_that_finished_before_keep_their_reason(tmp_path):
    # Output 0 takes the likely token "a" and stops; output 1 is held back by its seed until the abort.
    gate = Gate(lambda history: [0.0] * 27)
    gate.opened.set()
    with scripted_engine(tmp_path, gate, ABC, context=120) as engine:
        handle = engine.submit("ab", num_sequences=6, seed=5, stop_token_ids=range(1, 14), max_tokens=100)
        finished = []
        for event in handle:
            if isinstance(event, GenerationFinished):
                finished.append(event.reason)
                gate.opened.clear()
                handle.cancel()
                gate.opened.set()
        reasons = [output.finish_reason for output in handle.result().outputs]
    assert sorted(reasons) == sorted(finished) and "stop" in reasons
    assert handle.result().usage.completion_tokens >= 6


def test_abt_05_a_finished_request_is_already_finished_however_often(engine):
    engine.generate("ab", request_id="x", max_tokens=1)
    assert [engine.abort("x").status for _ in range(3)] == ["already_finished"] * 3


def test_abt_05_a_repeated_abort_finds_it_finished_before_the_end_has_come(gated):
    handles = [gated.submit("abcd", request_id=name, **GREEDY) for name in "abc"]
    assert gated.gate.entered.wait(20)
    assert [gated.abort("a").status for _ in range(4)] == ["aborted", *["already_finished"] * 3]
    assert [gated.abort(all_requests=True).status for _ in range(3)] == ["aborted", *["already_finished"] * 2]
    assert gated.abort("b").status == "already_finished"
    with pytest.raises(DuplicateRequest):
        gated.submit("abcd", request_id="a")
    gated.gate.opened.set()
    assert {handle.result(20).finish_reason for handle in handles} == {"cancelled"}
    again = gated.submit("abcd", request_id="a", max_tokens=1)
    assert again.result(20).finish_reason == "length" and gated.abort("a").status == "already_finished"


def test_r4_what_a_cancelled_request_has_used_is_known_when_it_is_over(gated):
    gated.gate.opened.set()
    handle, used = gated.submit("abcd", temperature=0, max_tokens=100, ignore_eos=True), []
    handle.on_done(lambda: used.append(handle.usage))
    for _ in range(3):
        handle.next_event()
    handle.cancel()
    result = handle.result(20)
    assert result.finish_reason == "cancelled" and used == [result.usage] and handle.usage.completion_tokens >= 3
    assert handle.usage.prompt_tokens == 4
    whole = gated.submit("abcd", temperature=0, max_tokens=3, ignore_eos=True)
    assert whole.result(20).usage == whole.usage and whole.usage.completion_tokens == 3


def test_abt_05_the_last_1024_ids_are_remembered(engine):
    ids = [f"r{i}" for i in range(1024)]
    engine.generate([GenerateRequest(prompt="a", request_id=i, stopping=StoppingOptions(max_tokens=0)) for i in ids])
    assert {engine.abort(i).status for i in ids} == {"already_finished"}


def test_abt_06_abort_all_ends_everything(gated):
    assert gated.abort(all_requests=True).status == "already_finished"
    handles = [gated.submit("abcd", **GREEDY) for _ in range(70)]
    assert gated.abort(all_requests=True).status == "aborted"
    gated.gate.opened.set()
    assert {handle.result(20).finish_reason for handle in handles} == {"cancelled"}
    assert load(gated) == (0, 0, 0) and gated.abort(all_requests=True).status == "already_finished"


def test_a_handle_cancels_its_own_request_and_never_a_namesake(gated):
    gated.gate.opened.set()
    old = gated.submit("ab", request_id="x", max_tokens=1)
    old.result()
    gated.gate.opened.clear()
    new = gated.submit("ab", request_id="x", **GREEDY)
    old.cancel()
    gated.gate.opened.set()
    assert new.result().finish_reason == "length"
