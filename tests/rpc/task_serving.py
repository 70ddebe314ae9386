"""Servers of every kind of task model in this process, and small words for their requests."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np

from openengine import (
    Engine,
)
from openengine.rpc import ServerOptions, openengine_pb2_grpc, serve
from openengine.rpc import openengine_pb2 as pb
from tests.rpc.serving import fresh_id, status
from tests.task_models import TEXTS

KINDS = ("embedding", "classifier", "tagger", "cross", "causal", "sparse")
DOES = {
    "embedding": {"Embed"},
    "classifier": {"Classify"},
    "tagger": {"Classify"},
    "cross": {"Classify", "Score"},
    "causal": {"Score"},
    "sparse": {"Embed"},
}
INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECOND = grpc.StatusCode.FAILED_PRECONDITION
EXISTS = grpc.StatusCode.ALREADY_EXISTS
NOT_FOUND = grpc.StatusCode.NOT_FOUND
CANCELLED = grpc.StatusCode.CANCELLED
DENSE, SPARSE = pb.EMBEDDING_ENCODING_DENSE, pb.EMBEDDING_ENCODING_SPARSE
SEQUENCE, TOKEN = pb.TASK_OUTPUT_GRANULARITY_SEQUENCE, pb.TASK_OUTPUT_GRANULARITY_TOKEN
LOGITS, PROBABILITIES, LOG_PROBABILITIES, SIMILARITY = (
    pb.TASK_VALUE_SEMANTICS_LOGITS,
    pb.TASK_VALUE_SEMANTICS_PROBABILITIES,
    pb.TASK_VALUE_SEMANTICS_LOG_PROBABILITIES,
    pb.TASK_VALUE_SEMANTICS_SIMILARITY,
)
LONG = [5] * 120  # tokens
NONE, SOFTMAX = pb.SCORE_NORMALIZATION_NONE, pb.SCORE_NORMALIZATION_SOFTMAX


class Served:
    """One engine behind a server of an event loop in a thread."""

    def __init__(self, engine: Engine, event_loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self._loop = event_loop
        self._server = self._run(serve(engine, ServerOptions(port=0)))
        self.target = f"127.0.0.1:{self._server.port}"
        self.channel = grpc.insecure_channel(self.target, options=[("grpc.max_receive_message_length", -1)])
        self.stub = openengine_pb2_grpc.OpenEngineStub(self.channel)
        self.tasks = self.stub.GetModelInfo(pb.GetModelInfoRequest(model="tiny")).tasks

    def stop(self) -> None:
        self.channel.close()
        self._run(self._server.stop(1.0))
        self.engine.close()

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)


def context(**fields) -> pb.TaskRequestContext:
    return pb.TaskRequestContext(**{"request_id": fresh_id("t"), "model": "tiny", **fields})


def item(content, item_id: str) -> pb.TaskInput:
    if isinstance(content, str):
        return pb.TaskInput(item_id=item_id, text=content)
    return pb.TaskInput(item_id=item_id, token_ids=pb.TokenIds(ids=content))


def items(contents) -> list[pb.TaskInput]:
    return [item(content, f"i{index}") for index, content in enumerate(contents)]


def embed_request(contents=TEXTS, *, who=None, **options) -> pb.EmbedRequest:
    return pb.EmbedRequest(
        context=context(**(who or {})), inputs=items(contents), options=pb.EmbedOptions(**options) if options else None
    )


def classify_request(contents=TEXTS, *, who=None, **options) -> pb.ClassifyRequest:
    return pb.ClassifyRequest(
        context=context(**(who or {})),
        inputs=items(contents),
        options=pb.ClassifyOptions(**options) if options else None,
    )


def group(query, candidates, group_id="g0") -> pb.ScoreGroup:
    return pb.ScoreGroup(group_id=group_id, query=item(query, "q"), candidates=items(candidates))


def score_request(groups=None, *, who=None, **options) -> pb.ScoreRequest:
    return pb.ScoreRequest(
        context=context(**(who or {})),
        groups=[group("how are you", TEXTS)] if groups is None else groups,
        options=pb.ScoreOptions(**options) if options else None,
    )


def simple(task: str, **who):
    """A valid request of `task`, for any model that performs it."""
    if task == "Score":
        return score_request(who=who, label_token_ids=[])
    return {"Embed": embed_request, "Classify": classify_request}[task](who=who)


def call(served: Served, request, **options):
    return getattr(served.stub, type(request).__name__.removesuffix("Request"))(request, timeout=30, **options)


def refused(served: Served, request) -> grpc.StatusCode:
    return status(lambda: call(served, request))


def tensor(dense: pb.DenseFloatTensor) -> np.ndarray:
    """TSK-13: dimensions above 0, as many values as they say, all finite."""
    shape, values = tuple(dense.shape), np.array(dense.values, dtype=np.float32)
    assert shape and min(shape) > 0 and np.prod(shape) == len(values) and np.isfinite(values).all()
    return values.reshape(shape)
