"""Embed, classify and score over gRPC, against servers with an embedding, a classification, a token-classification, a
cross-encoder and a causal model."""

from __future__ import annotations

import asyncio
import threading

import grpc
import numpy as np
import pytest

from openengine import (
    Cancelled,
    ClassificationOutput,
    EmbeddingOutput,
    Engine,
    InvalidArgument,
    UnsupportedFeature,
    UnsupportedTask,
)
from openengine.rpc import Client, ServerOptions, openengine_pb2_grpc, serve
from openengine.rpc import openengine_pb2 as pb
from tests.checkpoints import VOCAB_SIZE
from tests.rpc.serving import eventually, fresh_id, status
from tests.task_models import LABELS, TEXTS, write_task_model

KINDS = ("embedding", "classifier", "tagger", "cross", "causal", "sparse")
DOES = {
    "embedding": {"Embed"},
    "classifier": {"Classify"},
    "tagger": {"Classify"},
    "cross": {"Classify", "Score"},
    "causal": {"Score"},
    "sparse": {"Embed"},
}
INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECOND = grpc.StatusCode.FAILED_PRECONDITION
EXISTS = grpc.StatusCode.ALREADY_EXISTS
NOT_FOUND = grpc.StatusCode.NOT_FOUND
CANCELLED = grpc.StatusCode.CANCELLED
DENSE, SPARSE = pb.EMBEDDING_ENCODING_DENSE, pb.EMBEDDING_ENCODING_SPARSE
SEQUENCE, TOKEN = pb.TASK_OUTPUT_GRANULARITY_SEQUENCE, pb.TASK_OUTPUT_GRANULARITY_TOKEN
LOGITS, PROBABILITIES, LOG_PROBABILITIES, SIMILARITY = (
    pb.TASK_VALUE_SEMANTICS_LOGITS,
    pb.TASK_VALUE_SEMANTICS_PROBABILITIES,
    pb.TASK_VALUE_SEMANTICS_LOG_PROBABILITIES,
    pb.TASK_VALUE_SEMANTICS_SIMILARITY,
)
LONG = [5] * 120  # tokens
NONE, SOFTMAX = pb.SCORE_NORMALIZATION_NONE, pb.SCORE_NORMALIZATION_SOFTMAX


