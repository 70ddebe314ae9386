"""Messages to values and back: nothing is lost, nothing is guessed, and what is wrong is named."""

from __future__ import annotations

import collections.abc
import dataclasses
import random
import subprocess
import sys
import time
import types
import typing
from typing import Any

import numpy as np
import pytest

pytest.importorskip("google.protobuf", reason="needs protobuf, of the extra rpc")

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto
from google.protobuf.struct_pb2 import Struct

import openengine as oe
from openengine import errors
from openengine.core.output import Candidates, PromptTokens
from openengine.ops.sampling import TokenScores
from openengine.rpc import openengine_pb2 as pb
from openengine.rpc import tokenizer_pb2 as tok
from openengine.rpc.convert import (
    arguments,
    from_proto,
    generate_error,
    generate_response,
    kv_events_response,
    runtime_events_response,
    stream_error,
    to_proto,
)
from openengine.rpc.errors import error_of_status, from_engine_error, status_of, to_engine_error
from openengine.rpc.structs import fill_struct, read_struct
from openengine.validation import validate_request

MESSAGES = {
    descriptor.name: getattr(module, descriptor.name)
    for module in (pb, tok)
    for descriptor in module.DESCRIPTOR.message_types_by_name.values()
}
# Messages that are no value of their own: those that only wrap one, errors, envelopes of stream events, no content.
WRAPPERS = {"AllRequests", "KvBlockHash", "OpaqueKeyTuple", "TokenIds", "TokenSequence"}
ENVELOPES = {"GenerateResponse", "SubscribeKvEventsResponse", "SubscribeRuntimeEventsResponse"}
CALLS = {"GetEngineInfoRequest", "GetKvConnectorInfoRequest", "ListLorasRequest"}
PLAIN = sorted(MESSAGES.keys() - WRAPPERS - ENVELOPES - CALLS - {"EngineError"})
NUM_ROUNDS = 40


# ---- random messages -----------------------------------------------------------------------------


