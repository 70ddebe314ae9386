"""The client: what it refuses, what it raises, how it ends."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect

import pytest

from openengine import (
    Draining,
    Engine,
    EngineRole,
    GenerateRequest,
    HealthState,
    InternalError,
    InvalidArgument,
    ModelNotFound,
    RequestNotFound,
    RuntimeEventType,
    TaskInput,
    Unreachable,
    UnsupportedFeature,
    UnsupportedTask,
)
from openengine import EmbedRequest as Embed
from openengine.rpc import Client
from openengine.rpc.revision import check_revision
from tests.rpc.serving import is_idle, load
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def client(server):
    with Client(server.target) as client:
        yield client


def test_it_has_the_methods_of_an_engine_with_their_parameters():
    names = {name for name in vars(Engine) if not name.startswith("_")}
    assert names <= set(dir(Client))
    tasks = {"embed", "classify", "score"}
    for name in names - {"tokenizer_service"}:
        local = set(inspect.signature(getattr(Engine, name)).parameters)
        remote = set(inspect.signature(getattr(Client, name)).parameters)
        assert remote <= local if name in tasks else remote == local, name


@pytest.mark.parametrize(
    "change",
    [{"schema_revision": 2}, {"schema_revision": 0}, {"minimum_client_revision": 2}, {"schema_release": "main"}],
    ids=lambda change: next(iter(change)),
)
def test_eng_12_it_refuses_a_server_outside_its_revisions(client, change):
    info = client.info()
    check_revision(info)
    with pytest.raises(UnsupportedFeature, match="revision"):
        check_revision(dataclasses.replace(info, **change))


def test_nobody_listening_is_no_drain():
    with pytest.raises(Unreachable, match="no server answers: check the address") as caught:
        Client("127.0.0.1:1", timeout_s=5)
    assert caught.value.retryable and not isinstance(caught.value, Draining)


@pytest.mark.parametrize("target", ["http://127.0.0.1:50051/", "", None])
def test_what_is_no_address_is_refused_at_once(target):
    with pytest.raises(InvalidArgument, match=r"'127\.0\.0\.1:50051'|such as 'localhost:50051'"):
        Client(target)


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda client: client.compile_guide(regex="a"), "give the guide itself to each request"),
        (lambda client: asyncio.run(client.acompile_guide(regex="a")), "give the guide itself to each request"),
        (lambda client: client.clear_prefix_cache(), "bypass_prefix_cache=True"),
        (lambda client: client.advertise("host", 1), "--advertise-host"),
        (lambda client: client.check_accepting(), r"health\(\).state"),
        (lambda client: client.prepare_task(None), "embed, classify or score"),
        (lambda client: client.submit_task(None), "embed, classify or score"),
        (lambda client: client.embed("x", truncate="right"), r"shorten it.*tokenize\(text\)"),
        (lambda client: client.embed("x", prompt_name="query"), "before each text yourself"),
    ],
)
def test_what_the_contract_has_no_call_for_says_what_to_do_instead(client, call, instead):
    with pytest.raises(UnsupportedFeature, match=instead):
        call(client)


def test_its_info_has_no_attributes_which_the_contract_has_no_place_for(client):
    assert client.info().attributes == {}


def test_one_prompt_gives_one_result_and_a_list_a_list(client):
    assert client.generate("c", max_tokens=3, temperature=0).text == "def"
    assert [result.text for result in client.generate(["c", "cd"], max_tokens=2, temperature=0)] == ["de", "ef"]
    assert client.generate([], max_tokens=2) == []
    assert client.generate(GenerateRequest(token_ids=[3])).usage.prompt_tokens == 1


def test_a_batch_larger_than_the_servers_queue_runs(client):
    results = client.generate(["c"] * 100, max_tokens=2, temperature=0)
    assert [result.text for result in results] == ["de"] * 100


def test_refusals_and_failures_are_the_engines_classes(client):
    with pytest.raises(ModelNotFound):
        client.submit("c", model="nobody")
    with pytest.raises(InvalidArgument, match="temperature"):
        client.generate("c", temperature=-1.0)
    with pytest.raises(InternalError, match="NaN"):
        client.generate("n", max_tokens=2)
    with pytest.raises(RequestNotFound):
        client.abort("never")
    with pytest.raises(UnsupportedTask):
        client.embed(Embed(inputs=(TaskInput(item_id="a", text="x"),)))
    with pytest.raises(UnsupportedTask):
        client.list_loras()


def test_leaving_a_stream_early_cancels_its_request(client, server):
    with client.stream("s", max_tokens=1500, temperature=0) as events:
        assert next(events).text == "t"
    wait_until(lambda: is_idle(server), timeout=2)

    async def leave():
        async for event in client.astream("s", max_tokens=1500, temperature=0):
            return event.text

    assert asyncio.run(leave()) == "t"
    wait_until(lambda: is_idle(server), timeout=2)


def test_cancelling_a_task_cancels_its_requests(client, server):
    async def main():
        task = asyncio.ensure_future(client.agenerate(["s"] * 4, max_tokens=1500))
        while load(server).running_requests < 4:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    wait_until(lambda: is_idle(server), timeout=2)


def test_a_handle_gives_events_result_and_cancels(client):
    handle = client.submit("c", max_tokens=4, temperature=0)
    assert handle.next_event().text == "d"
    assert handle.result().text == "defg"
    running = client.submit("s", max_tokens=1500)
    running.next_event()
    client.abort(running.request_id)
    assert running.result().finish_reason == "cancelled"


def test_lifecycle_calls_and_subscriptions(client):
    assert client.health(role=EngineRole.AGGREGATED, include_inference_probe=True).state is HealthState.READY
    assert client.load_info(include_per_rank=True).ranks[0].data_parallel_rank == 0
    assert [str(report.state) for report in client.drain_events(stop_accepting_new_requests=False)] == [
        "started",
        "complete",
    ]
    assert client.kv_connector_info() == client.info().kv_connector
    with client.kv_events(include_snapshot=True) as kv, client.runtime_events([RuntimeEventType.QUEUE]) as queue:
        number = next(kv).sequence_number
        client.generate("theclientsownprompt", max_tokens=1)
        assert next(kv).sequence_number == number + 1
        assert next(queue).attributes["action"] == "enqueue"
