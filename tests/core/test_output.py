from __future__ import annotations

import codecs
import copy
import pickle
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openengine.core.output import Candidates, OutputStream, PromptTokens, ResultCollector
from openengine.types import (
    FinishReason,
    GenerationFinished,
    KvSessionRef,
    LogProb,
    PrefillReady,
    PromptOutput,
    SamplingParams,
    StopCondition,
    StopMatch,
    StoppingOptions,
    TokenInfo,
    TokenOutput,
    Usage,
)
from tests.stream_grammar import check_stream

# ---- a tokenizer whose ids are whatever the test says --------------------------------------------


@dataclass
class TableTokenizer:
    """Token i is `table[i]`: a str, or bytes where a character is split; those in `special` show no text."""

    table: list[str | bytes]
    special: frozenset[int] = frozenset()

    def token_text(self, token_id: int) -> str:
        token = self.table[token_id]
        return token if isinstance(token, str) else token.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        token = self.table[token_id]
        return token.encode() if isinstance(token, str) else token

    def detokenizer(self, prompt_ids: list[int]) -> TableDetokenizer:
        detokenizer = TableDetokenizer(self)
        for token_id in prompt_ids:
            detokenizer.push(token_id)
        return detokenizer

    def decode(self, token_ids: list[int]) -> str:
        return b"".join(self.token_bytes(i) for i in token_ids if i not in self.special).decode("utf-8", "replace")


