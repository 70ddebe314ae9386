"""Discovery: health and its probe, load, and what engine and model say of themselves."""

from __future__ import annotations

import threading
import time

import pytest

from openengine import (
    EngineRole,
    InvalidArgument,
    ModelNotFound,
)
from tests.scripted import ABC, GREEDY, Gate, hashed, scripted_engine
from tests.waiting import load, wait_until

# ---- health --------------------------------------------------------------------------------------


def test_hlt_01_02_a_plain_check_answers_while_a_step_runs(gated):
    gated.submit("ab", **GREEDY)
    assert gated.gate.entered.wait(20)
    health = gated.health()
    assert health.state == "ready" and all(c.name and c.state == "ready" for c in health.checks)
    assert "inference_probe" not in [c.name for c in health.checks]


def test_hlt_03_07_a_probe_computes_and_leaves_nothing_behind(engine):
    engine.generate("abcdefgh", **GREEDY)
    cached = engine._loop.call(lambda scheduler: scheduler.blocks.num_cached)
    steps = engine._loop.num_steps
    (probe,) = [c for c in engine.health(include_inference_probe=True).checks if c.name == "inference_probe"]
    assert probe.state == "ready" and engine._loop.num_steps == steps + 1
    assert engine._loop.call(lambda scheduler: scheduler.blocks.num_cached) == cached
    assert load(engine) == (0, 0, 0)


def test_hlt_07_a_probe_is_beyond_aborts_limits_and_drains(tmp_path):
    gate = Gate()
    with scripted_engine(tmp_path, gate, ABC, max_queued_requests=1) as engine:
        first = engine.submit("ab", **GREEDY)
        assert gate.entered.wait(20)
        queued = engine.submit("ab", **GREEDY)
        found = []
        prober = threading.Thread(target=lambda: found.append(engine.health(include_inference_probe=True)))
        prober.start()
        wait_until(lambda: len(engine._loop._open) == 3)
        assert next(engine.drain_events()).in_flight_requests == 2
        assert engine.abort(all_requests=True).status == "aborted"
        gate.opened.set()
        prober.join(20)
        assert found[0].checks[-1].state == "ready"
        assert {h.result().finish_reason for h in (first, queued)} == {"cancelled"}


def test_hlt_04_an_unknown_model_is_not_found(engine):
    assert engine.health(model="scripted").state == "ready"
    for probe in (False, True):
        with pytest.raises(ModelNotFound, match="'other'"):
            engine.health(model="other", include_inference_probe=probe)


def test_hlt_05_an_expected_role_is_checked(engine):
    assert engine.health(role=EngineRole.AGGREGATED).checks[-1].state == "ready"
    wrong = engine.health(role=EngineRole.DECODE)
    assert wrong.state == "not_ready" and wrong.checks[-1].name == "role" and "decode" in wrong.checks[-1].message


def test_health_of_a_closed_engine_is_not_ready(tmp_path):
    engine = scripted_engine(tmp_path, hashed(27), ABC)
    engine.close()
    health = engine.health(include_inference_probe=True)
    assert health.state == "not_ready" and health.checks[-1].name == "inference_probe"


# ---- load, info ----------------------------------------------------------------------------------


def test_ld_01_02_03_05_load_follows_reality(tmp_path):
    gate = Gate()
    with scripted_engine(tmp_path, gate, ABC, max_num_seqs=2) as engine:
        idle = engine.load_info()
        assert (idle.running_requests, idle.queued_requests, idle.used_kv_blocks) == (0, 0, 0)
        assert idle.total_kv_blocks == engine.model_info().total_kv_blocks == 64
        assert idle.instance_id == engine.info().instance_id
        handles = [engine.submit("abcde", **GREEDY) for _ in range(5)]
        assert gate.entered.wait(20)
        busy = engine.load_info()
        assert busy.running_requests and busy.running_requests + busy.queued_requests == 5, "although a step runs"
        assert busy.prefill_batch_size == busy.running_requests and busy.waiting_tokens == 5 * busy.queued_requests
        hold = threading.Event()
        original = gate.script

        def script(history):
            assert len(history) != 7 or hold.wait(20)
            return original(history)

        gate.script = script
        gate.opened.set()
        wait_until(lambda: engine.load_info().running_tokens >= 10)
        busy = engine.load_info()
        assert busy.running_requests == 2 and busy.queued_requests == 3 and busy.waiting_tokens == 15
        assert 0 < busy.used_kv_blocks <= 64 and busy.decode_batch_size + busy.prefill_batch_size == 2
        assert busy.timestamp_unix_nanos >= idle.timestamp_unix_nanos
        hold.set()
        for handle in handles:
            handle.result()
        assert load(engine) == (0, 0, 0)


