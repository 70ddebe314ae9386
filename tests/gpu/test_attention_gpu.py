from __future__ import annotations

import importlib.util

import pytest
import torch

from openengine.ops.attention import select_backend
from tests.ops.ragged import Sequences

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIXED = ([1, 1, 1, 1, 5, 40, 33, 200], [1, 77, 300, 255, 5, 40, 550, 200])
DECODES = ([1] * 4, [255, 256, 257, 700])
FLASH = pytest.param(
    "flash", marks=pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn")
)


@pytest.mark.parametrize("kernels", ["torch", FLASH])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lens", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (64, None), (None, 5.0)])
def test_half_precision_errs_at_most_twice_as_much_as_plain_pytorch(kernels, dtype, lens, window, softcap):
    case = Sequences(*lens, dtype=dtype, device="cuda", window=window, softcap=softcap)
    expected, plain = case.expected(), case.expected(dtype).float()
    actual = case.attend(select_backend(torch.device("cuda"), dtype, kernels), 256).float()
    assert (actual - expected).abs().max() <= 2 * (plain - expected).abs().max()


@pytest.mark.parametrize("lens", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize("window", [None, 1, 64])
def test_float32_matches_the_oracle(monkeypatch, lens, window):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    case = Sequences(*lens, device="cuda", window=window)
    actual = case.attend(select_backend(torch.device("cuda"), torch.float32, "auto"), 32)
    torch.testing.assert_close(actual, case.expected(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", ["torch", FLASH])
def test_slots_nobody_wrote_never_matter(kernels):
    case = Sequences(*MIXED, dtype=torch.bfloat16, device="cuda", window=100)
    backend = select_backend(torch.device("cuda"), torch.bfloat16, kernels)
    dirty, clean = (case.attend(backend, 256, fill=x) for x in (torch.nan, 0.0))
    assert torch.equal(dirty, clean)
