"""What embed, classify and score take: texts, ids, pairs, truncation, labels, and what they refuse."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from openengine import (
    ClassificationOutput,
    ClassifyRequest,
    ClassifyResponse,
    EmbeddingOutput,
    EmbedRequest,
    EmbedResponse,
    Engine,
    InvalidArgument,
    ModelNotFound,
    TaskInput,
    UnsupportedTask,
)
from tests.checkpoints import VOCAB_SIZE
from tests.task_models import (
    ENGINE_OPTIONS,
    encode,
    engine_of,
    texts_of,
)


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
    with Engine(directory, max_model_len=16, **ENGINE_OPTIONS) as short, pytest.raises(InvalidArgument, match="16"):
        short.embed("one two three four five " * 5)


@pytest.mark.parametrize("call", ["embed", "classify"])
def test_what_is_no_input_is_told_what_an_input_is(models, call):
    engine = engine_of(models, "embedding" if call == "embed" else "classifier")
    for value in (None, 7, b"text", {"text": "x"}):
        with pytest.raises(InvalidArgument, match="an input is a str, a list of token ids or a TaskInput, not"):
            getattr(engine, call)(value)


def test_a_chat_with_a_model_that_does_not_generate_is_refused_for_that_and_not_for_its_template(models):
    with pytest.raises(UnsupportedTask, match="does not generate text; it can embed"):
        engine_of(models, "embedding").chat([{"role": "user", "content": "Hi"}])
