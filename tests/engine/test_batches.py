"""Batches: order, errors of single items, early ends, more items than the queue takes."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from openengine import (
    DuplicateRequest,
    GenerateRequest,
    InvalidArgument,
    ModelNotFound,
    Overloaded,
    SamplingParams,
    StoppingOptions,
)
from tests.scripted import ABC, GREEDY, Gate, hashed, letters, scripted_engine
from tests.waiting import load, wait_until


def test_as_completed_yields_each_index_once_as_it_finishes(engine):
    lengths = [9, 2, 30, 1, 5]
    requests = [
        GenerateRequest(
            token_ids=letters("abcd"), stopping=StoppingOptions(max_tokens=n), sampling=SamplingParams(temperature=0.0)
        )
        for n in lengths
    ]
    found = list(engine.as_completed(requests))
    assert sorted(index for index, _ in found) == list(range(5)) and [i for i, _ in found] != list(range(5))
    assert all(len(result.token_ids) == lengths[index] for index, result in found)


def test_as_completed_checks_everything_before_the_first_item_is_asked_for(engine):
    with pytest.raises(InvalidArgument, match="item 1 of 2"):
        engine.as_completed(["ab", ""])
    assert engine._loop.num_steps == 0


def test_leaving_as_completed_early_cancels_the_rest(gated):
    gated.gate.opened.set()
    for _index, _result in gated.as_completed(["ab"] * 200, max_tokens=100):
        break
    gc.collect()
    wait_until(lambda: load(gated) == (0, 0, 0))


def test_on_error_return_puts_each_error_in_its_place_with_its_id(engine):
    items = [
        "ab",
        [99],
        GenerateRequest(prompt="", request_id="empty"),
        GenerateRequest(prompt="ab", model="other"),
        GenerateRequest(prompt="ab", request_id="twin"),
        GenerateRequest(prompt="ab", request_id="twin"),
    ]
    for results in (engine.generate(items, on_error="return"), asyncio.run(engine.agenerate(items, on_error="return"))):
        kinds = [type(r.error) for r in results]
        assert kinds == [type(None), InvalidArgument, InvalidArgument, ModelNotFound, type(None), DuplicateRequest]
        assert [r.request_id for r in results[1:]] == ["", "empty", "", "twin", "twin"]
        assert results[1].outputs == () and "error" in repr(results[1])
        with pytest.raises(InvalidArgument):
            _ = results[1].text
    single = engine.generate("", on_error="return", request_id="one")
    assert isinstance(single.error, InvalidArgument) and single.request_id == "one"
    assert (
        asyncio.run(engine.agenerate(GenerateRequest(prompt="", request_id="two"), on_error="return")).request_id
        == "two"
    )


@pytest.mark.parametrize("value", ["ignore", None, 5])
def test_on_error_has_two_values(engine, value):
    for prompt in ("ab", ["ab"]):
        with pytest.raises(InvalidArgument, match="'raise' or 'return'"):
            engine.generate(prompt, on_error=value)


def test_p9_one_id_twice_in_a_batch_runs_nothing(engine):
    batch = [GenerateRequest(prompt="ab", request_id="x") for _ in range(2)]
    for run in (engine.generate, lambda b: asyncio.run(engine.agenerate(b)), engine.as_completed):
        with pytest.raises(DuplicateRequest, match="item 1 of 2.*'x'"):
            run(batch)
    assert engine._loop.num_steps == 0
    with pytest.raises(InvalidArgument, match="the batch has 2"):
        engine.generate(["a", "b"], request_id="x")


def test_progress_shows_a_bar_when_asked_and_none_elsewhere(engine, capsys):
    engine.generate(["ab"] * 3, max_tokens=1)
    assert capsys.readouterr().err == ""
    engine.generate(["ab"] * 3, max_tokens=1, progress=True)
    assert "3/3" in capsys.readouterr().err


def test_a_batch_of_any_size_runs_through_a_queue_of_two(tmp_path):
    with scripted_engine(tmp_path, hashed(27), ABC, max_queued_requests=2, max_num_seqs=2) as engine:
        results = engine.generate(["abc"] * 300, **GREEDY)
        assert len(results) == 300 and len({tuple(r.token_ids) for r in results}) == 1
        assert len(asyncio.run(engine.agenerate(["abc"] * 100, **GREEDY))) == 100


def test_gen_14_only_submit_raises_overloaded(tmp_path):
    gate = Gate()
    with scripted_engine(tmp_path, gate, ABC, max_queued_requests=3, max_num_seqs=2) as engine:
        first = engine.submit("ab", **GREEDY)
        assert gate.entered.wait(20)
        queued = [engine.submit("ab", **GREEDY) for _ in range(3)]
        with pytest.raises(Overloaded, match=r"3 requests are queued.*max_queued_requests is 3") as caught:
            engine.submit("ab")
        assert caught.value.retryable and caught.value.retry_after_ms > 0
        with pytest.raises(Overloaded):
            engine.stream("ab")
        waiting = [
            threading.Thread(target=engine.generate, args=(prompt,), kwargs=GREEDY) for prompt in ("ab", ["ab"] * 9)
        ]
        waiting.append(threading.Thread(target=lambda: asyncio.run(engine.agenerate(["ab"] * 5, **GREEDY))))
        waiting.append(threading.Thread(target=lambda: asyncio.run(engine.agenerate("ab", **GREEDY))))
        for thread in waiting:
            thread.start()
        gate.opened.set()
        for thread in waiting:
            thread.join(20)
            assert not thread.is_alive()
        assert len({tuple(handle.result().token_ids) for handle in [first, *queued]}) == 1
        assert load(engine) == (0, 0, 0)
