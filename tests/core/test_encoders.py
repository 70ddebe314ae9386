"""Every encoder family and head, and decoders with other heads, against transformers in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from openengine.core.loader import load_model, open_checkpoint
from openengine.core.models import ARCHITECTURES, EncoderConfig, ModelConfig, read_config
from openengine.core.models.encoder import EncoderModel
from openengine.errors import InvalidArgument, UnsupportedFeature
from openengine.ops.attention import select_backend
from openengine.ops.batch import EncoderBatch, ForwardBatch
from openengine.ops.encoder_attention import select_encoder_attention
from openengine.ops.kv_cache import KvSpec
from tests.checkpoints import ENCODERS, PAD, VOCAB_SIZE, edit_config, edit_tensors, write_model

pytest.importorskip("transformers")

ATOL = 1e-4
CPU = torch.device("cpu")
HEADS = {
    "Model": "none",
    "ForSequenceClassification": "sequence_classification",
    "ForTokenClassification": "token_classification",
    "ForMaskedLM": "masked_lm",
}


def load(path: Path, dtype: torch.dtype = torch.float32, kernels: str = "auto", **options) -> EncoderModel:
    attention = select_encoder_attention(CPU, dtype, kernels)
    options = {"dtype": dtype, "device": CPU, "backend": attention, "kernels": kernels, **options}
    return load_model(open_checkpoint(path), **options)


def texts(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    """Token ids of texts of those lengths, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def batch_of(items: list[torch.Tensor], types: list[torch.Tensor] | None = None) -> EncoderBatch:
    lens = [len(item) for item in items]
    return EncoderBatch(
        input_ids=torch.cat(items),
        positions=torch.cat([torch.arange(n) for n in lens]),
        token_types=None if types is None else torch.cat(types),
        cu_seqlens=torch.tensor([0, *lens]).cumsum(0).to(torch.int32),
        lens=lens,
    )


