"""`CompiledGuide`: a guide ready for use. Owns its grammar; does not own the state of any one sequence (state.py)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from openengine.core.guides.backend import Backend, first_line
from openengine.core.guides.state import GuideState
from openengine.errors import InvalidArgument
from openengine.types import GuidedDecoding

if TYPE_CHECKING:
    from openengine.core.guides.compiler import GuideCompiler

__all__ = ["CompiledGuide"]


class CompiledGuide(GuidedDecoding):
    """A guide ready for use, and usable wherever the guide is that it was compiled from. Safe to use from many threads.

    `source` is that guide, which holds on to nothing. `compiler` is the one that made it; another refuses it.
    """

    __slots__ = ("_backend", "_grammar", "_judge", "_prototype", "compiler", "source")

    def __init__(self, guide: GuidedDecoding, compiler: GuideCompiler, backend: Backend, grammar: str) -> None:
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
        return copy.copy, (self.source,)

    def accepts(self, text: str) -> bool:
        """Whether `text` is a complete output under the guide. Raises InvalidArgument if that is too hard to tell."""
        matcher = self._after(text)
        return matcher is not None and matcher.is_accepting()

    def accepts_prefix(self, text: str) -> bool:
        """Whether `text` is the beginning of an output under the guide. Raises as `accepts`."""
        return self._after(text) is not None

    def _after(self, text: str) -> Any:
        try:
            data = list(text.encode())
        except UnicodeEncodeError:
            return None  # a lone surrogate, which no output holds
        if self._judge is None:
            self._set("_judge", self.compiler.in_worker(self._backend.byte_matcher, self._grammar))
        matcher = self._judge.deep_copy()
        taken = matcher.validate_tokens(data)
        if taken == len(data):
            matcher.consume_tokens(data)
        if matcher.is_error():
            raise InvalidArgument(
                f"the text is too complex to judge under this guide: {first_line(matcher.get_error())}"
            )
        return matcher if taken == len(data) else None

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
            vocab_size=self.compiler.vocab_size,
            ignore_eos=ignore_eos,
        )
        for token in token_ids:
            state.accept(token)
        return state

    def leaves_token(self, state: GuideState, *, min_tokens_left: bool = False) -> bool:
        """Whether any token may be drawn in `state`. `min_tokens_left`: no end may be, unless the guide is complete."""
        row = np.empty((1, -(-self.compiler.vocab_size // 32)), np.int32)
        (is_complete,) = self.compiler.fill_masks([state], row)
        if min_tokens_left and not is_complete:
            state.forbid_ends(row[0])
        return bool(np.unpackbits(row.view(np.uint8), count=self.compiler.vocab_size, bitorder="little").any())
