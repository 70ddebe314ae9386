"""Faults of the model and of the loop: who gets the error, who is spared, and that the engine heals."""

from __future__ import annotations

import asyncio

import pytest

from openengine import (
    InternalError,
)
from tests.scripted import ABC, GREEDY, Switch, letters, scripted_engine
from tests.waiting import load


def test_nan_logits_end_that_request_alone_and_poison_no_cache(faulty):
    healthy = letters("abcdefghij")
    expected = faulty.generate(healthy, **GREEDY).token_ids
    poisoned = letters("zyxwvutsrq")
    faulty.switch.is_nan = lambda history: history[0] == poisoned[0] and len(history) > 12
    handles = [faulty.submit(prompt, num_sequences=2, **GREEDY) for prompt in (healthy, poisoned, healthy)]
    with pytest.raises(InternalError, match="NaN"):
        handles[1].result()
    assert [o.token_ids for h in (handles[0], handles[2]) for o in h.result().outputs] == [expected] * 4
    assert faulty.health().state == "ready" and load(faulty) == (0, 0, 0)
    faulty.switch.is_nan = lambda history: False
    again = faulty.generate(poisoned, **GREEDY)
    assert again.usage.cached_prompt_tokens == 0 and len(again.token_ids) == 5


def test_nan_in_the_prompts_scores_is_an_error_and_no_logprob(faulty):
    faulty.switch.is_nan = lambda history: len(history) == 3
    for max_tokens in (0, 3):
        with pytest.raises(InternalError, match="NaN"):
            faulty.generate("abcdef", prompt_logprobs=1, max_tokens=max_tokens)
    assert load(faulty) == (0, 0, 0) and faulty._loop.call(lambda s: s.blocks.num_cached) == 0
    faulty.switch.is_nan = lambda history: False
    assert faulty.generate("abcdef", prompt_logprobs=1, max_tokens=1).prompt[5].logprob <= 0


def test_an_error_reaches_every_way_of_reading(faulty):
    faulty.switch.fails = lambda history: len(history) == 5
    for read in (lambda h: h.result(), lambda h: list(h), lambda h: asyncio.run(h.aresult())):
        handle = faulty.submit("abc", **GREEDY)
        with pytest.raises(InternalError, match="told to fail") as first:
            read(handle)
        with pytest.raises(InternalError) as second:
            handle.result()
        assert first.value is not second.value and "failed" in repr(handle)
    with pytest.raises(InternalError):
        list(faulty.stream("abc", **GREEDY))
    with pytest.raises(InternalError):
        faulty.generate(["a", "abc"], **GREEDY)
    results = faulty.generate(["abcdefg", "abc"], on_error="return", **GREEDY)
    assert isinstance(results[1].error, InternalError)
    assert load(faulty) == (0, 0, 0)


def test_a_raising_step_fails_its_plan_degrades_and_the_next_good_step_heals(faulty):
    faulty.switch.fails = lambda history: True
    with pytest.raises(InternalError, match="the forward pass failed.*told to fail"):
        faulty.generate("abcdefgh", **GREEDY)
    assert faulty.health().state == "degraded" and load(faulty) == (0, 0, 0)
    assert faulty._loop.call(lambda scheduler: scheduler.blocks.num_cached) == 0
    faulty.switch.fails = lambda history: False
    assert len(faulty.generate("abcdefgh", **GREEDY).token_ids) == 5
    assert faulty.health().state == "ready"


def test_a_raising_step_spares_those_that_were_not_in_it(tmp_path):
    switch = Switch()
    with scripted_engine(tmp_path, switch, ABC, max_num_seqs=1) as engine:
        switch.fails = lambda history: history[0] == 26
        bad, good = engine.submit("zzz", **GREEDY), engine.submit("abc", **GREEDY)
        with pytest.raises(InternalError):
            bad.result()
        assert len(good.result().token_ids) == 5


def test_a_fault_of_the_loop_itself_fails_what_is_open_and_the_engine_serves_on(faulty, caplog):
    original = faulty._loop._scheduler.schedule
    faulty._loop._scheduler.schedule = lambda: 1 / 0
    handles = [faulty.submit("abcdefgh", **GREEDY) for _ in range(3)]
    for handle in handles:
        with pytest.raises(InternalError, match="ZeroDivisionError"):
            handle.result(20)
    assert faulty.health().state == "degraded"
    faulty._loop._scheduler.schedule = original
    assert len(faulty.generate("abcdefgh", **GREEDY).token_ids) == 5 and load(faulty) == (0, 0, 0)
    assert faulty.health().state == "ready" and "the engine loop failed" in caplog.text
