"""Ctrl-C ends the call it meets and the requests of that call, and nobody else's."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from tests.interrupting import interrupted
from tests.scripted import ABC, ENDLESS, GREEDY, scripted_engine, slow
from tests.waiting import load, wait_until


def by_generate(engine):
    engine.generate("abc", **ENDLESS)


def by_generate_batch(engine):
    engine.generate(["abc"] * 200, **ENDLESS)


def by_stream(engine):
    for _event in engine.stream("abc", **ENDLESS):
        pass


def by_as_completed(engine):
    for _item in engine.as_completed(["abc"] * 200, **ENDLESS):
        pass


def by_agenerate(engine):
    asyncio.run(engine.agenerate(["abc"] * 200, **ENDLESS))


def by_astream(engine):
    async def main():
        async for _event in engine.astream("abc", **ENDLESS):
            pass

    asyncio.run(main())


def by_waiting_for_room(engine):
    engine.submit("abc", **ENDLESS)
    wait_until(lambda: engine.load_info().running_requests)
    engine.submit("abc", **ENDLESS)
    try:
        engine.generate("abc", **ENDLESS)
    finally:
        engine.abort(all_requests=True)


def by_drain(engine):
    engine.submit("abc", **ENDLESS)
    try:
        engine.drain(stop_accepting_new_requests=False)
    finally:
        engine.abort(all_requests=True)


CALLS = [
    by_generate,
    by_generate_batch,
    by_stream,
    by_as_completed,
    by_agenerate,
    by_astream,
    by_waiting_for_room,
    by_drain,
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_p11_ctrl_c_ends_the_call_and_its_requests_and_nobody_elses(tmp_path, call):
    options = {"max_num_seqs": 1, "max_queued_requests": 1} if call is by_waiting_for_room else {"max_num_seqs": 8}
    with scripted_engine(tmp_path, slow, ABC, **options) as engine:
        other = (
            None
            if call in (by_waiting_for_room, by_drain)
            else engine.submit("xyz", temperature=0, ignore_eos=True, max_tokens=30)
        )
        alone = other is None
        with interrupted(
            when=lambda: engine.load_info().running_requests > (not alone) and engine._loop.num_steps > 20
        ) as times:
            while True:
                call(engine)
        assert time.monotonic() - times[-1] < 5
        gc.collect()
        if other is not None:
            assert len(other.result(20).token_ids) == 30
        wait_until(lambda: load(engine) == (0, 0, 0), 5)
        assert len(engine.generate("abc", temperature=0, max_tokens=3, ignore_eos=True).token_ids) == 3


def test_p11_ctrl_c_while_waiting_for_a_handle_leaves_its_request_running(gated):
    handle = gated.submit("abc", **GREEDY)
    with interrupted(when=lambda: handle._changed._waiters):
        handle.result()
    gated.gate.opened.set()
    assert len(handle.result(20).token_ids) == 5


def test_an_interrupt_that_a_destructor_swallows_comes_again(gated):
    """Of the tests' own means: without that, a call that nothing else ends would hang."""

    class Slow:
        def __del__(self):
            is_there.append(True)
            while not times:
                time.sleep(0.001)
            time.sleep(0.01)

    is_there = []
    with interrupted(when=lambda: is_there) as times:
        value = Slow()
        del value
        while True:
            time.sleep(0.001)
    assert len(times) == 2
