"""The config and the generation defaults of a model, from the metadata of its GGUF file."""

from __future__ import annotations

import math

import numpy as np
import pytest

from openengine.core.gguf import GgufFile
from openengine.core.gguf_models import SUPPORTED_ARCHITECTURES, generation_defaults, hf_config, hf_tensors
from openengine.errors import InvalidArgument, UnsupportedFeature
from tests.gguf_files import (
    CONTEXT,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    config_of,
    decoder_metadata,
    embedding,
    metadata_of,
    write_gguf,
)


@pytest.mark.parametrize(
    ("architecture", "unread"),
    [
        # What transformers leaves at its class's default, whatever the file says.
        ("llama", set()),
        ("qwen2", {"head_dim"}),
        ("qwen3", {"head_dim"}),
        ("gemma2", {"query_pre_attn_scalar"}),
        ("gemma3", {"query_pre_attn_scalar", "rope_parameters"}),
    ],
)
def test_the_config_equals_what_transformers_reads_from_the_same_file(tmp_path, architecture, unread):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    config = config_of(tmp_path, metadata_of(architecture))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="model.gguf").to_dict()
    assert config.pop("architectures") and config.pop("eos_token_id") == [theirs["eos_token_id"]]
    assert {key: value for key, value in config.items() if key not in unread} == {
        key: theirs[key] for key in config if key not in unread
    }


def test_an_unknown_architecture_is_refused_with_the_list_of_supported_ones(tmp_path):
    with pytest.raises(UnsupportedFeature) as caught:
        config_of(tmp_path, decoder_metadata("mamba"))
    assert all(name in caught.value.message for name in ("mamba", *SUPPORTED_ARCHITECTURES))


@pytest.mark.parametrize(
    "key", ["embedding_length", "block_count", "attention.layer_norm_rms_epsilon", "attention.head_count"]
)
def test_a_missing_key_is_named(tmp_path, key):
    with pytest.raises(InvalidArgument, match=f"llama.{key} is missing"):
        config_of(tmp_path, decoder_metadata("llama", **{key: None}))


@pytest.mark.parametrize("value", ["32", 0, 2.5, True])
def test_a_size_of_the_wrong_type_is_refused(tmp_path, value):
    with pytest.raises(InvalidArgument, match=r"llama\.embedding_length .* is not an integer of at least 1"):
        config_of(tmp_path, decoder_metadata("llama", embedding_length=value))


def test_a_file_without_an_embedding_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="token_embd.weight"):
        config_of(tmp_path, decoder_metadata("llama"), {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("attention.causal", False),
        ("logit_scale", 0.5),
        ("rope.dimension_count", 4),
        ("attention.value_length", 4),
        ("rope.scaling.type", "longrope"),
        ("feed_forward_length", np.array([48, 48, 64], np.int32)),
    ],
)
def test_a_variation_of_the_architecture_is_refused_by_its_key(tmp_path, key, value):
    with pytest.raises(UnsupportedFeature, match=f"llama.{key}"):
        config_of(tmp_path, decoder_metadata("llama", **{key: value}))


def test_equal_values_for_every_layer_are_one_value(tmp_path):
    metadata = decoder_metadata("llama", feed_forward_length=np.array([48, 48, 48], np.int32))
    assert config_of(tmp_path, metadata)["intermediate_size"] == 48


def test_a_llama_file_with_a_window_is_mistral(tmp_path):
    config = config_of(tmp_path, decoder_metadata("llama", **{"attention.sliding_window": 16}))
    assert (config["architectures"], config["model_type"]) == (["MistralForCausalLM"], "mistral")
    assert config["sliding_window"] == 16


def test_a_window_is_refused_where_the_model_has_none(tmp_path):
    with pytest.raises(UnsupportedFeature, match=r"qwen2\.attention\.sliding_window 16"):
        config_of(tmp_path, decoder_metadata("qwen2", **{"attention.sliding_window": 16}))


def test_the_head_size_defaults_to_its_share_of_the_hidden_size(tmp_path):
    metadata = decoder_metadata("llama", **{"attention.key_length": None, "attention.value_length": None})
    assert config_of(tmp_path, metadata)["head_dim"] == HIDDEN // HEADS


@pytest.mark.parametrize(
    ("architecture", "layers", "scalar"),
    [("gemma2", 42, 16), ("gemma2", 46, HIDDEN // HEADS), ("gemma3", 48, 16), ("gemma3", 62, HIDDEN // HEADS)],
)
def test_only_the_27b_gemmas_scale_queries_by_their_share_of_the_hidden_size(tmp_path, architecture, layers, scalar):
    sizes = {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 16}
    config = config_of(tmp_path, decoder_metadata(architecture, block_count=layers, **sizes))
    assert config["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"rope_type": "default"}),
        ({"rope.scaling.type": "none"}, {"rope_type": "default"}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 16.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT, "beta_fast": 16.0},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 1.0, "rope.scaling.attn_factor": 2.0},
            {
                "rope_type": "yarn",
                "factor": 1.0,
                "original_max_position_embeddings": CONTEXT,
                "attention_factor": 2.0,
            },
        ),
    ],
)
def test_rope_scaling_becomes_rope_parameters_of_its_kind(tmp_path, fields, expected):
    config = config_of(tmp_path, decoder_metadata("llama", **fields))
    assert config["rope_parameters"] == {"rope_theta": 50000.0} | expected


def llama3_factors(factor: float, high: float = 4.0) -> np.ndarray:
    """As the converter computes them, one frequency at a time."""
    factors = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi * 50000.0 ** (i / HEAD_DIM)
        if wavelength < 8192 / high:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (high - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_frequency_factors_become_rope_parameters(tmp_path, factor):
    tensors = embedding() | {"rope_freqs.weight": llama3_factors(factor)}
    path = write_gguf(tmp_path, decoder_metadata("llama"), tensors)
    with GgufFile(path) as file:
        assert hf_config(file.metadata, file.tensors)["rope_parameters"] == {
            "rope_type": "llama3",
            "rope_theta": 50000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        assert [tensor.name for tensor in hf_tensors(file)] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("factors", [np.array([1.0, 2.0, 3.0, 8.0]), np.ones(7)])
def test_other_frequency_factors_are_refused(tmp_path, factors):
    with pytest.raises(UnsupportedFeature, match=r"rope_freqs\.weight"):
        config_of(tmp_path, decoder_metadata("llama"), embedding() | {"rope_freqs.weight": factors})


def test_generation_defaults_list_every_end_once_with_the_end_of_sequence_first():
    metadata = {
        "tokenizer.ggml.eos_token_id": 9,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.eom_token_id": 9,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
    }
    assert generation_defaults(metadata) == {"eos_token_id": [9, 3], "bos_token_id": 1, "pad_token_id": 0}


def test_generation_defaults_hold_only_what_the_file_sets():
    assert generation_defaults({}) == {}
    assert generation_defaults({"general.sampling.temp": 0.5, "general.sampling.top_k": 20}) == {
        "temperature": 0.5,
        "top_k": 20,
        "do_sample": True,
    }


def test_a_token_id_that_is_no_number_is_refused():
    with pytest.raises(InvalidArgument, match="eos_token_id '2' is not a token id"):
        generation_defaults({"tokenizer.ggml.eos_token_id": "2"})
