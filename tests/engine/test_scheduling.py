"""Which request runs when: short prompts beside long ones, priorities, one step for each token."""

from __future__ import annotations

import threading

import numpy as np

from tests.scripted import ABC, letters, scripted_engine

# ---- options -------------------------------------------------------------------------------------


def test_gen_11_a_numpy_priority_orders_as_its_number(gated):
    first = gated.submit("a", max_tokens=1)
    assert gated.gate.entered.wait(20)
    order, done = [], threading.Event()
    for name, priority in [("low", np.uint8(1)), ("high", np.uint8(200)), ("negative", np.int8(-3))]:
        handle = gated.submit(letters("abc"), max_tokens=1, priority=priority, request_id=name)
        handle.on_done(lambda name=name: (order.append(name), len(order) == 3 and done.set()))
    queue = gated._loop._commands  # run them while the step is held: the order is decided at admission
    assert queue.qsize() == 3
    gated.gate.opened.set()
    assert done.wait(20) and first.result()
    assert order == ["high", "low", "negative"]


# ---- scheduling ----------------------------------------------------------------------------------


def test_must_show_6_a_short_prompt_starts_within_four_steps_of_a_long_ones_prefill(tmp_path):
    started = threading.Event()

    def script(history):
        return [1.0] * 27

    with scripted_engine(tmp_path, script, ABC, context=9000, num_kv_blocks=3000, max_num_batched_tokens=512) as engine:
        batches = engine._loop._runner._model.batches
        forward = engine._loop._runner._model.forward
        go = threading.Event()

        def held(batch):
            if len(batches) == 2:
                started.set()
                assert go.wait(20)
            return forward(batch)

        engine._loop._runner._model.forward = held
        long = engine.submit([1 + i % 26 for i in range(8000)], max_tokens=1)
        assert started.wait(20)
        before = len(batches)
        short = engine.submit([1 + (i * 7) % 26 for i in range(16)], max_tokens=1)
        first_token_at = []
        short.on_done(lambda: first_token_at.append(len(batches)))
        go.set()
        short.result(20)
        assert first_token_at[0] - before - 1 <= 4 and not long.done
        long.result(60)
        # While it had the engine to itself, the long prompt used the whole budget.
        assert max(map(sum, batches)) == 512 and len(batches) <= 8000 // 512 + 3


def test_gen_16_a_short_request_finishes_while_a_long_one_runs(gated):
    finished = []
    long = gated.submit("ab", ignore_eos=True)
    assert gated.gate.entered.wait(20)
    short = gated.submit("cd", max_tokens=2)
    long.on_done(lambda: finished.append("long"))
    short.on_done(lambda: finished.append("short"))
    gated.gate.opened.set()
    assert len(long.result(20).token_ids) == 126 and finished == ["short", "long"]


def test_a_sequence_takes_as_many_steps_as_tokens(engine):
    engine.generate("abcdefgh", max_tokens=10, ignore_eos=True)
    assert engine._loop.num_steps == 10