class Maker:
    """Makes messages and values that are valid on the wire, from the descriptors and a seed."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def message(self, name: str, depth: int = 0) -> Any:
        message = MESSAGES[name]()
        proto = DescriptorProto()
        message.DESCRIPTOR.CopyToProto(proto)
        for oneof in message.DESCRIPTOR.oneofs:
            if not oneof.name.startswith("_") and (
                self.is_required_oneof(name, oneof.name) or self.random.random() < 0.8
            ):
                fields = [field for field in oneof.fields if field.name != "error"]
                self.fill(message, self.random.choice(fields), depth, always=True)
        for field, field_proto in zip(message.DESCRIPTOR.fields, proto.field):
            if field.containing_oneof is not None and not field_proto.proto3_optional:
                continue
            if field_proto.label == FieldDescriptorProto.LABEL_REPEATED:
                self.extend(message, field, depth)
            else:
                self.fill(message, field, depth, always=is_always_set(field))
        return message

    def is_required_oneof(self, message: str, oneof: str) -> bool:
        return oneof in {f.name for f in dataclasses.fields(getattr(oe, message))} or message == "DrainResponse"

    def extend(self, message: Any, field: FieldDescriptor, depth: int) -> None:
        count = self.random.choice((0, 0, 1, 3)) if depth < 3 else 0
        items = getattr(message, field.name)
        for _ in range(count):
            if field.message_type is None:
                items.append(self.scalar(field))
            elif field.message_type.GetOptions().map_entry:
                items[self.text()] = self.text()
            else:
                items.add().CopyFrom(self.nested(field, depth))

    def fill(self, message: Any, field: FieldDescriptor, depth: int, *, always: bool) -> None:
        if not always and self.random.random() < 0.4:
            return
        if field.message_type is None:
            setattr(message, field.name, self.scalar(field))
            return
        inner = self.nested(field, depth)
        if field.containing_oneof is None and not always and not inner.ListFields() and has_default(field):
            return  # an empty group of options and an absent one are the same value
        getattr(message, field.name).CopyFrom(inner)
        getattr(message, field.name).SetInParent()

    def nested(self, field: FieldDescriptor, depth: int) -> Any:
        name = field.message_type.name
        if name == "Struct":
            struct = Struct()
            fill_struct(struct, self.attributes())
            return struct
        if name == "KvBlockHash":
            return pb.KvBlockHash(value=self.random.randbytes(32), encoding="bytes")
        if name in WRAPPERS:
            message = MESSAGES[name]()
            for inner in message.DESCRIPTOR.fields:
                self.extend(message, inner, depth)
            return message
        return self.message(name, depth + 1)

    def scalar(self, field: FieldDescriptor) -> Any:
        if field.enum_type is not None:
            numbers = [v.number for v in field.enum_type.values if v.number or is_zero_allowed(field)]
            return self.random.choice(numbers)
        kind = field.cpp_type
        if kind == FieldDescriptor.CPPTYPE_STRING:
            if field.type == FieldDescriptor.TYPE_BYTES:
                return self.random.choice((b"", b"\x00\xff", self.random.randbytes(32)))
            return self.text() or ("x" if is_needed(field) else "")
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return self.random.random() < 0.5
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            value = self.random.choice((0.0, -0.0, 1.0, -2.5, self.random.uniform(-9, 9), float("inf")))
            return float(np.float32(value)) if kind == FieldDescriptor.CPPTYPE_FLOAT else value
        low, high = LIMITS[kind]
        return self.random.choice((0, 1, low, high, self.random.randint(low, high)))

    def text(self) -> str:
        return self.random.choice(("", "a", "straße 😀", "\x00", "lora-1", "sha256:" + "1" * 64))

    def attributes(self) -> dict[str, Any]:
        values = [None, True, False, 0.0, 1.5, "", "text", [], [1.0, ["x"]], {}, {"inner": {"deep": None}}]
        return {self.text(): self.random.choice(values) for _ in range(self.random.randint(0, 3))}


LIMITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
ALWAYS_PRESENT = {"output_index", "input_index", "candidate_index", "group_index"}


def attribute(field: FieldDescriptor) -> dataclasses.Field:
    name = {"attributes_struct": "attributes"}.get(field.name, field.name)
    return next(f for f in dataclasses.fields(getattr(oe, field.containing_type.name)) if f.name == name)


def is_needed(field: FieldDescriptor) -> bool:
    owner = field.containing_type.name
    if field.name == "request_id":
        return owner in ("GenerateRequest", "TaskRequestContext")
    return (
        field.name == "model"
        and owner != "HealthRequest"
        and (owner.endswith("Request") or owner == "TaskRequestContext")
    )


def is_zero_allowed(field: FieldDescriptor) -> bool:
    owner = f"{field.containing_type.name}.{field.name}"
    return owner in ("HealthRequest.role", "MediaItem.modality", "ScoreOptions.normalization")


def is_always_set(field: FieldDescriptor) -> bool:
    """Fields that a value cannot be without."""
    if is_needed(field) or field.name in ALWAYS_PRESENT:
        return True
    if field.enum_type is not None and field.containing_oneof is None:
        return not is_zero_allowed(field)
    if field.message_type is not None and field.message_type.name == "TaskRequestContext":
        return True
    missing = dataclasses.MISSING
    required = attribute(field).default is missing and attribute(field).default_factory is missing
    return field.message_type is not None and field.message_type.name not in WRAPPERS and required


def has_default(field: FieldDescriptor) -> bool:
    return attribute(field).default is not None


def same(left: Any, right: Any) -> bool:
    """Equality through arrays, which have none of their own that is one truth value."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return np.array_equal(left, right)
    if dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left)]
        return type(left) is type(right) and all(same(getattr(left, n), getattr(right, n)) for n in names)
    if isinstance(left, tuple):
        return isinstance(right, tuple) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


# ---- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_a_message_survives_the_way_to_its_value_and_back(name):
    for round_ in range(NUM_ROUNDS):
        message = Maker(f"{name}/{round_}").message(name)
        assert to_proto(from_proto(message)) == message


