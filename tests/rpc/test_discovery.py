"""Discovery, load, health and events over a socket: ENG, MOD, KVC, LD, HLT, RTE and KV of the requirements."""

from __future__ import annotations

import time

import grpc
import pytest

from openengine.rpc import openengine_pb2 as pb
from openengine.rpc import tokenizer_pb2 as tok
from tests.rpc.scripted_server import VOCAB_SIZE, VOCABULARY
from tests.rpc.serving import fresh_id, is_idle, load, request, run, running, status
from tests.waiting import wait_until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
PRECOND = grpc.StatusCode.FAILED_PRECONDITION
C = VOCABULARY.index("c")


@pytest.fixture(scope="module")
def info(stub):
    return stub.GetEngineInfo(pb.GetEngineInfoRequest())


@pytest.fixture(scope="module")
def model(stub):
    return stub.GetModelInfo(pb.GetModelInfoRequest(model="scripted"))


# ---- ENG, MOD, KVC -------------------------------------------------------------------------------


def test_eng_01_no_rpc_is_unimplemented(server):
    service = pb.DESCRIPTOR.services_by_name["OpenEngine"]
    assert len(service.methods) == 17
    for method in service.methods:
        kind = "unary_stream" if method.server_streaming else "unary_unary"
        call = getattr(server.channel, kind)(f"/openengine.v1.OpenEngine/{method.name}")
        if method.name.startswith("Subscribe") or method.name == "Drain":
            stream = call(b"")
            stream.initial_metadata()
            stream.cancel()
            assert stream.code() is not grpc.StatusCode.UNIMPLEMENTED
            continue
        try:
            answer = call(b"")
            list(answer) if method.server_streaming else answer
        except grpc.RpcError as exc:
            assert exc.code() is not grpc.StatusCode.UNIMPLEMENTED, method.name


def test_eng_02_to_06_identity(info):
    assert info.schema_revision == info.minimum_client_revision == 1
    assert info.schema_release == "d0f29fec31f31db5cfd49cf3e0f67da84d10c709"
    assert info.engine_name == "openengine" and info.engine_version and info.instance_id
    assert info.role == pb.ENGINE_ROLE_AGGREGATED


def test_eng_05_ld_02_the_instance_id_is_constant(server, info):
    assert (
        server.stub.GetEngineInfo(pb.GetEngineInfoRequest()).instance_id == info.instance_id == load(server).instance_id
    )


def test_eng_07_mod_03_every_supported_model_answers_with_the_same_info(stub, info, model):
    names = list(info.supported_models)
    assert len(set(names)) == len(names) >= 4 and {"scripted", "served", "alias-1", "alias-2"} <= set(names)
    assert all(stub.GetModelInfo(pb.GetModelInfoRequest(model=name)) == model for name in names)


def test_eng_08_mod_04_reported_sizes_are_positive(model):
    for name in (
        "max_context_length",
        "kv_block_size",
        "total_kv_blocks",
        "max_running_requests",
        "max_batched_tokens",
    ):
        assert model.HasField(name) and getattr(model, name) > 0
    assert not model.HasField("max_output_tokens")


def test_eng_09_parallelism(info):
    assert info.parallelism.tensor_parallel_size == info.parallelism.data_parallel_size == 1
    assert info.parallelism.data_parallel_rank < info.parallelism.data_parallel_size


def test_eng_10_kvc_01_the_connector_is_reported_as_off(stub, info):
    connector = stub.GetKvConnectorInfo(pb.GetKvConnectorInfoRequest())
    assert connector == info.kv_connector
    assert connector.HasField("enabled") and not connector.enabled and not connector.local_endpoints


def test_mod_01_02_err_04_a_model_is_required_and_known(stub):
    assert status(lambda: stub.GetModelInfo(pb.GetModelInfoRequest())) is INVALID
    assert status(lambda: stub.GetModelInfo(pb.GetModelInfoRequest(model="nobody"))) is NOT_FOUND


