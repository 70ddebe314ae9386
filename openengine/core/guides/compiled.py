"""`CompiledGuide`: a guide ready for use. Owns its grammar; does not own the state of any one sequence (state.py)."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, Protocol

import numpy as np

from openengine.core.guides.backend import Backend, BackendRefused, plain_error, says_illegal
from openengine.core.guides.state import GuideState
from openengine.core.guides.work import CompileTimeout, Work
from openengine.errors import InvalidArgument
from openengine.types import GuidedDecoding

__all__ = ["CompiledGuide"]

_FIRST_PIECE = 16  # bytes; few, for what one of them takes is not known yet
_LARGEST_PIECE = 256  # bytes; one in which they turn slow is over soon all the same
_PIECE_S = 0.001  # the backend holds the interpreter that long while it reads a piece of a text


class _Compiler(Protocol):
    """What a compiled guide needs of the compiler that made it."""

    timeout_s: float

    def in_worker(self, function: Callable[..., Any], *args: Any) -> Any: ...


class CompiledGuide(GuidedDecoding):
    """A guide ready for use, and usable wherever the guide is that it was compiled from. Safe to use from many threads.

    `source` is that guide, which holds on to nothing. `compiler` is the one that made it; another refuses it.
    """

    __slots__ = ("_backend", "_grammar", "_judge", "_prototype", "compiler", "source")

    def __init__(self, guide: GuidedDecoding, compiler: _Compiler, backend: Backend, grammar: str) -> None:
        super().__init__(**{field.name: getattr(guide, field.name) for field in fields(GuidedDecoding)})
        self._set("source", guide)
        self._set("compiler", compiler)
        self._set("_backend", backend)
        self._set("_grammar", grammar)
        self._set("_prototype", backend.matcher(grammar))
        self._set("_judge", None)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the values that it is made of are frozen

    def __reduce__(self) -> Any:
        return copy.copy, (self.source,)  # pickled and copied as its source, which holds no threads

    def accepts(self, text: str) -> bool:
        """Whether `text` is a complete output under the guide.

        Raises: InvalidArgument for what is no str, and where that is too hard to tell or takes longer than guide_timeout_s.
        The first text may also raise PreconditionFailed, once the engine is closed, and Overloaded as `compile`.
        """
        matcher = self._after(text)
        return matcher is not None and matcher.is_accepting()

    def accepts_prefix(self, text: str) -> bool:
        """Whether `text` is the beginning of an output under the guide. Raises as `accepts`."""
        return self._after(text) is not None

    def _after(self, text: str) -> Any:
        if not isinstance(text, str):
            hint = "; decode it" if isinstance(text, bytes | bytearray) else ""
            raise InvalidArgument(f"the text must be a str, not {type(text).__name__}{hint}")
        try:
            data = text.encode()
        except UnicodeEncodeError:
            return None  # a lone surrogate, which no output holds
        if self._judge is None:
            try:
                judge = self.compiler.in_worker(self._backend.byte_matcher, self._grammar)
            except BackendRefused as exc:
                raise InvalidArgument(f"texts cannot be judged under this guide: {exc}") from None
            self._set("_judge", judge)
        matcher = self._judge.deep_copy()
        return matcher if self._reads(matcher, data) else None

    def _reads(self, matcher: Any, data: bytes) -> bool:
        """Whether `matcher` can take all of `data`, which it is given in pieces: it may have to find many readings of each."""
        work = Work(self.compiler.timeout_s)
        at, size = 0, _FIRST_PIECE
        while at < len(data):
            try:
                work.take_turns()
            except CompileTimeout:
                raise InvalidArgument(
                    f"judging the text takes longer than guide_timeout_s {self.compiler.timeout_s:g}: {at} of "
                    f"{len(data)} bytes were read; give a shorter text, simplify the guide or raise the limit"
                ) from None
            began = time.monotonic()
            if not matcher.consume_tokens(list(data[at : at + size])):
                error = matcher.get_error()
                if says_illegal(error):
                    return False
                raise InvalidArgument(f"the text is too complex to judge under this guide: {plain_error(error)}")
            at += size
            pieces_per_turn = _PIECE_S / max(time.monotonic() - began, _PIECE_S / 2)
            size = min(max(int(size * pieces_per_turn), 1), _LARGEST_PIECE)
        return True

    def start(
        self, token_ids: Sequence[int] = (), *, stop_token_ids: Iterable[int] = (), ignore_eos: bool = False
    ) -> GuideState:
        """The state of a new sequence, or of one that has produced `token_ids` (after preemption).

        stop_token_ids: ids beside EOS that end the output; they too are illegal until the guide may end.
        ignore_eos: EOS is legal only where nothing else may follow.
        """
        state = GuideState(
            self._prototype.deep_copy(),
            self._backend.eos_token_ids,
            stop_token_ids,
            vocab_size=self._backend.vocab_size,
            ignore_eos=ignore_eos,
        )
        state.replay(token_ids)
        return state

    def leaves_token(self, state: GuideState, *, min_tokens_left: bool = False) -> bool:
        """Whether any token may be drawn in `state`. `min_tokens_left`: no end may be, unless the guide is complete."""
        row = np.empty(self._backend.row_words, np.int32)
        if not state.forced and state.error is None:
            state.note_mask_time(self._backend.fill_one(state.matcher, row))
        is_complete = state.finish_mask(row)
        if min_tokens_left and not is_complete:
            state.forbid_ends(row)
        return bool(np.unpackbits(row.view(np.uint8), count=self._backend.vocab_size, bitorder="little").any())
