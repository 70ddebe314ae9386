"""Regular expressions as guides: what Python says they match, and the time that any of them may take."""

from __future__ import annotations

import itertools
import random
import re
import time
import warnings

import pytest

from openengine.core.guides.language import TooComplex, complement, first_chars, intersect, is_empty, matches, union
from openengine.core.guides.regex import full_match, search
from openengine.core.guides.work import CompileTimeout, Work
from openengine.errors import InvalidArgument

# ---- cases -----------------------------------------------------------------------------------------

_SHORT_TEXTS = ["".join(text) for length in range(6) for text in itertools.product("ab-", repeat=length)]


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
    wrong = [text for text in _SHORT_TEXTS if matches(ours, text) != bool(theirs.search(text))]
    assert not wrong


@pytest.mark.parametrize(
    "pattern", ["a|ab", "(a|b)*-", "a{2,3}b*", "^(.*)$", "^(|.*)$", "(?=a).b", "(?!-).*", "(?i)AB"]
)
def test_gde_02_a_guide_matches_as_a_whole(pattern):
    wrong = [text for text in _SHORT_TEXTS if matches(full_match(pattern), text) != bool(re.fullmatch(pattern, text))]
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


# ---- against Python --------------------------------------------------------------------------------

_ATOMS = [
    "a",
    "b",
    "c",
    "-",
    "1",
    "é",
    ".",
    r"\d",
    r"\w",
    r"\s",
    r"\D",
    r"\W",
    "[ab]",
    "[^a]",
    "[a-c]",
    r"[\d-]",
    "[]a]",
    "[^]a]",
]
_ATOMS += [r"\.", r"\-", r"\n", r"\x61", r"[\w.]", "{", "}", "{}", "a{", "{a}", " ", "^", "$", r"\A", r"\Z"]  # fmt: skip
_QUANTIFIERS = [
    "",
    "",
    "",
    "*",
    "+",
    "?",
    "{2}",
    "{1,2}",
    "{0}",
    "{1,}",
    "*?",
    "+?",
    "??",
    "{1,2}?",
    "{0,1}",
    "{,2}",
    "++",
]
_MARKS = "ab()[]{}|*+?.^$\\-,01pxu:=!<>&~ "
_TEXTS = ["".join(text) for length in range(5) for text in itertools.product("ab1-", repeat=length)]
_TEXTS += ["é", "a\n", "{", "}", "a{", "{}", "{a}", " ", "ba c", "\n", "aé", "_", ".", "c", "]", "bc"]


