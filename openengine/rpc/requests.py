"""`Requests`: what a client does to a prompt before it is a call: templates, names, checks that need no model, sending.

The twin of what `Engine` does before its loop. Owns no connection (connection.py) and no stream (remote.py).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from openengine import GenerateRequest, GenerationResult, Handle, OpenEngineError, SamplingParams
from openengine.batches import check_on_error, failed_item
from openengine.names import check_request_id, check_unrepeated
from openengine.options import batch_prompts, build_one, request_id_of, take_chat_options
from openengine.rpc.connection import Connection
from openengine.rpc.convert import to_proto
from openengine.rpc.remote import Starting
from openengine.rpc.remote_tokenizer import RemoteTokenizerService
from openengine.validation import validate_request

__all__ = ["Item", "Requests"]

Item = GenerateRequest | GenerationResult


class Requests:
    """Requests for `model` at the server of `connection`; `tokenizer` renders chats.

    `fingerprint`: of the tokenizer that made their prompts into ids, which no server with another one may be sent.
    """

    def __init__(
        self, connection: Connection, tokenizer: RemoteTokenizerService, model: str, fingerprint: str | None = None
    ) -> None:
        self._connection = connection
        self._tokenizer = tokenizer
        self._model = model
        self._fingerprint = fingerprint

    def with_messages(
        self, prompt: Any, messages: Sequence[Any] | None, options: dict[str, Any]
    ) -> tuple[Requests, Any, dict[str, Any]]:
        """What makes the request, its prompt, which is the rendered chat where there are `messages`, and its options."""
        tools, template_kwargs = take_chat_options(prompt, messages, options)
        if messages is None:
            return self, prompt, options
        tokenizer, fingerprint = self._tokenizer.local_with_fingerprint()
        requests = Requests(self._connection, self._tokenizer, self._model, fingerprint)
        return requests, tokenizer.encode_chat(messages, tools=tools, **template_kwargs), options

    async def awith_messages(
        self, prompt: Any, messages: Sequence[Any] | None, options: dict[str, Any]
    ) -> tuple[Requests, Any, dict[str, Any]]:
        """`with_messages` for an event loop."""
        return await asyncio.to_thread(self.with_messages, prompt, messages, options)

    def one(self, prompt: Any, sampling: SamplingParams | None, options: dict[str, Any]) -> GenerateRequest:
        """The request of one prompt, checked as far as that needs no model."""
        request = build_one(prompt, sampling, options)
        validate_request(request)
        request = replace(
            request,
            request_id=str(uuid.uuid4()) if request.request_id is None else request.request_id,
            model=self._model if request.model is None else request.model,
        )
        check_request_id(request.request_id)
        return request

    def batch(
        self, prompts: Iterable[Any], sampling: SamplingParams | None, on_error: str, options: dict[str, Any]
    ) -> list[Item]:
        """Every item checked before anything runs; a bad one is a result with its error, or raised, naming its index."""
        check_on_error(on_error)
        prompts = batch_prompts(prompts, sampling, options)
        items: list[Item] = []
        request_ids: set[str] = set()
        for index, prompt in enumerate(prompts):
            try:
                request = self.one(prompt, sampling, options)
                to_proto(request)  # what does not fit the wire
                check_unrepeated(request.request_id, request_ids)
                request_ids.add(request.request_id)
                items.append(request)
            except OpenEngineError as exc:
                request_id = request_id_of(prompt, options)
                items.append(failed_item(exc, request_id, index=index, total=len(prompts), on_error=on_error))
        return items

    def admit(self, request: GenerateRequest, *, keep_events: bool = False, wait: bool = False) -> Handle:
        """Send a request and wait until the server has accepted it, with `wait` also for room in its queue."""
        return self.start(request, keep_events=keep_events, wait=wait).result()

    async def aadmit(self, request: GenerateRequest, *, keep_events: bool = False, wait: bool = False) -> Handle:
        """`admit` for an event loop."""
        return await self.start(request, keep_events=keep_events, wait=wait).aresult()

    def start(self, request: GenerateRequest, *, keep_events: bool = False, wait: bool = False) -> Starting:
        """`admit`, without waiting."""
        check = None if self._fingerprint is None else partial(self._tokenizer.check, self._fingerprint)
        return Starting(self._connection, request, keep_events=keep_events, wait=wait, check=check)