@pytest.mark.parametrize("name", PLAIN)
def test_a_value_survives_the_way_to_its_message_and_over_the_wire(name):
    for round_ in range(NUM_ROUNDS):
        value = from_proto(Maker(f"{name}/{round_}").message(name))
        assert type(value) is getattr(oe, name)
        wire = to_proto(value).SerializeToString()
        assert same(from_proto(MESSAGES[name].FromString(wire)), value)


@pytest.mark.parametrize("name", PLAIN)
def test_the_attributes_of_a_value_have_the_types_that_its_class_declares(name):
    kind = getattr(oe, name)
    hints = typing.get_type_hints(kind, {**vars(sys.modules[kind.__module__]), **{n: getattr(oe, n) for n in VALUES}})
    for round_ in range(NUM_ROUNDS):
        value = from_proto(Maker(f"{name}/{round_}").message(name))
        for field in dataclasses.fields(kind):
            content = getattr(value, field.name)
            assert conforms(content, hints[field.name]), f"{field.name} is {content!r}, declared {field.type}"


def conforms(content: Any, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(conforms(content, each) for each in inner)
    if origin is tuple:
        return type(content) is tuple and all(conforms(item, inner[0]) for item in content)
    if origin is collections.abc.Mapping:
        return type(content) is dict and all(conforms(c, i) for item in content.items() for c, i in zip(item, inner))
    if origin is collections.abc.Sequence and inner == (int,):
        return isinstance(content, np.ndarray) and content.dtype == np.uint32
    if origin is collections.abc.Sequence:
        return type(content) is tuple and all(conforms(item, inner[0]) for item in content)
    return hint is Any or type(content) is (hint if isinstance(hint, type) else type(hint))


VALUES = MESSAGES.keys() & set(oe.__all__) | {
    enum for module in (pb, tok) for enum in module.DESCRIPTOR.enum_types_by_name
} - {"ErrorCode"}


@pytest.mark.parametrize("name", PLAIN)
def test_every_field_of_a_message_has_an_attribute(name):
    """Also in the other direction, except for what only exists in process."""
    attributes = {field.name for field in dataclasses.fields(getattr(oe, name))}
    oneofs = {o.name: {f.name for f in o.fields} for o in MESSAGES[name].DESCRIPTOR.oneofs if o.name in attributes}
    fields = {field.name for field in MESSAGES[name].DESCRIPTOR.fields} - {"error"}
    fields = {"attributes" if f == "attributes_struct" else f for f in fields - set().union(*oneofs.values())}
    assert fields | oneofs.keys() == attributes - IN_PROCESS.get(name, set())


IN_PROCESS = {
    "EngineInfo": {"attributes"},
    "GenerationFinished": {"usage"},
    "GuidedDecoding": {"output_type"},
    "PrefillReady": {"usage"},
}


def test_every_message_is_a_value_or_a_named_exception():
    assert len(PLAIN) + len(WRAPPERS) + len(ENVELOPES) + len(CALLS) + 1 == len(MESSAGES)
    assert all(hasattr(oe, name) for name in PLAIN)
    assert not any(hasattr(oe, name) for name in WRAPPERS | ENVELOPES | CALLS)


@pytest.mark.parametrize("field", ["prompt", "token", "prefill_ready", "finished"])
def test_generate_events_survive_in_their_responses(field):
    for round_ in range(NUM_ROUNDS):
        maker = Maker(f"{field}/{round_}")
        message = pb.GenerateResponse(request_id="r")
        inner = getattr(message, field)
        inner.CopyFrom(maker.message(inner.DESCRIPTOR.name))
        inner.SetInParent()
        if field in ("prefill_ready", "finished") and maker.random.random() < 0.5:
            message.usage.CopyFrom(maker.message("Usage"))
        assert generate_response("r", from_proto(message)) == message


def test_subscription_events_survive_in_their_responses():
    for round_ in range(NUM_ROUNDS):
        maker = Maker(f"subscription/{round_}")
        batch = pb.SubscribeKvEventsResponse(batch=maker.message("KvEventBatch"))
        assert kv_events_response(from_proto(batch)) == batch
        event = pb.SubscribeRuntimeEventsResponse(runtime_event=maker.message("RuntimeEvent"))
        assert runtime_events_response(from_proto(event)) == event


# ---- presence ------------------------------------------------------------------------------------


def request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"request_id": "r", "model": "m", "prompt": "p", **fields})


