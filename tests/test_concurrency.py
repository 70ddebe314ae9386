"""Many callers at once, and the ends of things: threads, event loops, interrupts, lifetimes, memory, processes.

`pytest -m soak` runs the randomized traffic at length.
"""

from __future__ import annotations

import _thread
import asyncio
import gc
import logging
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from openengine import (
    DuplicateRequest,
    Engine,
    GenerateRequest,
    InvalidArgument,
    PreconditionFailed,
    RequestNotFound,
    SamplingParams,
    StoppingOptions,
)
from openengine.core.scheduler import Scheduler
from tests.checkpoints import write_checkpoint
from tests.scripted import hashed, scripted_engine
from tests.stream_grammar import check_stream

ABC = ["<eos>", *"abcdefghijklmnopqrstuvwxyz"]
GREEDY = {"temperature": 0.0, "max_tokens": 5}
ENDLESS = {"ignore_eos": True, "max_tokens": 120}
ROOT = Path(__file__).parents[1]


def slow(history):
    time.sleep(0.002)
    return hashed(27)(history)


def load(engine) -> tuple[int, int, int]:
    engine._loop.call(lambda scheduler: scheduler.check())
    info = engine.load_info()
    return info.running_requests, info.queued_requests, info.used_kv_blocks


def wait_until(condition, timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.002)


def in_threads(*functions) -> list:
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(60) for future in [pool.submit(function) for function in functions]]


def loop_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "openengine-loop"]


# ---- Must show 4: the same results, however many ask at once -------------------------------------


def mixed_requests(
    engine, count: int, prompt_lens=(1, 3, 17, 40, 90), output_lens=(1, 4, 9, 16)
) -> list[GenerateRequest]:
    """Greedy requests of mixed prompt and output lengths, half of them beginning alike."""
    rng = random.Random(11)
    vocabulary = min(engine.model_info().max_context_length, 380)
    shared = [rng.randrange(5, vocabulary) for _ in range(40)]
    requests = []
    for index in range(count):
        prompt = [rng.randrange(5, vocabulary) for _ in range(rng.choice(prompt_lens))]
        requests.append(
            GenerateRequest(
                token_ids=(shared if index % 2 else []) + prompt,
                sampling=SamplingParams(temperature=0.0),
                stopping=StoppingOptions(max_tokens=rng.choice(output_lens), ignore_eos=True),
            )
        )
    return requests


def with_margin(engine, request: GenerateRequest) -> tuple[list[int], list[float]]:
    """Token ids alone on the engine, and by how much each beat the next one."""
    import dataclasses

    from openengine import CandidateTokenSelection, ResponseOptions

    response = ResponseOptions(output_candidates=CandidateTokenSelection(top_n=2))
    result = engine.generate(dataclasses.replace(request, response=response))
    return result.token_ids, [t.candidates[0].logprob - t.candidates[1].logprob for t in result.tokens]


def assert_same_tokens(found: list[int], expected: tuple[list[int], list[float]]) -> None:
    """Equal, unless a near-tie was decided otherwise: other rows in a batch change the last bits of a sum."""
    tokens, margins = expected
    assert len(found) == len(tokens)
    for mine, theirs, margin in zip(found, tokens, margins, strict=True):
        if mine != theirs:
            assert margin < 1e-3, f"{found} instead of {tokens}"
            return


def ask_from_threads_and_event_loops(engine, requests, *, threads: int = 8, loops: int = 2) -> list[list[int]]:
    """Token ids of every request: three quarters asked by threads in five ways, the rest as tasks of event loops."""
    results: list[list[int] | None] = [None] * len(requests)
    cut = len(requests) * 3 // 4

    def from_thread(indices):
        for number, index in enumerate(indices):
            request = requests[index]
            if number % 5 == 0:
                results[index] = engine.generate(request).token_ids
            elif number % 5 == 1:
                results[index] = engine.submit(request).result(60).token_ids
            elif number % 5 == 2:
                events = list(engine.stream(request))
                check_stream(events, 1)
                results[index] = [token.token_id for e in events[:-1] for token in e.tokens]
            elif number % 5 == 3:
                (results[index],) = (r.token_ids for r in engine.generate([request]))
            else:
                results[index] = dict(engine.as_completed([request]))[0].token_ids

    async def from_loop(indices):
        async def one(index):
            if index % 2:
                results[index] = (await engine.agenerate(requests[index])).token_ids
            else:
                events = [event async for event in engine.astream(requests[index])]
                results[index] = [token.token_id for e in events[:-1] for token in e.tokens]

        await asyncio.gather(*(one(index) for index in indices))

    in_threads(
        *(lambda i=i: from_thread(range(i, cut, threads)) for i in range(threads)),
        *(lambda i=i: asyncio.run(from_loop(range(cut + i, len(requests), loops))) for i in range(loops)),
    )
    return results


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_64_requests_from_8_threads_and_2_event_loops_equal_sequential_ones(tmp_path, family):
    path = write_checkpoint(tmp_path, family)
    with Engine(path, dtype="float32", max_num_seqs=16, max_num_batched_tokens=64, num_kv_blocks=96) as engine:
        requests = mixed_requests(engine, 64)
        expected = [with_margin(engine, request) for request in requests]
        engine.clear_prefix_cache()
        for found, wanted in zip(ask_from_threads_and_event_loops(engine, requests), expected, strict=True):
            assert_same_tokens(found, wanted)
        assert load(engine) == (0, 0, 0)


