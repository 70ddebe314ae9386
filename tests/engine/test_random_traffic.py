"""Random requests of several callers on a tiny pool give what each gives alone, and every book stays right.

`pytest -m soak` runs them at length.
"""

from __future__ import annotations

import asyncio
import gc
import random

import pytest

from openengine import (
    DuplicateRequest,
    InvalidArgument,
    RequestNotFound,
)
from openengine.core.scheduler import Scheduler
from openengine.options import build_request
from tests.scripted import ABC, hashed, scripted_engine
from tests.stream_grammar import check_stream
from tests.waiting import in_threads, load, stream_when_there_is_room, wait_until

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
            requests = [build_request(specs[i][0], None, specs[i][1]) for i in chosen]
            for position, result in engine.as_completed(requests):
                check_result(chosen[position], result)
                if rng.random() < 0.1:
                    break
        elif action < 0.87:
            chosen = [rng.randrange(len(specs)) for _ in range(rng.randint(1, 4))]
            for i, result in zip(
                chosen,
                asyncio.run(engine.agenerate([build_request(specs[i][0], None, specs[i][1]) for i in chosen])),
                strict=True,
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
        in_threads(
            *(lambda seed=seed: random_traffic(engine, specs, expected, seed, actions) for seed in range(4)),
            timeout=600 if soak else 90,
        )
        gc.collect()
        wait_until(lambda: load(engine) == (0, 0, 0))
        engine.clear_prefix_cache()
        assert engine._loop.call(lambda scheduler: (scheduler.blocks.num_cached, scheduler.blocks.num_free)) == (0, 16)
        assert not faults and num_preempted > 10 and engine.health().state == "ready"