def test_smp_01_an_explicit_zero_is_not_an_absent_field():
    absent = from_proto(request()).sampling
    explicit = from_proto(request(sampling=pb.SamplingParams(temperature=0, seed=0, top_k=0))).sampling
    assert (absent.temperature, absent.seed, absent.top_k) == (None, None, None)
    assert (explicit.temperature, explicit.seed, explicit.top_k) == (0.0, 0, 0)
    assert not to_proto(oe.GenerateRequest(prompt="p")).HasField("sampling")
    back = to_proto(oe.GenerateRequest(prompt="p", sampling=explicit))
    assert back.sampling.HasField("seed") and not back.sampling.HasField("top_p")


def test_absent_option_groups_are_empty_ones():
    value = from_proto(request(sampling=pb.SamplingParams(), kv=pb.KvOptions()))
    assert value == from_proto(request()) == oe.GenerateRequest(request_id="r", model="m", prompt="p")


def test_kvo_04_lgp_07_empty_but_present_fields_reach_the_engine():
    value = from_proto(
        request(
            kv=pb.KvOptions(cache_salt=""),
            response=pb.ResponseOptions(output_candidates=pb.CandidateTokenSelection()),
            stopping=pb.StoppingOptions(conditions=[pb.StopCondition(), pb.StopCondition(stop_text="")]),
        )
    )
    assert value.kv.cache_salt == ""
    assert value.response.output_candidates == oe.CandidateTokenSelection()
    assert value.stopping.conditions == (oe.StopCondition(), oe.StopCondition(stop_text=""))
    with pytest.raises(oe.InvalidArgument):
        validate_request(value)


def test_gen_03_gde_09_abt_01_unset_oneofs_reach_the_engine():
    assert from_proto(pb.GenerateRequest(request_id="r", model="m")).prompt is None
    assert from_proto(request(guided=pb.GuidedDecoding())).guided == oe.GuidedDecoding()
    assert from_proto(pb.AbortRequest()) == oe.AbortRequest()
    task = from_proto(pb.EmbedRequest(context={"request_id": "r", "model": "m"}, inputs=[pb.TaskInput(item_id="a")]))
    assert task.inputs == (oe.TaskInput(item_id="a"),)


def test_gen_04_an_empty_id_list_is_not_an_absent_one():
    value = from_proto(pb.GenerateRequest(request_id="r", model="m", token_ids=pb.TokenIds()))
    assert value.token_ids is not None and len(value.token_ids) == 0
    assert to_proto(value).WhichOneof("input") == "token_ids"


def test_gen_12_an_empty_adapter_name_is_the_base_model():
    assert from_proto(request(lora_name="")).lora_name is None
    assert from_proto(request(lora_name="a")).lora_name == "a"


def test_lor_04_a_load_without_an_adapter_reaches_the_engine_as_an_empty_one():
    assert from_proto(pb.LoadLoraRequest()).adapter == oe.LoraAdapter(lora_id=0, lora_name="", source_path="")


def test_kv_11_kv_16_the_first_block_has_no_parent_and_the_base_model_no_adapter():
    stored = oe.BlockStored(block_hashes=(b"k" * 32,), parent_block_hash=None, token_ids=(1, 2), block_size=2)
    message = to_proto(oe.KvEvent(event=stored, request_id="r"))
    assert not message.block_stored.HasField("parent_block_hash")
    assert (message.block_stored.lora_id, message.block_stored.lora_name) == (0, "")
    assert message.block_stored.block_hashes[0].encoding == "bytes"
    assert from_proto(message) == oe.KvEvent(event=stored, request_id="r")