def test_64_requests_on_smollm2_equal_sequential_ones(smollm2):
    with Engine(smollm2, dtype="float32", max_num_seqs=16, max_model_len=512, num_kv_blocks=256) as engine:
        requests = mixed_requests(engine, 64, prompt_lens=(1, 3, 17, 40), output_lens=(1, 2, 3))
        expected = [with_margin(engine, request) for request in requests]
        engine.clear_prefix_cache()
        for found, wanted in zip(ask_from_threads_and_event_loops(engine, requests), expected, strict=True):
            assert_same_tokens(found, wanted)
        assert load(engine) == (0, 0, 0)


def test_two_engines_run_at_once_without_mixing(tmp_path):
    with (
        scripted_engine(tmp_path / "a", hashed(27), ABC) as one,
        scripted_engine(tmp_path / "b", lambda history: hashed(27)(history)[::-1], ABC) as other,
    ):
        alone = [[engine.generate("abc", **GREEDY).token_ids for _ in range(1)] for engine in (one, other)]
        found = in_threads(
            lambda: [r.token_ids for r in one.generate(["abc"] * 20, **GREEDY)],
            lambda: [r.token_ids for r in other.generate(["abc"] * 20, **GREEDY)],
        )
    assert [ids for part in found for ids in part] == alone[0] * 20 + alone[1] * 20 and alone[0] != alone[1]


# ---- one handle, many who wait -------------------------------------------------------------------


def test_one_result_reaches_every_thread_and_event_loop_that_waits(tmp_path):
    with scripted_engine(tmp_path, slow, ABC) as engine:
        handle = engine.submit("abc", temperature=0, max_tokens=20, ignore_eos=True)

        async def wait_twice():
            return await asyncio.gather(handle.aresult(), handle.aresult())

        found = in_threads(*[lambda: handle.result(30)] * 4, *[lambda: asyncio.run(wait_twice())] * 2)
    flat = [result for item in found for result in (item if isinstance(item, list) else [item])]
    assert len(flat) == 8 and all(result is flat[0] for result in flat) and len(flat[0].token_ids) == 20


def test_a_closed_event_loop_with_a_waiting_request_does_no_harm(tmp_path):
    with scripted_engine(tmp_path, slow, ABC) as engine:
        handle = engine.submit("abc", temperature=0, max_tokens=30, ignore_eos=True)
        event_loop = asyncio.new_event_loop()
        task = event_loop.create_task(handle.aresult())
        event_loop.run_until_complete(asyncio.sleep(0.01))
        event_loop._ready.clear()
        task._log_destroy_pending = False
        event_loop.close()
        others = engine.generate(["abc"] * 3, **GREEDY)
        assert len(handle.result(20).token_ids) == 30 and len(others) == 3 and engine.health().state == "ready"


def test_an_event_loop_runs_on_while_requests_do(tmp_path):
    async def main(engine):
        ticks = 0
        task = asyncio.create_task(engine.agenerate(["abc"] * 20, temperature=0, max_tokens=20, ignore_eos=True))
        while not task.done():
            await asyncio.sleep(0.001)
            ticks += 1
        return ticks, await task

    with scripted_engine(tmp_path, slow, ABC, max_num_seqs=4) as engine:
        ticks, results = asyncio.run(main(engine))
    assert ticks > 20 and len(results) == 20


