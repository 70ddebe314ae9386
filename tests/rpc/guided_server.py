"""Serves the model of the guided tests: `python -m tests.rpc.guided_server DIR`."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from openengine.rpc import ServerOptions, serve
from tests.guided_cases import guided_engine


async def main(directory: str) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    engine = guided_engine(Path(directory), guide_timeout_s=2.0)
    server = await serve(engine, ServerOptions(port=0))
    print(f"listening on 127.0.0.1:{server.port}", flush=True)
    await stop.wait()
    await server.stop(20.0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
