"""`python -m openengine.rpc --model PATH_OR_ID`: load one model and serve it over gRPC.

Owns flags, log lines, signals and exit codes. Prints `listening on HOST:PORT` on standard output when it is ready.

    0  SIGTERM or SIGINT: at once while loading, after draining once it serves       1  a second signal
    2  a bad flag, model, file or port: one line says which
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from openengine import EngineConfig, InvalidArgument, OpenEngineError, SamplingParams

if TYPE_CHECKING:
    from openengine.rpc.server import ServerOptions

__all__ = ["main"]

_DRAIN_S = 30.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LEVELS = ("debug", "info", "warning", "error")
# What a flag's value is read as; the annotation of the field in `EngineConfig` decides.
_KINDS = {
    "int": int,
    "int | None": int,
    "float": float,
    "float | None": float,
    "str": str,
    "str | None": str,
    "EngineRole": str,
}
_RENAMED = {"model_path": "model", "aliases": "alias"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_complain(f"{message}; see --help"))


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; returns the exit code."""
    args = _parser().parse_args(argv)
    _start_logging(args.log_level)
    before = {number: signal.signal(number, _leave) for number in _SIGNALS}
    try:
        options = _server_options(args)
        _check_port(options)
        return asyncio.run(_serve(args, options))
    except OpenEngineError as exc:
        return _complain(exc.message)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _serve(args: argparse.Namespace, options: ServerOptions) -> int:
    from openengine import Engine
    from openengine.rpc.server import serve

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
    engine = await asyncio.to_thread(Engine, args.model_path, progress=False, **_engine_options(args))
    try:
        server = await serve(engine, options)
    except OpenEngineError:
        engine.close()
        raise
    is_serving = True
    print(f"listening on {options.host}:{server.port}", flush=True)
    if server.metrics_port is not None:
        logging.getLogger("openengine.rpc").info("metrics on http://%s:%d/metrics", options.host, server.metrics_port)
    await stop.wait()
    logging.getLogger("openengine.rpc").info("draining for up to %g s", args.drain_timeout_s)
    await server.stop(args.drain_timeout_s)
    return 0


def _leave(number: int, _frame: object = None) -> NoReturn:
    """Nothing was accepted yet, so nothing is waited for: a thread that loads could not be stopped anyway."""
    os.write(2, f"openengine.rpc: stopped by {signal.Signals(number).name} before it was ready\n".encode())
    os._exit(0)


# ---- flags ---------------------------------------------------------------------------------------


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m openengine.rpc", description="Serve a language model over gRPC.", allow_abbrev=False
    )
    _add_server_flags(parser.add_argument_group("server"))
    engine = parser.add_argument_group("engine", "fields of EngineConfig; see its documentation for what they mean")
    for field in dataclasses.fields(EngineConfig):
        _add_engine_flag(engine, field)
    return parser


def _add_server_flags(group: Any) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=50051, help="port to listen on, 0 picks one (default: 50051)")
    add("--advertise-host", metavar="HOST", help="what discovery names; needed when --host is a wildcard")
    add("--tls-cert", type=Path, metavar="FILE", help="PEM certificate chain")
    add("--tls-key", type=Path, metavar="FILE", help="PEM key of the certificate")
    add("--tls-client-ca", type=Path, metavar="FILE", help="PEM certificates that clients' must be signed by")
    add("--token-file", type=Path, metavar="FILE", help="file with the bearer token that clients must send")
    add("--max-message-bytes", type=int, default=64 << 20, metavar="N", help="largest message (default: 64 MiB)")
    add("--max-concurrent-rpcs", type=int, metavar="N", help="calls at a time (default: no limit)")
    add("--metrics-port", type=int, metavar="N", help="serve Prometheus metrics there, 0 picks one (default: none)")
    add(
        "--drain-timeout-s",
        type=float,
        default=_DRAIN_S,
        metavar="S",
        help="for accepted requests at SIGTERM (default: 30)",
    )
    add("--log-level", choices=_LEVELS, default="info", help="lines of JSON on standard error (default: info)")


def _add_engine_flag(group: Any, field: dataclasses.Field) -> None:
    name = "--" + _RENAMED.get(field.name, field.name).replace("_", "-")
    shown = "" if field.default in (dataclasses.MISSING, None, ()) else f"default: {field.default}"
    if field.name == "model_path":
        group.add_argument(
            name, dest=field.name, required=True, metavar="PATH_OR_ID", help="a directory, .gguf file or hub id"
        )
    elif field.type == "bool":
        group.add_argument(
            name, dest=field.name, action=argparse.BooleanOptionalAction, default=field.default, help=shown
        )
    elif field.name == "aliases":
        group.add_argument(
            name, dest=field.name, action="append", default=[], metavar="NAME", help="a further name; may be repeated"
        )
    elif field.name == "default_sampling":
        group.add_argument(name, dest=field.name, metavar="JSON", help="such as '{\"temperature\": 0.7}'")
    else:
        metavar = field.type.split(" ")[0].upper()
        group.add_argument(
            name, dest=field.name, type=_KINDS[field.type], default=field.default, metavar=metavar, help=shown
        )


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    options = {name: getattr(args, name) for name in EngineConfig.field_names() if name != "model_path"}
    options["aliases"] = tuple(args.aliases)
    options["default_sampling"] = _sampling(args.default_sampling)
    return options


def _sampling(text: str | None) -> SamplingParams:
    try:
        return SamplingParams(**json.loads(text or "{}"))
    except (TypeError, ValueError) as exc:
        raise InvalidArgument(f"--default-sampling {text!r:.80} is no JSON object of sampling fields: {exc}") from exc


def _server_options(args: argparse.Namespace) -> ServerOptions:
    from openengine.rpc.server import ServerOptions  # it brings torch and grpc, which take a while

    if args.drain_timeout_s < 0:
        raise InvalidArgument(f"--drain-timeout-s must be at least 0, not {args.drain_timeout_s}")
    token = _read(args.token_file)
    return ServerOptions(
        host=args.host,
        port=args.port,
        advertise_host=args.advertise_host,
        tls_cert=_read(args.tls_cert),
        tls_key=_read(args.tls_key),
        tls_client_ca=_read(args.tls_client_ca),
        token=None if token is None else token.decode("utf-8", "replace").strip(),
        max_message_bytes=args.max_message_bytes,
        max_concurrent_rpcs=args.max_concurrent_rpcs,
        metrics_port=args.metrics_port,
    )


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as exc:
        raise InvalidArgument(f"cannot read {path}: {exc.strerror}") from exc


def _check_port(options: ServerOptions) -> None:
    """Find a taken port before the model is loaded; binding it later decides."""
    if not options.port:
        return
    host = options.host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, options.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as exc:
        raise InvalidArgument(f"cannot listen on {options.host}:{options.port}: {exc.strerror}") from exc


# ---- output --------------------------------------------------------------------------------------


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _start_logging(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _complain(message: str) -> int:
    print(f"openengine.rpc: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
