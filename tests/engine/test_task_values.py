"""What embed, classify and score compute, against transformers on the same models."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from openengine import (
    Engine,
    InvalidArgument,
    UnsupportedTask,
)
from tests.checkpoints import EOS, VOCAB_SIZE, write_model, write_tokenizer
from tests.embedders import edit_json, write_bert
from tests.task_models import (
    ENGINE_OPTIONS,
    LABELS,
    TEXTS,
    add_tokens,
    encode,
    engine_of,
    hidden_states,
    logits,
    texts_of,
    write_task_model,
)


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
    with Engine(directory, score_template="{query} | {document} ? {instruction}", **ENGINE_OPTIONS) as templated:
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
    with Engine(tmp_path, max_num_seqs=4, block_size=8, **ENGINE_OPTIONS) as engine:
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

    with Engine(tmp_path, score_template="Q: {query} D: {document} {instruction}", **ENGINE_OPTIONS) as engine:
        found = engine.score("how are you", documents, output_semantics="logits", instruction="!")
        assert np.abs(found.scores - expected("Q: {query} D: {document} !", special=True)).max() < 1e-4
    roles = (
        f"{{{{ messages | selectattr('role', 'eq', '{role}') | map(attribute='content') | first }}}}"
        for role in ("query", "document")
    )
    edit_json(tmp_path / "tokenizer_config.json", chat_template="<|im_start|>Q: {} D: {}<|im_end|>".format(*roles))
    with Engine(tmp_path, max_num_batched_tokens=16, block_size=4, max_num_seqs=4, **ENGINE_OPTIONS) as engine:
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
    with Engine(tmp_path, **ENGINE_OPTIONS) as engine:
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
    with Engine(tmp_path, max_num_batched_tokens=16, block_size=4, max_num_seqs=4, **ENGINE_OPTIONS) as engine:
        for _ in range(2):  # in chunks, and with what the cache has by then
            assert np.abs(engine.embed(items).numpy() - expected).max() < 1e-4


def test_e2_the_last_token_is_the_eos_that_the_tokenizer_appends(tmp_path):
    from tokenizers import Tokenizer, processors

    reference = write_task_model(tmp_path, "decoder_embedding")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <|eos|>", special_tokens=[("<|eos|>", EOS)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with Engine(tmp_path, **ENGINE_OPTIONS) as engine:
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
