"""Abort, drain, shutdown and the server itself: ABT and DRN, kills, health, reflection."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import grpc
import pytest

from openengine.rpc import openengine_pb2 as pb
from openengine.rpc import tokenizer_pb2 as tok
from tests.rpc.serving import ROOT, health_of, is_idle, load, request, run, running, status
from tests.waiting import wait_until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
ALL = pb.AbortRequest(all_requests=pb.AllRequests())
STARTED, IN_PROGRESS, COMPLETE = 1, 2, 3


# ---- ABT -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target", [pb.AbortRequest(), pb.AbortRequest(request_id=""), pb.AbortRequest(kv_session=pb.KvSessionRef())]
)
def test_abt_01_exactly_one_target_with_a_name(stub, target):
    assert status(lambda: stub.Abort(target)) is INVALID


def test_abt_02_03_unknown_targets_are_not_found(stub):
    assert status(lambda: stub.Abort(pb.AbortRequest(request_id="never"))) is NOT_FOUND
    assert status(lambda: stub.Abort(pb.AbortRequest(kv_session=pb.KvSessionRef(session_id="s")))) is NOT_FOUND


def test_abt_04_05_07_08_a_running_request(server):
    message = request("s", max_tokens=1500, sampling__num_sequences=2, sampling__temperature=0.0)
    other = server.stub.Generate(request("s", max_tokens=60))
    call = server.stub.Generate(message)
    next(call)
    target = pb.AbortRequest(request_id=message.request_id)
    assert server.stub.Abort(target).status == pb.ABORT_STATUS_ABORTED
    finished = [r for r in call if r.WhichOneof("event") == "finished"]
    assert [f.finished.reason for f in finished] == [
        pb.FINISH_REASON_CANCELLED
    ] * 2 and call.code() is grpc.StatusCode.OK
    assert [f.HasField("usage") for f in finished] == [False, True]
    assert server.stub.Abort(target).status == server.stub.Abort(target).status == pb.ABORT_STATUS_ALREADY_FINISHED
    assert sum(len(r.token.tokens) for r in other) == 60, "ABT-07: the other goes on"
    wait_until(lambda: is_idle(server), timeout=2)
    assert run(server.stub, request(request_id=message.request_id)).text == "defg"


def test_abt_04_a_queued_request(server):
    busy = [server.stub.Generate(request("s", max_tokens=1500)) for _ in range(8)]
    wait_until(lambda: load(server).running_requests == 8)
    message = request("c")
    call = server.stub.Generate(message)
    wait_until(lambda: load(server).queued_requests == 1)
    assert server.stub.Abort(pb.AbortRequest(request_id=message.request_id)).status == pb.ABORT_STATUS_ABORTED
    (last,) = list(call)
    assert last.finished.reason == pb.FINISH_REASON_CANCELLED and last.usage.completion_tokens == 0
    assert server.stub.Abort(ALL).status == pb.ABORT_STATUS_ABORTED, "ABT-06"
    for stream in busy:
        assert list(stream)[-1].finished.reason == pb.FINISH_REASON_CANCELLED
    assert server.stub.Abort(ALL).status == pb.ABORT_STATUS_ALREADY_FINISHED


def test_abt_05_many_finished_ids_are_remembered(stub):
    first = request(max_tokens=0)
    run(stub, first)
    for call in [stub.Generate(request(max_tokens=0)) for _ in range(16)]:
        list(call)
    assert stub.Abort(pb.AbortRequest(request_id=first.request_id)).status == pb.ABORT_STATUS_ALREADY_FINISHED


# ---- DRN -----------------------------------------------------------------------------------------


def states(responses):
    return [response.state for response in responses]


def test_drn_01_04_05_without_stopping_it_completes_at_the_first_idle_moment(server):
    wait_until(lambda: is_idle(server))
    responses = list(server.stub.Drain(pb.DrainRequest()))
    assert states(responses) == [STARTED, COMPLETE]
    assert responses[-1].HasField("in_flight_requests") and responses[-1].in_flight_requests == 0, "DRN-09"
    assert run(server.stub, request()).text == "defg", "DRN-04"


def test_drn_06_08_a_deadline_now_with_work_left_is_one_error(server):
    call = server.stub.Generate(request("s", max_tokens=300))
    next(call)
    drain = server.stub.Drain(pb.DrainRequest(deadline_ms=0))
    *reports, last = list(drain)
    assert states(reports) == [STARTED] and drain.code() is grpc.StatusCode.OK, "DRN-02"
    assert last.error.code == pb.ERROR_CODE_DRAINING and last.error.retryable
    assert sum(len(r.token.tokens) for r in call) > 200, "the work goes on"


def test_drn_12_13_reports_come_every_second_and_cancelling_stops_them_only(server):
    call = server.stub.Generate(request("s", max_tokens=1500))
    next(call)
    drain = server.stub.Drain(pb.DrainRequest())
    start = time.monotonic()
    assert states([next(drain), next(drain)]) == [STARTED, IN_PROGRESS] and time.monotonic() - start < 2.0
    drain.cancel()
    assert next(call).token.tokens
    call.cancel()
    assert run(server.stub, request()).text == "defg"


def test_drn_07_at_the_deadline_what_runs_is_aborted_also_when_the_reader_has_left(server):
    call = server.stub.Generate(request("s", max_tokens=1500))
    next(call)
    drain = server.stub.Drain(pb.DrainRequest(deadline_ms=300, abort_after_deadline=True))
    next(drain)
    drain.cancel()
    last = list(call)[-1].finished
    assert last.reason == pb.FINISH_REASON_CANCELLED
    assert last.message == "the engine drains, and its limit of 300 ms came before the request's end"
    wait_until(lambda: any("limit of 300 ms cancels 1 requests" in line for line in server.errors))


def test_drn_03_11_hlt_06_stopping_is_final_and_all_else_goes_on(tmp_path):
    with running("-m", "tests.rpc.scripted_server", str(tmp_path)) as server:
        stub = server.stub
        call = stub.Generate(request("s", max_tokens=250))
        next(call)
        drain = stub.Drain(pb.DrainRequest(stop_accepting_new_requests=True))
        assert next(drain).state == STARTED
        assert status(lambda: stub.Generate(request())) is UNAVAILABLE
        context = pb.TaskRequestContext(request_id="t", model="scripted")
        assert status(lambda: stub.Embed(pb.EmbedRequest(context=context))) is UNAVAILABLE
        assert status(lambda: stub.LoadLora(pb.LoadLoraRequest())) is UNAVAILABLE
        assert stub.Health(pb.HealthRequest()).state == pb.HEALTH_STATE_DRAINING
        assert health_of(server.channel) == 2, "grpc.health.v1 says NOT_SERVING"
        second = stub.Drain(pb.DrainRequest(stop_accepting_new_requests=True))
        assert sum(len(r.token.tokens) for r in call) == 249, "DRN-03: what runs finishes"
        assert states(drain)[-1] == states(second)[-1] == COMPLETE
        assert stub.Health(pb.HealthRequest()).state == pb.HEALTH_STATE_DRAINING
        assert is_idle(server) and stub.GetEngineInfo(pb.GetEngineInfoRequest()).engine_name
        assert stub.Abort(ALL).status == pb.ABORT_STATUS_ALREADY_FINISHED
        assert server.tokenizer.Tokenize(tok.TokenizeRequest(model="scripted", text="a")).token_ids
        events = stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(include_snapshot=True))
        assert next(events).batch.events
        assert status(lambda: stub.Generate(request())) is UNAVAILABLE
        server.process.terminate()
        assert server.process.wait(20) == 0
        list(events)
        assert events.code() is grpc.StatusCode.OK, "a subscription ends with the engine"


# ---- kills ---------------------------------------------------------------------------------------


def test_sigterm_under_load_loses_no_accepted_request(tmp_path):
    with running("-m", "tests.rpc.scripted_server", str(tmp_path)) as server:
        results = []

        def follow(call):
            results.append(sum(len(r.token.tokens) for r in call))

        calls = [server.stub.Generate(request("s", max_tokens=80)) for _ in range(12)]
        for call in calls:
            call.initial_metadata()
        threads = [threading.Thread(target=follow, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        server.process.terminate()
        for thread in threads:
            thread.join()
        assert results == [80] * 12
        assert server.process.wait(10) == 0


_VANISHING = """
import sys, grpc
from openengine.rpc import openengine_pb2 as pb, openengine_pb2_grpc
stub = openengine_pb2_grpc.OpenEngineStub(grpc.insecure_channel(sys.argv[1]))
calls = [stub.Generate(pb.GenerateRequest(request_id=f"vanish-{i}", model="scripted", prompt="s")) for i in range(4)]
for call in calls:
    next(call)
