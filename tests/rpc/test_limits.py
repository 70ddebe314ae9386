"""What a server bounds: messages, calls at work, texts; and that a stop waits for what was accepted, and for nothing else."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections import Counter

import grpc
import pytest

from openengine import LogProb, RequestTooLarge, TokenInfo, TokenOutput
from openengine.rpc import openengine_pb2 as pb
from openengine.rpc import openengine_pb2_grpc
from openengine.rpc import tokenizer_pb2 as tok
from openengine.rpc.calls import MessageLimit
from tests.checkpoints import write_checkpoint
from tests.rpc.scripted_server import VOCAB_SIZE
from tests.rpc.serving import fresh_id, health_of, is_idle, load, request, run, running, status
from tests.waiting import wait_until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
EVERYTHING = pb.CandidateTokenSelection(all=pb.AllCandidates())
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


# ---- messages ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A server of the smallest messages, whose steps make large batches of KV events."""
    options = ("max_message_bytes=65536", "context=8192", "num_kv_blocks=4096", "max_num_batched_tokens=8192")
    with running("-m", "tests.rpc.scripted_server", str(tmp_path_factory.mktemp("small")), *options) as server:
        yield server


def test_err_02_held_back_tokens_that_are_too_much_for_a_message_come_in_several(small):
    held = (ALPHABET * 9)[3:]  # 230 letters, none of which is sent before the next one is known
    stop = pb.StopCondition(stop_text=held + "?")
    message = request("c", max_tokens=240, stopping__conditions=[stop], response__output_candidates=EVERYTHING)
    found = run(small.stub, message)
    assert found.text == (ALPHABET * 10)[3:243] and found.finished
    assert len(found.infos) == 240 and all(len(info.candidates) == VOCAB_SIZE for info in found.infos)
    assert sum(output.ByteSize() for output in found.tokens) > 2 * 65536
    held_back = [output for output in found.tokens if not output.text]
    assert len(held_back) > 100, "the text of held-back tokens comes with the last of them"


@pytest.mark.parametrize(
    "fields", [{"response__return_prompt_logprobs": True}, {"response__prompt_candidates": EVERYTHING}]
)
def test_lgp_06_a_prompt_whose_scores_are_too_much_for_a_message_is_refused(small, fields):
    def ask(length):
        return request([3] * length, max_tokens=1, **fields)

    assert status(lambda: small.stub.Generate(ask(3000))) is INVALID
    assert status(lambda: small.stub.Generate(request("c" * 3000, max_tokens=1, **fields))) is INVALID
    assert run(small.stub, ask(40)).prompt


def test_err_02_a_token_that_no_message_takes_is_one_error(tmp_path):
    limit = MessageLimit(65536)
    candidates = tuple(LogProb(index, -1.0, "x" * 40, 1) for index in range(2000))
    event = TokenOutput(0, (TokenInfo(1, "a", -1.0, 1, candidates[:10]), TokenInfo(2, "b", -1.0, 1, candidates)), "ab")
    responses = limit.responses("r", event)
    assert next(responses).token.text == "", "the first of the two tokens"
    with pytest.raises(RequestTooLarge, match="the limit is 65536"):
        next(responses)


def test_err_02_a_batch_of_events_that_no_message_takes_ends_the_subscription_with_one_error(small):
    events = small.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
    events.initial_metadata()
    run(small.stub, request("hello" * 1600, max_tokens=1))
    *_, last = events
    assert last.error.code == pb.ERROR_CODE_OVERLOADED and not last.error.retryable
    assert "the limit is 65536" in last.error.message and events.code() is grpc.StatusCode.OK


def test_an_answer_that_no_message_takes_is_a_status_that_says_the_limit(small):
    calls = (
        lambda: small.tokenizer.Tokenize(tok.TokenizeRequest(model="scripted", text="ab" * 9000, return_offsets=True)),
        lambda: small.tokenizer.ComputeCacheKeys(
            tok.ComputeCacheKeysRequest(model="scripted", tokens=tok.TokenSequence(ids=[1] * 60000))
        ),
    )
    for call in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is EXHAUSTED and "the limit is 65536" in caught.value.details()
        assert "openengine-error-bin" in dict(caught.value.trailing_metadata())