def test_ld_01_02_03_an_idle_engine_has_no_batch_and_its_load_is_of_now(engine):
    for max_tokens in (1, 5):  # ends by a prompt, and by a step of one token
        engine.generate("abc", temperature=0, max_tokens=max_tokens, ignore_eos=True)
        idle = engine.load_info(include_per_rank=True)
        for info in (idle, *idle.ranks):
            assert info.running_requests == info.queued_requests == info.used_kv_blocks == 0
            assert info.prefill_batch_size == info.decode_batch_size == 0
        assert idle.running_tokens == idle.waiting_tokens == 0
    times = [time.time_ns(), *(engine.load_info().timestamp_unix_nanos for _ in range(3)), time.time_ns()]
    assert times == sorted(times), "nothing changes, and that is known now"


def test_ld_03_a_cancelled_request_that_never_began_waits_no_more(gated):
    first = gated.submit("abc", **GREEDY)
    assert gated.gate.entered.wait(20)
    others = [gated.submit("abcdef", **GREEDY) for _ in range(3)]
    assert gated.load_info().waiting_tokens == 18 and gated.load_info().queued_requests == 3
    for handle in others:
        handle.cancel()
    gated.gate.opened.set()
    assert {handle.result(20).finish_reason for handle in (first, *others)} == {"length", "cancelled"}
    assert gated.load_info().waiting_tokens == gated.load_info().queued_requests == 0


def test_ld_03_whoever_has_the_result_sees_a_load_without_it(engine):
    for _ in range(50):
        engine.generate("abc", max_tokens=2)
        info = engine.load_info()
        assert (info.running_requests, info.queued_requests, info.used_kv_blocks) == (0, 0, 0)


def test_eng_info_is_complete_and_constant(engine):
    info = engine.info()
    assert info == engine.info() and info.role == "aggregated" and info.instance_id
    assert info.schema_revision == info.minimum_client_revision == 1 and info.schema_release
    assert info.supported_models and len(set(info.supported_models)) == len(info.supported_models)
    for name in info.supported_models:
        assert engine.model_info(name) == engine.model_info()
        assert engine.generate("ab", model=name, max_tokens=1).token_ids
    assert {"device", "dtype", "kernels", "kv_tokens"} <= set(info.attributes)


@pytest.mark.parametrize("model", ["other", "", 5])
def test_mod_02_an_unknown_model_is_not_found(engine, model):
    with pytest.raises(ModelNotFound, match="served are scripted"):
        engine.model_info(model)


def test_mod_04_06_07_09_capabilities_are_what_works(engine):
    info = engine.model_info()
    generation = info.generation
    assert (info.max_context_length, info.kv_block_size, info.max_running_requests) == (128, 4, 64)
    top = generation.output_logprobs.max_top_n
    assert len(engine.generate("ab", logprobs=top, prompt_logprobs=top, max_tokens=1).tokens[0].candidates) == top
    assert len(engine.generate("ab", num_sequences=generation.max_num_sequences, max_tokens=1).outputs) == 64
    for options in ({"logprobs": top + 1}, {"prompt_logprobs": top + 1}, {"num_sequences": 65}):
        with pytest.raises(InvalidArgument):
            engine.generate("ab", **options)
    assert (
        generation.guided_decoding.supported is False
        and info.supports_lora is False
        and info.supports_multimodal is False
    )


def test_served_name_and_aliases_name_the_model(tmp_path):
    with scripted_engine(tmp_path, hashed(27), ABC, served_model_name="served", aliases=("a", "b")) as engine:
        info = engine.model_info()
        assert (info.served_model_name, info.served_model_aliases) == ("served", ("a", "b")) and repr(engine)