@dataclass
class TableDetokenizer:
    tokenizer: TableTokenizer
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    @property
    def pending(self) -> bool:
        return bool(self.decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        return "" if token_id in self.tokenizer.special else self.decoder.decode(self.tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self.decoder.decode(b"", True)


class Stream:
    """An output fed with the tokens of a table in order, as the loop does: push, take, and finish at the end."""

    def __init__(self, *table, stops=(), special=(), prompt=(), include=None, min_tokens=None):
        self.tokenizer = TableTokenizer([*table, *prompt], frozenset(special))
        conditions = tuple(StopCondition(stop_text=text) for text in stops)
        stopping = StoppingOptions(conditions=conditions, include_stop_in_output=include, min_tokens=min_tokens)
        prompt_ids = list(range(len(table), len(table) + len(prompt)))
        detokenizer = self.tokenizer.detokenizer(prompt_ids)
        self.output = OutputStream(detokenizer, output_index=0, stopping=stopping)
        self.num_tokens = len(table)
        self.match: StopMatch | None = None
        self.deltas: list[tuple[list[int], str] | None] = []

    def info(self, token_id, *scores):
        return TokenInfo(token_id, self.tokenizer.token_text(token_id), *scores)

    def run(self):
        """Returns (ids, text) of every take, None where there was nothing, the finish's last."""
        for token_id in range(self.num_tokens):
            self.match = self.output.push(self.info(token_id), token_id + 1)
            if self.match is not None:
                break
            self.take()
        return self.finish()

    def take(self):
        self.deltas.append(_delta(self.output.take()))

    def finish(self):
        self.deltas.append(_delta(self.output.finish()))
        return self.deltas

    @property
    def ids(self):
        return [i for delta in self.deltas if delta for i in delta[0]]

    @property
    def text(self):
        return "".join(delta[1] for delta in self.deltas if delta)


def _delta(event):
    return None if event is None else ([token.token_id for token in event.tokens], event.text)


def _stopped(text):
    return StopMatch(stop_text=text)


# ---- stop texts ----------------------------------------------------------------------------------


def test_every_token_goes_out_at_once_when_nothing_can_stop_it():
    stream = Stream("Hello", " world", "")
    assert stream.run() == [([0], "Hello"), ([1], " world"), ([2], ""), None]
    assert stream.match is None


def test_a_record_carries_the_token_it_was_given():
    stream = Stream("a")
    token = stream.info(0, -0.5, 2, (LogProb(0, -0.5, "a", 2),))
    stream.output.push(token, 1)
    assert stream.output.take() == TokenOutput(0, (TokenInfo(0, "a", -0.5, 2, (LogProb(0, -0.5, "a", 2),)),), "a")


def test_t1_no_part_of_a_stop_text_is_streamed_before_it_matches():
    stream = Stream("DEF", "G", "HI", "J", stops=["DEFGHIJ"])
    assert stream.run() == [None, None, None, None]
    assert stream.match == _stopped("DEFGHIJ")


@pytest.mark.parametrize(("include", "text", "ids"), [(None, "ab", [0]), (False, "ab", [0]), (True, "abc!", [0, 1])])
def test_t2_stp_10_stp_11_a_stop_text_cuts_inside_a_token(include, text, ids):
    stream = Stream("ab", "c!d", stops=["c!"], include=include)
    stream.run()
    assert (stream.text, stream.ids, stream.match) == (text, ids, _stopped("c!"))


def test_t3_ids_and_text_of_a_failed_prefix_come_in_one_event():
    stream = Stream("a", "x", "b", stops=["xyz"])
    assert stream.run() == [([0], "a"), None, ([1, 2], "xb"), None]


def test_t3_a_token_is_held_whole_when_its_end_may_begin_a_stop_text():
    stream = Stream("abx", "yw", stops=["xyz"])
    assert stream.run() == [None, ([0, 1], "abxyw"), None]


@pytest.mark.parametrize("stops", [["ab", "abc"], ["abc", "ab"]])
def test_t7_of_stops_that_start_together_the_shortest_wins(stops):
    stream = Stream("abc", stops=stops, include=True)
    stream.run()
    assert (stream.text, stream.match) == ("ab", _stopped("ab"))


def test_t7_eos_emits_its_record_and_releases_what_a_stop_text_held():
    stream = Stream("xy", "</s>", stops=["xyz"], special=[1])
    assert stream.output.push(stream.info(0), 1) is None
    stream.take()
    stream.output.push_eos(stream.info(1))
    assert stream.finish() == [None, ([0, 1], "xy")]


@pytest.mark.parametrize("stops", [["bc", "abcd"], ["abcd", "bc"]])
def test_stp_08_the_earliest_start_wins_among_stops_that_end_in_one_token(stops):
    stream = Stream("zabcd", stops=stops)
    stream.run()
    assert (stream.text, stream.match) == ("z", _stopped("abcd"))


def test_stp_15_the_first_stop_to_be_complete_ends_the_output():
    stream = Stream("a", "bc", "d", stops=["abcd", "bc"])
    stream.run()
    assert (stream.text, stream.ids, stream.match) == ("a", [0], _stopped("bc"))


def test_stp_11_a_record_is_emitted_only_if_it_has_a_character_before_the_cut():
    stream = Stream("ab", "cS", "TO", "Prest", stops=["STOP"])
    assert stream.run() == [([0], "ab"), None, None, ([1], "c")]


def test_stp_11_a_textless_record_before_the_cut_is_emitted_whether_or_not_it_was_held():
    free = Stream("b", "<p>", "xyz", stops=["xyz"], special=[1])
    held = Stream("x", "<p>", "xyz", stops=["xyz"], special=[1])
    assert free.run() == [([0], "b"), ([1], ""), None]
    assert held.run() == [None, None, ([0, 1], "x")]


def test_stp_11_a_textless_record_inside_the_stop_text_is_dropped():
    stream = Stream("x", "<p>", "yz", stops=["xyz"], special=[1])
    assert stream.run() == [None, None, None]


@pytest.mark.parametrize("text", ["aab", "aaaab", "aaaaaaaab"])
def test_a_stop_text_that_overlaps_itself_is_found_at_any_split(text):
    stream = Stream(*text, stops=["aab"])
    stream.run()
    assert (stream.text, stream.match) == (text[:-3], _stopped("aab"))


@pytest.mark.parametrize("split", [1, 2, 3, 5, 11])
def test_a_failed_stop_text_falls_back_to_the_longest_stop_that_may_still_follow(split):
    text = "aabaaabaaac"
    stream = Stream(*(text[i : i + split] for i in range(0, len(text), split)), stops=["aabaaac"])
    stream.run()
    assert (stream.text, stream.match) == ("aaba", _stopped("aabaaac"))


def test_with_include_a_possible_stop_text_is_not_held_since_it_is_shown_in_any_case():
    stream = Stream("DEF", "G", "HIJK", stops=["DEFGHI"], include=True)
    assert stream.run() == [([0], "DEF"), ([1], "G"), ([2], "HI")]


def test_stp_02_a_held_prefix_comes_out_when_the_length_ends_the_output():
    stream = Stream("a", "xy", stops=["xyz"])
    assert stream.run() == [([0], "a"), None, ([1], "xy")]


def test_stp_05_a_stop_text_that_ends_before_min_tokens_does_not_count():
    stream = Stream("a", "STOP", "b", "STOP", stops=["STOP"], min_tokens=3)
    stream.run()
    assert (stream.text, stream.ids, stream.match) == ("aSTOPb", [0, 1, 2], _stopped("STOP"))


def test_stp_05_a_stop_text_that_begins_before_min_tokens_counts_when_it_ends_after():
    stream = Stream("a", "ST", "OP", "b", stops=["STOP"], min_tokens=3)
    stream.run()
    assert (stream.text, stream.ids, stream.match) == ("a", [0], _stopped("STOP"))


def test_stp_05_a_stop_text_that_began_inside_an_uncounted_one_counts():
    stream = Stream("ab", "ab", "ab", stops=["abab"], min_tokens=3)
    stream.run()
    assert (stream.text, stream.match) == ("ab", _stopped("abab"))


def test_stp_05_text_that_looks_like_a_stop_is_not_held_once_it_can_match_no_more():
    stream = Stream("xyz", "a", stops=["xyz"], min_tokens=2)
    assert stream.run() == [([0], "xyz"), ([1], "a"), None]


@pytest.mark.parametrize(("include", "expected"), [(True, [([0], "a"), ([1], "b")]), (None, [([0], "a"), None])])
def test_stp_09_stp_10_a_stop_token_and_its_text_stay_only_with_include(include, expected):
    stream = Stream("a", "b", include=include)
    stream.output.push(stream.info(0), 1)
    stream.take()
    stream.output.push_stop_token(stream.info(1))
    assert stream.finish() == expected


def test_stp_10_a_special_stop_token_stays_without_text():
    stream = Stream("a", "<stop>", special=[1], include=True)
    stream.output.push(stream.info(0), 1)
    stream.output.push_stop_token(stream.info(1))
    assert stream.finish() == [([0, 1], "a")]


def test_stp_12_the_text_of_an_eos_token_is_not_in_the_text_even_if_it_is_not_special():
    stream = Stream("a", "the end")
    stream.output.push(stream.info(0), 1)
    stream.output.push_eos(stream.info(1))
    assert stream.finish() == [([0, 1], "a")]


def test_stp_16_stop_texts_look_at_the_output_only():
    stream = Stream("OP", "x", stops=["STOP"], prompt=["ST"])
    assert stream.run() == [([0], "OP"), ([1], "x"), None]


# ---- characters split over tokens ----------------------------------------------------------------

EMOJI = "😀".encode()


def test_d1_the_first_delta_holds_the_character_that_the_prompt_began_and_no_prompt_text():
    stream = Stream(EMOJI[2:], "x", prompt=["hello ", EMOJI[:2]])
    assert stream.run() == [([0], "😀"), ([1], "x"), None]


def test_d1_an_output_without_tokens_shows_nothing_of_the_bytes_the_prompt_left():
    stream = Stream(prompt=["hello ", EMOJI[:2]])
    assert stream.run() == [None]


def test_d2_a_split_character_waits_for_its_last_byte_with_its_records_in_interleaved_outputs():
    first = Stream(*(EMOJI[i : i + 1] for i in range(4)), "!")
    second = Stream("é".encode()[:1], "é".encode()[1:] + EMOJI[:1], EMOJI[1:3], EMOJI[3:], "?")
    for token_id in range(5):
        for stream in (first, second):
            stream.output.push(stream.info(token_id), token_id + 1)
            stream.take()
    assert first.finish() == [None, None, None, ([0, 1, 2, 3], "😀"), ([4], "!"), None]
    assert second.finish() == [None, None, None, ([0, 1, 2, 3], "é😀"), ([4], "?"), None]


def test_d5_an_incomplete_character_is_flushed_in_the_last_token_output():
    stream = Stream("a", EMOJI[:2], EMOJI[2:3])
    assert stream.run() == [([0], "a"), None, None, ([1, 2], "\ufffd")]


def test_d5_an_incomplete_character_before_eos_is_flushed_too():
    stream = Stream(EMOJI[:2], "</s>", special=[1])
    stream.output.push(stream.info(0), 1)
    stream.output.push_eos(stream.info(1))
    assert stream.finish() == [([0, 1], "\ufffd")]


def test_bytes_behind_a_matched_stop_text_are_dropped_not_flushed():
    stream = Stream("ab", b"c!" + EMOJI[:2], stops=["c!"], include=True)
    assert stream.run() == [([0], "ab"), ([1], "c!")]


def test_stp_11_no_record_of_a_split_character_is_emitted_when_it_is_the_stop_text():
    stream = Stream("a", EMOJI[:2], EMOJI[2:] + b"b", stops=["😀"])
    assert stream.run() == [([0], "a"), None, None]
    assert stream.match == _stopped("😀")


def test_str_15_a_model_stuck_on_lead_bytes_still_streams():
    stream = Stream(*[EMOJI[:1]] * 100)
    deltas = stream.run()
    assert any(deltas[:20])
    assert stream.text == "\ufffd" * 100
    assert stream.ids == list(range(100))


def test_str_17_the_text_is_the_detokenized_ids_without_special_tokens():
    stream = Stream("a", "<pad>", "b", EMOJI[:2], EMOJI[2:], special=[1])
    stream.run()
    assert stream.text == stream.tokenizer.decode(stream.ids) == "ab😀"


def test_p5_a_preempted_sequence_goes_on_where_it_was():
    stream = Stream("a", "x", "y", "b", stops=["xyz"])
    stream.output.push(stream.info(0), 1)
    stream.take()
    stream.output.push(stream.info(1), 2)
    stream.take()
    assert stream.output.take() is None
    stream.output.push(stream.info(2), 3)
    stream.take()
    stream.output.push(stream.info(3), 4)
    assert stream.finish() == [([0], "a"), None, None, ([1, 2, 3], "xyb")]


# ---- against a naive oracle ----------------------------------------------------------------------


@st.composite
def _split_text(draw):
    """Random text over a small alphabet, its UTF-8 bytes split at random places; some tokens are special."""
    data = draw(st.text("ab€😀", max_size=14)).encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=len(data))) | {0, len(data)})
    tokens: list[bytes] = [data[start:end] for start, end in zip(cuts, cuts[1:])]
    special = []
    for place in sorted(draw(st.sets(st.integers(0, len(tokens)), max_size=2))):
        tokens.insert(place, b"<p>")
        special.append(place)
    return tokens, special


