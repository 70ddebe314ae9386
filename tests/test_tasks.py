"""Embed, classify and score through the engine in process: inputs, order, errors, interrupts, memory, priorities, the cache."""

from __future__ import annotations

import _thread
import asyncio
import json
import random
import resource
import threading
import time

import numpy as np
import pytest

from openengine import (
    AbortStatus,
    Cancelled,
    ClassificationOutput,
    ClassifyRequest,
    ClassifyResponse,
    DuplicateRequest,
    EmbeddingOutput,
    EmbedRequest,
    EmbedResponse,
    Engine,
    HealthState,
    InvalidArgument,
    LoadInfo,
    ModelNotFound,
    PreconditionFailed,
    RequestTooLarge,
    ScoreGroup,
    ScoreOptions,
    ScoreRequest,
    TaskInput,
    TaskRequestContext,
    TaskValueSemantics,
    UnsupportedTask,
)
from tests.checkpoints import EOS, VOCAB_SIZE, write_model, write_tokenizer
from tests.embedders import edit_json, write_bert
from tests.task_models import KINDS, LABELS, TEXTS, add_tokens, encode, hidden_states, logits, write_task_model

OPTIONS = {"dtype": "float32", "num_threads": 1}
WORDS = "the quick brown fox jumps over lazy dog one two three four five hello world how are you".split()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By kind: the directory, transformers' model, an engine."""
    root = tmp_path_factory.mktemp("tasks")
    found = {}
    for kind in KINDS:
        reference = write_task_model(root / kind, kind)
        found[kind] = (root / kind, reference, Engine(root / kind, **OPTIONS))
    yield found
    for _directory, _reference, engine in found.values():
        engine.close()


def engine_of(models, kind) -> Engine:
    return models[kind][2]


def texts_of(count: int, seed: int = 0, *, most: int = 30) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, most))) for _ in range(count)]


def is_idle(engine: Engine) -> bool:
    load: LoadInfo = engine.load_info()
    return load.running_requests == load.queued_requests == load.used_kv_blocks == 0


def wait_idle(engine: Engine) -> None:
    deadline = time.monotonic() + 10
    while not is_idle(engine):
        assert time.monotonic() < deadline
        time.sleep(0.002)


# ---- what comes out ------------------------------------------------------------------------------


def test_vectors_are_the_mean_of_an_encoders_hidden_states(models):
    directory, reference, engine = models["embedding"]
    expected = np.stack([hidden_states(reference, encode(directory, text)).mean(0) for text in TEXTS])
    response = engine.embed(TEXTS)
    assert np.abs(response.numpy() - expected).max() < 1e-4
    assert response.usage.input_tokens == sum(len(encode(directory, text)) for text in TEXTS)
    by_token = engine.embed(TEXTS, granularity="token")
    for output, text in zip(by_token, TEXTS):
        assert list(output.token_ids) == encode(directory, text)
        assert np.abs(output.numpy() - hidden_states(reference, encode(directory, text))).max() < 1e-4


def test_vectors_of_a_decoder_are_those_of_the_last_token(models):
    directory, reference, engine = models["decoder_embedding"]
    texts = [text for text in TEXTS if text]
    hidden = [hidden_states(reference, encode(directory, text)) for text in texts]
    assert np.abs(engine.embed(texts).numpy() - np.stack([rows[-1] for rows in hidden])).max() < 1e-4
    for output, rows in zip(engine.embed(texts, granularity="token"), hidden):
        assert np.abs(output.numpy() - rows).max() < 1e-4, (
            "chunks of a long item are joined, cached rows computed again"
        )


def test_classes_have_the_models_logits_and_names(models):
    directory, reference, engine = models["classifier"]
    expected = np.stack([logits(reference, encode(directory, text)) for text in TEXTS])
    response = engine.classify(TEXTS, output_semantics="logits")
    assert np.abs(response.scores - expected).max() < 1e-4
    assert response.labels == [LABELS[row.argmax()] for row in expected]
    probabilities = engine.classify(TEXTS).scores
    assert np.abs(probabilities - np.exp(expected) / np.exp(expected).sum(1, keepdims=True)).max() < 1e-4


def test_tokens_have_classes_of_their_own(models):
    directory, reference, engine = models["tagger"]
    for output, text in zip(engine.classify(TEXTS, output_semantics="logits"), TEXTS):
        assert np.abs(output.numpy() - logits(reference, encode(directory, text))).max() < 1e-4


