"""Guided outputs are the same however they are computed: alone or batched, jumping or not, preempted, streamed, forked."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("llguidance")

from openengine import GuidedDecoding
from openengine.types import ChoiceConstraint
from tests.guided_cases import CASES, PERSON, guided_engine, ids

OPTIONS = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "temperature": 1.5, "top_p": 0.9},
    {"seed": 3, "top_k": 8, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"seed": 4, "min_p": 0.02, "presence_penalty": 0.7, "min_tokens": 3},
    {"seed": 5, "ignore_eos": True},
]


def jobs() -> list[dict]:
    """One request for each guide, with all kinds of sampling."""
    return [
        {"max_tokens": 50, **guide, **OPTIONS[index % len(OPTIONS)]}
        for index, (guide, _, _) in enumerate([*CASES.values(), ({"json_schema": PERSON}, [], []), ({}, [], [])])
    ]


def run(engine, options: dict, **more) -> list[tuple]:
    result = engine.submit(ids("x"), **options, **more).result()
    return [(output.token_ids, output.text, output.finish_reason, output.message) for output in result.outputs]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list:
    with guided_engine(tmp_path_factory.mktemp("alone"), guide_jump_ahead=False) as engine:
        return [run(engine, options) for options in jobs()]


def outcomes(handles) -> list:
    results = [handle.result() for handle in handles]
    return [[(o.token_ids, o.text, o.finish_reason, o.message) for o in result.outputs] for result in results]


def test_gde_12_batched_is_alone(alone, tmp_path):
    with guided_engine(tmp_path, guide_jump_ahead=False) as engine:
        assert outcomes([engine.submit(ids("x"), **options) for options in jobs()]) == alone


def test_jumping_ahead_changes_nothing(alone, tmp_path):
    with guided_engine(tmp_path) as engine:
        assert [run(engine, options) for options in jobs()] == alone
        assert outcomes([engine.submit(ids("x"), **options) for options in jobs()]) == alone


def test_jumping_ahead_takes_fewer_steps(tmp_path):
    steps = {}
    for jump in (True, False):
        with guided_engine(tmp_path / str(jump), guide_jump_ahead=jump) as engine:
            tokens = engine.generate(ids("x"), json_schema=PERSON, seed=1).token_ids
            steps[jump] = (tokens, engine._loop.num_steps)
    assert steps[True][0] == steps[False][0] and steps[True][1] < steps[False][1] - 10


@pytest.mark.parametrize("jump", [True, False])
def test_preempted_is_undisturbed(alone, tmp_path, jump):
    # 60 blocks of 4 tokens hold few of these outputs at once.
    with guided_engine(tmp_path, guide_jump_ahead=jump, num_kv_blocks=30, context=120) as engine:
        preempted = []
        scheduler = engine._loop._scheduler
        original = scheduler._preempt
        scheduler._preempt = lambda seq, plan: (preempted.append(seq), original(seq, plan))
        assert outcomes([engine.submit(ids("x"), **options) for options in jobs()]) == alone
    assert preempted


@pytest.mark.parametrize("budget", [16, 17])
def test_a_small_budget_changes_nothing(alone, tmp_path, budget):
    with guided_engine(tmp_path, max_num_batched_tokens=budget) as engine:
        assert outcomes([engine.submit(ids("x"), **options) for options in jobs()]) == alone


def test_gde_11_streamed_is_joined(alone, tmp_path):
    with guided_engine(tmp_path) as engine:
        for options, ((token_ids, text, _, _),) in zip(jobs(), alone):
            events = [event for event in engine.stream(ids("x"), **options) if hasattr(event, "tokens")]
            assert "".join(event.text for event in events) == text
            assert [token.token_id for event in events for token in event.tokens] == token_ids


def test_gde_11_every_sequence_follows_the_guide_and_the_first_is_the_single_one(alone, tmp_path):
    for jump in (True, False):
        with guided_engine(tmp_path / str(jump), guide_jump_ahead=jump) as engine:
            for options, expected in zip(jobs(), alone):
                outputs = run(engine, options, num_sequences=3)
                assert outputs[0] == expected[0]
                guide = {name: value for name, value in options.items() if name in ("json_schema", "regex", "choice")}
                if guide:
                    compiled = engine.compile_guide(**guide)
                    assert all(compiled.accepts_prefix(text.rstrip("\ufffd")) for _, text, _, _ in outputs)


def test_logprobs_and_no_jump_give_the_same_tokens(alone, tmp_path):
    with guided_engine(tmp_path) as engine:
        for options, expected in zip(jobs(), alone):
            assert run(engine, options, logprobs=2) == expected


def test_a_randomized_run_with_guides_keeps_its_books(tmp_path):
    rng = random.Random(11)
    guides = [guide for guide, _, _ in CASES.values()] + [{"json_schema": PERSON}, {}]
    with guided_engine(tmp_path, num_kv_blocks=40, context=100, max_num_seqs=6) as engine:
        scheduler = engine._loop._scheduler
        commit = scheduler.commit

        def checked(plan, token_ids):
            scheduler.check()
            deltas = commit(plan, token_ids)
            scheduler.check()
            return deltas

        scheduler.commit = checked
        handles = []
        for index in range(120):
            options = {**rng.choice(guides), **rng.choice(OPTIONS)}
            options |= {"max_tokens": rng.randint(4, 60), "num_sequences": rng.choice([1, 1, 1, 2, 3])}
            if rng.random() < 0.2:
                options["stop"] = rng.choice(["a", ":", "first", '"'])
            if rng.random() < 0.2:
                options["logprobs"] = 1
            prompt = [rng.randrange(256) for _ in range(rng.randint(1, 20))]
            handles.append(engine.submit(prompt, priority=rng.randint(0, 2), **options))
            if rng.random() < 0.1:
                rng.choice(handles).cancel()
        results = [handle.result() for handle in handles]
        load = engine.load_info()
        assert load.running_requests == load.queued_requests == 0
        engine.clear_prefix_cache()
        assert engine._loop.call(lambda scheduler: scheduler.blocks.num_used) == 0
    assert {output.finish_reason for result in results for output in result.outputs} == {"stop", "length", "cancelled"}


def test_a_batch_of_equal_guides_compiles_one(tmp_path):
    with guided_engine(tmp_path) as engine:
        guide = GuidedDecoding(choice=ChoiceConstraint(("left", "right")))
        texts = {result.text for result in engine.generate([ids("x")] * 20, guided=guide)}
        assert texts <= {"left", "right"} and len(engine._guides._futures) == 1
