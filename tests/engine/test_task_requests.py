"""Requests of embed, classify and score: long lists, interrupts, priorities, discovery, the KV cache, drains."""

from __future__ import annotations

import asyncio
import random
import resource
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from openengine import (
    AbortStatus,
    Cancelled,
    ClassifyRequest,
    DuplicateRequest,
    Engine,
    HealthState,
    InvalidArgument,
    ModelNotFound,
    PreconditionFailed,
    RequestTooLarge,
    TaskInput,
    TaskRequestContext,
    TaskValueSemantics,
    UnsupportedTask,
)
from tests.interrupting import interrupted
from tests.task_models import (
    ENGINE_OPTIONS,
    KINDS,
    LABELS,
    WORDS,
    embed_request,
    encode,
    engine_of,
    hidden_states,
    score_request,
    texts_of,
    write_task_model,
)
from tests.waiting import is_idle, wait_until

# ---- long lists, interrupts, others --------------------------------------------------------------


def test_ten_thousand_texts_stream_through_in_order_and_in_little_memory(models):
    engine, texts = engine_of(models, "embedding"), texts_of(10_000, most=8)
    few = engine.embed(texts[:1500]).numpy()
    most_open = 0

    def watch() -> None:
        nonlocal most_open
        while not done.is_set():
            load = engine.load_info()
            most_open = max(most_open, load.running_requests + load.queued_requests)
            time.sleep(0.001)

    done = threading.Event()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        vectors = engine.embed(texts).numpy()
    finally:
        done.set()
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    watcher.join()
    assert vectors.shape == (10_000, 64) and np.abs(vectors[:1500] - few).max() < 1e-5
    assert np.abs(vectors[-1] - engine.embed([texts[-1]]).numpy()).max() < 1e-5
    assert most_open <= 4, "a few requests at a time"
    assert grown_mib < 40, f"{grown_mib} MiB for {vectors.nbytes / 2**20:.1f} MiB of vectors"


def test_a_progress_bar_counts_items(models, capsys):
    engine_of(models, "embedding").embed(texts_of(1200, most=4), progress=True)
    shown = capsys.readouterr().err
    assert "embedding" in shown and "1200/1200" in shown


def test_an_interrupted_call_leaves_the_engine_usable(models):
    engine = engine_of(models, "embedding")
    texts = texts_of(4000, most=40)
    expected = engine.embed(texts[:3]).numpy()
    steps = engine._loop.num_steps
    with interrupted(when=lambda: engine._loop.num_steps > steps + 3):
        while True:
            engine.embed(texts)
    wait_until(lambda: is_idle(engine))
    assert np.abs(engine.embed(texts[:3]).numpy() - expected).max() < 1e-5


def test_many_threads_get_their_own_results(models):
    engine, texts = engine_of(models, "embedding"), texts_of(48)
    expected = engine.embed(texts).numpy()
    wrong = []

    def work(index: int) -> None:
        for offset in range(0, 48, 8):
            part = texts[offset : offset + 8]
            if np.abs(engine.embed(part).numpy() - expected[offset : offset + 8]).max() > 1e-4:
                wrong.append((index, offset))

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and is_idle(engine)


def test_in_an_event_loop_calls_run_together_and_a_cancelled_one_ends(models):
    engine, texts = engine_of(models, "embedding"), texts_of(4000, most=40)

    async def main() -> list:
        long = asyncio.create_task(engine.aembed(texts))
        while not engine.load_info().running_requests:
            await asyncio.sleep(0.001)
        short = await asyncio.gather(*(engine.aembed(text) for text in texts[:5]))
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        return short

    short = asyncio.run(main())
    assert np.abs(np.stack([r.numpy() for r in short]) - engine.embed(texts[:5]).numpy()).max() < 1e-4
    wait_until(lambda: is_idle(engine))
    assert asyncio.run(engine_of(models, "cross").ascore("a", ["b", "c"])).scores.shape == (2,)
    assert asyncio.run(engine_of(models, "classifier").aclassify(["a"])).labels


def test_tsk_03_17_ids_are_those_of_generation_and_abort_knows_them(models):
    engine = engine_of(models, "embedding")
    handle = engine.submit_task(embed_request(4000, request_id="long"))
    with pytest.raises(DuplicateRequest):
        engine.submit_task(embed_request(request_id="long"))
    with pytest.raises(DuplicateRequest):
        engine.embed("a", request_id="long")
    assert engine.abort("long").status is AbortStatus.ABORTED
    with pytest.raises(Cancelled):
        handle.result()
    assert engine.abort("long").status is AbortStatus.ALREADY_FINISHED
    assert engine.embed(["a"], request_id="long").request_id == "long"


