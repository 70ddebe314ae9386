"""Regular languages, regular expressions and the texts of numbers."""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import replace
from fractions import Fraction

import pytest

from openengine.core.guides.formats import FORMATS, format_language
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
from openengine.core.guides.regex import full_match, search
from openengine.core.guides.work import CompileTimeout, Work
from openengine.errors import InvalidArgument

TEXTS = ["".join(letters) for length in range(6) for letters in itertools.product("ab-", repeat=length)]


def work() -> Work:
    return Work(10)


# ---- regular expressions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [
        "a", "ab|b", "(a|b)*", "a+b?", "a{2}", "a{1,2}b", "a{2,}", "[ab]", "[^a]", ".", "(?:a|)b", "a*?b", "(a*)*",
        "^a", "b$", "^$", "^a|b$", "(^a|b)-", "a(b$|-)", "(?=a)..", "(?!a)..", "^(?!ab)[ab]+$", "a(?=b)", "(?P<x>a)b",
        "^(.*)$", "^(|.*)$", r"\x61", r"\-", "-{0}a", "[a-b-]", "(?i)A", "^(?=.*a)(?=.*b).*$", "(a|b){2,3}$",
    ],
)  # fmt: skip
def test_a_pattern_finds_what_python_finds(pattern):
    ours, theirs = search(pattern), re.compile(pattern)
    wrong = [text for text in TEXTS if matches(ours, text) != bool(theirs.search(text))]
    assert not wrong


@pytest.mark.parametrize(
    "pattern", ["a|ab", "(a|b)*-", "a{2,3}b*", "^(.*)$", "^(|.*)$", "(?=a).b", "(?!-).*", "(?i)AB"]
)
def test_gde_02_a_guide_matches_as_a_whole(pattern):
    wrong = [text for text in TEXTS if matches(full_match(pattern), text) != bool(re.fullmatch(pattern, text))]
    assert not wrong


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("[a-", "position 0"), ("(", "missing ')'"), ("a)", "position 1"), ("*a", "nothing to repeat"), (r"\bfoo", "word boundary"),
        (r"(a)\1", "back reference"), ("(?<=a)b", "lookbehind"), ("a{2,1}", "wrong order"), ("(a$)*b", "inside the repetition"),
        ("[b-a]", "wrong order"), (r"\p{Script=Han}", "Unicode property"), ("a\\", "backslash at the end"), ("(?m)^a", "multi-line"),
        ("a?^b", "'^' after an optional part"), ("((" * 100 + "))" * 100, "nested more than"), ("a{200000}", "repetition count"),
        (r"\q", r"the escape \q"), ("a{,2}", "position 1: {,2} is a repetition in some dialects"), ("a{1, 2}", "without spaces"),
        ("a{,}", "as in {0,2}"), ("a|{2}", "position 2: nothing to repeat"),
    ],
)  # fmt: skip
def test_g3_what_a_pattern_cannot_mean_is_refused_by_name(pattern, said):
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        full_match(pattern)


def test_braces_that_are_no_repetition_in_any_dialect_are_literal():
    for pattern in ("a{", "a{}", "a{b}", "{a,2}", r"a\{,2}"):
        assert matches(full_match(pattern), pattern.replace("\\", "")), pattern


def test_g15_shorthands_are_ascii_classes():
    assert matches(search(r"^\d+$"), "0123") and not matches(search(r"^\d+$"), "٣")
    assert matches(search(r"^[\w-]+$"), "a_-9") and not matches(search(r"^[\w-]+$"), "é")
    assert matches(search(r"^\S$"), "é") and not matches(search(r"^\S$"), "\u00a0")


def test_unicode_categories_and_planes_are_known():
    assert matches(full_match(r"\p{Lu}\P{L}"), "É1")
    assert matches(full_match(r"\u{1F600}\ud83d\ude00[😀-😂]"), "😀😀😁")
    assert not matches(full_match("."), "\n")


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
        language = number_texts(wanted)
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
        language = number_texts(NumberRange(exact[0], is_open, exact[1], is_open))
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
    below_five = number_texts(NumberRange(high=Fraction(5), high_open=True))
    assert matches(below_five, "4.99999999") and not matches(below_five, "4.99999999999999999999")
    not_whole = number_texts(NumberRange(is_integer=False))
    assert matches(not_whole, "0.30000000000000004") and not matches(not_whole, "55.00000000000000000001")
    assert not matches(not_whole, "5.0") and not matches(not_whole, "5e3") and matches(not_whole, "1.5e-07")


# ---- formats ---------------------------------------------------------------------------------------

FORMAT_CASES = {
    "date": (["2024-02-29", "1999-12-31", "2000-02-29"], ["2023-02-29", "1900-02-29", "2024-13-01", "2024-1-01", "2024-04-31"]),
    "time": (["23:59:60Z", "12:00:00.123+05:30", "00:00:00z"], ["24:00:00Z", "12:00:00", "12:00:60Z", "12:00:00+24:00"]),
    "date-time": (["2024-02-29T12:00:00Z", "1985-04-12t23:20:50.52-01:00"], ["2024-02-29 12:00:00Z", "2022-01-01T12:00:00"]),
    "duration": (["P3Y6M4DT12H30M5S", "PT36H", "P4W", "P1Y", "P2M"], ["P", "PT", "P1D2H", "P1Y2W", "1Y", "P1S"]),
    "email": (["a@b.c", "a.b+c@example.com", '"a b"@example.com', "x@[127.0.0.1]"], ["a", "a@", "@b", ".a@b.c", "a..b@c.d"]),
    "hostname": (["example.com", "a", "xn--4gbwdl"], ["-a.com", "a-.com", "a..b", "a_b", "a" * 64, ""]),
    "ipv4": (["0.0.0.0", "255.255.255.255"], ["256.0.0.1", "1.2.3", "01.2.3.4", "1.2.3.4.5"]),
    "ipv6": (["::", "::1", "1:2:3:4:5:6:7:8", "1::8", "::ffff:1.2.3.4", "1:2:3:4:5:6::8"], [":", "1:2", "1::2::3", "12345::", "::1.2.3"]),
    "uri": (["http://a.b/c?d#e", "urn:x:y", "ftp://[::1]:80/", "mailto:a@b"], ["a b:c", "//a.b", "http://a b", "invalid", "http://a/ü"]),
    "uuid": (["2EB8AA08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638"]),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_holds_what_its_standard_says(name):
    language = format_language(name)
    valid, invalid = FORMAT_CASES[name]
    assert [text for text in valid if not matches(language, text)] == []
    assert [text for text in invalid if matches(language, text)] == []
