"""The twelve commonest mistakes: each is one typed error that says what was wrong, the value, the limit and the fix."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest

from openengine import (
    DuplicateRequest,
    Engine,
    InvalidArgument,
    ModelNotFound,
    PreconditionFailed,
    RequestTooLarge,
    UnsupportedFeature,
)
from tests.scripted import ABC, hashed, scripted_engine

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 27,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def engine(tmp_path):
    with scripted_engine(tmp_path, hashed(27), ABC) as engine:
        yield engine


def fails(error: type, *parts: str, call) -> None:
    """`call` raises exactly `error`, in one message that has every part, and says so in a few lines."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    message = caught.value.message
    missing = [part for part in parts if part not in message]
    assert not missing, f"{missing} not in: {message}"
    assert len(message) < 600 and message.count("\n") == 0


def directory(path: Path, config: dict | None = None, **files: bytes) -> Path:
    path.mkdir()
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (path / name.replace("__", ".")).write_bytes(content)
    return path


def test_1_a_wrong_path(tmp_path):
    (tmp_path / "SmolLM2.gguf").write_bytes(b"")
    fails(ModelNotFound, str(tmp_path / "SmolLM.gguf"), "no such file", "did you mean", "SmolLM2.gguf",
          call=lambda: Engine(tmp_path / "SmolLM.gguf"))  # fmt: skip
    fails(
        ModelNotFound,
        "/no/such/folder/model",
        "/no/such/folder does not exist",
        call=lambda: Engine("/no/such/folder/model"),
    )
    fails(InvalidArgument, "model_path", "path or a hub id", "None", call=lambda: Engine(None))


def test_2_not_a_model(tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("shopping list")
    fails(InvalidArgument, str(notes), ".gguf file or a directory", call=lambda: Engine(notes))
    fails(InvalidArgument, "config.json is missing", call=lambda: Engine(directory(tmp_path / "empty")))
    fails(InvalidArgument, "no weights", "model.safetensors", call=lambda: Engine(directory(tmp_path / "bare", LLAMA)))
    fails(UnsupportedFeature, "pytorch_model.bin", "safetensors",
          call=lambda: Engine(directory(tmp_path / "pickle", LLAMA, pytorch_model__bin=b"x")))  # fmt: skip


def test_3_an_unknown_architecture(tmp_path):
    path = directory(tmp_path / "m", {**LLAMA, "architectures": ["MambaForCausalLM"]}, model__safetensors=b"")
    fails(UnsupportedFeature, "MambaForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM", call=lambda: Engine(path))


def test_4_a_prompt_too_long(engine):
    fails(
        InvalidArgument,
        "128 tokens",
        "max_model_len is 128",
        "shorten the prompt",
        call=lambda: engine.generate("a" * 128),
    )
    assert engine.generate("a" * 127).usage.total_tokens == 128


def test_5_a_batch_with_one_bad_item(engine):
    prompts = ["abc", "ab", "a" * 500, "abcd"]
    fails(InvalidArgument, "item 2 of 4", "500 tokens", "128", call=lambda: engine.generate(prompts))
    assert engine._loop.num_steps == 0
    results = engine.generate(prompts, on_error="return", max_tokens=1)
    assert [r.error is None for r in results] == [True, True, False, True]


def test_6_an_unknown_keyword(engine):
    fails(InvalidArgument, "'max_token'", "did you mean 'max_tokens'", call=lambda: engine.generate("a", max_token=3))
    fails(InvalidArgument, "'max_new_tokenz'", "max_tokens", call=lambda: engine.generate(["a"], max_new_tokenz=3))
    fails(InvalidArgument, "'max_num_seq'", "did you mean 'max_num_seqs'", call=lambda: Engine("x", max_num_seq=3))


def test_7_a_bad_temperature(engine):
    for value in (-1, float("nan"), "hot"):
        fails(
            InvalidArgument,
            "temperature",
            repr(value),
            ">= 0",
            call=lambda v=value: engine.generate("a", temperature=v),
        )


def test_8_a_closed_engine(engine):
    engine.close()
    fails(PreconditionFailed, "closed", "create a new Engine", call=lambda: engine.generate("a"))


def test_9_a_duplicate_id(engine):
    handle = engine.submit("a", request_id="mine", ignore_eos=True)
    fails(
        DuplicateRequest, "'mine'", "in flight", "choose another id", call=lambda: engine.submit("b", request_id="mine")
    )
    handle.cancel()


@pytest.mark.parametrize(
    ("package", "extra"), [("huggingface_hub", "hub"), ("sentencepiece", "sentencepiece")]
)  # fmt: skip
def test_10_a_missing_extra(tmp_path, monkeypatch, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    name = "someone/some-model"
    if package == "sentencepiece":
        name = directory(tmp_path / "m", LLAMA, tokenizer__model=b"x", model__safetensors=safetensors())
    fails(UnsupportedFeature, package, f'pip install "openengine-inference[{extra}]"', call=lambda: Engine(name))


def safetensors(*, num_bytes: int | None = None) -> bytes:
    """A whole llama checkpoint of zeros that fits LLAMA, or its first bytes."""
    width, inner, vocabulary, kv = 32, 64, 27, 16
    shapes = {
        "model.embed_tokens.weight": (vocabulary, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (vocabulary, width),
        "model.layers.0.input_layernorm.weight": (width,),
        "model.layers.0.post_attention_layernorm.weight": (width,),
        "model.layers.0.self_attn.q_proj.weight": (width, width),
        "model.layers.0.self_attn.k_proj.weight": (kv, width),
        "model.layers.0.self_attn.v_proj.weight": (kv, width),
        "model.layers.0.self_attn.o_proj.weight": (width, width),
        "model.layers.0.mlp.gate_proj.weight": (inner, width),
        "model.layers.0.mlp.up_proj.weight": (inner, width),
        "model.layers.0.mlp.down_proj.weight": (width, inner),
    }
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    return (struct.pack("<Q", len(encoded)) + encoded + bytes(offset))[:num_bytes]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", safetensors(num_bytes=5000)),
        ("model.safetensors", safetensors(num_bytes=300)),
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 100),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        ("model.gguf", b""),
        ("model.gguf", b"GGUF" + struct.pack("<I", 3) + b"\xff" * 20),
        ("model.gguf", b"version https://git-lfs.github.com/spec/v1\n"),
        ("config.json", b"{"),
        ("config.json", b"[]"),
    ],
)
def test_11_a_corrupt_file(tmp_path, name, content):
    path = directory(tmp_path / "m", LLAMA, model__safetensors=safetensors())
    (path / name).write_bytes(content)
    fails(InvalidArgument, name, call=lambda: Engine(path / name if name.endswith(".gguf") else path))


