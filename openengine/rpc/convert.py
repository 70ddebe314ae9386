"""Messages of the contract to values of `openengine`, and back. No I/O and no policy.

A message and the value of the same name have the same fields, so one plan per message, made from its descriptor when it
is first needed, converts both ways. What the plans do not say:

    wire                                        value
    -----------------------------------------   --------------------------------------------------------------
    `optional`, oneof member, message: absent   None, or the field's default where that is an (empty) value
    oneof whose members are whole events        the attribute named after the oneof: KvEvent.event, ….embedding
    oneof whose members are attributes          at most one of them; a second is an error
    enum                                        its member; UNSPECIFIED and unknown numbers are errors, except
                                                where None stands for UNSPECIFIED (HealthRequest.role, …)
    "" or 0 where the value may be None         None, except names that a request needs: those are errors
    TokenIds, TokenSequence                     u32 array (CandidateTokenSelection: a tuple)
    KvBlockHash, OpaqueKeyTuple, AllRequests    bytes, tuple of texts, True
    Struct                                      dict; every number a float

An error names the field: InvalidArgument for a request, InternalError for what a server should not have sent. Whatever
needs the engine's knowledge (empty batches, unset oneofs, ranges) passes unchecked: the engine judges it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, OneofDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto
from google.protobuf.message import Message

import openengine
from openengine import (
    GenerateEvent,
    GenerationFinished,
    InternalError,
    InvalidArgument,
    KvEventBatch,
    PrefillReady,
    RuntimeEvent,
    TokenOutput,
    Usage,
)
from openengine.rpc import openengine_pb2 as pb
from openengine.rpc import tokenizer_pb2
from openengine.rpc.errors import from_engine_error, to_engine_error
from openengine.rpc.fields import (
    CODECS,
    READERS,
    Fill,
    Malformed,
    Read,
    as_list,
    enum_codec,
    read_output,
    read_token,
    write_tokens,
)

__all__ = [
    "arguments",
    "from_proto",
    "generate_error",
    "generate_response",
    "kv_events_response",
    "runtime_events_response",
    "stream_error",
    "to_proto",
]

_Write = Callable[[Message, Any], None]  # sets a field of the message from the attribute

_RENAMED = {"attributes_struct": "attributes"}
# Names that a request needs. In process None stands for the engine's own choice, which no wire request can ask for.
_NEEDED = {
    "ComputeCacheKeysRequest": {"model"},
    "DetokenizeRequest": {"model"},
    "GenerateRequest": {"request_id", "model"},
    "GetCacheKeySpecRequest": {"model"},
    "GetModelInfoRequest": {"model"},
    "GetTokenizerArtifactsRequest": {"model"},
    "GetTokenizerInfoRequest": {"model"},
    "TaskRequestContext": {"request_id", "model"},
    "TokenizeRequest": {"model"},
}
_ENVELOPES = {"GenerateResponse", "SubscribeKvEventsResponse", "SubscribeRuntimeEventsResponse"}


# ---- the two directions --------------------------------------------------------------------------


def from_proto(message: Message) -> Any:
    """The value of a request or response; what a response of Generate or of a subscription carries is taken out of it.

    Raises InvalidArgument (a request) or InternalError (a response) naming the field that has no meaning, and the error
    that the response of a stream carries.
    """
    name = message.DESCRIPTOR.name
    try:
        if name in _ENVELOPES:
            return _open(message)
        if name == "DrainResponse" and message.HasField("error"):
            raise from_engine_error(message.error)
        return _read(message)
    except Malformed as exc:
        raise _fault(name, exc) from None


def to_proto(value: Any) -> Message:
    """The message of the same name as `value`'s class.

    Raises InvalidArgument (a request) or InternalError (a response) naming the attribute that does not fit.
    """
    name = type(value).__name__
    message = _message_class(name)()
    try:
        _write(message, value)
    except Malformed as exc:
        raise _fault(name, exc) from None
    return message


def arguments(request: Any) -> dict[str, Any]:
    """The fields of `request` as keywords for the engine; what is absent is left out."""
    values = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    return {name: value for name, value in values.items() if value is not None}


def _fault(name: str, exc: Malformed) -> InvalidArgument | InternalError:
    if name.endswith("Request"):
        return InvalidArgument(str(exc), details={"field": exc.path})
    return InternalError(f"{name} is malformed: {exc}", details={"field": exc.path})


# ---- responses of streams ------------------------------------------------------------------------


def generate_response(request_id: str, event: GenerateEvent) -> pb.GenerateResponse:
    """One event of a generation; the last carries the usage."""
    response = pb.GenerateResponse(request_id=request_id)
    if isinstance(event, TokenOutput):  # nearly all of them, so without a plan
        output = response.token
        output.output_index = event.output_index
        output.text = event.text
        write_tokens(output.tokens, event.tokens)
        return response
    field = _members("GenerateResponse")[type(event).__name__]
    try:
        inner = getattr(response, field)
        inner.SetInParent()
        _write(inner, event)
        usage = getattr(event, "usage", None)
        if usage is not None:
            _write(response.usage, usage)
    except Malformed as exc:
        raise _fault("GenerateResponse", exc.under(field)) from None
    return response


def generate_error(request_id: str, exc: BaseException, usage: Usage | None = None) -> pb.GenerateResponse:
    """The terminal response of an accepted generation that failed."""
    response = pb.GenerateResponse(request_id=request_id, error=to_engine_error(exc))
    if usage is not None:
        response.usage.CopyFrom(to_proto(usage))
    return response


def kv_events_response(batch: KvEventBatch) -> pb.SubscribeKvEventsResponse:
    return pb.SubscribeKvEventsResponse(batch=to_proto(batch))


def runtime_events_response(event: RuntimeEvent) -> pb.SubscribeRuntimeEventsResponse:
    return pb.SubscribeRuntimeEventsResponse(runtime_event=to_proto(event))


def stream_error(kind: type[Message], exc: BaseException) -> Message:
    """The terminal response of an accepted drain or subscription that failed; `kind` is the stream's message."""
    return kind(error=to_engine_error(exc))


