"""Tensors of GGUF files under Hugging Face names and with Hugging Face values."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from openengine.core.gguf import GgufFile
from openengine.core.gguf_models import SUPPORTED_ARCHITECTURES, HfTensor, hf_config, hf_tensors
from openengine.errors import InvalidArgument, UnsupportedFeature
from tests.gguf_files import (
    CONTEXT,
    EPS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    VOCAB,
    decoder_metadata,
    embedding,
    metadata_of,
    write_gguf,
)


def hf_model(architecture: str, *, tied: bool = False, biased: bool = False) -> Any:
    """A random transformers model that a GGUF file of `architecture` can hold."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    common = {
        "vocab_size": VOCAB,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": [2],
        "pad_token_id": 0,
    }
    decoder = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    }
    if architecture == "llama":
        config = transformers.LlamaConfig(**common, **decoder, attention_bias=biased, mlp_bias=biased)
    elif architecture == "qwen2":
        config = transformers.Qwen2Config(**common, **decoder)
    elif architecture == "qwen3":
        config = transformers.Qwen3Config(**common, **decoder, attention_bias=biased)
    elif architecture == "gemma2":
        config = transformers.Gemma2Config(**common, **decoder, query_pre_attn_scalar=HEAD_DIM, sliding_window=16)
    elif architecture == "gemma3":
        rope = {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
        decoder |= {"rope_parameters": rope}
        config = transformers.Gemma3TextConfig(**common, **decoder, query_pre_attn_scalar=HEAD_DIM, sliding_window=16)
    else:
        config = transformers.GPT2Config(
            **common, n_embd=HIDDEN, n_inner=4 * HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=CONTEXT,
            layer_norm_epsilon=EPS,
        )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def converted(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """The state dict as llama.cpp's converter writes it, with names from the reference package's own table."""
    oracle = pytest.importorskip("gguf")
    arch = next(key for key, name in oracle.MODEL_ARCH_NAMES.items() if name == architecture)
    names = oracle.get_tensor_name_map(arch, LAYERS)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if architecture == "llama" and ".self_attn.q_proj." in name:
            values = permuted(values, HEADS)
        elif architecture == "llama" and ".self_attn.k_proj." in name:
            values = permuted(values, KV_HEADS)
        elif architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        elif architecture == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            values = values.T
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    return tensors


def permuted(values: np.ndarray, num_heads: int) -> np.ndarray:
    """From rotary pairs half a head apart to pairs side by side."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


CHECKPOINTS = [
    ("llama", {}),
    ("llama", {"tied": True}),
    ("llama", {"biased": True}),
    ("qwen2", {}),
    ("qwen3", {"tied": True}),
    ("qwen3", {"biased": True}),
    ("gemma2", {"tied": True}),
    ("gemma3", {"tied": True}),
    ("gpt2", {"tied": True}),
    ("gpt2", {}),
]


@pytest.mark.parametrize(("architecture", "options"), CHECKPOINTS)
def test_a_converted_checkpoint_comes_back_in_names_values_and_config(tmp_path, architecture, options):
    model = hf_model(architecture, **options)
    path = write_gguf(tmp_path, metadata_of(architecture), converted(model, architecture))
    expected = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    with GgufFile(path) as file:
        config = hf_config(file.metadata, file.tensors)
        found = {}
        for tensor in hf_tensors(file):
            found[tensor.name] = tensor.load()
            assert found[tensor.name].shape == tensor.shape and found[tensor.name].flags.c_contiguous
    assert found.keys() == expected.keys()
    for name, values in found.items():
        # (w + 1) - 1 is rounded once.
        tolerance = 4e-7 if architecture.startswith("gemma") and name.endswith("norm.weight") else 0
        np.testing.assert_allclose(values, expected[name], rtol=0, atol=tolerance, err_msg=name)
    assert config["architectures"] == [type(model).__name__]
    # The config class completes what the file does not say; what it completes must be the checkpoint's as well.
    ours, theirs = type(model.config)(**config).to_dict(), model.config.to_dict()
    ignored = {"architectures", "dtype", "_name_or_path"}
    assert {k: v for k, v in ours.items() if k not in ignored} == {k: v for k, v in theirs.items() if k not in ignored}


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_parameters_equal_what_transformers_reads_from_the_same_file(tmp_path, architecture):
    transformers = pytest.importorskip("transformers")
    model = hf_model(architecture, tied=architecture in ("gemma2", "gemma3", "gpt2"))
    path = write_gguf(tmp_path, metadata_of(architecture), converted(model, architecture))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, config=model.config)
    expected = {name: tensor.float().numpy() for name, tensor in theirs.state_dict().items()}
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    with GgufFile(path) as file:
        found = {tensor.name: tensor.load() for tensor in hf_tensors(file)}
    assert found.keys() == expected.keys()
    for name, values in found.items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)


def test_loading_into_out_gives_the_same_values(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "token_embd.weight": rng.normal(size=(VOCAB, HIDDEN)),
        "blk.0.attn_q.weight": rng.normal(size=(HIDDEN, HIDDEN)),
        "blk.0.attn_norm.weight": rng.normal(size=HIDDEN),
    }
    for architecture in ("llama", "gemma3"):
        with GgufFile(write_gguf(tmp_path, decoder_metadata(architecture), tensors)) as file:
            for tensor in hf_tensors(file):
                out = np.full(tensor.shape, np.nan, np.float32)
                assert tensor.load(out) is out
                np.testing.assert_array_equal(out, tensor.load())
                with pytest.raises(InvalidArgument, match="out for"):
                    tensor.load(np.empty((1, 1), np.float32))


@pytest.mark.parametrize(
    "name",
    [
        "blk.3.attn_q.weight",
        "blk.0.attn_qkv.weight",
        "blk.0.ffn_gate_exps.weight",
        "blk.00.attn_q.weight",
        "attn_q.weight",
        "rope_factors_long.weight",
        "blk.0.attn_q.scale",
    ],
)
def test_tensors_without_a_use_are_reported_by_name(tmp_path, name):
    file = GgufFile(write_gguf(tmp_path, decoder_metadata("llama"), embedding() | {name: np.zeros((HIDDEN, HIDDEN))}))
    with pytest.raises(UnsupportedFeature) as caught:
        hf_tensors(file)
    assert name in caught.value.message
    assert caught.value.details == {"tensors": [name]}


def test_rows_that_do_not_divide_into_heads_are_refused(tmp_path):
    tensors = embedding() | {"blk.0.attn_q.weight": np.zeros((HEADS * 2 + 1, HIDDEN))}
    file = GgufFile(write_gguf(tmp_path, decoder_metadata("llama"), tensors))
    with pytest.raises(InvalidArgument, match="does not divide into 4 heads"):
        hf_tensors(file)


def test_neither_module_needs_torch():
    code = "import sys, openengine.core.gguf_models; sys.exit('torch' in sys.modules or 'gguf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_chunks_are_the_whole_tensor_range_by_range(tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    values = np.arange(10 * 64, dtype=np.float32).reshape(10, 64)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("x", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(path) as file:
        tensor = HfTensor("x", (10, 64), file.tensors["x"], _offset=-1.0)
        parts = [(rows, part.copy()) for rows, part in tensor.chunks(3 * 64)]
    assert [rows.stop - rows.start for rows, _ in parts] == [3, 3, 3, 1]
    np.testing.assert_array_equal(np.concatenate([part for _, part in parts]), values - 1)
