"""From sampled tokens to stream events, and from stream events to a result.

`OutputStream` turns the tokens of one output into `TokenOutput` deltas: it decodes, finds stop texts and holds
back what may not be shown yet. `ResultCollector` joins a request's events into one `GenerationResult`.
`PromptTokens` and `Candidates` show score arrays as `TokenInfo` and `LogProb` objects, made only when read.
Sampling, stop token ids, lengths and the order of events between outputs are decided elsewhere.

The text of one output, at any moment:

    | emitted by take() | ready | held: token records that wait            |
                                | complete ... | may begin a stop | bytes  |
                                               ^ longest suffix that is a proper prefix of a stop text

A held record goes with all of its text, so ids and text of an event always belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar, overload

import numpy as np

from openengine.results import GenerationOutput, GenerationResult, Timing
from openengine.types import (
    FinishReason,
    GenerateEvent,
    GenerationFinished,
    GuidedDecoding,
    KvSessionRef,
    LogProb,
    PrefillReady,
    PromptOutput,
    SamplingParams,
    StopMatch,
    StoppingOptions,
    TokenInfo,
    TokenOutput,
    Usage,
    stop_texts,
)

if TYPE_CHECKING:
    from openengine.core.detokenizer import IncrementalDetokenizer
    from openengine.ops.sampling import TokenScores

__all__ = ["Candidates", "OutputStream", "PromptTokens", "ResultCollector"]

# A character has at most four bytes, so ordinary text ends its wait within three tokens. A model that repeats lead
# bytes never completes one: after this many records they go out, and the bytes still open follow with a later one.
_MAX_INCOMPLETE_RECORDS = 16


class OutputStream:
    """The stream of one output (`output_index`), owned by the loop; a preempted sequence keeps it as it is.

    Feed every sampled token once with one of the `push` methods, call `take` whenever events may be sent, and
    `finish` once before the output's `GenerationFinished`. `like` is another output of the same request: its table
    of stop texts, a dictionary per character, serves both.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        *,
        output_index: int,
        stopping: StoppingOptions,
        like: OutputStream | None = None,
    ) -> None:
        texts = tuple(stop_texts(stopping)) if like is None else ()
        self._detokenizer = detokenizer
        self._decode = detokenizer.push
        self._output_index = output_index
        self._stops = _StopAutomaton(texts) if texts else like and like._stops
        self._node = 0
        self._include_stop = bool(stopping.include_stop_in_output)
        self._min_tokens = stopping.min_tokens or 0
        self._ready: list[TokenInfo] = []
        self._ready_texts: list[str] = []
        self._held: list[tuple[TokenInfo, str, bool]] = []  # record, its text, whether the text ends at a character
        self._held_chars = 0
        self._incomplete = 0
        self._open = False
        self._stopped = False

    def push(self, token: TokenInfo, num_output_tokens: int) -> StopMatch | None:
        """Feed one sampled token; `num_output_tokens` counts it.

        Returns the match when its text ends a stop text: the output is then cut, and the caller must finish it.
        Of the stop texts that end in this token the one with the earliest start wins, then the shortest.
        """
        text = self._decode(token.token_id)
        stops = self._stops
        in_play = stops is not None and (self._node or not stops.first_chars.isdisjoint(text))
        if not in_play and not self._held and not self._detokenizer.pending:
            self._ready.append(token)
            self._ready_texts.append(text)
            return None
        return self._push_held(token, text, num_output_tokens)

    def push_eos(self, token: TokenInfo) -> None:
        """Feed the model's end-of-sequence token: its record is emitted, its text is not."""
        self._hold(token, "", is_complete=True)

    def push_stop_token(self, token: TokenInfo) -> None:
        """Feed the caller's stop token: emitted with its text under `include_stop_in_output`, else not at all."""
        if self._include_stop:
            self._hold(token, self._decode(token.token_id), is_complete=True)
            self._open = self._detokenizer.pending

    def take(self) -> TokenOutput | None:
        """What may be emitted and was not yet: new records and their text. None when there is nothing."""
        if not self._ready and not self._ready_texts:
            return None
        output = TokenOutput(self._output_index, tuple(self._ready), "".join(self._ready_texts))
        self._ready = []
        self._ready_texts = []
        return output

    def finish(self) -> TokenOutput | None:
        """Emit everything still held, an incomplete character as U+FFFD, except what a stop text cut off."""
        if not self._stopped:
            self._emit(len(self._held), self._held_chars)
            # Bytes left open by the prompt alone are no output: only a token of this output opens a character here.
            if self._open and self._detokenizer.pending:
                self._ready_texts.append(self._detokenizer.flush())
        return self.take()

    def _push_held(self, token: TokenInfo, text: str, num_output_tokens: int) -> StopMatch | None:
        assert not self._stopped, "a stopped output takes no more tokens"
        match = None
        offset = self._held_chars
        if self._stops is not None:
            self._node, match = self._stops.scan(self._node, text)
        self._open = self._detokenizer.pending
        self._incomplete = self._incomplete + 1 if self._open else 0
        self._hold(token, text, is_complete=self._incomplete % _MAX_INCOMPLETE_RECORDS == 0)
        if match is not None and num_output_tokens >= self._min_tokens:
            start, end, stop_text = match
            self._cut(offset + (end if self._include_stop else start))
            return StopMatch(stop_text=stop_text)
        # A stop that stays in the output takes nothing away from what came before it: nothing to hold back for it.
        self._release(0 if self._stops is None or self._include_stop else self._stops.prefix_chars[self._node])
        return None

    def _hold(self, token: TokenInfo, text: str, *, is_complete: bool) -> None:
        self._held.append((token, text, is_complete))
        self._held_chars += len(text)

    def _release(self, num_kept_chars: int) -> None:
        """Emit the held records that end at a character outside the last `num_kept_chars` characters."""
        limit = self._held_chars - num_kept_chars
        num_records = num_chars = end = 0
        for position, (_, text, is_complete) in enumerate(self._held, 1):
            end += len(text)
            if end > limit:
                break
            if is_complete:
                num_records, num_chars = position, end
        if num_records:
            self._emit(num_records, num_chars)

    def _cut(self, num_chars: int) -> None:
        """Emit `num_chars` held characters with the records that have one of them, and drop the rest for good."""
        num_records = offset = 0
        for _, text, is_complete in self._held:
            end = offset + len(text)
            # An incomplete record without text is part of the next character, not a record without any.
            if not (offset < num_chars or (is_complete and end <= num_chars)):
                break
            num_records += 1
            offset = end
        self._emit(num_records, num_chars)
        self._held.clear()
        self._held_chars = 0
        self._stopped = True

    def _emit(self, num_records: int, num_chars: int) -> None:
        records = self._held[:num_records]
        self._ready += [token for token, _, _ in records]
        if num_chars:
            self._ready_texts.append("".join([text for _, text, _ in records])[:num_chars])
        del self._held[:num_records]
        self._held_chars -= num_chars


