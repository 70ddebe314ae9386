"""JSON numbers within exact bounds, as languages over their digits.

Integers are written without fraction and exponent. Other numbers may have both; where bounds, multiples or exclusions
apply, an exponent is written as Python and JavaScript write it, and only where they do: `1.5e-07`, `1e+16`. It may follow
only digits that are within the bounds themselves: an output that wanders beyond them could never end without it.

Whoever reads a number may round it to a float, and must still find it within its bounds. So a number outside an open
bound, an excluded number and a whole number where none may be are avoided to 15 significant digits, which floats keep.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import lcm

from openengine.core.guides.language import (
    EMPTY,
    EPSILON,
    Language,
    chars,
    complement,
    concat,
    intersect,
    literal,
    repeat,
    union,
)
from openengine.core.guides.work import Work

__all__ = [
    "LARGE_EXPONENT",
    "MAX_EXPONENT",
    "SMALL_EXPONENT",
    "NotRegular",
    "NumberRange",
    "exponents",
    "listed_texts",
    "number_texts",
    "texts_of",
    "texts_within",
]

LARGE_EXPONENT, SMALL_EXPONENT = 16, -5
"""From the one up and from the other down, the shortest form of a float takes an exponent."""

_DIGIT = chars([(0x30, 0x39)])
_NONZERO = chars([(0x31, 0x39)])
_DIGITS = repeat(_DIGIT, 0, None)
_MINUS = literal("-")
_NATURAL = union(literal("0"), concat(_NONZERO, _DIGITS))
_FRACTION = concat(literal("."), repeat(_DIGIT, 1, None))
_SIGN = repeat(_MINUS, 0, 1)
_EXPONENT = concat(
    chars([(0x45, 0x45), (0x65, 0x65)]),
    repeat(chars([(0x2B, 0x2B), (0x2D, 0x2D)]), 0, 1),
    union(repeat(_DIGIT, 1, 2), concat(chars([(0x31, 0x32)]), _DIGIT, _DIGIT)),
)
_ANY_NUMBER = concat(_SIGN, _NATURAL, repeat(_FRACTION, 0, 1), repeat(_EXPONENT, 0, 1))
_INTEGER = concat(_SIGN, _NATURAL)
_PLAIN = concat(_NATURAL, repeat(_FRACTION, 0, 1))
_MANTISSA = concat(_NONZERO, repeat(_FRACTION, 0, 1))
_WHOLE = concat(_NATURAL, repeat(concat(literal("."), repeat(literal("0"), 1, None)), 0, 1))

MAX_EXPONENT, _MIN_EXPONENT = 308, -324
_FLOAT_DIGITS = 15
_TINY = Fraction(1, 10**300)
_MAX_LISTED = 4096
_TICKS_PER_TEXTS = 32  # of a number that is left out
_MAX_SPELLED = 16  # a range of more integers is shorter by its digits


class NotRegular(Exception):
    """A set of multiples, which has no short expression over digits; see schema_multiples.py."""


@dataclass(frozen=True, slots=True)
class NumberRange:
    """What is asked of a number. `is_integer`: True (whole), False (not whole), None (either).

    multiple_at: the pointer of a schema that asks for the multiple, to name it in errors; no part of the meaning.
    """

    low: Fraction | None = None
    low_open: bool = False
    high: Fraction | None = None
    high_open: bool = False
    is_integer: bool | None = None
    multiple_of: Fraction | None = None
    excluded: frozenset[Fraction] = frozenset()
    multiple_at: str = field(default="", compare=False)

    def at_least(self, bound: Fraction, *, strictly: bool) -> NumberRange:
        if self.low is not None and (self.low, self.low_open) >= (bound, strictly):
            return self
        return replace(self, low=bound, low_open=strictly)

    def at_most(self, bound: Fraction, *, strictly: bool) -> NumberRange:
        if self.high is not None and (self.high, not self.high_open) <= (bound, not strictly):
            return self
        return replace(self, high=bound, high_open=strictly)

    def with_multiple(self, step: Fraction, at: str) -> NumberRange:
        if self.multiple_of is not None:
            a, b = self.multiple_of, step
            step = Fraction(
                lcm(a.numerator * b.denominator, b.numerator * a.denominator), a.denominator * b.denominator
            )
        return replace(self, multiple_of=step, multiple_at=at)

    def contains(self, value: Fraction) -> bool:
        if self.low is not None and (value < self.low or (self.low_open and value == self.low)):
            return False
        if self.high is not None and (value > self.high or (self.high_open and value == self.high)):
            return False
        if self.is_integer is not None and (value.denominator == 1) is not self.is_integer:
            return False
        if self.multiple_of is not None and (value / self.multiple_of).denominator != 1:
            return False
        return value not in self.excluded

    def values(self, most: int = _MAX_LISTED) -> list[Fraction] | None:
        """All values in order, where there are at most `most` to look at; None where they are more or dense."""
        multiples = self._multiples()
        if multiples is None:
            return [] if self._is_void() else None
        step, indices = multiples
        if indices.stop - indices.start > most:
            return None
        return [value for index in indices if self.contains(value := index * step)]

    def is_empty(self) -> bool:
        """Whether no number is in it."""
        multiples = self._multiples()
        if multiples is None or self._is_void():
            return self._is_void()
        step, indices = multiples
        return not any(self.contains(index * step) for index in indices[: _MAX_LISTED + len(self.excluded)])

    def _multiples(self) -> tuple[Fraction, range] | None:
        """A step and those of its multiples that are between the bounds."""
        step = self.multiple_of
        if self.is_integer:
            step = Fraction(1) if step is None else Fraction(step.numerator)
        if step is None or self.low is None or self.high is None:
            return None
        return step, range(int(-(-self.low // step)), int(self.high // step) + 1)

    def _is_void(self) -> bool:
        if self.is_integer is False and self.multiple_of is not None and self.multiple_of.denominator == 1:
            return True
        if self.is_integer is False and self.multiple_of is None:
            # No text of so many digits is told from that of a whole number.
            largest = 10 ** (_FLOAT_DIGITS - 2)
            if (self.low or 0) >= largest or (self.high or 0) <= -largest:
                return True
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (self.low == self.high and not self.contains(self.low))


def number_texts(wanted: NumberRange, work: Work) -> Language:
    """The texts of the numbers in `wanted`; EMPTY when there are none.

    Raises NotRegular where they are multiples, and more than a few.
    """
    values = wanted.values(_MAX_SPELLED)
    if values is not None:
        return union(*(texts_of(value) for value in values))
    if wanted.multiple_of is None or (wanted.is_integer and wanted.multiple_of.numerator == 1):
        return texts_within(replace(wanted, multiple_of=None), work)
    raise NotRegular


def listed_texts(wanted: NumberRange) -> Language | None:
    """The texts of the numbers in `wanted` one by one; None where they are many."""
    values = wanted.values()
    return None if values is None else union(*(texts_of(value) for value in values))


def texts_within(wanted: NumberRange, work: Work) -> Language:
    """The texts of the numbers in `wanted`, whether they are multiples or not.

    Multiples are told apart as they are: nothing near a bound or an excluded number is left out.
    """
    is_exact = wanted.is_integer is True or wanted.multiple_of is not None
    if wanted == NumberRange(multiple_of=wanted.multiple_of):
        return _ANY_NUMBER
    if wanted == NumberRange(is_integer=True, multiple_of=wanted.multiple_of):
        return _INTEGER
    bounds = wanted if is_exact else _closed(wanted)
    result = union(_side(bounds, negative=False), _side(bounds, negative=True))
    if wanted.is_integer is False and is_exact:
        result = intersect(result, complement(concat(_SIGN, _WHOLE)))
    elif wanted.is_integer is False:
        result = intersect(result, concat(_SIGN, union(_not_whole(), concat(_MANTISSA, exponents(high=0)))))
    others = []
    for value in sorted(filter(replace(wanted, excluded=frozenset()).contains, wanted.excluded)):
        work.tick(_TICKS_PER_TEXTS)
        others.append(complement(_texts_equal(value) if is_exact else _texts_near(value, _gap(value))))
    return intersect(result, *others)


def _gap(value: Fraction) -> Fraction:
    """A distance at which a float is told from `value`."""
    if value == 0:
        return _TINY
    return Fraction(10) ** (_exponent_of(abs(value)) + 1 - _FLOAT_DIGITS)


def _exponent_of(value: Fraction) -> int:
    """That of the power of ten at or below `value` > 0."""
    exponent = len(str(int(value))) - 1
    while value < Fraction(10) ** exponent:
        exponent -= 1
    return exponent


def _closed(wanted: NumberRange) -> NumberRange:
    if wanted.low is not None and wanted.low_open:
        wanted = replace(wanted, low=wanted.low + _gap(wanted.low), low_open=False)
    if wanted.high is not None and wanted.high_open:
        wanted = replace(wanted, high=wanted.high - _gap(wanted.high), high_open=False)
    return wanted


def _not_whole() -> Language:
    """Magnitudes without exponent that no float takes for a whole number."""
    zeros, nines = (repeat(literal(digit), 0, None) for digit in "09")
    forms = []
    for width in range(1, _FLOAT_DIGITS - 1):
        whole = _DIGIT if width == 1 else concat(_NONZERO, repeat(_DIGIT, width - 1, width - 1))
        places = _FLOAT_DIGITS - width
        short = intersect(repeat(_DIGIT, 1, places - 1), complement(zeros))
        long = intersect(repeat(_DIGIT, places, places), complement(union(zeros, nines)))
        forms.append(concat(whole, literal("."), union(short, concat(long, _DIGITS))))
    return union(*forms)


def texts_of(value: Fraction) -> Language:
    """The usual texts of one number: its digits, and with an exponent where Python writes one."""
    texts = [_decimal_text(value)]
    shortest = repr(float(value)) if abs(value) <= 10**308 else ""
    if "e" in shortest and Fraction(shortest) == value:
        texts.append(shortest)
    return union(*map(literal, texts))


def _decimal_text(value: Fraction) -> str:
    """Shortest digits without exponent."""
    digits = 0
    denominator = value.denominator
    while denominator % 10 == 0 or denominator % 2 == 0 or denominator % 5 == 0:
        denominator //= 10 if denominator % 10 == 0 else 2 if denominator % 2 == 0 else 5
        digits += 1
    assert denominator == 1, "numbers of a schema are decimal"
    scaled = abs(value) * 10**digits
    text = str(int(scaled)).rjust(digits + 1, "0")
    text = f"{text[:-digits]}.{text[-digits:]}".rstrip("0").rstrip(".") if digits else text
    return ("-" if value < 0 else "") + text


def _texts_equal(value: Fraction) -> Language:
    """Everything that denotes `value`, among the texts with bounds."""
    digits = _decimal_text(abs(value))
    zeros = repeat(literal("0"), 0, None)
    form = concat(literal(digits), zeros if "." in digits else union(EPSILON, concat(literal("."), zeros)))
    if value:
        exponent = _exponent_of(abs(value))
        mantissa = _decimal_text(abs(value) / Fraction(10) ** exponent)
        long = concat(literal(mantissa), zeros if "." in mantissa else union(EPSILON, concat(literal("."), zeros)))
        form = union(form, concat(long, exponents(low=exponent, high=exponent)))
    return concat(_SIGN if value == 0 else _MINUS if value < 0 else EPSILON, form)


def _texts_near(value: Fraction, near: Fraction) -> Language:
    """Everything that denotes `value` or a number less than `near` away from it, among the texts with bounds."""
    around = NumberRange(low=value - near, low_open=True, high=value + near, high_open=True)
    return union(*(_side(around, negative=sign, any_digits=True) for sign in (False, True)))


# ---- bounds ----------------------------------------------------------------------------------------


def _side(wanted: NumberRange, *, negative: bool, any_digits: bool = False) -> Language:
    """The numbers of one sign: their magnitudes between two bounds.

    any_digits: also those whose exponent follows digits that are out of bounds without it.
    """
    low, low_open, high, high_open = wanted.low, wanted.low_open, wanted.high, wanted.high_open
    if negative:
        low, low_open, high, high_open = (
            None if high is None else -high,
            high_open,
            None if low is None else -low,
            low_open,
        )
    if high is not None and (high < 0 or (high == 0 and high_open)):
        return EMPTY
    plain = _NATURAL if wanted.is_integer else _PLAIN
    scientific = EMPTY if wanted.is_integer else _scientific()
    if low is not None and (low > 0 or (low == 0 and low_open)):
        plain = intersect(plain, complement(_plain_at_most(low, strictly=not low_open)))
        scientific = intersect(scientific, _scientific(low, strictly=low_open))
    if high is not None:
        plain = intersect(plain, _plain_at_most(high, strictly=high_open))
        scientific = intersect(scientific, complement(_scientific(high, strictly=not high_open)))
    if not any_digits:
        scientific = intersect(scientific, concat(intersect(_MANTISSA, plain), exponents()))
    form = union(plain, scientific)
    return concat(_MINUS, form) if negative else form


def _plain_at_most(bound: Fraction, *, strictly: bool) -> Language:
    """Digits, without exponent, of magnitude <= `bound`, or < `bound`."""
    whole, _, fraction = _decimal_text(bound).partition(".")
    smaller = [concat(_NONZERO, repeat(_DIGIT, 0, len(whole) - 2))] if len(whole) > 1 else []
    if whole != "0":
        smaller.append(literal("0"))
    for index, digit in enumerate(whole):
        least = "1" if index == 0 and len(whole) > 1 else "0"
        if digit > least:
            rest = len(whole) - index - 1
            smaller.append(
                concat(literal(whole[:index]), chars([(ord(least), ord(digit) - 1)]), repeat(_DIGIT, rest, rest))
            )
    below = concat(union(*smaller), repeat(_FRACTION, 0, 1))
    return union(below, concat(literal(whole), _fraction_at_most(fraction, strictly=strictly)))


def _fraction_at_most(fraction: str, *, strictly: bool) -> Language:
    """What may follow the whole part: nothing or a point and digits, of value <= 0.`fraction` (or less)."""
    parts = [] if strictly and not fraction else [EPSILON]
    point = literal(".")
    for index, digit in enumerate(fraction):
        if digit > "0":
            parts.append(concat(point, literal(fraction[:index]), chars([(0x30, ord(digit) - 1)]), _DIGITS))
        if index:
            parts.append(concat(point, literal(fraction[:index])))
    if not strictly:
        parts.append(concat(point, literal(fraction), repeat(literal("0"), 0 if fraction else 1, None)))
    return union(*parts)


def _scientific(bound: Fraction = Fraction(0), *, strictly: bool = False) -> Language:
    """Magnitudes with an exponent, as floats are printed, of at least `bound` >= 0, or above it."""
    if bound == 0:
        return concat(_MANTISSA, exponents())
    exponent = _exponent_of(bound)
    above = concat(_MANTISSA, exponents(low=exponent + 1))
    enough = intersect(_MANTISSA, complement(_plain_at_most(bound / Fraction(10) ** exponent, strictly=not strictly)))
    return union(above, concat(enough, exponents(low=exponent, high=exponent)))


def exponents(*, low: int = _MIN_EXPONENT, high: int = MAX_EXPONENT) -> Language:
    """`e+16` and the like, for the exponents of floats between `low` and `high`."""
    numbers = [
        n
        for n in range(max(low, _MIN_EXPONENT), min(high, MAX_EXPONENT) + 1)
        if n >= LARGE_EXPONENT or n <= SMALL_EXPONENT
    ]
    return union(*(_run(sign, sorted(abs(n) for n in numbers if (n < 0) is (sign == "-"))) for sign in "+-"))


def _run(sign: str, numbers: list[int]) -> Language:
    """Consecutive magnitudes of exponents, at least two digits each."""
    if not numbers:
        return EMPTY
    inside = intersect(
        union(repeat(_DIGIT, 2, 2), concat(_NONZERO, repeat(_DIGIT, 2, 2))),
        _exponent_at_most(f"{numbers[-1]:02d}"),
        complement(_exponent_at_most(f"{numbers[0] - 1:02d}")),
    )
    return concat(literal(f"e{sign}"), inside)


def _exponent_at_most(high: str) -> Language:
    shorter = repeat(_DIGIT, 2, 2) if len(high) > 2 else EMPTY
    same = [literal(high)]
    for index, digit in enumerate(high):
        if digit > "0":
            rest = len(high) - index - 1
            same.append(concat(literal(high[:index]), chars([(0x30, ord(digit) - 1)]), repeat(_DIGIT, rest, rest)))
    return union(shorter, *same)
