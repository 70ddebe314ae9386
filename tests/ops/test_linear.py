"""Matrix products: packed native weights and oneDNN's against plain PyTorch, int8 against its definition."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from openengine.errors import UnsupportedFeature
from openengine.ops.activation import ACTIVATIONS, activated
from openengine.ops.linear import DenseWeights, Linear, PackedPart, preferred_dtype
from openengine.ops.linear_native import NativeWeights
from openengine.ops.native import native_library
from openengine.ops.quantize import INT8_RUN, Int8Weights, quantize_run, quantize_weight
from tests.bench.quality import VARIANTS, log_probs
from tests.checkpoints import FAMILIES, VOCAB_SIZE, write_checkpoint

CPU = torch.device("cpu")
LIBRARY = native_library()
LEVELS = LIBRARY.levels if LIBRARY else ()
FLOATS = [torch.float32, torch.bfloat16]
native = pytest.mark.skipif(LIBRARY is None, reason="the native kernels are not built")
each_level = pytest.mark.parametrize("level", LEVELS or ["none"])
each_float = pytest.mark.parametrize("dtype", FLOATS, ids=["float32", "bfloat16"])


def shapes(count: int) -> list[tuple[int, int, int]]:
    """Rows, inputs and outputs, most of them no multiple of any tile."""
    draw = random.Random(5)
    fixed = [(1, 1, 1), (1, 128, 32), (16, 256, 64), (14, 127, 33), (15, 129, 31), (70, 2, 3), (64, 576, 96)]
    return fixed + [(draw.randint(1, 70), draw.randint(1, 700), draw.randint(1, 140)) for _ in range(count)]


def example(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows * 1_000_003 + inputs * 1009 + outputs)
    drawn = (torch.randn(*shape, generator=generator) for shape in ((rows, inputs), (outputs, inputs), (outputs,)))
    return tuple(tensor.to(dtype) for tensor in drawn)


def packed(weight: torch.Tensor, bias: torch.Tensor | None, **options):
    weights = NativeWeights(LIBRARY, *weight.shape, dtype=weight.dtype, bias=bias is not None, **options)
    return filled(weights, weight, bias)


def filled(weights, weight: torch.Tensor, bias: torch.Tensor | None):
    half = weight.shape[0] // 2
    for first, part in ((0, weight[:half]), (half, weight[half:])):
        if len(part):
            weights.write(first, part)
    if bias is not None:
        weights.bias.copy_(bias)
    return weights


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return (actual.double() - exact).abs().max().item()


def mean_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square."""
    return (actual.double() - exact).square().mean().sqrt().item()


# ------------------------------------------------------------------------------------------------------- float kernels


@native
@each_level
@each_float
def test_native_products_err_at_most_twice_as_much_as_plain_pytorch(level, dtype):
    for rows, inputs, outputs in shapes(25):
        x, weight, bias = example(rows, inputs, outputs, dtype)
        exact = F.linear(x.double(), weight.double(), bias.double())
        plain = error(F.linear(x, weight, bias), exact)
        weights = packed(weight, bias, level=level)
        assert error(weights.multiply(x, dtype), exact) <= 2 * plain + 1e-6, (rows, inputs, outputs)


@native
@each_level
@each_float
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_fused_activation_errs_at_most_twice_as_much_as_plain_pytorch(level, dtype, name, gated):
    for rows, inputs, outputs in shapes(4):
        x, weight, bias = example(rows, inputs, 2 * outputs if gated else outputs, dtype)
        x /= inputs**0.5
        exact = activated(F.linear(x.double(), weight.double(), bias.double()), name, gated=gated)
        plain = error(DenseWeights(weight, bias, gated=gated).multiply(x, dtype, name), exact)
        weights = packed(weight, bias, level=level, gated=gated)
        assert error(weights.multiply(x, dtype, name), exact) <= 2 * plain + 1e-6, (rows, inputs, outputs)


