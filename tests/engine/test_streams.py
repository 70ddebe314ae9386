"""Streams: their grammar, that they come while the model runs, and that leaving one cancels its request."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from openengine import (
    PromptOutput,
    TokenOutput,
)
from tests.scripted import ABC, ENDLESS, GREEDY, scripted_engine, slow
from tests.stream_grammar import check_stream
from tests.waiting import load, wait_until


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_str_a_stream_follows_the_grammar_and_joins_to_the_result(engine, num_sequences):
    options = {
        "num_sequences": num_sequences,
        "seed": 3,
        "max_tokens": 20,
        "prompt_logprobs": 1,
        "logprobs": 1,
        "stop": "b",
    }
    events = list(engine.stream("abcd", **options))
    check_stream(events, num_sequences, prompt_tokens=4)
    result = engine.generate("abcd", **options)
    for output in result.outputs:
        mine = [e for e in events if isinstance(e, TokenOutput) and e.output_index == output.index]
        assert "".join(e.text for e in mine) == output.text
        assert [t.token_id for e in mine for t in e.tokens] == output.token_ids
    assert isinstance(events[0], PromptOutput) and events[0].tokens == result.prompt


def test_str_15_the_first_token_arrives_before_the_last_is_made(gated):
    stream = gated.stream("ab", **GREEDY)
    first_token_read = threading.Event()
    original = gated.gate.script

    def script(history):
        assert len(history) < 5 or first_token_read.wait(20)
        return original(history)

    gated.gate.script = script
    gated.gate.opened.set()
    events = [next(stream)]
    assert not stream.handle.done
    first_token_read.set()
    check_stream([*events, *stream], 1, completion_tokens=5)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_astream_gives_what_stream_gives(engine, number):
    async def collect():
        return [event async for event in engine.astream("abcd", num_sequences=number + 1, seed=1, max_tokens=9)]

    events = asyncio.run(collect())
    check_stream(events, number + 1, completion_tokens=9 * (number + 1))
    assert events == list(engine.stream("abcd", num_sequences=number + 1, seed=1, max_tokens=9))


def leave_by_break(engine):
    for _event in engine.stream("ab", **ENDLESS):
        break


def leave_by_exception(engine):
    with pytest.raises(ZeroDivisionError):
        for _event in engine.stream("ab", **ENDLESS):
            raise ZeroDivisionError


def leave_by_del(engine):
    stream = engine.stream("ab", **ENDLESS)
    next(stream)
    del stream


def leave_by_close(engine):
    stream = engine.stream("ab", **ENDLESS)
    next(stream)
    stream.close()
    assert stream.handle.result(20).finish_reason == "cancelled"


def leave_by_with(engine):
    with engine.stream("ab", **ENDLESS) as stream:
        next(stream)


def leave_without_reading(engine):
    engine.stream("ab", **ENDLESS)


def leave_async_by_break(engine):
    async def main():
        async for _event in engine.astream("ab", **ENDLESS):
            break

    asyncio.run(main())


def leave_async_by_aclose(engine):
    async def main():
        stream = engine.astream("ab", **ENDLESS)
        await stream.__anext__()
        await stream.aclose()

    asyncio.run(main())


def leave_async_by_cancelling_the_task(engine):
    async def main():
        has_read = asyncio.Event()

        async def read():
            async for _event in engine.astream("ab", **ENDLESS):
                has_read.set()

        task = asyncio.create_task(read())
        await has_read.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def leave_async_by_timeout(engine):
    async def main():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.agenerate(["ab"] * 5, **ENDLESS), 0.02)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.agenerate("ab", **ENDLESS), 0.02)

    asyncio.run(main())


LEAVING = [
    leave_by_break, leave_by_exception, leave_by_del, leave_by_close, leave_by_with, leave_without_reading,
    leave_async_by_break, leave_async_by_aclose, leave_async_by_cancelling_the_task, leave_async_by_timeout,
]  # fmt: skip


@pytest.mark.parametrize("leave", LEAVING, ids=lambda leave: leave.__name__)
def test_gen_15_leaving_early_cancels_the_request_and_frees_its_blocks(tmp_path, leave):
    with scripted_engine(tmp_path, slow, ABC) as engine:
        leave(engine)
        gc.collect()
        wait_until(lambda: load(engine) == (0, 0, 0), 5)
        assert engine._loop.num_steps < 100, "it ran to its end"
        assert engine.generate("ab", **GREEDY).finish_reason == "length"


def test_a_stream_read_to_its_end_stays_at_its_end(engine):
    stream = engine.stream("ab", **GREEDY)
    assert list(stream) and list(stream) == []
    stream.close()
    assert stream.handle.result().finish_reason == "length"
