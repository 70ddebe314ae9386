"""Guided decoding: guides compiled in worker threads, and the mask of legal tokens of each sequence.

Owns: validating and compiling guides, the cache of compiled ones, the state of a sequence under its guide. Does not own:
what the guides mean (guides/), applying masks (sampler.py), when a sequence ends (the scheduler).

    GuidedDecoding ─ GuideCompiler.submit ─ CompiledGuide ─ start ─ GuideState ─ fill_masks ─▶ i32[S, ceil(V / 32)]
                     (worker, cached)                        (one per sequence)  accept ◀─ drawn token

Where a guide leaves only one text to come, its tokens are those that the tokenizer writes for that text: no others are
legal, so that appending them at once (`GuideState.forced`) gives what drawing them one by one would.

The backend is llguidance, behind guides/backend.py.
"""

from __future__ import annotations

import copy
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from typing import Any, NoReturn

import numpy as np

from openengine.core.guides.backend import (
    MISSING,
    Backend,
    BackendRefused,
    GuideTokenizer,
    first_line,
    import_backend,
    is_installed,
)
from openengine.core.guides.gbnf import add_gbnf
from openengine.core.guides.grammar import Grammar, GrammarTooLarge
from openengine.core.guides.language import TooComplex, is_empty, literal, union
from openengine.core.guides.regex import full_match
from openengine.core.guides.schema_grammar import add_schema
from openengine.core.guides.schema_source import parse_json
from openengine.core.guides.structural_tag import add_structural_tag
from openengine.core.guides.work import CompileTimeout, Work
from openengine.core.guides.workers import Workers
from openengine.errors import InternalError, InvalidArgument, OpenEngineError, PreconditionFailed, UnsupportedFeature
from openengine.types import GuidedDecoding, GuidedDecodingMode

__all__ = ["CompiledGuide", "GuideCompiler", "GuideState", "NoGuides", "guide_compiler"]

_BACKEND = "llguidance"

_MAX_CACHED = 256
_NUM_WORKERS = 2
_BYTES_PER_SOURCE_BYTE = 8  # how much longer than its guide a grammar may be, beyond the first megabyte
_LEAST_GRAMMAR_BYTES = 1 << 20
_KINDS = ("json_schema", "regex", "ebnf_grammar", "structural_tag", "choice", "json_object")


def guide_compiler(
    tokenizer: GuideTokenizer,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    *,
    timeout_s: float,
    max_bytes: int,
) -> GuideCompiler | NoGuides:
    """A compiler, or what refuses every guide where none can work; arguments as for `GuideCompiler`."""
    if not is_installed():
        return NoGuides(MISSING)
    try:
        return GuideCompiler(tokenizer, vocab_size, eos_token_ids, timeout_s=timeout_s, max_bytes=max_bytes)
    except UnsupportedFeature as exc:
        return NoGuides(exc.message)


class NoGuides:
    """In place of a compiler: no guide works, for `reason`."""

    modes: tuple[GuidedDecodingMode, ...] = ()

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def submit(self, guide: GuidedDecoding) -> NoReturn:
        raise UnsupportedFeature(self._reason)

    compile = submit

    def close(self) -> None:
        pass


