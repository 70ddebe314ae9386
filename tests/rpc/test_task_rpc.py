"""What Embed, Classify and Score share over gRPC: ids, inputs, limits, aborts, and the capabilities that say so."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from openengine.rpc import openengine_pb2 as pb
from tests.checkpoints import VOCAB_SIZE
from tests.rpc.serving import fresh_id, is_idle, status
from tests.rpc.task_serving import (
    CANCELLED,
    DOES,
    EXISTS,
    INVALID,
    KINDS,
    LONG,
    NOT_FOUND,
    PRECOND,
    TOKEN,
    Served,
    call,
    classify_request,
    embed_request,
    group,
    refused,
    score_request,
    simple,
    tensor,
)
from tests.task_models import TEXTS
from tests.waiting import wait_until

# ---- TSK: what the three share -------------------------------------------------------------------


EVERY = [(kind, task) for kind in KINDS for task in sorted(DOES[kind]) if (kind, task) != ("causal", "Score")]


@pytest.mark.parametrize(("kind", "task"), EVERY)
def test_tsk_01_02_ids_and_models_are_needed_and_known(task_servers, kind, task):
    served = task_servers[kind]
    request = simple(task)
    request.ClearField("context")
    assert refused(served, request) is INVALID
    assert refused(served, simple(task, request_id="")) is INVALID
    assert refused(served, simple(task, model="")) is INVALID
    assert refused(served, simple(task, model="other")) is NOT_FOUND


def test_tsk_03_ids_are_shared_with_generation(causal):
    stream = causal.stub.Generate(
        pb.GenerateRequest(
            request_id="shared", model="tiny", prompt="a", stopping={"max_tokens": 200, "ignore_eos": True}
        )
    )
    next(stream)
    request = score_request(who={"request_id": "shared"}, label_token_ids=[5])
    try:
        assert refused(causal, request) is EXISTS
    finally:
        stream.cancel()
    wait_until(lambda: is_idle(causal))
    assert call(causal, request).request_id == "shared"


def test_tsk_04_05_07_batches_have_inputs_with_ids_of_their_own(task_servers):
    for served, make in ((task_servers["embedding"], embed_request), (task_servers["classifier"], classify_request)):
        assert refused(served, make([])) is INVALID
        request = make(["a", "b"])
        request.inputs[1].item_id = ""
        assert refused(served, request) is INVALID
        request.inputs[1].item_id = "i0"
        assert refused(served, request) is INVALID
        request = make(["a"])
        request.inputs[0].ClearField("text")
        assert refused(served, request) is INVALID, "TSK-07"


def test_tsk_06_scr_04_item_ids_are_unique_within_a_group_and_only_there(cross):
    request = score_request([group("a", ["b", "c"]), group("a", ["b"], "g1")])
    assert len(call(cross, request).groups) == 2
    request.groups[0].candidates[1].item_id = "i0"
    assert refused(cross, request) is INVALID
    request.groups[0].candidates[1].item_id = "q"
    assert refused(cross, request) is INVALID, "also that of the query"


def test_tsk_08_09_inputs_are_of_the_advertised_types(task_servers):
    for kind in KINDS:
        for name, task in (("embed", "Embed"), ("classify", "Classify")):
            if task in DOES[kind]:
                capability = getattr(task_servers[kind].tasks, name)
                assert list(capability.input_types) == [pb.TASK_INPUT_TYPE_TEXT, pb.TASK_INPUT_TYPE_TOKEN_IDS]
                make = {"Embed": embed_request, "Classify": classify_request}[task]
                assert len(call(task_servers[kind], make(["a b", [5, 6, 7]])).outputs) == 2
    request = embed_request(["a"])
    request.inputs[0].multimodal.text = "a"
    assert refused(task_servers["embedding"], request) is INVALID, "TSK-08: no media"
    request.inputs[0].multimodal.media.add(modality=pb.MODALITY_IMAGE)
    assert refused(task_servers["embedding"], request) is INVALID, "TSK-09: not advertised"
    by_ids = score_request([group([5, 6], [[7, 8], "c"])])
    assert len(call(task_servers["cross"], by_ids).groups[0].candidates) == 2


@pytest.mark.parametrize(("kind", "task"), EVERY)
def test_tsk_10_priority_is_taken_and_adapters_are_not(task_servers, kind, task):
    capability = getattr(task_servers[kind].tasks, task.lower())
    assert capability.supports_priority and capability.HasField("supports_lora") and not capability.supports_lora
    call(task_servers[kind], simple(task, priority=-5))
    assert refused(task_servers[kind], simple(task, lora_name="a")) is INVALID


@pytest.mark.parametrize("kind", KINDS)
def test_tsk_11_cap_02_other_tasks_are_a_failed_precondition(task_servers, kind):
    for task in ("Embed", "Classify", "Score"):
        name = task.lower()
        assert task_servers[kind].tasks.HasField(name) == (task in DOES[kind])
        if task not in DOES[kind]:
            assert refused(task_servers[kind], simple(task)) is PRECOND


@pytest.mark.parametrize("kind", ["embedding", "classifier", "cross"])
def test_gen_18_a_model_that_does_not_generate_says_so(task_servers, kind):
    stub = task_servers[kind].stub
    info = stub.GetModelInfo(pb.GetModelInfoRequest(model="tiny"))
    assert not info.HasField("generation") and not info.HasField("max_output_tokens")
    for name in ("supports_text_input", "supports_token_ids_input"):
        assert info.HasField(name) and not getattr(info, name), "of generations; the task's input_types are its own"


@pytest.mark.parametrize("kind", ["embedding", "classifier", "cross"])
@pytest.mark.parametrize("input_", [{"prompt": "a"}, {"token_ids": pb.TokenIds(ids=[5])}], ids=["text", "ids"])
def test_gen_01_02_18_what_a_generation_names_is_judged_before_the_task(task_servers, kind, input_):
    def refused_with(**names):
        request = pb.GenerateRequest(**input_, **{"request_id": fresh_id(), "model": "tiny", **names})
        return status(lambda: list(task_servers[kind].stub.Generate(request)))

    assert refused_with() is PRECOND
    assert refused_with(model="nobody") is NOT_FOUND
    assert refused_with(model="nobody", request_id="") is refused_with(model="") is INVALID


@pytest.mark.parametrize("kind", ["embedding", "classifier", "cross"])
def test_eng_08_ld_01_03_a_model_without_a_kv_cache_reports_none(task_servers, kind):
    stub = task_servers[kind].stub
    info, load = (
        stub.GetModelInfo(pb.GetModelInfoRequest(model="tiny")),
        stub.GetLoad(pb.GetLoadRequest(include_per_rank=True)),
    )
    assert not info.HasField("kv_block_size") and not info.HasField("total_kv_blocks")
    for part in (load, *load.ranks):
        assert not part.HasField("used_kv_blocks") and not part.HasField("total_kv_blocks")
        for name in ("running_requests", "queued_requests", "prefill_batch_size", "decode_batch_size"):
            assert part.HasField(name) and getattr(part, name) == 0
    assert not load.HasField("running_tokens") and load.HasField("waiting_tokens") and len(load.ranks) == 1


def test_tsk_12_scr_17_more_items_than_advertised_are_refused(task_servers):
    embedding, classifier, cross = task_servers["embedding"], task_servers["classifier"], task_servers["cross"]
    limit = embedding.tasks.embed.max_batch_size
    assert len(call(embedding, embed_request(["a"] * limit)).outputs) == limit
    assert refused(embedding, embed_request(["a"] * (limit + 1))) is INVALID
    assert refused(classifier, classify_request(["a"] * (classifier.tasks.classify.max_batch_size + 1))) is INVALID
    score = cross.tasks.score
    assert refused(cross, score_request([group("a", ["b"] * (score.max_candidates_per_group + 1))])) is INVALID
    groups = [group("a", ["b"], f"g{index}") for index in range(score.max_groups + 1)]
    assert refused(cross, score_request(groups)) is INVALID


def test_tsk_12_a_response_too_large_for_a_message_is_refused_before_it_is_computed(embedding):
    size = 64 << 20
    num_tokens = size // (4 * 64) + 1
    request = embed_request([[5] * 130] * (num_tokens // 130 + 1), granularity=TOKEN)
    assert len(request.inputs) <= embedding.tasks.embed.max_batch_size
    assert refused(embedding, request) is INVALID


def test_tsk_15_usage_counts_all_tokens_that_run(task_servers):
    engine = task_servers["embedding"].engine
    usage = call(task_servers["embedding"], embed_request()).usage
    assert usage.input_tokens == sum(len(engine.tokenize(text)) for text in TEXTS)
    assert not usage.HasField("cached_input_tokens"), "an encoder has no cache"
    long = group("one two three four five " * 8, [f" {word}" for word in "abcdefgh"])
    usage = call(task_servers["causal"], score_request([long], label_token_ids=[5])).usage
    assert 0 < usage.cached_input_tokens <= usage.input_tokens


def many(served: Served, request_id: str):
    """A request that takes a while, as a future."""
    request = embed_request([LONG] * 4000, who={"request_id": request_id})
    return served.stub.Embed.future(request, timeout=60)


def started(served: Served, request_id: str) -> bool:
    try:
        return served.engine._loop.is_open(request_id)
    except KeyError:
        return False


def test_tsk_16_a_client_that_cancels_or_runs_out_of_time_stops_the_work(embedding):
    call_id = fresh_id()
    future = many(embedding, call_id)
    wait_until(lambda: started(embedding, call_id))
    future.cancel()
    wait_until(lambda: is_idle(embedding), timeout=10)
    request = embed_request([LONG] * 4000)
    with pytest.raises(grpc.RpcError) as caught:
        embedding.stub.Embed(request, timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: is_idle(embedding), timeout=10)
    assert len(call(embedding, embed_request()).outputs) == len(TEXTS)


def test_tsk_17_abort_ends_a_task_and_knows_it_afterwards(embedding):
    call_id = fresh_id()
    future = many(embedding, call_id)
    wait_until(lambda: started(embedding, call_id))
    assert embedding.stub.Abort(pb.AbortRequest(request_id=call_id)).status == pb.ABORT_STATUS_ABORTED
    with pytest.raises(grpc.RpcError) as caught:
        future.result()
    assert caught.value.code() is CANCELLED
    assert embedding.stub.Abort(pb.AbortRequest(request_id=call_id)).status == pb.ABORT_STATUS_ALREADY_FINISHED
    future = many(embedding, fresh_id())
    wait_until(lambda: not is_idle(embedding))
    embedding.stub.Abort(pb.AbortRequest(all_requests=pb.AllRequests()))
    with pytest.raises(grpc.RpcError):
        future.result()


@pytest.mark.parametrize(("kind", "task"), EVERY)
def test_tsk_18_the_response_repeats_the_request_id(task_servers, kind, task):
    request = simple(task)
    assert call(task_servers[kind], request).request_id == request.context.request_id


@pytest.mark.parametrize("content", ["quick " * 400, [], [VOCAB_SIZE], [2**32 - 1], [5] * 131])
def test_tsk_19_inputs_that_the_model_cannot_take_are_refused(task_servers, content):
    assert refused(task_servers["embedding"], embed_request(["a", content])) is INVALID
    assert refused(task_servers["cross"], score_request([group("a", ["b", content])])) is INVALID


@pytest.mark.parametrize("kind", ["embedding", "sparse"])
def test_tsk_20_emb_10_a_result_is_the_same_alone_in_a_batch_and_again(task_servers, kind):
    served = task_servers[kind]
    together, again = (call(served, embed_request()).outputs for _ in range(2))
    for index, text in enumerate(TEXTS):
        (alone,) = call(served, embed_request([text])).outputs
        field = alone.WhichOneof("embedding")
        values = [np.array(getattr(output, field).values) for output in (alone, together[index], again[index])]
        assert np.array_equal(values[1], values[2]), "EMB-10"
        assert np.abs(values[0] - values[1]).max(initial=0) < 1e-4


# ---- CAP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_cap_03_04_06_09_capabilities_are_complete(task_servers, kind):
    for task in DOES[kind]:
        capability = getattr(task_servers[kind].tasks, task.lower())
        assert capability.supported and capability.input_types and capability.granularities
        assert not capability.modalities, "CAP-06"
        kinds = capability.encodings if task == "Embed" else capability.semantics
        assert kinds, "CAP-09"
        lists = [capability.input_types, capability.granularities, kinds, getattr(capability, "normalizations", ())]
        assert all(value != 0 for values in lists for value in values), "CAP-03"
        for field, value in capability.ListFields():
            if field.name.startswith("max_") or field.name == "dimension":
                assert value > 0, "CAP-04"


def test_cap_05_07_08_limits_and_directions_are_those_of_the_responses(task_servers):
    embedding, cross = task_servers["embedding"], task_servers["cross"]
    capability = embedding.tasks.embed
    longest = call(embedding, embed_request([[5] * 130], granularity=TOKEN)).outputs[0]
    assert tensor(longest.dense).shape[1] == capability.dimension, "CAP-05"
    assert tensor(longest.dense).size == capability.max_output_values_per_item, "CAP-07"
    assert cross.tasks.score.higher_is_better == call(cross, score_request()).higher_is_better, "CAP-08"
    assert not task_servers["causal"].tasks.score.HasField("higher_is_better")
