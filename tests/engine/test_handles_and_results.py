"""Handles, read by any number of readers before and after the end, and the results they give."""

from __future__ import annotations

import asyncio
import pickle
import threading

import pytest

from openengine import (
    TokenOutput,
)
from tests.scripted import GREEDY, letters
from tests.stream_grammar import check_stream

# ---- results -------------------------------------------------------------------------------------


def test_a_result_reprs_shortly_pickles_and_becomes_a_row(engine):
    result = engine.generate(letters("abcd"), num_sequences=2, seed=1, logprobs=2, prompt_logprobs=1, max_tokens=30)
    assert len(repr(result)) < 200 and "2 outputs" in repr(result)
    copy = pickle.loads(pickle.dumps(result))
    assert copy == result and copy.text == result.text
    row = result.to_dict()
    assert row["text"] == result.text and row["completion_tokens"] == 60 and row["error"] is None
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(r.to_dict() for r in engine.generate(["ab", ""], on_error="return", max_tokens=2))
    assert frame["finish_reason"][0] == "length" and frame["error"][1] and pandas.isna(frame["text"][1])


def test_timing_parts_are_ordered(engine):
    timing = engine.generate(letters("abcd"), max_tokens=9).timing
    assert 0 <= timing.queue_s <= timing.time_to_first_token_s <= timing.total_s and timing.time_per_token_s > 0


# ---- handles -------------------------------------------------------------------------------------


def test_a_handle_gives_its_result_before_after_and_without_reading_events(engine):
    expected = engine.generate("abcd", **GREEDY).token_ids
    without = engine.submit("abcd", **GREEDY)
    assert without.result().token_ids == expected
    before = engine.submit("abcd", **GREEDY)
    assert before.result().token_ids == expected
    check_stream(before, 1, completion_tokens=5)
    after = engine.submit("abcd", **GREEDY)
    check_stream(after, 1, completion_tokens=5)
    assert after.result().token_ids == expected and after.result() is after.result()
    assert after.done and "done" in repr(after)


def test_result_times_out_and_the_request_goes_on(gated):
    handle = gated.submit("ab", **GREEDY)
    for timeout in (0, 0.01, -1):
        with pytest.raises(TimeoutError, match="still running"):
            handle.result(timeout)
    assert not handle.wait(0.01) and not handle.done and "running" in repr(handle)
    gated.gate.opened.set()
    assert len(handle.result(20).token_ids) == 5 and handle.wait(0)


def test_a_handle_may_be_awaited_iterated_and_cancelled_again_after_its_end(engine):
    handle = engine.submit("abcd", **GREEDY)

    async def main():
        events = [event async for event in handle]
        return events, await handle.aresult(), await handle.aresult()

    events, first, second = asyncio.run(main())
    check_stream(events, 1)
    assert first is second and list(handle) == []
    handle.cancel()
    assert handle.result() is first


def test_cancel_ends_as_a_result_and_not_as_an_exception(gated):
    handle = gated.submit("abcd", num_sequences=2, prompt_logprobs=0, **GREEDY)
    handle.cancel()
    handle.cancel()
    gated.gate.opened.set()
    result = handle.result(20)
    assert {o.finish_reason for o in result.outputs} == {"cancelled"} and len(result.outputs) == 2
    assert result.usage.prompt_tokens == 4


def test_events_are_shared_between_readers_each_to_one(engine):
    handle = engine.submit("abcd", temperature=0, max_tokens=40, ignore_eos=True)
    parts = [[], []]
    threads = [threading.Thread(target=lambda part=part: part.extend(handle)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    tokens = [token.token_id for part in parts for e in part if isinstance(e, TokenOutput) for token in e.tokens]
    assert sorted(tokens) == sorted(handle.result().token_ids)