@native
@each_float
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_new", "relu"])
def test_every_form_of_a_weight_applies_the_activation(dtype, name):
    x, weight, bias = example(9, 64, 40, dtype)
    for gated in (False, True):
        forms = [packed(weight, bias, int8=int8, gated=gated) for int8 in (False, True)]
        forms.append(DenseWeights(weight, bias, gated=gated))
        forms.append(filled(Int8Weights(40, 64, dtype=dtype, bias=True, gated=gated), weight, bias))
        for weights in forms:
            y = weights.multiply(x, torch.float32)
            expected = ACTIVATIONS[name](y[:, :20]) * y[:, 20:] if gated else ACTIVATIONS[name](y)
            torch.testing.assert_close(weights.multiply(x, torch.float32, name), expected, rtol=0.02, atol=0.02)


@native
@each_level
@each_float
@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
def test_gated_weights_are_the_same_weights_in_another_order(level, dtype, int8):
    for rows, inputs, outputs in shapes(4):
        x, weight, bias = example(rows, inputs, 2 * outputs, dtype)
        plain = packed(weight, bias, level=level, int8=int8)
        gated = packed(weight, bias, level=level, int8=int8, gated=True)
        assert torch.equal(gated.dense(), plain.dense())
        assert torch.equal(gated.multiply(x, dtype), plain.multiply(x, dtype))


@native
@each_level
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_new"])
def test_activations_of_far_values_neither_overflow_nor_vanish(level, name):
    x = torch.tensor([-1e30, -200.0, -90.0, -20.0, -5.0, -1e-3, 0.0, 1e-3, 5.0, 20.0, 90.0, 1e30, torch.nan])[:, None]
    actual = packed(torch.ones(1, 1), None, level=level).multiply(x, torch.float32, name)
    torch.testing.assert_close(actual, ACTIVATIONS[name](x.double()).float(), rtol=2e-6, atol=1e-6, equal_nan=True)


@native
@each_level
@each_float
@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
def test_a_rows_result_does_not_depend_on_the_rows_beside_it(level, dtype, int8):
    x, weight, bias = example(70, 300, 75, dtype)
    weights = packed(weight, bias, level=level, int8=int8)
    whole = weights.multiply(x, torch.float32)
    for start, end in ((0, 1), (69, 70), (3, 8), (10, 26), (0, 33)):
        assert torch.equal(weights.multiply(x[start:end], torch.float32), whole[start:end])


@native
@each_float
@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
def test_the_number_of_threads_changes_nothing(dtype, int8):
    x, weight, bias = example(40, 300, 75, dtype)
    weights = packed(weight, bias, int8=int8)
    before = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 40):  # more than there are CPUs, of most machines that run this
            torch.set_num_threads(count)
            results.append(weights.multiply(x, dtype))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], result) for result in results[1:])


@native
@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
def test_a_head_writes_its_result_where_it_is_told(int8):
    weights = NativeWeights(native_library(), 75, 300, dtype=torch.float32, int8=int8)
    head = Linear(filled(weights, torch.randn(75, 300), None), parts={"head": 75})
    x, memory = torch.randn(9, 300), torch.empty(12, 75)
    result = head(x, dtype=torch.float32, out=memory)
    assert result.data_ptr() == memory.data_ptr()
    assert torch.equal(result, head(x, dtype=torch.float32))


@native
@each_level
@each_float
def test_packed_weights_read_back_exactly(level, dtype):
    for _, inputs, outputs in shapes(8):
        _, weight, _ = example(1, inputs, outputs, dtype)
        weights = packed(weight, None, level=level)
        assert torch.equal(weights.dense(), weight)
        ids = torch.randint(outputs, (5,))
        assert torch.equal(weights.rows(ids), weight[ids])


