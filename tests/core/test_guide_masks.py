"""Masks that one step leaves behind are no trouble of the next."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from openengine.core.guide_masks import StepMasks


class Guides:
    """Fails for the state "broken", and allows every token else."""

    vocab_size = 40
    num_steps = 0

    def note_step(self):
        self.num_steps += 1

    def fill_masks(self, states, out):
        if "broken" in states:
            raise RuntimeError("broken")
        out[:] = -1
        return np.zeros(len(states), np.bool_)


def sampled(*states):
    return [SimpleNamespace(guide_state=state) for state in states]


def test_masks_that_failed_fail_their_own_step_only():
    guides = Guides()
    masks = StepMasks(guides, max_rows=4, device=torch.device("cpu"))
    masks.begin(sampled("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        masks.finish()
    masks.begin(sampled("broken"))  # whose forward pass fails, so that nobody takes them
    masks.begin(sampled(None, "fine"))
    mask = masks.finish()
    assert mask.pairs.tolist() == [1] and mask.bits.tolist() == [[-1, -1]]
    masks.begin(sampled("broken"))
    masks.begin(sampled(None))
    assert masks.finish() is None and guides.num_steps == 5, "steps without guides count too"
