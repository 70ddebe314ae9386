"""Servers for the tests that leave them as they found them: one of a scripted model, one of each kind of task model."""

from __future__ import annotations

import asyncio
import threading

import pytest

pytest.importorskip("grpc", reason="needs grpcio, of the extra rpc")
pytest.importorskip("grpc_health", reason="needs grpcio-health-checking, of the extra rpc")

from openengine import Engine
from tests.rpc.serving import ServerProcess
from tests.rpc.task_serving import KINDS, Served
from tests.task_models import ENGINE_OPTIONS, write_task_model


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    process = ServerProcess("-m", "tests.rpc.scripted_server", str(tmp_path_factory.mktemp("scripted")))
    yield process
    assert process.stop() == 0, process.errors[-20:]


@pytest.fixture(scope="session")
def stub(server):
    return server.stub


@pytest.fixture(scope="session")
def task_servers(tmp_path_factory):
    """By kind of task model: its engine behind a server of this process."""
    root = tmp_path_factory.mktemp("tasks")
    event_loop = asyncio.new_event_loop()
    thread = threading.Thread(target=event_loop.run_forever, daemon=True)
    thread.start()
    found = {}
    for kind in KINDS:
        write_task_model(root / kind, kind)
        engine = Engine(root / kind, served_model_name="tiny", **ENGINE_OPTIONS)
        found[kind] = Served(engine, event_loop)
    yield found
    for served in found.values():
        served.stop()
    event_loop.call_soon_threadsafe(event_loop.stop)
    thread.join(10)


@pytest.fixture
def embedding(task_servers):
    return task_servers["embedding"]


@pytest.fixture
def causal(task_servers):
    return task_servers["causal"]


@pytest.fixture
def cross(task_servers):
    return task_servers["cross"]
