"""`Requests`: what a client does to a prompt before it is a call: templates, names, checks that need no model, sending.

The twin of what `Engine` does before its loop. Owns no connection (connection.py) and no stream (remote.py).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from openengine import (
    DuplicateRequest,
    GenerateRequest,
    GenerationResult,
    Handle,
    InvalidArgument,
    OpenEngineError,
    SamplingParams,
)
from openengine.batches import check_on_error, failed, named_item
from openengine.options import (
    batch_items,
    build_request,
    check_options,
    is_single_prompt,
    request_id_of,
    take_chat_options,
)
from openengine.rpc.connection import Connection
from openengine.rpc.convert import to_proto
from openengine.rpc.remote import Starting
from openengine.rpc.remote_tokenizer import RemoteTokenizerService
from openengine.types import validate_request

__all__ = ["Requests"]

Item = GenerateRequest | GenerationResult


class Requests:
    """Requests for `model` at the server of `connection`; `tokenizer` renders chats."""

    def __init__(self, connection: Connection, tokenizer: RemoteTokenizerService, model: str) -> None:
        self._connection = connection
        self._tokenizer = tokenizer
        self._model = model

    def with_messages(
        self, prompt: Any, messages: Sequence[Any] | None, options: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """The prompt, which is the rendered chat where there are `messages`, and the options left for the request."""
        tools, template_kwargs = take_chat_options(prompt, messages, options)
        if messages is None:
            return prompt, options
        return self._tokenizer.local().encode_chat(messages, tools=tools, **template_kwargs), options

    def one(self, prompt: Any, sampling: SamplingParams | None, options: dict[str, Any]) -> GenerateRequest:
        """The request of one prompt, checked as far as that needs no model."""
        if not is_single_prompt(prompt):
            raise InvalidArgument("this takes one prompt; use generate or as_completed for a batch")
        request = build_request(prompt, sampling, options)
        validate_request(request)
        request = replace(
            request,
            request_id=str(uuid.uuid4()) if request.request_id is None else request.request_id,
            model=self._model if request.model is None else request.model,
        )
        if not request.request_id:
            raise InvalidArgument("request_id is empty; leave it out to get a fresh one")
        return request

    def batch(
        self, prompts: Iterable[Any], sampling: SamplingParams | None, on_error: str, options: dict[str, Any]
    ) -> list[Item]:
        """Every item checked before anything runs; a bad one is a result with its error, or raised, naming its index."""
        check_on_error(on_error)
        check_options(sampling, options)
        prompts = batch_items(prompts)
        if options.get("request_id") is not None and len(prompts) != 1:
            raise InvalidArgument(f"request_id names one request, the batch has {len(prompts)}; use GenerateRequests")
        items: list[Item] = []
        request_ids: set[str] = set()
        for index, prompt in enumerate(prompts):
            try:
                request = self.one(prompt, sampling, options)
                to_proto(request)  # what does not fit the wire
                if request.request_id in request_ids:
                    raise DuplicateRequest(
                        f"request_id {request.request_id!r:.80} is used by an earlier item; give each item its own"
                    )
                request_ids.add(request.request_id)
                items.append(request)
            except OpenEngineError as exc:
                if on_error == "raise":
                    raise named_item(exc, index, len(prompts)) from exc
                items.append(failed(request_id_of(prompt, options), exc))
        return items

    def admit(self, request: GenerateRequest, *, keep_events: bool = False, wait: bool = False) -> Handle:
        """Send a request and wait until the server has accepted it, with `wait` also for room in its queue."""
        return self.start(request, keep_events=keep_events, wait=wait).result()

    def start(self, request: GenerateRequest, *, keep_events: bool = False, wait: bool = False) -> Starting:
        """`admit`, without waiting."""
        return Starting(self._connection, request, keep_events=keep_events, wait=wait)
