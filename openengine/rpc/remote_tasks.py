"""`RemoteTasks`: embed, classify and score at a server, for a `Client`: lists of any length in, one response out.

The twin of `Tasks` in process: one input gives its output. Of a long list a few requests are under way at a time, their responses are joined in order.
Owns splitting and joining; does not own the connection (connection.py), nor what an option means.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from openengine import (
    Cancelled,
    ClassifyRequest,
    EmbedRequest,
    InternalError,
    InvalidArgument,
    ScoreGroup,
    ScoreRequest,
    ScoreResponse,
    TaskRequestContext,
    TokenizeOptions,
    UnsupportedFeature,
)
from openengine.names import check_request_id
from openengine.progress import progress_bar
from openengine.rpc.connection import Connection, outcome
from openengine.rpc.convert import from_proto, to_proto
from openengine.rpc.remote_tokenizer import RemoteTokenizerService
from openengine.task_options import LocalOptions, build_classify, build_embed, build_score
from openengine.task_results import TaskResponse, TaskResult, total_usage
from openengine.task_types import TaskRequest

__all__ = ["RemoteCall", "RemoteTasks"]

_WINDOW = 4  # requests of one call under way
_MAX_ITEMS = 256  # of one request
_MAX_CHARS = 1 << 18
# Of options that the contract has no field for.
_INSTEAD = {
    "truncate": "a server cuts no text, and refuses one that is too long; shorten it, or give the first of its tokenize(text)",
    "prompt": "the contract has no field for it; write it before each text yourself",
    "prompt_name": "the contract has no field for it; write the model's prompt of that name before each text yourself",
}


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """The requests of a call. `is_single`: it has one input, outside a list."""

    requests: list[TaskRequest]
    is_single: bool = False


class RemoteTasks:
    """Requests for `model` at the server of `connection`; `tokenizer` knows the ids of labels."""

    def __init__(self, connection: Connection, tokenizer: RemoteTokenizerService, model: str) -> None:
        self._connection = connection
        self._tokenizer = tokenizer
        self._model = model

    def embed(self, inputs: Any, options: dict[str, Any]) -> RemoteCall:
        request, local = build_embed(inputs, options)
        _refuse_local(local)
        return RemoteCall(self._named(request, request is inputs), local.is_single)

    def classify(self, inputs: Any, options: dict[str, Any]) -> RemoteCall:
        request, local = build_classify(inputs, options)
        _refuse_local(local)
        return RemoteCall(self._named(request, request is inputs), local.is_single)

    def score(self, query: Any, candidates: Any, options: dict[str, Any]) -> RemoteCall:
        request, local = build_score(query, candidates, options)
        _refuse_local(local)
        if local.labels:
            label_ids = tuple(map(self._label_id, local.labels))
            request = replace(request, options=replace(request.options, label_token_ids=label_ids))
        return RemoteCall(self._named(request, request is query))

    def run(self, call: RemoteCall, progress: bool | None) -> TaskResult:
        """Run the requests of a call and join their responses. An interrupt cancels them."""
        pending: deque[Future[Any]] = deque()
        responses: list[TaskResponse] = []
        todo, total = iter(call.requests), len(call.requests)
        with progress_bar(progress if total > 1 else False, total=total, desc="tasks", unit="req") as bar:
            try:
                while len(responses) < total:
                    for request in _take(todo, _WINDOW - len(pending)):
                        pending.append(self._start(request))
                    responses.append(from_proto(pending[0].result()))
                    pending.popleft()
                    bar(len(responses), total)
            except CancelledError:
                raise Cancelled("the client was closed") from None
            finally:
                for future in pending:
                    future.cancel()
        return _result(call, responses)

    async def arun(self, call: RemoteCall) -> TaskResult:
        """`run` for an event loop. Cancelling the task cancels the requests."""
        pending: deque[Future[Any]] = deque()
        responses: list[TaskResponse] = []
        todo = iter(call.requests)
        try:
            while len(responses) < len(call.requests):
                for request in _take(todo, _WINDOW - len(pending)):
                    pending.append(self._start(request))
                responses.append(from_proto(await outcome(pending[0])))
                pending.popleft()
        finally:
            for future in pending:
                future.cancel()
        return _result(call, responses)

    def _start(self, request: TaskRequest) -> Future[Any]:
        stub = self._connection.stub
        method = {EmbedRequest: stub.Embed, ClassifyRequest: stub.Classify, ScoreRequest: stub.Score}[type(request)]
        return self._connection.start(self._connection.answer(method, to_proto(request)))

    def _named(self, request: TaskRequest, is_one: bool) -> list[Any]:
        """Requests with ids of their own and the model's name. One of the contract, or with an id, is not split."""
        context = request.context
        if not isinstance(context, TaskRequestContext):
            raise InvalidArgument(f"context must be a TaskRequestContext, not {context!r:.80}")
        is_one = is_one or context.request_id is not None
        parts = [request] if is_one else _parts(request)
        model = self._model if context.model is None else context.model
        request_id = context.request_id
        check_request_id(request_id)
        return [
            replace(part, context=replace(context, request_id=request_id or str(uuid.uuid4()), model=model))
            for part in parts
        ]

    def _label_id(self, label: str) -> int:
        ids = self._tokenizer.tokenize(label, TokenizeOptions(add_special_tokens=False)).token_ids
        if len(ids) != 1:
            raise InvalidArgument(
                f"label {label!r:.80} is {len(ids)} tokens, and a label must be one; try it with or without a space before it, "
                "or give label_token_ids"
            )
        return ids[0]