@torch.inference_mode()
def hidden(
    model: EncoderModel, items: list[torch.Tensor], types: list[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """The hidden states of each item, run together."""
    batch = batch_of(items, types)
    model._backend.prepare(batch, model.windows)
    return list(model.forward(batch).split(batch.lens))


@torch.inference_mode()
def answers(model: EncoderModel, states: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the model's head makes of each item's hidden states: the states themselves without a head."""
    head = model.task_head
    if head is None:
        return states
    pooled = {None: lambda x: x, "cls": lambda x: x[:1], "mean": lambda x: x.mean(0, keepdim=True)}[head.pooling]
    return [head(pooled(x)) for x in states]


@torch.inference_mode()
def expected(reference, items: list[torch.Tensor], types: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    results = []
    for index, item in enumerate(items):
        more = {} if types is None else {"token_type_ids": types[index][None]}
        output = reference(item[None], attention_mask=torch.ones_like(item)[None], **more)
        results.append(output.logits.view(-1, output.logits.shape[-1]) if "logits" in output else output[0][0])
    return results


def check(actual: list[torch.Tensor], wanted: list[torch.Tensor], atol: float = ATOL) -> None:
    for mine, theirs in zip(actual, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=atol, rtol=0)


# ------------------------------------------------------------------------------------------- equality of each family


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", ENCODERS)
def test_emb_cls_every_family_and_head_gives_the_reference_alone_batched_and_in_any_order(
    family, head, kernels, tmp_path
):
    reference = write_model(tmp_path, family, head)
    model, items = load(tmp_path, kernels=kernels), texts(7, 1, 40, 7, 23, 2)
    assert model.head_kind == HEADS[head]
    wanted = expected(reference, items)
    check([answers(model, hidden(model, [item]))[0] for item in items], wanted)
    check(answers(model, hidden(model, items)), wanted)
    order = [4, 2, 0, 5, 3, 1]
    check(answers(model, hidden(model, [items[i] for i in order])), [wanted[i] for i in order])


@pytest.mark.parametrize("family", ENCODERS)
def test_an_item_of_the_greatest_length_gives_the_reference_and_one_more_has_no_position(family, tmp_path):
    reference = write_model(tmp_path, family, "Model")
    model = load(tmp_path)
    longest = model.config.max_position_embeddings
    assert longest == 130 - model.config.first_position
    check(hidden(model, texts(longest)), expected(reference, texts(longest)))
    if model.config.num_positions:
        with pytest.raises(InvalidArgument, match=f"{longest + 1}.*{longest}"):
            load(tmp_path, max_model_len=longest + 1)


@pytest.mark.parametrize("family", ENCODERS)
def test_only_the_rows_asked_for_come_back_and_they_are_unchanged(family, tmp_path):
    write_model(tmp_path, family, "Model")
    model, items = load(tmp_path), texts(7, 1, 20)
    whole, batch = torch.cat(hidden(model, items)), batch_of(items)
    with torch.inference_mode():
        model._backend.prepare(batch, model.windows)
        some = model.forward(batch, rows=torch.tensor([0, 7, 8, 27]))
    torch.testing.assert_close(some, whole[[0, 7, 8, 27]], atol=ATOL, rtol=0)


@pytest.mark.parametrize("max_model_len", [None, 200])
def test_mpnet_biases_reach_beyond_the_farthest_bucket(max_model_len, tmp_path):
    reference = write_model(tmp_path, "mpnet", "Model", max_position_embeddings=300)
    items = texts(200, 3, 150)
    check(hidden(load(tmp_path, max_model_len=max_model_len), items), expected(reference, items))


@pytest.mark.parametrize("head", ["ForSequenceClassification", "Model"])
def test_scr_token_types_of_a_pair_count(head, tmp_path):
    reference = write_model(tmp_path, "bert", head)
    model, items = load(tmp_path), texts(9, 14, 5)
    types = [torch.cat((torch.zeros(n // 2), torch.ones(n - n // 2))).long() for n in (9, 14, 5)]
    check(answers(model, hidden(model, items, types)), expected(reference, items, types))
    assert not torch.equal(hidden(model, items)[0], hidden(model, items, types)[0])


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta"])
def test_padding_tokens_within_a_text_take_no_position(family, tmp_path):
    reference = write_model(tmp_path, family, "Model")
    items = texts(12, 9, 6)
    items[1][[0, 3, 4, 8]] = PAD
    check(hidden(load(tmp_path), items), expected(reference, items))


_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 9000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
}


@pytest.mark.parametrize(
    ("family", "head", "overrides"),
    [
        ("bert", "ForMaskedLM", {"hidden_act": "gelu_new", "type_vocab_size": 1, "tie_word_embeddings": False}),
        ("bert", "ForSequenceClassification", {"hidden_act": "relu", "num_labels": 1, "layer_norm_eps": 1e-3}),
        ("bert", "ForTokenClassification", {"num_labels": 9, "type_vocab_size": 4}),
        ("roberta", "ForMaskedLM", {"hidden_act": "relu", "type_vocab_size": 2}),
        ("roberta", "Model", {"pad_token_id": 7}),
        ("mpnet", "ForSequenceClassification", {"num_labels": 3, "pad_token_id": 9}),
        ("distilbert", "ForMaskedLM", {"activation": "relu", "sinusoidal_pos_embds": True}),
        ("modernbert", "ForSequenceClassification", {"classifier_pooling": "mean", "num_labels": 1}),
        ("modernbert", "ForTokenClassification", {"classifier_activation": "silu", "classifier_bias": True}),
        ("modernbert", "ForMaskedLM", {"decoder_bias": False, "norm_bias": True, "tie_word_embeddings": False}),
        ("modernbert", "Model", {"attention_bias": True, "mlp_bias": True, "hidden_activation": "silu"}),
        ("modernbert", "Model", {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "local_attention": 5}),
        ("modernbert", "Model", {"rope_parameters": _ROPES}),
    ],
)
def test_variants_give_the_reference(family, head, overrides, tmp_path):
    reference = write_model(tmp_path, family, head, **overrides)
    model, items = load(tmp_path), texts(40, 3, 17)
    check(answers(model, hidden(model, items)), expected(reference, items))


@pytest.mark.parametrize("family", ENCODERS)
def test_bfloat16_errs_at_most_twice_as_much_as_the_reference_does(family, tmp_path):
    reference, items = write_model(tmp_path, family, "ForMaskedLM", dtype=torch.bfloat16), texts(40, 11)
    model = load(tmp_path, torch.bfloat16)
    exact = torch.cat(expected(reference, items))
    actual = torch.cat(answers(model, hidden(model, items)))
    rounded = torch.cat(expected(reference.to(torch.bfloat16), items)).float()
    assert actual.dtype == torch.float32
    assert (actual - exact).norm() <= 2 * (rounded - exact).norm()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("family", ENCODERS)
def test_int8_points_the_same_way(family, kernels, tmp_path):
    reference, items = write_model(tmp_path, family, "Model"), texts(40, 11)
    model = load(tmp_path, torch.bfloat16, kernels, quantization="int8")
    assert any(linear.weights.item_bytes == 1 for linear in model.linears() if hasattr(linear.weights, "item_bytes"))
    for mine, theirs in zip(hidden(model, items), expected(reference, items), strict=True):
        assert torch.cosine_similarity(mine.float(), theirs).min() > 0.99


def test_a_classifier_is_not_quantized(tmp_path):
    write_model(tmp_path, "bert", "ForSequenceClassification")
    model, exact = load(tmp_path, quantization="int8"), load(tmp_path)
    head, x = model.task_head, torch.randn(3, 64)
    assert torch.equal(head(x), exact.task_head(x))


def test_emb_the_token_embeddings_of_a_real_model_are_the_reference(minilm):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModel.from_pretrained(minilm, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    items = [torch.randint(999, 30000, (n,), generator=generator) for n in (512, 1, 30, 7, 128)]
    model = load(minilm)
    check(hidden(model, items), expected(reference.eval(), items))
    quantized = load(minilm, torch.bfloat16, quantization="int8")
    for mine, exact in zip(hidden(quantized, items), hidden(model, items), strict=True):
        assert torch.cosine_similarity(mine.float().mean(0), exact.mean(0), dim=0) > 0.99


# --------------------------------------------------------------------------------------------------- decoders' heads

_DECODERS = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "ministral"]
_CLASSIFIERS = [(family, "ForSequenceClassification") for family in _DECODERS]
_CLASSIFIERS += [(family, "ForTokenClassification") for family in _DECODERS if family != "gemma3"]


@torch.inference_mode()
def decode(path: Path, tokens: torch.Tensor, **options) -> tuple[object, torch.Tensor]:
    """A decoder and its hidden states for one text."""
    backend = select_backend(CPU, torch.float32, "torch")
    model = load_model(open_checkpoint(path), dtype=torch.float32, device=CPU, backend=backend, **options)
    config, num = model.config, len(tokens)
    spec = KvSpec(config.num_layers, config.num_kv_heads, config.head_dim, torch.float32, CPU)
    batch = ForwardBatch(
        input_ids=tokens,
        positions=torch.arange(num),
        slot_mapping=torch.arange(num),
        cu_seqlens_q=torch.tensor([0, num], dtype=torch.int32),
        seq_lens=torch.tensor([num], dtype=torch.int32),
        block_tables=torch.arange(num).view(1, num).to(torch.int32),
        query_lens=[num],
        context_lens=[num],
        num_decodes=0,
        logits_rows=torch.arange(num),
        kv=backend.allocate(spec, num, 4),
    )
    backend.prepare(batch, windows=model.windows)
    return model, model.forward(batch)


@pytest.mark.parametrize(("family", "head"), _CLASSIFIERS)
def test_a_decoder_with_a_classifier_gives_the_reference_logits(family, head, tmp_path):
    reference = write_model(tmp_path, family, head, num_labels=3)
    (tokens,) = texts(21)
    model, states = decode(tmp_path, tokens)
    per_text = head == "ForSequenceClassification"
    assert (model.head_kind, model.task_head.pooling) == (HEADS[head], "last" if per_text else None)
    check([model.task_head(states[-1:] if per_text else states)], expected(reference, [tokens]))


@pytest.mark.parametrize("family", _DECODERS)
def test_a_bare_decoder_gives_the_reference_hidden_states_and_needs_no_head(family, tmp_path):
    reference = write_model(tmp_path, family, "Model")
    (tokens,) = texts(21)
    model, states = decode(tmp_path, tokens)
    assert (model.head_kind, model.head, model.task_head) == ("none", None, None)
    check([states], expected(reference, [tokens]))


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_a_causal_model_taken_as_an_embedder_leaves_its_head_out(family, tmp_path):
    reference = write_model(tmp_path, family, tie_word_embeddings=False)
    (tokens,) = texts(21)
    model, states = decode(tmp_path, tokens, as_embedder=True)
    assert (model.head_kind, model.head) == ("none", None)
    check([states], [reference.base_model(tokens[None])[0][0]])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_with_any_head_can_be_taken_as_an_embedder(family, head, tmp_path):
    reference, items = write_model(tmp_path, family, head), texts(9, 4)
    model = load(tmp_path, as_embedder=True)
    assert (model.head_kind, model.task_head, model.head) == ("none", None, None)
    check(hidden(model, items), expected(reference.base_model, items))


def test_a_config_that_names_a_head_which_is_not_stored_serves_as_an_embedder_only(tmp_path):
    reference, items = write_model(tmp_path, "mpnet", "Model"), texts(9, 4)
    edit_config(tmp_path, architectures=["MPNetForMaskedLM"])
    check(hidden(load(tmp_path, as_embedder=True), items), expected(reference, items))
    with pytest.raises(InvalidArgument, match=r"missing.*lm_head.dense.weight"):
        load(tmp_path)


# ------------------------------------------------------------------------------------------- what a checkpoint holds


def test_checkpoints_with_the_names_of_old_load(tmp_path):
    reference, items = write_model(tmp_path, "bert", "ForMaskedLM"), texts(9, 4)

    def age(tensors):
        old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): value for name, value in tensors.items()}
        old = {name.replace("LayerNorm.bias", "LayerNorm.beta"): value for name, value in old.items()}
        old["bert.embeddings.position_ids"] = torch.arange(130)[None]
        old["bert.pooler.dense.weight"], old["bert.pooler.dense.bias"] = torch.ones(64, 64), torch.ones(64)
        old["cls.seq_relationship.weight"], old["cls.seq_relationship.bias"] = torch.ones(2, 64), torch.ones(2)
        old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"]
        old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"]
        return old

    edit_tensors(tmp_path, age)
    model = load(tmp_path)
    check(answers(model, hidden(model, items)), expected(reference, items))


@pytest.mark.parametrize("prefixed", [False, True])
@pytest.mark.parametrize(
    ("family", "prefix"),
    [
        ("bert", "bert."),
        ("roberta", "roberta."),
        ("xlm-roberta", "roberta."),
        ("mpnet", "mpnet."),
        ("distilbert", "distilbert."),
        ("modernbert", "model."),
    ],
)
def test_bare_models_load_with_and_without_the_prefix_of_their_family(family, prefix, prefixed, tmp_path):
    reference, items = write_model(tmp_path, family, "Model"), texts(9)
    edit_tensors(tmp_path, lambda tensors: {f"{prefix if prefixed else ''}{name}": x for name, x in tensors.items()})
    check(hidden(load(tmp_path), items), expected(reference, items))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("family", "head"), [("bert", "cls.predictions"), ("roberta", "lm_head"), ("mpnet", "lm_head")]
)
def test_of_two_stored_biases_of_the_vocabulary_the_one_that_is_tied_or_the_heads_own_counts(
    family, head, tied, tmp_path
):
    reference, items = write_model(tmp_path, family, "ForMaskedLM", tie_word_embeddings=tied), texts(9)
    other = f"{head}.decoder.bias" if tied else f"{head}.bias"
    edit_tensors(tmp_path, lambda tensors: {**tensors, other: torch.ones(VOCAB_SIZE)})
    model = load(tmp_path)
    check(answers(model, hidden(model, items)), expected(reference, items))


@pytest.mark.parametrize("family", ENCODERS)
def test_a_tensor_too_many_or_too_few_is_named(family, tmp_path):
    write_model(tmp_path, family, "ForTokenClassification")
    edit_tensors(tmp_path, lambda tensors: {**tensors, "adapter.weight": torch.ones(2)})
    with pytest.raises(InvalidArgument, match=r"unexpected \(1\): adapter.weight"):
        load(tmp_path)
    edit_tensors(tmp_path, lambda x: {name: x[name] for name in x if name not in ("adapter.weight", "classifier.bias")})
    with pytest.raises(InvalidArgument, match=r"missing \(1\): classifier.bias"):
        load(tmp_path)


def test_a_classifier_of_another_size_than_its_labels_is_refused(tmp_path):
    write_model(tmp_path, "bert", "ForSequenceClassification")
    edit_config(tmp_path, id2label={"0": "no", "1": "maybe", "2": "yes"})
    with pytest.raises(InvalidArgument, match=r"classifier.weight \[2, 64\], expected \[3, 64\]"):
        load(tmp_path)


# --------------------------------------------------------------------------------------------------------- configs

BERT = {"architectures": ["BertModel"], "model_type": "bert", "num_hidden_layers": 3}
MODERN = {"architectures": ["ModernBertModel"], "model_type": "modernbert", "num_hidden_layers": 4}


def test_cap_the_head_comes_from_the_architecture_and_labels_from_the_config():
    kinds = {name: read_config({"architectures": [name], **_sizes(name)}).head_kind for name in ARCHITECTURES}
    assert kinds == {name: architecture.head_kind for name, architecture in ARCHITECTURES.items()}
    assert kinds["BertForMaskedLM"] == "masked_lm" and kinds["Qwen3Model"] == "none"
    classifier = {**BERT, "architectures": ["BertForSequenceClassification"]}
    counts = [
        read_config({**classifier, **more}).num_labels for more in ({}, {"num_labels": 5}, {"id2label": {0: "x"}})
    ]
    assert (counts, read_config(BERT).num_labels) == ([2, 5, 1], 0)


def _sizes(name: str) -> dict:
    if ARCHITECTURES[name].is_encoder:
        return {}
    sizes = {"vocab_size": 9, "hidden_size": 64, "intermediate_size": 9, "num_hidden_layers": 1}
    return {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2}


def test_a_config_without_architectures_is_that_of_the_bare_encoder_or_the_causal_decoder():
    assert isinstance(read_config({"model_type": "xlm-roberta"}), EncoderConfig)
    assert read_config({"model_type": "xlm-roberta"}).architecture == "XLMRobertaModel"
    decoder = read_config({"model_type": "qwen2", **_sizes("Qwen2Model")})
    assert isinstance(decoder, ModelConfig) and decoder.architecture == "Qwen2ForCausalLM"


def test_defaults_are_those_of_transformers():
    bert = read_config(BERT)
    assert (bert.vocab_size, bert.hidden_size, bert.head_dim, bert.norm_eps) == (30522, 768, 64, 1e-12)
    assert (bert.max_position_embeddings, bert.num_token_types, bert.activation) == (512, 2, "gelu")
    roberta = read_config({"architectures": ["RobertaModel"], "max_position_embeddings": 514})
    assert (roberta.max_position_embeddings, roberta.num_positions, roberta.first_position) == (512, 514, 2)
    modern = read_config(MODERN)
    assert modern.windows == (None, 64, 64, None) and modern.layer_ropes == (0, 1, 1, 0)
    assert [rope.theta for rope in modern.ropes] == [160000.0, 10000.0]
    assert (modern.max_position_embeddings, modern.num_positions, modern.norm_bias) == (8192, 0, False)


def test_modernbert_reads_the_older_keys_of_its_layers_and_ropes():
    config = read_config(
        {**MODERN, "global_attn_every_n_layers": 2, "global_rope_theta": 8e4, "local_rope_theta": 5e3, "norm_eps": 1e-6}
    )
    assert config.windows == (None, 64, None, 64) and config.norm_eps == 1e-6
    assert [rope.theta for rope in config.ropes] == [8e4, 5e3]


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (BERT, {"position_embedding_type": "relative_key"}, ["position_embedding_type", "relative_key", "bert"]),
        (BERT, {"position_embedding_type": "alibi"}, ["alibi"]),
        (BERT, {"is_decoder": True}, ["is_decoder"]),
        (BERT, {"hidden_act": "quick_gelu"}, ["quick_gelu", "gelu"]),
        (BERT, {"quantization_config": {"quant_method": "bitsandbytes"}}, ["quantization_config", "bitsandbytes"]),
        (BERT, {"rope_theta": 1e4}, ["rope_theta"]),
        (BERT, {"relative_attention_num_buckets": 32}, ["relative_attention_num_buckets"]),
        (BERT, {"architectures": ["BertForNextSentencePrediction"]}, ["BertForNextSentencePrediction", "ForMaskedLM"]),
        (BERT, {"architectures": ["NomicBertModel"]}, ["NomicBertModel", "ModernBert", "LlamaForCausalLM"]),
        ({"model_type": "mpnet"}, {"relative_attention_num_buckets": 64}, ["relative_attention_num_buckets", "64"]),
        ({"model_type": "distilbert"}, {"layer_norm_eps": 1e-5}, ["layer_norm_eps"]),
        (MODERN, {"classifier_pooling": "max"}, ["classifier_pooling", "max"]),
        (MODERN, {"layer_types": ["chunked_attention"] * 4}, ["chunked_attention"]),
        (MODERN, {"rope_scaling": {"rope_type": "spiral"}}, ["spiral"]),
        ({"model_type": "qwen2", **_sizes("Qwen2Model")}, {"is_causal": False}, ["is_causal"]),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(config, changes, named):
    with pytest.raises(UnsupportedFeature) as caught:
        read_config({**config, **changes})
    assert all(name in caught.value.message for name in named), caught.value.message


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (BERT, {"hidden_size": "64"}, "hidden_size"),
        (BERT, {"num_attention_heads": 7}, "num_attention_heads"),
        (BERT, {"layer_norm_eps": 0}, "layer_norm_eps|norm_eps"),
        (BERT, {"layer_norm_eps": 1e300}, "norm_eps"),
        (BERT, {"layer_norm_eps": 1e-300}, "norm_eps"),
        (BERT, {"layer_norm_eps": 10**400}, "norm_eps"),
        (BERT, {"layer_norm_eps": 2.0}, "a number below 1"),
        (MODERN, {"global_rope_theta": 1e300}, "global_rope_theta"),
        (BERT, {"architectures": ["BertModel"], "model_type": "t5"}, "'model_type' is 't5', and BertModel is a bert"),
        (BERT, {"architectures": ""}, "architectures"),
        (BERT, {"type_vocab_size": None, "vocab_size": -1}, "vocab_size"),
        (BERT, {"architectures": ["BertForTokenClassification"], "id2label": {}}, "id2label"),
        (BERT, {"architectures": "BertModel"}, "architectures"),
        ({"model_type": "roberta"}, {"pad_token_id": "1"}, "pad_token_id"),
        ({"model_type": "roberta"}, {"max_position_embeddings": 2}, "pad_token_id"),
        (MODERN, {"layer_types": ["full_attention"]}, "layer_types"),
        (MODERN, {"rope_parameters": {"everywhere": {}}}, "rope_parameters"),
        (MODERN, {"rope_parameters": {"full_attention": 3}}, "full_attention"),
        (MODERN, {"local_attention": 0}, "local_attention"),
        (MODERN, {"norm_bias": "no"}, "norm_bias"),
    ],
)
def test_a_missing_or_ill_typed_field_is_named(config, changes, named):
    with pytest.raises(InvalidArgument, match=named):
        read_config({**config, **changes})
