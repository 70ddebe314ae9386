"""One scripted server for the tests that leave it as they found it."""

from __future__ import annotations

import pytest

pytest.importorskip("grpc", reason="needs grpcio, of the extra rpc")
pytest.importorskip("grpc_health", reason="needs grpcio-health-checking, of the extra rpc")

from tests.rpc.serving import ServerProcess


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    process = ServerProcess("-m", "tests.rpc.scripted_server", str(tmp_path_factory.mktemp("scripted")))
    yield process
    assert process.stop() == 0, process.errors[-20:]


@pytest.fixture(scope="session")
def stub(server):
    return server.stub
