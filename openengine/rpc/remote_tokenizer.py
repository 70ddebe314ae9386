"""`RemoteTokenizerService`: a server's tokenizer with the methods of `TokenizerService`, and its files rebuilt here.

Owns: one method per call, the check of size and digest before a file is used, and whether the tokenizer here is still the
server's. Does not own the connection.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openengine import (
    CacheKeySpec,
    ComputeCacheKeysRequest,
    ComputeCacheKeysResponse,
    DetokenizeOptions,
    DetokenizeRequest,
    DetokenizeResponse,
    GetCacheKeySpecRequest,
    GetTokenizerArtifactsRequest,
    GetTokenizerInfoRequest,
    InternalError,
    InvalidArgument,
    TokenizeOptions,
    TokenizerArtifactChunk,
    TokenizerChanged,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
    load_tokenizer,
)
from openengine.rpc.connection import Connection
from openengine.rpc.convert import from_proto, to_proto
from openengine.rpc.remote import RemoteStream

__all__ = ["RemoteTokenizerService"]


class RemoteTokenizerService:
    """The tokenizer of `model` at a server; what a method means is said at the one of `TokenizerService` with its name."""

    def __init__(self, connection: Connection, model: str) -> None:
        self._connection = connection
        self._stub = connection.tokenizer_stub
        self._model = model
        self._lock = threading.Lock()
        self._local: tuple[Any, str] | None = None  # a tokenizer and its fingerprint
        self._of_server: tuple[str, str] | None = None  # an instance and the fingerprint of its tokenizer

    def info(self, *, model: str | None = None) -> TokenizerInfo:
        return self._call(self._stub.GetTokenizerInfo, GetTokenizerInfoRequest(model=self._name(model)))

    def artifacts(
        self, *, names: Sequence[str] = (), model: str | None = None, **options: Any
    ) -> RemoteStream[TokenizerArtifactChunk]:
        if isinstance(names, str):
            raise InvalidArgument(f"names must be a sequence of artifact names, not {names!r:.80}")
        request = GetTokenizerArtifactsRequest(model=self._name(model), names=tuple(names), **options)
        return RemoteStream(self._connection, self._stub.GetTokenizerArtifacts, request)

    def tokenize(
        self, text: str | None, options: TokenizeOptions = TokenizeOptions(), *, model: str | None = None, **more: Any
    ) -> TokenizeResponse:
        request = TokenizeRequest(model=self._name(model), text=text, options=options, **more)
        return self._call(self._stub.Tokenize, request)

    def detokenize(
        self,
        token_ids: Sequence[int],
        options: DetokenizeOptions = DetokenizeOptions(),
        *,
        model: str | None = None,
        **more: Any,
    ) -> DetokenizeResponse:
        request = DetokenizeRequest(model=self._name(model), token_ids=tuple(token_ids), options=options, **more)
        return self._call(self._stub.Detokenize, request)

    def cache_key_spec(self, *, model: str | None = None) -> CacheKeySpec:
        return self._call(self._stub.GetCacheKeySpec, GetCacheKeySpecRequest(model=self._name(model)))

    def cache_keys(self, *, model: str | None = None, **options: Any) -> ComputeCacheKeysResponse:
        request = ComputeCacheKeysRequest(model=self._name(model), **options)
        return self._call(self._stub.ComputeCacheKeys, request)

    def local(self) -> Any:
        """The same tokenizer in this process, built from the server's files; they are fetched once for each tokenizer.

        Raises InternalError for a file that is not what the server announced.
        """
        return self.local_with_fingerprint()[0]

    def local_with_fingerprint(self) -> tuple[Any, str]:
        """`local`, and what `check` knows it by."""
        with self._lock:
            fingerprint = self._connection.run(self._fingerprint())
            if self._local is None or self._local[1] != fingerprint:
                with tempfile.TemporaryDirectory(prefix="openengine-tokenizer-") as directory:
                    fingerprint = self._fetch(Path(directory))
                    self._local = load_tokenizer(directory), fingerprint
            return self._local

    async def check(self, fingerprint: str) -> None:
        """Raises TokenizerChanged when the server that is there now has another tokenizer. In the connection's event loop."""
        if await self._fingerprint() != fingerprint:
            raise TokenizerChanged(
                "the server was replaced, by one with another tokenizer, after this prompt was made into token ids, which "
                "mean something else there; make the call again with its messages"
            )

    async def _fingerprint(self) -> str:
        """The fingerprint of the server's tokenizer, asked for once of each server that is met."""
        server = await self._connection.meet()
        if self._of_server is None or self._of_server[0] != server.instance_id:
            message = to_proto(GetTokenizerInfoRequest(model=self._model))
            info = from_proto(await self._connection.answer(self._stub.GetTokenizerInfo, message))
            self._of_server = server.instance_id, info.fingerprint
        return self._of_server[1]

    def _fetch(self, directory: Path) -> str:
        """Write the tokenizer's files; returns their fingerprint."""
        info = self.info()
        contents = {artifact.name: bytearray() for artifact in info.artifacts}
        with self.artifacts(expected_fingerprint=info.fingerprint) as chunks:
            for chunk in chunks:
                contents[chunk.name] += chunk.data
        for artifact in info.artifacts:
            data = contents[artifact.name]
            if len(data) != artifact.total_size or hashlib.sha256(data).hexdigest() != artifact.sha256:
                raise InternalError(
                    f"the tokenizer's file {artifact.name!r:.80} arrived with {len(data)} bytes and another digest than the server "
                    f"announced for its {artifact.total_size} bytes; fetch it again"
                )
            # A plain name: a path would leave the directory.
            if Path(artifact.name).name != artifact.name:
                raise InternalError(f"the server names a file {artifact.name!r:.80}, which is no plain name")
            (directory / artifact.name).write_bytes(data)
        return info.fingerprint

    def _name(self, model: str | None) -> str:
        return self._model if model is None else model

    def _call(self, method: Any, request: Any) -> Any:
        return self._connection.unary(method, request)
