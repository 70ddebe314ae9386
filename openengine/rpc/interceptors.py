"""What a server does to every call before a servicer sees it: the bearer token, and requests that are no message.

Owns no policy about requests that can be read (servicer.py).
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from openengine.rpc.calls import Unreadable

__all__ = ["BearerToken", "ReadableRequests"]

_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]]


class BearerToken(grpc.aio.ServerInterceptor):
    """Refuses calls without `token`, but those of the services in `open_services`, which have no place for one."""

    def __init__(self, token: str, *, open_services: tuple[str, ...]) -> None:
        self._expected = f"Bearer {token}".encode()
        self._open = tuple(f"/{name}/" for name in open_services)
        self._refusal = grpc.unary_unary_rpc_method_handler(_refuse_unauthenticated)

    async def intercept_service(
        self, continuation: _Continuation, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        given = [value for key, value in details.invocation_metadata or () if key == "authorization"]
        value = given[0] if len(given) == 1 else ""
        value = value.encode() if isinstance(value, str) else value
        if hmac.compare_digest(value, self._expected) or details.method.startswith(self._open):
            return await continuation(details)
        return self._refusal


class ReadableRequests(grpc.aio.ServerInterceptor):
    """Hands bytes that are no message to the servicers of `services` as such; gRPC alone would answer UNKNOWN."""

    def __init__(self, services: tuple[str, ...]) -> None:
        self._services = tuple(f"/{name}/" for name in services)

    async def intercept_service(
        self, continuation: _Continuation, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(self._services) or handler.request_deserializer is None:
            return handler
        make, behaviour = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        if handler.response_streaming:
            make, behaviour = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        return make(
            behaviour,
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as exc:
            return Unreadable(str(exc))

    return read


async def _refuse_unauthenticated(request: bytes, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "send the server's token as `authorization: Bearer <token>`")