def test_11_a_corrupt_tokenizer(tmp_path):
    path = directory(tmp_path / "m", LLAMA, model__safetensors=safetensors(), tokenizer__json=b'{"model": 5')
    fails(InvalidArgument, "tokenizer.json", call=lambda: Engine(path))


def test_12_out_of_kv_memory(tmp_path):
    with scripted_engine(tmp_path, hashed(27), ABC, num_kv_blocks=4, max_model_len=64) as engine:
        fails(RequestTooLarge, "31 tokens", "holds 16", "raise num_kv_blocks", call=lambda: engine.generate("a" * 30))
        result = engine.generate("abc", max_tokens=60, ignore_eos=True)
        assert result.usage.total_tokens == 16 and result.finish_reason == "length"
    path = directory(
        tmp_path / "m",
        LLAMA,
        model__safetensors=safetensors(),
        tokenizer__json=(tmp_path / "tokenizer.json").read_bytes(),
    )
    fails(InvalidArgument, "1000000000000 blocks", "bytes", "lower num_kv_blocks",
          call=lambda: Engine(path, num_kv_blocks=10**12))  # fmt: skip
    fails(
        InvalidArgument,
        "max_model_len 9999",
        "context of 64",
        "lower it",
        call=lambda: Engine(path, max_model_len=9999),
    )
    with Engine(path, num_kv_blocks=8) as engine:  # the checkpoint is a good one
        assert len(engine.generate("abc", temperature=0, max_tokens=3).token_ids) == 3


def test_choices_for_each_prompt_are_told_the_batch_that_has_them(engine):
    fails(InvalidArgument, "choice must be a list of texts", "build_request(prompt, None, {'choice': […]})",
          call=lambda: engine.generate(["a", "b"], choice=[["x"], ["y"]]))  # fmt: skip
