"""Regular languages, and the texts of JSON strings and numbers."""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import replace
from fractions import Fraction

import pytest

from openengine.core.guides.json_text import json_string
from openengine.core.guides.language import (
    ANY_TEXT,
    EMPTY,
    TooComplex,
    chars,
    complement,
    concat,
    intersect,
    is_empty,
    literal,
    matches,
    repeat,
    sample,
    union,
)
from openengine.core.guides.numbers import NumberRange, number_texts
from openengine.core.guides.regex import full_match
from openengine.core.guides.work import CompileTimeout, Work

TEXTS = ["".join(letters) for length in range(6) for letters in itertools.product("ab-", repeat=length)]


def work() -> Work:
    return Work(10)


# ---- algebra ---------------------------------------------------------------------------------------


def test_operations_agree_with_those_of_sets():
    rng = random.Random(0)

    def build(depth):
        kind = rng.randrange(7) if depth else 0
        if kind <= 1:
            part = rng.choice([literal("a"), literal("ab"), chars([(97, 98)]), literal("b-"), literal("")])
            return part, {text for text in TEXTS if matches(part, text)}
        one, first = build(depth - 1)
        if kind == 2:
            return complement(one), set(TEXTS) - first
        if kind == 3:
            powers, current = {""}, {""}
            for _ in range(5):
                current = {a + b for a in current for b in first if len(a + b) < 6}
                powers |= current
            return repeat(one, 0, None), powers
        two, second = build(depth - 1)
        if kind == 4:
            return union(one, two), first | second
        if kind == 5:
            return intersect(one, two), first & second
        return concat(one, two), {a + b for a in first for b in second if len(a + b) < 6}

    for _ in range(150):
        language, expected = build(3)
        assert {text for text in TEXTS if matches(language, text)} == expected


def test_emptiness_is_decided_and_sampled():
    assert is_empty(intersect(full_match("a+b"), complement(full_match(".*b"))), work())
    found = sample(intersect(full_match("[ab]{3,9}"), complement(full_match("a.*")), full_match(".*ab")), work())
    assert found is not None and re.fullmatch("b[ab]*ab", found)
    assert union(EMPTY, literal("a")) == literal("a") and concat(EMPTY, ANY_TEXT) == EMPTY


def test_a_question_that_visits_too_many_states_says_so():
    hard = intersect(full_match("(a|b)*a(a|b){12}"), full_match("(a|b)*b(a|b){11}"), complement(full_match("[ab]*")))
    with pytest.raises(TooComplex):
        is_empty(hard, work(), budget=200)


def test_a_question_stops_when_the_time_is_up():
    now = itertools.count()
    with pytest.raises(CompileTimeout):
        is_empty(
            intersect(full_match("(a|b)*a(a|b){20}"), complement(full_match("[ab]*"))),
            Work(3, lambda: float(next(now))),
        )


# ---- texts of JSON values --------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "a", 'say "hi"', "back\\slash", "\n\t\x00\x1f", "é😀", "\x7f\u2028"])
def test_a_string_is_written_as_json_dumps_writes_it(text):
    written = json.dumps(text, ensure_ascii=False)
    for language in (literal(text), ANY_TEXT, complement(literal("other"))):
        assert matches(json_string(language), written)
    assert not matches(json_string(complement(literal(text))), written)


def test_a_free_string_may_use_every_escape_but_no_lone_surrogate():
    free = json_string(ANY_TEXT)
    assert matches(free, r'"\u00e9\/\ud83d\ude00"')
    assert not matches(free, r'"\ud83d"') and not matches(free, r'"\x"') and not matches(free, '"\n"')


def test_g8_numbers_keep_to_exact_bounds():
    rng = random.Random(1)

    def value():
        return rng.choice([
            Fraction(rng.randint(-30, 30)), Fraction(rng.randint(-3000, 3000), rng.choice([10, 100, 1000])),
            Fraction(rng.choice([1, -1]) * rng.randint(1, 9999)) * Fraction(10) ** rng.randint(-12, 25),
        ])  # fmt: skip

    for _ in range(60):
        low, high = (value() if rng.random() < 0.7 else None for _ in range(2))
        wanted = NumberRange(
            low, low is not None and rng.random() < 0.4, high, high is not None and rng.random() < 0.4,
            rng.choice([None, None, True, False]), None, frozenset(value() for _ in range(rng.choice([0, 0, 1]))),
        )  # fmt: skip
        bounds = replace(wanted, is_integer=None, excluded=frozenset())
        language = number_texts(wanted, work())
        for _ in range(30):
            near = rng.choice([bound for bound in (low, high, *wanted.excluded) if bound is not None] or [Fraction(0)])
            number = rng.choice([value(), near, near + Fraction(rng.randint(-2, 2), rng.choice([1, 10, 100]))])
            text = str(int(number)) if number.denominator == 1 and abs(number) < 10**20 else repr(float(number))
            if wanted.is_integer and not re.fullmatch(r"-?\d+", text):
                continue
            # An exponent may follow only digits that meet the bounds without it.
            digits_meet = bounds.contains(Fraction(text.partition("e")[0]))
            assert matches(language, text) == (wanted.contains(Fraction(text)) and digits_meet), (wanted, text)


def test_digits_that_left_the_bounds_are_no_beginning_of_a_number():
    rng = random.Random(2)
    plain = complement(concat(ANY_TEXT, literal("e"), ANY_TEXT))
    bounds = [
        (0, 5, False),
        (0, 1, True),
        (0, 1, False),
        (None, 5, False),
        (20, None, True),
        (-3, 70, True),
        (2, 2.5, False),
    ]
    for low, high, is_open in bounds:
        exact = [None if bound is None else Fraction(bound) for bound in (low, high)]
        language = number_texts(NumberRange(exact[0], is_open, exact[1], is_open), work())
        for _ in range(40):
            text = f"{rng.choice(['', '-'])}{rng.choice(['0', str(rng.randint(1, 99))])}.{rng.randint(0, 999)}"
            for size in range(1, len(text) + 1):
                rest = language
                for char in text[:size]:
                    rest = rest.after(ord(char))
                if not is_empty(rest, work()):
                    shorter = intersect(language, plain)
                    for char in text[:size]:
                        shorter = shorter.after(ord(char))
                    assert not is_empty(shorter, work()), (low, high, text[:size])


def test_a_number_that_a_float_would_round_onto_an_open_bound_is_left_out():
    below_five = number_texts(NumberRange(high=Fraction(5), high_open=True), work())
    assert matches(below_five, "4.99999999") and not matches(below_five, "4.99999999999999999999")
    not_whole = number_texts(NumberRange(is_integer=False), work())
    assert matches(not_whole, "0.30000000000000004") and not matches(not_whole, "55.00000000000000000001")
    assert not matches(not_whole, "5.0") and not matches(not_whole, "5e3") and matches(not_whole, "1.5e-07")
