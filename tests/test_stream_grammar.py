"""The checker of streams accepts whole streams and names the rule that a broken one breaks."""

from __future__ import annotations

import pytest

from openengine.types import (
    FinishReason,
    GenerationFinished,
    KvSessionRef,
    PrefillReady,
    PromptOutput,
    StopMatch,
    TokenInfo,
    TokenOutput,
    Usage,
)
from tests.stream_grammar import check_stream, whole_stream


def test_the_grammar_accepts_a_whole_stream():
    check_stream(whole_stream(), 2, prompt_tokens=2, completion_tokens=5)


def test_the_grammar_accepts_a_prefill():
    check_stream([PrefillReady(KvSessionRef(session_id="s"), Usage(2, 0, 2))], 1)


_USAGE = Usage(2, 1, 3)
_TOKEN = TokenOutput(0, (TokenInfo(0, "a"),), "a")
_END = GenerationFinished(0, FinishReason.LENGTH, usage=_USAGE)
_STOP = GenerationFinished(0, FinishReason.STOP, stop_match=StopMatch(stop_text="b"), usage=_USAGE)
_PROMPT = PromptOutput((TokenInfo(8, "p"), TokenInfo(9, "q")))


@pytest.mark.parametrize(
    ("rule", "events"),
    [
        ("STR-09", []),
        ("STR-01", [object(), _END]),
        ("STR-05", [_TOKEN, _PROMPT, _END]),
        ("STR-05", [_PROMPT, _PROMPT, _TOKEN, _END]),
        ("STR-03", [TokenOutput(1, _TOKEN.tokens, "a"), _END]),
        ("STR-06", [_TOKEN, TokenOutput(0, (), ""), _END]),
        ("STR-07", [GenerationFinished(0, FinishReason.LENGTH), _TOKEN]),
        ("STR-07", [_TOKEN, GenerationFinished(0, FinishReason.LENGTH), _END]),
        ("STR-08", [_TOKEN]),
        ("STR-11", [_TOKEN, GenerationFinished(0, "stop", usage=_USAGE)]),
        ("STR-12", [_TOKEN, GenerationFinished(0, FinishReason.STOP, usage=_USAGE)]),
        ("STR-12", [_TOKEN, GenerationFinished(0, FinishReason.LENGTH, stop_match=_STOP.stop_match, usage=_USAGE)]),
        ("STR-12", [_TOKEN, GenerationFinished(0, FinishReason.STOP, stop_match=StopMatch(), usage=_USAGE)]),
        ("STR-13", [_TOKEN, PrefillReady(KvSessionRef(session_id="s"), Usage(2, 0, 2))]),
        (
            "STP-12",
            [_TOKEN, GenerationFinished(0, FinishReason.STOP, stop_match=StopMatch(eos_token_id=7), usage=_USAGE)],
        ),
        ("USE-01", [_TOKEN, GenerationFinished(0, FinishReason.LENGTH)]),
        ("USE-02", [_TOKEN, _TOKEN, _STOP]),
        ("USE-02", [_END]),
        ("USE-03", [_TOKEN, GenerationFinished(0, FinishReason.LENGTH, usage=Usage(2, 1, 4))]),
        ("USE-04", [_TOKEN, GenerationFinished(0, FinishReason.LENGTH, usage=Usage(2, 1, 3, 3))]),
        ("USE-06", [PrefillReady(KvSessionRef(session_id="s"), Usage(2, 1, 3))]),
        ("LGP-01", [TokenOutput(0, (TokenInfo(0, "a", 0.1, 1),), "a"), _END]),
        ("LGP-02", [TokenOutput(0, (TokenInfo(0, "a", None, 1),), "a"), _END]),
        ("LGP-15", [TokenOutput(0, (TokenInfo(0, "a", -0.1),), "a"), _END]),
        ("LGP-09", [PromptOutput(_PROMPT.tokens[:1]), _TOKEN, _END]),
        ("LGP-10", [PromptOutput((TokenInfo(8, "p", -1.0, 1), TokenInfo(9, "q", -1.0, 1))), _TOKEN, _END]),
    ],
)
def test_the_grammar_names_the_rule_that_a_stream_breaks(rule, events):
    with pytest.raises(AssertionError, match=rule):
        check_stream(events, 1)


def test_use_01_usage_before_the_last_event_is_refused():
    early = GenerationFinished(1, FinishReason.LENGTH, usage=_USAGE)
    with pytest.raises(AssertionError, match="USE-01"):
        check_stream([early, _TOKEN, _END], 2)


def test_use_02_another_count_than_expected_is_refused():
    with pytest.raises(AssertionError, match="USE-02"):
        check_stream([_TOKEN, _END], 1, completion_tokens=2)
