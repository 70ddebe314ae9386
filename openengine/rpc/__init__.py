"""The OpenEngine contract over gRPC: a server for an `Engine`, and a client with the same methods.

    server:  python -m openengine.rpc --model PATH_OR_ID        client:  Client("host:port").generate("Hello")

`convert` maps messages to values and back; `openengine.proto` and `tokenizer.proto` are the contract, and the
`*_pb2` modules are generated from them. Everything here uses public names of `openengine`, and of its engine's own
modules only those that know no model: `options`, `task_options`, `batches`, `progress` and the checks in `types`. The
names are imported when they are first used: messages and conversions need protobuf alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openengine.rpc.client import Client
    from openengine.rpc.remote import RemoteStream
    from openengine.rpc.server import Server, ServerOptions, serve

__all__ = ["Client", "RemoteStream", "Server", "ServerOptions", "serve"]

_HOMES = {"Client": "client", "RemoteStream": "remote"}
_HOMES |= {"Server": "server", "ServerOptions": "server", "serve": "server"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'openengine.rpc' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"openengine.rpc.{_HOMES[name]}"), name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and exc.name.startswith("openengine"):
            raise
        from openengine import UnsupportedFeature

        message = f'openengine.rpc needs {exc.name}; pip install "openengine-inference[rpc]"'
        raise UnsupportedFeature(message) from exc