def test_p9_of_two_requests_with_one_id_at_once_exactly_one_is_accepted(tmp_path):
    with scripted_engine(tmp_path, slow, ABC) as engine:
        barrier = threading.Barrier(8)

        def ask():
            barrier.wait()
            try:
                return engine.submit("abc", request_id="x", temperature=0, max_tokens=40, ignore_eos=True)
            except DuplicateRequest:
                return None

        handles = [handle for handle in in_threads(*[ask] * 8) if handle is not None]
        assert len(handles) == 1 and len(handles[0].result(20).token_ids) == 40

        async def gather():
            return await asyncio.gather(
                *(engine.agenerate("abc", request_id="y", **GREEDY) for _ in range(2)), return_exceptions=True
            )

        assert sorted(type(r).__name__ for r in asyncio.run(gather())) == ["DuplicateRequest", "GenerationResult"]


# ---- Ctrl-C --------------------------------------------------------------------------------------


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
        threading.Timer(0.1, _thread.interrupt_main).start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            call(engine)
        assert time.monotonic() - started < 5
        gc.collect()
        if other is not None:
            assert len(other.result(20).token_ids) == 30
        wait_until(lambda: load(engine) == (0, 0, 0), 5)
        assert len(engine.generate("abc", temperature=0, max_tokens=3, ignore_eos=True).token_ids) == 3


def test_p11_ctrl_c_while_waiting_for_a_handle_leaves_its_request_running(tmp_path):
    with scripted_engine(tmp_path, slow, ABC) as engine:
        handle = engine.submit("abc", temperature=0, **ENDLESS)
        threading.Timer(0.05, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            handle.result()
        assert len(handle.result(20).token_ids) == 120


# ---- lifetimes -----------------------------------------------------------------------------------


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
        time.sleep(0.1)
        in_threads(engine.close, engine.close)
        assert not engine._loop._thread.is_alive(), "both wait until it is closed"
        assert all(future.result(20) for future in futures)


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
            except Exception:  # noqa: BLE001, S110
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


# ---- processes -----------------------------------------------------------------------------------


def run_python(code: str, *arguments: object, timeout: float = 100) -> str:
    prelude = """
        import asyncio, gc, os, sys, threading, time
        from pathlib import Path
        import torch
        torch.set_num_threads(1)
    """
    script = textwrap.dedent(prelude) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True, text=True, timeout=timeout, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Fatal" not in done.stderr, done.stderr
    return done.stdout


SCRIPTED = """
    from tests.scripted import hashed, scripted_engine
    ABC = ["<eos>", *"abcdefghijklmnopqrstuvwxyz"]
    def slow(history):
        time.sleep(0.005)
        return hashed(27)(history)
    engine = scripted_engine(Path(sys.argv[1]), slow, ABC, context=4000, num_kv_blocks=1000)
    ENDLESS = {"ignore_eos": True, "max_tokens": None}
"""


def test_the_interpreter_exits_at_once_with_requests_running_and_waited_for(tmp_path):
    started = time.monotonic()
    out = run_python(
        SCRIPTED
        + """
    waiters = [threading.Thread(target=lambda: engine.generate("abc", **ENDLESS), daemon=True) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    handle, stream = engine.submit("abc", **ENDLESS), engine.stream("abc", **ENDLESS)
    next(stream)
    print(handle.done)
    """,
        tmp_path,
    )
    assert out.strip() == "False" and time.monotonic() - started < 60


def test_a_forked_child_is_told_so_and_exits_while_the_parent_goes_on(tmp_path):
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    out = run_python(
        """
    import warnings
    warnings.simplefilter("ignore")
    """
        + SCRIPTED
        + """
    from openengine import PreconditionFailed
    handle = engine.submit("abc", **ENDLESS)
    next(iter(handle))
    child = os.fork()
    if not child:
        calls = [lambda: engine.generate("a"), lambda: engine.generate(["a"]), lambda: engine.submit("a"),
                 lambda: engine.stream("a"),
                 lambda: asyncio.run(engine.agenerate("a")), engine.clear_prefix_cache, engine.drain,
                 lambda: engine.abort("x"), lambda: engine.abort(all_requests=True)]
        told = 0
        for call in calls:
            try:
                call()
            except PreconditionFailed as exc:
                told += "another process" in exc.message
        handle.cancel()
        assert engine.health(include_inference_probe=True).state == "not_ready"
        engine.close()
        print("child", told == len(calls), flush=True)
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    print("status", status, "done", handle.done)
    handle.cancel()
    print(handle.result(20).finish_reason, len(engine.generate("abc", max_tokens=3, ignore_eos=True).token_ids))
    """,
        tmp_path,
    )
    assert out.split("\n")[:3] == ["child True", "status 0 done False", "cancelled 3"]


# ---- memory --------------------------------------------------------------------------------------

MEMORY = """
    import psutil
    from openengine import Engine
    process = psutil.Process()
    def rss():
        return process.memory_info().rss / 2**20
    options = {"num_kv_blocks": 64, "block_size": 16, "max_num_seqs": 8, "max_model_len": 256, "dtype": "float32"}
    def use(engine):
        prompts = [[5 + (i * j) % 300 for j in range(1, 60)] for i in range(1, 9)]
        engine.generate(prompts, max_tokens=16, ignore_eos=True, logprobs=2, progress=False)
        list(engine.stream(prompts[0], max_tokens=4))
        engine.generate([[], prompts[0]], on_error="return", max_tokens=2)
    def opened_and_closed():
        engine = Engine(sys.argv[1], **options)
        use(engine)
        used = rss()
        engine.close()
        return engine.info().attributes["weight_bytes"] / 2**20, used - rss(), rss()
    def opened_and_dropped():
        gc.disable()
        engine = Engine(sys.argv[1], **options)
        use(engine)
        del engine
        gc.enable()
        return rss()
    weights, freed, first = opened_and_closed()
    print(weights, freed)
    print(max(opened_and_closed()[2] - first for _ in range(5)))
    print(max(opened_and_dropped() - first for _ in range(3)))
    print(threading.active_count())
"""


def check_memory(path) -> None:
    weights, freed, after_close, after_del, threads = map(float, run_python(MEMORY, path).split())
    assert weights > 40 and freed > weights * 0.8, "closing gave the weights back, and a second set would show"
    assert after_close < 20 and after_del < 20, (after_close, after_del)
    assert threads == 1


def test_memory_returns_after_close_and_after_del_five_times(tmp_path):
    # 50 MiB of weights, so that one engine that stays shows.
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8}
    check_memory(write_checkpoint(tmp_path, "llama", **sizes))


