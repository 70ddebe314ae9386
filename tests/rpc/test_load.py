"""Load: many streams, clients that vanish or read slowly, too many requests, huge prompts, garbage; nothing leaks.

`pytest -m soak` runs it for two minutes.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections import Counter
from pathlib import Path

import grpc
import pytest

from openengine.rpc import openengine_pb2 as pb
from openengine.rpc import openengine_pb2_grpc
from tests.rpc.serving import fresh_id, is_idle, load, request, run, running
from tests.waiting import wait_until

_LIMITS = ("max_num_seqs=64", "max_num_batched_tokens=256", "max_queued_requests=150", "num_kv_blocks=4096")


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_200_streams_of_every_kind_of_client_leave_the_server_as_it_was(tmp_path, pytestconfig):
    seconds, flood = (120, 1000) if pytestconfig.option.markexpr == "soak" else (2, 300)
    with running("-m", "tests.rpc.scripted_server", str(tmp_path), *_LIMITS) as server:
        asyncio.run(_traffic(server, min(seconds, 10) / 2, flood))  # pools and caches have their size
        wait_until(lambda: is_idle(server))
        before = _resident(server)
        ends = asyncio.run(_traffic(server, seconds, flood))
        assert ends["OK"] and ends["vanished"] and ends["RESOURCE_EXHAUSTED"] and ends["INVALID_ARGUMENT"], ends
        assert set(ends) <= {"OK", "vanished", "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "garbage"}, ends
        wait_until(lambda: is_idle(server))
        assert load(server).used_kv_blocks == 0
        assert _resident(server) < before + (160 << 20), "memory stays flat, but for what threads keep of a huge prompt"
        assert run(server.stub, _message("c")).text == "defg", "the ids may be used again"
        assert server.process.poll() is None


def test_mutated_requests_get_a_status_or_one_terminal_event_and_leave_nothing(server):
    rng = random.Random(4)
    ends: Counter[str] = Counter()

    async def send(call) -> None:
        try:
            if rng.random() < 0.2:
                call.cancel()
            num_last = 0
            while (data := await call.read()) is not grpc.aio.EOF:
                assert not num_last, "nothing follows the last event"
                num_last += pb.GenerateResponse.FromString(data).HasField("usage")
            assert num_last == 1
            ends["OK"] += 1
        except asyncio.CancelledError:
            ends["CANCELLED"] += 1
        except grpc.RpcError as exc:
            ends[exc.code().name] += 1

    async def main() -> None:
        async with grpc.aio.insecure_channel(server.target) as channel:
            generate = channel.unary_stream("/openengine.v1.OpenEngine/Generate")
            for _ in range(25):
                timeouts = [rng.choice([0.001, 0.02, 1, 1]) for _ in range(16)]
                await asyncio.gather(*(send(generate(_mutated(rng), timeout=timeout)) for timeout in timeouts))

    num_lines = len(server.errors)
    asyncio.run(main())
    assert {"OK", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED"} <= set(ends), ends
    assert not {"UNKNOWN", "INTERNAL", "UNAVAILABLE"} & set(ends), ends
    wait_until(lambda: is_idle(server))
    assert load(server).used_kv_blocks == 0 and "".join(server.errors[num_lines:]) == ""


def _mutated(rng: random.Random) -> bytes:
    """A request with bytes changed, added and lost, and fields that nobody knows."""
    data = bytearray(_message(rng.choice("cseuh"), max_tokens=rng.randrange(50)).SerializeToString())
    for _ in range(rng.randrange(4)):
        change = rng.randrange(4)
        if change == 0:
            data[rng.randrange(len(data))] = rng.randrange(256)
        elif change == 1:
            data += rng.randbytes(rng.randrange(8))
        elif change == 2:
            data += b"\xa2\x06\x03abc"  # field 100, of three bytes
        else:
            del data[rng.randrange(len(data)) + 1 :]
    return bytes(data)


async def _traffic(server, seconds: float, flood: int) -> Counter[str]:
    ends: Counter[str] = Counter()
    until = time.monotonic() + seconds
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = openengine_pb2_grpc.OpenEngineStub(channel)
        clients = [_client(stub, server.port, random.Random(i), until, ends) for i in range(200)]
        await asyncio.gather(*clients, _follow(stub, _message("word " * 2_000_000), ends))
        # More at once than running and queued ones may be: what is accepted ends, what is refused says so.
        await asyncio.gather(*(_follow(stub, _message("s", max_tokens=2), ends) for _ in range(flood)))
    return ends


async def _client(stub, port: int, rng: random.Random, until: float, ends: Counter[str]) -> None:
    while time.monotonic() < until:
        kind = rng.choices(["plain", "vanishing", "slow", "huge", "garbage"], [80, 10, 10, 0.05, 1])[0]
        if kind == "garbage":
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(rng.randbytes(300))
            ends["garbage"] += 1
        elif kind == "huge":
            await _follow(stub, _message("word " * 2_000_000), ends)
        elif kind == "vanishing":
            call = stub.Generate(_message("s", max_tokens=500))
            try:
                await call.read()
            except grpc.RpcError as exc:
                ends[exc.code().name] += 1
            else:
                call.cancel()
                ends["vanished"] += 1
        else:
            message = _message(rng.choice("cde"), max_tokens=rng.randrange(1, 60))
            await _follow(stub, message, ends, delay_s=0.01 if kind == "slow" else 0)


async def _follow(stub, message: pb.GenerateRequest, ends: Counter[str], delay_s: float = 0) -> None:
    last = None
    try:
        async for response in stub.Generate(message):
            assert last is None or last.WhichOneof("event") != "finished", "nothing follows the last event"
            last = response
            if delay_s:
                await asyncio.sleep(delay_s)
    except grpc.RpcError as exc:
        assert last is None, "a refused request has no event"
        ends[exc.code().name] += 1
        return
    assert last.WhichOneof("event") == "finished" and last.HasField("usage"), "exactly one terminal event"
    ends["OK"] += 1


def _message(prompt: str, **options) -> pb.GenerateRequest:
    return request(prompt, request_id=fresh_id("load"), **options)


def _resident(server) -> int:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096
