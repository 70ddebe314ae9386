"""What ends an output: max_tokens, min_tokens, stop texts, stop tokens, EOS."""

from __future__ import annotations

from tests.scripted import ABC, follow, letters, scripted_engine
from tests.stream_grammar import check_stream


def scripted(directory, tokens, *, then=None, vocabulary=ABC, eos=(0,), **options):
    return scripted_engine(
        directory, follow(*tokens, vocab_size=len(vocabulary), then=then), vocabulary, eos_token_ids=eos, **options
    )


def test_stp_01_02_max_tokens_bounds_each_output_and_none_means_the_context(engine):
    assert [len(engine.generate("ab", max_tokens=n, ignore_eos=True).token_ids) for n in (1, 7)] == [1, 7]
    result = engine.generate("ab", ignore_eos=True)
    assert result.usage.total_tokens == 128 and result.finish_reason == "length"
    handle = engine.submit("ab", ignore_eos=True)
    *_, last = handle
    assert "context of 128" in last.message
    many = engine.generate("ab", max_tokens=10**6, num_sequences=2, seed=1)
    assert [len(output.token_ids) for output in many.outputs] == [126, 126]  # STP-04


def test_stp_03_max_tokens_zero_runs_the_prompt_and_nothing_else(engine):
    events = list(engine.stream("abcdefgh", max_tokens=0, num_sequences=2, prompt_logprobs=1))
    check_stream(events, 2, prompt_tokens=8, completion_tokens=0)
    assert len(events[0].tokens) == 8 and {e.reason for e in events[1:]} == {"length"}
    result = engine.generate("abcdefghi", max_tokens=0)
    assert result.token_ids == [] and result.text == "" and result.usage.cached_prompt_tokens == 8
    assert result.logprobs is None


def test_stp_05_nothing_ends_an_output_before_min_tokens(tmp_path):
    with scripted(tmp_path, letters("ab") + [0] + letters("c"), then=3) as engine:
        assert engine.generate([1], temperature=0, max_tokens=9).usage.completion_tokens == 3
        # The eos at position 2 may not be drawn, so the first of the rest is: "a".
        result = engine.generate([1], temperature=0, min_tokens=4, max_tokens=9, stop="a")
        assert result.text[:3] == "aba" and result.usage.completion_tokens >= 4
        stopped = engine.generate([1], temperature=0, min_tokens=2, max_tokens=9, stop_token_ids=letters("a"))
        assert stopped.token_ids[0] != letters("a")[0] and stopped.usage.completion_tokens >= 2


def test_stp_08_10_11_a_stop_text_ends_the_output_with_or_without_it(tmp_path):
    with scripted(tmp_path, letters("abcdef")) as engine:
        for include, text in ((None, "ab"), (False, "ab"), (True, "abcd")):
            result = engine.generate([1], temperature=0, stop=["zz", "cd"], include_stop_in_output=include)
            assert result.text == text and result.finish_reason == "stop" and result.stop_match.stop_text == "cd"
            assert result.usage.completion_tokens == 4


def test_stp_09_10_11_a_stop_token_ends_the_output_with_or_without_it(tmp_path):
    with scripted(tmp_path, letters("abcdef")) as engine:
        for include, text in ((False, "ab"), (True, "abc")):
            result = engine.generate([1], temperature=0, stop_token_ids=letters("xc"), include_stop_in_output=include)
            assert result.text == text and result.stop_match.stop_token_id == 3 and result.token_ids == letters(text)
            assert result.usage.completion_tokens == 3  # USE-02: sampled and not emitted counts


def test_stp_12_13_14_eos_ends_unless_ignored_and_a_callers_stop_of_that_id_is_the_callers(tmp_path):
    with scripted(tmp_path, [1, 0, 2, 2]) as engine:
        result = engine.generate([1], temperature=0, max_tokens=4)
        assert result.text == "a" and result.token_ids == [1, 0] and result.stop_match.eos_token_id == 0
        ignored = engine.generate([1], temperature=0, max_tokens=4, ignore_eos=True)
        assert ignored.token_ids == [1, 0, 2, 2] and ignored.finish_reason == "length" and ignored.text == "abb"
        for ignore in (False, True):
            caller = engine.generate([1], temperature=0, max_tokens=4, stop_token_ids=0, ignore_eos=ignore)
            assert caller.stop_match.stop_token_id == 0 and caller.token_ids == [1]


def test_stp_15_a_stop_token_wins_over_a_stop_text_at_the_same_token(tmp_path):
    with scripted(tmp_path, letters("abc")) as engine:
        result = engine.generate([1], temperature=0, stop="b", stop_token_ids=2)
        assert result.stop_match.stop_token_id == 2


def test_stp_16_stops_never_match_the_prompt(tmp_path):
    with scripted(tmp_path, letters("abab")) as engine:
        assert engine.generate([2], temperature=0, max_tokens=2, stop="bab").text == "ab"


def test_stp_17_each_output_stops_on_its_own(engine):
    result = engine.generate("ab", num_sequences=8, seed=2, stop_token_ids=letters("abc"), max_tokens=60)
    assert len({len(output.token_ids) for output in result.outputs}) > 2
    assert result.usage.completion_tokens == sum(len(o.token_ids) + (o.finish_reason == "stop") for o in result.outputs)