def _refuse_local(local: LocalOptions) -> None:
    given = {"truncate": local.truncate != "error", "prompt": local.prompt, "prompt_name": local.prompt_name}
    for name, value in given.items():
        if value:
            raise UnsupportedFeature(f"{name}: {_INSTEAD[name]}; an Engine in process has {name}")


# ---- splitting and joining -----------------------------------------------------------------------


def _take(items: Iterator[Any], count: int) -> Iterator[Any]:
    for _ in range(count):
        try:
            yield next(items)
        except StopIteration:
            return


def _parts(request: TaskRequest) -> list[TaskRequest]:
    if not isinstance(request, ScoreRequest):
        return [replace(request, inputs=inputs) for inputs in _runs(request.inputs)]
    pairs = [(group, candidate) for group in request.groups for candidate in group.candidates]
    parts = []
    for run in _runs(pairs, content=lambda pair: pair[1]):
        groups: list[ScoreGroup] = []
        for group, candidate in run:
            if groups and groups[-1].group_id == group.group_id:
                groups[-1] = replace(groups[-1], candidates=(*groups[-1].candidates, candidate))
            else:
                groups.append(replace(group, candidates=(candidate,)))
        parts.append(replace(request, groups=tuple(groups)))
    return parts


def _runs(items: Sequence[Any], *, content: Callable[[Any], Any] = lambda item: item) -> list[tuple[Any, ...]]:
    """Neighbouring items, in parts of bounded size; one empty part of no items, which the server refuses."""
    parts, part, chars = [], [], 0
    for item in items:
        value = content(item)
        chars += len(value.text) if isinstance(value.text, str) else 8
        part.append(item)
        if len(part) == _MAX_ITEMS or chars >= _MAX_CHARS:
            parts.append(tuple(part))
            part, chars = [], 0
    return [*parts, tuple(part)] if part or not parts else parts


def _result(call: RemoteCall, responses: Sequence[TaskResponse]) -> TaskResult:
    response = _joined(responses)
    if not call.is_single:
        return response
    if len(response) != 1:
        raise InternalError(f"the server gave {len(response)} outputs for one input")
    return response[0]


def _joined(responses: Sequence[TaskResponse]) -> TaskResponse:
    first = responses[0]
    if len(responses) == 1:
        return first
    usage = total_usage([response.usage for response in responses if response.usage is not None])
    if isinstance(first, ScoreResponse):
        return replace(first, groups=_joined_groups(responses), usage=usage)
    outputs = chain.from_iterable(response.outputs for response in responses)
    numbered = tuple(replace(output, input_index=index) for index, output in enumerate(outputs))
    return replace(first, outputs=numbered, usage=usage)


def _joined_groups(responses: Sequence[ScoreResponse]) -> tuple[Any, ...]:
    groups: list[Any] = []
    for group in chain.from_iterable(response.groups for response in responses):
        if groups and groups[-1].group_id == group.group_id:
            groups[-1] = replace(groups[-1], candidates=(*groups[-1].candidates, *group.candidates))
        else:
            groups.append(replace(group, group_index=len(groups)))
    return tuple(
        replace(group, candidates=tuple(replace(c, candidate_index=i) for i, c in enumerate(group.candidates)))
        for group in groups
    )
