"""The text of an output: stop texts, characters split over tokens, what is held and what goes out."""

from __future__ import annotations

import pytest

from openengine.types import (
    LogProb,
    TokenInfo,
    TokenOutput,
)
from tests.table_stream import Stream, stopped

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
    assert stream.match == stopped("DEFGHIJ")


@pytest.mark.parametrize(("include", "text", "ids"), [(None, "ab", [0]), (False, "ab", [0]), (True, "abc!", [0, 1])])
def test_t2_stp_10_stp_11_a_stop_text_cuts_inside_a_token(include, text, ids):
    stream = Stream("ab", "c!d", stops=["c!"], include=include)
    stream.run()
    assert (stream.text, stream.ids, stream.match) == (text, ids, stopped("c!"))


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
    assert (stream.text, stream.match) == ("ab", stopped("ab"))


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
    assert (stream.text, stream.match) == ("z", stopped("abcd"))


def test_stp_15_the_first_stop_to_be_complete_ends_the_output():
    stream = Stream("a", "bc", "d", stops=["abcd", "bc"])
    stream.run()
    assert (stream.text, stream.ids, stream.match) == ("a", [0], stopped("bc"))


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
    assert (stream.text, stream.match) == (text[:-3], stopped("aab"))


@pytest.mark.parametrize("split", [1, 2, 3, 5, 11])
def test_a_failed_stop_text_falls_back_to_the_longest_stop_that_may_still_follow(split):
    text = "aabaaabaaac"
    stream = Stream(*(text[i : i + split] for i in range(0, len(text), split)), stops=["aabaaac"])
    stream.run()
    assert (stream.text, stream.match) == ("aaba", stopped("aabaaac"))


def test_with_include_a_possible_stop_text_is_not_held_since_it_is_shown_in_any_case():
    stream = Stream("DEF", "G", "HIJK", stops=["DEFGHI"], include=True)
    assert stream.run() == [([0], "DEF"), ([1], "G"), ([2], "HI")]


def test_stp_02_a_held_prefix_comes_out_when_the_length_ends_the_output():
    stream = Stream("a", "xy", stops=["xyz"])
    assert stream.run() == [([0], "a"), None, ([1], "xy")]


def test_stp_05_a_stop_text_that_ends_before_min_tokens_does_not_count():
    stream = Stream("a", "STOP", "b", "STOP", stops=["STOP"], min_tokens=3)
    stream.run()
    assert (stream.text, stream.ids, stream.match) == ("aSTOPb", [0, 1, 2], stopped("STOP"))


def test_stp_05_a_stop_text_that_begins_before_min_tokens_counts_when_it_ends_after():
    stream = Stream("a", "ST", "OP", "b", stops=["STOP"], min_tokens=3)
    stream.run()
    assert (stream.text, stream.ids, stream.match) == ("a", [0], stopped("STOP"))


def test_stp_05_a_stop_text_that_began_inside_an_uncounted_one_counts():
    stream = Stream("ab", "ab", "ab", stops=["abab"], min_tokens=3)
    stream.run()
    assert (stream.text, stream.match) == ("ab", stopped("abab"))


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
    assert stream.match == stopped("😀")


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