STOPS = st.lists(st.text("ab€😀", min_size=1, max_size=5), max_size=4)


def _complete_text(tokens, special):
    """Characters complete in `tokens`, and whether bytes are left over."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(b"".join(token for i, token in enumerate(tokens) if i not in special))
    return text, bool(decoder.getstate()[0])


def _oracle(tokens, special, stops, include, min_tokens):
    """(text, ids, stop) by looking at the whole text after every token."""
    before = ""
    for count in range(1, len(tokens) + 1):
        text, _ = _complete_text(tokens[:count], special)
        matches = [
            (start, len(stop), order)
            for order, stop in enumerate(stops)
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > len(before)
        ]
        if matches and count >= min_tokens:
            start, length, order = min(matches)
            cut = start + length if include else start
            ids = [i for i in range(count) if _comes_before(tokens, special, i, cut)]
            return text[:cut], ids, stops[order]
        before = text
    text, is_open = _complete_text(tokens, special)
    return text + "\ufffd" * is_open, list(range(len(tokens))), None


def _comes_before(tokens, special, index, cut):
    first_char, _ = _complete_text(tokens[:index], special)
    if index in special or not tokens[index]:
        text, is_open = _complete_text(tokens[: index + 1], special)
        return len(text) + is_open <= cut
    return len(first_char) < cut


@settings(max_examples=400, deadline=None)
@given(_split_text(), STOPS, st.booleans(), st.integers(0, 4))
def test_the_stream_joined_is_what_cutting_the_joined_text_gives(split, stops, include, min_tokens):
    tokens, special = split
    stream = Stream(*tokens, special=special, stops=stops, include=include, min_tokens=min_tokens)
    stream.run()
    text, ids, stop = _oracle(tokens, special, stops, include, min_tokens)
    assert (stream.text, stream.ids) == (text, ids)
    assert stream.match == (None if stop is None else _stopped(stop))


@settings(max_examples=400, deadline=None)
@given(_split_text(), STOPS, st.booleans())
def test_at_every_moment_ids_and_text_agree_and_no_more_is_held_than_must_be(split, stops, include):
    tokens, special = split
    stream = Stream(*tokens, special=special, stops=stops, include=include)
    for token_id in range(len(tokens)):
        if stream.output.push(stream.info(token_id), token_id + 1) is not None:
            return
        stream.take()
        text, _ = _complete_text(tokens[: token_id + 1], special)
        num_held = max(
            (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]) and not include), default=0
        )
        whole = [_complete_text(tokens[:count], special) for count in range(token_id + 2)]
        safe = [n for n, (t, is_open) in enumerate(whole) if not is_open and len(t) <= len(text) - num_held]
        assert stream.ids == list(range(safe[-1]))
        assert stream.text == whole[safe[-1]][0]


# ---- speed ---------------------------------------------------------------------------------------


def _seconds_per_token(stops, table, num_tokens, rounds=3):
    """Best of a few rounds of push and take, the making of the TokenInfo included."""
    tokenizer = TableTokenizer(table)
    conditions = tuple(StopCondition(stop_text=text) for text in stops)
    best = float("inf")
    for _ in range(rounds):
        stopping = StoppingOptions(conditions=conditions)
        output = OutputStream(tokenizer.detokenizer([]), output_index=0, stopping=stopping)
        started = time.perf_counter()
        for count in range(1, num_tokens + 1):
            output.push(TokenInfo(0, tokenizer.token_text(0)), count)
            output.take()
        best = min(best, time.perf_counter() - started)
    return best / num_tokens


def test_the_cost_of_a_token_does_not_grow_with_the_output():
    stops = ["a" * 300 + "b"]
    short, long = (_seconds_per_token(stops, ["aaaa"], n) for n in (500, 5000))
    assert long < 5 * short


def test_the_cost_of_a_token_does_not_grow_with_the_number_of_stop_texts():
    few, many = (_seconds_per_token([f"a{i}" for i in range(n)], [" a word"], 2000) for n in (2, 2000))
    assert many < 20 * few


@pytest.mark.bench
@pytest.mark.parametrize("stops", [(), ("\n\n", "User:"), ("word!", "a worse")])
def test_bench_push_and_take(stops):
    print(f"\n{stops}: {1e6 * _seconds_per_token(stops, [' a word'], 50_000):.2f} us per token")


# ---- collecting ----------------------------------------------------------------------------------


def _events():
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


def test_a_result_holds_every_output_in_index_order_with_usage_of_the_last_event():
    events = _events()
    sampling, stopping = SamplingParams(num_sequences=2), StoppingOptions(max_tokens=3)
    collector = ResultCollector("r", sampling=sampling, stopping=stopping)
    for event in events:
        collector.add(event)
    result = collector.result()
    assert [output.index for output in result.outputs] == [0, 1]
    assert [output.text for output in result.outputs] == ["abc", "a"]
    assert [output.token_ids for output in result.outputs] == [[0, 1, 3], [0, 2]]
    assert [output.finish_reason for output in result.outputs] == [FinishReason.LENGTH, FinishReason.STOP]
    assert [output.stop_match for output in result.outputs] == [None, StopMatch(eos_token_id=2)]
    assert result.prompt is events[0].tokens
    assert result.usage == Usage(2, 5, 7, cached_prompt_tokens=0)
    assert (result.request_id, result.sampling, result.stopping) == ("r", sampling, stopping)


def test_stp_03_an_output_without_tokens_is_in_the_result():
    collector = ResultCollector("r")
    collector.add(GenerationFinished(0, FinishReason.LENGTH, usage=Usage(2, 0, 2)))
    assert (collector.result().text, collector.result().tokens) == ("", ())


def test_a_prefill_result_carries_the_session():
    collector = ResultCollector("r")
    collector.add(PrefillReady(KvSessionRef(session_id="s"), Usage(2, 0, 2)))
    result = collector.result()
    assert (result.kv_session, result.usage, result.outputs) == (KvSessionRef(session_id="s"), Usage(2, 0, 2), ())


def test_a_result_before_the_end_shows_an_output_without_finish_reason():
    collector = ResultCollector("r")
    for event in _events()[:3]:
        collector.add(event)
    assert [(output.text, output.finish_reason) for output in collector.result().outputs] == [("ab", None), ("a", None)]


# ---- objects made on demand ----------------------------------------------------------------------


@dataclass
class Scores:
    logprobs: np.ndarray
    ranks: np.ndarray
    candidate_ids: np.ndarray | None = None
    candidate_logprobs: np.ndarray | None = None
    candidate_ranks: np.ndarray | None = None


def _literal(token_id):
    return f"t{token_id}"


def _candidates(num=3):
    ids = np.arange(num, dtype=np.int64) + 5
    return Candidates(ids, np.arange(0, -num, -1, dtype=np.float32) / 2, np.arange(num) + 1, _literal)


def test_candidates_read_as_a_sequence_of_logprobs():
    candidates = _candidates()
    expected = (LogProb(5, 0.0, "t5", 1), LogProb(6, -0.5, "t6", 2), LogProb(7, -1.0, "t7", 3))
    assert len(candidates) == 3
    assert tuple(candidates) == expected
    assert candidates[-1] == expected[-1]
    assert candidates[1:] == expected[1:]
    assert expected[1] in candidates
    assert [type(value) for value in (candidates[0].token_id, candidates[0].logprob, candidates[0].rank)] == [
        int,
        float,
        int,
    ]
    with pytest.raises(IndexError):
        candidates[3]


def test_candidates_equal_and_hash_like_the_tuple_of_their_items():
    candidates = _candidates()
    assert candidates == tuple(candidates) and tuple(candidates) == candidates and candidates == list(candidates)
    assert candidates == _candidates() and candidates != _candidates(2) and candidates != "t5"
    assert hash(candidates) == hash(tuple(candidates))
    assert TokenInfo(5, "t5", 0.0, 1, candidates) == TokenInfo(5, "t5", 0.0, 1, tuple(candidates))


def test_candidates_show_a_short_repr():
    assert repr(_candidates(1)) == f"Candidates([{LogProb(5, 0.0, 't5', 1)!r}])"
    assert repr(_candidates(50_000)).endswith(", … 49997 more])")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_candidates_are_copied_and_pickled_without_the_tokenizer(copied):
    candidates = Candidates(np.array([1]), np.array([-1.0], np.float32), np.array([1]), lambda token_id: "x")
    assert copied(candidates) == (LogProb(1, -1.0, "x", 1),)


def test_candidates_of_a_whole_vocabulary_make_only_what_is_read():
    made = []
    candidates = Candidates(np.arange(100_000), np.zeros(100_000, np.float32), np.arange(100_000) + 1, made.append)
    assert candidates[7].token_id == 7
    assert made == [7]


def _prompt(start, num_tokens=4, num_candidates=2):
    num_scored = num_tokens - max(1, start)
    scores = Scores(-np.arange(1, num_scored + 1, dtype=np.float32), np.arange(num_scored) + 1)
    if num_candidates:
        scores.candidate_ids = np.arange(num_scored * num_candidates).reshape(num_scored, num_candidates)
        scores.candidate_logprobs = -scores.candidate_ids.astype(np.float32)
        scores.candidate_ranks = scores.candidate_ids + 1
    return PromptTokens(np.arange(10, 10 + num_tokens), _literal, start, scores)


@pytest.mark.parametrize("start", [0, 1])
def test_lgp_10_lgp_11_every_prompt_token_but_the_first_is_scored(start):
    prompt = _prompt(start)
    assert len(prompt) == 4
    assert prompt[0] == TokenInfo(10, "t10")
    assert prompt[1] == TokenInfo(11, "t11", -1.0, 1, (LogProb(0, 0.0, "t0", 1), LogProb(1, -1.0, "t1", 2)))
    assert [token.logprob for token in prompt] == [None, -1.0, -2.0, -3.0]
    assert prompt[-1].candidates == (LogProb(4, -4.0, "t4", 5), LogProb(5, -5.0, "t5", 6))


def test_lgp_13_tokens_before_the_start_are_listed_without_scores():
    prompt = _prompt(2)
    assert [token.token_id for token in prompt] == [10, 11, 12, 13]
    assert [token.logprob for token in prompt] == [None, None, -1.0, -2.0]
    assert prompt[1] == TokenInfo(11, "t11")


def test_prompt_tokens_without_a_selection_have_no_candidates():
    assert _prompt(0, num_candidates=0)[2] == TokenInfo(12, "t12", -2.0, 2, ())


def test_a_prompt_of_one_token_has_nothing_to_score():
    assert tuple(_prompt(0, num_tokens=1)) == (TokenInfo(10, "t10"),)


def test_prompt_tokens_slice_and_equal_like_a_tuple():
    prompt = _prompt(0)
    assert prompt[1:3] == tuple(prompt)[1:3]
    assert prompt == tuple(prompt)
    assert PromptOutput(prompt) == PromptOutput(tuple(prompt))


# ---- the stream grammar itself -------------------------------------------------------------------


def test_the_grammar_accepts_a_whole_stream():
    check_stream(_events(), 2, prompt_tokens=2, completion_tokens=5)


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
