"""`serve`: one engine on one port: the contract's service, the tokenizer service, health, reflection and metrics.

Owns the socket, credentials, limits and the order of a shutdown:

    stop()  health says NOT_SERVING → engine drains, within a limit → what it gave is delivered, within the rest of it
            → engine closes, which ends subscriptions → socket closes

Does not own signals, flags or printing (__main__.py, command.py) nor what calls mean (servicer.py).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection, reflection_pb2

from openengine import Engine, InvalidArgument
from openengine.hosts import bare_host, check_host, check_reachable, is_wildcard, with_port
from openengine.rpc import openengine_pb2 as pb
from openengine.rpc import openengine_pb2_grpc, tokenizer_pb2_grpc
from openengine.rpc import tokenizer_pb2 as tokenizer_pb
from openengine.rpc.calls import MessageLimit, WorkLimit
from openengine.rpc.interceptors import BearerToken, ReadableRequests
from openengine.rpc.metrics import Metrics
from openengine.rpc.servicer import OpenEngineServicer
from openengine.rpc.tokenizer_servicer import OpenEngineTokenizerServicer
from openengine.rpc.workers import in_own_thread

__all__ = ["Server", "ServerOptions", "check_drain_s", "serve"]

_MAX_DRAIN_S = 7 * 24 * 3600.0  # far above any use, and within what counts milliseconds in 32 bits
_GRACE_S = 2.0  # for the last messages to reach their clients
_PING_MS, _PING_TIMEOUT_MS = 30_000, 10_000
_MAX_PENDING = 2**31 - 1  # calls that no handler has taken yet
_MIN_PING_MS = 1000  # between the pings of a client; one that sends them faster is thrown out
_SERVICES = (
    pb.DESCRIPTOR.services_by_name["OpenEngine"].full_name,
    tokenizer_pb.DESCRIPTOR.services_by_name["OpenEngineTokenizer"].full_name,
)
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_REFLECTION = "grpc.reflection.v1.ServerReflection"  # v1alpha's messages, byte for byte, under another name
_RANGES = {
    "port": (0, 65535),
    "metrics_port": (0, 65535),
    "max_concurrent_rpcs": (1, 2**31 - 1),
    "max_message_bytes": (1 << 16, 2**31 - 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How one server listens.

    host, port: where; port 0 picks one.  advertise_host: what discovery names, None is `host`; a wildcard needs it.
    tls_cert, tls_key: PEM; both or none.  tls_client_ca: PEM, clients must show a certificate of it.
    token: what clients send as `authorization: Bearer <token>`; health checks need none.
    max_message_bytes: of a request or response.  max_concurrent_rpcs: calls that infer, tokenize or send files; beyond it
    they get RESOURCE_EXHAUSTED; None is no limit.  metrics_port: where Prometheus scrapes, on `host`; 0 picks one, None
    serves no metrics.
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
        check_host("host", self.host)
        if self.advertise_host is not None:
            check_reachable("advertise_host", self.advertise_host)
        elif is_wildcard(self.host):
            raise InvalidArgument(f"host {self.host!r} is a wildcard; say with advertise_host what others connect to")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidArgument("TLS takes a certificate and its key; give both or none")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidArgument("a client CA needs TLS; give a certificate and its key too")
        if self.token is not None and not (self.token and self.token.isascii() and self.token.isprintable()):
            raise InvalidArgument("the token is empty or has characters that a header cannot carry")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in ("metrics_port", "max_concurrent_rpcs"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise InvalidArgument(f"{name} must be an integer between {low} and {high}, not {value!r:.80}")
        if self.port and self.port == self.metrics_port:
            raise InvalidArgument(f"metrics_port {self.metrics_port} is the port of the service too; give another one")


def check_drain_s(name: str, seconds: float) -> None:
    """Raises InvalidArgument for what is no time to drain in; the error calls it `name`."""
    if not 0 <= seconds <= _MAX_DRAIN_S:  # NaN is not
        raise InvalidArgument(f"{name} must be between 0 and {_MAX_DRAIN_S:.0f} seconds, not {seconds}")


async def serve(engine: Engine, options: ServerOptions = ServerOptions()) -> Server:
    """Start a server for `engine`, which it closes when it stops. It answers when this returns.

    Raises InvalidArgument when the port is taken or the certificate is none.
    """
    server = Server(engine, options)
    try:
        await server.start()
    except BaseException:
        server.release()
        raise
    return server


class Server:
    """A running server; `port` and `metrics_port` are the actual ones. Use it from one event loop."""

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self._engine = engine
        self._options = options
        self._work = WorkLimit(options.max_concurrent_rpcs)
        messages = MessageLimit(options.max_message_bytes)
        self._health = health_aio.HealthServicer()
        self._metrics = Metrics(engine) if options.metrics_port is not None else None
        self._metrics_server: Any = None
        self._servicer = OpenEngineServicer(
            engine,
            self._work,
            messages,
            metrics=self._metrics,
            on_stop_accepting=self._health.enter_graceful_shutdown,
        )
        self._tokenizer = OpenEngineTokenizerServicer(engine, self._work, messages)
        self._server = grpc.aio.server(
            interceptors=self._interceptors(options.token),
            options=(
                ("grpc.so_reuseport", 0),  # a port in use is an error
                # How many may wait is the engine's to say: gRPC would end calls beyond a thousand as CANCELLED.
                ("grpc.server.max_pending_requests", _MAX_PENDING),
                ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
                ("grpc.max_receive_message_length", options.max_message_bytes),
                ("grpc.max_send_message_length", options.max_message_bytes),
                # A client whose machine is gone says nothing: its requests end when it answers no ping.
                ("grpc.keepalive_time_ms", _PING_MS),
                ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
                # Clients ask the same of a server, and a subscription may be silent for hours.
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_MS),
            ),
        )
        self.port = 0
        self.metrics_port: int | None = None

    async def start(self) -> None:
        server, options = self._server, self._options
        self.port = self._bind()
        openengine_pb2_grpc.add_OpenEngineServicer_to_server(self._servicer, server)
        tokenizer_pb2_grpc.add_OpenEngineTokenizerServicer_to_server(self._tokenizer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        _add_reflection(server)
        for name in ("", *_SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._start_metrics()
        self._engine.advertise(options.advertise_host or options.host, self.port)
        await server.start()

    async def stop(self, drain_s: float | None = None) -> None:
        """Refuse new requests, let the accepted ones finish and reach their clients for up to `drain_s` seconds (None: as
        long as they take), cancel the rest, close the engine and the socket.

        Raises InvalidArgument for a `drain_s` that is none, before anything changes.
        """
        if drain_s is not None:
            check_drain_s("drain_s", drain_s)
        deadline = None if drain_s is None else time.monotonic() + drain_s
        await self._health.enter_graceful_shutdown()
        try:
            # In threads of their own: whatever other calls are waiting for, this goes on.
            await in_own_thread("openengine-drain", lambda: self._drain(drain_s))
            await self._work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            # The streams have their last events; closing the engine ends subscriptions.
            stopped = asyncio.ensure_future(self._server.stop(_GRACE_S))
            await in_own_thread("openengine-close", self._engine.close)
            await stopped
        finally:
            self.release()

    def release(self) -> None:
        """End the threads of calls and of metrics; for a server that has not started too."""
        self._servicer.close()
        self._tokenizer.close()
        if self._metrics_server is not None:
            self._metrics_server.shutdown()
            self._metrics_server.server_close()

    def _drain(self, drain_s: float | None) -> None:
        deadline_ms = None if drain_s is None else int(drain_s * 1000)
        self._engine.drain(deadline_ms=deadline_ms, abort_after_deadline=deadline_ms is not None)

    def _interceptors(self, token: str | None) -> tuple[grpc.aio.ServerInterceptor, ...]:
        readable = ReadableRequests(_SERVICES)
        return (readable,) if token is None else (BearerToken(token, open_services=(_HEALTH,)), readable)

    def _bind(self) -> int:
        options = self._options
        address = with_port(options.host, options.port)
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

        host, port = bare_host(self._options.host), self._options.metrics_port
        try:
            self._metrics_server, _ = start_http_server(port, host, self._metrics.registry)
        except OSError as exc:
            raise InvalidArgument(f"cannot serve metrics on {with_port(host, port)}: {exc}") from exc
        self.metrics_port = self._metrics_server.server_port


def _add_reflection(server: grpc.aio.Server) -> None:
    """Reflection as tools ask for it: v1, and v1alpha, which is all that the library names."""
    names = (*_SERVICES, _HEALTH, reflection.SERVICE_NAME)  # whose descriptors can be asked for
    servicer = reflection.aio.ReflectionServicer(names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (_REFLECTION, reflection.SERVICE_NAME):
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}),)
        )
