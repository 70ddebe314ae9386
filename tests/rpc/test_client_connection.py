"""The client's connection: paths that die, servers that are replaced, limits of time, and what each is told as."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from openengine import InternalError, InvalidArgument, TokenizerChanged, Unreachable, UnsupportedFeature
from openengine.rpc import Client
from openengine.rpc.connection import Link
from tests.rpc.paths import informant, proxy_to
from tests.rpc.serving import ServerProcess, is_idle
from tests.waiting import wait_until

CHAT = [{"role": "user", "content": "c"}]
FOREVER = {"max_tokens": 1500, "temperature": 0}


@pytest.fixture(scope="module")
def other_server(tmp_path_factory):
    """The scripted model with the ids of two letters exchanged, under the same name."""
    directory = tmp_path_factory.mktemp("other")
    process = ServerProcess("-m", "tests.rpc.other_server", str(directory))
    yield process
    assert process.stop() == 0, process.errors[-20:]


# ---- dead paths ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["generation", "subscription", "unary"])
def test_a_path_that_goes_silent_ends_what_waits_for_it(server, kind):
    with proxy_to(server.target) as proxy, Client(proxy.address, keepalive_s=1.0) as client:
        calls = {
            "generation": lambda handle=client.submit("s", **FOREVER): handle.result(30),
            "subscription": lambda events=client.kv_events(): [next(events) for _ in range(10_000)],
            "unary": client.health,
        }
        proxy.is_frozen = True
        start = time.monotonic()
        with pytest.raises(Unreachable, match="gave no sign of life"):
            calls[kind]()
        assert time.monotonic() - start < 10


def test_timeout_s_bounds_the_acceptance_of_a_stream_too(server):
    with proxy_to(server.target) as proxy, Client(proxy.address, timeout_s=0.5, keepalive_s=None) as client:
        proxy.is_frozen = True
        for call in (
            client.health,
            lambda: client.generate("c", max_tokens=1),
            lambda: asyncio.run(client.agenerate("c", max_tokens=1)),
            client.kv_events,
            lambda: client.drain(stop_accepting_new_requests=False),
            lambda: client.tokenize("c"),
        ):
            start = time.monotonic()
            with pytest.raises(Unreachable, match=r"within timeout_s=0\.5: .* Client\(timeout_s=…\)") as caught:
                call()
            assert caught.value.retryable and time.monotonic() - start < 5


def test_timeout_s_bounds_no_stream_that_was_accepted(server):
    with Client(server.target, timeout_s=0.5) as client:
        handle = client.submit("s", max_tokens=200, temperature=0)  # 4 ms a token
        assert handle.result(30).usage.completion_tokens == 200


def test_keepalive_pings_on_a_silent_subscription_are_answered(server):
    with Client(server.target, keepalive_s=1.2) as client, client.kv_events() as events:
        deadline = time.monotonic() + 6  # five pings; a server with gRPC's defaults refuses the fourth
        while time.monotonic() < deadline:
            assert events.poll() is None
            time.sleep(0.05)
        assert client._connection.link.num_losses == 0


def test_a_connection_that_breaks_is_said_to_have_been_there(server):
    with proxy_to(server.target) as proxy, Client(proxy.address) as client:
        handle, events = client.submit("s", **FOREVER), client.runtime_events()
        handle.next_event()
        proxy.drop()
        for wait in (lambda: handle.result(30), lambda: [None for _ in events]):
            with pytest.raises(Unreachable, match="lost before the call had ended") as caught:
                wait()
            assert "check the address" not in caught.value.message
        assert client.generate("c", max_tokens=2, temperature=0).text == "de"  # a new one is made


@pytest.mark.parametrize("name", ["timeout_s", "keepalive_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "2", True])
def test_a_limit_that_is_no_time_is_refused(name, value):
    with pytest.raises(InvalidArgument, match=f"{name} is a number of seconds above 0"):
        Client("127.0.0.1:1", **{name: value})


# ---- who is at the other end ---------------------------------------------------------------------


def test_eng_12_a_server_that_was_replaced_is_checked_before_the_next_call(server):
    with (
        informant(schema_revision=2) as newer,
        proxy_to(server.target) as proxy,
        Client(proxy.address) as client,
    ):
        client.health()
        proxy.target = newer
        proxy.drop()
        wait_for_loss(client)
        for call in (client.health, lambda: client.generate("c", max_tokens=1), client.kv_events):
            with pytest.raises(UnsupportedFeature, match="speaks revision 2"):
                call()
        proxy.target = server.target
        proxy.drop()
        wait_for_loss(client)
        assert client.health().state == "ready"


def test_a_chat_is_made_with_the_tokenizer_of_the_server_that_is_there(server, other_server):
    with proxy_to(server.target) as proxy, Client(proxy.address, model="scripted") as client:
        assert client.apply_chat_template(CHAT, chat_template="{{ messages[0].content }}") == [3]
        first = client.tokenizer_service.local()
        assert client.tokenizer_service.local() is first
        proxy.target = other_server.target
        proxy.drop()
        wait_for_loss(client)
        assert client.apply_chat_template(CHAT, chat_template="{{ messages[0].content }}") == [4]
        assert client.tokenizer_service.local() is not first


def test_the_tokenizer_files_are_kept_while_a_restart_changes_none(server):
    with proxy_to(server.target) as proxy, Client(proxy.address) as client:
        first = client.tokenizer_service.local()
        proxy.drop()
        wait_for_loss(client)
        client.health()
        assert client.tokenizer_service.local() is first


def test_ids_of_one_tokenizer_are_not_sent_to_a_server_with_another(server, other_server):
    with proxy_to(server.target) as proxy, Client(proxy.address, model="scripted") as client:
        options = {"template_kwargs": {"chat_template": "{{ messages[0].content }}"}}
        requests, ids, options = client._requests.with_messages(None, CHAT, options)
        assert requests.admit(requests.one(ids, None, {"max_tokens": 1})).result().finish_reason == "length"
        proxy.target = other_server.target
        proxy.drop()
        wait_for_loss(client)
        with pytest.raises(TokenizerChanged, match="make the call again with its messages"):
            requests.admit(requests.one(ids, None, {"max_tokens": 1}))
        requests, ids, _ = client._requests.with_messages(None, CHAT, {"template_kwargs": {"chat_template": "c"}})
        assert requests.admit(requests.one(ids, None, {"max_tokens": 1})).result().finish_reason == "length"


def test_a_loss_is_counted_once():
    link = Link()
    for is_ready in (False, True, True, False, False, True, False):
        link.see(is_ready=is_ready)
    assert link.num_losses == 2


def test_eng_07_a_server_without_models_is_refused_by_name():
    with informant(supported_models=[]) as target:
        with pytest.raises(InternalError, match=r"names no models.*Client\(model=…\)"):
            Client(target)
        with Client(target, model="mine") as client:
            assert client.model_info().model_id == "mine"


def test_an_empty_model_is_not_the_servers_first(server):
    with pytest.raises(InvalidArgument, match="model is '', which names none"):
        Client(server.target, model="")
    with Client(server.target) as client:
        for call in (
            lambda: client.health(model=""),
            lambda: asyncio.run(client.ahealth(model="")),
            lambda: client.model_info(""),
            lambda: client.generate("c", model=""),
            lambda: client.tokenizer_service.info(model=""),
        ):
            with pytest.raises(InvalidArgument, match="model is"):
                call()


def wait_for_loss(client: Client) -> None:
    """Until the channel has heard that its connection is gone: who asks a moment before speaks to nobody."""

    async def lost() -> None:
        while client._connection._channel.get_state().name == "READY":
            await asyncio.sleep(0.002)

    client._connection.run(asyncio.wait_for(lost(), 10))


# ---- the end of a client, and forks --------------------------------------------------------------


def test_closing_while_calls_run_ends_them_as_cancelled_and_prints_nothing(server):
    code = """
