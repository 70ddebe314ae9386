"""Output streams of random tokens against an oracle that looks at the whole text, and what a token costs."""

from __future__ import annotations

import codecs
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openengine.core.output import OutputStream
from openengine.types import (
    StopCondition,
    StoppingOptions,
    TokenInfo,
)
from tests.table_stream import Stream, TableTokenizer, stopped

# ---- against a naive oracle ----------------------------------------------------------------------


@st.composite
def _split_text(draw):
    """Random text over a small alphabet, its UTF-8 bytes split at random places; some tokens are special."""
    data = draw(st.text("ab€😀", max_size=14)).encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=len(data))) | {0, len(data)})
    tokens: list[bytes] = [data[start:end] for start, end in itertools.pairwise(cuts)]
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
    assert stream.match == (None if stop is None else stopped(stop))


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
