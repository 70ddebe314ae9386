"""Every model family against transformers, in float32, through the real attention backend and KV cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from openengine.core.loader import load_model, open_checkpoint
from openengine.core.models import ARCHITECTURES, CausalLM, ModelConfig
from openengine.errors import InvalidArgument, UnsupportedFeature
from openengine.ops.attention import select_backend
from openengine.ops.batch import ForwardBatch
from openengine.ops.kv_cache import KvSpec
from tests.checkpoints import FAMILIES, VOCAB_SIZE, write_checkpoint

transformers = pytest.importorskip("transformers")

ATOL = 1e-4
BLOCK_SIZE = 4
CPU = torch.device("cpu")


class Harness:
    """A loaded checkpoint beside transformers' own, and a KV cache for a few sequences with shuffled blocks."""

    def __init__(
        self, path: Path, *, max_model_len: int | None = None, num_seqs: int = 3, dtype: torch.dtype = torch.float32
    ) -> None:
        self.reference = transformers.AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="eager", dtype=dtype
        )
        self.backend = select_backend(CPU, dtype, "torch")
        self.model: CausalLM = load_model(
            open_checkpoint(path),
            dtype=dtype,
            device=CPU,
            backend=self.backend,
            max_model_len=max_model_len,
        )
        config = self.model.config
        blocks_each = 24  # 96 tokens
        spec = KvSpec(config.num_layers, config.num_kv_heads, config.head_dim, dtype, CPU)
        self.kv = self.backend.allocate(spec, num_seqs * blocks_each, BLOCK_SIZE)
        order = torch.randperm(num_seqs * blocks_each, generator=torch.Generator().manual_seed(1))
        self.tables = order.view(num_seqs, blocks_each).to(torch.int32)

    @torch.inference_mode()
    def expected(self, tokens: torch.Tensor) -> torch.Tensor:
        """transformers' logits for every position of one sequence, [T, V]."""
        return self.reference(tokens[None]).logits[0]

    @torch.inference_mode()
    def step(self, work: list[tuple[int, torch.Tensor, int, int]], rows: list[int] | None = None) -> torch.Tensor:
        """Run tokens [start, end) of each `(sequence, tokens, start, end)`; logits of `rows`, all by default."""
        lengths = [end - start for _, _, start, end in work]
        positions = torch.cat([torch.arange(start, end) for _, _, start, end in work])
        tables = self.tables[[seq for seq, *_ in work]]
        per_token = tables.repeat_interleave(torch.tensor(lengths), dim=0)
        blocks = per_token.gather(1, (positions // BLOCK_SIZE)[:, None])[:, 0]
        cumulative = torch.tensor([0, *lengths]).cumsum(0)
        num_tokens = int(cumulative[-1])
        batch = ForwardBatch(
            input_ids=torch.cat([tokens[start:end] for _, tokens, start, end in work]),
            positions=positions,
            slot_mapping=blocks.long() * BLOCK_SIZE + positions % BLOCK_SIZE,
            cu_seqlens_q=cumulative.to(torch.int32),
            seq_lens=torch.tensor([end for *_, end in work], dtype=torch.int32),
            block_tables=tables,
            query_lens=lengths,
            context_lens=[end for *_, end in work],
            num_decodes=next((i for i, n in enumerate(lengths) if n > 1), len(lengths)),
            logits_rows=torch.arange(num_tokens) if rows is None else torch.tensor(rows, dtype=torch.int64),
            kv=self.kv,
        )
        self.backend.prepare(batch, windows=self.model.windows)
        return self.model.logits(self.model.forward(batch))

    def check_whole(self, tokens: torch.Tensor) -> None:
        actual = self.step([(0, tokens, 0, len(tokens))])
        torch.testing.assert_close(actual, self.expected(tokens), atol=ATOL, rtol=0)


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> Harness:
    path = tmp_path_factory.mktemp(request.param)
    return Harness(write_checkpoint(path, request.param, tokenizer=False))


# ------------------------------------------------------------------------------------------- equality of each family


def test_a_whole_prompt_gives_the_reference_logits(family):
    family.check_whole(prompt(40))


def test_a_chunked_prompt_gives_the_reference_logits(family):
    tokens = prompt(40)
    parts = [family.step([(0, tokens, start, end)]) for start, end in ((0, 13), (13, 16), (16, 40))]
    torch.testing.assert_close(torch.cat(parts), family.expected(tokens), atol=ATOL, rtol=0)


def test_decode_after_a_prefix_gives_the_reference_logits(family):
    tokens = prompt(24)
    family.step([(0, tokens, 0, 20)], rows=[19])
    decoded = [family.step([(0, tokens, i, i + 1)]) for i in range(20, 24)]
    torch.testing.assert_close(torch.cat(decoded), family.expected(tokens)[20:], atol=ATOL, rtol=0)


def test_a_ragged_batch_of_decode_chunk_and_prompt_gives_each_its_reference_logits(family):
    first, second, third = prompt(18, 1), prompt(30, 2), prompt(11, 3)
    family.step([(0, first, 0, 17), (1, second, 0, 9)], rows=[])
    actual = family.step([(0, first, 17, 18), (1, second, 9, 30), (2, third, 0, 11)])
    expected = [family.expected(first)[17:], family.expected(second)[9:], family.expected(third)]
    torch.testing.assert_close(actual, torch.cat(expected), atol=ATOL, rtol=0)


def test_only_the_rows_asked_for_come_back_and_they_are_unchanged(family):
    first, second = prompt(12, 4), prompt(7, 5)
    work = [(0, first, 0, 12), (1, second, 0, 7)]
    torch.testing.assert_close(family.step(work, rows=[3, 11, 18]), family.step(work)[[3, 11, 18]], atol=ATOL, rtol=0)
    assert family.step(work, rows=[]).shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_errs_at_most_twice_as_much_as_the_reference_does(name, tmp_path):
    path = write_checkpoint(tmp_path, name, tokenizer=False, dtype=torch.bfloat16)
    exact, rounded, tokens = Harness(path), Harness(path, dtype=torch.bfloat16), prompt(40)
    expected, actual = exact.expected(tokens), rounded.step([(0, tokens, 0, 40)])
    assert actual.dtype == torch.float32
    assert (actual - expected).norm() <= 2 * (rounded.expected(tokens).float() - expected).norm()


# -------------------------------------------------------------------------------------------------------- variants

_LONG = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.5 + 0.5 * i for i in range(8)]}
_SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16, **_LONG},
}