@pytest.mark.soak
def test_memory_returns_after_close_and_after_del_on_smollm2(smollm2, request):
    if request.config.option.markexpr != "soak":
        pytest.skip("the small checkpoint shows it by default; pytest -m soak runs this one")
    check_memory(smollm2)


# ---- randomized traffic --------------------------------------------------------------------------

_TINY = {"num_kv_blocks": 16, "max_num_seqs": 4, "max_num_batched_tokens": 9, "max_queued_requests": 12}


def traffic_specs(rng: random.Random, count: int) -> list[tuple[list[int], dict]]:
    """Prompts, many beginning alike, with options that reach every part of the way from prompt to text."""
    stems = [[rng.randrange(1, 27) for _ in range(12)] for _ in range(3)]
    specs = []
    for _ in range(count):
        prompt = rng.choice(stems)[: rng.randint(0, 12)] + [rng.randrange(1, 27) for _ in range(rng.randint(1, 9))]
        options = {
            "max_tokens": rng.choice([0, 1, 3, 8, 20, 40]),
            **rng.choice([{"temperature": 0}, {"seed": rng.randrange(9)}]),
        }
        for chance, extra in [
            (0.3, {"num_sequences": rng.choice([2, 3, 4])}),
            (0.3, {"stop": rng.choice(["e", ["ab", "q", "xyz"], ["t", "tu"]])}),
            (0.2, {"stop_token_ids": [rng.randrange(27)]}),
            (0.2, {"include_stop_in_output": True}),
            (0.2, {"min_tokens": min(options["max_tokens"], rng.randrange(6))}),
            (0.3, {"ignore_eos": True}),
            (0.3, {"logprobs": rng.randrange(3)}),
            (0.2, {"prompt_logprobs": rng.randrange(3)}),
            (0.2, {"repetition_penalty": 1.3, "frequency_penalty": 0.3}),
            (0.2, {"top_k": 5, "top_p": 0.8}),
            (0.2, {"cache_salt": rng.choice("xy")}),
            (0.1, {"bypass_prefix_cache": True}),
        ]:
            if rng.random() < chance:
                options.update(extra)
        specs.append((prompt, options))
    return specs


def outcome(result) -> list:
    logprobs = [None if o.logprobs is None else o.logprobs.round(4).tolist() for o in result.outputs]
    return [
        (o.token_ids, o.text, o.finish_reason, o.stop_match, p) for o, p in zip(result.outputs, logprobs, strict=True)
    ]


