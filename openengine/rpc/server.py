"""`serve`: one engine on one port: the contract's service, the tokenizer service, health, reflection and metrics.

Owns the socket, credentials, limits and the order of a shutdown:

    stop()  health says NOT_SERVING → engine drains, within a limit → engine closes, which ends subscriptions → socket closes

Does not own signals, flags or printing (__main__.py) nor what calls mean (servicer.py).
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from openengine import Engine, InvalidArgument
from openengine.rpc import openengine_pb2 as pb
from openengine.rpc import openengine_pb2_grpc, tokenizer_pb2_grpc
from openengine.rpc import tokenizer_pb2 as tokenizer_pb
from openengine.rpc.interceptors import BearerToken, ReadableRequests
from openengine.rpc.metrics import Metrics
from openengine.rpc.servicer import OpenEngineServicer
from openengine.rpc.tokenizer_servicer import OpenEngineTokenizerServicer

__all__ = ["Server", "ServerOptions", "is_wildcard", "serve"]

_NUM_THREADS = 8  # each may keep the memory of the largest prompt it has tokenized
_GRACE_S = 2.0  # for the last messages to reach their clients
_PING_MS, _PING_TIMEOUT_MS = 30_000, 10_000
_SERVICES = (
    pb.DESCRIPTOR.services_by_name["OpenEngine"].full_name,
    tokenizer_pb.DESCRIPTOR.services_by_name["OpenEngineTokenizer"].full_name,
)
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How one server listens.

    host, port: where; port 0 picks one.  advertise_host: what discovery names, None is `host`; a wildcard needs it.
    tls_cert, tls_key: PEM; both or none.  tls_client_ca: PEM, clients must show a certificate of it.
    token: what clients send as `authorization: Bearer <token>`; health checks need none.
    max_message_bytes: of a request or response.  max_concurrent_rpcs: beyond it calls get RESOURCE_EXHAUSTED; None is no
    limit.  metrics_port: where Prometheus scrapes, on `host`; 0 picks one, None serves no metrics.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    advertise_host: str | None = None
    tls_cert: bytes | None = None
    tls_key: bytes | None = None
    tls_client_ca: bytes | None = None
    token: str | None = None
    max_message_bytes: int = 64 << 20
    max_concurrent_rpcs: int | None = None
    metrics_port: int | None = None

    def __post_init__(self) -> None:
        if is_wildcard(self.host) and not self.advertise_host:
            raise InvalidArgument(f"host {self.host!r} is a wildcard; say with advertise_host what others connect to")
        if is_wildcard(self.advertise_host or self.host):
            raise InvalidArgument(f"advertise_host {self.advertise_host!r} is a wildcard; give a name others can reach")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidArgument("TLS takes a certificate and its key; give both or none")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidArgument("a client CA needs TLS; give a certificate and its key too")
        if self.token is not None and not (self.token and self.token.isascii() and self.token.isprintable()):
            raise InvalidArgument("the token is empty or has characters that a header cannot carry")
        for name, low, high in (("port", 0, 65535), ("metrics_port", 0, 65535), ("max_concurrent_rpcs", 1, 2**31 - 1)):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InvalidArgument(f"{name} must be between {low} and {high}, not {value}")
        if not 1 << 16 <= self.max_message_bytes < 2**31:
            raise InvalidArgument(
                f"max_message_bytes must be between 65536 and 2147483647, not {self.max_message_bytes}"
            )


def is_wildcard(host: str) -> bool:
    """Whether nobody can connect to `host`, which only says where to listen."""
    return host in ("", "*", "0.0.0.0", "::", "[::]")


async def serve(engine: Engine, options: ServerOptions = ServerOptions()) -> Server:
    """Start a server for `engine`, which it closes when it stops. It answers when this returns.

    Raises InvalidArgument when the port is taken or the certificate is none.
    """
    server = Server(engine, options)
    await server.start()
    return server


class Server:
    """A running server; `port` and `metrics_port` are the actual ones. Use it from one event loop."""

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self._engine = engine
        self._options = options
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="openengine-rpc")
        self._health = health_aio.HealthServicer()
        self._metrics = Metrics(engine) if options.metrics_port is not None else None
        self._metrics_server: Any = None
        self._server = grpc.aio.server(
            interceptors=self._interceptors(options.token),
            options=(
                ("grpc.so_reuseport", 0),  # a port in use is an error
                ("grpc.max_receive_message_length", options.max_message_bytes),
                ("grpc.max_send_message_length", options.max_message_bytes),
                # A client whose machine is gone says nothing: its requests end when it answers no ping.
                ("grpc.keepalive_time_ms", _PING_MS),
                ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
            ),
            maximum_concurrent_rpcs=options.max_concurrent_rpcs,
        )
        self.port = 0
        self.metrics_port: int | None = None

    async def start(self) -> None:
        server, engine, options = self._server, self._engine, self._options
        self.port = self._bind()
        engine.advertise(options.advertise_host or options.host, self.port)
        servicer = OpenEngineServicer(
            engine,
            self._threads,
            max_message_bytes=options.max_message_bytes,
            metrics=self._metrics,
            on_stop_accepting=self._health.enter_graceful_shutdown,
        )
        openengine_pb2_grpc.add_OpenEngineServicer_to_server(servicer, server)
        tokenizer_pb2_grpc.add_OpenEngineTokenizerServicer_to_server(
            OpenEngineTokenizerServicer(engine, self._threads), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*_SERVICES, _HEALTH, reflection.SERVICE_NAME), server)
        for name in ("", *_SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._start_metrics()
        await server.start()

    async def stop(self, drain_s: float | None = None) -> None:
        """Refuse new requests, let the accepted ones finish for up to `drain_s` seconds (None: as long as they take),
        cancel the rest, close the engine and the socket."""
        await self._health.enter_graceful_shutdown()
        deadline_ms = None if drain_s is None else int(drain_s * 1000)
        event_loop = asyncio.get_running_loop()
        drain = self._engine.drain
        try:
            await event_loop.run_in_executor(
                None, lambda: drain(deadline_ms=deadline_ms, abort_after_deadline=deadline_ms is not None)
            )
            # The streams have their last events; closing the engine ends subscriptions.
            stopped = asyncio.ensure_future(self._server.stop(_GRACE_S))
            await event_loop.run_in_executor(None, self._engine.close)
            await stopped
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)
            if self._metrics_server is not None:
                self._metrics_server.shutdown()
                self._metrics_server.server_close()

    def _interceptors(self, token: str | None) -> tuple[grpc.aio.ServerInterceptor, ...]:
        readable = ReadableRequests(_SERVICES)
        return (readable,) if token is None else (BearerToken(token, open_services=(_HEALTH,)), readable)

    def _bind(self) -> int:
        options = self._options
        host = f"[{options.host}]" if ":" in options.host and not options.host.startswith("[") else options.host
        address = f"{host}:{options.port}"
        try:
            if options.tls_cert is None:
                port = self._server.add_insecure_port(address)
            else:
                credentials = grpc.ssl_server_credentials(
                    [(options.tls_key, options.tls_cert)],
                    root_certificates=options.tls_client_ca,
                    require_client_auth=options.tls_client_ca is not None,
                )
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as exc:
            raise InvalidArgument(
                f"cannot listen on {address}: {exc}; is the port in use, or the certificate no PEM?"
            ) from exc
        if not port:
            raise InvalidArgument(f"cannot listen on {address}; is the port in use?")
        return port

    def _start_metrics(self) -> None:
        if self._metrics is None:
            return
        from prometheus_client import start_http_server

        options = self._options
        try:
            self._metrics_server, _ = start_http_server(options.metrics_port, options.host, self._metrics.registry)
        except OSError as exc:
            raise InvalidArgument(f"cannot serve metrics on {options.host}:{options.metrics_port}: {exc}") from exc
        self.metrics_port = self._metrics_server.server_port
