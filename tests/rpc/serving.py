"""Starting servers in processes of their own, and small words for calling them."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from openengine.rpc import openengine_pb2 as pb
from openengine.rpc import openengine_pb2_grpc, tokenizer_pb2_grpc

ROOT = Path(__file__).parents[2]
_START_S = 60
_ids = itertools.count()


class ServerProcess:
    """A server in a process of its own, started with `python ARGS`; `port` is what it prints."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *args],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        for stream, take in ((self.process.stdout, self._lines.put), (self.process.stderr, self.errors.append)):
            threading.Thread(target=_read, args=(stream, take), daemon=True).start()
        self.port = self._port()
        self.target = f"127.0.0.1:{self.port}"
        self.channel = grpc.insecure_channel(self.target, options=[("grpc.max_receive_message_length", -1)])
        self.stub = openengine_pb2_grpc.OpenEngineStub(self.channel)
        self.tokenizer = tokenizer_pb2_grpc.OpenEngineTokenizerStub(self.channel)

    def _port(self) -> int:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=0.2)
                if line.startswith("listening on "):
                    return int(line.rsplit(":", 1)[1])
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}: {self.errors[-20:]}"
        raise TimeoutError("the server did not listen in time")

    def stop(self, timeout: float = 30) -> int:
        """SIGTERM; returns the exit code."""
        self.channel.close()
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(timeout)
        finally:
            self.process.kill()


def _read(stream: Any, take: Callable[[str], None]) -> None:
    for line in stream:
        take(line)


@contextlib.contextmanager
def running(*args: str) -> Iterator[ServerProcess]:
    server = ServerProcess(*args)
    try:
        yield server
    finally:
        server.process.kill()
        server.channel.close()


def fresh_id(prefix: str = "r") -> str:
    return f"{prefix}-{os.getpid()}-{next(_ids)}"


def request(prompt: Any = "c", *, max_tokens: int | None = 4, **fields: Any) -> pb.GenerateRequest:
    """A request of the scripted model; keywords name fields, those of an option group as `group__field`."""
    message = pb.GenerateRequest(
        request_id=fields.pop("request_id", None) or fresh_id(), model=fields.pop("model", "scripted")
    )
    if isinstance(prompt, str):
        message.prompt = prompt
    elif prompt is not None:
        message.token_ids.ids.extend(prompt)
    if max_tokens is not None:
        message.stopping.max_tokens = max_tokens
    for name, value in fields.items():
        target = message
        *groups, last = name.split("__")
        for group in groups:
            target = getattr(target, group)
        if isinstance(value, (list, tuple)):
            getattr(target, last).extend(value)
        elif isinstance(value, dict):
            getattr(target, last).update(value)
        elif hasattr(value, "CopyFrom"):
            getattr(target, last).CopyFrom(value)
        else:
            setattr(target, last, value)
    return message


def run(stub: Any, message: pb.GenerateRequest, **options: Any) -> SimpleNamespace:
    """The whole stream of a request, and what its outputs are joined."""
    responses = list(stub.Generate(message, timeout=60, **options))
    tokens = [response.token for response in responses if response.WhichOneof("event") == "token"]
    finished = [response.finished for response in responses if response.WhichOneof("event") == "finished"]
    texts: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    for output in tokens:
        texts[output.output_index] = texts.get(output.output_index, "") + output.text
        ids.setdefault(output.output_index, []).extend(token.token_id for token in output.tokens)
    infos = [info for output in tokens for info in output.tokens]
    prompt = next((r.prompt for r in responses if r.WhichOneof("event") == "prompt"), None)
    return SimpleNamespace(
        responses=responses,
        tokens=tokens,
        finished=finished,
        text=texts.get(0, ""),
        texts=texts,
        ids=ids.get(0, []),
        all_ids=ids,
        infos=infos,
        prompt=prompt,
        usage=responses[-1].usage if responses else None,
    )


def status(call: Callable[[], Any]) -> grpc.StatusCode:
    """The status that refuses `call`, which must not answer a single message."""
    messages: list[Any] = []
    with pytest.raises(grpc.RpcError) as caught:
        answer = call()
        messages += answer if hasattr(answer, "__next__") else [answer]
    assert not messages, "ERR-01: a refused call has no messages"
    return caught.value.code()


def health_of(channel: grpc.Channel, service: str = "") -> int:
    """What the standard health service says: 1 is SERVING, 2 NOT_SERVING."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service)).status


def load(server: Any) -> pb.LoadInfo:
    return server.stub.GetLoad(pb.GetLoadRequest())


def is_idle(server: Any) -> bool:
    info = load(server)
    return info.running_requests == info.queued_requests == info.used_kv_blocks == 0