@pytest.mark.parametrize("wanted", [None, 2**32 - 1, 1000])
def test_art_05_chunks_of_artifacts_fit_into_messages(small, wanted):
    chunks = list(
        small.tokenizer.GetTokenizerArtifacts(
            tok.GetTokenizerArtifactsRequest(model="scripted", max_chunk_bytes=wanted)
        )
    )
    assert chunks and all(chunk.ByteSize() <= 65536 and len(chunk.data) <= (wanted or 65536) for chunk in chunks)


# ---- texts ---------------------------------------------------------------------------------------


def test_tok_10_a_text_longer_than_the_tokenizers_info_says_is_refused(server):
    limit = server.tokenizer.GetTokenizerInfo(tok.GetTokenizerInfoRequest(model="scripted")).max_input_bytes
    assert limit == 1 << 20, "the least: longer than any prompt here"
    long = "a" * (limit + 1)
    for call, kind in (
        (server.tokenizer.Tokenize, tok.TokenizeRequest),
        (server.tokenizer.ComputeCacheKeys, tok.ComputeCacheKeysRequest),
    ):
        with pytest.raises(grpc.RpcError, match=f"the limit is {limit}") as caught:
            call(kind(model="scripted", text=long))
        assert caught.value.code() is INVALID
        assert status(lambda call=call, kind=kind: call(kind(model="nobody", text=long))) is grpc.StatusCode.NOT_FOUND


def test_texts_of_requests_that_cannot_fit_are_refused_unread(server, embedding):
    limit = 1 << 20
    long = "a" * (limit + 1)
    assert status(lambda: server.stub.Generate(request(long))) is INVALID
    assert status(lambda: server.stub.Generate(request(long, model="nobody"))) is grpc.StatusCode.NOT_FOUND
    inputs = [pb.TaskInput(item_id="a", text="x"), pb.TaskInput(item_id="b", text=long)]
    context = pb.TaskRequestContext(request_id=fresh_id(), model="tiny")
    with pytest.raises(grpc.RpcError, match=rf"inputs\[1\]\.text has {limit + 1} bytes") as caught:
        embedding.stub.Embed(pb.EmbedRequest(context=context, inputs=inputs))
    assert caught.value.code() is INVALID


def test_more_token_ids_than_the_longest_text_has_bytes_are_refused(server):
    ids = [1] * ((1 << 20) + 1)
    calls = (
        lambda: server.tokenizer.Detokenize(tok.DetokenizeRequest(model="scripted", token_ids=ids)),
        lambda: server.tokenizer.ComputeCacheKeys(
            tok.ComputeCacheKeysRequest(model="scripted", tokens=tok.TokenSequence(ids=ids))
        ),
    )
    for call in calls:
        with pytest.raises(grpc.RpcError, match=f"{len(ids)} token ids, the limit is {1 << 20}") as caught:
            call()
        assert caught.value.code() is INVALID


# ---- calls at work -------------------------------------------------------------------------------


def test_only_work_counts_for_the_limit_of_calls(tmp_path):
    with running("-m", "tests.rpc.scripted_server", str(tmp_path), "max_concurrent_rpcs=2") as server:
        stub = server.stub
        idle = [stub.SubscribeRuntimeEvents(pb.SubscribeRuntimeEventsRequest(types=[4])) for _ in range(4)]
        for events in idle:
            events.initial_metadata()
        messages = [request("s", max_tokens=1500) for _ in range(2)]
        calls = [stub.Generate(message) for message in messages]
        for call in calls:
            next(call)
        with pytest.raises(grpc.RpcError, match="the limit max_concurrent_rpcs is 2") as caught:
            list(stub.Generate(request()))
        assert caught.value.code() is EXHAUSTED
        assert status(lambda: server.tokenizer.Tokenize(tok.TokenizeRequest(model="scripted", text="a"))) is EXHAUSTED
        assert health_of(server.channel) == 1 and stub.Health(pb.HealthRequest()).state == pb.HEALTH_STATE_READY
        assert stub.GetEngineInfo(pb.GetEngineInfoRequest()).engine_name
        for message in messages:
            stub.Abort(pb.AbortRequest(request_id=message.request_id))
        for call in calls:
            list(call)
        wait_until(lambda: is_idle(server))
        assert run(stub, request()).text == "defg", "ended calls no longer count"