def _pattern(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(10) if depth else 0
    if kind < 3:
        return rng.choice(_ATOMS) + rng.choice(_QUANTIFIERS)
    if kind < 6:
        return "".join(_pattern(rng, depth - 1) for _ in range(rng.randrange(4)))
    if kind < 8:
        inner = "|".join(_pattern(rng, depth - 1) for _ in range(rng.randint(1, 3)))
        return rng.choice(["(", "(?:"]) + inner + ")" + rng.choice(_QUANTIFIERS)
    if kind == 8:
        return rng.choice(["(?=", "(?!"]) + _pattern(rng, depth - 1) + ")"
    return _pattern(rng, depth - 1) + "|" + _pattern(rng, depth - 1)


def _random_pattern(rng: random.Random) -> str:
    is_junk = rng.random() < 0.25
    pattern = "".join(rng.choices(_MARKS, k=rng.randint(1, 8))) if is_junk else _pattern(rng, 3)
    return ("(?i)" if rng.random() < 0.1 else "") + pattern


def test_gde_02_random_patterns_match_what_python_matches_or_are_refused_with_a_place():
    rng = random.Random(7)
    num_compared = 0
    for _ in range(600):
        pattern = _random_pattern(rng)
        try:
            ours = full_match(pattern, Work(20))
        except InvalidArgument as exc:
            assert "position" in exc.message or "'^' after an optional part" in exc.message
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                theirs = re.compile(pattern, re.ASCII)
        except re.error:
            continue  # other dialects know it
        num_compared += 1
        texts = rng.sample(_TEXTS, 25)
        assert [text for text in texts if matches(ours, text) != bool(theirs.fullmatch(text))] == [], pattern
    assert num_compared > 250


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"\ud83d\ud83d\ude00", "half of a surrogate pair"), (r"\ud83d\u0041", "half of a surrogate pair"),
        (r"\ud800" * 3000, "half of a surrogate pair"), (r"\x１２", "malformed"), (r"\u{110000}", "malformed"),
        (r"\u{000000000041}", "malformed"), (r"\p{Script=L}", "Unicode property 'Script=L'"), (r"\p{Lx}", "Unicode property"),
        (r"\p{", "Unicode property"), (r"\p{}", "Unicode property"), (r"[\p{", "Unicode property"), (r"(?i)\p{Lu}", "case-insensitive"), (r"(?i)[\p{Lu}]", "case-insensitive"),
        ("a{" + "1" * 5000 + "}", "repetition count"), ("a" + "{2}" * 200, "repetitions of one another"),
        ("(?=a)" * 5000, "more than 4000 anchors and lookaheads"), ("{1 }a", "position 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_with_its_place(pattern, said):
    with pytest.raises(InvalidArgument, match=re.escape(said)) as caught:
        full_match(pattern)
    assert "at position" in caught.value.message and len(caught.value.message) < 400


def test_a_category_may_be_named_as_such():
    for pattern in (r"\p{gc=Lu}", r"\p{General_Category=Uppercase_Letter}", r"\pL", r"[\p{Lu}]", r"\p{Any}"):
        assert matches(full_match(pattern), "É"), pattern
    assert not matches(full_match(r"\P{Any}|a"), "É")
    assert matches(search(r"^\p{L}$"), "é")


def test_classes_in_common_are_those_of_both():
    both = intersect(full_match("[a-mx]"), full_match("[b-z]"), full_match(r"[^c]"))
    assert both == full_match("[bd-mx]") and is_empty(intersect(full_match("[a-c]"), full_match("[d-f]")), Work(1))


# ---- time ------------------------------------------------------------------------------------------

_SIZE = 100_000
_WORDS = ["".join(word) for word in itertools.islice(itertools.product("abcdefghij", repeat=4), _SIZE // 5)]
_LARGE = {
    "a_text": "a" * _SIZE,
    "dots": "." * _SIZE,
    "alternatives": "|".join(_WORDS),
    "empty_alternatives": "|" * _SIZE,
    "groups": "(a|bc)" * (_SIZE // 6),
    "a_class": "[" + "".join(chr(0x4E00 + 2 * index % 0x5000) for index in range(_SIZE // 4)) + "]",
    "properties": r"\p{L}" * (_SIZE // 5),
    "a_class_of_properties": "[" + r"\p{L}" * (_SIZE // 5) + "]",
    "ignored_case": "(?i)" + "[a-z]" * (_SIZE // 5),
    "braces": "{" * _SIZE,
    "braces_and_a_late_end": "a{b" * (_SIZE // 3) + "}",
    "alternatives_around_a_lookahead": "(" * 100 + "(?=a)" + "|".join(_WORDS) + ")" * 100,
    "a_lookahead_before_alternatives": "(?!zz)(" + "|".join(_WORDS) + ")",
    "anchors": "(?:^a|b)" * (_SIZE // 8),
}
_NESTED = {
    "stars": "(" * 100 + "a|aa" + ")*" * 100 + "b{1,1000}",
    "one_star": "(a|aa)*b{1,1000}",
    "greedy": "(.*a){30}",
    "greedy_in_greedy": "((((.*a){30}){30}){30}){30}",
    "counted": "((((((a{1,9}){1,9}){1,9}){1,9}){1,9}){1,9}){1,9}",
    "counted_nothing": "((a{0}){100000}){100000}",
    "lookaheads": "(?!" * 119 + "a" + ")" * 119 + "a",
    "far_lookaheads": "(?!.*a.{18}$)(?=.*b.{17}$)[ab]*",
    "optional_ends": "(?:a$|b)?" * 60,
}


class _Watched(Work):
    """Measures how much of its thread's time passes from tick to tick."""

    def __init__(self) -> None:
        super().__init__(30)
        self.longest_s = 0.0
        self._last = time.thread_time()

    def tick(self, weight: int = 1) -> None:
        self.longest_s = max(self.longest_s, time.thread_time() - self._last)
        super().tick(weight)
        self._last = time.thread_time()


@pytest.mark.parametrize("name", [*_LARGE, *_NESTED])
def test_a_large_pattern_looks_at_the_time_all_along(name):
    work = _Watched()
    try:
        is_empty(full_match({**_LARGE, **_NESTED}[name], work), work)
    except (TooComplex, InvalidArgument):
        pass
    assert work.longest_s < 0.5  # mostly a collection of garbage; some milliseconds else


@pytest.mark.parametrize("name", _LARGE)
def test_a_large_pattern_stops_when_the_time_is_up(name):
    now = itertools.count()
    with pytest.raises(CompileTimeout):
        full_match(_LARGE[name], Work(50, lambda: float(next(now))))


@pytest.mark.parametrize("name", _NESTED)
def test_nested_repetitions_cost_no_more_than_their_length(name):
    began = time.thread_time()
    try:
        full_match(_NESTED[name], Work(10))
    except (TooComplex, InvalidArgument):
        pass
    assert time.thread_time() - began < 1


def test_what_follows_the_first_character_of_many_alternatives_is_found_in_time():
    language = intersect(union(*map(full_match, _WORDS[:3000])), complement(full_match("zz")))
    assert first_chars(language, Work(10)) == full_match("[a-c]")
    now = itertools.count()
    with pytest.raises(CompileTimeout):
        language.after(ord("a"), Work(20, lambda: float(next(now))))
