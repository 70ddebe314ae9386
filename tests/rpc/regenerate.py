"""Writes the generated modules of `openengine.rpc` from its .proto files: `python tests/rpc/regenerate.py`.

Needs grpcio-tools. The generated code differs from protoc's in one thing: it leaves out the checks that tie it to the
protobuf and grpc releases it was made with. What it calls is in every protobuf from 4.25 and every grpcio from 1.64 on.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

__all__ = ["FILES", "RPC", "descriptor_set", "generate"]

ROOT = Path(__file__).resolve().parent.parent.parent
RPC = ROOT / "openengine" / "rpc"
_PROTOS = ("openengine/rpc/openengine.proto", "openengine/rpc/tokenizer.proto")
FILES = tuple(f"{name}_{kind}.py" for name in ("openengine", "tokenizer") for kind in ("pb2", "pb2_grpc"))

_CHECKS = (
    r"# NO CHECKED-IN PROTOBUF GENCODE\n",
    r"# Protobuf Python Version: .*\n",
    r"from google\.protobuf import runtime_version as _runtime_version\n",
    r"_runtime_version\.ValidateProtobufRuntimeVersion\([^)]*\)\n",
    r"import warnings\n",
    r"GRPC_GENERATED_VERSION = (?:.*\n)*?    \)\n",  # up to the end of the error that it raises
)


def generate() -> dict[str, str]:
    """The text of every generated module, by file name."""
    with tempfile.TemporaryDirectory() as folder:
        _protoc(f"--python_out={folder}", f"--grpc_python_out={folder}", *_PROTOS)
        return {name: _free(Path(folder, "openengine", "rpc", name).read_text("utf-8")) for name in FILES}


def descriptor_set(folder: Path, *protos: str) -> bytes:
    """The serialized FileDescriptorSet of `protos`, which lie under `folder`, without what they import."""
    with tempfile.TemporaryDirectory() as out:
        target = Path(out, "set")
        _protoc(f"--descriptor_set_out={target}", *protos, include=folder)
        return target.read_bytes()


def _protoc(*arguments: str, include: Path = ROOT) -> None:
    import grpc_tools
    from grpc_tools import protoc

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    status = protoc.main(["protoc", f"-I{include}", f"-I{well_known}", *arguments])
    assert status == 0, f"protoc ended with status {status}"


def _free(text: str) -> str:
    for check in _CHECKS:
        text = re.sub(check, "", text)
    return text


if __name__ == "__main__":
    for file_name, source in generate().items():
        (RPC / file_name).write_text(source, "utf-8")