print("running", flush=True)
sys.stdin.read()
"""


def test_sigkill_of_the_client_frees_its_requests(server):
    wait_until(lambda: is_idle(server))
    client = subprocess.Popen(
        [sys.executable, "-c", _VANISHING, server.target],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdout.readline() == "running\n"
    assert load(server).running_requests == 4
    client.kill()
    client.wait()
    wait_until(lambda: is_idle(server), timeout=2)
    assert load(server).used_kv_blocks == 0


def test_a_client_that_reads_nothing_holds_up_nobody_and_gets_everything_later(server):
    slow = server.stub.Generate(
        request("c", max_tokens=1500, response__output_candidates=pb.CandidateTokenSelection(top_n=32))
    )
    assert run(server.stub, request(max_tokens=50)).text
    wait_until(lambda: is_idle(server))
    assert sum(len(r.token.tokens) for r in slow) == 1500


def test_garbage_on_the_port_disturbs_nobody(server):
    for data in (b"\x00" * 1000, b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40):
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(data)
    assert run(server.stub, request()).text == "defg"


# ---- health and reflection -----------------------------------------------------------------------


@pytest.mark.parametrize("service", ["", "openengine.v1.OpenEngine", "openengine.v1.OpenEngineTokenizer"])
def test_the_standard_health_service_says_serving(server, service):
    assert health_of(server.channel, service) == 1


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_a_generic_client_finds_and_calls_the_service_by_reflection_alone(server, version):
    from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
    from grpc_reflection.v1alpha import reflection_pb2

    reflection = server.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )

    def ask(**question):
        return next(reflection(iter([reflection_pb2.ServerReflectionRequest(**question)])))

    names = {service.name for service in ask(list_services="").list_services_response.service}
    assert {"openengine.v1.OpenEngine", "openengine.v1.OpenEngineTokenizer", "grpc.health.v1.Health"} <= names
    files = {}
    todo = [ask(file_containing_symbol="openengine.v1.OpenEngine")]
    while todo:
        for data in todo.pop().file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            if file.name not in files:
                files[file.name] = file
                todo += [ask(file_by_filename=name) for name in file.dependency if name not in files]
    pool = descriptor_pool.DescriptorPool()
    added = set()

    def add(name):
        if name not in added:
            added.add(name)
            for dependency in files[name].dependency:
                add(dependency)
            pool.Add(files[name])

    for name in files:
        add(name)
    method = pool.FindServiceByName("openengine.v1.OpenEngine").FindMethodByName("GetModelInfo")
    ask_kind = message_factory.GetMessageClass(method.input_type)
    answer_kind = message_factory.GetMessageClass(method.output_type)
    call = server.channel.unary_unary("/openengine.v1.OpenEngine/GetModelInfo")
    message = json_format.ParseDict({"model": "scripted"}, ask_kind())
    assert answer_kind.FromString(call(message.SerializeToString())).model_id == "scripted"
