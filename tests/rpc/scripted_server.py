"""Serves a scripted model, whose first prompt token says what it does: `python -m tests.rpc.scripted_server DIR [OPTION=VALUE]`,
an option being one of the engine or of the server.

c  counts: the next letter of the alphabet     s  counts, slowly      e  counts three letters, then EOS
u  "é", whose two bytes are two tokens         n  no numbers          any other: something that depends on all tokens
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path

from openengine.rpc import ServerOptions, serve
from tests.scripted import hashed, scripted_engine

VOCABULARY = ["<eos>", *"abcdefghijklmnopqrstuvwxyz", " ", b"\xc3", b"\xa9", ".", "\n"]
VOCAB_SIZE = len(VOCABULARY)
EOS = 0
STEP_S = 0.004
ENGINE = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_queued_requests": 16,
    "num_kv_blocks": 1024,
    "context": 2048,
    "aliases": ("alias-1", "alias-2"),
    "served_model_name": "served",
}
_hashed = hashed(VOCAB_SIZE)


def script(history: tuple[int, ...]) -> list[float]:
    kind, last = VOCABULARY[history[0]], history[-1]
    if kind == "s":
        time.sleep(STEP_S)
    if kind == "n":
        return [float("nan")] * VOCAB_SIZE
    if kind == "u":
        wanted = 29 if last == 28 else 28
    elif kind in "cse":
        wanted = last % 26 + 1
        if kind == "e" and len(history) >= 4:
            wanted = EOS
    else:
        return _hashed(history)
    return [30.0 if token == wanted else -0.05 * token for token in range(VOCAB_SIZE)]


async def main(directory: str, *changes: str) -> None:
    options, server_options = dict(ENGINE), {"port": 0}
    for change in changes:
        name, value = change.split("=", 1)
        where = server_options if name in ServerOptions.__dataclass_fields__ else options
        where[name] = json.loads(value)
    engine = scripted_engine(Path(directory), script, VOCABULARY, eos_token_ids=(EOS,), **options)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = await serve(engine, ServerOptions(**server_options))
    print(f"listening on 127.0.0.1:{server.port}", flush=True)
    if server.metrics_port is not None:
        print(f"metrics on http://127.0.0.1:{server.metrics_port}/metrics", file=sys.stderr, flush=True)
    await stop.wait()
    await server.stop(20.0)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
