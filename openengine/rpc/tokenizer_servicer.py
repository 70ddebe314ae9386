"""`OpenEngineTokenizerServicer`: the tokenizer service over an `Engine`: convert in, one call, convert out.

Everything that reads a text or makes a file runs in a worker thread, so that a long one holds up no stream. There are few of
them, apart from those of generation: a tokenizer takes much memory for a long text, and threads beside it slow each other.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from google.protobuf.message import Message

from openengine import Engine, InvalidArgument
from openengine.rpc import tokenizer_pb2 as pb
from openengine.rpc import tokenizer_pb2_grpc
from openengine.rpc.calls import Context, MessageLimit, WorkLimit, refuse_errors
from openengine.rpc.convert import arguments, from_proto, to_proto
from openengine.rpc.errors import ACCEPTED_HEADERS
from openengine.rpc.workers import Workers

__all__ = ["OpenEngineTokenizerServicer"]

_NUM_THREADS = 2
_CHUNK_HEADER_BYTES = 4096  # of a chunk beside its data, at the most: a name, two digests, offsets


class OpenEngineTokenizerServicer(tokenizer_pb2_grpc.OpenEngineTokenizerServicer):
    """Serves the tokenizer of `engine` within the limits `work` and `messages`."""

    def __init__(self, engine: Engine, work: WorkLimit, messages: MessageLimit) -> None:
        self._service = engine.tokenizer_service
        self._max_input_bytes = self._service.max_input_bytes  # now: it takes a moment to find
        self._work = work
        self._messages = messages
        self._threads = Workers(_NUM_THREADS, "openengine-tokenizer")

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    @refuse_errors
    async def GetTokenizerInfo(self, request: pb.GetTokenizerInfoRequest, context: Context) -> pb.TokenizerInfo:
        return await self._call(self._service.info, request)

    @refuse_errors
    async def GetTokenizerArtifacts(self, request: pb.GetTokenizerArtifactsRequest, context: Context) -> None:
        self._work.enter()
        chunks = await self._threads.run(self._artifacts, request)
        await context.send_initial_metadata(ACCEPTED_HEADERS)
        for chunk in chunks:
            await context.write(to_proto(chunk))

    def _artifacts(self, request: pb.GetTokenizerArtifactsRequest) -> Any:
        options = self._read(request)
        most = self._messages.max_bytes - _CHUNK_HEADER_BYTES
        wanted = options.pop("max_chunk_bytes", most)
        return self._service.artifacts(max_chunk_bytes=min(wanted, most), **options)

    @refuse_errors
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        self._refuse_long(request, request.text if request.HasField("text") else None, ())
        self._work.enter()
        return await self._call(lambda text=None, **options: self._service.tokenize(text, **options), request)

    @refuse_errors
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        self._refuse_long(request, None, request.token_ids)
        self._work.enter()
        return await self._call(self._service.detokenize, request)

    @refuse_errors
    async def GetCacheKeySpec(self, request: pb.GetCacheKeySpecRequest, context: Context) -> pb.CacheKeySpec:
        return await self._call(self._service.cache_key_spec, request)

    @refuse_errors
    async def ComputeCacheKeys(
        self, request: pb.ComputeCacheKeysRequest, context: Context
    ) -> pb.ComputeCacheKeysResponse:
        self._refuse_long(request, request.text if request.HasField("text") else None, request.tokens.ids)
        self._work.enter()
        return await self._call(self._service.cache_keys, request)

    def _refuse_long(self, request: Any, text: str | None, token_ids: Sized) -> None:
        """Before it waits for a thread: what is too long would only keep its memory meanwhile."""
        if request.ByteSize() > self._max_input_bytes:
            self._service.check_model(request.model)
            self._service.check_num_tokens(len(token_ids))
            if text is not None:
                self._service.check_text(text)

    async def _call(self, function: Any, request: Message) -> Message:
        return await self._threads.run(lambda: self._messages.checked(to_proto(function(**self._read(request)))))

    def _read(self, request: Any) -> dict[str, Any]:
        try:
            return arguments(from_proto(request))
        except InvalidArgument:
            self._service.check_model(request.model)  # which comes before a field that is wrong
            raise
