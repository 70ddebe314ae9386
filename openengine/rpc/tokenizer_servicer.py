"""`OpenEngineTokenizerServicer`: the tokenizer service over an `Engine`: convert in, one call, convert out.

Everything that reads a text or makes a file runs in a worker thread, so that a long one holds up no stream.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from google.protobuf.message import Message

from openengine import Engine
from openengine.rpc import tokenizer_pb2 as pb
from openengine.rpc import tokenizer_pb2_grpc
from openengine.rpc.convert import arguments, from_proto, to_proto
from openengine.rpc.errors import ACCEPTED_HEADERS
from openengine.rpc.servicer import Context, in_thread, refuse_errors

__all__ = ["OpenEngineTokenizerServicer"]


class OpenEngineTokenizerServicer(tokenizer_pb2_grpc.OpenEngineTokenizerServicer):
    """Serves the tokenizer of `engine`; `threads` run what takes long."""

    def __init__(self, engine: Engine, threads: ThreadPoolExecutor) -> None:
        self._service = engine.tokenizer_service
        self._threads = threads

    @refuse_errors
    async def GetTokenizerInfo(self, request: pb.GetTokenizerInfoRequest, context: Context) -> pb.TokenizerInfo:
        return await self._call(self._service.info, request)

    @refuse_errors
    async def GetTokenizerArtifacts(self, request: pb.GetTokenizerArtifactsRequest, context: Context) -> None:
        chunks = await in_thread(self._threads, lambda: self._service.artifacts(**arguments(from_proto(request))))
        await context.send_initial_metadata(ACCEPTED_HEADERS)
        for chunk in chunks:
            await context.write(to_proto(chunk))

    @refuse_errors
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        return await self._call(lambda text=None, **options: self._service.tokenize(text, **options), request)

    @refuse_errors
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        return await self._call(self._service.detokenize, request)

    @refuse_errors
    async def GetCacheKeySpec(self, request: pb.GetCacheKeySpecRequest, context: Context) -> pb.CacheKeySpec:
        return await self._call(self._service.cache_key_spec, request)

    @refuse_errors
    async def ComputeCacheKeys(
        self, request: pb.ComputeCacheKeysRequest, context: Context
    ) -> pb.ComputeCacheKeysResponse:
        return await self._call(self._service.cache_keys, request)

    async def _call(self, function: Any, request: Message) -> Message:
        return await in_thread(self._threads, lambda: to_proto(function(**arguments(from_proto(request)))))
