"""Details of the requirements that one look at a request does not show: under traffic, at limits, in what is left out."""

from __future__ import annotations

import grpc
import pytest

from openengine.rpc import openengine_pb2 as pb
from openengine.rpc import tokenizer_pb2 as tok
from tests.rpc.scripted_server import VOCAB_SIZE, VOCABULARY
from tests.rpc.serving import fresh_id, is_idle, load, request, run, running, status
from tests.waiting import wait_until

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
INVALID = grpc.StatusCode.INVALID_ARGUMENT
C = VOCABULARY.index("c")


@pytest.fixture
def busy(server):
    """Eight requests that hold every slot."""
    wait_until(lambda: is_idle(server))
    calls = [server.stub.Generate(request("s", max_tokens=1500)) for _ in range(8)]
    wait_until(lambda: load(server).running_requests == 8)
    yield
    for call in calls:
        call.cancel()
    wait_until(lambda: is_idle(server))


# ---- Generate ------------------------------------------------------------------------------------


def test_gen_05_the_vocabulary_is_the_tokenizer_services_and_its_last_id_is_taken(server):
    info = server.tokenizer.GetTokenizerInfo(tok.GetTokenizerInfoRequest(model="scripted"))
    assert info.vocab_size == VOCAB_SIZE
    last = VOCAB_SIZE - 1
    message = request(
        [last],
        stopping__conditions=[pb.StopCondition(stop_token_id=last)],
        response__output_candidates=pb.CandidateTokenSelection(token_ids=pb.TokenIds(ids=[last])),
    )
    assert run(server.stub, message).finished


def test_mod_09_as_many_sequences_as_advertised_run(stub):
    info = stub.GetModelInfo(pb.GetModelInfoRequest(model="scripted"))
    count = info.generation.max_num_sequences
    assert len(run(stub, request(max_tokens=2, sampling__num_sequences=count)).finished) == count
    assert status(lambda: stub.Generate(request(sampling__num_sequences=count + 1))) is INVALID


def test_gen_15_a_queued_request_that_is_cancelled_is_gone(server, busy):
    message = request("c")
    call = server.stub.Generate(message)
    wait_until(lambda: load(server).queued_requests == 1)
    call.cancel()
    wait_until(lambda: load(server).queued_requests == 0, timeout=2)
    assert load(server).running_requests == 8


def test_gen_15_a_deadline_ends_a_queued_request(server, busy):
    with pytest.raises(grpc.RpcError) as caught:
        list(server.stub.Generate(request("c"), timeout=0.2))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: load(server).queued_requests == 0, timeout=2)


def test_ld_05_waiting_tokens_are_those_of_queued_prompts(server, busy):
    assert load(server).waiting_tokens == 0
    calls = [server.stub.Generate(request(prompt)) for prompt in ("hello", "you")]
    wait_until(lambda: load(server).queued_requests == 2)
    wait_until(lambda: load(server).waiting_tokens == 8)
    for call in calls:
        call.cancel()


def test_smp_08_a_seed_gives_the_same_tokens_whatever_else_runs(stub):
    def ask():
        return run(stub, request("hello", max_tokens=16, sampling__seed=7, sampling__num_sequences=2)).all_ids

    alone = ask()
    others = [stub.Generate(request("hello", max_tokens=400, sampling__seed=7)) for _ in range(4)]
    for other in others:
        next(other)
    assert ask() == alone
    for other in others:
        other.cancel()


@pytest.mark.parametrize(("min_tokens", "text"), [(3, "d"), (4, "defghijklm")])
def test_stp_05_a_stop_text_counts_only_if_it_ends_after_min_tokens(stub, min_tokens, text):
    options = {"stopping__min_tokens": min_tokens, "stopping__conditions": [pb.StopCondition(stop_text="ef")]}
    assert run(stub, request("c", max_tokens=10, **options)).text == text


# ---- what is refused comes in one order ----------------------------------------------------------