@pytest.mark.parametrize("name", _SCALINGS)
def test_c4_scaled_rope_gives_the_reference_logits_beyond_the_original_context(name, tmp_path):
    scaling = {**_SCALINGS[name], "rope_theta": 10000.0}
    path = write_checkpoint(tmp_path, "llama", tokenizer=False, max_position_embeddings=64, rope_parameters=scaling)
    Harness(path).check_whole(prompt(60))


def test_c4_dynamic_rope_gives_the_reference_logits_up_to_its_context_and_for_the_longest_prompt(tmp_path):
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    path = write_checkpoint(tmp_path, "llama", tokenizer=False, max_position_embeddings=32, rope_parameters=scaling)
    Harness(path).check_whole(prompt(20))
    Harness(path, max_model_len=60).check_whole(prompt(60))


def test_longrope_uses_the_short_factors_when_no_sequence_exceeds_the_original_context(tmp_path):
    scaling = {**_SCALINGS["longrope"], "rope_theta": 10000.0}
    path = write_checkpoint(tmp_path, "llama", tokenizer=False, max_position_embeddings=64, rope_parameters=scaling)
    Harness(path, max_model_len=16).check_whole(prompt(16))


def test_gemma3_scales_only_its_full_attention_layers(tmp_path):
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    }
    harness = Harness(write_checkpoint(tmp_path, "gemma3", tokenizer=False, rope_parameters=rope))
    assert [rope.theta for rope in harness.model.config.ropes] == [1e6, 5000.0]
    harness.check_whole(prompt(40))


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "tie_word_embeddings": True}),
        ("llama", {"num_key_value_heads": 1, "head_dim": 8, "hidden_act": "relu", "rms_norm_eps": 1e-3}),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "tie_word_embeddings": False},
        ),
        ("qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
        ("mistral", {"sliding_window": None}),
        ("ministral", {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}),
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 3}),
        ("gemma3", {"final_logit_softcapping": 2.0, "attention_bias": True, "tie_word_embeddings": False}),
        ("gpt2", {"n_inner": 100, "activation_function": "gelu", "tie_word_embeddings": False}),
    ],
)
def test_variants_give_the_reference_logits(name, overrides, tmp_path):
    Harness(write_checkpoint(tmp_path, name, tokenizer=False, **overrides)).check_whole(prompt(40))


def test_c5_full_attention_layer_types_switch_the_window_off(tmp_path):
    layer_types = ["full_attention"] * 2
    path = write_checkpoint(
        tmp_path, "qwen2", tokenizer=False, use_sliding_window=True, sliding_window=8, layer_types=layer_types
    )
    harness = Harness(path)
    assert harness.model.windows == (None, None)
    harness.check_whole(prompt(40))


# --------------------------------------------------------------------------------------------------------- configs

CAUSAL = [name for name, architecture in ARCHITECTURES.items() if architecture.head_kind == "causal_lm"]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def test_defaults_are_those_of_transformers():
    config = ModelConfig.from_hf(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.norm_eps, config.activation) == (4, 16, 1e-6, "silu")
    assert (config.windows, config.ropes[0].theta, config.tie_word_embeddings) == ((None,) * 3, 10000.0, False)
    gemma = ModelConfig.from_hf({**LLAMA, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7})
    assert gemma.windows == (4096,) * 5 + (None, 4096)
    assert (gemma.head_dim, gemma.attention_scale, gemma.tie_word_embeddings) == (256, 1 / 16, True)
    assert [rope.theta for rope in gemma.ropes] == [1e6, 10000.0]


