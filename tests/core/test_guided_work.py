"""The time that guides may take: that of compiling one, and that of following it through an output."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from openengine.core.guides.work import CompileTimeout, StepTime, Turns, Work


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
    running, seen, ticks, turns = [], [], Counter(), Turns()

    def compile_something(name):
        with Work(30.0, turns=turns) as work:
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
    turns = Turns()
    with Work(30.0, turns=turns), ThreadPoolExecutor(1) as pool, pytest.raises(CompileTimeout):
        pool.submit(lambda: Work(0.05, turns=turns).__enter__()).result(10)
    for _ in range(2):
        with Work(0.05, turns=turns):
            assert not turns.take(turns.clock() + 0.001, is_long=False)


@pytest.fixture
def now(monkeypatch):
    """A clock that only work and sleep move: seconds in a list of one."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr("openengine.core.guides.work.time", SimpleNamespace(sleep=sleep))
    return now


def test_who_takes_long_rests_beside_steps(now):
    turns = Turns(lambda: now[0])

    def seconds(num_turns, *, steps):
        began = now[0]
        with Work(30.0, turns.clock, turns=turns) as work:
            for _ in range(num_turns):
                if steps:
                    turns.note_step()
                now[0] += 0.001
                work.take_turns()
        return now[0] - began

    assert seconds(1000, steps=False) < 1.1
    assert seconds(200, steps=True) < 0.22
    assert 3.0 < seconds(1200, steps=True) < 3.5, "a millisecond in three once it has taken a quarter of a second"


def test_who_has_not_taken_long_waits_for_nobody_s_rest(now):
    turns = Turns(lambda: now[0])
    turns.note_step()
    for is_long, rest_s in ((True, 0.0), (False, 0.0), (True, 0.002), (True, 0.002)):
        began = now[0]
        assert turns.take(1.0, is_long=is_long)
        turns.end(is_long=is_long)
        assert now[0] - began == pytest.approx(rest_s)
    assert not turns.take(now[0] + 0.001, is_long=True), "the rest takes longer than there is time"
    assert turns.take(now[0] + 0.001, is_long=False)


def test_answers_are_remembered_up_to_a_size():
    work = Work(1)
    work.remember("a", 1, 300_000)
    work.remember("b", 2, 100_000)
    assert work.known == {"a": 1, "b": 2}
    work.remember("c", 3, 200_000)
    assert work.known == {"c": 3}, "all are forgotten at once, which is cheap"
