"""Draining: who is refused, what finishes, deadlines, reports."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from openengine import (
    Draining,
    InvalidArgument,
)
from tests.scripted import GREEDY, letters
from tests.waiting import wait_until


def drain_states(engine, **options) -> list[str]:
    return [str(report.state) for report in engine.drain_events(**options)]


def test_drn_01_05_09_an_idle_engine_starts_and_completes_and_joins_a_second_drain(engine):
    reports = list(engine.drain_events())
    assert [str(r.state) for r in reports] == ["started", "complete"]
    assert reports[-1].in_flight_requests == 0 and reports[-1].open_kv_sessions == 0
    assert drain_states(engine) == ["started", "complete"] and engine.drain() is None


def test_drn_03_11_new_requests_are_refused_running_ones_finish_and_the_rest_keeps_working(gated):
    running = gated.submit("abcd", request_id="r", **GREEDY)
    assert gated.gate.entered.wait(20)
    drained = threading.Thread(target=gated.drain)
    drained.start()
    wait_until(lambda: gated.health().state == "draining")
    for call in (gated.submit, gated.generate, gated.stream):
        with pytest.raises(Draining) as caught:
            call("ab")
        assert caught.value.retryable
    assert isinstance(gated.generate(["ab"], on_error="return")[0].error, Draining)
    assert gated.load_info().running_requests + gated.load_info().queued_requests == 1
    assert gated.tokenize("ab") == letters("ab") and gated.model_info() and gated.info()
    gated.gate.opened.set()
    drained.join(20)
    assert not drained.is_alive() and running.done and running.result().finish_reason == "length"
    assert gated.abort("r").status == "already_finished"
    health = gated.health(include_inference_probe=True)
    assert health.state == "draining" and health.checks[-1].state == "ready"


def test_drn_04_without_stopping_new_requests_are_accepted_throughout(engine):
    assert drain_states(engine, stop_accepting_new_requests=False) == ["started", "complete"]
    assert engine.health().state == "ready" and engine.generate("ab", **GREEDY)


def test_drn_06_08_a_deadline_of_zero_reports_draining_and_the_work_goes_on(gated):
    running = gated.submit("abcd", **GREEDY)
    for _ in range(2):
        with pytest.raises(Draining, match="1 requests are still in flight at the deadline of 0 ms"):
            gated.drain(deadline_ms=0)
    with pytest.raises(Draining):
        gated.submit("ab")
    gated.gate.opened.set()
    assert running.result().finish_reason == "length"
    assert drain_states(gated, deadline_ms=0) == ["started", "complete"]


def test_drn_07_at_the_deadline_what_runs_is_aborted(gated, caplog):
    handles = [gated.submit("abcd", **GREEDY) for _ in range(3)]
    assert gated.gate.entered.wait(20)
    states = []
    drained = threading.Thread(
        target=lambda: states.extend(drain_states(gated, deadline_ms=20, abort_after_deadline=True))
    )
    drained.start()
    wait_until(lambda: "the drain's limit of 20 ms cancels 3 requests" in caplog.text)
    gated.gate.opened.set()
    drained.join(20)
    assert states[0] == "started" and states[-1] == "complete"
    assert {handle.result(0).finish_reason for handle in handles} == {"cancelled"}


def test_drn_13_progress_is_reported_at_least_once_a_second(gated):
    gated.submit("abcd", **GREEDY)
    reports = gated.drain_events(deadline_ms=np.int64(20000))
    started = next(reports)
    asked = time.monotonic()
    progress = next(reports)
    assert time.monotonic() - asked < 1.5
    gated.gate.opened.set()
    assert [str(r.state) for r in (started, progress)] == ["started", "in_progress"]
    assert started.in_flight_requests == progress.in_flight_requests == 1
    last = list(reports)[-1]
    assert last.state == "complete" and last.in_flight_requests == 0


def test_drn_12_leaving_the_reports_leaves_the_drain_as_it_is(gated):
    handle = gated.submit("abcd", **GREEDY)
    reports = gated.drain_events()
    next(reports)
    reports.close()
    gated.gate.opened.set()
    assert handle.result().finish_reason == "length" and gated.health().state == "draining"


@pytest.mark.parametrize("deadline", [-1, 1.5, "x", True, float("nan")])
def test_a_bad_deadline_drains_nothing(engine, deadline):
    with pytest.raises(InvalidArgument, match="deadline_ms"):
        engine.drain(deadline_ms=deadline)
    assert engine.generate("ab", **GREEDY)