@native
@each_float
def test_inputs_may_be_strided_and_empty_and_outputs_of_another_dtype(dtype):
    x, weight, bias = example(9, 64, 40, dtype)
    weights = packed(weight, bias)
    whole = weights.multiply(x, dtype)
    wide = torch.cat([x, x], dim=1)
    assert torch.equal(weights.multiply(wide[:, 64:], dtype), whole)
    assert torch.equal(weights.multiply(x.T.contiguous().T, dtype), whole)
    assert weights.multiply(x[:0], dtype).shape == (0, 40)
    assert torch.equal(weights.multiply(x, torch.float32).to(dtype), whole)


@native
def test_inputs_of_another_width_or_dtype_are_not_read():
    x, weight, bias = example(2, 64, 40, torch.bfloat16)
    weights = packed(weight, bias)
    for wrong in (x[:, :32], x.float()):
        with pytest.raises(AssertionError, match="x must be"):
            weights.multiply(wrong, torch.float32)


@native
@each_level
def test_values_that_are_not_finite_stay_in_their_row(level):
    x, weight, bias = example(6, 200, 40, torch.float32)
    x[1, 150], x[3, 3], x[4, 199] = torch.nan, torch.inf, -torch.inf
    for int8 in (False, True):
        finite = packed(weight, bias, level=level, int8=int8).multiply(x, torch.float32).isfinite()
        assert finite[[0, 2, 5]].all() and not finite[[1, 3, 4]].any()


@each_float
def test_onednn_products_err_at_most_twice_as_much_as_plain_pytorch(dtype):
    # Without AVX-512 oneDNN and the library behind plain float32 sum in unlike orders: of few results the greatest
    # error is a matter of luck there, so it is compared over all shapes.
    alike = dtype != torch.float32 or "AVX512" in torch.backends.cpu.get_cpu_capability()
    greatest, greatest_plain = 0.0, 0.0
    for rows, inputs, outputs in shapes(8):
        x, weight, bias = example(rows, inputs, outputs, dtype)
        exact = F.linear(x.double(), weight.double(), bias.double())
        plain = F.linear(x, weight, bias)
        weights = DenseWeights(weight, bias)
        weights.pack()
        actual = weights.multiply(x, dtype)
        if alike:
            assert error(actual, exact) <= 2 * error(plain, exact) + 1e-6
        assert mean_error(actual, exact) <= 2 * mean_error(plain, exact) + 1e-6
        greatest, greatest_plain = max(greatest, error(actual, exact)), max(greatest_plain, error(plain, exact))
        assert torch.equal(weights.dense(), weight)
    assert greatest <= 2 * greatest_plain + 1e-6


def test_onednn_holds_one_copy_unless_the_weight_is_a_table():
    weight = torch.randn(64, 32)
    for table in (False, True):
        weights = DenseWeights(weight.clone(), None, table=table)
        weights.pack()
        assert weights.num_bytes == weight.nbytes * (2 if table and weights.kernels == "onednn" else 1)
    assert torch.equal(weights.rows(torch.tensor([5, 5, 0])), weight[[5, 5, 0]])


# ---------------------------------------------------------------------------------------------------------------- int8


def test_int8_rounds_to_half_a_step_and_meets_zero_exactly():
    x = torch.randn(50, 100) * torch.logspace(-20, 20, 50)[:, None]
    x[:, 7] = 0
    q, scale, zero = quantize_run(x)
    back = (q.float() - zero[:, None]) * scale[:, None]
    # The zero is rounded too, so that an extreme may be half a step further away.
    assert ((back - x).abs() <= 1.001 * scale[:, None]).all() and (back[:, 7] == 0).all()
    q, scale = quantize_weight(x)
    assert ((q * scale[:, None] - x).abs() <= 0.501 * scale[:, None]).all()


@pytest.mark.parametrize("value", [0.0, 1e-32, 5.0, -5.0, 1e-20])
def test_int8_of_a_constant_row_is_exact(value):
    q, scale, zero = quantize_run(torch.full((2, 64), value))
    back = (q.float() - zero[:, None]) * scale[:, None]
    torch.testing.assert_close(back, torch.full((2, 64), value if abs(value) > 1e-30 else 0.0), rtol=1e-6, atol=0)