def test_a_handle_waits_is_cancelled_and_gives_its_response_twice(models):
    engine = engine_of(models, "embedding")
    handle = engine.submit_task(embed_request(3))
    assert np.array_equal(handle.result().numpy(), handle.result().numpy()) and handle.done
    slow = engine.submit_task(embed_request(4000))
    with pytest.raises(TimeoutError):
        slow.result(timeout=0.001)
    slow.cancel()
    with pytest.raises(Cancelled):
        slow.result()
    wait_until(lambda: is_idle(engine))


def test_larger_priority_overtakes(models):
    engine = engine_of(models, "embedding")
    first = engine.submit_task(embed_request(4000))
    urgent = engine.submit_task(embed_request(400, priority=1))
    urgent.result()
    assert not first.done
    first.cancel()
    wait_until(lambda: is_idle(engine))


def test_a_short_request_does_not_wait_for_a_long_one(models):
    engine = engine_of(models, "embedding")
    first = engine.submit_task(embed_request(4000))
    engine.embed(texts_of(4))
    assert not first.done
    first.cancel()
    wait_until(lambda: is_idle(engine))


def test_r4_what_a_cancelled_task_has_brought_is_known_when_it_is_over(models):
    engine, ended = engine_of(models, "embedding"), threading.Event()
    whole = engine.submit_task(embed_request(3))
    assert whole.result().usage == whole.usage
    handle = engine.submit_task(embed_request(4000))
    handle.on_done(ended.set)
    handle.cancel()
    assert ended.wait(20) and handle.usage.input_tokens >= 4000


# ---- the engine around it ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_gen_02_18_tsk_02_11_an_unknown_model_is_not_found_before_it_cannot_do_the_task(models, kind):
    engine = engine_of(models, kind)
    info, request = engine.model_info(), {"request_id": "x", "model": "other"}
    calls = {
        "generate": lambda **names: engine.generate("a", max_tokens=1, **names),
        "a chat": lambda **names: engine.generate(messages=[{"role": "user", "content": "a"}], max_tokens=1, **names),
        "agenerate": lambda **names: asyncio.run(engine.agenerate("a", max_tokens=1, **names)),
        "a guide": lambda **names: asyncio.run(engine.agenerate("a", max_tokens=1, regex="a", **names)),
        "embed": lambda **names: engine.submit_task(named(embed_request(), **names)).result(),
        "score": lambda **names: engine.submit_task(named(score_request(["a"]), **names)).result(),
    }
    able = {"embed": info.tasks.embed is not None, "score": info.tasks.score is not None}

    def named(task, **names):
        return replace(task, context=TaskRequestContext(**names))

    for name, call in calls.items():
        if name == "a chat" and info.generation is not None:
            continue  # these models have no template, which is told before
        with pytest.raises(ModelNotFound):
            call(**request)
        with pytest.raises(InvalidArgument, match="request_id"):
            call(**request | {"request_id": ""})
        if not able.get(name, info.generation is not None):
            with pytest.raises(UnsupportedTask):
                call(request_id="x")


@pytest.mark.parametrize("kind", KINDS)
def test_discovery_health_and_load_make_sense_for_every_kind(models, kind):
    engine = engine_of(models, kind)
    info, health = engine.model_info(), engine.health(include_inference_probe=True)
    assert health.state is HealthState.READY and health.checks[-1].state is HealthState.READY
    generates = kind == "causal"
    assert (info.generation is not None) == generates and info.tasks is not None
    assert info.supports_text_input is info.supports_token_ids_input is generates, "gen_18, mod_05"
    assert info.max_output_tokens is None and info.supports_lora is info.supports_multimodal is False
    is_encoder = kind not in ("causal", "decoder_embedding")
    assert (info.kv_block_size is None) == (info.total_kv_blocks is None) == is_encoder
    assert info.max_context_length == (130 if is_encoder and kind not in ("tagger",) else info.max_context_length)
    facts = engine.info().attributes
    assert facts["architecture"] and facts["num_threads"] == 1 and repr(engine), "as the models here are loaded"
    load = engine.load_info(include_per_rank=True)
    assert load.total_kv_blocks == load.ranks[0].total_kv_blocks == info.total_kv_blocks
    assert {load.used_kv_blocks, load.ranks[0].used_kv_blocks, load.running_tokens} == {None if is_encoder else 0}
    assert load.running_requests == load.queued_requests == load.waiting_tokens == load.active_kv_sessions == 0
    if is_encoder:
        with pytest.raises(PreconditionFailed):
            engine.kv_events()
    engine.clear_prefix_cache()


