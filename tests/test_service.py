"""What an engine offers beside generating: events, load by rank, KV discovery, and refusals of what it does not do."""

from __future__ import annotations

import asyncio

import pytest

from openengine import (
    AllBlocksCleared,
    BlockStored,
    Draining,
    EmbedRequest,
    InvalidArgument,
    KvSessionNotFound,
    KvSessionRef,
    ModelNotFound,
    OutOfRange,
    PreconditionFailed,
    RuntimeEventType,
    TaskInput,
    TaskRequestContext,
    UnsupportedTask,
)
from tests.scripted import ABC, hashed, scripted_engine

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.fixture
def engine(tmp_path):
    with scripted_engine(tmp_path, hashed(27), ABC, max_num_seqs=4) as engine:
        yield engine


def test_kv_events_tell_the_blocks_whose_keys_the_tokenizer_service_computes(engine):
    with engine.kv_events() as events:
        engine.generate(PROMPT, max_tokens=1, request_id="told")
        (event,) = next(events).events
    assert event.request_id == "told" and isinstance(event.event, BlockStored)
    assert list(event.event.block_hashes) == [key.value for key in engine.cache_keys(tokens=PROMPT).keys]


def test_a_snapshot_is_followed_by_the_next_number(engine):
    engine.generate(PROMPT, max_tokens=1)
    with engine.kv_events(include_snapshot=True) as events:
        first = next(events)
        assert isinstance(first.events[0].event, AllBlocksCleared) and len(first.events) == 2
        engine.generate([20, 21, 22, 23, 24], max_tokens=1)
        assert next(events).sequence_number == first.sequence_number + 1


def test_clearing_the_cache_is_an_event_also_on_an_idle_engine(engine):
    engine.generate(PROMPT, max_tokens=1)
    with engine.kv_events() as events:
        engine.clear_prefix_cache()
        assert [event.event for event in next(events).events] == [AllBlocksCleared()]


def test_replay_and_starts_that_are_not_kept(engine):
    engine.generate(PROMPT, max_tokens=1)
    assert engine.kv_events(start_sequence_number=1).poll().sequence_number == 1
    with pytest.raises(OutOfRange):
        engine.kv_events(start_sequence_number=100)


@pytest.mark.parametrize("options", [{"event_buffer_size": 0}, {"enable_prefix_cache": False}])
def test_kv_events_that_are_off_are_a_failed_precondition(tmp_path, options):
    with scripted_engine(tmp_path, hashed(27), ABC, **options) as engine:
        engine.advertise("localhost", 1)
        with pytest.raises(PreconditionFailed):
            engine.kv_events()
        assert not engine.kv_event_sources().sources


def test_subscriptions_end_with_the_engine(engine):
    kv, runtime = engine.kv_events(), engine.runtime_events()
    engine.close()
    assert list(kv) == [] and list(runtime) == []
    with pytest.raises(PreconditionFailed):
        engine.kv_events()


def test_runtime_events_of_one_request_in_order(engine):
    with engine.runtime_events([RuntimeEventType.QUEUE, RuntimeEventType.BATCH]) as events:
        engine.generate(PROMPT, max_tokens=3, request_id="seen")
        kinds = [next(events) for _ in range(4)]
    assert [str(event.type) for event in kinds] == ["queue", "queue", "batch", "batch"]
    assert [event.attributes.get("action") for event in kinds[:2]] == ["enqueue", "dequeue"]
    assert (kinds[2].attributes["admitted"], kinds[3].attributes["ended"]) == ("1", "1")


def test_a_probe_causes_no_queue_event_and_no_block(engine):
    with engine.runtime_events([RuntimeEventType.QUEUE]) as events, engine.kv_events() as kv:
        engine.health(include_inference_probe=True)
        engine.generate(PROMPT, max_tokens=1, request_id="mine")
        assert next(events).attributes["request_id"] == next(kv).events[0].request_id == "mine"


def test_events_can_be_read_in_an_event_loop(engine):
    async def main():
        with engine.kv_events() as events:
            reader = asyncio.ensure_future(events.__anext__())
            await engine.agenerate(PROMPT, max_tokens=1)
            return await reader

    assert asyncio.run(main()).sequence_number == 1


def test_waiting_with_a_timeout_again_and_again_keeps_one_waiter(engine):
    async def main():
        handle = engine.submit(PROMPT, max_tokens=100, ignore_eos=True)
        for _ in range(20):
            try:
                await asyncio.wait_for(handle.aresult(), 0.0001)
            except asyncio.TimeoutError:
                assert len(handle._waiters) <= 1
        return await handle.aresult()

    assert len(asyncio.run(main()).token_ids) == 100


def test_load_by_rank_agrees_with_the_whole(engine):
    load = engine.load_info(include_per_rank=True)
    (rank,) = load.ranks
    assert rank.data_parallel_rank == 0 and rank.total_kv_blocks == load.total_kv_blocks
    assert engine.load_info().ranks == ()


def test_kv_discovery_names_the_advertised_address_only(engine):
    assert engine.kv_connector_info() == engine.info().kv_connector and engine.kv_connector_info().enabled is False
    assert not engine.kv_event_sources().sources
    engine.advertise("worker-1", 50051)
    (source,) = engine.kv_event_sources(data_parallel_ranks=[0]).sources
    assert (source.endpoint_addr.host, source.endpoint_addr.port) == ("worker-1", 50051)
    for host, port in (("0.0.0.0", 1), ("::0", 1), ("0", 1), ("http://x", 1), ("", 1), ("a", 0), ("a", 65536)):
        with pytest.raises(InvalidArgument):
            engine.advertise(host, port)
    with pytest.raises(InvalidArgument):
        engine.kv_event_sources(data_parallel_ranks=[1])


def test_abort_takes_exactly_one_target(engine):
    session = KvSessionRef(session_id="s")
    with pytest.raises(KvSessionNotFound):
        engine.abort(kv_session=session)
    for wrong in ({}, {"kv_session": KvSessionRef(session_id="")}, {"kv_session": session, "all_requests": True}):
        with pytest.raises(InvalidArgument):
            engine.abort(**wrong)


def embed_request(**context):
    return EmbedRequest(inputs=(TaskInput(item_id="a", text="b"),), context=TaskRequestContext(**context))


def test_what_it_does_not_do_is_refused_in_the_contracts_order(engine):
    for refused in (
        lambda: engine.embed(embed_request()),
        lambda: engine.embed("text"),
        lambda: engine.classify("text"),
        lambda: engine.load_lora("a", "/tmp"),
        lambda: engine.unload_lora("a"),
        engine.list_loras,
    ):
        with pytest.raises(UnsupportedTask):
            refused()
    with pytest.raises(ModelNotFound):
        engine.embed(embed_request(model="nobody"))
    with pytest.raises(InvalidArgument):
        engine.embed(embed_request(request_id=""))
    engine.drain()
    with pytest.raises(Draining):
        engine.embed(embed_request(model="nobody"))
    with pytest.raises(Draining):
        engine.load_lora("a", "/tmp")
