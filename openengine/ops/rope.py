"""Rotary position embedding: frequencies of every scaling type, angles of a step, rotation in place.

The formulas are those of the papers as fixed by `transformers.modeling_rope_utils` (ROPE_INIT_FUNCTIONS), with
which the tests compare. Two of them depend on a length, which there is the longest of the forward pass at hand. Keys
live in a cache and are shared between sequences here, so one engine uses one set of frequencies, chosen by the
greatest length it serves:

- dynamic: up to `max_position_embeddings` the unscaled ones; beyond, those of a prompt of exactly that length.
- longrope: the short factors up to `original_max_position_embeddings`, the long factors beyond.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from openengine.errors import InvalidArgument

__all__ = ["ROPE_TYPES", "Rope", "RopeConfig", "apply_rope_", "inverse_frequencies", "rotate_"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rotary embedding. `rotary_dim` leading elements of a head are rotated, in halves.

    Fields beyond the first five belong to the types that read them: see `inverse_frequencies`.
    """

    type: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    original_max_position_embeddings: int
    factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


class Rope:
    """The frequencies of one rotary embedding on one device, for sequences up to `max_length` tokens."""

    __slots__ = ("frequencies", "scaling")

    def __init__(self, config: RopeConfig, max_length: int, *, device: torch.device) -> None:
        frequencies, self.scaling = inverse_frequencies(config, max_length)
        self.frequencies = frequencies.to(device)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine for positions i64[T], each float32 [T, 1, rotary_dim].

        The sine's first half is negated, so that the rotation is `x * cos + swap_halves(x) * sin`.
        """
        angles = positions.float()[:, None, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.scaling != 1.0:
            cos, sin = cos * self.scaling, sin * self.scaling
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rope_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the leading elements of each head of x [T, N, H] in place, computing in float32.

    cos and sin are those of `Rope.angles`.
    """
    rotary_dim = cos.shape[-1]
    rotated = x[..., :rotary_dim]
    wide = rotated.float()
    rotated.copy_((wide * cos).addcmul_(wide.roll(rotary_dim // 2, dims=-1), sin))


def rotate_(q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor] | None) -> None:
    """Rotate queries and keys [T, heads, H] in place, in one pass where a projection made them side by side."""
    if angles is None:
        return
    num_heads = q.shape[1] + k.shape[1]
    if q.stride() == k.stride() and q.data_ptr() + q.shape[1] * q.stride(1) * q.itemsize == k.data_ptr():
        apply_rope_(q.as_strided((q.shape[0], num_heads, q.shape[2]), q.stride()), *angles)
        return
    apply_rope_(q, *angles)
    apply_rope_(k, *angles)


def inverse_frequencies(config: RopeConfig, max_length: int) -> tuple[Tensor, float]:
    """Inverse frequencies float32 [rotary_dim / 2], and the factor on cosine and sine.

    `max_length` is the greatest sequence length in tokens; only `dynamic` and `longrope` depend on it.
    Raises InvalidArgument for parameters that give no finite frequency.
    """
    try:
        frequencies, factor = _FREQUENCIES[config.type](config, max_length)
    except (ArithmeticError, ValueError) as exc:
        raise InvalidArgument(f"rope of type {config.type!r} has parameters without a meaning: {exc}") from exc
    if not (torch.isfinite(frequencies).all() and math.isfinite(factor) and (frequencies > 0).all()):
        raise InvalidArgument(f"rope of type {config.type!r} has parameters that give frequencies out of range")
    return frequencies, factor


def _default(config: RopeConfig, max_length: int) -> tuple[Tensor, float]:
    return 1.0 / _wavelengths(config.theta, config.rotary_dim), 1.0


def _linear(config: RopeConfig, max_length: int) -> tuple[Tensor, float]:
    return 1.0 / _wavelengths(config.theta, config.rotary_dim) / config.factor, 1.0


def _dynamic(config: RopeConfig, max_length: int) -> tuple[Tensor, float]:
    dim = config.rotary_dim
    stretch = config.factor * max(max_length, config.max_position_embeddings) / config.max_position_embeddings
    theta = config.theta * (stretch - (config.factor - 1)) ** (dim / (dim - 2))
    return 1.0 / _wavelengths(theta, dim), 1.0


def _yarn(config: RopeConfig, max_length: int) -> tuple[Tensor, float]:
    dim, theta = config.rotary_dim, config.theta

    def dimension_of(rotations: float) -> float:
        """The dimension that turns that many times over the original context."""
        wavelength = config.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)

    wavelengths = _wavelengths(theta, dim)
    frequencies = interpolated / (config.factor * wavelengths) + (1 - interpolated) / wavelengths
    return frequencies, _yarn_scaling(config)


def _yarn_scaling(config: RopeConfig) -> float:
    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return magnitude(config.mscale) / magnitude(config.mscale_all_dim)
    return magnitude(1.0)


def _llama3(config: RopeConfig, max_length: int) -> tuple[Tensor, float]:
    frequencies = 1.0 / _wavelengths(config.theta, config.rotary_dim)
    turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)  # over the original context
    low, high = config.low_freq_factor, config.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: high frequency, unchanged; 0: low, divided
    return (1 - keep) * frequencies / config.factor + keep * frequencies, 1.0


def _longrope(config: RopeConfig, max_length: int) -> tuple[Tensor, float]:
    original = config.original_max_position_embeddings
    factors = config.long_factor if max_length > original else config.short_factor
    frequencies = 1.0 / (torch.tensor(factors, dtype=torch.float32) * _wavelengths(config.theta, config.rotary_dim))
    if config.attention_factor is not None:
        return frequencies, config.attention_factor
    if config.factor <= 1:
        return frequencies, 1.0
    return frequencies, math.sqrt(1 + math.log(config.factor) / math.log(original))


def _wavelengths(theta: float, dim: int) -> Tensor:
    """theta ** (2i / dim) for i in [0, dim / 2), float32: tokens per radian."""
    return theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


_FREQUENCIES: dict[str, Callable[[RopeConfig, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}

ROPE_TYPES = tuple(_FREQUENCIES)