# ---- stopping ------------------------------------------------------------------------------------


def test_hlt_07_probes_whose_callers_have_left_are_gone_and_hold_up_no_sigterm(tmp_path):
    with running("-m", "tests.rpc.scripted_server", str(tmp_path), "max_num_seqs=1") as server:
        call = server.stub.Generate(request("s", max_tokens=600))
        next(call)
        for _ in range(40):
            probe = pb.HealthRequest(include_inference_probe=True)
            assert (
                status(lambda probe=probe: server.stub.Health(probe, timeout=0.01)) is grpc.StatusCode.DEADLINE_EXCEEDED
            )
        probes = [server.stub.Health.future(pb.HealthRequest(include_inference_probe=True)) for _ in range(40)]
        wait_until(lambda: load(server).queued_requests == 40)
        for probe in probes:
            probe.cancel()
        wait_until(lambda: load(server).queued_requests == 0, timeout=2)
        waiting = [server.stub.Health.future(pb.HealthRequest(include_inference_probe=True)) for _ in range(40)]
        wait_until(lambda: load(server).queued_requests == 40)
        server.process.terminate()
        wait_until(lambda: health_of(server.channel) == 2, timeout=2)
        assert status(lambda: server.stub.Generate(request())) is grpc.StatusCode.UNAVAILABLE
        assert sum(len(response.token.tokens) for response in call) == 599
        assert server.process.wait(10) == 0
        assert all(probe.done() for probe in waiting)


def test_sigterm_waits_for_a_slow_reader_within_its_limit(tmp_path):
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]  # a reader with a small buffer
    with running("-m", "tests.rpc.scripted_server", str(tmp_path)) as server:
        with grpc.insecure_channel(server.target, options=window) as channel:
            stub = openengine_pb2_grpc.OpenEngineStub(channel)
            slow = stub.Generate(request("c", max_tokens=1500, response__output_candidates=EVERYTHING))
            first = next(slow)
            wait_until(lambda: is_idle(server))
            server.process.terminate()
            time.sleep(3)  # longer than a stop leaves for the last messages
            assert len(first.token.tokens) + sum(len(response.token.tokens) for response in slow) == 1500
        assert server.process.wait(10) == 0


# ---- metrics -------------------------------------------------------------------------------------


@pytest.fixture
def counted(tmp_path):
    with running("-m", "tests.rpc.scripted_server", str(tmp_path), "metrics_port=0") as server:
        wait_until(lambda: any("metrics on" in line for line in server.errors))
        url = re.search(r"http://\S+", "".join(server.errors))[0]

        def metrics():
            lines = urllib.request.urlopen(url).read().decode().splitlines()
            return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

        yield server, metrics


def test_refused_requests_are_counted_and_have_no_duration(counted):
    server, metrics = counted
    for _ in range(3):
        assert status(lambda: server.stub.Generate(request(sampling__temperature=-1.0))) is INVALID
        context = pb.TaskRequestContext(request_id=fresh_id(), model="scripted")
        assert status(lambda context=context: server.stub.Embed(pb.EmbedRequest(context=context)))
    found = metrics()
    assert found['openengine_requests_total{end="INVALID_ARGUMENT"}'] == 3
    assert found['openengine_requests_total{end="UNSUPPORTED_FEATURE"}'] == 3
    assert found["openengine_request_duration_seconds_count"] == 0
    run(server.stub, request("c", max_tokens=2))
    assert metrics()["openengine_request_duration_seconds_count"] == 1


def test_what_a_client_has_used_that_left_is_counted(counted):
    server, metrics = counted
    call = server.stub.Generate(request("sb", max_tokens=1500))
    for _ in range(50):
        next(call)
    call.cancel()
    wait_until(lambda: metrics().get('openengine_requests_total{end="DISCONNECTED"}') == 1)
    found = metrics()
    assert 50 <= found["openengine_generated_tokens_total"] < 1500 and found["openengine_prompt_tokens_total"] == 2
    assert found["openengine_request_duration_seconds_count"] == 1


