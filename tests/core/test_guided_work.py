"""The time that guides may take: that of compiling one, and that of following it through an output."""

from __future__ import annotations

import inspect
import sys
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
    with Work(30.0, turns=turns), ThreadPoolExecutor(1) as pool:
        late = Work(0.3, turns=turns)
        with pytest.raises(CompileTimeout):
            pool.submit(late.__enter__).result(10)
        assert late.waited_s > 0.05
    for _ in range(2):
        with Work(30.0, turns=turns) as work:
            assert not turns.take(Work(0.001, turns=turns))
        assert work.waited_s < 0.05


def test_a_turn_is_nobody_s_once_the_time_of_its_holder_is_up():
    turns = Turns()
    with ThreadPoolExecutor(1) as pool, Work(0.1, turns=turns) as given_up:  # which never looks at the clock

        def compile_something():
            with Work(30.0, turns=turns) as work:
                assert 0.05 < work.waited_s < 10
                turns.end(given_up)  # it is over for long
                assert not turns.take(Work(0.001, turns=turns))
            return True

        assert pool.submit(compile_something).result(20)
        with pytest.raises(CompileTimeout):
            given_up.take_turns()
    with Work(30.0, turns=turns) as work:
        assert work.waited_s < 1


def test_where_the_stack_ends_the_turn_is_not_lost():
    now = [0.0]
    turns = Turns(lambda: now[0])

    def take_turns_at(depth, work):
        if depth:
            return take_turns_at(depth - 1, work)
        now[0] += 0.001
        return work.take_turns()

    ends = []
    room = sys.getrecursionlimit() - len(inspect.stack())
    for depth in range(room - 20, room):  # it ends at each of the calls that a turn takes
        try:
            with Work(1e9, turns.clock, turns=turns) as work:
                take_turns_at(depth, work)
            ends.append("returned")
        except RecursionError:
            ends.append("raised")
        assert turns._holder is None
    assert ends[0] == "returned" and ends.count("raised") >= 4


def test_who_takes_long_rests_beside_steps():
    def waited_s(spent_s, *, steps):
        turns = Turns()
        with Work(30.0, turns=turns) as work:
            work._spent_s = spent_s
            for _ in range(50):
                if steps:
                    turns.note_step()
                time.sleep(0.0006)
                work.take_turns()
        return work.waited_s

    def least_s(spent_s, *, steps):
        return min(waited_s(spent_s, steps=steps) for _ in range(5))  # a busy machine only adds to it

    waited = {(spent_s, steps): least_s(spent_s, steps=steps) for spent_s in (0.0, 1.0) for steps in (False, True)}
    assert waited[1.0, True] >= 50 * 0.0003  # rests begin before the pause that lets others through
    assert max(waited[0.0, False], waited[0.0, True], waited[1.0, False]) < waited[1.0, True] / 2


def test_who_has_not_taken_long_waits_for_nobody_s_rest():
    turns = Turns()
    quick, long = Work(10, turns=turns), Work(10, turns=turns)
    long._spent_s = 1.0
    turns.note_step()
    for _ in range(50):
        assert turns.take(long)
        turns.end(long)
        ended = time.monotonic()
        assert turns.take(quick)
        turns.end(quick)
        assert turns.take(long) and time.monotonic() - ended >= 0.0004
        turns.end(long)
    assert long.waited_s == quick.waited_s == 0.0


def test_answers_are_remembered_up_to_a_size():
    work = Work(1)
    work.remember("a", 1, 300_000)
    work.remember("b", 2, 100_000)
    assert work.known == {"a": 1, "b": 2}
    work.remember("c", 3, 200_000)
    assert work.known == {"c": 3}, "all are forgotten at once, which is cheap"