class _StopAutomaton:
    """All stop texts at once (Aho and Corasick, 1975): constant amortized work per character, however many there are.

    A node is the longest suffix of the text so far that is a prefix of some stop text; node 0 is the empty one.
    `prefix_chars[node]`: length of the longest such suffix that is a proper prefix, so that a stop may still follow.
    """

    __slots__ = ("_children", "_fallback", "_stop", "first_chars", "prefix_chars")

    def __init__(self, texts: Iterable[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._stop = [""]  # the longest stop text that ends at the node
        depth = [0]
        for text in texts:
            node = 0
            for char in text:
                child = self._children[node].setdefault(char, len(self._children))
                if child == len(self._children):
                    self._children.append({})
                    self._stop.append("")
                    depth.append(depth[node] + 1)
                node = child
            self._stop[node] = text
        self._fallback = [0] * len(depth)
        self.prefix_chars = [0] * len(depth)
        self.first_chars = frozenset(self._children[0])
        self._link(depth)

    def scan(self, node: int, text: str) -> tuple[int, tuple[int, int, str] | None]:
        """Read `text` from `node`; returns the new node and the match that starts first, then ends first.

        A match is (start, end, stop text) with offsets into `text`; it ends in `text`, and may start before it.
        """
        children, fallback, stops = self._children, self._fallback, self._stop
        match = None
        for end, char in enumerate(text, 1):
            while node and char not in children[node]:
                node = fallback[node]
            node = children[node].get(char, 0)
            stop = stops[node]
            if stop and (match is None or end - len(stop) < match[0]):
                match = (end - len(stop), end, stop)
        return node, match

    def _link(self, depth: list[int]) -> None:
        """Set the fallbacks (longest proper suffix that is a node) in order of depth, and what follows from them."""
        children, fallback, stops = self._children, self._fallback, self._stop
        order = [0]
        for node in order:
            for char, child in children[node].items():
                suffix = fallback[node]
                while suffix and char not in children[suffix]:
                    suffix = fallback[suffix]
                suffix = children[suffix].get(char, 0) if node else 0
                fallback[child] = suffix
                stops[child] = stops[child] or stops[suffix]
                self.prefix_chars[child] = depth[child] if children[child] else self.prefix_chars[suffix]
                order.append(child)


# ---- joining a stream ----------------------------------------------------------------------------


class ResultCollector:
    """Joins one request's events, in the order they came. `sampling` and `stopping` are the effective parameters.

    With `keeps_content` False the outputs get no tokens and no text: for who reads the events themselves.
    """

    def __init__(
        self,
        request_id: str,
        *,
        sampling: SamplingParams | None = None,
        stopping: StoppingOptions | None = None,
        guide: GuidedDecoding | None = None,
    ) -> None:
        self._request_id = request_id
        self._guide = guide
        self._sampling = sampling
        self._stopping = stopping
        self._outputs: dict[int, _CollectedOutput] = {}
        self._prompt: Sequence[TokenInfo] | None = None
        self._kv_session: KvSessionRef | None = None
        self._usage: Usage | None = None
        self.keeps_content = True

    def add(self, event: GenerateEvent) -> None:
        """Take one event."""
        if isinstance(event, TokenOutput):
            output = self._output(event.output_index)
            if self.keeps_content:
                output.tokens += event.tokens
                output.texts.append(event.text)
        elif isinstance(event, GenerationFinished):
            output = self._output(event.output_index)
            output.finish_reason = event.reason
            output.stop_match = event.stop_match
            output.message = event.message
            self._usage = event.usage
        elif isinstance(event, PromptOutput):
            self._prompt = event.tokens if self.keeps_content else None
        else:
            assert isinstance(event, PrefillReady), f"unknown event {event!r}"
            self._kv_session = event.kv_session
            self._usage = event.usage

    def result(self, *, timing: Timing | None = None) -> GenerationResult:
        """The result of the events so far: outputs in index order; an unfinished one has no finish reason."""
        return GenerationResult(
            request_id=self._request_id,
            outputs=tuple(
                GenerationOutput(
                    index=index,
                    text="".join(output.texts),
                    tokens=tuple(output.tokens),
                    finish_reason=output.finish_reason,
                    stop_match=output.stop_match,
                    message=output.message,
                    guide=self._guide,
                )
                for index, output in sorted(self._outputs.items())
            ),
            prompt=self._prompt,
            usage=self._usage,
            timing=timing,
            sampling=self._sampling,
            stopping=self._stopping,
            kv_session=self._kv_session,
        )

    def _output(self, index: int) -> _CollectedOutput:
        output = self._outputs.get(index)
        if output is None:
            output = self._outputs[index] = _CollectedOutput()
        return output


class _CollectedOutput:
    __slots__ = ("finish_reason", "message", "stop_match", "texts", "tokens")

    def __init__(self) -> None:
        self.tokens: list[TokenInfo] = []
        self.texts: list[str] = []
        self.finish_reason: FinishReason | None = None
        self.stop_match: StopMatch | None = None
        self.message = ""


# ---- objects made on demand from arrays ----------------------------------------------------------


_Item = TypeVar("_Item")


class _Lazy(Sequence[_Item]):
    """An immutable sequence whose items are made when read. It equals, hashes and pickles as the tuple of its items."""

    __slots__ = ()

    def _make(self, index: int) -> _Item:
        """The item at `index`, 0 <= index < len."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> _Item: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[_Item]: ...

    def __getitem__(self, index: int | slice) -> _Item | Sequence[_Item]:
        if isinstance(index, slice):
            return tuple(self._make(i) for i in range(*index.indices(len(self))))
        # A range rejects what is out of bounds or no integer, and counts negative indices from the end.
        return self._make(range(len(self))[index])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (tuple, list, _Lazy)):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[type[tuple], tuple[tuple[_Item, ...]]]:
        return tuple, (tuple(self),)

    def __repr__(self) -> str:
        shown = ", ".join(repr(item) for item in self[:3])
        more = f", … {len(self) - 3} more" if len(self) > 3 else ""
        return f"{type(self).__name__}([{shown}{more}])"


class Candidates(_Lazy[LogProb]):
    """The candidates at one position as `LogProb` objects; the arrays stay readable as they are.

    token_ids: integers [K].  logprobs: f32 [K].  ranks: integers [K].  `token_text` gives a token's literal text.
    """

    __slots__ = ("logprobs", "ranks", "token_ids", "token_text")

    def __init__(
        self, token_ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray, token_text: Callable[[int], str]
    ) -> None:
        assert len(token_ids) == len(logprobs) == len(ranks), "one logprob and one rank per candidate"
        self.token_ids = token_ids
        self.logprobs = logprobs
        self.ranks = ranks
        self.token_text = token_text

    def __len__(self) -> int:
        return len(self.token_ids)

    def _make(self, index: int) -> LogProb:
        token_id = int(self.token_ids[index])
        return LogProb(token_id, float(self.logprobs[index]), self.token_text(token_id), int(self.ranks[index]))


class PromptTokens(_Lazy[TokenInfo]):
    """A prompt's tokens as `TokenInfo` objects.

    `scores` covers the positions from max(1, start) on, `start` being `prompt_logprob_start`: the first token has
    nothing before it that could predict it, and the ones before `start` were not asked for.
    """

    __slots__ = ("_first_scored", "scores", "token_ids", "token_text")

    def __init__(
        self, token_ids: Sequence[int], token_text: Callable[[int], str], start: int, scores: TokenScores
    ) -> None:
        self._first_scored = max(1, start)
        assert len(scores.logprobs) == len(token_ids) - self._first_scored, "one score per position from start on"
        self.token_ids = token_ids
        self.scores = scores
        self.token_text = token_text

    def __len__(self) -> int:
        return len(self.token_ids)

    def _make(self, index: int) -> TokenInfo:
        token_id = int(self.token_ids[index])
        row = index - self._first_scored
        if row < 0:
            return TokenInfo(token_id, self.token_text(token_id))
        return TokenInfo(
            token_id,
            self.token_text(token_id),
            float(self.scores.logprobs[row]),
            int(self.scores.ranks[row]),
            self._candidates(row),
        )

    def _candidates(self, row: int) -> Sequence[LogProb]:
        scores = self.scores
        if scores.candidate_ids is None:
            return ()
        return Candidates(
            scores.candidate_ids[row], scores.candidate_logprobs[row], scores.candidate_ranks[row], self.token_text
        )