# ---- one order of refusals -----------------------------------------------------------------------


def test_an_unknown_model_is_said_before_a_field_that_is_wrong(server):
    wrong = {"media": [pb.MediaItem(modality=99)]}
    assert status(lambda: server.stub.Generate(request(model="nobody", **wrong))) is grpc.StatusCode.NOT_FOUND
    assert status(lambda: server.stub.Generate(request(**wrong))) is INVALID
    options = tok.TokenizeOptions(truncation_side=0)
    ask = tok.TokenizeRequest(model="nobody", text="a", options=options)
    assert status(lambda: server.tokenizer.Tokenize(ask)) is grpc.StatusCode.NOT_FOUND


def test_tsk_11_a_task_that_the_model_has_not_is_said_before_a_field_that_is_wrong(server, embedding):
    options = pb.EmbedOptions(granularity=0)

    def ask(model, **more):
        context = pb.TaskRequestContext(request_id=fresh_id(), model=model)
        return pb.EmbedRequest(context=context, options=options, **more)

    assert status(lambda: server.stub.Embed(ask("scripted"))) is grpc.StatusCode.FAILED_PRECONDITION
    assert status(lambda: server.stub.Embed(ask("nobody"))) is grpc.StatusCode.NOT_FOUND
    assert status(lambda: embedding.stub.Embed(ask("tiny"))) is INVALID


# ---- readers and bursts --------------------------------------------------------------------------


def test_gen_14_a_burst_is_refused_as_overload_and_never_as_cancelled(server):
    async def ask(stub):
        try:
            return len([response async for response in stub.Generate(request("c", max_tokens=1), timeout=60)])
        except grpc.RpcError as exc:
            return exc.code()

    async def burst():
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub = openengine_pb2_grpc.OpenEngineStub(channel)
            return Counter(await asyncio.gather(*(ask(stub) for _ in range(2500))))

    ends = asyncio.run(burst())
    assert set(ends) == {2, EXHAUSTED}, ends


def test_a_reader_of_large_events_who_does_not_read_ends_his_request_and_no_other(tmp_path):
    directory = write_checkpoint(tmp_path, vocab_size=2000, max_position_embeddings=4096)
    flags = ("--model", str(directory), "--served-model-name", "wide", "--port", "0", "--max-message-bytes", "65536")
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]  # a reader with a small buffer
    everything = {
        "model": "wide",
        "stopping__ignore_eos": True,
        "sampling__temperature": 0.0,
        "response__output_candidates": EVERYTHING,
    }
    with (
        running("-m", "openengine.rpc", *flags) as server,
        grpc.insecure_channel(server.target, options=window) as channel,
    ):
        slow = openengine_pb2_grpc.OpenEngineStub(channel).Generate(request([5], max_tokens=2000, **everything))
        slow.initial_metadata()  # comes once it is accepted: before, the server is idle too
        wait_until(lambda: is_idle(server), 60)
        assert slow.is_active(), "what was sent is still there to be read"
        infos = run(server.stub, request([5], max_tokens=3, **everything)).infos
        assert [len(info.candidates) for info in infos] == [2000] * 3
        responses = list(slow)
    assert len(responses) < 2000 and responses[-1].error.code == pb.ERROR_CODE_OVERLOADED
    assert "events of some" in responses[-1].error.message and responses[-1].usage.completion_tokens < 2000
    ids = [info.token_id for response in responses for info in response.token.tokens]
    # how many came through before the limit is up to the sockets' buffers, which ones is not
    assert ids and ids[:3] == [info.token_id for info in infos][: len(ids)]


def test_tokens_made_while_a_large_prompt_is_sent_are_no_backlog(small):
    message = request([3] * 900, max_tokens=200, response__return_prompt_logprobs=True)
    found = run(small.stub, message)
    assert len(found.prompt.tokens) == 900 and len(found.infos) == 200 and found.finished
