"""The .proto files say what the contract's documents say, and the generated code is what the .proto files give."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("google.protobuf", reason="needs protobuf, of the extra rpc")

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from regenerate import FILES, ROOT, RPC, descriptor_set, generate

from openengine.rpc import openengine_pb2, tokenizer_pb2

OURS = {"openengine": openengine_pb2, "tokenizer": tokenizer_pb2}
FIRST_ADDITION = 100


def ours(name: str) -> FileDescriptorProto:
    proto = FileDescriptorProto()
    OURS[name].DESCRIPTOR.CopyToProto(proto)
    return proto


# ---- generated code ------------------------------------------------------------------------------


@cache
def generated() -> dict[str, str]:
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools")
    return generate()


@pytest.mark.parametrize("name", FILES)
def test_the_generated_module_is_what_its_proto_gives(name):
    assert (RPC / name).read_text("utf-8") == generated()[name], "run python tests/rpc/regenerate.py"


@pytest.mark.parametrize("name", FILES)
def test_the_generated_module_is_tied_to_no_release_of_protobuf_or_grpc(name):
    source = (RPC / name).read_text("utf-8")
    assert "runtime_version" not in source and "GENERATED_VERSION" not in source


def test_the_services_are_importable_where_grpc_is_installed():
    pytest.importorskip("grpc", reason="needs grpcio, of the extra rpc")
    from openengine.rpc import openengine_pb2_grpc, tokenizer_pb2_grpc

    assert len(vars(openengine_pb2_grpc.OpenEngineStub)) and openengine_pb2_grpc.add_OpenEngineServicer_to_server
    assert tokenizer_pb2_grpc.add_OpenEngineTokenizerServicer_to_server


# ---- the contract's text -------------------------------------------------------------------------


@cache
def document(name: str) -> str:
    path = next(ROOT.parent.glob(f"*/contract/{name}"), None)
    if path is None:
        pytest.skip(f"the contract's {name} does not lie beside this checkout")
    return path.read_text("utf-8")


def blocks(text: str) -> list[str]:
    return re.findall(r"^```proto\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@cache
def documented() -> dict[str, FileDescriptorProto]:
    """Both files as the documents list them, compiled."""
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools")
    sources = {
        "openengine": "\n".join(blocks(document("api.md"))),
        "tokenizer": "\n".join(blocks(document("tokenizer_messages.md"))),
    }
    return {name: compiled(source) for name, source in sources.items()}


def compiled(source: str) -> FileDescriptorProto:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "document.proto").write_text(source, "utf-8")
        return FileDescriptorSet.FromString(descriptor_set(Path(folder), "document.proto")).file[0]


def described(message: DescriptorProto) -> dict[str, tuple]:
    """Each field's number, type, label, and the oneof it stands in; `optional` is one of its own."""
    return {
        field.name: (
            field.number,
            FieldDescriptorProto.Type.Name(field.type),
            field.type_name,
            FieldDescriptorProto.Label.Name(field.label),
            field.proto3_optional,
            message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else "",
        )
        for field in message.field
    }


def additions() -> Iterator[tuple[str, str, int, str]]:
    """(message, field, number, type) of the table of fields that are added to the published schema."""
    rows = re.findall(r"^\| `(\w+)` \| `(\w+) (\w+) = (\d+);` \|", document("tokenizer_messages.md"), re.MULTILINE)
    return ((message, field, int(number), kind) for message, kind, field, number in rows)


@pytest.mark.parametrize("name", OURS)
def test_every_message_field_number_type_and_label_is_the_documents(name):
    theirs = {message.name: message for message in documented()[name].message_type}
    mine = {message.name: message for message in ours(name).message_type}
    assert sorted(mine) == sorted(theirs)
    for message_name, message in mine.items():
        fields = {key: value for key, value in described(message).items() if value[0] < FIRST_ADDITION}
        assert fields == described(theirs[message_name]), message_name
        nested = {entry.name: described(entry) for entry in message.nested_type}
        assert nested == {entry.name: described(entry) for entry in theirs[message_name].nested_type}, message_name


@pytest.mark.parametrize("name", OURS)
def test_every_enum_value_is_the_documents(name):
    def values(proto: FileDescriptorProto) -> dict[str, dict[str, int]]:
        return {enum.name: {value.name: value.number for value in enum.value} for enum in proto.enum_type}

    assert values(ours(name)) == values(documented()[name])


@pytest.mark.parametrize("name", OURS)
def test_eng_01_tok_01_every_rpc_is_the_documents(name):
    def methods(proto: FileDescriptorProto) -> dict[str, dict[str, tuple]]:
        return {
            service.name: {
                m.name: (m.input_type, m.output_type, m.client_streaming, m.server_streaming) for m in service.method
            }
            for service in proto.service
        }

    assert ours(name).package == documented()[name].package == "openengine.v1"
    assert methods(ours(name)) == methods(documented()[name])


def test_the_added_fields_are_the_documents():
    mine = {
        (message.name, field.name, field.number, field.type_name.rsplit(".", 1)[-1] or "string")
        for message in ours("openengine").message_type
        for field in message.field
        if field.number >= FIRST_ADDITION
    }
    assert mine == set(additions())
    assert len(mine) == 3


def test_openengine_imports_the_tokenizer_and_that_imports_nothing():
    assert "openengine/rpc/tokenizer.proto" in ours("openengine").dependency
    assert not ours("tokenizer").dependency
