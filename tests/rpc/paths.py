"""What can lie between a client and a server, and servers that answer no more than who they are."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from openengine.rpc import openengine_pb2 as pb
from openengine.rpc import openengine_pb2_grpc

INFO = {
    "engine_name": "other",
    "engine_version": "1",
    "role": pb.ENGINE_ROLE_AGGREGATED,
    "instance_id": "other",
    "supported_models": ["scripted"],
    "schema_revision": 1,
    "minimum_client_revision": 1,
    "schema_release": "d0f29fec31f31db5cfd49cf3e0f67da84d10c709",
}


class Proxy:
    """A port that leads to `target`, which can be changed; its connections can be dropped or frozen."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.is_frozen = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def drop(self) -> None:
        """End every connection; new ones are made."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.is_frozen = False
        self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread that accepts
        self._listener.close()
        self.drop()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            host, port = self.target.split(":")
            try:
                server = socket.create_connection((host, int(port)))
            except OSError:
                client.close()
                continue
            self._sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                while self.is_frozen:
                    time.sleep(0.01)
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxy_to(target: str) -> Iterator[Proxy]:
    proxy = Proxy(target)
    try:
        yield proxy
    finally:
        proxy.close()


class _Informant(openengine_pb2_grpc.OpenEngineServicer):
    def __init__(self, info: dict[str, Any]) -> None:
        self._info = info

    def GetEngineInfo(self, request: Any, context: Any) -> pb.EngineInfo:
        return pb.EngineInfo(**self._info)

    def GetModelInfo(self, request: Any, context: Any) -> pb.ModelInfo:
        return pb.ModelInfo(model_id=request.model, served_model_name=request.model)


@contextlib.contextmanager
def informant(**changes: Any) -> Iterator[str]:
    """The address of a server that says `INFO` with these changes of itself."""
    server = grpc.server(ThreadPoolExecutor(2))
    openengine_pb2_grpc.add_OpenEngineServicer_to_server(_Informant({**INFO, **changes}), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()