def test_generation_and_tasks_share_one_engine_and_lose_no_block(models):
    directory, _reference, calm = models["causal"]
    documents, labels = texts_of(40), [5, 6, 7]
    scores = calm.score("how are you: ", documents, label_token_ids=labels).scores
    texts = [calm.generate(text, max_tokens=12, temperature=0).text for text in documents[:10]]
    with Engine(
        directory, num_kv_blocks=24, block_size=8, max_num_seqs=6, max_num_batched_tokens=24, **ENGINE_OPTIONS
    ) as engine:
        failures = []

        def generate() -> None:
            for expected, result in zip(texts, engine.generate(documents[:10], max_tokens=12, temperature=0)):
                if result.text != expected:
                    failures.append((expected, result.text))

        def score() -> None:
            found = engine.score("how are you: ", documents, label_token_ids=labels).scores
            if np.abs(found - scores).max() > 1e-4:
                failures.append(np.abs(found - scores).max())

        def cancel() -> None:
            for _ in range(5):
                handle, steps = engine.submit_task(score_request(documents)), engine._loop.num_steps
                wait_until(lambda steps=steps: engine._loop.num_steps > steps)
                handle.cancel()

        threads = [threading.Thread(target=work, daemon=True) for work in (generate, score, cancel, generate, score)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_until(lambda: is_idle(engine))
        assert not failures
        engine._loop.call(lambda scheduler: scheduler.check())
        assert engine._loop.call(lambda scheduler: scheduler.blocks.num_free) == 24


@pytest.mark.parametrize("most", [3, 40])
def test_tsk_15_one_query_is_computed_once_for_two_hundred_candidates(models, most):
    directory, _reference, _engine = models["causal"]
    query = " ".join(random.Random(5).choices(WORDS, k=60))
    documents = [" " + text for text in texts_of(200, most=most)]
    with Engine(directory, max_num_seqs=16, **ENGINE_OPTIONS) as engine:
        own = sum(len(engine.tokenize(text, add_special_tokens=False)) for text in documents)
        response = engine.score(query, documents, label_token_ids=[5, 6])
        usage, once = response.usage, len(engine.tokenize(query))
        assert usage.input_tokens == own + 200 * once
        computed = usage.input_tokens - usage.cached_input_tokens
        assert computed <= 1.15 * own + once, (computed, own, once)
        again = engine.score(query, documents[:8], label_token_ids=[5, 6])
        assert np.abs(again.scores - response.scores[:8]).max() < 1e-5
        assert 0 < again.usage.cached_input_tokens < again.usage.input_tokens
        alone = [engine.score(query, [text], label_token_ids=[5, 6]).scores[0] for text in documents[:20]]
        assert np.abs(response.scores[:20] - alone).max() < 1e-5
        assert engine._loop.call(lambda scheduler: scheduler.blocks.num_used) == 0


def test_emb_10_vectors_by_token_are_complete_with_a_warm_cache_and_in_chunks(models):
    directory, reference, _engine = models["decoder_embedding"]
    text = " ".join(random.Random(2).choices(WORDS, k=60))
    expected = hidden_states(reference, encode(directory, text))
    with Engine(directory, max_num_seqs=4, max_num_batched_tokens=16, block_size=4, **ENGINE_OPTIONS) as engine:
        last = engine.embed([text, text]).numpy()
        by_token = engine.embed([text, text], granularity="token")
        assert by_token.usage.cached_input_tokens == 0, "every row is wanted"
        for output in by_token:
            assert np.abs(output.numpy() - expected).max() < 1e-4
        assert np.abs(last - expected[-1]).max() < 1e-4


def test_an_item_larger_than_the_kv_pool_is_refused(models):
    directory = models["decoder_embedding"][0]
    with Engine(directory, num_kv_blocks=4, block_size=4, max_model_len=64, **ENGINE_OPTIONS) as engine:
        with pytest.raises(RequestTooLarge):
            engine.embed("quick " * 20)
        assert engine.embed("quick").numpy().shape[-1] == 64


def test_drain_and_close_end_tasks_as_they_end_generations(tmp_path):
    write_task_model(tmp_path, "embedding")
    engine = Engine(tmp_path, **ENGINE_OPTIONS)
    handle = engine.submit_task(embed_request(2000))
    engine.drain()
    assert handle.done and len(handle.result()) == 2000
    assert engine.health(include_inference_probe=True).checks[-1].state is HealthState.READY, "a probe is no request"
    engine.close()
    with pytest.raises(PreconditionFailed):
        engine.embed("a")
    late = Engine(tmp_path, **ENGINE_OPTIONS)
    handle = late.submit_task(embed_request(4000))
    late.close()
    with pytest.raises(Cancelled):
        handle.result()


def test_the_contracts_requests_give_its_responses(models):
    inputs = (TaskInput(item_id="x", text="hello"),)
    response = engine_of(models, "classifier").classify(ClassifyRequest(inputs=inputs))
    assert response[0].item_id == "x" and response[0].semantics is TaskValueSemantics.PROBABILITIES
    assert response[0].labels == tuple(LABELS.values())
    scored = engine_of(models, "causal").score(score_request(["a", "b"], request_id="mine"))
    assert scored.request_id == "mine" and scored.groups[0].candidates[1].candidate_id == "c1"
