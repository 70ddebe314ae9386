"""The cost of the wire: `batch64` and the time to first token, in process and over gRPC, with the same model and options.

    python -m tests.bench.wire --model PATH [--threads N] [--repeat N]

Server and client are two processes; the in-process runs come in between, so that both see the same machine. Prints one
JSON line. Does not belong to `python -m tests.bench`, which needs no gRPC.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import grpc

from openengine import Engine
from openengine.rpc import openengine_pb2 as pb
from openengine.rpc import openengine_pb2_grpc
from tests.bench import workload
from tests.bench.arguments import at_least, num_threads
from tests.bench.workload import Request

__all__ = ["main"]

_OPTIONS = {"max_num_seqs": 64, "max_model_len": 512}
_NUM_FIRST_TOKENS = 10


def main(argv: Sequence[str] | None = None) -> int:
    from tests.rpc.serving import running

    parser = argparse.ArgumentParser(prog="python -m tests.bench.wire", allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=num_threads, default=1)
    parser.add_argument("--repeat", type=at_least(1), default=3)
    args = parser.parse_args(argv)
    options = {**_OPTIONS, "num_threads": args.threads}
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    seconds: dict[str, list[float]] = {"local": [], "remote": []}
    first: dict[str, list[float]] = {"local": [], "remote": []}
    with running("-m", "openengine.rpc", "--model", args.model, "--port", "0", *flags) as server:
        with Engine(args.model, progress=False, **options) as engine:
            sides: dict[str, Callable[[list[Request]], tuple[float, float]]] = {
                "local": lambda requests: asyncio.run(_local(engine, requests)),
                "remote": lambda requests: asyncio.run(_remote(server.target, args.model, requests)),
            }
            for run in range(args.repeat + 1):
                for side, measure in sides.items():
                    requests = workload.distinct(workload.make("batch64", 40_000), run, 40_000)
                    taken, _ = measure(requests)
                    single = [Request(requests[0].token_ids[:32], 2)]
                    singles = [
                        measure(workload.distinct(single, 1000 * run + i, 40_000))[1] for i in range(_NUM_FIRST_TOKENS)
                    ]
                    if run:  # the first warms up
                        seconds[side].append(taken)
                        first[side] += singles
    num_tokens = sum(request.max_tokens for request in workload.make("batch64", 40_000))
    rate = {side: num_tokens / statistics.median(values) for side, values in seconds.items()}
    first_ms = {side: 1000 * statistics.median(values) for side, values in first.items()}
    result = {"out_tok_s": rate, "ratio": rate["remote"] / rate["local"], "first_token_ms": first_ms}
    print(json.dumps({**result, "first_token_cost_ms": first_ms["remote"] - first_ms["local"]}))
    return 0


async def _local(engine: Engine, requests: Sequence[Request]) -> tuple[float, float]:
    async def one(request: Request) -> float:
        began, first = time.perf_counter(), 0.0
        options = {"max_tokens": request.max_tokens, "temperature": 0, "ignore_eos": True}
        async for _event in engine.astream(request.token_ids, **options):
            first = first or time.perf_counter() - began
        return first

    start = time.perf_counter()
    firsts = await asyncio.gather(*(one(request) for request in requests))
    return time.perf_counter() - start, firsts[0]


async def _remote(target: str, model: str, requests: Sequence[Request]) -> tuple[float, float]:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = openengine_pb2_grpc.OpenEngineStub(channel)
        await stub.GetEngineInfo(pb.GetEngineInfoRequest())  # a connection that is open, as a client's is

        async def one(index: int, request: Request) -> float:
            message = pb.GenerateRequest(request_id=f"wire-{index}", model=model)
            message.token_ids.ids.extend(request.token_ids)
            message.sampling.temperature = 0
            message.stopping.max_tokens, message.stopping.ignore_eos = request.max_tokens, True
            began, first = time.perf_counter(), 0.0
            call = stub.Generate(message)
            while await call.read() is not grpc.aio.EOF:
                first = first or time.perf_counter() - began
            return first

        start = time.perf_counter()
        firsts = await asyncio.gather(*(one(index, request) for index, request in enumerate(requests)))
        return time.perf_counter() - start, firsts[0]


if __name__ == "__main__":
    sys.exit(main())
