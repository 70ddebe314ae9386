"""Pooling against the definition, written for one item at a time in float64."""

from __future__ import annotations

import pytest
import torch

from openengine.ops.pooling import POOLING_MODES, edge_rows, pool

LENS = [1, 7, 2, 512, 1, 33]
SKIPPED = [0, 3, 1, 0, 0, 32]


def oracle(rows: torch.Tensor, mode: str, skip: int) -> torch.Tensor:
    rows = rows.double()
    counted = rows[skip:]
    weights = torch.arange(1, len(rows) + 1)[skip:, None].double()
    return {
        "cls": counted[0],
        "last": counted[-1],
        "max": counted.max(0).values,
        "mean": counted.mean(0),
        "mean_sqrt_len": counted.sum(0) / len(counted) ** 0.5,
        "weightedmean": (counted * weights).sum(0) / weights.sum(),
    }[mode]


def rows(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(sum(LENS), 48, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("skipped", [None, SKIPPED])
@pytest.mark.parametrize("mode", POOLING_MODES)
def test_each_mode_is_its_definition(mode, skipped, dtype):
    hidden = rows(dtype)
    expected = [oracle(*args) for args in zip(hidden.split(LENS), [mode] * len(LENS), skipped or [0] * len(LENS))]
    result = pool(hidden, LENS, (mode,), skipped=skipped)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), torch.stack(expected), rtol=1e-5, atol=1e-6)


def test_several_modes_stand_side_by_side_in_their_order():
    hidden = rows()
    modes = ("mean", "cls", "max", "mean_sqrt_len", "last", "weightedmean")
    joined = pool(hidden, LENS, modes)
    assert torch.equal(joined, torch.cat([pool(hidden, LENS, (mode,)) for mode in modes], 1))


@pytest.mark.parametrize("mode", POOLING_MODES)
def test_tsk_20_an_items_vector_does_not_depend_on_what_stands_beside_it(mode):
    hidden = rows()
    together = pool(hidden, LENS, (mode,), skipped=SKIPPED)
    alone = [pool(part, [n], (mode,), skipped=[skip]) for part, n, skip in zip(hidden.split(LENS), LENS, SKIPPED)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("mode", POOLING_MODES)
def test_an_item_that_is_all_prompt_still_has_a_vector_of_its_last_row(mode):
    hidden = rows()[:5]
    result = pool(hidden, [2, 3], (mode,), skipped=[2, 9])
    torch.testing.assert_close(result, hidden[[1, 4]])


def test_edge_rows_are_the_first_and_the_last_of_each_item():
    assert edge_rows([2, 1, 3], last=False) == [0, 2, 3]
    assert edge_rows([2, 1, 3], last=True) == [1, 2, 5]