def test_mod_05_to_12_capabilities(model):
    generation = model.generation
    assert model.supports_text_input and model.supports_token_ids_input
    for logprobs in (generation.prompt_logprobs, generation.output_logprobs):
        assert logprobs.supported and sorted(logprobs.candidate_selection_modes) == [1, 2, 3]
        assert logprobs.max_top_n == VOCAB_SIZE
    assert generation.guided_decoding.HasField("supported")
    assert generation.guided_decoding.supported == bool(generation.guided_decoding.modes)
    assert generation.max_num_sequences == 8
    for name in ("priority", "stop_in_output", "cache_salt", "prefix_cache_bypass"):
        assert getattr(generation, f"supports_{name}")
    assert model.HasField("supports_lora") and not model.supports_lora and not model.supports_multimodal
    assert [field.name for field, _value in model.tasks.ListFields()] == ["score"], "a causal model scores label tokens"


def test_mod_14_discovery_is_constant(stub, info, model):
    assert stub.GetEngineInfo(pb.GetEngineInfoRequest()) == info
    assert stub.GetModelInfo(pb.GetModelInfoRequest(model="scripted")) == model


@pytest.mark.parametrize("task", ["Embed", "Classify", "Score"])
def test_tsk_11_cap_02_tasks_that_the_model_does_not_advertise_are_refused(stub, task):
    kind = getattr(pb, f"{task}Request")
    context = pb.TaskRequestContext(request_id="t", model="scripted")
    method = getattr(stub, task)
    # Of a task that it performs, the request is judged: this one is empty.
    assert status(lambda: method(kind(context=context))) is (INVALID if task == "Score" else PRECOND)
    assert status(lambda: method(kind())) is INVALID, "TSK-01"
    assert status(lambda: method(kind(context=pb.TaskRequestContext(request_id="t")))) is INVALID, "TSK-02"
    assert status(lambda: method(kind(context=pb.TaskRequestContext(request_id="t", model="x")))) is NOT_FOUND, "TSK-02"


def test_lor_08_mod_11_without_lora_the_three_rpcs_are_refused(stub):
    adapter = pb.LoraAdapter(lora_id=1, lora_name="a", source_path="/tmp")
    assert status(lambda: stub.LoadLora(pb.LoadLoraRequest(adapter=adapter))) is PRECOND
    assert status(lambda: stub.UnloadLora(pb.UnloadLoraRequest(lora_name="a"))) is PRECOND
    assert status(lambda: stub.ListLoras(pb.ListLorasRequest())) is PRECOND


# ---- LD ------------------------------------------------------------------------------------------


def test_ld_01_04_an_idle_engine_reports_measured_zeros(server, model):
    wait_until(lambda: is_idle(server))
    info = load(server)
    for name in (
        "running_requests",
        "queued_requests",
        "active_kv_sessions",
        "used_kv_blocks",
        "running_tokens",
        "waiting_tokens",
        "prefill_batch_size",
        "decode_batch_size",
    ):
        assert info.HasField(name) and getattr(info, name) == 0
    assert info.total_kv_blocks == model.total_kv_blocks and not info.ranks
    asked = time.time_ns()
    assert asked <= load(server).timestamp_unix_nanos <= time.time_ns(), "LD-02: idle or not, it is the load of now"


def test_ld_03_05_the_snapshot_follows_reality(server):
    call = server.stub.Generate(request("sabc", max_tokens=200))
    next(call)
    info = load(server)
    assert info.running_requests == 1 and 0 < info.used_kv_blocks <= info.total_kv_blocks and info.running_tokens >= 4
    later = load(server)
    assert later.timestamp_unix_nanos >= info.timestamp_unix_nanos, "LD-02"
    call.cancel()
    wait_until(lambda: is_idle(server))
    assert load(server).used_kv_blocks == 0


def test_ld_04_per_rank_sums_agree(server):
    info = server.stub.GetLoad(pb.GetLoadRequest(include_per_rank=True))
    (rank,) = info.ranks
    assert rank.HasField("data_parallel_rank") and rank.data_parallel_rank == 0
    for field in pb.RankLoadInfo.DESCRIPTOR.fields[1:]:
        assert getattr(rank, field.name) == getattr(info, field.name), field.name


# ---- HLT -----------------------------------------------------------------------------------------


