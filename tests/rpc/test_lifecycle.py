"""Abort, drain, shutdown and the server itself: ABT and DRN, kills, TLS, tokens, flags, health, reflection, metrics."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import grpc
import pytest

from openengine import Unauthenticated
from openengine.rpc import Client, openengine_pb2_grpc
from openengine.rpc import openengine_pb2 as pb
from openengine.rpc import tokenizer_pb2 as tok
from tests.rpc.serving import ROOT, fresh_id, is_idle, load, request, run, running, status
from tests.waiting import wait_until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
ALL = pb.AbortRequest(all_requests=pb.AllRequests())
STARTED, IN_PROGRESS, COMPLETE = 1, 2, 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from tests.checkpoints import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


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


def health_of(channel, service=""):
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service)).status


@pytest.mark.parametrize("service", ["", "openengine.v1.OpenEngine", "openengine.v1.OpenEngineTokenizer"])
def test_the_standard_health_service_says_serving(server, service):
    assert health_of(server.channel, service) == 1


def test_a_generic_client_finds_and_calls_the_service_by_reflection_alone(server):
    from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    reflection = reflection_pb2_grpc.ServerReflectionStub(server.channel)

    def ask(**question):
        return next(reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**question)])))

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


# ---- python -m openengine.rpc --------------------------------------------------------------------


def serve_args(checkpoint, *more):
    return ("-m", "openengine.rpc", "--model", str(checkpoint), "--port", "0", *more)


def certificates(folder):
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        + ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return folder / "cert.pem", folder / "key.pem"


def test_tls_and_token_refuse_who_has_none_and_accept_who_has_both(checkpoint, tmp_path):
    cert, key = certificates(tmp_path)
    (tmp_path / "token").write_text("sesame\n")
    args = ("--tls-cert", str(cert), "--tls-key", str(key), "--token-file", str(tmp_path / "token"))
    with running(*serve_args(checkpoint, *args)) as server:
        assert status(lambda: server.stub.GetEngineInfo(pb.GetEngineInfoRequest(), timeout=3)) is not grpc.StatusCode.OK
        credentials = grpc.ssl_channel_credentials(cert.read_bytes())
        with grpc.secure_channel(server.target, credentials) as channel:
            stub = openengine_pb2_grpc.OpenEngineStub(channel)
            unauthenticated = grpc.StatusCode.UNAUTHENTICATED
            assert status(lambda: stub.GetEngineInfo(pb.GetEngineInfoRequest())) is unauthenticated
            for wrong in ("Bearer wrong", "sesame", "Bearer sesame "):
                metadata = (("authorization", wrong.strip() + "!"),)
                assert (
                    status(lambda: stub.GetEngineInfo(pb.GetEngineInfoRequest(), metadata=metadata)) is unauthenticated
                )
            assert status(lambda: stub.Generate(request())) is unauthenticated
            right = (("authorization", "Bearer sesame"),)
            assert stub.GetEngineInfo(pb.GetEngineInfoRequest(), metadata=right).instance_id
            assert health_of(channel) == 1, "probes have no place for a token"
        with pytest.raises(Unauthenticated, match=r"Client\(address, token="):
            Client(server.target, tls_ca=cert.read_bytes())
        with Client(server.target, tls_ca=cert.read_bytes(), token="sesame") as client:
            assert client.info().instance_id


def test_mutual_tls_refuses_a_client_without_a_certificate(checkpoint, tmp_path):
    cert, key = certificates(tmp_path)
    args = ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(cert))
    with running(*serve_args(checkpoint, *args)) as server:
        ask = pb.GetEngineInfoRequest()
        with grpc.secure_channel(server.target, grpc.ssl_channel_credentials(cert.read_bytes())) as channel:
            assert (
                status(lambda: openengine_pb2_grpc.OpenEngineStub(channel).GetEngineInfo(ask, timeout=3)) is UNAVAILABLE
            )
        credentials = grpc.ssl_channel_credentials(cert.read_bytes(), key.read_bytes(), cert.read_bytes())
        with grpc.secure_channel(server.target, credentials) as channel:
            assert openengine_pb2_grpc.OpenEngineStub(channel).GetEngineInfo(ask).instance_id


def test_flags_names_metrics_logs_and_a_clean_end(checkpoint):
    args = (
        "--served-model-name",
        "served",
        "--alias",
        "one",
        "--alias",
        "two",
        "--max-num-seqs",
        "3",
        "--metrics-port",
        "0",
    )
    args += ("--host", "0.0.0.0", "--advertise-host", "localhost", "--default-sampling", '{"temperature": 0}')
    args += ("--max-message-bytes", "65536")
    with running(*serve_args(checkpoint, *args)) as server:
        for name in ("served", "one", "two", str(checkpoint)):
            info = server.stub.GetModelInfo(pb.GetModelInfoRequest(model=name))
        assert info.served_model_name == "served" and info.max_running_requests == 3
        (source,) = server.stub.GetKvEventSources(pb.GetKvEventSourcesRequest()).sources
        assert (source.endpoint_addr.host, source.endpoint_addr.port) == ("localhost", server.port), "KV-20"
        run(server.stub, request("hello", model="one", max_tokens=3, stopping__ignore_eos=True))
        lines = [json.loads(line) for line in server.errors]
        assert {"time", "level", "logger", "message"} <= set(lines[0])
        address = next(line["message"].split()[-1] for line in lines if "metrics on" in line["message"])
        text = urllib.request.urlopen(address.replace("0.0.0.0", "127.0.0.1")).read().decode()
        assert 'openengine_requests_total{end="LENGTH"} 1.0' in text and "openengine_generated_tokens_total 3.0" in text
        assert "openengine_kv_blocks_used 0.0" in text and "openengine_time_to_first_token_seconds_count 1.0" in text
        everything = pb.CandidateTokenSelection(all=pb.AllCandidates())
        wide = {"model": "one", "response__prompt_candidates": everything, "max_tokens": 0}
        assert status(lambda: server.stub.Generate(request("far too long for one message", **wide))) is INVALID, (
            "LGP-06"
        )
        assert run(server.stub, request([7, 8, 9], **wide)).prompt
        assert server.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_exits_at_once(tmp_path_factory, checkpoint, number):
    with running(*serve_args(checkpoint, "--drain-timeout-s", "60", "--max-model-len", "256")) as server:
        stop = threading.Event()

        def keep_busy():
            while not stop.is_set():
                try:
                    for _response in server.stub.Generate(
                        request(
                            "hello",
                            model=str(checkpoint),
                            max_tokens=250,
                            stopping__ignore_eos=True,
                            request_id=fresh_id(),
                        )
                    ):
                        pass
                except grpc.RpcError:
                    return

        # Enough of them that the drain takes longer than it takes to send the second signal.
        threads = [threading.Thread(target=keep_busy) for _ in range(32)]
        for thread in threads:
            thread.start()
        wait_until(lambda: load(server).running_requests > 10)
        server.process.send_signal(number)
        os.kill(server.process.pid, 0)
        time.sleep(0.05)
        server.process.send_signal(number)
        assert server.process.wait(5) in (0, 1)
        stop.set()
        for thread in threads:
            thread.join()


def in_use():
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    return taken


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--no-such-flag"], "no-such-flag"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--host", "0.0.0.0"], "advertise_host"),
        (["--tls-cert", "/nowhere.pem"], "/nowhere.pem"),
        (["--token-file", "/nowhere"], "/nowhere"),
        (["--default-sampling", "{"], "default-sampling"),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(checkpoint, args, says, capsys):
    from openengine.rpc.__main__ import main

    try:
        code = main(["--model", str(checkpoint), "--port", "0", "--log-level", "error", *args])
    except SystemExit as exc:
        code = exc.code
    line = capsys.readouterr().err
    assert code == 2 and line.count("\n") == 1 and says in line


def test_a_port_in_use_is_one_line_and_exit_code_2(checkpoint, capsys):
    from openengine.rpc.__main__ import main

    with in_use() as taken:
        assert main(["--model", str(checkpoint), "--port", str(taken.getsockname()[1]), "--log-level", "error"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_every_field_of_engine_config_is_a_flag(checkpoint):
    from openengine import EngineConfig
    from openengine.rpc.__main__ import _engine_options, _parser

    args = _parser().parse_args(["--model", str(checkpoint)])
    assert EngineConfig(str(checkpoint), **_engine_options(args)) == EngineConfig(str(checkpoint))


_SLOW_TO_LOAD = """
import sys, time
import openengine.loading, openengine.engine
def load(config, progress):
    print("loading", flush=True)
    time.sleep(60)
openengine.engine.load = load
from openengine.rpc.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_model_loads_ends_the_process_at_once(checkpoint, number):
    args = [sys.executable, "-c", _SLOW_TO_LOAD, "--model", str(checkpoint), "--port", "0"]
    process = subprocess.Popen(args, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "loading\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=5)
    assert process.returncode == 0
    assert errors == f"openengine.rpc: stopped by {number.name} before it was ready\n"


def test_a_signal_while_imports_run_ends_the_process_at_once(checkpoint):
    args = [sys.executable, "-v", "-m", "openengine.rpc", "--model", str(checkpoint), "--port", "0"]
    process = subprocess.Popen(args, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:  # what -v tells of every import
        if "import 'torch" in line:
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 0 and "before it was ready" in errors and "Traceback" not in errors