def test_e8_a_cross_encoder_scores_pairs_wherever_it_lies(models):
    directory, reference, engine = models["cross"]
    documents = [text for text in TEXTS if text]
    expected = np.array([logits(reference, encode(directory, "a query", text))[0] for text in documents])
    response = engine.score("a query", documents, output_semantics="logits")
    assert np.abs(response.scores - expected).max() < 1e-4
    assert response.ranking() == np.argsort(-expected, kind="stable").tolist()
    assert np.abs(engine.score("a query", documents).scores - 1 / (1 + np.exp(-expected))).max() < 1e-5
    with pytest.raises(UnsupportedTask, match="it can classify and score"):
        engine.embed("a")


def test_label_tokens_of_a_causal_model_are_scored_in_the_vocabulary_or_among_themselves(models):
    directory, reference, engine = models["causal"]
    labels = (300, 7, 20)
    rows = np.stack([logits(reference, encode(directory, f"query: {text}"))[-1] for text in TEXTS])
    logs = rows - np.log(np.exp(rows.astype(np.float64)).sum(1, keepdims=True))
    raw = engine.score(
        "query: ", TEXTS, label_token_ids=labels, output_semantics="log_probabilities", normalization="none"
    )
    assert np.abs(raw.scores - logs[:, labels]).max() < 1e-4 and raw.label_token_ids == labels
    among = engine.score("query: ", TEXTS, label_token_ids=labels).scores
    assert np.abs(among - np.exp(logs[:, labels]) / np.exp(logs[:, labels]).sum(1, keepdims=True)).max() < 1e-4


def test_e7_a_causal_model_without_a_template_has_no_score_of_its_own(models, tmp_path):
    directory, _reference, engine = models["causal"]
    with pytest.raises(InvalidArgument, match=r"labels=\[' yes', ' no'\], or label_token_ids"):
        engine.score("query", ["document"])
    assert engine.model_info().tasks.score.higher_is_better is None
    with Engine(directory, score_template="{query} | {document} ? {instruction}", **OPTIONS) as templated:
        pairs = templated.score("how", ["one two", "three"], instruction="be", label_token_ids=[7, 8])
        joined = engine.score("how | ", ["one two ? be", "three ? be"], label_token_ids=[7, 8])
        assert np.abs(pairs.scores - joined.scores).max() < 1e-5
        with pytest.raises(InvalidArgument, match="'yes' and 'no'"):
            templated.score("how", ["one"])


