"""Norms: the native kernels against their twins in PyTorch."""

from __future__ import annotations

import pytest
import torch

from openengine.ops.native import FLOAT_KINDS, NativeLibrary, native_library
from openengine.ops.norm import HeadNorm, LayerNorm, RmsNorm

CPU = torch.device("cpu")
LIBRARY = native_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native kernels are not built")
each_level = pytest.mark.parametrize("level", LIBRARY.levels if LIBRARY else ["none"])
each_float = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SIZES = [(1, 1), (1, 16), (3, 5), (2, 100), (7, 576), (65, 33), (33, 641)]


def library(level: str) -> NativeLibrary:
    """Only up to `level`, so that it is the one chosen."""
    return NativeLibrary(LIBRARY.handle, LIBRARY.levels[: LIBRARY.levels.index(level) + 1])


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


def filled(module):
    for _name, tensor in module.tensors():
        tensor.copy_(randn(*tensor.shape))
    module.finish()
    return module


def assert_close(actual, plain, exact):
    """Errors at most twice those of plain PyTorch."""
    bound = 2 * (plain.double() - exact.double()).abs().max() + 1e-6 * exact.double().abs().max() + 1e-30
    assert ((actual.double() - exact.double()).abs() <= bound).all()


def norms(kind: str, width: int, native: NativeLibrary | None):
    if kind == "layer":
        return filled(LayerNorm("n", width, 1e-5, device=CPU, native=native))
    return filled(RmsNorm("n", width, 1e-6, offset=1.0 if kind == "gemma" else 0.0, device=CPU, native=native))


@each_level
@each_float
@pytest.mark.parametrize("kind", ["rms", "gemma", "layer"])
def test_a_norm_is_its_twin(level, dtype, kind):
    for rows, width in SIZES:
        fused, twin = norms(kind, width, library(level)), norms(kind, width, None)
        x = randn(rows, width, scale=30.0).to(dtype)
        assert_close(fused(x), twin(x), twin(x.double().float()))


@each_level
@each_float
@pytest.mark.parametrize("kind", ["rms", "gemma", "layer"])
def test_a_norm_adds_the_branch_to_the_residual_in_place(level, dtype, kind):
    for rows, width in SIZES:
        fused, twin = norms(kind, width, library(level)), norms(kind, width, None)
        residual, delta = randn(rows, width).to(dtype), randn(rows + 1, width).to(dtype)[1:]
        expected_residual = residual.clone()
        expected = twin.add(expected_residual, delta)
        exact = twin(expected_residual.float())
        actual = fused.add(residual, delta)
        assert torch.equal(residual, expected_residual)
        assert_close(actual, expected, exact)


@each_level
@each_float
def test_a_norm_of_heads_is_its_twin_and_reads_strided_rows(level, dtype):
    parts = {"q_norm": 3, "k_norm": 1}
    for width in (4, 64, 100):
        fused, twin = (
            filled(HeadNorm(parts, width, 1e-6, offset=1.0, device=CPU, native=n)) for n in (library(level), None)
        )
        x = randn(9, 6, width).to(dtype)[:, :4]
        assert_close(fused(x), twin(x), twin(x.float()))


@each_float
def test_zero_rows_and_huge_rows_normalize_as_in_pytorch(dtype):
    fused, twin = norms("rms", 64, LIBRARY), norms("rms", 64, None)
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e15), torch.full((64,), 1e-15)]).to(dtype)
    assert_close(fused(x), twin(x), twin(x.float()))
    x[1, 3] = torch.nan
    assert fused(x).isnan().all(dim=1).tolist() == [False, True, False]


def test_rows_depend_neither_on_the_rows_beside_them_nor_on_threads():
    x, rms = randn(40, 641), norms("rms", 641, LIBRARY)  # enough for several threads
    assert torch.equal(rms(x)[5:6], rms(x[5:6]))


def test_what_the_kernels_do_not_serve_runs_in_pytorch():
    half = randn(4, 32).half()
    assert norms("rms", 32, LIBRARY)(half).dtype == torch.float16
    assert norms("rms", 32, LIBRARY)(randn(2, 3, 32)).shape == (2, 3, 32)
    mixed = randn(4, 32).bfloat16()
    assert norms("rms", 32, LIBRARY).add(mixed, randn(4, 32)).dtype == torch.bfloat16
    assert set(FLOAT_KINDS) == {torch.float32, torch.bfloat16}
