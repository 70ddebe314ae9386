"""`GuideState`: one sequence under its guide, and which tokens that leaves it.

Owns what is added to the backend's masks: where an output may end, and tokens that must come. Where a guide leaves only
one text to come, its tokens are those that the tokenizer writes for that text: no others are legal, so that appending
them at once (`GuideState.forced`) gives what drawing them one by one would.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from openengine.core.guides.backend import plain_error, says_illegal
from openengine.core.guides.work import StepTime
from openengine.errors import InternalError, InvalidArgument

__all__ = ["GuideState"]

_SLOW_MASK_S = 0.005
_FIX = "let alternatives begin with different characters, and use no rules that repeat themselves on both sides"


class GuideState:
    """One sequence under its guide. Owned by the loop thread.

    error: why the guide can no longer be followed; None while all is well.
    has_slow_masks: its last mask took so long that the time of the next is of interest too.
    forced: the tokens that must come next, whatever the logits, in reverse; usually none. While there are any, the first
    of them is the only legal token.
    """

    __slots__ = (
        "_all_ends",
        "_ends",
        "_eos_token_ids",
        "_held_eos",
        "_stop_token_ids",
        "_time",
        "error",
        "forced",
        "has_slow_masks",
        "matcher",
    )

    def __init__(
        self,
        matcher: Any,
        eos_token_ids: frozenset[int],
        stop_token_ids: Iterable[int],
        *,
        vocab_size: int,
        ignore_eos: bool,
    ) -> None:
        self.matcher = matcher
        self.error: str | None = None
        self.has_slow_masks = False
        self._time = StepTime()
        self._eos_token_ids = eos_token_ids
        self._stop_token_ids = frozenset(token for token in stop_token_ids if token < vocab_size) - eos_token_ids
        self._ends = _Bits(self._stop_token_ids)
        self._all_ends = _Bits(self._stop_token_ids | eos_token_ids)
        self._held_eos = _Bits(eos_token_ids) if ignore_eos else None
        self.forced = self._find_forced()

    @property
    def may_end(self) -> bool:
        """Whether the output so far is complete under the guide."""
        return self.matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Whether the output is complete and nothing may be added to it: only an end may be drawn."""
        return self.matcher.is_stopped() and self.matcher.is_accepting()

    @staticmethod
    def exhausted(error: str) -> InvalidArgument:
        """What to raise when the backend gives up in the middle of an output."""
        return InvalidArgument(
            f"the guide cannot be followed any further after what was written so far: {error}. Simplify the guide or lower "
            "max_tokens"
        )

    def accept(self, token: int) -> None:
        """Take note of a drawn token.

        Raises InvalidArgument when the guide cannot be followed any further, or takes too long; InternalError when it does
        not allow the token.
        """
        began = time.thread_time()
        self._follow(token)
        if self._time.next_token(time.thread_time() - began):
            self._note_time_error()
            raise self.exhausted(self.error)

    def replay(self, tokens: Iterable[int]) -> None:
        """Take note of tokens that were drawn before. What they took was counted then. Raises as `accept`."""
        for token in tokens:
            self._follow(token)

    def _follow(self, token: int) -> None:
        is_end = token in self._eos_token_ids or token in self._stop_token_ids
        if is_end and self.may_end:
            return
        if is_end or not self.matcher.consume_token(token):
            error = self.matcher.get_error()
            self.error = plain_error(error) or "it ends the output too early"
            if error and not says_illegal(error):
                raise self.exhausted(self.error)
            raise InternalError(f"token {token} is not legal under the guide: {self.error}")
        if self.forced and self.forced[-1] == token:
            self.forced.pop()
            if self.forced:
                return
        # Only where those found before are used up, so that they are the same however they are taken.
        self.forced = self._find_forced()

    def note_mask_time(self, seconds: float) -> None:
        """Take note of the CPU time of a mask."""
        self.has_slow_masks = seconds > _SLOW_MASK_S
        self._time.spend(seconds)

    def _note_time_error(self) -> None:
        if (error := self._time.error) is not None:
            self.error = f"{error}; what was written may be read in ever more ways: {_FIX}"

    def _find_forced(self) -> list[int]:
        """The tokens that must come next, the last one first; none from a stop id on."""
        tokens = self.matcher.compute_ff_tokens()
        if tokens and self._stop_token_ids:
            # A stop id does not go on with the text; it must be written with other tokens.
            at = next((at for at, token in enumerate(tokens) if token in self._stop_token_ids), len(tokens))
            tokens = tokens[:at]
        return tokens[::-1]

    def copy(self) -> GuideState:
        """An independent state at the same place."""
        twin = object.__new__(GuideState)
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.matcher, twin.forced, twin._time = self.matcher.deep_copy(), self.forced.copy(), self._time.copy()
        return twin

    def forbid_ends(self, row: np.ndarray) -> None:
        """Take EOS and the stop ids out of a mask row i32[ceil(V / 32)]."""
        self._all_ends.clear_in(row)

    def finish_mask(self, row: np.ndarray) -> bool:
        """Put forced tokens and ends right in a mask row i32[ceil(V / 32)]; returns whether only ends are left in it."""
        if self.matcher.is_error():
            self.error = plain_error(self.matcher.get_error())
        self._note_time_error()
        if self.error is not None:
            row[:] = 0
            return False
        if self.forced:
            row[:] = 0
            _Bits(self.forced[-1:]).set_in(row)
            return False
        may_end = self.may_end
        # Not `is_complete`: the matcher may learn only from a next token that there is none.
        is_complete = may_end and not self._all_ends.others_in(row)
        if may_end:
            self._ends.set_in(row)
        else:
            self._ends.clear_in(row)
        if self._held_eos is not None and not is_complete:
            self._held_eos.clear_in(row)
        return is_complete


class _Bits:
    """Some tokens, to be set or cleared in mask rows i32[ceil(V / 32)]."""

    __slots__ = ("_bits", "_words")

    def __init__(self, tokens: Iterable[int]) -> None:
        words: dict[int, int] = {}
        for token in tokens:
            words[token // 32] = words.get(token // 32, 0) | 1 << token % 32
        self._words = np.array(list(words), np.int64)
        self._bits = np.array(list(words.values()), np.uint32).view(np.int32)

    def set_in(self, row: np.ndarray) -> None:
        if len(self._words):
            row[self._words] |= self._bits

    def others_in(self, row: np.ndarray) -> bool:
        """Whether `row` holds any other token."""
        own = row[self._words]
        held = np.count_nonzero(row) - np.count_nonzero(own)
        return bool(held or (own & ~self._bits).any())

    def clear_in(self, row: np.ndarray) -> None:
        if len(self._words):
            row[self._words] &= ~self._bits