def test_e6_a_reranker_is_asked_with_its_own_template_and_scores_yes_against_no(tmp_path):
    reference = write_task_model(tmp_path, "causal", max_position_embeddings=1024)
    add_tokens(tmp_path, "yes", "no", "Judge", " whether", " the", " Document")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    mark = "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
    template = config["chat_template"] + "{# " + mark + " #}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    query, documents = "what does cola cost", ["one cola is two", "the dog is lazy", "five", "how are you"]
    yes, no = encode(tmp_path, "yes")[-1], encode(tmp_path, "no")[-1]
    expected = []
    for document in documents:
        text = (
            f'<|im_start|>system\n{mark} Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
            "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
            f"<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        row = logits(reference, encode(tmp_path, text))[-1].astype(np.float64)
        expected.append(np.exp(row[yes]) / (np.exp(row[yes]) + np.exp(row[no])))
    with Engine(tmp_path, max_num_seqs=4, block_size=8, **OPTIONS) as engine:
        score = engine.model_info().tasks.score
        assert score.supports_instruction and score.higher_is_better and score.supports_label_token_scoring
        response = engine.score(query, documents)
        assert np.abs(response.scores - expected).max() < 1e-5, "SCR-10 and SCR-14 too"
        assert response.ranking() == np.argsort(-np.array(expected), kind="stable").tolist()
        assert response.usage.cached_input_tokens > response.usage.input_tokens / 2, "the template and query come once"
        other = engine.score(query, documents, instruction="Find prices").scores
        assert np.abs(other - expected).max() > 1e-6
        assert engine.generate("a", max_tokens=1).outputs, "it still generates"


def test_a_rerankers_head_scores_pairs_as_its_template_writes_them(tmp_path):
    reference = write_model(tmp_path, "qwen3", "ForSequenceClassification", num_labels=1)
    write_tokenizer(tmp_path)
    documents = ["one cola is two", "the dog is lazy", "five"]

    def expected(template: str, *, special: bool) -> np.ndarray:
        texts = [template.format(query="how are you", document=document) for document in documents]
        ids = [encode(tmp_path, text, add_special_tokens=special) for text in texts]
        return np.array([logits(reference, row)[0] for row in ids])

    with Engine(tmp_path, score_template="Q: {query} D: {document} {instruction}", **OPTIONS) as engine:
        found = engine.score("how are you", documents, output_semantics="logits", instruction="!")
        assert np.abs(found.scores - expected("Q: {query} D: {document} !", special=True)).max() < 1e-4
    roles = (
        f"{{{{ messages | selectattr('role', 'eq', '{role}') | map(attribute='content') | first }}}}"
        for role in ("query", "document")
    )
    edit_json(tmp_path / "tokenizer_config.json", chat_template="<|im_start|>Q: {} D: {}<|im_end|>".format(*roles))
    with Engine(tmp_path, max_num_batched_tokens=16, block_size=4, max_num_seqs=4, **OPTIONS) as engine:
        found = engine.score("how are you", documents, output_semantics="logits")
        wanted = expected("<|im_start|>Q: {query} D: {document}<|im_end|>", special=False)
        assert np.abs(found.scores - wanted).max() < 1e-4
        assert found.higher_is_better and found.usage.cached_input_tokens


@pytest.mark.parametrize("names", [["input_ids", "token_type_ids", "attention_mask"], ["input_ids", "attention_mask"]])
def test_a_pairs_tokens_have_types_where_the_tokenizer_gives_them(tmp_path, names):
    import torch
    import transformers

    write_bert(tmp_path, architecture="BertForSequenceClassification", num_labels=1)
    edit_json(tmp_path / "tokenizer_config.json", model_input_names=names)
    reference = transformers.BertForSequenceClassification.from_pretrained(tmp_path).eval()
    documents = ["the lazy dog", "one two three", "hello"]
    encoded = transformers.AutoTokenizer.from_pretrained(tmp_path)(
        ["the fox"] * 3, documents, padding=True, return_tensors="pt"
    )
    assert ("token_type_ids" in encoded) == ("token_type_ids" in names)
    with torch.inference_mode():
        expected = reference(**encoded).logits[:, 0].numpy()
    with Engine(tmp_path, **OPTIONS) as engine:
        found = engine.score("the fox", documents, output_semantics="logits").scores
    assert np.abs(found - expected).max() < 1e-5


def test_a_decoder_whose_first_token_is_pooled_gives_that_one(tmp_path):
    reference = write_task_model(tmp_path, "decoder_embedding")
    modules = [{"path": "", "type": "Transformer"}, {"path": "1_Pooling", "type": "Pooling"}]
    entries = [{**module, "type": f"sentence_transformers.models.{module['type']}"} for module in modules]
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    (tmp_path / "1_Pooling").mkdir()
    edit_json(tmp_path / "1_Pooling" / "config.json", pooling_mode="cls", embedding_dimension=64)
    items = [[first, *range(20, 20 + count)] for first, count in ((7, 40), (8, 0), (9, 15), (7, 3))]
    expected = np.stack([hidden_states(reference, ids)[0] for ids in items])
    with Engine(tmp_path, max_num_batched_tokens=16, block_size=4, max_num_seqs=4, **OPTIONS) as engine:
        for _ in range(2):  # in chunks, and with what the cache has by then
            assert np.abs(engine.embed(items).numpy() - expected).max() < 1e-4


def test_e2_the_last_token_is_the_eos_that_the_tokenizer_appends(tmp_path):
    from tokenizers import Tokenizer, processors

    reference = write_task_model(tmp_path, "decoder_embedding")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <|eos|>", special_tokens=[("<|eos|>", EOS)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with Engine(tmp_path, **OPTIONS) as engine:
        vectors = engine.embed(TEXTS, normalize=True).numpy()
    for vector, text in zip(vectors, TEXTS):
        ids = encode(tmp_path, text)
        assert ids.count(EOS) == 1 and ids[-1] == EOS
        expected = hidden_states(reference, ids)[-1]
        assert vector @ expected / np.linalg.norm(expected) > 0.9999


def test_sparse_vectors_are_positive_weights_of_the_vocabulary(models):
    directory, reference, engine = models["sparse"]
    for output, text in zip(engine.embed(TEXTS), TEXTS):
        expected = np.log1p(np.maximum(logits(reference, encode(directory, text)), 0)).max(0)
        assert np.abs(output.numpy() - expected).max() < 1e-4 and output.embedding.shape == (VOCAB_SIZE,)


def test_e10_normalize_and_dimensions_are_done_exactly_or_refused(models):
    engine = engine_of(models, "embedding")
    raw = engine.embed(TEXTS).numpy()
    assert np.allclose(np.linalg.norm(engine.embed(TEXTS, normalize=True).numpy(), axis=1), 1, atol=1e-6)
    assert np.array_equal(engine.embed(TEXTS, normalize=False, dimensions=5).numpy(), raw[:, :5])
    cut = engine.embed(TEXTS, normalize=True, dimensions=5).numpy()
    assert np.allclose(cut, raw[:, :5] / np.linalg.norm(raw[:, :5], axis=1, keepdims=True), atol=1e-6)
    assert engine.embed("a", dimensions=64).numpy().shape[-1] == 64
    for dimensions in (0, 65, -1, 2.5, True):
        with pytest.raises(InvalidArgument, match="dimensions"):
            engine.embed("a", dimensions=dimensions)


@pytest.mark.parametrize("kind", ["embedding", "decoder_embedding"])
def test_e4_tsk_20_a_result_does_not_depend_on_what_runs_beside_it(models, kind):
    engine, texts = engine_of(models, kind), [*texts_of(60), *["equal sentences"] * 40]
    together = engine.embed(texts).numpy()
    order = random.Random(1).sample(range(100), 100)
    shuffled = engine.embed([texts[index] for index in order]).numpy()
    alone = np.concatenate([engine.embed([text]).numpy() for text in texts])
    assert np.abs(together - alone).max() < 1e-4 and np.abs(shuffled - together[order]).max() < 1e-4
    assert np.abs(together[60:] - together[60]).max() < 1e-5, "equal sentences have equal vectors"


# ---- what goes in --------------------------------------------------------------------------------


def test_inputs_are_texts_or_ids_alone_or_in_any_list(models):
    directory, _reference, engine = models["embedding"]
    ids = encode(directory, "hello world")
    expected = engine.embed(["hello world"]).numpy()[0]
    for inputs in (
        [ids],
        np.array([ids]),
        ("hello world",),
        np.array(["hello world"]),
        [TaskInput(item_id="x", text="hello world")],
        EmbedRequest(inputs=(TaskInput(item_id="x", token_ids=ids),)),
    ):
        assert np.abs(engine.embed(inputs)[0].numpy() - expected).max() < 1e-5
    mixed = engine.embed(["a", ids, np.array(ids, dtype=np.uint16)])
    assert len(mixed) == 3 and np.abs(mixed[2].numpy() - expected).max() < 1e-5
    assert [output.item_id for output in mixed] == ["0", "1", "2"]


def test_one_input_gives_its_output_and_a_list_of_one_a_response(models):
    engine, classifier = engine_of(models, "embedding"), engine_of(models, "classifier")
    ids = encode(models["embedding"][0], "hello world")
    expected = engine.embed(["hello world"])
    assert isinstance(expected, EmbedResponse) and expected.numpy().shape == (1, 64)
    for one in (
        "hello world",
        np.str_("hello world"),
        ids,
        tuple(ids),
        np.array(ids),
        TaskInput(item_id="x", text="hello world"),
    ):
        for output in (engine.embed(one), asyncio.run(engine.aembed(one))):
            assert isinstance(output, EmbeddingOutput) and output.numpy().shape == (64,)
            assert np.abs(output.numpy() - expected[0].numpy()).max() < 1e-5
    assert engine.embed("hello world", granularity="token").numpy().shape == (len(ids), 64)
    ids = encode(models["classifier"][0], "hello")
    response = classifier.classify(["hello"])
    assert isinstance(response, ClassifyResponse) and response.scores.shape == (1, 3)
    for output in (classifier.classify("hello"), classifier.classify(ids), asyncio.run(classifier.aclassify("hello"))):
        assert isinstance(output, ClassificationOutput) and output.label == response.labels[0]
        assert np.abs(output.numpy() - response.scores[0]).max() < 1e-5
    inputs = (TaskInput(item_id="x", text="hello"),)
    assert isinstance(engine.embed(EmbedRequest(inputs=inputs)), EmbedResponse)
    assert isinstance(classifier.classify(ClassifyRequest(inputs=inputs)), ClassifyResponse)


def test_scores_come_one_to_many_and_pair_by_pair(models):
    engine = engine_of(models, "cross")
    one, two = engine.score("a", ["x y", "z"]).scores, engine.score("b", ["x y"]).scores
    response = engine.score(["a", "b"], [["x y", "z"], "x y"])
    assert np.abs(response.scores - [*one, *two]).max() < 1e-5
    assert [len(group.candidates) for group in response.groups] == [2, 1]
    assert np.abs(engine.score("a", "z").scores - one[1]).max() < 1e-5
    ids = engine.tokenize("a", add_special_tokens=False)
    assert np.abs(engine.score(ids, ["x y", engine.tokenize("z", add_special_tokens=False)]).scores - one).max() < 1e-5
    with pytest.raises(InvalidArgument, match="2 queries have 1 candidates"):
        engine.score(["a", "b"], ["x"])


def test_scr_16_splitting_candidates_into_groups_changes_no_score(models):
    engine, documents = engine_of(models, "cross"), texts_of(30)
    one = engine.score("how are you", documents).scores
    several = engine.score(["how are you"] * 30, documents).scores
    assert np.abs(one - several).max() < 1e-5


def test_truncation_is_an_error_unless_asked_for(models):
    directory, _reference, engine = models["embedding"]
    long = "quick " * 400
    with pytest.raises(InvalidArgument, match=r"more than the 130 that the model takes"):
        engine.embed(long)
    ids = encode(directory, long)
    for side, kept in (("right", ids[:130]), ("left", [ids[0], *ids[-129:]])):
        assert np.abs(engine.embed(long, truncate=side).numpy() - engine.embed(kept).numpy()).max() < 1e-5
    with pytest.raises(InvalidArgument, match="truncate"):
        engine.embed("a", truncate="middle")


def test_a_prompt_stands_before_every_text(models):
    engine = engine_of(models, "embedding")
    assert np.array_equal(engine.embed(["a", "b"], prompt="of: ").numpy(), engine.embed(["of: a", "of: b"]).numpy())
    with pytest.raises(InvalidArgument, match="prompt"):
        engine.embed("a", prompt_name="query")


def test_labels_may_be_named_by_their_text(models):
    engine = engine_of(models, "causal")
    (a,), (b,) = (engine.tokenize(text, add_special_tokens=False) for text in "ab")
    named, numbered = engine.score("x", ["y"], labels=["a", "b"]), engine.score("x", ["y"], label_token_ids=[a, b])
    assert named.label_token_ids == (a, b) and np.array_equal(named.scores, numbered.scores)
    with pytest.raises(InvalidArgument, match="a label must be one"):
        engine.score("x", ["y"], labels=["quick brown"])
    with pytest.raises(InvalidArgument, match="keep one"):
        engine.score("x", ["y"], labels=["a"], label_token_ids=[a])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.embed([]), "inputs is empty"),
        (lambda e: e.embed(["a", 5]), "item 1 of 2"),
        (lambda e: e.embed(None), "NoneType"),
        (lambda e: e.embed("a", normalise=True), "did you mean 'normalize'"),
        (lambda e: e.embed("a", truncate_dim=5), "did you mean 'dimensions'"),
        (lambda e: e.embed("a", granularity="word"), "granularity"),
        (lambda e: e.embed("a", encoding="sparse"), "encoding"),
        (lambda e: e.embed("a", normalize="yes"), "normalize"),
        (lambda e: e.embed("a", priority=2**31), "priority"),
        (lambda e: e.embed("a", lora_name="x"), "lora_name"),
        (lambda e: e.embed("a", lora_name=0), "lora_name"),
        (lambda e: e.embed("a", metadata={"a": 5}), "metadata"),
        (lambda e: e.embed("a", metadata={5: "a"}), "metadata"),
        (lambda e: e.embed("a", progress="x"), "progress must be True, False or None"),
        (lambda e: e.embed("a", prompt=5), "prompt must be a text"),
        (lambda e: e.embed("a", prompt_name=["a"]), "prompt_name must be a text"),
        (lambda e: e.embed(EmbedRequest(inputs=(TaskInput(item_id="\ud800", text="x"),))), "surrogate"),
        (lambda e: e.embed(EmbedRequest(inputs=(TaskInput(item_id="a", token_ids="abc"),))), "token_ids must be"),
        (lambda e: e.embed([[1, VOCAB_SIZE]]), "vocabulary"),
        (lambda e: e.embed([[]]), "no token ids"),
        (lambda e: e.embed("\ud800"), "surrogate"),
        (lambda e: e.embed(EmbedRequest(inputs=(TaskInput(item_id="a", text="x"),)), normalize=True), "into it"),
        (
            lambda e: e.embed(
                EmbedRequest(inputs=(TaskInput(item_id="a", text="x"), TaskInput(item_id="a", text="y")))
            ),
            "twice",
        ),
        (lambda e: e.embed(EmbedRequest(inputs=(TaskInput(item_id="a"),))), "exactly one"),
        (lambda e: e.embed(EmbedRequest(inputs="a")), "inputs must be"),
        (lambda e: e.embed(EmbedRequest(inputs=(TaskInput(item_id="a", text=3),))), "text"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(models, call, message):
    engine = engine_of(models, "embedding")
    steps = engine._loop.num_steps
    with pytest.raises(InvalidArgument, match=message):
        call(engine)
    assert engine._loop.num_steps == steps


def test_a_bad_item_among_a_thousand_is_named_by_its_index(models):
    engine = engine_of(models, "embedding")
    steps, texts = engine._loop.num_steps, texts_of(1000)
    for bad, message in (("word " * 300, "more than the 130"), (None, "not NoneType"), ([1, 10**6], "vocabulary")):
        inputs = [*texts[:617], bad, *texts[618:]]
        with pytest.raises(InvalidArgument, match=message) as caught:
            engine.embed(inputs)
        assert "617" in caught.value.message
    documents = [*texts[:617], "word " * 300, *texts[618:]]
    with pytest.raises(InvalidArgument, match=r"candidates\[617\]"):
        engine_of(models, "cross").score("query", documents)
    assert engine._loop.num_steps == steps, "nothing has run"


def test_the_wrong_task_is_refused_with_what_the_model_can_do(models):
    can = {
        "embedding": "embed",
        "classifier": "classify",
        "tagger": "classify",
        "cross": "classify and score",
        "sparse": "embed",
        "causal": "generate and score",
        "decoder_embedding": "embed",
    }
    calls = {
        "embed": lambda e: e.embed("a"),
        "classify": lambda e: e.classify("a"),
        "score": lambda e: e.score("a", ["b"]),
        "generate": lambda e: e.generate("a", max_tokens=1),
        "stream": lambda e: next(e.stream("a", max_tokens=1)),
        "agenerate": lambda e: asyncio.run(e.agenerate("a", regex="a")),
    }
    for kind, words in can.items():
        for task, call in calls.items():
            if {"stream": "generate", "agenerate": "generate"}.get(task, task) in words:
                continue
            with pytest.raises(UnsupportedTask, match=f"it can {words}$"):
                call(engine_of(models, kind))


# ---- long lists, interrupts, others --------------------------------------------------------------


def test_ten_thousand_texts_stream_through_in_order_and_in_little_memory(models):
    engine, texts = engine_of(models, "embedding"), texts_of(10_000, most=8)
    few = engine.embed(texts[:1500]).numpy()
    most_open = 0

    def watch() -> None:
        nonlocal most_open
        while not done.is_set():
            load = engine.load_info()
            most_open = max(most_open, load.running_requests + load.queued_requests)
            time.sleep(0.001)

    done = threading.Event()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        vectors = engine.embed(texts).numpy()
    finally:
        done.set()
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    watcher.join()
    assert vectors.shape == (10_000, 64) and np.abs(vectors[:1500] - few).max() < 1e-5
    assert np.abs(vectors[-1] - engine.embed([texts[-1]]).numpy()).max() < 1e-5
    assert most_open <= 4, "a few requests at a time"
    assert grown_mib < 40, f"{grown_mib} MiB for {vectors.nbytes / 2**20:.1f} MiB of vectors"


def test_a_progress_bar_counts_items(models, capsys):
    engine_of(models, "embedding").embed(texts_of(1200, most=4), progress=True)
    shown = capsys.readouterr().err
    assert "embedding" in shown and "1200/1200" in shown


def test_an_interrupted_call_leaves_the_engine_usable(models):
    engine = engine_of(models, "embedding")
    texts = texts_of(4000, most=40)
    expected = engine.embed(texts[:3]).numpy()
    is_over = threading.Event()

    def interrupt() -> None:
        while not is_over.wait(0.25):  # again where Python could not raise it, as in a destructor
            _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            engine.embed(texts)
    is_over.set()
    wait_idle(engine)
    assert np.abs(engine.embed(texts[:3]).numpy() - expected).max() < 1e-5


def test_many_threads_get_their_own_results(models):
    engine, texts = engine_of(models, "embedding"), texts_of(48)
    expected = engine.embed(texts).numpy()
    wrong = []

    def work(index: int) -> None:
        for offset in range(0, 48, 8):
            part = texts[offset : offset + 8]
            if np.abs(engine.embed(part).numpy() - expected[offset : offset + 8]).max() > 1e-4:
                wrong.append((index, offset))

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and is_idle(engine)


def test_in_an_event_loop_calls_run_together_and_a_cancelled_one_ends(models):
    engine, texts = engine_of(models, "embedding"), texts_of(4000, most=40)

    async def main() -> list:
        long = asyncio.create_task(engine.aembed(texts))
        await asyncio.sleep(0.1)
        short = await asyncio.gather(*(engine.aembed(text) for text in texts[:5]))
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        return short

    short = asyncio.run(main())
    assert np.abs(np.stack([r.numpy() for r in short]) - engine.embed(texts[:5]).numpy()).max() < 1e-4
    wait_idle(engine)
    assert asyncio.run(engine_of(models, "cross").ascore("a", ["b", "c"])).scores.shape == (2,)
    assert asyncio.run(engine_of(models, "classifier").aclassify(["a"])).labels


def request(count=1, *, request_id=None, priority=None, text="hello world " * 8):
    inputs = tuple(TaskInput(item_id=str(index), text=text) for index in range(count))
    return EmbedRequest(inputs=inputs, context=TaskRequestContext(request_id=request_id, priority=priority))


def test_tsk_03_17_ids_are_those_of_generation_and_abort_knows_them(models):
    engine = engine_of(models, "embedding")
    handle = engine.submit_task(request(4000, request_id="long"))
    with pytest.raises(DuplicateRequest):
        engine.submit_task(request(request_id="long"))
    with pytest.raises(DuplicateRequest):
        engine.embed("a", request_id="long")
    assert engine.abort("long").status is AbortStatus.ABORTED
    with pytest.raises(Cancelled):
        handle.result()
    assert engine.abort("long").status is AbortStatus.ALREADY_FINISHED
    assert engine.embed(["a"], request_id="long").request_id == "long"


def test_a_handle_waits_is_cancelled_and_gives_its_response_twice(models):
    engine = engine_of(models, "embedding")
    handle = engine.submit_task(request(3))
    assert np.array_equal(handle.result().numpy(), handle.result().numpy()) and handle.done
    slow = engine.submit_task(request(4000))
    with pytest.raises(TimeoutError):
        slow.result(timeout=0.001)
    slow.cancel()
    with pytest.raises(Cancelled):
        slow.result()
    wait_idle(engine)


def test_larger_priority_overtakes(models):
    engine = engine_of(models, "embedding")
    first = engine.submit_task(request(4000))
    urgent = engine.submit_task(request(400, priority=1))
    urgent.result()
    assert not first.done
    first.cancel()
    wait_idle(engine)


def test_a_short_request_does_not_wait_for_a_long_one(models):
    engine = engine_of(models, "embedding")
    first = engine.submit_task(request(4000))
    engine.embed(texts_of(4))
    assert not first.done
    first.cancel()
    wait_idle(engine)


# ---- the engine around it ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_discovery_health_and_load_make_sense_for_every_kind(models, kind):
    engine = engine_of(models, kind)
    info, health = engine.model_info(), engine.health(include_inference_probe=True)
    assert health.state is HealthState.READY and health.checks[-1].state is HealthState.READY
    assert (info.generation is not None) == (kind == "causal") and info.tasks is not None
    is_encoder = kind not in ("causal", "decoder_embedding")
    assert (info.kv_block_size is None) == (info.total_kv_blocks is None) == is_encoder
    assert info.max_context_length == (130 if is_encoder and kind not in ("tagger",) else info.max_context_length)
    assert engine.info().attributes["architecture"] and repr(engine)
    load = engine.load_info()
    assert load.used_kv_blocks == 0 and (load.total_kv_blocks == 0) == is_encoder
    if is_encoder:
        with pytest.raises(PreconditionFailed):
            engine.kv_events()
    engine.clear_prefix_cache()


def test_generation_and_tasks_share_one_engine_and_lose_no_block(models):
    directory, _reference, calm = models["causal"]
    documents, labels = texts_of(40), [5, 6, 7]
    scores = calm.score("how are you: ", documents, label_token_ids=labels).scores
    texts = [calm.generate(text, max_tokens=12, temperature=0).text for text in documents[:10]]
    with Engine(
        directory, num_kv_blocks=24, block_size=8, max_num_seqs=6, max_num_batched_tokens=24, **OPTIONS
    ) as engine:
        failures = []

        def generate() -> None:
            for expected, result in zip(texts, engine.generate(documents[:10], max_tokens=12, temperature=0)):
                if result.text != expected:
                    failures.append((expected, result.text))

        def score() -> None:
            found = engine.score("how are you: ", documents, label_token_ids=labels).scores
            if np.abs(found - scores).max() > 1e-4:
                failures.append(np.abs(found - scores).max())

        def cancel() -> None:
            for _ in range(5):
                handle = engine.submit_task(score_request(documents))
                time.sleep(0.01)
                handle.cancel()

        threads = [threading.Thread(target=work, daemon=True) for work in (generate, score, cancel, generate, score)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_idle(engine)
        assert not failures
        engine._loop.call(lambda scheduler: scheduler.check())
        assert engine._loop.call(lambda scheduler: scheduler.blocks.num_free) == 24


def score_request(documents, **context) -> ScoreRequest:
    candidates = tuple(TaskInput(item_id=f"c{index}", text=text) for index, text in enumerate(documents))
    group = ScoreGroup(group_id="g", query=TaskInput(item_id="q", text="how are you: "), candidates=candidates)
    return ScoreRequest(
        groups=(group,), options=ScoreOptions(label_token_ids=(5, 6)), context=TaskRequestContext(**context)
    )


@pytest.mark.parametrize("most", [3, 40])
def test_tsk_15_one_query_is_computed_once_for_two_hundred_candidates(models, most):
    directory, _reference, _engine = models["causal"]
    query = " ".join(random.Random(5).choices(WORDS, k=60))
    documents = [" " + text for text in texts_of(200, most=most)]
    with Engine(directory, max_num_seqs=16, **OPTIONS) as engine:
        own = sum(len(engine.tokenize(text, add_special_tokens=False)) for text in documents)
        response = engine.score(query, documents, label_token_ids=[5, 6])
        usage, once = response.usage, len(engine.tokenize(query))
        assert usage.input_tokens == own + 200 * once
        computed = usage.input_tokens - usage.cached_input_tokens
        assert computed <= 1.15 * own + once, (computed, own, once)
        again = engine.score(query, documents[:8], label_token_ids=[5, 6])
        assert np.abs(again.scores - response.scores[:8]).max() < 1e-5
        assert 0 < again.usage.cached_input_tokens < again.usage.input_tokens
        alone = [engine.score(query, [text], label_token_ids=[5, 6]).scores[0] for text in documents[:20]]
        assert np.abs(response.scores[:20] - alone).max() < 1e-5
        assert engine._loop.call(lambda scheduler: scheduler.blocks.num_used) == 0


def test_emb_10_vectors_by_token_are_complete_with_a_warm_cache_and_in_chunks(models):
    directory, reference, _engine = models["decoder_embedding"]
    text = " ".join(random.Random(2).choices(WORDS, k=60))
    expected = hidden_states(reference, encode(directory, text))
    with Engine(directory, max_num_seqs=4, max_num_batched_tokens=16, block_size=4, **OPTIONS) as engine:
        last = engine.embed([text, text]).numpy()
        by_token = engine.embed([text, text], granularity="token")
        assert by_token.usage.cached_input_tokens == 0, "every row is wanted"
        for output in by_token:
            assert np.abs(output.numpy() - expected).max() < 1e-4
        assert np.abs(last - expected[-1]).max() < 1e-4


def test_an_item_larger_than_the_kv_pool_is_refused(models):
    directory = models["decoder_embedding"][0]
    with Engine(directory, num_kv_blocks=4, block_size=4, max_model_len=64, **OPTIONS) as engine:
        with pytest.raises(RequestTooLarge):
            engine.embed("quick " * 20)
        assert engine.embed("quick").numpy().shape[-1] == 64


def test_drain_and_close_end_tasks_as_they_end_generations(tmp_path):
    write_task_model(tmp_path, "embedding")
    engine = Engine(tmp_path, **OPTIONS)
    handle = engine.submit_task(request(2000))
    engine.drain()
    assert handle.done and len(handle.result()) == 2000
    assert engine.health(include_inference_probe=True).checks[-1].state is HealthState.READY, "a probe is no request"
    engine.close()
    with pytest.raises(PreconditionFailed):
        engine.embed("a")
    late = Engine(tmp_path, **OPTIONS)
    handle = late.submit_task(request(4000))
    late.close()
    with pytest.raises(Cancelled):
        handle.result()


def test_model_names_are_checked_and_options_of_a_cache_refused(models):
    directory, _reference, engine = models["embedding"]
    with pytest.raises(ModelNotFound):
        engine.embed("a", model="other")
    assert len(engine.embed(["a"], model=str(directory))) == 1
    for option in ("num_kv_blocks", "block_size"):
        with pytest.raises(InvalidArgument, match=option):
            Engine(directory, **{option: 16})
    with pytest.raises(InvalidArgument, match="max_model_len"):
        Engine(directory, max_model_len=1000)
    with pytest.raises(InvalidArgument, match="score_template"):
        Engine(directory, score_template="{query}{document}")
    with Engine(directory, max_model_len=16, **OPTIONS) as short, pytest.raises(InvalidArgument, match="16"):
        short.embed("one two three four five " * 5)


def test_the_contracts_requests_give_its_responses(models):
    inputs = (TaskInput(item_id="x", text="hello"),)
    response = engine_of(models, "classifier").classify(ClassifyRequest(inputs=inputs))
    assert response[0].item_id == "x" and response[0].semantics is TaskValueSemantics.PROBABILITIES
    assert response[0].labels == tuple(LABELS.values())
    scored = engine_of(models, "causal").score(score_request(["a", "b"], request_id="mine"))
    assert scored.request_id == "mine" and scored.groups[0].candidates[1].candidate_id == "c1"


@pytest.mark.parametrize("call", ["embed", "classify"])
def test_what_is_no_input_is_told_what_an_input_is(models, call):
    engine = engine_of(models, "embedding" if call == "embed" else "classifier")
    for value in (None, 7, b"text", {"text": "x"}):
        with pytest.raises(InvalidArgument, match="an input is a str, a list of token ids or a TaskInput, not"):
            getattr(engine, call)(value)


def test_a_chat_with_a_model_that_does_not_generate_is_refused_for_that_and_not_for_its_template(models):
    with pytest.raises(UnsupportedTask, match="does not generate text; it can embed"):
        engine_of(models, "embedding").chat([{"role": "user", "content": "Hi"}])