def test_drn_03_a_draining_engine_says_so_before_it_judges_a_request(tmp_path):
    from tests.rpc.test_generate import REFUSED

    def anew(message):
        message = type(message).FromString(message.SerializeToString())
        message.request_id = fresh_id()
        return message

    with running("-m", "tests.rpc.scripted_server", str(tmp_path)) as server:
        stub = server.stub
        list(stub.Drain(pb.DrainRequest(stop_accepting_new_requests=True)))
        messages = [anew(message) for message, _ in REFUSED.values()]
        messages += [pb.GenerateRequest(), request("word " * 100_000), request(model="nobody", sampling__top_p=7.0)]
        for message in messages:
            assert status(lambda message=message: stub.Generate(message)) is UNAVAILABLE, message
        context = pb.TaskRequestContext(request_id="t", model="nobody")
        for task, kind in (
            (stub.Embed, pb.EmbedRequest),
            (stub.Classify, pb.ClassifyRequest),
            (stub.Score, pb.ScoreRequest),
        ):
            for message in (kind(), kind(context=context)):
                assert status(lambda task=task, message=message: task(message)) is UNAVAILABLE
        broken = pb.LoadLoraRequest(adapter=pb.LoraAdapter(lora_id=-1))
        assert status(lambda: stub.LoadLora(broken)) is UNAVAILABLE


def test_gen_01_02_an_empty_id_is_said_before_a_field_that_is_wrong(stub):
    message = request(model="nobody", media=[pb.MediaItem(modality=99)])
    message.request_id = ""
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(message))
    assert caught.value.code() is INVALID and "request_id" in caught.value.details()


# ---- abort, drain, events ------------------------------------------------------------------------


def test_abt_05_a_thousand_finished_ids_are_remembered(stub):
    first = request(max_tokens=0)
    run(stub, first)
    for _ in range(64):
        for call in [stub.Generate(request(max_tokens=0)) for _ in range(16)]:
            list(call)
    assert stub.Abort(pb.AbortRequest(request_id=first.request_id)).status == pb.ABORT_STATUS_ALREADY_FINISHED


def test_drn_09_reports_count_what_is_in_flight(server):
    wait_until(lambda: is_idle(server))
    calls = [server.stub.Generate(request("s", max_tokens=500)) for _ in range(3)]
    for call in calls:
        next(call)
    drain = server.stub.Drain(pb.DrainRequest())
    first = next(drain)
    assert (first.in_flight_requests, first.open_kv_sessions) == (3, 0) and first.HasField("open_kv_sessions")
    for call in calls:
        call.cancel()
    assert [report.in_flight_requests for report in drain][-1] == 0


def test_rte_05_a_reader_that_falls_behind_is_told_how_many_events_it_lost(tmp_path):
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]  # a reader with a small buffer
    with running("-m", "tests.rpc.scripted_server", str(tmp_path)) as server:
        with grpc.insecure_channel(server.target, options=window) as channel:
            from openengine.rpc import openengine_pb2_grpc

            slow = openengine_pb2_grpc.OpenEngineStub(channel).SubscribeRuntimeEvents(
                pb.SubscribeRuntimeEventsRequest(types=[pb.RUNTIME_EVENT_TYPE_FORWARD_PASS])
            )
            slow.initial_metadata()
            for _ in range(2):
                run(server.stub, request("c", max_tokens=1000))
            run(server.stub, request("c", max_tokens=1))
            lost, seen = 0, 0
            while seen + lost < 2 * 1000 + 1:
                event = next(slow).runtime_event
                lost += int(event.attributes.get("dropped", 0))
                seen += 1
            assert lost and event.attributes["step"] == str(2 * 1000), "the newest are kept"
            slow.cancel()


def test_kv_16_blocks_of_the_base_model_name_no_adapter(stub):
    events = stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(include_snapshot=True))
    run(stub, request("blocks of the base model", max_tokens=1))
    stored = []
    while not stored:
        stored = [e.block_stored for e in next(events).batch.events if e.WhichOneof("event") == "block_stored"]
    assert not any(block.lora_name or block.lora_id for block in stored)
    events.cancel()