def checks(response):
    assert response.state and all(check.name and check.state for check in response.checks), "HLT-01"
    return {check.name: check.state for check in response.checks}


def test_hlt_01_02_without_a_probe_it_answers_while_the_engine_is_busy(stub):
    call = stub.Generate(request("s", max_tokens=200))
    next(call)
    response = stub.Health(pb.HealthRequest(), timeout=1)
    assert response.state == pb.HEALTH_STATE_READY and "inference_probe" not in checks(response)
    call.cancel()


def test_hlt_03_07_a_probe_runs_and_leaves_nothing_behind(server):
    wait_until(lambda: is_idle(server))
    events = server.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
    events.initial_metadata()
    response = server.stub.Health(pb.HealthRequest(include_inference_probe=True))
    assert checks(response)["inference_probe"] == pb.HEALTH_STATE_READY == response.state
    assert is_idle(server) and load(server).used_kv_blocks == 0
    marker = run(server.stub, request("marker after the probe", max_tokens=1)).responses[0].request_id
    assert next(events).batch.events[0].request_id == marker, "the probe stored no block"
    events.cancel()


def test_hlt_04_an_unknown_probe_model_is_not_found_and_an_empty_one_is_the_default(stub):
    probe = {"include_inference_probe": True}
    assert status(lambda: stub.Health(pb.HealthRequest(model="nobody", **probe))) is NOT_FOUND
    assert stub.Health(pb.HealthRequest(model="scripted", **probe)).state == pb.HEALTH_STATE_READY


@pytest.mark.parametrize(("role", "state"), [(1, pb.HEALTH_STATE_READY), (2, pb.HEALTH_STATE_NOT_READY)])
def test_hlt_05_the_expected_role_is_a_check(stub, role, state):
    response = stub.Health(pb.HealthRequest(role=role))
    assert checks(response)["role"] == response.state == state


# ---- RTE -----------------------------------------------------------------------------------------


def runtime(stub, *types):
    call = stub.SubscribeRuntimeEvents(pb.SubscribeRuntimeEventsRequest(types=types))
    assert ("openengine-accepted", "1") in [tuple(pair) for pair in call.initial_metadata()], (
        "RTE-05: headers at acceptance"
    )
    return call


@pytest.mark.parametrize("bad", [0, 99])
def test_rte_01_unknown_types_are_refused(stub, bad):
    assert status(lambda: stub.SubscribeRuntimeEvents(pb.SubscribeRuntimeEventsRequest(types=[bad]))) is INVALID


def test_rte_01_to_04_events_of_a_generation(stub):
    call = runtime(stub)
    run(stub, request("runtime", max_tokens=5, stopping__ignore_eos=True))
    seen, events = set(), []
    while not {1, 2, 3} <= seen or len(events) < 9:
        event = next(call).runtime_event
        events.append(event)
        seen.add(event.type)
    call.cancel()
    assert len({event.event_id for event in events}) == len(events) and all(event.event_id for event in events)
    stamps = [event.timestamp_unix_nanos for event in events]
    assert stamps == sorted(stamps)
    queue = [event.attributes["action"] for event in events if event.type == pb.RUNTIME_EVENT_TYPE_QUEUE]
    assert queue == ["enqueue", "dequeue"]
    assert sum(event.type == pb.RUNTIME_EVENT_TYPE_FORWARD_PASS for event in events) == 5, "one per model step"


def test_rte_03_04_only_the_types_asked_for_come_and_transfer_is_accepted(stub):
    call = runtime(stub, pb.RUNTIME_EVENT_TYPE_QUEUE, pb.RUNTIME_EVENT_TYPE_TRANSFER)
    run(stub, request(max_tokens=3))
    assert [next(call).runtime_event.type for _ in range(2)] == [pb.RUNTIME_EVENT_TYPE_QUEUE] * 2
    call.cancel()


def test_rte_05_a_reader_that_never_reads_slows_nobody(stub):
    call = runtime(stub)
    assert len(run(stub, request(max_tokens=1500)).ids) == 1500
    call.cancel()


# ---- KV events -----------------------------------------------------------------------------------