@each_float
def test_int8_in_pytorch_computes_what_it_says(dtype):
    x, weight, bias = example(7, 300, 20, dtype)
    weights = filled(Int8Weights(20, 300, dtype=dtype, bias=True), weight, bias)
    exact = bias.double()
    for run, part in zip(x.split(INT8_RUN, dim=1), weight.split(INT8_RUN, dim=1)):
        q, scale, zero = quantize_run(run)
        q_weight, scale_weight = quantize_weight(part)
        rounded = (q.double() - zero[:, None]) * scale[:, None]
        exact = exact + F.linear(rounded, q_weight.double() * scale_weight[:, None].double())
    torch.testing.assert_close(weights.multiply(x, torch.float32).double(), exact, rtol=1e-5, atol=1e-4)


def extremes(x: torch.Tensor) -> torch.Tensor:
    """x with rows of zeros, constants, outliers, one sign, and tiny and huge values."""
    x[0] = 0
    x[1] = 3
    x[2] = -3
    x[3, 5] = 1000
    x[4].abs_()
    x[5] *= 1e-25
    x[6] *= 1e25
    x[7] = 1e-35
    return x


@native
@each_level
@each_float
def test_native_int8_is_its_twin(level, dtype):
    for rows, inputs, outputs in shapes(15):
        x, weight, bias = example(rows, inputs, outputs, dtype)
        if rows > 8 and inputs > 5:
            x = extremes(x)
            weight[0] = 0
        twin = filled(Int8Weights(outputs, inputs, dtype=dtype, bias=True), weight, bias)
        weights = packed(weight, bias, level=level, int8=True)
        assert torch.equal(weights.dense(), twin.dense())
        expected = twin.multiply(x, torch.float32)
        bound = 1e-5 * expected.abs().amax(dim=1, keepdim=True)
        assert ((weights.multiply(x, torch.float32) - expected).abs() <= bound).all(), (rows, inputs, outputs)


def steep(rows: int, inputs: int) -> torch.Tensor:
    """Rows whose neighbours add up to as much as they can: constant, alternating, of few values, and of one odd item."""
    x = torch.randint(-1, 2, (rows, inputs)).float() * (1 - 1e-7)
    x[0], x[1] = 1, -1
    x[2, ::2], x[2, 1::2] = 1, -1
    x[3, :2], x[3, 2:] = 127, 64.5
    x[4], x[4, -1] = 0.5, 1
    return x


def test_two_neighbouring_int8_weights_add_up_to_at_most_128():
    for weight in (steep(40, 192), torch.randn(4000, 192), torch.rand(4000, 192), steep(40, 7)):
        q, _scale = quantize_weight(weight)
        assert F.pad(q, (0, q.shape[1] % 2)).int().unflatten(1, (-1, 2)).sum(dim=2).abs().max() <= 128
        assert q.abs().max() <= 127


@native
@each_level
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_the_greatest_int8_sums_do_not_overflow(level, rows):
    x, weight = steep(40, 400)[:rows] + 0.01, steep(40, 400)
    twin = filled(Int8Weights(40, 400, dtype=torch.float32), weight, None)
    weights = packed(weight, None, level=level, int8=True)
    assert torch.equal(weights.dense(), twin.dense())
    expected = twin.multiply(x, torch.float32)
    torch.testing.assert_close(weights.multiply(x, torch.float32), expected, rtol=1e-5, atol=1e-3)


@native
def test_int8_takes_a_quarter_of_float32s_memory():
    whole, quarter = (packed(torch.randn(512, 1024), None, int8=int8).num_bytes for int8 in (False, True))
    assert quarter < 0.27 * whole


# -------------------------------------------------------------------------------------------------------------- Linear


def linear(library, *, transposed: bool = False, bias: bool = True, **options) -> Linear:
    return Linear.empty(24, {"q": 10, "k": 6}, bias=bias, transposed=transposed, device=CPU, native=library, **options)