def test_the_fields_of_a_request_are_keywords_without_what_is_absent():
    assert arguments(from_proto(pb.AbortRequest(all_requests=pb.AllRequests()))) == {"all_requests": True}
    assert arguments(from_proto(pb.AbortRequest(request_id="r"))) == {"request_id": "r", "all_requests": False}
    drain = arguments(from_proto(pb.DrainRequest(deadline_ms=0)))
    assert drain == {"stop_accepting_new_requests": False, "deadline_ms": 0, "abort_after_deadline": False}
    assert arguments(from_proto(pb.HealthRequest(role=pb.ENGINE_ROLE_DECODE)))["role"] is oe.EngineRole.DECODE


# ---- what is refused -----------------------------------------------------------------------------


NEEDED = [
    (pb.GenerateRequest(model="m", prompt="p"), "request_id"),
    (pb.GenerateRequest(request_id="r", prompt="p"), "model"),
    (pb.GetModelInfoRequest(), "model"),
    (pb.EmbedRequest(context={"model": "m"}), "context.request_id"),
    (pb.ClassifyRequest(context={"request_id": "r"}), "context.model"),
    (pb.ScoreRequest(), "context.request_id"),
    (tok.GetTokenizerInfoRequest(), "model"),
    (tok.GetTokenizerArtifactsRequest(), "model"),
    (tok.TokenizeRequest(text="t"), "model"),
    (tok.DetokenizeRequest(), "model"),
    (tok.GetCacheKeySpecRequest(), "model"),
    (tok.ComputeCacheKeysRequest(text="t"), "model"),
]


@pytest.mark.parametrize(("message", "path"), NEEDED, ids=[f"{m.DESCRIPTOR.name}-{p}" for m, p in NEEDED])
def test_gen_01_gen_02_mod_01_tsk_01_tok_16_a_name_that_is_needed_is_not_empty(message, path):
    with pytest.raises(oe.InvalidArgument, match=rf"^{path} is required"):
        from_proto(message)


CONTEXT = pb.TaskRequestContext(request_id="r", model="m")
ENUMS = [
    (pb.EmbedRequest(context=CONTEXT, options=pb.EmbedOptions(granularity=0)), "options.granularity"),
    (pb.EmbedRequest(context=CONTEXT, options=pb.EmbedOptions(encoding=9)), "options.encoding"),
    (pb.ClassifyRequest(context=CONTEXT, options=pb.ClassifyOptions(output_semantics=0)), "options.output_semantics"),
    (pb.ScoreRequest(context=CONTEXT, options=pb.ScoreOptions(normalization=9)), "options.normalization"),
    (pb.SubscribeRuntimeEventsRequest(types=[1, 0]), r"types\[1\]"),
    (pb.SubscribeRuntimeEventsRequest(types=[9]), r"types\[0\]"),
    (pb.HealthRequest(role=9), "role"),
    (request(media=[pb.MediaItem(modality=9)]), r"media\[0\].modality"),
    (tok.TokenizeRequest(model="m", options=tok.TokenizeOptions(truncation_side=0)), "options.truncation_side"),
]


@pytest.mark.parametrize(("message", "path"), ENUMS, ids=[f"{m.DESCRIPTOR.name}-{p}" for m, p in ENUMS])
def test_an_explicit_unspecified_or_unknown_enum_number_in_a_request_is_refused_by_name(message, path):
    with pytest.raises(oe.InvalidArgument, match=rf"^{path} is (UNSPECIFIED|9, which)") as caught:
        from_proto(message)
    assert "use one of 1 (" in caught.value.message
    assert caught.value.details["field"] in caught.value.message


def test_gen_13_hlt_05_scr_06_unspecified_means_something_where_the_contract_says_so():
    assert from_proto(pb.HealthRequest(role=0)).role is None
    assert from_proto(request(media=[pb.MediaItem(url="u")])).media[0].modality is None
    assert from_proto(pb.ScoreRequest(context=CONTEXT, options=pb.ScoreOptions())).options.normalization is None


