"""Many callers at once, from threads and event loops, get the results that each would get alone."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from openengine import (
    DuplicateRequest,
    Engine,
    GenerateRequest,
    SamplingParams,
    StoppingOptions,
)
from tests.checkpoints import write_checkpoint
from tests.scripted import ABC, GREEDY, hashed, scripted_engine, slow
from tests.stream_grammar import check_stream
from tests.waiting import in_threads, load

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
        alone = [engine.generate("abc", **GREEDY).token_ids for engine in (one, other)]
        found = in_threads(
            lambda: [r.token_ids for r in one.generate(["abc"] * 20, **GREEDY)],
            lambda: [r.token_ids for r in other.generate(["abc"] * 20, **GREEDY)],
        )
    assert found == [[alone[0]] * 20, [alone[1]] * 20] and alone[0] != alone[1]


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
        event_loop.run_until_complete(asyncio.sleep(0))  # the task begins, and waits
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
