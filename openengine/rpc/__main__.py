"""`python -m openengine.rpc --model PATH_OR_ID`: load one model and serve it over gRPC.

Owns signals, what is printed and exit codes. Prints `listening on HOST:PORT` on standard output when it is ready.

    0  SIGTERM or SIGINT: at once while loading, after draining once it serves       1  a second signal
    2  a bad flag, model, file or port: one line says which
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from openengine.rpc.server import ServerOptions

__all__ = ["main"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; returns the exit code."""
    # Before anything else: what is imported below takes seconds, and a signal may come in the first one.
    before = {number: signal.signal(number, _leave) for number in _SIGNALS}
    try:
        return _run(argv)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(argv: Sequence[str] | None) -> int:
    import asyncio

    from openengine import OpenEngineError

    try:
        from openengine.rpc import command

        args = command.parse(argv)
        command.start_logging(args.log_level)
        engine_options, options = command.engine_options(args), command.server_options(args)
        return asyncio.run(_serve(args, engine_options, options))
    except OpenEngineError as exc:
        print(f"openengine.rpc: error: {' '.join(exc.message.split())}", file=sys.stderr)
        return 2


async def _serve(args: argparse.Namespace, engine_options: dict[str, object], options: ServerOptions) -> int:
    import asyncio
    import logging

    from openengine import Engine, OpenEngineError
    from openengine.hosts import with_port
    from openengine.rpc.server import serve

    log = logging.getLogger("openengine.rpc")
    stop, is_serving = asyncio.Event(), False

    def on_signal(number: int) -> None:
        if not is_serving:
            _leave(number)
        if stop.is_set():
            os._exit(1)
        stop.set()

    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    # In a thread, so that a signal is heard whatever the loading is doing.
    engine = await asyncio.to_thread(Engine, args.model_path, progress=False, **engine_options)
    try:
        server = await serve(engine, options)
    except OpenEngineError:
        engine.close()
        raise
    is_serving = True
    print(f"listening on {with_port(options.host, server.port)}", flush=True)
    if server.metrics_port is not None:
        log.info("metrics on http://%s/metrics", with_port(options.host, server.metrics_port))
    await stop.wait()
    log.info("draining for up to %g s", args.drain_timeout_s)
    await server.stop(args.drain_timeout_s)
    return 0


def _leave(number: int, _frame: object = None) -> NoReturn:
    """Nothing was accepted yet, so nothing is waited for: a thread that loads could not be stopped anyway."""
    os.write(2, f"openengine.rpc: stopped by {signal.Signals(number).name} before it was ready\n".encode())
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