def test_what_a_server_should_not_have_sent_is_an_internal_error():
    with pytest.raises(oe.InternalError, match=r"HealthResponse is malformed: checks\[0\]\.state is UNSPECIFIED"):
        from_proto(pb.HealthResponse(state=2, checks=[pb.HealthCheck(name="model")]))
    with pytest.raises(oe.InternalError, match="token.output_index is missing"):
        from_proto(pb.GenerateResponse(token=pb.TokenOutput(text="t")))
    with pytest.raises(oe.InternalError, match="event is not set"):
        from_proto(pb.GenerateResponse(request_id="r"))
    with pytest.raises(oe.InternalError, match="usage comes with token"):
        from_proto(pb.GenerateResponse(token=pb.TokenOutput(output_index=0), usage=pb.Usage()))
    with pytest.raises(oe.InternalError, match="encoding is 'int64'"):
        from_proto(pb.BlockRemoved(medium=1, block_hashes=[pb.KvBlockHash(value=b"1", encoding="int64")]))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (oe.GenerateRequest(prompt=5), "prompt cannot be 5"),
        (oe.GenerateRequest(prompt="\ud800"), "prompt cannot be"),
        (oe.GenerateRequest(prompt="p", sampling=oe.SamplingParams(seed=-1)), r"sampling\.seed cannot be -1"),
        (oe.GenerateRequest(prompt="p", sampling=3), "sampling must be a SamplingParams, not 3"),
        (
            oe.GenerateRequest(prompt="p", stopping=oe.StoppingOptions(conditions=("\n",))),
            r"stopping\.conditions\[0\] must be a StopCondition",
        ),
        (oe.GenerateRequest(token_ids=[1, -2]), "token_ids cannot be"),
        (oe.HealthRequest(role="router"), "role must be one of aggregated, prefill, decode, not 'router'"),
    ],
)
def test_a_request_that_does_not_fit_the_wire_is_refused_by_name(value, message):
    with pytest.raises(oe.InvalidArgument, match=f"^{message}"):
        to_proto(value)


def test_values_of_numpy_fit_the_wire():
    sampling = oe.SamplingParams(temperature=np.float32(0.5), seed=np.uint64(2**64 - 1), top_k=np.int64(3))
    message = to_proto(oe.GenerateRequest(token_ids=np.arange(3, dtype=np.int64), sampling=sampling))
    assert list(message.token_ids.ids) == [0, 1, 2]
    assert (message.sampling.temperature, message.sampling.seed, message.sampling.top_k) == (0.5, 2**64 - 1, 3)


# ---- Struct --------------------------------------------------------------------------------------


def test_pd_11_a_struct_keeps_types_and_numbers_are_floats():
    values = {"n": 1, "f": 0.5, "t": True, "s": "1", "none": None, "l": [1, [False, {}], "x"], "o": {"a": {"b": 2}}}
    struct = Struct()
    fill_struct(struct, values)
    back = read_struct(Struct.FromString(struct.SerializeToString()))
    assert back == values
    assert type(back["n"]) is float and type(back["t"]) is bool and type(back["l"][0]) is float


def test_pd_11_integers_that_no_double_holds_go_as_text():
    struct = Struct()
    fill_struct(struct, {"id": 2**53 + 1, "edge": 2**53, "numpy": np.int64(7), "ids": np.arange(2)})
    assert read_struct(struct) == {"id": str(2**53 + 1), "edge": 2.0**53, "numpy": 7.0, "ids": [0.0, 1.0]}


def test_a_struct_value_of_no_kind_is_refused():
    message = request(kv=pb.KvOptions(session=pb.KvSessionRef(session_id="s")))
    message.kv.session.attributes_struct.fields["k"].SetInParent()
    with pytest.raises(oe.InvalidArgument, match=r"^kv\.session\.attributes_struct has no value for 'k'"):
        from_proto(message)


# ---- token records -------------------------------------------------------------------------------


def text(token_id: int) -> str:
    return f"<{token_id}>"


