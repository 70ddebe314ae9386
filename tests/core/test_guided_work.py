"""The time that guides may take: that of compiling one, and that of following it through an output."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from openengine.core.guides.work import CompileTimeout, StepTime, Work


def test_work_lets_others_run_and_ends_in_time(monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr("openengine.core.guides.work.time", SimpleNamespace(sleep=pauses.append))
    now = [0.0]
    work = Work(1, lambda: now[0])
    work.take_turns()
    assert pauses == []
    for now[0] in (0.01, 0.0102, 0.02):  # the second soon after a pause
        work.take_turns()
    assert len(pauses) == 2
    now[0] = 1.5
    with pytest.raises(CompileTimeout):
        work.take_turns()
    assert len(pauses) == 2


def test_the_time_of_a_guide_is_made_up_for_by_quick_tokens():
    spent = StepTime()
    for _ in range(100):
        spent.spend(0.08)  # of a mask; and then of tokens that leave most of what they have
        assert not any(spent.next_token(0.001) for _ in range(10)) and spent.error is None
    twin = spent.copy()
    assert [twin.next_token(0.06) for _ in range(6)] == [False] * 5 + [True]
    assert "took 0.30 s" in twin.error and spent.error is None


def test_of_several_compilations_one_runs_at_a_time_and_all_get_on():
    running, seen, ticks, turn = [], [], Counter(), threading.Lock()

    def compile_something(name):
        with Work(30.0, turn=turn) as work:
            while ticks[name] < 3000:
                running.append(name)
                seen.append(len(running))
                running.remove(name)
                ticks[name] += 1
                work.tick(32)

    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(compile_something, range(4)))
    assert max(seen) == 1 and set(ticks.values()) == {3000} and time.monotonic() - began < 20


def test_who_gets_no_turn_in_time_is_out_of_time_and_leaves_the_turn_to_others():
    turn = threading.Lock()
    with Work(30.0, turn=turn), ThreadPoolExecutor(1) as pool, pytest.raises(CompileTimeout):
        pool.submit(lambda: Work(0.05, turn=turn).__enter__()).result(10)
    with Work(30.0, turn=turn):
        assert turn.locked()
    assert not turn.locked()