class Served:
    """One engine behind a server of an event loop in a thread."""

    def __init__(self, engine: Engine, event_loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self._loop = event_loop
        self._server = self._run(serve(engine, ServerOptions(port=0)))
        self.target = f"127.0.0.1:{self._server.port}"
        self.channel = grpc.insecure_channel(self.target, options=[("grpc.max_receive_message_length", -1)])
        self.stub = openengine_pb2_grpc.OpenEngineStub(self.channel)
        self.tasks = self.stub.GetModelInfo(pb.GetModelInfoRequest(model="tiny")).tasks

    def stop(self) -> None:
        self.channel.close()
        self._run(self._server.stop(1.0))
        self.engine.close()

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    root = tmp_path_factory.mktemp("tasks")
    event_loop = asyncio.new_event_loop()
    thread = threading.Thread(target=event_loop.run_forever, daemon=True)
    thread.start()
    found = {}
    for kind in KINDS:
        write_task_model(root / kind, kind)
        options = {"dtype": "float32", "num_threads": 1, "served_model_name": "tiny"}
        found[kind] = Served(Engine(root / kind, **options), event_loop)
    yield found
    for served in found.values():
        served.stop()
    event_loop.call_soon_threadsafe(event_loop.stop)
    thread.join(10)


@pytest.fixture
def embedding(servers):
    return servers["embedding"]


@pytest.fixture
def causal(servers):
    return servers["causal"]


@pytest.fixture
def cross(servers):
    return servers["cross"]


def context(**fields) -> pb.TaskRequestContext:
    return pb.TaskRequestContext(**{"request_id": fresh_id("t"), "model": "tiny", **fields})


def item(content, item_id: str) -> pb.TaskInput:
    if isinstance(content, str):
        return pb.TaskInput(item_id=item_id, text=content)
    return pb.TaskInput(item_id=item_id, token_ids=pb.TokenIds(ids=content))


def items(contents) -> list[pb.TaskInput]:
    return [item(content, f"i{index}") for index, content in enumerate(contents)]


def embed_request(contents=TEXTS, *, who=None, **options) -> pb.EmbedRequest:
    return pb.EmbedRequest(
        context=context(**(who or {})), inputs=items(contents), options=pb.EmbedOptions(**options) if options else None
    )


def classify_request(contents=TEXTS, *, who=None, **options) -> pb.ClassifyRequest:
    return pb.ClassifyRequest(
        context=context(**(who or {})),
        inputs=items(contents),
        options=pb.ClassifyOptions(**options) if options else None,
    )


def group(query, candidates, group_id="g0") -> pb.ScoreGroup:
    return pb.ScoreGroup(group_id=group_id, query=item(query, "q"), candidates=items(candidates))


def score_request(groups=None, *, who=None, **options) -> pb.ScoreRequest:
    return pb.ScoreRequest(
        context=context(**(who or {})),
        groups=[group("how are you", TEXTS)] if groups is None else groups,
        options=pb.ScoreOptions(**options) if options else None,
    )


def simple(task: str, **who):
    """A valid request of `task`, for any model that performs it."""
    if task == "Score":
        return score_request(who=who, label_token_ids=[])
    return {"Embed": embed_request, "Classify": classify_request}[task](who=who)


def call(served: Served, request, **options):
    return getattr(served.stub, type(request).__name__.removesuffix("Request"))(request, timeout=30, **options)


def refused(served: Served, request) -> grpc.StatusCode:
    return status(lambda: call(served, request))


def tensor(dense: pb.DenseFloatTensor) -> np.ndarray:
    """TSK-13: dimensions above 0, as many values as they say, all finite."""
    shape, values = tuple(dense.shape), np.array(dense.values, dtype=np.float32)
    assert shape and min(shape) > 0 and np.prod(shape) == len(values) and np.isfinite(values).all()
    return values.reshape(shape)


def is_idle(served: Served) -> bool:
    load = served.stub.GetLoad(pb.GetLoadRequest())
    return load.running_requests == load.queued_requests == load.used_kv_blocks == 0


# ---- TSK: what the three share -------------------------------------------------------------------

EVERY = [(kind, task) for kind in KINDS for task in sorted(DOES[kind]) if (kind, task) != ("causal", "Score")]


@pytest.mark.parametrize(("kind", "task"), EVERY)
def test_tsk_01_02_ids_and_models_are_needed_and_known(servers, kind, task):
    served = servers[kind]
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
    eventually(lambda: is_idle(causal))
    assert call(causal, request).request_id == "shared"


def test_tsk_04_05_07_batches_have_inputs_with_ids_of_their_own(servers):
    for served, make in ((servers["embedding"], embed_request), (servers["classifier"], classify_request)):
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


def test_tsk_08_09_inputs_are_of_the_advertised_types(servers):
    for kind in KINDS:
        for name, task in (("embed", "Embed"), ("classify", "Classify")):
            if task in DOES[kind]:
                capability = getattr(servers[kind].tasks, name)
                assert list(capability.input_types) == [pb.TASK_INPUT_TYPE_TEXT, pb.TASK_INPUT_TYPE_TOKEN_IDS]
                make = {"Embed": embed_request, "Classify": classify_request}[task]
                assert len(call(servers[kind], make(["a b", [5, 6, 7]])).outputs) == 2
    request = embed_request(["a"])
    request.inputs[0].multimodal.text = "a"
    assert refused(servers["embedding"], request) is INVALID, "TSK-08: no media"
    request.inputs[0].multimodal.media.add(modality=pb.MODALITY_IMAGE)
    assert refused(servers["embedding"], request) is INVALID, "TSK-09: not advertised"
    by_ids = score_request([group([5, 6], [[7, 8], "c"])])
    assert len(call(servers["cross"], by_ids).groups[0].candidates) == 2


@pytest.mark.parametrize(("kind", "task"), EVERY)
def test_tsk_10_priority_is_taken_and_adapters_are_not(servers, kind, task):
    capability = getattr(servers[kind].tasks, task.lower())
    assert capability.supports_priority and capability.HasField("supports_lora") and not capability.supports_lora
    call(servers[kind], simple(task, priority=-5))
    assert refused(servers[kind], simple(task, lora_name="a")) is INVALID


@pytest.mark.parametrize("kind", KINDS)
def test_tsk_11_cap_02_other_tasks_are_a_failed_precondition(servers, kind):
    for task in ("Embed", "Classify", "Score"):
        name = task.lower()
        assert servers[kind].tasks.HasField(name) == (task in DOES[kind])
        if task not in DOES[kind]:
            assert refused(servers[kind], simple(task)) is PRECOND


@pytest.mark.parametrize("kind", ["embedding", "classifier", "cross"])
def test_gen_18_a_model_that_does_not_generate_says_so(servers, kind):
    assert not servers[kind].stub.GetModelInfo(pb.GetModelInfoRequest(model="tiny")).HasField("generation")
    request = pb.GenerateRequest(request_id=fresh_id(), model="tiny", prompt="a")
    assert status(lambda: list(servers[kind].stub.Generate(request))) is PRECOND


def test_tsk_12_scr_17_more_items_than_advertised_are_refused(servers):
    embedding, classifier, cross = servers["embedding"], servers["classifier"], servers["cross"]
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


def test_tsk_15_usage_counts_all_tokens_that_run(servers):
    engine = servers["embedding"].engine
    usage = call(servers["embedding"], embed_request()).usage
    assert usage.input_tokens == sum(len(engine.tokenize(text)) for text in TEXTS)
    assert not usage.HasField("cached_input_tokens"), "an encoder has no cache"
    long = group("one two three four five " * 8, [f" {word}" for word in "abcdefgh"])
    usage = call(servers["causal"], score_request([long], label_token_ids=[5])).usage
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
    eventually(lambda: started(embedding, call_id))
    future.cancel()
    eventually(lambda: is_idle(embedding), timeout=10)
    request = embed_request([LONG] * 4000)
    with pytest.raises(grpc.RpcError) as caught:
        embedding.stub.Embed(request, timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(lambda: is_idle(embedding), timeout=10)
    assert len(call(embedding, embed_request()).outputs) == len(TEXTS)


def test_tsk_17_abort_ends_a_task_and_knows_it_afterwards(embedding):
    call_id = fresh_id()
    future = many(embedding, call_id)
    eventually(lambda: started(embedding, call_id))
    assert embedding.stub.Abort(pb.AbortRequest(request_id=call_id)).status == pb.ABORT_STATUS_ABORTED
    with pytest.raises(grpc.RpcError) as caught:
        future.result()
    assert caught.value.code() is CANCELLED
    assert embedding.stub.Abort(pb.AbortRequest(request_id=call_id)).status == pb.ABORT_STATUS_ALREADY_FINISHED
    future = many(embedding, fresh_id())
    eventually(lambda: not is_idle(embedding))
    embedding.stub.Abort(pb.AbortRequest(all_requests=pb.AllRequests()))
    with pytest.raises(grpc.RpcError):
        future.result()


@pytest.mark.parametrize(("kind", "task"), EVERY)
def test_tsk_18_the_response_repeats_the_request_id(servers, kind, task):
    request = simple(task)
    assert call(servers[kind], request).request_id == request.context.request_id


@pytest.mark.parametrize("content", ["quick " * 400, [], [VOCAB_SIZE], [2**32 - 1], [5] * 131])
def test_tsk_19_inputs_that_the_model_cannot_take_are_refused(servers, content):
    assert refused(servers["embedding"], embed_request(["a", content])) is INVALID
    assert refused(servers["cross"], score_request([group("a", ["b", content])])) is INVALID


@pytest.mark.parametrize("kind", ["embedding", "sparse"])
def test_tsk_20_emb_10_a_result_is_the_same_alone_in_a_batch_and_again(servers, kind):
    served = servers[kind]
    together, again = (call(served, embed_request()).outputs for _ in range(2))
    for index, text in enumerate(TEXTS):
        (alone,) = call(served, embed_request([text])).outputs
        field = alone.WhichOneof("embedding")
        values = [np.array(getattr(output, field).values) for output in (alone, together[index], again[index])]
        assert np.array_equal(values[1], values[2]), "EMB-10"
        assert np.abs(values[0] - values[1]).max(initial=0) < 1e-4


# ---- EMB -----------------------------------------------------------------------------------------


def test_emb_01_05_07_08_absent_options_are_the_models_and_outputs_say_what_they_are(embedding):
    response = call(embedding, embed_request())
    assert len(response.outputs) == len(TEXTS)
    for index, output in enumerate(response.outputs):
        assert output.item_id == f"i{index}" and output.HasField("input_index") and output.input_index == index
        assert output.granularity == SEQUENCE and output.WhichOneof("embedding") == "dense"
        assert tensor(output.dense).shape == (embedding.tasks.embed.dimension,) and not output.token_ids
    explicit = call(embedding, embed_request(granularity=SEQUENCE, normalize=False, encoding=DENSE))
    assert [list(o.dense.values) for o in explicit.outputs] == [list(o.dense.values) for o in response.outputs]


def test_emb_06_09_tokens_have_vectors_and_their_ids(embedding):
    response = call(embedding, embed_request(granularity=TOKEN, normalize=True))
    for output, text in zip(response.outputs, TEXTS):
        values = tensor(output.dense)
        assert list(output.token_ids) == embedding.engine.tokenize(text) and output.granularity == TOKEN
        assert values.shape == (len(output.token_ids), embedding.tasks.embed.dimension)
        assert np.allclose(np.linalg.norm(values, axis=1), 1, atol=1e-5), "EMB-09"


def test_emb_02_09_normalize_is_done_or_not_as_asked(embedding):
    raw = [tensor(o.dense) for o in call(embedding, embed_request(normalize=False)).outputs]
    for output, values in zip(call(embedding, embed_request(normalize=True)).outputs, raw):
        assert np.allclose(tensor(output.dense), values / np.linalg.norm(values), atol=1e-6)


def test_emb_02_what_is_not_advertised_is_refused(servers):
    assert refused(servers["embedding"], embed_request(encoding=SPARSE)) is INVALID
    sparse = servers["sparse"]
    assert not sparse.tasks.embed.supports_normalization and not sparse.tasks.embed.supports_dimension_override
    for options in ({"encoding": DENSE}, {"granularity": TOKEN}, {"normalize": True}, {"dimensions": 5}):
        assert refused(sparse, embed_request(**options)) is INVALID
    assert call(sparse, embed_request(encoding=SPARSE, granularity=SEQUENCE)).outputs


def test_emb_03_04_dimensions_reduce_and_never_pad(embedding):
    native = embedding.tasks.embed.dimension
    assert embedding.tasks.embed.supports_dimension_override
    raw = tensor(call(embedding, embed_request(["a b"])).outputs[0].dense)
    for count in (1, 7, native):
        cut = tensor(call(embedding, embed_request(["a b"], dimensions=count)).outputs[0].dense)
        assert np.array_equal(cut, raw[:count])
        normal = tensor(call(embedding, embed_request(["a b"], dimensions=count, normalize=True)).outputs[0].dense)
        assert np.allclose(normal, raw[:count] / np.linalg.norm(raw[:count]), atol=1e-6)
    for count in (0, native + 1):
        assert refused(embedding, embed_request(["a"], dimensions=count)) is INVALID


def test_tsk_14_sparse_vectors_have_ascending_entries_of_the_vocabulary(servers):
    for output in call(servers["sparse"], embed_request()).outputs:
        assert output.WhichOneof("embedding") == "sparse", "EMB-08"
        shape, indices = tuple(output.sparse.shape), list(output.sparse.indices)
        assert shape == (VOCAB_SIZE,) and len(indices) == len(output.sparse.values)
        assert indices == sorted(set(indices)) and all(index < VOCAB_SIZE for index in indices)
        assert len(indices) <= servers["sparse"].tasks.embed.max_output_values_per_item


# ---- CLS -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["classifier", "tagger", "cross"])
def test_cls_01_02_04_to_07_outputs_are_aligned_and_semantics_agree(servers, kind):
    served, by_token = servers[kind], kind == "tagger"
    found = {}
    for semantics in (LOGITS, PROBABILITIES, LOG_PROBABILITIES):
        response = call(served, classify_request(output_semantics=semantics))
        for index, output in enumerate(response.outputs):
            assert output.item_id == f"i{index}" and output.HasField("input_index") and output.input_index == index
            assert output.semantics == semantics and output.granularity == (TOKEN if by_token else SEQUENCE)
            values, tokens = tensor(output.scores), served.engine.tokenize(TEXTS[index])
            assert len(output.labels) == values.shape[-1]
            if kind != "cross":
                assert list(output.labels) == list(LABELS.values()), "CLS-05"
            assert values.ndim == 1 + by_token and (not by_token or len(values) == len(tokens)), "CLS-04"
            assert list(output.token_ids) == (tokens if by_token else []), "CLS-06"
            found.setdefault(semantics, []).append(values)
    for logits, probabilities, logs in zip(found[LOGITS], found[PROBABILITIES], found[LOG_PROBABILITIES]):
        assert probabilities.min() >= 0 and probabilities.max() <= 1
        assert np.allclose(np.exp(logs), probabilities, atol=1e-6)
        if kind == "cross":
            assert np.allclose(probabilities, 1 / (1 + np.exp(-logits)), atol=1e-6)
        else:
            assert np.allclose(probabilities.sum(-1), 1, atol=1e-6)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            assert np.allclose(probabilities, weights / weights.sum(-1, keepdims=True), atol=1e-6)


def test_cls_03_what_is_not_advertised_is_refused(servers):
    assert refused(servers["classifier"], classify_request(granularity=TOKEN)) is INVALID
    assert refused(servers["tagger"], classify_request(granularity=SEQUENCE)) is INVALID
    for kind in ("classifier", "tagger", "cross"):
        assert refused(servers[kind], classify_request(output_semantics=SIMILARITY)) is INVALID


# ---- SCR -----------------------------------------------------------------------------------------


def test_scr_01_02_03_groups_have_ids_a_query_and_candidates(cross):
    assert refused(cross, score_request([])) is INVALID
    assert refused(cross, score_request([group("a", ["b"]), group("c", ["d"])])) is INVALID, "SCR-02: equal ids"
    assert refused(cross, score_request([group("a", ["b"], "")])) is INVALID, "SCR-02: empty"
    assert refused(cross, score_request([group("a", [])])) is INVALID
    request = score_request([group("a", ["b"])])
    request.groups[0].ClearField("query")
    assert refused(cross, request) is INVALID


def test_scr_05_06_what_is_not_advertised_or_makes_no_sense_is_refused(servers):
    cross, causal = servers["cross"], servers["causal"]
    for options in ({"granularity": TOKEN}, {"output_semantics": SIMILARITY}, {"normalization": SOFTMAX}):
        assert refused(cross, score_request(**options)) is INVALID
    labels = {"label_token_ids": [5, 6]}
    assert refused(causal, score_request(**labels, output_semantics=LOGITS, normalization=SOFTMAX)) is INVALID
    assert refused(causal, score_request(**labels, granularity=TOKEN)) is INVALID


def scores(response) -> np.ndarray:
    return np.stack([tensor(c.scores) for g in response.groups for c in g.candidates])


def test_scr_06_08_11_labels_are_scored_in_the_vocabulary_or_among_themselves(causal):
    labels = [30, 5, 300]
    responses = {}
    for semantics, normalization in (
        (LOGITS, NONE),
        (PROBABILITIES, NONE),
        (LOG_PROBABILITIES, NONE),
        (PROBABILITIES, SOFTMAX),
        (LOG_PROBABILITIES, SOFTMAX),
    ):
        request = score_request(label_token_ids=labels, output_semantics=semantics, normalization=normalization)
        response = responses[semantics, normalization] = call(causal, request)
        assert list(response.label_token_ids) == labels and scores(response).shape == (len(TEXTS), 3), "SCR-08"
        assert (response.semantics, response.normalization) == (semantics, normalization), "SCR-11"
        assert response.granularity == SEQUENCE and not response.HasField("higher_is_better")
    logits, whole = scores(responses[LOGITS, NONE]), scores(responses[PROBABILITIES, NONE])
    among = scores(responses[PROBABILITIES, SOFTMAX])
    assert np.allclose(among.sum(1), 1, atol=1e-6) and (whole.sum(1) < 1).all()
    assert np.allclose(np.log(whole) - np.log(among), (np.log(whole) - np.log(among))[:, :1], atol=1e-4)
    assert np.allclose(np.log(among[:, 0] / among[:, 1]), logits[:, 0] - logits[:, 1], atol=1e-4)
    assert np.allclose(np.exp(scores(responses[LOG_PROBABILITIES, NONE])), whole, atol=1e-6)
    assert np.allclose(np.exp(scores(responses[LOG_PROBABILITIES, SOFTMAX])), among, atol=1e-6)
    default = call(causal, score_request(label_token_ids=labels))
    assert default.normalization in (NONE, SOFTMAX) and default.semantics == PROBABILITIES
    every = scores(
        call(
            causal, score_request(label_token_ids=range(VOCAB_SIZE), output_semantics=PROBABILITIES, normalization=NONE)
        )
    )
    assert np.allclose(every.sum(1), 1, atol=1e-5), "over the whole vocabulary"


def test_scr_07_08_09_label_tokens_are_checked(servers):
    causal, cross = servers["causal"], servers["cross"]
    assert causal.tasks.score.supports_label_token_scoring and not cross.tasks.score.supports_label_token_scoring
    assert refused(causal, score_request(label_token_ids=[5, 6, 5])) is INVALID, "SCR-07"
    assert refused(causal, score_request(label_token_ids=[VOCAB_SIZE])) is INVALID
    too_many = range(causal.tasks.score.max_label_token_ids + 1)
    assert refused(causal, score_request(label_token_ids=too_many)) is INVALID, "SCR-08"
    assert refused(cross, score_request(label_token_ids=[5])) is INVALID, "SCR-08"
    assert refused(causal, score_request()) is INVALID, "SCR-09: it has no score of its own"


def test_scr_10_an_instruction_needs_a_place(servers):
    for kind in ("cross", "causal"):
        assert not servers[kind].tasks.score.supports_instruction
        assert (
            refused(servers[kind], score_request(instruction="be kind", label_token_ids=[5] * (kind == "causal")))
            is INVALID
        )


def test_scr_11_to_14_every_candidate_once_in_order_with_a_rankable_score(cross):
    request = score_request([group("a", TEXTS, "x"), group("b c", ["d"], "y")])
    response = call(cross, request)
    assert response.granularity == SEQUENCE and response.semantics == PROBABILITIES and response.normalization == NONE
    assert response.HasField("higher_is_better") and response.higher_is_better, "SCR-14"
    for group_index, (found, asked) in enumerate(zip(response.groups, request.groups, strict=True)):
        assert found.HasField("group_index") and (found.group_id, found.group_index) == (asked.group_id, group_index)
        for index, (candidate, wanted) in enumerate(zip(found.candidates, asked.candidates, strict=True)):
            assert candidate.HasField("candidate_index") and candidate.candidate_index == index
            assert candidate.candidate_id == wanted.item_id and tensor(candidate.scores).shape == (1,)
    names = {field.name for field in pb.ScoreCandidateOutput.DESCRIPTOR.fields}
    assert names == {"candidate_id", "candidate_index", "scores", "token_ids"}, "SCR-13: no field for a document"


def test_scr_15_candidates_have_no_token_ids_by_sequence(causal):
    response = call(causal, score_request(label_token_ids=[5]))
    assert all(not candidate.token_ids for candidate in response.groups[0].candidates)
    assert response.higher_is_better, "one score per candidate"


@pytest.mark.parametrize(("kind", "labels"), [("cross", []), ("causal", [5, 6])])
def test_scr_16_groups_of_one_give_the_scores_of_one_group(servers, kind, labels):
    one = call(servers[kind], score_request([group("how are you ", TEXTS)], label_token_ids=labels))
    several = [group("how are you ", [text], f"g{index}") for index, text in enumerate(TEXTS)]
    split = call(servers[kind], score_request(several, label_token_ids=labels))
    assert np.abs(scores(one) - scores(split)).max() < 1e-5


def test_scr_18_ranking_is_the_clients(cross):
    with Client(cross.target) as client:
        response = client.score("how are you", [*TEXTS, TEXTS[0]])
    ranking, values = response.ranking(), response.scores
    assert sorted(ranking) == list(range(len(values))) and (np.diff(values[ranking]) <= 0).all()
    assert ranking.index(0) < ranking.index(len(TEXTS)), "ties by index"


# ---- CAP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_cap_03_04_06_09_capabilities_are_complete(servers, kind):
    for task in DOES[kind]:
        capability = getattr(servers[kind].tasks, task.lower())
        assert capability.supported and capability.input_types and capability.granularities
        assert not capability.modalities, "CAP-06"
        kinds = capability.encodings if task == "Embed" else capability.semantics
        assert kinds, "CAP-09"
        lists = [capability.input_types, capability.granularities, kinds, getattr(capability, "normalizations", ())]
        assert all(value != 0 for values in lists for value in values), "CAP-03"
        for field, value in capability.ListFields():
            if field.name.startswith("max_") or field.name == "dimension":
                assert value > 0, "CAP-04"


def test_cap_05_07_08_limits_and_directions_are_those_of_the_responses(servers):
    embedding, cross = servers["embedding"], servers["cross"]
    capability = embedding.tasks.embed
    longest = call(embedding, embed_request([[5] * 130], granularity=TOKEN)).outputs[0]
    assert tensor(longest.dense).shape[1] == capability.dimension, "CAP-05"
    assert tensor(longest.dense).size == capability.max_output_values_per_item, "CAP-07"
    assert cross.tasks.score.higher_is_better == call(cross, score_request()).higher_is_better, "CAP-08"
    assert not servers["causal"].tasks.score.HasField("higher_is_better")


# ---- the client ----------------------------------------------------------------------------------


def test_the_client_gives_what_the_engine_gives(servers):
    with Client(servers["embedding"].target) as client:
        texts = [*TEXTS, [5, 6, 7], *("word " * (index % 9) for index in range(700))]
        mine, theirs = client.embed(texts, normalize=True), servers["embedding"].engine.embed(texts, normalize=True)
        assert np.abs(mine.numpy() - theirs.numpy()).max() < 1e-5 and len(mine) == len(texts)
        assert [output.input_index for output in mine] == list(range(len(texts)))
        assert mine.usage == theirs.usage
        for one in ("a", [5, 6, 7]):
            for output in (client.embed(one), asyncio.run(client.aembed(one))):
                assert isinstance(output, EmbeddingOutput)
                assert np.abs(output.numpy() - servers["embedding"].engine.embed(one).numpy()).max() < 1e-5
        assert client.embed(["a"]).numpy().shape == (1, 64)
        again = asyncio.run(client.aembed(texts, normalize=True))
        assert np.abs(again.numpy() - theirs.numpy()).max() < 1e-5
        with pytest.raises(UnsupportedTask, match="it can embed"):
            client.classify("a")
        with pytest.raises(UnsupportedFeature, match="truncate"):
            client.embed("a", truncate="right")
        with pytest.raises(InvalidArgument, match="did you mean 'normalize'"):
            client.embed("a", normalise=True)
        with pytest.raises(InvalidArgument, match=r"inputs\[1\]"):
            client.embed(["a", "word " * 300])


def test_the_client_splits_long_lists_of_candidates_and_joins_them(servers):
    documents = [f"{word} {index}" for index in range(120) for word in ("one", "two", "three", "four", "five")]
    with Client(servers["cross"].target) as client:
        mine = client.score(["how", "who"], [documents, "x"])
        theirs = servers["cross"].engine.score(["how", "who"], [documents, "x"])
        assert np.abs(mine.scores - theirs.scores).max() < 1e-5
        assert [len(g.candidates) for g in mine.groups] == [600, 1]
        assert [c.candidate_index for c in mine.groups[0].candidates] == list(range(600))
        assert [g.group_index for g in mine.groups] == [0, 1]
    with Client(servers["causal"].target) as client:
        named = client.score("how", ["a", "b"], labels=["a", "b"])
        assert named.label_token_ids == tuple(
            servers["causal"].engine.tokenize(t, add_special_tokens=False)[0] for t in "ab"
        )
        assert asyncio.run(client.ascore("how", ["a"], label_token_ids=[5])).scores.shape == (1,)
    with Client(servers["classifier"].target) as client:
        assert client.classify(TEXTS).labels == servers["classifier"].engine.classify(TEXTS).labels
        assert len(asyncio.run(client.aclassify(["a"]))) == 1
        for output in (client.classify("a"), asyncio.run(client.aclassify("a"))):
            assert isinstance(output, ClassificationOutput) and output.numpy().shape == (3,)


def test_an_interrupted_or_cancelled_call_of_the_client_ends_at_the_server(embedding):
    texts = [LONG] * 6000
    with Client(embedding.target) as client:

        async def main() -> None:
            task = asyncio.create_task(client.aembed(texts))
            while is_idle(embedding):
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        eventually(lambda: is_idle(embedding), timeout=10)
        failures = []

        def run() -> None:
            try:
                client.embed(texts)
            except Cancelled as exc:
                failures.append(exc)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        eventually(lambda: not is_idle(embedding))
        client.close()
        thread.join(5)
        assert failures and not thread.is_alive()
    eventually(lambda: is_idle(embedding), timeout=10)
