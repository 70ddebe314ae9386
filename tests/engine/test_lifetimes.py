"""The end of an engine: closed, dropped or never made, it leaves no thread, no model and no caller waiting."""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from openengine import (
    InvalidArgument,
    PreconditionFailed,
)
from tests.scripted import ABC, ENDLESS, GREEDY, hashed, scripted_engine, slow
from tests.stream_grammar import check_stream
from tests.waiting import in_threads, stream_when_there_is_room, wait_until

# ---- closed --------------------------------------------------------------------------------------


def test_a_closed_engine_says_so_everywhere_and_closes_twice(tmp_path):
    engine = scripted_engine(tmp_path, hashed(27), ABC)
    engine.generate("ab", max_tokens=1, request_id="x")
    engine.close()
    engine.close()
    calls = [
        lambda: engine.generate("ab"),
        lambda: engine.generate(["ab", "cd"]),
        lambda: asyncio.run(engine.agenerate("ab")),
        lambda: asyncio.run(engine.agenerate(["ab"])),
        lambda: engine.submit("ab"),
        lambda: engine.stream("ab"),
        lambda: engine.astream("ab"),
        lambda: list(engine.as_completed(["ab"])),
        lambda: engine.tokenize("ab"),
        lambda: engine.clear_prefix_cache(),
    ]
    for call in calls:
        with pytest.raises(PreconditionFailed, match="closed"):
            call()
    assert engine.health().state == "not_ready" and engine.load_info().running_requests == 0
    assert engine.info().instance_id and "stopped" in repr(engine)
    assert engine.drain(deadline_ms=0) is None


def test_closing_cancels_what_runs_and_wakes_who_waits(gated):
    handles = [gated.submit("abcd", **GREEDY) for _ in range(3)]
    assert gated.gate.entered.wait(20)
    closer = threading.Thread(target=gated.close)
    closer.start()
    gated.gate.opened.set()
    assert {handle.result(20).finish_reason for handle in handles} == {"cancelled"}
    closer.join(20)
    check_stream(handles[0], 1)


def test_with_closes_also_when_its_body_raises(tmp_path):
    with pytest.raises(KeyError), scripted_engine(tmp_path, hashed(27), ABC) as engine:
        raise KeyError
    assert engine.health().state == "not_ready"


def test_an_engine_does_not_pickle_and_says_what_to_do(engine):
    with pytest.raises(TypeError, match="EngineConfig"):
        pickle.dumps(engine)


def test_closing_under_load_ends_every_caller_with_a_result_or_an_error(tmp_path):
    engine = scripted_engine(tmp_path, slow, ABC, max_num_seqs=4, max_queued_requests=8)
    started = threading.Barrier(7)

    def ask(way):
        started.wait()
        try:
            while True:
                if way == 0:
                    engine.generate("abc", **ENDLESS)
                elif way == 1:
                    list(stream_when_there_is_room(engine, "abc", **ENDLESS))
                elif way == 2:
                    engine.generate(["abc"] * 50, **ENDLESS)
                elif way == 3:
                    asyncio.run(engine.agenerate(["abc"] * 50, **ENDLESS))
                elif way == 4:
                    engine.clear_prefix_cache()
                else:
                    engine.drain(stop_accepting_new_requests=False, deadline_ms=10_000)
                    stream_when_there_is_room(engine, "abc", max_tokens=1)
        except PreconditionFailed:
            return True

    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(ask, way) for way in range(6)]
        started.wait()
        wait_until(lambda: engine._loop.num_steps > 20)
        in_threads(engine.close, engine.close)
        assert not engine._loop._thread.is_alive(), "both wait until it is closed"
        assert all(future.result(20) for future in futures)


# ---- dropped, or never made ----------------------------------------------------------------------


def loop_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "openengine-loop"]


def gone(make) -> None:
    """`make()` gives an engine and what outlives it; without it, and with no help of the collector, its thread ends."""
    gc.collect()
    gc.disable()
    try:
        engine, kept = make()
        reference, thread = weakref.ref(engine), engine._loop._thread
        runner = weakref.ref(engine._loop._runner)
        assert thread.is_alive()
        del engine
        wait_until(lambda: not thread.is_alive(), 5)
        assert reference() is None and runner() is None
        del kept
    finally:
        gc.enable()


def test_del_alone_stops_the_thread_and_drops_the_model(tmp_path):
    def used():
        engine = scripted_engine(tmp_path, hashed(27), ABC)
        kept = [
            engine.generate("abc", **GREEDY),
            engine.generate(["a", "b"], **GREEDY),
            asyncio.run(engine.agenerate("abc", **GREEDY)),
        ]
        handle = engine.submit("abc", **GREEDY)
        stream = engine.stream("abc", **GREEDY)
        kept += [
            handle.result(),
            list(stream),
            handle,
            stream,
            list(engine.as_completed(["a"], **GREEDY)),
            engine.load_info(),
        ]
        engine.health(include_inference_probe=True)
        return engine, kept

    gone(used)
    gone(lambda: (scripted_engine(tmp_path, hashed(27), ABC), None))


def test_results_and_handles_that_hold_errors_do_not_hold_the_engine(tmp_path, monkeypatch):
    # A record of the log refers to the frames of what it reports, and pytest keeps the records.
    monkeypatch.setattr(logging.getLogger("openengine"), "disabled", True)

    def fail(history):
        if len(history) == 4:
            raise ArithmeticError("no")
        return hashed(27)(history)

    def used():
        engine = scripted_engine(tmp_path, fail, ABC)
        kept = engine.generate(["ab", "", [99]], on_error="return", max_tokens=1, ignore_eos=True)
        kept.append(engine.generate("abcd", on_error="return", **GREEDY))
        kept.append(asyncio.run(engine.agenerate("", on_error="return")))
        kept += asyncio.run(engine.agenerate(["", "abcd"], on_error="return", **GREEDY))
        assert [r.error is None for r in kept] == [True, False, False, False, False, False, False]
        handle = engine.submit("abcd", **GREEDY)
        for read in (handle.result, handle.next_event):
            try:
                read()
            except Exception:  # noqa: S110
                pass
        return engine, [*kept, handle]

    gone(used)


def test_an_abandoned_stream_and_a_running_request_let_go_of_the_engine_when_they_end(tmp_path):
    def used():
        engine = scripted_engine(tmp_path, slow, ABC)
        next(engine.stream("abc", **ENDLESS))
        handle = engine.submit("abc", temperature=0, max_tokens=20, ignore_eos=True)
        return engine, handle

    gone(used)


def test_closed_engines_leave_no_thread(tmp_path):
    before = len(loop_threads())
    for index in range(5):
        with scripted_engine(tmp_path / str(index), hashed(27), ABC) as engine:
            engine.generate("abc", **GREEDY)
    assert len(loop_threads()) == before


def test_an_engine_that_cannot_be_made_leaves_no_thread(tmp_path):
    before = len(loop_threads())
    for options in ({"num_kv_blocks": 0}, {"default_sampling": 5}, {"max_num_seqs": 10**6}):
        with pytest.raises(InvalidArgument):
            scripted_engine(tmp_path, hashed(27), ABC, **{"num_kv_blocks": 8, **options})
    assert len(loop_threads()) == before
