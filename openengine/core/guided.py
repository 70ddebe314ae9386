"""Guided decoding: guides compiled in worker threads, and the mask of legal tokens of each sequence.

Owns: validating and compiling guides, the cache of compiled ones, the state of a sequence under its guide. Does not own:
what the guides mean (guides/), applying masks (sampler.py), when a sequence ends (the scheduler).

    GuidedDecoding ─ GuideCompiler.submit ─ CompiledGuide ─ start ─ GuideState ─ fill_masks ─▶ i32[S, ceil(V / 32)]
                     (worker, cached)                        (one per sequence)  accept ◀─ drawn token

The backend is llguidance, behind guides/backend.py.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from openengine.core.guides.backend import Backend, BackendRefused, GuideTokenizer, first_line, import_backend
from openengine.core.guides.gbnf import add_gbnf
from openengine.core.guides.grammar import Grammar, GrammarTooLarge
from openengine.core.guides.language import TooComplex, is_empty, literal, union
from openengine.core.guides.regex import full_match
from openengine.core.guides.schema_grammar import add_schema
from openengine.core.guides.schema_source import parse_json
from openengine.core.guides.structural_tag import add_structural_tag
from openengine.core.guides.work import CompileTimeout, Work
from openengine.errors import InternalError, InvalidArgument, UnsupportedFeature
from openengine.types import GuidedDecoding

__all__ = ["CompiledGuide", "GuideCompiler", "GuideState"]

BACKEND = "llguidance"

_MAX_CACHED = 256
_STACK_BYTES = 64 << 20
_stack_size_lock = threading.Lock()  # the size is the process's, so whoever changes it for a moment takes turns
_NUM_WORKERS = 2
_BYTES_PER_SOURCE_BYTE = 8  # how much longer than its guide a grammar may be, beyond the first megabyte
_LEAST_GRAMMAR_BYTES = 1 << 20
_KINDS = ("json_schema", "regex", "ebnf_grammar", "structural_tag", "choice", "json_object")


class GuideCompiler:
    """Compiles guides for one vocabulary. Safe to use from many threads; `close` ends its workers."""

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
            raise UnsupportedFeature("guided decoding needs an end-of-sequence token, and this model has none")
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._futures: OrderedDict[GuidedDecoding, Future[CompiledGuide]] = OrderedDict()
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="openengine-guide")
        self._backend_lock = threading.Lock()
        self._backend: Backend | None = None

    def submit(self, guide: GuidedDecoding) -> Future[CompiledGuide]:
        """Compile in a worker thread; the same guide is compiled once. The future raises as `compile` does.

        Raises: InvalidArgument when the guide is malformed on its face; UnsupportedFeature when llguidance is missing.
        """
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
                shared = self._futures[guide] = self._in_worker(self._compile, guide, kind)
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
        """Stop the workers once they finish what they are at; what waits is cancelled. Idempotent."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _in_worker(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run in a worker thread, whose stack is large: the backend follows a grammar's references by recursion."""
        with _stack_size_lock:
            usual = threading.stack_size(_STACK_BYTES)
            try:
                return self._workers.submit(function, *args)
            finally:
                threading.stack_size(usual)

    def _forget_failure(self, guide: GuidedDecoding, future: Future[CompiledGuide]) -> None:
        if future.cancelled() or future.exception() is not None:
            with self._lock:
                if self._futures.get(guide) is future:
                    del self._futures[guide]

    def _compile(self, guide: GuidedDecoding, kind: str) -> CompiledGuide:
        work = Work(self._timeout_s)
        source = _only_guide(guide)[1]
        grammar = Grammar(max_bytes=_LEAST_GRAMMAR_BYTES + _BYTES_PER_SOURCE_BYTE * len(source))
        what = kind.replace("_", " ")
        try:
            text = grammar.text(_FRONT_ENDS[kind](grammar, guide, work))
            compiled = CompiledGuide(self._shared_backend(), text, self.vocab_size, self._in_worker)
            if work.remaining_s < 0:
                raise CompileTimeout
        except CompileTimeout:
            raise InvalidArgument(
                f"the {what} guide takes longer than guide_timeout_s {self._timeout_s:g} to compile; simplify it or raise the limit"
            ) from None
        except (GrammarTooLarge, TooComplex, RecursionError, MemoryError):
            raise InvalidArgument(
                f"the {what} guide is too complex: it is nested too deeply or has too many alternatives"
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
        self._backend.fill([(state.matcher, row) for row, state in live], out)
        complete = np.zeros(len(states), np.bool_)
        for row, state in live:
            complete[row] = state.finish_mask(out[row])
        return complete


class CompiledGuide:
    """A guide ready for use. Immutable and safe to use from many threads."""

    __slots__ = ("_backend", "_grammar", "_in_worker", "_judge", "_prototype", "_vocab_size")

    def __init__(self, backend: Backend, grammar: str, vocab_size: int, in_worker: Callable[..., Future[Any]]) -> None:
        self._backend = backend
        self._in_worker = in_worker
        self._grammar = grammar
        self._vocab_size = vocab_size
        self._prototype = backend.matcher(grammar)
        self._judge: Any = None

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
            self._judge = self._in_worker(self._backend.byte_matcher, self._grammar).result()
        matcher = self._judge.deep_copy()
        taken = matcher.validate_tokens(data)
        if taken == len(data):
            matcher.consume_tokens(data)
        if matcher.is_error():
            raise InvalidArgument(
                f"the text is too complex to judge under this guide: {first_line(matcher.get_error())}"
            )
        return matcher if taken == len(data) else None

    def start(self, token_ids: Sequence[int] = (), *, stop_token_ids: Sequence[int] = ()) -> GuideState:
        """The state of a new sequence, or of one that has produced `token_ids` (after preemption).

        stop_token_ids: ids beside EOS that end the output; they too are illegal until the guide may end.
        """
        state = GuideState(self._prototype.deep_copy(), self._backend.eos_token_ids, stop_token_ids, self._vocab_size)
        for token in token_ids:
            state.accept(token)
        return state


class GuideState:
    """One sequence under its guide. Owned by the loop thread.

    error: why the guide can no longer be followed; None while all is well.
    """

    __slots__ = ("_eos_token_ids", "_stop_bits", "_stop_token_ids", "_stop_words", "error", "matcher")

    def __init__(
        self, matcher: Any, eos_token_ids: frozenset[int], stop_token_ids: Sequence[int], vocab_size: int
    ) -> None:
        self.matcher = matcher
        self.error: str | None = None
        self._eos_token_ids = eos_token_ids
        self._stop_token_ids = frozenset(token for token in stop_token_ids if token < vocab_size) - eos_token_ids
        stops = sorted(self._stop_token_ids)
        self._stop_words = np.array([token // 32 for token in stops], np.int64)
        self._stop_bits = np.array([1 << token % 32 for token in stops], np.uint32)

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

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next, whatever the logits, as the tokenizer writes them; usually none."""
        return self.matcher.compute_ff_tokens()

    def copy(self) -> GuideState:
        """An independent state at the same place."""
        twin = object.__new__(GuideState)
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.matcher = self.matcher.deep_copy()
        return twin

    def finish_mask(self, row: np.ndarray) -> bool:
        """Put the stop ids right in a mask row i32[ceil(V / 32)]; returns `is_complete`."""
        if self.matcher.is_error():
            self.error = first_line(self.matcher.get_error())
            row[:] = 0
            return False
        words, may_end = row.view(np.uint32), self.may_end
        for word, bit in zip(self._stop_words, self._stop_bits, strict=True):
            words[word] = words[word] | bit if may_end else words[word] & ~bit
        return may_end and self.matcher.is_stopped()


# ---- validation and front ends ---------------------------------------------------------------------


def _only_guide(guide: GuidedDecoding) -> tuple[str, str]:
    """Which guide it is, and its source. Raises InvalidArgument unless there is exactly one that is well formed."""
    if guide.backend not in ("", BACKEND):
        raise InvalidArgument(f"guided.backend {guide.backend!r:.60} is not known; leave it empty or use {BACKEND!r}")
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
        raise InvalidArgument(f"guided.{name} must be a string, not {type(text).__name__}")
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
            target.set_exception(InternalError("the engine was closed before the guide was compiled"))
        elif (error := done.exception()) is not None:
            target.set_exception(error)
        else:
            target.set_result(done.result())

    source.add_done_callback(pass_on)
