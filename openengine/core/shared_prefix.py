"""`SharedPrefix`: what the items of one query begin with, computed once and given to all of them, to the token.

The prefix cache shares whole blocks of full prompts. Candidates of a query differ right after it, mostly within a block:

    query            |████|████|██··|          held for the items that have not started, once the first has computed it
    a candidate      |████|████|██cc|cccc|     shares the full blocks, begins with a copy of the last one

Owns the references that keep these blocks until the last item has started, or until memory is short. Does not own when
blocks are copied (a step plan says it) nor the blocks (blocks.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from openengine.core.blocks import BlockManager

if TYPE_CHECKING:
    from openengine.core.sequence import Sequence

__all__ = ["PrefixHolds", "SharedPrefix"]


@dataclass(slots=True, eq=False)
class SharedPrefix:
    """`length` tokens that `num_pending` items still begin with. `leader` computes them; `block_ids` hold them after that."""

    length: int
    num_pending: int = 0
    leader: Sequence | None = None
    block_ids: list[int] = field(default_factory=list)


class PrefixHolds:
    """Holds prefixes in `blocks`. Used by the scheduler alone."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._held: list[SharedPrefix] = []

    def is_awaited(self, seq: Sequence) -> bool:
        """Whether another item is about to compute what `seq` begins with."""
        prefix = seq.shared
        if prefix is None or prefix.block_ids or prefix.leader is None:
            return False
        return prefix.leader is not seq and not prefix.leader.is_finished

    def find(self, seq: Sequence, num_matched: int) -> SharedPrefix | None:
        """The held prefix of `seq`, if it has more tokens than the prefix cache matched."""
        prefix = seq.shared
        return prefix if prefix is not None and prefix.block_ids and prefix.length > num_matched else None

    def begin(self, seq: Sequence) -> None:
        """`seq` starts for the first time."""
        prefix = seq.shared
        if prefix is not None:
            prefix.num_pending -= 1
            if prefix.leader is None or prefix.leader.is_finished:
                prefix.leader = seq

    def hold(self, seq: Sequence) -> None:
        """Keep what `seq` has computed of its prefix, if that is all of it and somebody waits for it."""
        prefix = seq.shared
        if prefix is None or prefix.block_ids or not prefix.num_pending or seq.num_computed < prefix.length:
            return
        block_ids = seq.block_ids[: -(-prefix.length // self._blocks.block_size)]
        self._blocks.fork(block_ids)
        prefix.block_ids = block_ids
        self._held.append(prefix)

    def skip(self, seq: Sequence) -> None:
        """`seq` ends and never started."""
        if seq.shared is not None:
            seq.shared.num_pending -= 1

    def release(self, *, everything: bool = False) -> bool:
        """Give back what nobody waits for any more, or `everything`; whether there was any."""
        spent = [prefix for prefix in self._held if everything or not prefix.num_pending]
        for prefix in spent:
            self._blocks.release(prefix.block_ids)
            prefix.block_ids = []
        if spent:
            self._held = [prefix for prefix in self._held if prefix.block_ids]
        return bool(spent)

    def references(self) -> Counter[int]:
        """How often each block is held; for tests."""
        return Counter(block_id for prefix in self._held for block_id in prefix.block_ids)
