"""Guided decoding over gRPC: every kind of guide as in process, refusals as statuses, and a server that waits for none."""

from __future__ import annotations

import asyncio
import threading
import time

import grpc
import pytest

pytest.importorskip("llguidance")

from openengine import GenerateRequest, GuidedDecoding, IncompleteOutput, InvalidArgument, build_request
from openengine.rpc import Client
from openengine.rpc import openengine_pb2 as pb
from openengine.rpc.convert import from_proto, to_proto
from tests.guided_cases import CASES, EOS, PERSON, REFUSED, guided_engine, ids
from tests.rpc.serving import ServerProcess, is_idle, request, run, status

INVALID = grpc.StatusCode.INVALID_ARGUMENT
REGEX = "[a-z]{3}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    process = ServerProcess("-m", "tests.rpc.guided_server", str(tmp_path_factory.mktemp("served")))
    yield process
    assert process.stop() == 0, process.errors[-20:]


@pytest.fixture(scope="module")
def stub(server):
    return server.stub


@pytest.fixture(scope="module")
def client(server):
    with Client(server.target) as client:
        yield client


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with guided_engine(tmp_path_factory.mktemp("local")) as engine:
        yield engine


def guided(prompt: str = "x", **options) -> pb.GenerateRequest:
    """A request as the keywords of `generate` describe it."""
    fields = {"max_tokens": 60, **options}
    message = to_proto(build_request(ids(prompt), None, {"request_id": "?", "model": "scripted", **fields}))
    message.request_id = request().request_id
    return message


def test_mod_08_every_guide_that_works_is_listed(stub):
    model = stub.GetModelInfo(pb.GetModelInfoRequest(model="scripted"))
    assert model.generation.guided_decoding.supported
    assert sorted(model.generation.guided_decoding.modes) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", CASES)
def test_gde_01_to_06_outputs_are_those_in_process(stub, engine, name):
    options = {**CASES[name][0], "seed": 8, "num_sequences": 2, "max_tokens": 50}
    here = engine.generate(ids("x"), **options)
    there = run(stub, guided(**options))
    assert [there.all_ids[output.index] for output in here.outputs] == [output.token_ids for output in here.outputs]
    assert [there.texts[output.index] for output in here.outputs] == [output.text for output in here.outputs]
    told = {finished.output_index: finished.message for finished in there.finished}
    assert [told[output.index] for output in here.outputs] == [output.message for output in here.outputs]


@pytest.mark.parametrize("name", REFUSED)
def test_gde_07_gde_08_a_guide_that_does_not_compile_is_refused_before_acceptance(stub, name):
    options, said = REFUSED[name]
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(guided(**options), timeout=30))
    assert caught.value.code() is INVALID and said in caught.value.details()


def test_gde_09_gde_10_one_guide_and_a_known_backend(stub):
    for guide in (pb.GuidedDecoding(), pb.GuidedDecoding(regex="a", backend="other")):
        message = request(ids("x"))
        message.guided.CopyFrom(guide)
        assert status(lambda message=message: stub.Generate(message)) is INVALID
    named = guided(regex=REGEX)
    named.guided.backend = "llguidance"
    assert run(stub, named).finished


def test_stp_18_a_complete_guide_ends_with_eos(stub):
    result = run(stub, guided("d", regex="[0-9]{3}", temperature=0, min_tokens=10))
    assert result.text == "777" and result.finished[0].stop_match.eos_token_id == EOS


def test_gde_11_max_tokens_cuts_and_streaming_adds_up(stub, client, engine):
    result = run(stub, guided(json_schema=PERSON, seed=1, max_tokens=9))
    assert result.finished[0].reason == pb.FINISH_REASON_LENGTH and "cut off" in result.finished[0].message
    assert engine.compile_guide(json_schema=PERSON).accepts_prefix(result.text)
    events = [event.text for event in client.stream(ids("x"), json_schema=PERSON, seed=3)]
    assert "".join(events) == engine.generate(ids("x"), json_schema=PERSON, seed=3).text and len(events) > 3


def test_gde_12_different_guides_at_once_do_not_mix(client, engine):
    jobs = [{**guide, "max_tokens": 40, "seed": index} for index, (guide, _, _) in enumerate(CASES.values())]
    requests = [build_request(ids("x"), None, {**job}) for job in jobs]
    assert [r.text for r in client.generate(requests)] == [r.text for r in engine.generate(requests)]


def test_the_client_parses_as_the_engine_does(client, engine):
    pydantic = pytest.importorskip("pydantic")

    class Person(pydantic.BaseModel, extra="forbid"):
        name: str = pydantic.Field(max_length=5)

    assert isinstance(client.generate(ids("x"), json_schema=Person, seed=4).parsed, Person)
    assert client.generate(ids("x"), json_schema=PERSON, seed=3).parsed.keys() == {"first_name", "age"}
    with pytest.raises(IncompleteOutput, match="max_tokens 9 reached"):
        client.generate(ids("x"), json_schema=PERSON, seed=1, max_tokens=9).parsed
    compiled = engine.compile_guide(regex=REGEX)
    assert compiled.accepts(client.generate(ids("x"), guided=compiled).text)
    with pytest.raises(InvalidArgument, match="position"):
        client.generate(ids("x"), regex="(")
    assert compiled.accepts(asyncio.run(client.agenerate(ids("x"), regex=REGEX)).text)


def test_a_compiled_guide_goes_over_the_wire_as_its_source(engine):
    message = to_proto(GenerateRequest(request_id="r", model="m", prompt="x", guided=engine.compile_guide(regex=REGEX)))
    assert from_proto(message).guided == GuidedDecoding(regex=REGEX)


def test_no_request_waits_for_the_guides_of_others(server, stub):
    slow = [guided(choice=[f"{text} {index}" for index in range(9_000)]) for text in range(12)]
    calls = [stub.Generate(message) for message in slow]
    codes: list[grpc.StatusCode] = []
    readers = [threading.Thread(target=lambda call=call: codes.append(outcome(call))) for call in calls]
    for reader in readers:
        reader.start()
    began = time.monotonic()
    for _ in range(5):
        assert run(stub, request(ids("x"), max_tokens=4)).finished
    assert time.monotonic() - began < 5
    for call in calls[2:]:
        call.cancel()
    for reader in readers:
        reader.join()
    assert set(codes) <= {grpc.StatusCode.CANCELLED, INVALID, grpc.StatusCode.OK} and len(codes) == len(calls)
    assert run(stub, guided(regex=REGEX)).finished
    assert is_idle(server)


def outcome(call: grpc.Call) -> grpc.StatusCode:
    try:
        for _ in call:
            pass
    except grpc.RpcError as exc:
        return exc.code()
    return grpc.StatusCode.OK
