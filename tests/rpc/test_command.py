"""`python -m openengine.rpc`: flags, TLS and tokens, ports, log lines, metrics, signals and exit codes."""

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

from openengine import InvalidArgument, Unauthenticated
from openengine.rpc import Client, ServerOptions, openengine_pb2_grpc
from openengine.rpc import openengine_pb2 as pb
from tests.rpc.serving import ROOT, fresh_id, health_of, load, request, run, running, status
from tests.waiting import wait_until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from tests.checkpoints import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def serve_args(checkpoint, *more):
    return ("-m", "openengine.rpc", "--model", str(checkpoint), "--port", "0", *more)


def certificates(folder, name=""):
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        + ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        + ["-keyout", f"{name}key.pem", "-out", f"{name}cert.pem"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return folder / f"{name}cert.pem", folder / f"{name}key.pem"


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


# ---- what is wrong -------------------------------------------------------------------------------


def in_use():
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    return taken


@pytest.fixture
def complaint(checkpoint, capsys):
    """What the command line says of flags that it refuses: one line, and exit code 2."""
    from openengine.rpc.__main__ import main

    def complain(*args):
        code = main(["--model", str(checkpoint), "--port", "0", "--log-level", "error", *args])
        line = capsys.readouterr().err
        assert code == 2 and line.count("\n") == 1, line
        return line

    return complain


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--no-such-flag"], "no-such-flag"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--host", "0.0.0.0"], "advertise_host"),
        (["--tls-cert", "/nowhere.pem"], "/nowhere.pem"),
        (["--token-file", "/nowhere"], "/nowhere"),
        (["--default-sampling", "{"], "default-sampling"),
        (["--default-sampling", "[]"], "it is a list"),
        (["--default-sampling", '{"num_sequences": 65}'], "num_sequences 65 exceeds max_num_seqs 64"),
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--device", "cpu:7"], "'cpu:7'"),
        (["--max-model-len", "1"], "max_model_len must be an integer between 2 and"),
        (["--block-size", "1", "--num-kv-blocks", "1"], "make it 2 at least"),
        (["--event-buffer-size", "5000000000"], "event_buffer_size"),
        (["--event-buffer-size", str(2**63)], "event_buffer_size"),
        (["--metrics-port", "50", "--port", "50"], "metrics_port 50 is the port of the service too"),
        (["--host", "nope.invalid"], "cannot listen on nope.invalid:0"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(complaint, args, says):
    assert says in complaint(*args)


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "-1", "1e300", "604801"])
def test_a_drain_timeout_that_is_no_time_is_refused_at_the_start(complaint, seconds):
    assert "--drain-timeout-s must be between 0 and 604800" in complaint("--drain-timeout-s=" + seconds)


@pytest.mark.parametrize(
    "flag",
    ["host", "advertise-host", "tls-cert", "token-file", "alias", "served-model-name", "default-sampling", "device"]
    + ["quantization", "score-template"],
)
def test_an_empty_value_is_refused_naming_its_flag(complaint, flag):
    line = complaint(f"--{flag}", "")
    assert f"--{flag}: ''" in line


def test_a_port_in_use_is_said_before_the_model_is_loaded(complaint):
    with in_use() as taken:
        port = taken.getsockname()[1]
        for flag in ("--port", "--metrics-port"):
            assert f"cannot listen on 127.0.0.1:{port}" in complaint(flag, str(port), "--model", "/no/such/model")


def test_tls_files_that_do_not_fit_are_named_before_the_model_is_loaded(complaint, tmp_path):
    (cert, key), (other, _) = certificates(tmp_path), certificates(tmp_path, "other-")
    empty, junk = tmp_path / "empty", tmp_path / "junk"
    empty.write_bytes(b"")
    junk.write_bytes(b"no pem")

    def tls(cert, key, *more):
        return complaint("--model", "/no/such/model", "--tls-cert", str(cert), "--tls-key", str(key), *map(str, more))

    assert f"--tls-key {key} is not the key of --tls-cert {other}" in tls(other, key)
    assert f"--tls-cert {junk} holds no certificate" in tls(junk, key)
    assert f"--tls-key {junk} holds no private key" in tls(cert, junk)
    for wrong in (empty, junk):
        assert f"--tls-client-ca {wrong} holds no certificate" in tls(cert, key, "--tls-client-ca", wrong)


@pytest.mark.parametrize(
    "host",
    ["::0", "0:0:0:0:0:0:0:0", "[::]", "0.0.0.0", "::ffff:0.0.0.0", "0", "0x0", "*", "", "http://x:1", "a b", None],
)
def test_kv_20_what_nobody_can_connect_to_is_not_advertised(host):
    if host is not None:
        with pytest.raises(InvalidArgument, match="advertise_host"):
            ServerOptions(host="0.0.0.0", advertise_host=host)
    for wildcard in ("::0", "[::]", "0.0.0.0", "::ffff:0.0.0.0"):
        with pytest.raises(InvalidArgument, match="wildcard"):
            ServerOptions(host=wildcard)


@pytest.mark.parametrize("option", [{"port": True}, {"port": "1"}, {"max_message_bytes": 1e6}, {"metrics_port": -1}])
def test_a_number_of_the_server_that_is_none_is_refused_by_name(option):
    with pytest.raises(InvalidArgument, match=next(iter(option))):
        ServerOptions(**option)


# ---- starting ------------------------------------------------------------------------------------


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_an_ipv6_address_is_printed_so_that_a_client_can_use_it(checkpoint):
    args = [sys.executable, *serve_args(checkpoint, "--host", "::1")]
    process = subprocess.Popen(args, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        if not line and "Cannot assign requested address" in process.stderr.read():
            pytest.skip("no IPv6 here")
        address = line.removeprefix("listening on ").strip()
        assert address.startswith("[::1]:")
        with grpc.insecure_channel(address) as channel:
            stub = openengine_pb2_grpc.OpenEngineStub(channel)
            (source,) = stub.GetKvEventSources(pb.GetKvEventSourcesRequest(), timeout=10).sources
        assert source.endpoint_addr.host == "::1", "a host of its own field needs no brackets"
    finally:
        process.terminate()
        process.communicate(timeout=20)


def test_every_field_of_engine_config_is_a_flag(checkpoint):
    from openengine import EngineConfig
    from openengine.rpc.command import engine_options, parse

    args = parse(["--model", str(checkpoint)])
    assert EngineConfig(str(checkpoint), **engine_options(args)) == EngineConfig(str(checkpoint))


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["asyncio", "torch"], ids=["in the first moment", "later"])
def test_a_signal_while_imports_run_ends_the_process_at_once(checkpoint, module, number):
    args = [sys.executable, "-v", "-m", "openengine.rpc", "--model", str(checkpoint), "--port", "0"]
    process = subprocess.Popen(args, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:  # what -v tells of every import
        if f"import '{module}" in line:
            break
    process.send_signal(number)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 0 and "before it was ready" in errors and "Traceback" not in errors


def test_the_command_imports_nothing_large_before_it_hears_signals():
    code = "import sys, openengine.rpc.__main__; print({'asyncio', 'numpy', 'torch', 'grpc'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "set()\n"
