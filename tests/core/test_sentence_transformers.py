"""Directories as sentence-transformers saves them: what is read, what is refused, and that the vectors are the same."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from openengine.core.pooler import Pooler
from openengine.core.sentence_transformers import plain_embedding_spec, plain_score_spec, read_sentence_transformers
from openengine.core.task_kinds import TaskKind
from openengine.core.task_output import embed_outputs
from openengine.core.task_specs import EmbeddingSpec, ScoreSpec
from openengine.core.task_tokens import TaskTokenizer
from openengine.core.task_work import TaskWork
from openengine.core.tokenizer import load_tokenizer
from openengine.errors import InvalidArgument, OpenEngineError, UnsupportedFeature
from tests.embedders import HIDDEN_SIZE, TEXTS, edit_json, write_bert, write_embedder

pytest.importorskip("sentence_transformers")

ALL_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
OURS = {"mean_sqrt_len_tokens": "mean_sqrt_len", "lasttoken": "last"}


def read(directory: Path) -> EmbeddingSpec | ScoreSpec | None:
    return read_sentence_transformers(directory, hidden_size=HIDDEN_SIZE, vocab_size=300)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory) -> Path:
    """Read only; tests that change files copy it."""
    return write_embedder(
        tmp_path_factory.mktemp("st") / "model",
        pooling=("mean", "cls"),
        dense=((24, "Tanh"), (16, "Identity")),
        normalize=True,
        prompts={"query": "query: ", "passage": "passage: "},
        default_prompt_name="query",
        similarity_fn_name="dot",
    )


@pytest.fixture
def files(tmp_path) -> Path:
    """A directory with the smallest files that describe an embedder, without a model."""
    (tmp_path / "1_Pooling").mkdir()
    edit_json(tmp_path / "1_Pooling" / "config.json", pooling_mode="mean", embedding_dimension=HIDDEN_SIZE)
    write_modules(tmp_path, "Transformer", "Pooling")
    return tmp_path


def write_modules(directory: Path, *kinds: str, package: str = "sentence_transformers.models.") -> None:
    paths = ["" if index == 0 else f"{index}_{kind}" for index, kind in enumerate(kinds)]
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": package + kind}
        for index, (kind, path) in enumerate(zip(kinds, paths))
    ]
    (directory / "modules.json").write_text(json.dumps(entries))


def vectors_of(directory: Path, texts: tuple[str, ...], **encode) -> tuple[np.ndarray, np.ndarray]:
    """Ours, pooled from the library's hidden rows of our tokens, and the library's own."""
    from sentence_transformers import SentenceTransformer

    reference = SentenceTransformer(str(directory), device="cpu")
    expected = reference.encode(list(texts), **encode)
    spec = read(directory)
    tokenizer = TaskTokenizer(load_tokenizer(directory), max_length=spec.max_length, vocab_size=300, spec=spec)
    items = tokenizer.encode(texts, truncate="right", **encode)
    model = reference[0].auto_model
    with torch.inference_mode():
        hidden = [model(torch.tensor(item.token_ids[None], dtype=torch.long)).last_hidden_state[0] for item in items]
    pooler = Pooler(SimpleNamespace(device=torch.device("cpu"), task_head=None), spec)
    if pooler.rows(TaskKind.EMBED) != "all":
        hidden = [rows[:1] if pooler.rows(TaskKind.EMBED) == "first" else rows[-1:] for rows in hidden]
    lens, skipped = [len(item.token_ids) for item in items], [item.num_skipped for item in items]
    raw = pooler.pool(TaskWork(TaskKind.EMBED), torch.cat(hidden), lens, skipped=skipped)
    outputs = embed_outputs(raw, [""] * len(raw), kind=TaskKind.EMBED, normalize=spec.normalize)
    return np.stack([output.numpy() for output in outputs]), expected


# ---- what the library saves is read, and gives its vectors


def test_a_saved_directory_is_read_in_full(embedder):
    spec = read(embedder)
    assert spec.pooling == ("mean", "cls")
    assert [(dense.weight.shape, dense.activation) for dense in spec.dense] == [
        ((24, 64), "Tanh"),
        ((16, 24), "Identity"),
    ]
    assert (spec.dimension, spec.normalize, spec.similarity, spec.max_length) == (16, True, "dot", 64)
    assert spec.prompts == {"query": "query: ", "passage": "passage: ", "document": ""}
    assert spec.default_prompt == "query"


def test_the_whole_chain_gives_the_librarys_vectors(embedder):
    ours, expected = vectors_of(embedder, TEXTS)
    np.testing.assert_allclose(ours, expected, atol=2e-6)


def test_prompts_by_name_give_the_librarys_vectors(embedder):
    ours, expected = vectors_of(embedder, TEXTS[:4], prompt_name="passage")
    np.testing.assert_allclose(ours, expected, atol=2e-6)


@pytest.mark.parametrize("layout", ["compact", "boolean"])
@pytest.mark.parametrize("mode", [*ALL_MODES, ("max", "lasttoken", "weightedmean")], ids=str)
def test_e1_every_mode_in_both_layouts_gives_the_librarys_vectors(tmp_path, mode, layout):
    directory = write_embedder(tmp_path / "model", pooling=mode)
    modes = (mode,) if isinstance(mode, str) else mode
    if layout == "boolean":
        modes = tuple(name for name in ALL_MODES if name in modes)  # that layout has an order of its own
        flags = {flag: name in modes for name, flag in FLAGS.items()}
        (directory / "1_Pooling" / "config.json").write_text(
            json.dumps({"word_embedding_dimension": HIDDEN_SIZE, **flags})
        )
    assert read(directory).pooling == tuple(OURS.get(name, name) for name in modes)
    ours, expected = vectors_of(directory, TEXTS[:8])
    np.testing.assert_allclose(ours, expected, atol=2e-6)


@pytest.mark.parametrize("mode", ["cls", "max", "mean", "weightedmean", "lasttoken"])
def test_a_prompt_is_left_out_of_pooling_where_the_model_says_so(tmp_path, mode):
    directory = write_embedder(tmp_path / "model", pooling=mode, include_prompt=False)
    ours, expected = vectors_of(directory, ("fox", "the lazy dog", ""), prompt="hello world: ")
    np.testing.assert_allclose(ours, expected, atol=2e-6)


def test_lower_casing_of_the_files_gives_the_librarys_tokens(tmp_path):
    from sentence_transformers import SentenceTransformer

    directory = write_embedder(tmp_path / "model")
    text = (directory / "tokenizer.json").read_text()
    (directory / "tokenizer.json").write_text(text.replace('"lowercase": true', '"lowercase": false'))
    edit_json(directory / "sentence_bert_config.json", do_lower_case=True, max_seq_length=20)
    spec = read(directory)
    assert (spec.lower_case, spec.max_length) == (True, 20)
    tokenizer = TaskTokenizer(load_tokenizer(directory), max_length=20, vocab_size=300, spec=spec)
    reference = SentenceTransformer(str(directory), device="cpu")
    texts = [*TEXTS, "The [MASK] FOX [mask]"]
    for item, text in zip(tokenizer.encode(texts, truncate="right"), texts):
        assert item.token_ids.tolist() == reference.preprocess([text])["input_ids"][0].tolist()


@pytest.mark.parametrize("saved", [{"pooling_strategy": "max"}, {"pooling_strategy": "sum"}], ids=str)
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_sparse_weights_are_the_librarys(tmp_path, saved, activation, monkeypatch):
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    import openengine.core.pooler as pooler_module

    base = write_bert(tmp_path / "base", architecture="BertForMaskedLM")
    pooling = SpladePooling(**saved, activation_function=activation)
    modules = [Transformer(str(base), transformer_task="fill-mask"), pooling]
    reference = SparseEncoder(modules=modules, device="cpu")
    reference.save(str(tmp_path / "model"), create_model_card=False)
    spec = read(tmp_path / "model")
    assert (spec.dimension, spec.sparse.is_sum) == (300, saved["pooling_strategy"] == "sum")

    tokenizer = TaskTokenizer(load_tokenizer(base), max_length=64, vocab_size=300)
    items = tokenizer.encode(TEXTS)
    with torch.inference_mode():
        rows = [reference[0].model(torch.tensor(item.token_ids[None], dtype=torch.long)).logits[0] for item in items]

    class Head:  # the hidden rows are the logits themselves
        num_labels = 300

        def __call__(self, x):
            return x.clone()

    monkeypatch.setattr(pooler_module, "_CHUNK_BYTES", 7 * 4 * 300)  # seven rows at a time
    pooler = Pooler(SimpleNamespace(device=torch.device("cpu"), task_head=Head()), spec)
    raw = pooler.pool(TaskWork(TaskKind.EMBED_SPARSE), torch.cat(rows), [len(part) for part in rows])
    outputs = embed_outputs(raw, [""] * len(raw), kind=TaskKind.EMBED_SPARSE, normalize=False, vocab_size=300)
    expected = reference.encode(list(TEXTS), convert_to_sparse_tensor=False).numpy()
    for output, row in zip(outputs, expected, strict=True):
        assert (np.diff(output.embedding.indices.astype(np.int64)) > 0).all()
        assert (output.embedding.values > 0).all()
        np.testing.assert_allclose(output.numpy(), row, atol=1e-5)


def test_a_saved_cross_encoder_is_read(tmp_path):
    from sentence_transformers import CrossEncoder

    base = write_bert(tmp_path / "base", architecture="BertForSequenceClassification", num_labels=1)
    model = CrossEncoder(str(base), device="cpu", activation_fn=torch.nn.Identity())
    model.save(str(tmp_path / "model"), create_model_card=False)
    spec = read(tmp_path / "model")
    assert isinstance(spec, ScoreSpec)
    assert (spec.label_ids, spec.activation, spec.uses_chat_template, spec.max_length) == ((), "identity", False, 64)


def test_a_cross_encoder_without_modules_keeps_its_activation_in_config_json():
    identity = "torch.nn.modules.linear.Identity"
    assert plain_score_spec({"sentence_transformers": {"activation_fn": identity}}).activation == "identity"
    assert plain_score_spec({"sbert_ce_default_activation_function": identity}).activation == "identity"
    assert plain_score_spec({}).activation is None
    for path in ("", "torch.nn.zzz.Sigmoid", False):
        with pytest.raises(UnsupportedFeature, match="of scores is not implemented"):
            plain_score_spec({"sentence_transformers": {"activation_fn": path}})
    with pytest.raises(UnsupportedFeature, match="Softmax"):
        plain_score_spec({"sentence_transformers": {"activation_fn": "torch.nn.Softmax"}})


def test_a_reranker_of_label_tokens_is_read(files):
    write_modules(files, "Transformer", "LogitScore")
    edit_json(files / "1_LogitScore" / "config.json", true_token_id=9693, false_token_id=2152)
    edit_json(
        files / "sentence_bert_config.json",
        transformer_task="text-generation",
        modality_config={"text": {}, "message": {"method": "forward", "format": "flat"}},
        module_output_name="causal_logits",
        processing_kwargs={"chat_template": {"add_generation_prompt": True}, "text": {"max_length": 99}},
    )
    edit_json(files / "config_sentence_transformers.json", prompts={"web": "Find it"}, default_prompt_name="web")
    spec = read(files)
    assert (spec.label_ids, spec.uses_chat_template, spec.is_structured) == ((9693, 2152), True, False)
    assert (spec.template_options, spec.max_length) == ({"add_generation_prompt": True}, 99)
    assert spec.prompts[spec.default_prompt] == "Find it"


def test_a_directory_without_modules_is_no_such_directory(tmp_path):
    assert read(tmp_path) is None


def test_a_plain_encoder_is_pooled_by_mean_and_a_decoder_by_its_last_token():
    encoder = plain_embedding_spec(hidden_size=8, vocab_size=9, is_decoder=False)
    decoder = plain_embedding_spec(hidden_size=8, vocab_size=9, is_decoder=True)
    sparse = plain_embedding_spec(hidden_size=8, vocab_size=9, is_decoder=False, is_sparse=True)
    assert (encoder.pooling, encoder.dimension, encoder.normalize) == (("mean",), 8, False)
    assert (decoder.pooling, sparse.pooling, sparse.dimension) == (("last",), (), 9)


@pytest.mark.real
def test_minilm_is_read(minilm):
    spec = read_sentence_transformers(minilm, hidden_size=384, vocab_size=30522)
    assert (spec.pooling, spec.normalize, spec.max_length, spec.dimension) == (("mean",), True, 256, 384)


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pooling_mode": "attention"}, "'attention' is not known; known are cls"),
        ({"pooling_mode": ["mean", "median"]}, "'median'"),
        ({"pooling_mode": []}, "expected a name"),
        ({"pooling_mode": None}, "no pooling mode is on"),
        ({"pooling_mode": None, "pooling_mode_cls_token": "yes"}, "expected true or false"),
        ({"pooling_mode_cls_token": True}, "flags beside it say cls"),
        ({"pooling_mode_median": True}, "pooling_mode_median True is not implemented"),
        ({"embedding_dimension": 7}, "is 7, and the model's is 32"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_e1_an_unknown_mode_or_setting_of_pooling_is_a_load_error(files, changes, message):
    edit_json(files / "1_Pooling" / "config.json", **changes)
    with pytest.raises(OpenEngineError, match=message) as raised:
        read(files)
    assert "1_Pooling" in raised.value.message


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (("Transformer", "Pooling", "LSTM"), "LSTM, which is not implemented; implemented are Dense"),
        (("Transformer", "Pooling", "Transformer"), "exactly the first one"),
        (("Pooling",), "exactly the first one"),
        (("Transformer", "Normalize"), "chain Transformer - Normalize"),
        (("Transformer",), "needs a Pooling module"),
        (("Transformer", "SpladePooling"), "SpladePooling after a transformer for feature-extraction"),
    ],
    ids=str,
)
def test_an_unknown_module_or_chain_is_refused_by_name(files, kinds, message):
    write_modules(files, *kinds)
    with pytest.raises(UnsupportedFeature, match=message):
        read(files)


def test_a_module_of_another_package_is_refused(files):
    write_modules(files, "Transformer", "Pooling", package="custom_st.")
    with pytest.raises(UnsupportedFeature, match=r"custom_st\.Transformer"):
        read(files)


def test_dropout_changes_nothing(files):
    write_modules(files, "Transformer", "Pooling", "Dropout")
    assert read(files).pooling == ("mean",)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("sentence_bert_config.json", {"query_expansion": {"length": 32}}, "query_expansion"),
        ("sentence_bert_config.json", {"max_seq_length": "long"}, "max_seq_length is 'long'"),
        ("sentence_bert_config.json", {"shiny": 1}, "shiny 1 is not implemented"),
        ("sentence_bert_config.json", {"config_args": {"is_decoder": True}}, "config_args.is_decoder"),
        ("sentence_bert_config.json", {"transformer_task": "any-to-any"}, "any-to-any"),
        ("sentence_bert_config.json", {"modality_config": {"message": {}}}, "chat template"),
        ("sentence_bert_config.json", {"modality_config": {"message": {"format": "auto"}}}, "message.format is 'auto'"),
        ("sentence_bert_config.json", {"modality_config": {"image": {"method": "forward"}}}, "modality_config.image"),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": {"method": "get_text_features"}}},
            "get_text_features",
        ),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}}},
            "method_output_name is 'pooler_output'",
        ),
        ("sentence_bert_config.json", {"module_output_name": "sentence_embedding"}, "module_output_name"),
        ("sentence_bert_config.json", {"unpad_inputs": 3}, "unpad_inputs"),
        ("config_sentence_transformers.json", {"zzz": 1}, "zzz 1 is not implemented"),
        ("config_sentence_transformers.json", {"max_active_dims": 3}, "max_active_dims"),
        ("config_sentence_transformers.json", {"model_type": "X"}, "model_type is 'X'"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "model_type"),
        ("config_sentence_transformers.json", {"prompts": {"query": "\ud800"}}, "lone surrogate"),
        ("tokenizer_config.json", {"model_max_length": "64"}, "model_max_length is '64'"),
        ("tokenizer_config.json", {"model_max_length": -1}, "model_max_length is -1"),
        ("tokenizer_config.json", {"model_max_length": 0}, "model_max_length is 0"),
        ("tokenizer_config.json", {"model_max_length": True}, "model_max_length is True"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "maxsim"}, "maxsim"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "default_prompt_name is 'query'"),
        ("config_sentence_transformers.json", {"prompts": {"query": 3}}, "prompt 'query' is 3"),
        ("config_sentence_transformers.json", {"truncate_dim": 64}, "truncate_dim is 64"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_setting_that_is_not_implemented_is_refused_by_file_and_name(files, name, changes, message):
    edit_json(files / name, **changes)
    with pytest.raises(OpenEngineError, match=message):
        read(files)


def test_a_limit_beyond_any_model_stands_for_none(files):
    edit_json(files / "tokenizer_config.json", model_max_length=1e30)
    edit_json(files / "sentence_bert_config.json", max_seq_length=10**30)
    assert read(files).max_length is None


def test_what_a_setting_says_of_the_usual_output_is_accepted(files):
    text = {"method": "forward", "method_output_name": "last_hidden_state"}
    edit_json(
        files / "sentence_bert_config.json", modality_config={"text": text}, module_output_name="token_embeddings"
    )
    edit_json(
        files / "config_sentence_transformers.json", model_type="SentenceTransformer", requirements={"torch": ">2"}
    )
    assert read(files).pooling == ("mean",)


@pytest.mark.parametrize(
    "name",
    ["modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "tokenizer_config.json"],
)
@pytest.mark.parametrize("target", ["nowhere", "itself"])
def test_a_link_that_leads_nowhere_is_an_error_and_no_absent_file(files, name, target):
    (files / name).unlink(missing_ok=True)
    (files / name).symlink_to(name if target == "itself" else "nowhere")
    with pytest.raises(InvalidArgument, match=name.replace(".", r"\.")):
        read(files)


def test_a_module_whose_folder_is_a_link_to_nowhere_is_an_error(files):
    write_modules(files, "Transformer", "Pooling", "Normalize")
    (files / "2_Normalize").symlink_to("nowhere")
    with pytest.raises(InvalidArgument, match="'2_Normalize' of module 2 is no directory"):
        read(files)


@pytest.mark.parametrize("path", ["x" * 5000, "a\u0000b"], ids=["long", "nul"])
def test_a_path_that_no_file_can_have_is_an_error(files, path):
    entries = json.loads((files / "modules.json").read_text())
    entries[1]["path"] = path
    (files / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(InvalidArgument, match=r"modules\.json"):
        read(files)


def test_an_unknown_key_of_a_module_is_refused(files):
    entries = json.loads((files / "modules.json").read_text())
    entries[1]["kwargs"] = ["task"]
    (files / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(UnsupportedFeature, match="entry 1: kwargs"):
        read(files)


@pytest.mark.parametrize("package", ["os.system.", "models.Dense.", "", "models.sub."])
def test_a_module_of_another_place_in_the_library_is_refused(files, package):
    write_modules(files, "Transformer", "Pooling", package="sentence_transformers." + package)
    with pytest.raises(UnsupportedFeature, match="module 0 is a sentence_transformers"):
        read(files)


def test_modules_are_found_wherever_the_library_has_kept_them(files):
    entries = json.loads((files / "modules.json").read_text())
    for kind in ("models.Pooling.Pooling", "sentence_transformer.modules.pooling.Pooling", "models.Pooling"):
        entries[1]["type"] = f"sentence_transformers.{kind}"
        (files / "modules.json").write_text(json.dumps(entries))
        assert read(files).pooling == ("mean",)


def test_settings_that_change_nothing_are_accepted(files):
    edit_json(
        files / "sentence_bert_config.json",
        max_seq_length=None,
        do_lower_case=False,
        model_args={"torch_dtype": "bfloat16", "attn_implementation": "sdpa"},
        tokenizer_args={"model_max_length": 77},
    )
    assert read(files).max_length == 77


def dense_files(files: Path, **changes) -> None:
    from safetensors.torch import save_file

    write_modules(files, "Transformer", "Pooling", "Dense")
    settings = {"in_features": HIDDEN_SIZE, "out_features": 4, "bias": True, **changes}
    edit_json(files / "2_Dense" / "config.json", **settings)
    save_file(
        {"linear.weight": torch.ones(4, HIDDEN_SIZE), "linear.bias": torch.ones(4)},
        files / "2_Dense" / "model.safetensors",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "custom.Swoosh"}, r"custom\.Swoosh is not implemented"),
        ({"activation_function": "torch.nn.zzz.GELU"}, "zzz"),
        ({"activation_function": ""}, "is not implemented"),
        ({"activation_function": False}, "expected a text"),
        ({"use_residual": True}, "use_residual True"),
        ({"module_input_name": "token_embeddings"}, "token_embeddings"),
        ({"in_features": 31}, "in_features 31"),
        ({"bias": False}, "linear.bias"),
        ({"out_features": 5}, "expected"),
    ],
    ids=str,
)
def test_a_dense_layer_that_is_not_as_expected_is_refused(files, changes, message):
    dense_files(files, **changes)
    with pytest.raises(OpenEngineError, match=message):
        read(files)


def test_dense_weights_as_a_pickle_are_refused_with_the_way_out(files):
    dense_files(files)
    (files / "2_Dense" / "model.safetensors").rename(files / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(UnsupportedFeature, match="save it again"):
        read(files)


@pytest.mark.parametrize("content", ["", "[]", "{}", '[{"type": 3}]', '[{"type": "x", "path": "../up"}]'])
def test_a_damaged_modules_file_is_an_error_that_names_it(files, content):
    (files / "modules.json").write_text(content)
    with pytest.raises(OpenEngineError, match=r"modules\.json"):
        read(files)


def test_a_path_out_of_the_directory_is_refused(files):
    entries = json.loads((files / "modules.json").read_text())
    entries[1]["path"] = "../1_Pooling"
    (files / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(InvalidArgument, match="out of the directory"):
        read(files)