def random_traffic(engine, specs, expected, seed: int, actions: int) -> None:
    """One caller's `actions`, each checked against what the request gives alone."""
    rng = random.Random(seed)

    def check_result(index, result):
        if any(output.finish_reason == "cancelled" for output in result.outputs):
            return
        assert outcome(result) == expected[index], (specs[index], result)

    for number in range(actions):
        index = rng.randrange(len(specs))
        prompt, options = specs[index]
        count = options.get("num_sequences", 1)
        action = rng.random()
        priority = rng.choice([0, 0, 0, 1, -1])
        if action < 0.4:
            events = list(submitted := stream_when_there_is_room(engine, prompt, priority=priority, **options))
            check_stream(events, count, prompt_tokens=len(prompt))
            check_result(index, submitted.handle.result())
        elif action < 0.55:
            stream = stream_when_there_is_room(engine, prompt, priority=priority, **options)
            for _ in range(rng.randrange(4)):
                next(stream, None)
            if rng.random() < 0.5:
                stream.close()
                check_result(index, stream.handle.result(60))
        elif action < 0.7:
            name = f"r{rng.randrange(3)}"
            try:
                result = engine.generate(prompt, request_id=name, priority=priority, **options)
                check_result(index, result)
            except DuplicateRequest:
                try:
                    assert engine.abort(name).status in ("aborted", "already_finished")
                except RequestNotFound:
                    pytest.fail("an id in flight is known")
        elif action < 0.8:
            chosen = [rng.randrange(len(specs)) for _ in range(rng.randint(1, 6))]
            requests = [requested(*specs[i]) for i in chosen]
            for position, result in engine.as_completed(requests):
                check_result(chosen[position], result)
                if rng.random() < 0.1:
                    break
        elif action < 0.87:
            chosen = [rng.randrange(len(specs)) for _ in range(rng.randint(1, 4))]
            for i, result in zip(
                chosen, asyncio.run(engine.agenerate([requested(*specs[i]) for i in chosen])), strict=True
            ):
                check_result(i, result)
        elif action < 0.92:
            engine.clear_prefix_cache()
        elif action < 0.95:
            assert engine.health(include_inference_probe=True).state == "ready"
        elif action < 0.97 and number % 7 == 0:
            engine.abort(all_requests=True)
        else:
            with pytest.raises(InvalidArgument):
                engine.submit(prompt, **{**options, "top_p": 7})


def requested(prompt, options) -> GenerateRequest:
    from openengine.options import build_request

    return build_request(prompt, None, options)


def stream_when_there_is_room(engine, prompt, **options):
    from openengine import Overloaded

    while True:
        try:
            return engine.stream(prompt, **options)
        except Overloaded:
            time.sleep(0.002)


@pytest.mark.soak
@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_random_traffic_on_a_tiny_pool_keeps_every_book_and_every_result(
    tmp_path, monkeypatch, request, enable_prefix_cache
):
    soak = request.config.option.markexpr == "soak"
    specs = traffic_specs(random.Random(1), 60)
    with scripted_engine(
        tmp_path / "big", hashed(27), ABC, eos_token_ids=(0,), num_kv_blocks=512, context=64
    ) as engine:
        expected = [outcome(engine.generate(prompt, **options)) for prompt, options in specs]

    faults: list[BaseException] = []
    num_preempted = 0
    schedule, commit = Scheduler.schedule, Scheduler.commit

    def checked(function):
        def run(self, *arguments):
            nonlocal num_preempted
            value = function(self, *arguments)
            if function is schedule:
                num_preempted += len(value.preempted)
            try:
                self.check()
            except AssertionError as exc:
                faults.append(exc)
                raise
            return value

        return run

    monkeypatch.setattr(Scheduler, "schedule", checked(schedule))
    monkeypatch.setattr(Scheduler, "commit", checked(commit))
    options = {**_TINY, "enable_prefix_cache": enable_prefix_cache, "context": 64}
    with scripted_engine(tmp_path / "tiny", hashed(27), ABC, eos_token_ids=(0,), **options) as engine:
        actions = 2000 if soak else 60
        in_threads_for(
            600 if soak else 90,
            *(lambda seed=seed: random_traffic(engine, specs, expected, seed, actions) for seed in range(4)),
        )
        gc.collect()
        wait_until(lambda: load(engine) == (0, 0, 0))
        engine.clear_prefix_cache()
        assert engine._loop.call(lambda scheduler: (scheduler.blocks.num_cached, scheduler.blocks.num_free)) == (0, 16)
        assert not faults and num_preempted > 10 and engine.health().state == "ready"


def in_threads_for(timeout: float, *functions) -> None:
    with ThreadPoolExecutor(len(functions)) as pool:
        for future in [pool.submit(function) for function in functions]:
            future.result(timeout)