def kv(stub, **fields):
    call = stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(**fields), timeout=30)
    assert ("openengine-accepted", "1") in [tuple(pair) for pair in call.initial_metadata()], "KV-24"
    return call


def stored_of(batches, request_id):
    """The stored events of one request."""
    return [
        event.block_stored
        for batch in batches
        for event in batch.events
        if event.request_id == request_id and event.WhichOneof("event") == "block_stored"
    ]


def read_until(call, request_id, num_blocks):
    batches, count = [], 0
    while count < num_blocks:
        response = next(call)
        assert response.WhichOneof("event") == "batch", "KV-02"
        batches.append(response.batch)
        count = sum(len(event.block_hashes) for event in stored_of(batches, request_id))
    return batches


def test_kv_03_04_10_11_13_17_19_cky_11_the_blocks_of_a_prompt(stub):
    call = kv(stub)
    message = request("theblocksofonelongprompt", max_tokens=1)
    run(stub, message)
    batches = read_until(call, message.request_id, 6)
    call.cancel()
    numbers = [batch.sequence_number for batch in batches]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "KV-03: no gaps"
    assert all(
        batch.data_parallel_rank == 0 and abs(batch.timestamp_unix_nanos - time.time_ns()) < 60e9 for batch in batches
    )
    parent = None
    for event in stored_of(batches, message.request_id):
        assert event.HasField("parent_block_hash") == (parent is not None)
        assert parent in (None, event.parent_block_hash.value)
        assert event.block_size == 4 and len(event.token_ids) == 4 * len(event.block_hashes)
        assert all(h.encoding == "bytes" and len(h.value) == 32 for h in event.block_hashes)
        assert event.medium == pb.STORAGE_MEDIUM_GPU and not event.lora_name and not event.lora_id
        assert event.cache_key_profile == "openengine.block-chain.sha256-cbor/1"
        assert event.kv_cache_spec_kind == "full_attention" and event.group_idx == 0
        parent = event.block_hashes[-1].value


def test_kv_05_replay_begins_at_the_number_asked_for_with_the_same_content(stub):
    live = kv(stub)
    message = request("replay me", max_tokens=1)
    run(stub, message)
    first = next(live).batch
    again = kv(stub, start_sequence_number=first.sequence_number)
    assert next(again).batch == first
    run(stub, request("and go on live", max_tokens=1))
    assert next(again).batch == next(live).batch, "KV-21"
    for call in (live, again):
        call.cancel()


def test_kv_06_a_start_beyond_the_next_number_is_out_of_range(stub):
    call = stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(start_sequence_number=10**9))
    assert status(lambda: call) is grpc.StatusCode.OUT_OF_RANGE


def test_kv_07_a_snapshot_is_the_present_cache_and_live_batches_follow(stub):
    warm = request("snapshot of this prompt", max_tokens=1)
    run(stub, warm)
    call = kv(stub, include_snapshot=True)
    first = next(call).batch
    assert first.events[0].WhichOneof("event") == "all_blocks_cleared"
    known = set()
    for event in first.events[1:]:
        stored = event.block_stored
        assert not stored.HasField("parent_block_hash") or stored.parent_block_hash.value in known, "parents first"
        known.update(block.value for block in stored.block_hashes)
    assert known
    run(stub, request("live after the snapshot", max_tokens=1))
    assert next(call).batch.sequence_number == first.sequence_number + 1
    call.cancel()


def test_kv_08_09_contradictions_and_unknown_ranks_are_refused(stub):
    both = pb.SubscribeKvEventsRequest(include_snapshot=True, start_sequence_number=1)
    assert status(lambda: stub.SubscribeKvEvents(both)) is INVALID
    assert status(lambda: stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(data_parallel_ranks=[1]))) is INVALID
    assert status(lambda: stub.GetKvEventSources(pb.GetKvEventSourcesRequest(data_parallel_ranks=[1]))) is INVALID


