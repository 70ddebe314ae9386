"""Rotary frequencies against transformers' own, and the rotation against its definition."""

from __future__ import annotations

import pytest
import torch

from openengine.ops.rope import Rope, RopeConfig, apply_rope_, inverse_frequencies

DIM, MAX_LENGTH = 16, 128

_FACTORS = {
    "short_factor": (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7),
    "long_factor": (2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0),
}
_CASES = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 16},
    "yarn_attention_factor": {"factor": 8.0, "original_max_position_embeddings": 16, "attention_factor": 1.25},
    "yarn_mscale": {
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn_factor_1": {"factor": 1.0, "original_max_position_embeddings": 128},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {"factor": 8.0, "original_max_position_embeddings": 16, **_FACTORS},
    "longrope_attention_factor": {
        "factor": 1.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.5,
        **_FACTORS,
    },
}


def config_of(name: str, **fields) -> RopeConfig:
    arguments = {
        "type": name.split("_")[0],
        "theta": 10000.0,
        "rotary_dim": DIM,
        "max_position_embeddings": MAX_LENGTH,
        "original_max_position_embeddings": MAX_LENGTH,
    }
    return RopeConfig(**{**arguments, **fields})


@pytest.mark.parametrize("length", [16, MAX_LENGTH, 200])
@pytest.mark.parametrize("name", _CASES)
def test_c4_frequencies_equal_those_of_transformers(name, length):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, fields = name.split("_")[0], _CASES[name]
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
    reference = transformers.LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **lists},
    )
    expected, expected_scaling = ROPE_INIT_FUNCTIONS[kind](reference, torch.device("cpu"), seq_len=length)
    frequencies, scaling = inverse_frequencies(config_of(name, **fields), length)
    torch.testing.assert_close(frequencies, expected, atol=0, rtol=1e-6)
    assert scaling == pytest.approx(expected_scaling, rel=1e-12)


def test_dynamic_is_unscaled_up_to_the_models_context():
    scaled, _ = inverse_frequencies(config_of("dynamic", factor=4.0), MAX_LENGTH)
    plain, _ = inverse_frequencies(config_of("default"), MAX_LENGTH)
    torch.testing.assert_close(scaled, plain)


def test_rotation_turns_each_pair_by_position_times_frequency():
    config = config_of("default", rotary_dim=8)
    frequencies, _ = inverse_frequencies(config, MAX_LENGTH)
    x = torch.randn(5, 3, DIM, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 7, 30, 127])
    angles = positions.double()[:, None, None] * frequencies.double()
    first, second = x[..., :4].double(), x[..., 4:8].double()
    turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
    expected = torch.cat((*turned, x[..., 8:].double()), dim=-1).float()

    apply_rope_(x, *Rope(config, MAX_LENGTH, device=x.device).angles(positions))

    torch.testing.assert_close(x, expected, atol=2e-5, rtol=0)


def test_rotation_of_a_strided_view_leaves_its_neighbours_alone():
    packed = torch.randn(4, 6, DIM, generator=torch.Generator().manual_seed(0))
    before, heads = packed.clone(), packed[:, :4]
    expected = heads.clone()
    angles = Rope(config_of("default"), MAX_LENGTH, device=packed.device).angles(torch.arange(4))
    apply_rope_(expected, *angles)
    apply_rope_(heads, *angles)
    torch.testing.assert_close(packed[:, :4], expected, atol=0, rtol=0)
    assert torch.equal(packed[:, 4:], before[:, 4:])


def test_bfloat16_is_rotated_in_float32_and_rounded_once():
    x = torch.randn(6, 2, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    angles = Rope(config_of("default"), MAX_LENGTH, device=x.device).angles(torch.arange(100, 106))
    wide = x.float()
    apply_rope_(wide, *angles)
    apply_rope_(x, *angles)
    assert torch.equal(x, wide.bfloat16())