@pytest.mark.parametrize("library", [LIBRARY, None], ids=["native", "torch"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("quantization", [None, "int8"])
@each_float
def test_parts_are_filled_and_read_back(library, transposed, quantization, dtype):
    layer = linear(library, transposed=transposed, dtype=dtype, quantization=quantization)
    q, k, bias = torch.randn(10, 24), torch.randn(6, 24), torch.randn(16)
    stored = {"q.weight": q, "k.weight": k, "q.bias": bias[:10], "k.bias": bias[10:]}
    for name, part in layer.tensors():
        value = stored[name].T if transposed and name.endswith("weight") else stored[name]
        assert tuple(part.shape) == tuple(value.shape)
        if isinstance(part, PackedPart):
            part.fill((slice(i, i + 3), value[i : i + 3].clone()) for i in range(0, len(value), 3))
        else:
            part.copy_(value)
    layer.finish()
    tolerance = 0.02 if quantization else 0.01 if dtype == torch.bfloat16 else 0
    back = dict(layer.tensors())
    assert torch.allclose(back["k.weight"].float(), k.T if transposed else k, rtol=tolerance, atol=tolerance)
    x = torch.randn(5, 24)
    expected = F.linear(x, torch.cat([q, k]), bias)
    assert torch.allclose(layer(x.to(dtype)).float(), expected, rtol=0.05, atol=max(0.2 * bool(tolerance), 1e-5))
    assert layer(x.to(dtype)).dtype == dtype and layer(x.to(dtype), dtype=torch.float32).dtype == torch.float32


def test_float16_runs_in_pytorch():
    assert linear(LIBRARY, dtype=torch.float16).weights.kernels == "torch"


def test_an_unknown_quantization_is_refused():
    with pytest.raises(UnsupportedFeature, match="'int3' is not supported; use 'int8'"):
        linear(LIBRARY, dtype=torch.float32, quantization="int3")


def test_int8_on_another_device_is_refused():
    with pytest.raises(UnsupportedFeature, match="runs on a CPU only, not on meta"):
        Linear.empty(8, {"a": 8}, dtype=torch.float32, device=torch.device("meta"), quantization="int8")


@pytest.mark.parametrize(
    ("levels", "features", "expected"),
    [
        (("generic", "avx2"), {}, torch.float32),
        (("generic", "avx2", "avx512"), {"avx512_bf16": False}, torch.float32),
        (("generic", "avx2", "avx512", "avx512_bf16"), {}, torch.bfloat16),
        (None, {}, torch.float32),
        (None, {"amx_bf16": True}, torch.bfloat16),
    ],
)
def test_the_preferred_dtype_of_a_cpu_is_one_that_it_multiplies(levels, features, expected, monkeypatch):
    library = None if levels is None else SimpleNamespace(levels=levels)
    monkeypatch.setattr("openengine.ops.linear.native_library", lambda: library)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: features, raising=False)
    assert preferred_dtype(CPU) == expected


@native
@pytest.mark.parametrize(
    "out", [torch.empty(2, 8), torch.empty(4, 9), torch.empty(4, 8).bfloat16(), torch.empty(8, 4).T]
)
def test_a_product_is_written_only_where_it_has_room(out):
    with pytest.raises(AssertionError, match="out must"):
        packed(torch.randn(8, 16), None).multiply(torch.randn(3, 16), torch.float32, out=out)


# ---------------------------------------------------------------------------------------------------------- whole models


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("variant", ["bfloat16", "int8, bfloat16 activations"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_predicts_nearly_the_same_in_bfloat16_and_int8(tmp_path, family, variant, kernels):
    path = str(write_checkpoint(tmp_path, family, tokenizer=False))
    ids = torch.randint(VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1))
    reference = log_probs(path, ids, dtype=torch.float32, quantization=None, kernels="torch")
    dtype, quantization = VARIANTS[variant]
    actual = log_probs(path, ids, dtype=dtype, quantization=quantization, kernels=kernels)
    spread = reference.std(dim=1).mean()
    assert (actual - reference).abs().mean() < 0.05 * spread