def _open(response: Message) -> Any:
    field = response.WhichOneof("event")
    if field is None:
        raise Malformed("event", "is not set")
    content = getattr(response, field)
    if field == "error":
        raise from_engine_error(content)
    event = _at(field, read_output if field == "token" else _read, content)
    if isinstance(response, pb.GenerateResponse) and response.HasField("usage"):
        if not isinstance(event, (GenerationFinished, PrefillReady)):
            raise Malformed("usage", f"comes with {field}, which is never the last event")
        event = dataclasses.replace(event, usage=_at("usage", _read, response.usage))
    return event


# ---- plans ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a message becomes `kind` and back.

    readers: by field number, the attribute and what reads it.  absent: by attribute, what an unset field means where
    that is not the attribute's default.  writers: the attribute and what writes it.
    """

    kind: type
    readers: dict[int, tuple[str, Read]]
    absent: dict[str, Callable[[], Any]]
    writers: list[tuple[str, _Write]]


def _read(message: Message) -> Any:
    plan = _plan(message.DESCRIPTOR.name)
    readers = plan.readers
    found = [(readers[field.number], field, item) for field, item in message.ListFields() if field.number in readers]
    present = {attribute for (attribute, _), _, _ in found}
    # First, so that a name that is missing is said before a field that is wrong.
    values = {attribute: make() for attribute, make in plan.absent.items() if attribute not in present}
    for (attribute, read), field, content in found:
        values[attribute] = _at(field.name, read, content)
    return plan.kind(**values)


def _write(message: Message, value: Any) -> None:
    plan = _plan(message.DESCRIPTOR.name)
    if not isinstance(value, plan.kind):
        raise Malformed("", f"must be a {plan.kind.__name__}, not {value!r:.80}")
    for attribute, write in plan.writers:
        content = getattr(value, attribute)
        if content is None:
            continue
        try:
            write(message, content)
        except Malformed as exc:
            raise exc.under(attribute) from None
        except (TypeError, ValueError, OverflowError) as exc:
            raise Malformed(attribute, f"cannot be {content!r:.80}: {exc}") from exc


@cache
def _plan(name: str) -> _Plan:
    descriptor = _message_class(name).DESCRIPTOR
    kind = getattr(openengine, name)
    attributes = {field.name: field for field in dataclasses.fields(kind)}
    proto = DescriptorProto()
    descriptor.CopyToProto(proto)
    plan = _Plan(kind, {}, {}, [])
    unions = set()
    for field, field_proto in zip(descriptor.fields, proto.field, strict=True):
        if field.message_type is not None and field.message_type.name == "EngineError":
            continue  # raised before a plan is followed
        oneof = field.containing_oneof
        if oneof is not None and oneof.name in attributes:
            plan.readers[field.number] = (oneof.name, _read)
            unions.add(oneof.name)
            continue
        attribute = attributes[_RENAMED.get(field.name, field.name)]
        repeated = field_proto.label == FieldDescriptorProto.LABEL_REPEATED
        read, write = _repeated(field) if repeated else _singular(field, attribute)
        plan.readers[field.number] = (attribute.name, read)
        is_choice = oneof is not None and len(oneof.fields) > 1  # `optional` is a oneof of one
        plan.writers.append((attribute.name, partial(_write_member, oneof, write) if is_choice else write))
        absent = _absent(field, attribute, repeated)
        if absent is not None:
            plan.absent[attribute.name] = absent
    for union in unions:
        plan.absent[union] = partial(_fail, union, "is not set")
        plan.writers.append((union, partial(_write_union, name)))
    return plan


def _singular(field: FieldDescriptor, attribute: dataclasses.Field) -> tuple[Read, _Write]:
    name = field.name
    if field.enum_type is not None:
        read, number = enum_codec(field.enum_type)
        return read, lambda message, value: setattr(message, name, number(value))
    if field.message_type is None:
        return _same, lambda message, value: setattr(message, name, value)
    read, fill = _codec(field)
    default = None if attribute.default is dataclasses.MISSING else attribute.default
    if attribute.default_factory is not dataclasses.MISSING:
        default = attribute.default_factory()

    def write(message: Message, value: Any) -> None:
        if default is None or value != default:
            inner = getattr(message, name)
            inner.SetInParent()
            fill(inner, value)

    return read, write


def _repeated(field: FieldDescriptor) -> tuple[Read, _Write]:
    name = field.name
    if field.enum_type is not None:
        read, number = enum_codec(field.enum_type)
        return partial(_read_items, read), lambda message, value: getattr(message, name).extend(map(number, value))
    if field.message_type is None:
        read = READERS.get(_key(field), tuple)
        return read, lambda message, value: getattr(message, name).extend(as_list(value))
    if field.message_type.GetOptions().map_entry:
        return dict, lambda message, value: getattr(message, name).update(value)
    if field.message_type.name == "TokenInfo":
        return partial(_read_items, read_token), lambda message, value: write_tokens(getattr(message, name), value)
    read, fill = _codec(field)

    def write(message: Message, value: Iterable[Any]) -> None:
        items = getattr(message, name)
        for index, item in enumerate(value):
            try:
                fill(items.add(), item)
            except Malformed as exc:
                raise exc.under(f"[{index}]") from None

    return partial(_read_items, read), write


def _write_member(oneof: OneofDescriptor, write: _Write, message: Message, value: Any) -> None:
    """Set a member of `oneof`. Protobuf alone would drop the one that is set already, and say nothing."""
    before = message.WhichOneof(oneof.name)
    write(message, value)
    if before is not None and message.WhichOneof(oneof.name) != before:
        *names, last = (field.name for field in oneof.fields)
        raise Malformed("", f"is given beside {before}; give exactly one of {', '.join(names)} and {last}")


def _codec(field: FieldDescriptor) -> tuple[Read, Fill]:
    read, fill = CODECS.get(field.message_type.name, (_read, _write))
    return READERS.get(_key(field), read), fill


def _key(field: FieldDescriptor) -> str:
    return f"{field.containing_type.name}.{field.name}"


def _absent(field: FieldDescriptor, attribute: dataclasses.Field, repeated: bool) -> Callable[[], Any] | None:
    """What an unset field means, where that is not the attribute's own default."""
    needed = _NEEDED.get(field.containing_type.name, ())
    if attribute.name in needed:
        return partial(_fail, field.name, "is required and was empty")
    required = attribute.default is dataclasses.MISSING and attribute.default_factory is dataclasses.MISSING
    if attribute.default is None:
        return None
    if repeated:
        return tuple if required else None
    if field.containing_oneof is not None:
        return partial(_fail, field.name, "is missing") if required else None
    if field.message_type is not None:
        name = field.message_type.name
        if name in CODECS:
            return partial(_same, None) if required else None
        # An absent message means an empty one, which is an error where it needs a name.
        return partial(_at, field.name, _read, _message_class(name)()) if required or name in _NEEDED else None
    if field.enum_type is not None:
        return partial(_fail, field.name, "is UNSPECIFIED")
    return partial(_same, field.default_value) if required else None


def _fail(path: str, problem: str) -> Any:
    raise Malformed(path, problem)


def _at(path: str, read: Read, content: Any) -> Any:
    try:
        return read(content)
    except Malformed as exc:
        raise exc.under(path) from None
    except ValueError as exc:
        raise Malformed(path, str(exc)) from None


def _read_items(read: Read, items: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(_at(f"[{index}]", read, item) for index, item in enumerate(items))


def _same(content: Any) -> Any:
    return content


def _message_class(name: str) -> type[Message]:
    return getattr(pb, name, None) or getattr(tokenizer_pb2, name)


@cache
def _members(name: str) -> dict[str, str]:
    """By message, the field of the oneof `event` or the like of message `name` that holds it."""
    fields = _message_class(name).DESCRIPTOR.fields
    return {
        f.message_type.name: f.name for f in fields if f.containing_oneof is not None and f.message_type is not None
    }


def _write_union(name: str, message: Message, value: Any) -> None:
    field = _members(name).get(type(value).__name__)
    if field is None:
        raise Malformed("", f"must be one of {', '.join(_members(name))}, not {value!r:.80}")
    inner = getattr(message, field)
    inner.SetInParent()
    _write(inner, value)