@pytest.mark.parametrize("keys", [("type",), ("rope_type",), ("type", "rope_type")])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_c4_the_rope_type_is_read_under_either_key(field, keys):
    scaling = {"factor": 2.0, **dict.fromkeys(keys, "linear")}
    config = ModelConfig.from_hf({**LLAMA, "rope_theta": 500.0, field: scaling})
    assert (config.ropes[0].type, config.ropes[0].factor, config.ropes[0].theta) == ("linear", 2.0, 500.0)


def test_rope_base_within_the_rope_parameters_goes_first():
    config = ModelConfig.from_hf(
        {**LLAMA, "rope_theta": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    )
    assert config.ropes[0].theta == 7.0


def test_gemma3_reads_the_older_rope_keys():
    old = {"architectures": ["Gemma3ForCausalLM"], "rope_theta": 3e5, "rope_local_base_freq": 2e4}
    config = ModelConfig.from_hf({**LLAMA, **old, "rope_scaling": {"type": "linear", "factor": 8.0}})
    full, local = config.ropes
    assert (full.type, full.theta, full.factor) == ("linear", 3e5, 8.0)
    assert (local.type, local.theta) == ("default", 2e4)


def test_bias_flags_count_only_where_the_architecture_reads_them():
    biased = {**LLAMA, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}
    for family, expected in (("LlamaForCausalLM", (True,) * 3), ("Qwen2ForCausalLM", (True, False, False))):
        config = ModelConfig.from_hf({**biased, "architectures": [family]})
        assert (config.qkv_bias, config.attention_output_bias, config.mlp_bias) == expected


def test_partial_rotary_turns_the_leading_part_of_a_head():
    assert ModelConfig.from_hf({**LLAMA, "partial_rotary_factor": 0.5}).ropes[0].rotary_dim == 8


@pytest.mark.parametrize("flag", [True, False])
def test_c1_the_tie_flag_of_a_nested_text_config_counts(flag):
    nested = {key: value for key, value in LLAMA.items() if key != "architectures"}
    outer = {"architectures": LLAMA["architectures"], "text_config": {**nested, "tie_word_embeddings": flag}}
    assert ModelConfig.from_hf(outer).tie_word_embeddings is flag


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8, "layer_types": ["full_attention"] * 3}, (None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": False}, (None, None, None)),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
            (None, None, 8),
        ),
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8, 8)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None, None)),
        (
            "MistralForCausalLM",
            {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            (None, 8, None),
        ),
        ("Gemma2ForCausalLM", {"sliding_window": 8, "head_dim": 16}, (8, None, 8)),
        ("Gemma3ForCausalLM", {"sliding_window": 8, "sliding_window_pattern": 2}, (8, None, 8)),
    ],
)
def test_c5_layer_types_decide_windows_and_the_family_without_them(family, changes, windows):
    config = {**LLAMA, "num_key_value_heads": 4, "architectures": [family], **changes}
    assert ModelConfig.from_hf(config).windows == windows


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", *CAUSAL]),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, ["Gemma3ForConditionalGeneration"]),
        ({"architectures": None, "model_type": "mamba"}, ["mamba", "LlamaForCausalLM"]),
        ({"rope_scaling": {"rope_type": "spiral"}}, ["spiral", "yarn"]),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, ["mrope_section"]),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": None}}, ["without rotary positions"]),
        ({"hidden_act": "quick_gelu"}, ["quick_gelu", "silu"]),
        ({"layer_types": ["chunked_attention"] * 3}, ["chunked_attention"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantization_config", "gptq"]),
        ({"attention_sinks": True}, ["attention_sinks"]),
        ({"embedding_multiplier": 12.0}, ["embedding_multiplier"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, named):
    with pytest.raises(UnsupportedFeature) as caught:
        ModelConfig.from_hf({**LLAMA, **changes})
    assert all(name in caught.value.message for name in named)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "short_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "rope_type"),
        ({"rope_parameters": {"full_attention": 3}}, "rope parameters"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"text_config": 3}, "text_config"),
    ],
)
def test_a_missing_or_ill_typed_field_is_named(changes, named):
    with pytest.raises(InvalidArgument, match=named):
        ModelConfig.from_hf({**LLAMA, **changes})


def test_a_config_is_a_value():
    config = ModelConfig.from_hf(LLAMA)
    assert config == ModelConfig.from_hf(dict(LLAMA))
    assert replace(config, vocab_size=7) != config
    assert hash(config) == hash(replace(config))