def test_kv_12_18_hashes_are_stable_and_a_salt_changes_them_without_appearing(stub):
    def hashes(salt):
        call = kv(stub)
        options = {"kv__cache_salt": salt} if salt else {}
        message = request("stablehashesofthis", max_tokens=1, **options)
        run(stub, message)
        events = stored_of(read_until(call, message.request_id, 4), message.request_id)
        call.cancel()
        assert b"pepper" not in b"".join(event.SerializeToString() for event in events)
        assert all(bool(event.extra_keys) == bool(salt) for event in events if not event.HasField("parent_block_hash"))
        return [block.value for event in events for block in event.block_hashes]

    plain, salted = hashes(None), hashes("pepper")
    assert not set(plain) & set(salted)


def test_kv_14_15_23_what_is_stored_hits_and_what_is_removed_does_not(tmp_path):
    """A pool so small that every prompt evicts others; a client's index of the events predicts every hit."""
    with running("-m", "tests.rpc.scripted_server", str(tmp_path), "num_kv_blocks=24", "context=80") as small:
        call, index = kv(small.stub, include_snapshot=True), set()
        removed = 0

        def catch_up(request_id):
            nonlocal removed
            done = False
            while not done:
                batch = next(call).batch
                for event in batch.events:
                    kind = event.WhichOneof("event")
                    if kind == "block_stored":
                        index.update(block.value for block in event.block_stored.block_hashes)
                        done |= event.request_id == request_id
                    elif kind == "block_removed":
                        for block in event.block_removed.block_hashes:
                            index.remove(block.value)  # KV-14: each once, and stored before
                            removed += 1
                    else:
                        index.clear()

        next(call)
        for round_number in range(12):
            prompt = [1 + (round_number * 7 + i) % 26 for i in range(33)]
            message = request(prompt, max_tokens=1)
            keys = small.tokenizer.ComputeCacheKeys(
                tok.ComputeCacheKeysRequest(model="scripted", tokens=tok.TokenSequence(ids=prompt))
            ).keys
            hit = next((i for i, key in enumerate(keys) if key.value not in index), len(keys)) * 4
            assert run(small.stub, message).usage.cached_prompt_tokens == min(hit, 32)
            if hit < 32:
                catch_up(message.request_id)
        assert removed > 10
        call.cancel()


def test_kv_20_sources_are_connectable(server):
    (source,) = server.stub.GetKvEventSources(pb.GetKvEventSourcesRequest(data_parallel_ranks=[0])).sources
    assert (source.transport, source.encoding) == ("grpc", "protobuf")
    assert source.endpoint_addr.host == "127.0.0.1" and source.endpoint_addr.port == server.port
    assert source.buffer_steps == 10000 and source.cache_key_profile == "openengine.block-chain.sha256-cbor/1"


def test_kv_22_a_cancelled_subscription_disturbs_nobody(stub):
    one, other = kv(stub), kv(stub)
    one.cancel()
    message = request("after a cancelled subscription", max_tokens=1)
    run(stub, message)
    assert read_until(other, message.request_id, 1)
    other.cancel()


def test_kv_06_25_a_short_buffer_and_a_reader_that_falls_behind(tmp_path):
    with running("-m", "tests.rpc.scripted_server", str(tmp_path), "event_buffer_size=4") as small:
        stub = small.stub
        slow = kv(stub)
        for _ in range(16):
            # Together more than the transport takes for a reader that does not read.
            run(stub, request([C] + [1 + i % 26 for i in range(1900)], max_tokens=1, kv__cache_salt=fresh_id()))
        late = pb.SubscribeKvEventsRequest(start_sequence_number=1)
        assert status(lambda: stub.SubscribeKvEvents(late)) is grpc.StatusCode.OUT_OF_RANGE
        *responses, last = list(slow)
        assert slow.code() is grpc.StatusCode.OK, "KV-02"
        numbers = [response.batch.sequence_number for response in responses]
        assert numbers == list(range(1, len(numbers) + 1)), "never a silent gap"
        assert last.error.code == pb.ERROR_CODE_OVERLOADED and last.error.retryable


def test_kv_01_events_that_are_off_are_a_failed_precondition_and_have_no_source(tmp_path):
    with running("-m", "tests.rpc.scripted_server", str(tmp_path), "event_buffer_size=0") as off:
        assert status(lambda: off.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())) is PRECOND
        assert not off.stub.GetKvEventSources(pb.GetKvEventSourcesRequest()).sources