def test_lgp_03_arrays_of_candidates_become_the_records_that_their_objects_are():
    rng = np.random.default_rng(0)
    ids, ranks = rng.integers(0, 500, (4, 3)), rng.integers(1, 500, (4, 3))
    logprobs = -rng.random((4, 3), dtype=np.float32)
    scores = TokenScores(logprobs[:, 0], ranks[:, 0], ids, logprobs, ranks)
    prompt = PromptTokens(list(range(5)), text, 0, scores)
    from_arrays = generate_response("r", oe.PromptOutput(prompt))
    assert from_arrays == generate_response("r", oe.PromptOutput(tuple(prompt)))
    assert from_proto(from_arrays).tokens == prompt
    token = oe.TokenInfo(1, "a", -0.5, 2, Candidates(ids[0], logprobs[0], ranks[0], text))
    response = generate_response("r", oe.TokenOutput(0, (token,), "a"))
    assert from_proto(response) == oe.TokenOutput(0, (token,), "a")
    assert [c.logprob for c in response.token.tokens[0].candidates] == logprobs[0].tolist()


def test_lgp_02_lgp_10_a_token_without_scores_has_none_on_the_wire():
    response = generate_response("r", oe.TokenOutput(0, (oe.TokenInfo(0, ""),), ""))
    token = response.token.tokens[0]
    assert response.token.HasField("output_index")
    assert not token.HasField("logprob") and not token.HasField("rank") and not token.candidates


def test_use_01_usage_goes_with_the_event_that_has_it():
    usage = oe.Usage(3, 0, 3, cached_prompt_tokens=0)
    stop = oe.StopMatch(eos_token_id=0)
    last = oe.GenerationFinished(0, oe.FinishReason.STOP, stop_match=stop, usage=usage)
    response = generate_response("r", last)
    assert response.usage.HasField("cached_prompt_tokens") and not response.usage.HasField("reasoning_tokens")
    assert response.finished.stop_match.WhichOneof("match") == "eos_token_id"
    assert from_proto(response) == last
    assert not generate_response("r", dataclasses.replace(last, usage=None)).HasField("usage")
    assert generate_error("r", oe.InternalError("x"), usage).usage == response.usage


def test_tensors_become_arrays_that_are_the_values_own():
    message = pb.DenseFloatTensor(shape=[2, 2], values=[1, 2, 3, 4])
    tensor = from_proto(message)
    message.values[0] = 9
    assert tensor == oe.DenseFloatTensor(shape=(2, 2), values=[1, 2, 3, 4])
    assert tensor.values.dtype == np.float32 and tensor.numpy().tolist() == [[1, 2], [3, 4]]
    assert tensor != oe.DenseFloatTensor(shape=(4,), values=[1, 2, 3, 4])


def test_prompts_of_ten_megabytes_become_arrays_without_python_loops():
    ids = np.random.default_rng(0).integers(0, 2**17, 3_500_000).astype(np.uint32)
    wire = to_proto(oe.GenerateRequest(request_id="r", model="m", token_ids=ids)).SerializeToString()
    assert len(wire) > 10_000_000
    message = pb.GenerateRequest.FromString(wire)
    start = time.perf_counter()
    value = from_proto(message)
    print(f"{len(ids)} token ids in {(time.perf_counter() - start) * 1e3:.1f} ms")  # a measurement, not a test
    assert value.token_ids.dtype == np.uint32 and np.array_equal(value.token_ids, ids)


# ---- errors --------------------------------------------------------------------------------------


CLASSES = [getattr(errors, name) for name in errors.__all__ if name != "OpenEngineError"]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_err_05_every_error_has_a_code_a_status_and_a_way_back(kind):
    exc = kind("what went wrong", details={"limit": 3, "name": "x"})
    error = to_engine_error(exc)
    assert pb.ErrorCode.Name(error.code) == f"ERROR_CODE_{exc.code}" and error.code
    assert (error.message, error.retryable) == ("what went wrong", exc.retryable)
    back = from_engine_error(error, status=status_of(exc))
    assert issubclass(kind, type(back)) and (back.code, back.message) == (exc.code, exc.message)
    assert (back.retryable, back.grpc_status) == (exc.retryable, exc.grpc_status)
    assert back.details == {"limit": 3.0, "name": "x"}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_status_is_one_of_grpc(kind):
    grpc = pytest.importorskip("grpc", reason="needs grpcio, of the extra rpc")
    assert hasattr(grpc.StatusCode, status_of(kind("x")))