import asyncio, sys, threading, time
from openengine import Cancelled, PreconditionFailed
from openengine.rpc import Client

async def ask(client):
    try:
        while True:
            await client.agenerate("s", max_tokens=1500, temperature=0)
    except (Cancelled, PreconditionFailed) as exc:
        return type(exc).__name__

for turn in range(8):
    client = Client(sys.argv[1])
    handles = [client.submit("s", max_tokens=1500, temperature=0) for _ in range(3)]
    ends = []
    thread = threading.Thread(target=lambda: ends.append(asyncio.run(ask(client))))
    thread.start()
    time.sleep(0.02 * (turn % 4))
    client.close()
    thread.join()
    assert ends and all(handle.done for handle in handles), (ends, handles)
    with Client(sys.argv[1]) as client:
        for event in client.stream("s", max_tokens=1500, temperature=0):
            break
"""
    done = subprocess.run([sys.executable, "-c", code, server.target], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    wait_until(lambda: is_idle(server))


@pytest.mark.parametrize("state", ["open", "closed"])
def test_a_forked_child_is_told_to_be_spawned_instead(server, state):
    code = """
import os, sys
from openengine import PreconditionFailed
from openengine.rpc import Client

client = Client(sys.argv[1])
client.generate("c", max_tokens=1)
if sys.argv[2] == "closed":
    client.close()
child = os.fork()
if child == 0:
    for make in (lambda: client.health(), lambda: Client(sys.argv[1])):
        try:
            make()
        except PreconditionFailed as exc:
            if "'spawn'" not in exc.message:
                os._exit(2)
        else:
            os._exit(1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
with Client(sys.argv[1]) as other:
    other.generate("c", max_tokens=1)
"""
    command = [sys.executable, "-c", code, server.target, state]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.soak
def test_a_server_that_comes_back_is_found_within_seconds(tmp_path):
    process = ServerProcess("-m", "tests.rpc.scripted_server", str(tmp_path))
    with Client(process.target, timeout_s=5) as client:
        assert client.generate("c", max_tokens=1)
        process.stop()
        start = time.monotonic()
        while time.monotonic() - start < 30:  # gRPC would try less and less often
            with pytest.raises(Unreachable):
                client.health()
            time.sleep(0.2)
        again = ServerProcess("-m", "tests.rpc.scripted_server", str(tmp_path), f"port={process.port}")
        wait_until(lambda: reached(client), 5)
        again.stop()


def reached(client):
    try:
        return client.load_info() is not None
    except Unreachable:
        return False