class GuideCompiler:
    """Compiles guides for one vocabulary. Safe to use from many threads; `close` ends its workers."""

    modes = tuple(GuidedDecodingMode)

    def __init__(
        self,
        tokenizer: GuideTokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        timeout_s: float = 10.0,
        max_bytes: int = 512 * 1024,
    ) -> None:
        """vocab_size: width V of the logits and masks.  timeout_s, max_bytes: limits for one guide."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._eos_token_ids = tuple(sorted({token for token in eos_token_ids if token < vocab_size}))
        if not self._eos_token_ids:
            raise UnsupportedFeature(
                "guided decoding needs an end-of-sequence token, and this model has none; leave the guide out"
            )
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._futures: OrderedDict[GuidedDecoding, Future[CompiledGuide]] = OrderedDict()
        self._workers = Workers(_NUM_WORKERS, name="openengine-guide")
        self._backend_lock = threading.Lock()
        self._backend: Backend | None = None

    def submit(self, guide: GuidedDecoding) -> Future[CompiledGuide]:
        """Compile in a worker thread; the same guide is compiled once. The future raises as `compile` does.

        Raises: InvalidArgument when the guide is malformed on its face, or compiled by another engine; UnsupportedFeature
        when llguidance is missing; PreconditionFailed when the compiler is closed; Overloaded while too many guides that
        took too long still go on.
        """
        self._check_process()
        if isinstance(guide, CompiledGuide):
            return self._own(guide)
        kind, source = _only_guide(guide)
        size = len(source.encode("utf-8", "replace"))
        if size > self._max_bytes:
            raise InvalidArgument(
                f"the guide has {size} bytes, the limit guide_max_bytes is {self._max_bytes}; shorten it or raise the limit"
            )
        import_backend()
        with self._lock:
            shared = self._futures.get(guide)
            is_new = shared is None
            if is_new:
                shared = self._futures[guide] = self._workers.submit(self._compile, guide, kind)
                while len(self._futures) > _MAX_CACHED:
                    self._futures.popitem(last=False)
            self._futures.move_to_end(guide)
        if is_new:
            shared.add_done_callback(lambda done: self._forget_failure(guide, done))
        mine: Future[CompiledGuide] = Future()
        _chain(shared, mine)
        return mine

    def compile(self, guide: GuidedDecoding) -> CompiledGuide:
        """Compile `guide`, or find it in the cache; blocks.

        Raises: InvalidArgument naming the pointer and keyword, position or feature that is malformed or unsupported, or the
        limit that was exceeded; UnsupportedFeature when llguidance is missing.
        """
        return self.submit(guide).result()

    def close(self) -> None:
        """Refuse all guides that are not compiled yet; waits for none of them. Idempotent."""
        self._workers.close()
        with self._lock:
            self._futures.clear()

    def in_worker(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call in a worker thread, which has the stack that the backend needs; within the time of a guide.

        Raises InvalidArgument beyond it.
        """

        def call() -> Any:
            with self._workers.time_limit(self._timeout_s, self._too_long("guide")):
                return function(*args)

        self._check_process()
        return self._workers.submit(call).result()

    def _too_long(self, what: str) -> InvalidArgument:
        return InvalidArgument(
            f"the {what} takes longer than guide_timeout_s {self._timeout_s:g} to compile; simplify it or raise the limit"
        )

    def _check_process(self) -> None:
        # A fork copies neither the workers nor the state of the locks.
        if os.getpid() != self._pid:
            raise PreconditionFailed("this engine was created in another process; create one in each process")

    def _own(self, guide: CompiledGuide) -> Future[CompiledGuide]:
        if guide.compiler is not self:
            raise InvalidArgument(
                "the guide was compiled by another engine, for its tokenizer; compile it with this one"
            )
        done: Future[CompiledGuide] = Future()
        done.set_result(guide)
        return done

    def _forget_failure(self, guide: GuidedDecoding, future: Future[CompiledGuide]) -> None:
        if future.cancelled() or future.exception() is not None:
            with self._lock:
                if self._futures.get(guide) is future:
                    del self._futures[guide]

    def _compile(self, guide: GuidedDecoding, kind: str) -> CompiledGuide:
        backend = self._shared_backend()  # made once, and not of this guide's time
        too_long = self._too_long(f"{kind.replace('_', ' ')} guide")
        with self._workers.time_limit(self._timeout_s, too_long):
            try:
                return self._compile_with(backend, guide, kind)
            except CompileTimeout:
                raise too_long from None
            except OpenEngineError:
                raise
            except Exception as exc:
                raise InternalError(f"compiling the {kind.replace('_', ' ')} guide failed: {exc!r:.200}") from exc

    def _compile_with(self, backend: Backend, guide: GuidedDecoding, kind: str) -> CompiledGuide:
        work = Work(self._timeout_s)
        source = _only_guide(guide)[1]
        grammar = Grammar(max_bytes=_LEAST_GRAMMAR_BYTES + _BYTES_PER_SOURCE_BYTE * len(source))
        what = kind.replace("_", " ")
        try:
            text = grammar.text(_FRONT_ENDS[kind](grammar, guide, work))
            compiled = CompiledGuide(guide, self, backend, text)
            if work.remaining_s < 0:
                raise CompileTimeout
        except (GrammarTooLarge, TooComplex, RecursionError, MemoryError):
            raise InvalidArgument(
                f"the {what} guide is too complex: it is nested too deeply, has too many alternatives, asks for too many "
                "patterns or lookaheads at once, or repeats large repetitions"
            ) from None
        except BackendRefused as exc:
            raise InvalidArgument(f"the {what} guide cannot be compiled: {exc}") from None
        return compiled

    def _shared_backend(self) -> Backend:
        with self._backend_lock:
            if self._backend is None:
                self._backend = Backend(self.tokenizer, self.vocab_size, self._eos_token_ids)
            return self._backend

    def fill_masks(self, states: Sequence[GuideState | None], out: np.ndarray) -> np.ndarray:
        """Write the legal tokens of each state into its row, in parallel.

        states: one per row, None where every token is legal.  out: i32[S, ceil(V / 32)], contiguous, overwritten; bit
        t % 32 of word t // 32 allows token t. Returns bool[S], where the guide is complete: only tokens that end are legal.

        Raises nothing for a state that fails (its guide turned out too complex): `state.error` says so, its row is empty.
        """
        assert out.dtype == np.int32 and out.shape == (len(states), -(-self.vocab_size // 32)), out.shape
        assert self._backend is not None, "a state comes from a compiled guide"
        live = [(row, state) for row, state in enumerate(states) if state is not None]
        out[[row for row, state in enumerate(states) if state is None]] = -1
        self._backend.fill([(state.matcher, row) for row, state in live if not state.forced], out)
        complete = np.zeros(len(states), np.bool_)
        for row, state in live:
            complete[row] = state.finish_mask(out[row])
        return complete


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


class GuideState:
    """One sequence under its guide. Owned by the loop thread.

    error: why the guide can no longer be followed; None while all is well.
    forced: the tokens that must come next, whatever the logits, in reverse; usually none. While there are any, the first
    of them is the only legal token.
    """

    __slots__ = ("_all_ends", "_ends", "_eos_token_ids", "_held_eos", "_stop_token_ids", "error", "forced", "matcher")

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

    def accept(self, token: int) -> None:
        """Take note of a drawn token. Raises InternalError when the guide does not allow it."""
        is_end = token in self._eos_token_ids or token in self._stop_token_ids
        if is_end and self.may_end:
            return
        if is_end or not self.matcher.consume_token(token):
            self.error = first_line(self.matcher.get_error()) or "it ends the output too early"
            raise InternalError(f"token {token} is not legal under the guide: {self.error}")
        if self.forced and self.forced[-1] == token:
            self.forced.pop()
            if self.forced:
                return
        self.forced = self._find_forced()

    def _find_forced(self) -> list[int]:
        """Looked for only where the tokens found before are used up, so that they are the same however they are taken."""
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
        twin.matcher, twin.forced = self.matcher.deep_copy(), self.forced.copy()
        return twin

    def forbid_ends(self, row: np.ndarray) -> None:
        """Take EOS and the stop ids out of a mask row i32[ceil(V / 32)]."""
        self._all_ends.clear_in(row)

    def finish_mask(self, row: np.ndarray) -> bool:
        """Put forced tokens and ends right in a mask row i32[ceil(V / 32)]; returns whether only ends are left in it."""
        if self.matcher.is_error():
            self.error = first_line(self.matcher.get_error())
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


# ---- validation and front ends ---------------------------------------------------------------------


def _only_guide(guide: GuidedDecoding) -> tuple[str, str]:
    """Which guide it is, and its source. Raises InvalidArgument unless there is exactly one that is well formed."""
    if guide.backend not in ("", _BACKEND):
        raise InvalidArgument(f"guided.backend {guide.backend!r:.60} is not known; leave it empty or use {_BACKEND!r}")
    given = [kind for kind in _KINDS if getattr(guide, kind) is not None]
    if len(given) != 1:
        named = ", ".join(given) if given else "none"
        raise InvalidArgument(f"guided needs exactly one of {', '.join(_KINDS)}; given: {named}")
    (kind,) = given
    if kind == "choice":
        return kind, "".join(_checked_choices(guide.choice.choices))
    return kind, "" if kind == "json_object" else _checked_text(getattr(guide, kind), kind)


def _checked_choices(choices: Sequence[str]) -> Sequence[str]:
    if not choices:
        raise InvalidArgument("guided.choice.choices is empty; give at least one text")
    seen: set[str] = set()
    for index, choice in enumerate(choices):
        if not _checked_text(choice, f"choice.choices[{index}]"):
            raise InvalidArgument(f"guided.choice.choices[{index}] is empty; a choice has at least one character")
        if choice in seen:
            raise InvalidArgument(f"guided.choice.choices[{index}] {choice!r:.60} is there twice")
        seen.add(choice)
    return choices


def _checked_text(text: object, name: str) -> str:
    if not isinstance(text, str):
        hint = f"; use json.dumps, or the keyword {name}=, which takes a dict" if isinstance(text, Mapping) else ""
        raise InvalidArgument(f"guided.{name} must be a string, not {type(text).__name__}{hint}")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidArgument(
            f"guided.{name} holds a lone surrogate at position {exc.start}, which is no character"
        ) from None
    return text


def _add_json_schema(grammar: Grammar, guide: GuidedDecoding, work: Work) -> str:
    return add_schema(grammar, parse_json(guide.json_schema, "the JSON schema"), work).symbol


def _add_regex(grammar: Grammar, guide: GuidedDecoding, work: Work) -> str:
    language = full_match(guide.regex)
    if is_empty(language, work):
        hint = (
            "; a lookahead or anchor in it excludes everything"
            if any(mark in guide.regex for mark in ("(?", "^", "$"))
            else ""
        )
        raise InvalidArgument(f"the regular expression {guide.regex!r:.80} matches no text{hint}")
    return grammar.symbol(language)


_FRONT_ENDS: dict[str, Callable[[Grammar, GuidedDecoding, Work], str]] = {
    "json_schema": _add_json_schema,
    "regex": _add_regex,
    "ebnf_grammar": lambda grammar, guide, work: add_gbnf(grammar, guide.ebnf_grammar, work),
    "structural_tag": lambda grammar, guide, work: add_structural_tag(grammar, guide.structural_tag, work),
    "choice": lambda grammar, guide, _: grammar.symbol(union(*map(literal, guide.choice.choices))),
    "json_object": lambda grammar, _, work: add_schema(grammar, {"type": "object"}, work).symbol,
}


def _chain(source: Future[CompiledGuide], target: Future[CompiledGuide]) -> None:
    """Give `target`, which its owner may cancel, the outcome of `source`, which others wait for too."""

    def pass_on(done: Future[CompiledGuide]) -> None:
        if not target.set_running_or_notify_cancel():
            return
        if done.cancelled():
            target.set_exception(PreconditionFailed("the engine is closed; create a new Engine"))
        elif (error := done.exception()) is not None:
            target.set_exception(error)
        else:
            target.set_result(done.result())

    source.add_done_callback(pass_on)
