"""`GuideCompiler`: guides compiled in worker threads, and the masks of the sequences under them.

Owns: the limits of guides, the cache of compiled ones, the masks of a step. Does not own: what the kinds of guides mean
(given.py, front_ends.py), applying masks (sampler.py), when a sequence ends (the scheduler).

    GuidedDecoding ─ GuideCompiler.submit ─ CompiledGuide ─ start ─ GuideState ─ fill_masks ─▶ i32[S, ceil(V / 32)]
                     (worker, cached)                        (one per sequence)  accept ◀─ drawn token

The backend is llguidance, behind backend.py.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import numpy as np

from openengine.core.guides.backend import (
    MISSING,
    Backend,
    BackendRefused,
    GuideTokenizer,
    import_backend,
    is_installed,
)
from openengine.core.guides.compiled import CompiledGuide
from openengine.core.guides.given import only_guide
from openengine.core.guides.grammar import Grammar, GrammarTooLarge
from openengine.core.guides.language import TooComplex
from openengine.core.guides.state import GuideState
from openengine.core.guides.work import CompileTimeout, Turns, Work
from openengine.core.guides.workers import Workers
from openengine.errors import (
    InternalError,
    InvalidArgument,
    OpenEngineError,
    Overloaded,
    PreconditionFailed,
    UnsupportedFeature,
)
from openengine.types import GuidedDecoding, GuidedDecodingMode

__all__ = ["GuideCompiler", "NoGuides", "guide_compiler"]

_MAX_CACHED = 256
_NUM_WORKERS = 2
_BYTES_PER_SOURCE_BYTE = 8  # how much longer than its guide a grammar may be, beyond the first megabyte
_LEAST_GRAMMAR_BYTES = 1 << 20
_SLOW_FILL_S = 0.020  # masks of a step that take longer are worth a look at which of them it is,
_STEPS_BETWEEN_LOOKS = 16  # which costs a step without parallelism


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
        """vocab_size: width V of the logits and masks.  timeout_s, max_bytes: limits for one guide, or one judged text."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._eos_token_ids = tuple(sorted({token for token in eos_token_ids if token < vocab_size}))
        if not self._eos_token_ids:
            raise UnsupportedFeature(
                "guided decoding needs an end-of-sequence token, and this model has none; leave the guide out"
            )
        self.timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._pid = os.getpid()
        self._lock = threading.RLock()  # cancelling a compilation calls back
        self._futures: OrderedDict[GuidedDecoding, _Shared] = OrderedDict()
        self._workers = Workers(_NUM_WORKERS, name="openengine-guide", max_wait_s=timeout_s)
        self._turns = Turns()
        self._backend_lock = threading.Lock()
        self._backend: Backend | None = None
        self._fills_one_by_one = False
        self._steps_until_look = 0

    def submit(self, guide: GuidedDecoding) -> Future[CompiledGuide]:
        """Compile in a worker thread; the same guide is compiled once. The future raises as `compile` does.

        Raises: InvalidArgument when the guide is malformed on its face, or compiled by another engine; UnsupportedFeature
        when llguidance is missing; PreconditionFailed when the compiler is closed; Overloaded while too many guides that
        took too long still go on, and by the future after waiting for its turn as long as compiling may take.
        """
        self._check_process()
        if isinstance(guide, CompiledGuide):
            return self._own(guide)
        kind, source = only_guide(guide)
        num_bytes = len(source.encode())
        if num_bytes > self._max_bytes:
            raise InvalidArgument(
                f"the guide has {num_bytes} bytes, the limit guide_max_bytes is {self._max_bytes}; shorten it or raise the limit"
            )
        import_backend()
        mine: Future[CompiledGuide] = Future()
        with self._lock:
            shared = self._futures.get(guide)
            is_new = shared is None
            if is_new:
                shared = self._futures[guide] = _Shared(
                    self._workers.submit(self._compile, guide, kind, num_bytes, size=num_bytes)
                )
                while len(self._futures) > _MAX_CACHED:
                    self._futures.popitem(last=False)
            self._futures.move_to_end(guide)
            shared.num_waiting += 1
        if is_new:
            shared.future.add_done_callback(lambda _: self._forget_failure(guide, shared))
        _chain(shared.future, mine)
        mine.add_done_callback(lambda done: self._leave(guide, shared) if done.cancelled() else None)
        return mine

    def compile(self, guide: GuidedDecoding) -> CompiledGuide:
        """Compile `guide`, or find it in the cache; blocks.

        Raises: InvalidArgument naming the pointer and keyword, position or feature that is malformed or unsupported, or the
        limit that was exceeded; otherwise as `submit`.
        """
        return self.submit(guide).result()

    def close(self) -> None:
        """Refuse all guides that are not compiled yet; waits for none of them. Idempotent."""
        self._workers.close()
        with self._lock:
            self._futures.clear()

    def in_worker(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call in a worker thread, which has the stack that the backend needs; within the time of a guide.

        Raises: InvalidArgument beyond it; PreconditionFailed when the compiler is closed; Overloaded as `submit`; and whatever
        `function` raises.
        """

        def call() -> Any:
            with self._workers.time_limit(self.timeout_s, lambda: self._too_long("guide")):
                return function(*args)

        self._check_process()
        return self._workers.submit(call).result()

    def _too_long(self, what: str) -> InvalidArgument:
        return InvalidArgument(
            f"the {what} takes longer than guide_timeout_s {self.timeout_s:g} to compile; simplify it or raise the limit"
        )

    def _out_of_time(self, what: str, work: Work) -> InvalidArgument | Overloaded:
        if (waited_s := work.waited_s) < self.timeout_s / 2:
            return self._too_long(what)
        return Overloaded(
            f"the {what} is not compiled after guide_timeout_s {self.timeout_s:g}, of which it waited {waited_s:.1f} s for "
            "requests and other guides; try again later, or raise the limit"
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

    def _leave(self, guide: GuidedDecoding, shared: _Shared) -> None:
        """One who waited has cancelled. What has not begun ends with the last of them; what has goes on, for the cache."""
        with self._lock:  # nobody joins meanwhile
            shared.num_waiting -= 1
            if shared.num_waiting == 0 and shared.future.cancel():
                self._forget_failure(guide, shared)

    def _forget_failure(self, guide: GuidedDecoding, shared: _Shared) -> None:
        if shared.future.cancelled() or shared.future.exception() is not None:
            with self._lock:
                if self._futures.get(guide) is shared:
                    del self._futures[guide]

    def _compile(self, guide: GuidedDecoding, kind: str, num_bytes: int) -> CompiledGuide:
        # Imported where the first guide comes: an engine without guides starts sooner.
        from openengine.core.guides.front_ends import add_guide

        backend = self._shared_backend()  # made once, and not of this guide's time
        what = f"{kind.replace('_', ' ')} guide"
        work = Work(self.timeout_s, turns=self._turns)
        with self._workers.time_limit(self.timeout_s, lambda: self._out_of_time(what, work)):
            try:
                grammar = Grammar(max_bytes=_LEAST_GRAMMAR_BYTES + _BYTES_PER_SOURCE_BYTE * num_bytes)
                with work:
                    text = grammar.text(add_guide(grammar, guide, kind, work))
                return CompiledGuide(guide, self, backend, text)
            except CompileTimeout:
                raise self._out_of_time(what, work) from None
            except (GrammarTooLarge, TooComplex, RecursionError, MemoryError):
                raise InvalidArgument(
                    f"the {what} is too complex: it is nested too deeply, has too many alternatives, asks for too many "
                    "patterns or lookaheads at once, or repeats large repetitions"
                ) from None
            except BackendRefused as exc:
                raise InvalidArgument(f"the {what} cannot be compiled: {exc}") from None
            except OpenEngineError:
                raise
            except Exception as exc:
                raise InternalError(f"compiling the {what} failed: {exc!r:.200}") from exc

    def _shared_backend(self) -> Backend:
        with self._backend_lock:
            if self._backend is None:
                self._backend = Backend(self.tokenizer, self.vocab_size, self._eos_token_ids)
            return self._backend

    def note_step(self) -> None:
        """A step begins, beside which compilations that take long shall not matter."""
        self._turns.note_step()

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
        self._fill([(row, state) for row, state in live if not state.forced and state.error is None], out)
        complete = np.zeros(len(states), np.bool_)
        for row, state in live:
            complete[row] = state.finish_mask(out[row])
        return complete

    def _fill(self, live: Sequence[tuple[int, GuideState]], out: np.ndarray) -> None:
        """Masks in parallel; of what is slow one by one, for only so its time can be told and held against its guide."""
        together: list[tuple[Any, int]] = []
        alone: list[tuple[int, GuideState]] = []
        for row, state in live:
            if self._fills_one_by_one or state.has_slow_masks or len(live) == 1:
                alone.append((row, state))
            else:
                together.append((state.matcher, row))
        began = time.monotonic()
        self._backend.fill(together, out)
        is_slow = time.monotonic() - began > _SLOW_FILL_S
        for row, state in alone:
            state.note_mask_time(self._backend.fill_one(state.matcher, out[row]))
        self._plan_next(is_slow)

    def _plan_next(self, is_slow: bool) -> None:
        """Decide how the next step fills its masks: after a slow one, and not too often, one by one."""
        if self._fills_one_by_one:
            self._fills_one_by_one, self._steps_until_look = False, _STEPS_BETWEEN_LOOKS
        elif self._steps_until_look:
            self._steps_until_look -= 1
        else:
            self._fills_one_by_one = is_slow


class _Shared:
    """A compilation, for all who wait for it."""

    __slots__ = ("future", "num_waiting")

    def __init__(self, future: Future[CompiledGuide]) -> None:
        self.future = future
        self.num_waiting = 0


def _chain(source: Future[CompiledGuide], target: Future[CompiledGuide]) -> None:
    """Give `target`, which its owner may cancel, the outcome of `source`, which others wait for too."""

    def pass_on(done: Future[CompiledGuide]) -> None:
        if not target.set_running_or_notify_cancel():
            return
        assert not done.cancelled(), "cancelled only when nobody waits"
        if (error := done.exception()) is not None:
            target.set_exception(error)
        else:
            target.set_result(done.result())

    source.add_done_callback(pass_on)
