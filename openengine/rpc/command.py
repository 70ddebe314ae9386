"""The command line's flags, what is found wrong with them before a model is loaded, and its log lines.

Owns names, ranges and files of flags. Does not own signals, printing and exit codes (__main__.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import socket
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from openengine import EngineConfig, InvalidArgument, SamplingParams
from openengine.hosts import bare_host, with_port
from openengine.options import suggest

if TYPE_CHECKING:
    from openengine.rpc.server import ServerOptions

__all__ = ["engine_options", "parse", "server_options", "start_logging"]

_DRAIN_S = 30.0
_LEVELS = ("debug", "info", "warning", "error")
_RENAMED = {"model_path": "model", "aliases": "alias"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidArgument(f"{message}; see --help")


# ---- flags ---------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags' values. Raises InvalidArgument for a flag that is unknown, missing or cannot be read."""
    parser = _Parser(
        prog="python -m openengine.rpc", description="Serve a language model over gRPC.", allow_abbrev=False
    )
    _add_server_flags(parser.add_argument_group("server"))
    engine = parser.add_argument_group("engine", "fields of EngineConfig; see its documentation for what they mean")
    for field in dataclasses.fields(EngineConfig):
        _add_engine_flag(engine, field)
    return parser.parse_args(argv)


def _add_server_flags(group: Any) -> None:
    add = group.add_argument
    add("--host", type=_text, default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=50051, help="port to listen on, 0 picks one (default: 50051)")
    add("--advertise-host", type=_text, metavar="HOST", help="what discovery names; needed when --host is a wildcard")
    add("--tls-cert", type=_file, metavar="FILE", help="PEM certificate chain")
    add("--tls-key", type=_file, metavar="FILE", help="PEM key of the certificate")
    add("--tls-client-ca", type=_file, metavar="FILE", help="PEM certificates that clients' must be signed by")
    add("--token-file", type=_file, metavar="FILE", help="file with the bearer token that clients must send")
    add("--max-message-bytes", type=int, default=64 << 20, metavar="N", help="largest message (default: 64 MiB)")
    add(
        "--max-concurrent-rpcs",
        type=int,
        metavar="N",
        help="calls at a time that infer, tokenize or send files; others are not counted (default: no limit)",
    )
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
            name,
            dest=field.name,
            type=_text,
            required=True,
            metavar="PATH_OR_ID",
            help="a directory, .gguf file or hub id",
        )
    elif field.type == "bool":
        group.add_argument(
            name, dest=field.name, action=argparse.BooleanOptionalAction, default=field.default, help=shown
        )
    elif field.name == "aliases":
        group.add_argument(
            name,
            dest=field.name,
            type=_text,
            action="append",
            default=[],
            metavar="NAME",
            help="a further name; may be repeated",
        )
    elif field.name == "default_sampling":
        group.add_argument(
            name,
            dest=field.name,
            type=_sampling,
            default=SamplingParams(),
            metavar="JSON",
            help="such as '{\"temperature\": 0.7}'",
        )
    else:
        metavar = field.type.split(" ")[0].upper()
        group.add_argument(
            name, dest=field.name, type=_KINDS[field.type], default=field.default, metavar=metavar, help=shown
        )


def _text(given: str) -> str:
    if not given.strip():
        raise argparse.ArgumentTypeError(f"{given!r} is empty; give a value or leave the flag out")
    return given


def _file(given: str) -> Path:
    return Path(_text(given))


def _sampling(given: str) -> SamplingParams:
    try:
        fields = json.loads(given)
        if not isinstance(fields, dict):
            raise TypeError(f"it is a {type(fields).__name__}")
        for name in fields.keys() - SamplingParams.__dataclass_fields__.keys():
            raise TypeError(f"unknown field {name!r}{suggest(name, SamplingParams.__dataclass_fields__)}")
        return SamplingParams(**fields)
    except (TypeError, ValueError) as exc:
        raise argparse.ArgumentTypeError(f"{given!r:.80} is no JSON object of sampling fields: {exc}") from exc


# What a flag's value is read as; the annotation of the field in `EngineConfig` decides.
_KINDS = {
    "int": int,
    "int | None": int,
    "float": float,
    "float | None": float,
    "str": _text,
    "str | None": _text,
    "EngineRole": _text,
}


# ---- what is wrong before a model is loaded ------------------------------------------------------


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords for `Engine`. Raises InvalidArgument for a value that no engine takes."""
    options = {name: getattr(args, name) for name in EngineConfig.field_names() if name != "model_path"}
    options["aliases"] = tuple(args.aliases)
    EngineConfig(args.model_path, **options)
    return options


def server_options(args: argparse.Namespace) -> ServerOptions:
    """Raises InvalidArgument naming the flag, file or port that is wrong; binding a port later decides.

    Raises UnsupportedFeature naming a package that is missing.
    """
    # They bring torch and gRPC, which take a while: a flag that cannot be read is said without them.
    from openengine.rpc import ServerOptions
    from openengine.rpc.server import check_drain_s

    check_drain_s("--drain-timeout-s", args.drain_timeout_s)
    token = _read("--token-file", args.token_file)
    options = ServerOptions(
        host=args.host,
        port=args.port,
        advertise_host=args.advertise_host,
        tls_cert=_read("--tls-cert", args.tls_cert),
        tls_key=_read("--tls-key", args.tls_key),
        tls_client_ca=_read("--tls-client-ca", args.tls_client_ca),
        token=None if token is None else token.decode("utf-8", "replace").strip(),
        max_message_bytes=args.max_message_bytes,
        max_concurrent_rpcs=args.max_concurrent_rpcs,
        metrics_port=args.metrics_port,
    )
    _check_tls(args.tls_cert, args.tls_key, args.tls_client_ca)
    for port in (options.port, options.metrics_port):
        if port is not None:
            _check_port(options.host, port)
    return options


def _read(flag: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as exc:
        raise InvalidArgument(f"{flag}: cannot read {path}: {exc.strerror}") from exc


def _check_tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> None:
    """gRPC says neither which file is wrong nor what is wrong with it, and takes a CA file without certificates."""
    for flag, path in (("--tls-cert", cert), ("--tls-client-ca", client_ca)):
        if path is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
            except (ssl.SSLError, OSError) as exc:
                raise InvalidArgument(f"{flag} {path} holds no certificate in PEM") from exc
    if cert is None:
        return
    try:
        # A password that is asked for would be asked at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except (ssl.SSLError, OSError, ValueError) as exc:
        if getattr(exc, "reason", None) == "KEY_VALUES_MISMATCH":
            raise InvalidArgument(f"--tls-key {key} is not the key of --tls-cert {cert}") from exc
        raise InvalidArgument(f"--tls-key {key} holds no private key in PEM, or one with a password") from exc


def _check_port(host: str, port: int) -> None:
    """Find a taken port, or a host that is not here, before the model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(bare_host(host), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as exc:
        raise InvalidArgument(f"cannot listen on {with_port(host, port)}: {exc.strerror}") from exc


# ---- log lines -----------------------------------------------------------------------------------


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


def start_logging(level: str) -> None:
    """Lines of JSON on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])
