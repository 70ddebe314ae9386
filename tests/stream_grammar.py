"""The grammar of a Generate stream: what requirements STR, USE and LGP say that the events alone can show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from openengine.types import (
    FinishReason,
    GenerateEvent,
    GenerationFinished,
    PrefillReady,
    PromptOutput,
    StopMatch,
    TokenInfo,
    TokenOutput,
    Usage,
)

__all__ = ["check_stream", "whole_stream"]


def check_stream(
    events: Iterable[GenerateEvent],
    num_sequences: int,
    *,
    prompt_tokens: int | None = None,
    completion_tokens: int | None = None,
) -> None:
    """Assert every rule on a whole successful stream of `num_sequences` outputs, or of a prefill (PrefillReady).

    `prompt_tokens` and `completion_tokens` are the expected usage, where the caller knows it.
    """
    events = list(events)
    assert events, "STR-09: a stream has a last event"
    for event in events:
        assert isinstance(event, (PromptOutput, TokenOutput, PrefillReady, GenerationFinished)), f"STR-01: {event!r}"
        assert isinstance(event.text, str), f"every event has a text: {event!r}"
    prompts = [event for event in events if isinstance(event, PromptOutput)]
    assert len(prompts) <= 1, "STR-05: PromptOutput at most once"
    assert not prompts or events[0] is prompts[0], "STR-05: PromptOutput comes first"
    if any(isinstance(event, PrefillReady) for event in events):
        _check_prefill(events[len(prompts) :])
    else:
        _check_outputs(events[len(prompts) :], num_sequences)
    usage = _check_usage_place(events)
    _check_usage(usage, events, prompt_tokens, completion_tokens)
    if prompts:
        _check_prompt(prompts[0].tokens, usage)


def whole_stream() -> list[GenerateEvent]:
    """Two outputs and a scored prompt: EOS ends output 1, the length output 0."""
    usage = Usage(2, 5, 7, cached_prompt_tokens=0)
    return [
        PromptOutput((TokenInfo(8, "p"), TokenInfo(9, "q", -1.0, 2))),
        TokenOutput(1, (TokenInfo(0, "a"),), "a"),
        TokenOutput(0, (TokenInfo(0, "a"), TokenInfo(1, "b")), "ab"),
        TokenOutput(1, (TokenInfo(2, "</s>"),), ""),
        GenerationFinished(1, FinishReason.STOP, stop_match=StopMatch(eos_token_id=2)),
        TokenOutput(0, (TokenInfo(3, "c"),), "c"),
        GenerationFinished(0, FinishReason.LENGTH, usage=usage),
    ]


def _check_prefill(events: Sequence[GenerateEvent]) -> None:
    assert len(events) == 1, f"STR-13: PrefillReady alone, not {events!r}"
    assert events[0].kv_session.session_id, "PD-02: the session has an id"
    assert events[0].usage is not None and events[0].usage.completion_tokens == 0, "USE-06: no completion tokens"


def _check_outputs(events: Sequence[GenerateEvent], num_sequences: int) -> None:
    finished: dict[int, GenerationFinished] = {}
    tokens: dict[int, list[TokenInfo]] = {index: [] for index in range(num_sequences)}
    for event in events:
        assert isinstance(event, (TokenOutput, GenerationFinished)), f"STR-05/13/14: {event!r} among outputs"
        index = event.output_index
        assert type(index) is int and 0 <= index < num_sequences, f"STR-03/04: output_index {index!r}"
        assert index not in finished, f"STR-07: {event!r} after the end of output {index}"
        if isinstance(event, TokenOutput):
            _check_token_output(event)
            tokens[index] += event.tokens
        else:
            _check_finish(event)
            finished[index] = event
    assert sorted(finished) == list(range(num_sequences)), f"STR-08: finished outputs {sorted(finished)}"
    assert isinstance(events[-1], GenerationFinished), "STR-09: nothing follows the last finish"
    scored = {token.logprob is not None for records in tokens.values() for token in records}
    assert len(scored) <= 1, "LGP-01/02: every output token has a logprob, or none has"
    for index, finish in finished.items():
        if finish.stop_match is not None and finish.stop_match.eos_token_id is not None:
            assert tokens[index], f"STP-12: output {index} ended with EOS and has no record of it"
            assert tokens[index][-1].token_id == finish.stop_match.eos_token_id, "STP-12: the EOS record comes last"


def _check_token_output(event: TokenOutput) -> None:
    assert isinstance(event.tokens, tuple), "a frozen event holds a tuple"
    assert event.tokens or event.text, "STR-06: an event with neither tokens nor text"
    event.text.encode()  # STR-16: no half of a character, not even half of a surrogate pair
    for token in event.tokens:
        _check_token(token)


def _check_token(token: TokenInfo) -> None:
    assert isinstance(token, TokenInfo) and type(token.token_id) is int and token.token_id >= 0, f"LGP-03: {token!r}"
    assert isinstance(token.token, str), f"LGP-03: {token!r}"
    if token.logprob is None:
        assert token.rank is None and not len(token.candidates), f"LGP-02/15: {token!r}"
        return
    assert math.isfinite(token.logprob) and token.logprob <= 0, f"LGP-01: {token!r}"
    assert type(token.rank) is int and token.rank >= 1, f"LGP-15: {token!r}"
    ids = [candidate.token_id for candidate in token.candidates]
    assert len(set(ids)) == len(ids), f"LGP-04: repeated candidates {ids}"


def _check_finish(event: GenerationFinished) -> None:
    assert isinstance(event.reason, FinishReason), f"STR-11: {event!r}"
    assert (event.stop_match is not None) == (event.reason is FinishReason.STOP), f"STR-12: {event!r}"
    if event.stop_match is not None:
        assert isinstance(event.stop_match, StopMatch), f"STR-12: {event!r}"
        match = event.stop_match
        set_fields = [v for v in (match.stop_token_id, match.stop_text, match.eos_token_id) if v is not None]
        assert len(set_fields) == 1, f"STR-12: a stop match names exactly one stop, not {match!r}"


def _check_usage_place(events: Sequence[GenerateEvent]) -> Usage:
    for event in events[:-1]:
        assert getattr(event, "usage", None) is None, f"USE-01: usage before the last event: {event!r}"
    usage = getattr(events[-1], "usage", None)
    assert isinstance(usage, Usage), f"USE-01: the last event {events[-1]!r} has no usage"
    return usage


def _check_usage(
    usage: Usage, events: Sequence[GenerateEvent], prompt_tokens: int | None, completion_tokens: int | None
) -> None:
    assert usage.prompt_tokens >= 1 and usage.completion_tokens >= 0, f"USE-05: {usage!r}"
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, f"USE-03: {usage!r}"
    assert 0 <= (usage.cached_prompt_tokens or 0) <= usage.prompt_tokens, f"USE-04: {usage!r}"
    assert 0 <= (usage.reasoning_tokens or 0) <= usage.completion_tokens, f"USE-04: {usage!r}"
    assert prompt_tokens in (None, usage.prompt_tokens), f"USE-05: {usage!r}, expected {prompt_tokens} prompt tokens"
    assert completion_tokens in (None, usage.completion_tokens), f"USE-02: {usage!r}, expected {completion_tokens}"
    num_emitted = sum(len(event.tokens) for event in events if isinstance(event, TokenOutput))
    assert num_emitted <= usage.completion_tokens, f"USE-02: {num_emitted} tokens came, {usage!r}"
    finishes = [event for event in events if isinstance(event, GenerationFinished)]
    if all(_emits_every_token(finish) for finish in finishes):
        assert num_emitted == usage.completion_tokens, f"USE-02: no stop cut a token, {num_emitted} came, {usage!r}"


def _emits_every_token(finish: GenerationFinished) -> bool:
    if finish.reason is FinishReason.STOP:
        return finish.stop_match.eos_token_id is not None
    return finish.reason is FinishReason.LENGTH


def _check_prompt(tokens: Sequence[TokenInfo], usage: Usage) -> None:
    assert len(tokens) == usage.prompt_tokens, f"LGP-09: {len(tokens)} prompt tokens, {usage!r}"
    for token in tokens:
        _check_token(token)
    first_scored = next((i for i, token in enumerate(tokens) if token.logprob is not None), len(tokens))
    assert first_scored > 0, "LGP-10: the first prompt token has no logprob"
    unscored = [i for i, token in enumerate(tokens[first_scored:], first_scored) if token.logprob is None]
    assert not unscored, f"LGP-11: prompt tokens {unscored} have no logprob, though {first_scored} has"
