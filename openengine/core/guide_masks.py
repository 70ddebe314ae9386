"""`StepMasks`: which tokens the guides of a step's outputs allow, found while the model computes.

Owns: the buffer of masks and the thread that fills it beside the loop's. Does not own: guides and their states (guides/),
applying masks (sampler.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch

from openengine.core.guides.compiler import GuideCompiler
from openengine.core.sampler import GuideMask
from openengine.core.sequence import Sequence

__all__ = ["StepMasks"]


class StepMasks:
    """Masks of one step at a time. Called by the loop thread: `begin` before the forward pass, `finish` after it.

    max_rows: outputs sampled in one step.  device: where the sampler wants the masks.
    """

    def __init__(self, guides: GuideCompiler, *, max_rows: int, device: torch.device) -> None:
        self._guides = guides
        self._device = device
        self._buffer = np.empty((max_rows, -(-guides.vocab_size // 32)), np.int32)  # touched as far as it is used
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="openengine-masks")  # ended by `close`
        self._pairs = np.empty(0, np.int64)
        self._filling: Future[np.ndarray] | None = None

    def begin(self, sampled: Iterable[Sequence]) -> None:
        """Start on the masks of the outputs that will be sampled, in the order of their pairs."""
        self._guides.note_step()
        if self._filling is not None:  # left by a forward pass that failed; how it ended is not this step's business
            wait([self._filling])
            self._filling = None
        guided = [(pair, seq.guide_state) for pair, seq in enumerate(sampled) if seq.guide_state is not None]
        if guided:
            self._pairs = np.array([pair for pair, _ in guided], np.int64)
            states = [state for _, state in guided]
            self._filling = self._thread.submit(self._guides.fill_masks, states, self._buffer[: len(states)])

    def finish(self) -> GuideMask | None:
        """The masks, which the next `begin` overwrites; None where no output has a guide."""
        filling, self._filling = self._filling, None
        if filling is None:
            return None
        complete = filling.result()
        bits = torch.from_numpy(self._buffer[: len(self._pairs)]).to(self._device)
        return GuideMask(self._pairs, bits, complete)

    def close(self) -> None:
        """End the thread, after the masks that it is filling."""
        self._thread.shutdown()