def test_err_06_the_delay_is_there_for_retryable_errors_only():
    assert not to_engine_error(oe.Overloaded("x")).HasField("retry_after_ms")
    error = to_engine_error(oe.Overloaded("x", retry_after_ms=0))
    assert error.retryable and error.HasField("retry_after_ms") and error.retry_after_ms == 0
    assert from_engine_error(error).retry_after_ms == 0
    assert from_engine_error(pb.EngineError(code=pb.ERROR_CODE_INTERNAL, retry_after_ms=5)).retry_after_ms is None


def test_err_07_the_keys_of_details_are_namespaced_once():
    error = to_engine_error(oe.InvalidArgument("x", details={"field": "top_k", "openengine.limit": 3}))
    assert sorted(error.details.fields) == ["openengine.field", "openengine.limit"]
    assert not to_engine_error(oe.InvalidArgument("x")).HasField("details")


def test_err_09_a_server_may_call_any_error_retryable():
    assert isinstance(from_engine_error(pb.EngineError(code=pb.ERROR_CODE_OVERLOADED)), oe.RequestTooLarge)
    back = from_engine_error(pb.EngineError(code=pb.ERROR_CODE_INTERNAL, retryable=True, retry_after_ms=7))
    assert (type(back), back.retryable, back.retry_after_ms) == (oe.InternalError, True, 7)
    assert not oe.InternalError.retryable


def test_an_error_from_outside_the_tree_is_internal():
    error = to_engine_error(RuntimeError("out of paper"))
    assert error.code == pb.ERROR_CODE_INTERNAL and error.message == "RuntimeError: out of paper"
    assert status_of(RuntimeError()) == "INTERNAL"
    assert isinstance(from_engine_error(pb.EngineError(code=99, message="new")), oe.InternalError)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("INVALID_ARGUMENT", oe.InvalidArgument),
        ("FAILED_PRECONDITION", oe.PreconditionFailed),
        ("OUT_OF_RANGE", oe.OutOfRange),
        ("NOT_FOUND", oe.ModelNotFound),
        ("ALREADY_EXISTS", oe.DuplicateRequest),
        ("RESOURCE_EXHAUSTED", oe.Overloaded),
        ("UNAVAILABLE", oe.Unreachable),
        ("UNAUTHENTICATED", oe.Unauthenticated),
        ("CANCELLED", oe.Cancelled),
        ("DATA_LOSS", oe.InternalError),
    ],
)
def test_a_status_alone_gives_the_error_that_most_likely_caused_it(status, kind):
    exc = error_of_status(status, "message")
    assert type(exc) is kind and exc.details == {"grpc_status": status}


@pytest.mark.parametrize("kind", [pb.DrainResponse, pb.SubscribeKvEventsResponse, pb.SubscribeRuntimeEventsResponse])
def test_err_02_the_error_that_ends_a_stream_is_raised_on_the_other_side(kind):
    response = stream_error(kind, oe.Draining("busy", retry_after_ms=5))
    with pytest.raises(oe.Draining, match="busy") as caught:
        from_proto(response)
    assert caught.value.retry_after_ms == 5
    with pytest.raises(oe.KvTransferFailed):
        from_proto(generate_error("r", oe.KvTransferFailed("lost")))


# ---- imports -------------------------------------------------------------------------------------


def loaded_by(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"],
        check=True,
        capture_output=True,
        text=True,
    )
    return set(done.stdout.split())


def test_importing_openengine_brings_neither_grpc_nor_protobuf():
    assert not loaded_by("import openengine; openengine.TokenizeRequest, openengine.EmbedRequest") & {"grpc", "google"}


def test_conversions_need_neither_grpc_nor_torch():
    assert not loaded_by("import openengine.rpc.convert") & {"grpc", "torch"}
