"""Multiples of a number, as terminals of the backend's grammar: exact automata over decimal digits.

A step is n / 10^p, and n is 2^a · 5^b · k, where k has neither factor. A number's digits, with all of its p places and
without the point, are N, and N must divide by n:

    by k          whatever power of ten N is times: an automaton over remainders, loops and all, in which the point is a
                  step to the same state. Regular expressions of its ways come from taking out one state after another.
    by 2^a · 5^b  by the last digits alone, as many as the larger of a and b: an automaton without loops

The numbers between their bounds are a language of numbers.py, which these terminals are intersected with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from math import ceil, floor, gcd, prod

from openengine.core.guides.grammar import Grammar
from openengine.core.guides.numbers import (
    LARGE_EXPONENT,
    MAX_EXPONENT,
    SMALL_EXPONENT,
    NumberRange,
    exponents,
    listed_texts,
    texts_within,
)
from openengine.core.guides.work import Work

__all__ = ["TooManyRemainders", "add_multiples"]

_MAX_PLACES = 20
_MAX_LOOPED_ENDING = 11  # where the last digits matter too
_MAX_LOOPED = 17  # remainders of an automaton with loops; its expressions have the third power of that many parts
_UNROLLED, _MAX_UNROLLED = 20, 60
_MAX_STATES = 3000
_MAX_LAST_DIGITS = 3125
_MAX_OTHER, _MAX_WHOLE, _MAX_BOUNDED = 256, 512, 4096  # remainders of numbers, of integers, of what is bounded
_MAX_WHOLE_STEP = 10_000  # more remainders than that exhaust the backend
_MAX_EXACT = 2**53  # the backend takes the bounds of its own multiples for floats
_FLOAT_PLACES = 16


class TooManyRemainders(Exception):
    """The multiples of a step need larger automata than anyone should follow; the message says why."""


def add_multiples(grammar: Grammar, wanted: NumberRange, work: Work) -> str:
    """Add the texts of the multiples in `wanted`; returns their symbol. Raises TooManyRemainders."""
    if wanted.is_integer:
        wanted = replace(wanted, multiple_of=Fraction(wanted.multiple_of.numerator))
    try:
        return _Multiples(grammar, wanted, work).write()
    except TooManyRemainders:
        if (texts := listed_texts(wanted)) is not None:
            return grammar.symbol(texts)
        if wanted.is_integer and not any(map(replace(wanted, excluded=frozenset()).contains, wanted.excluded)):
            return _of_the_backend(grammar, wanted)
        raise


def _of_the_backend(grammar: Grammar, wanted: NumberRange) -> str:
    """Whole multiples by the backend's own automaton, which is right for steps and bounds of a moderate size."""
    step = wanted.multiple_of
    if step > _MAX_WHOLE_STEP:
        raise TooManyRemainders(f"its multiples have too many remainders to tell apart; the limit is {_MAX_WHOLE_STEP}")
    low = None if wanted.low is None else floor(wanted.low) + 1 if wanted.low_open else ceil(wanted.low)
    high = None if wanted.high is None else ceil(wanted.high) - 1 if wanted.high_open else floor(wanted.high)
    content = [f'"type":"integer","multipleOf":{step.numerator}']
    for name, bound in (("minimum", low), ("maximum", high)):
        if bound is not None and abs(bound) > _MAX_EXACT:
            raise TooManyRemainders(f"beside a {name} beyond {_MAX_EXACT} it has too many remainders to tell apart")
        if bound is not None:
            content.append(f'"{name}":{bound}')
    return grammar.rule([f"%json {{{','.join(content)}}}"])


class _Multiples:
    """Writes the terminals of one set of multiples."""

    def __init__(self, grammar: Grammar, wanted: NumberRange, work: Work) -> None:
        self._grammar = grammar
        self._wanted = wanted
        self._work = work
        numerator, self._places = _over_a_power_of_ten(wanted.multiple_of)
        if not wanted.is_integer and not self._places:
            numerator, self._places = numerator * 10, 1  # `7.0` is a multiple of 7
        if self._places > _MAX_PLACES:
            raise TooManyRemainders(f"its multiples have more than {_MAX_PLACES} places after the point")
        self._even, odd = _split(numerator)
        self._num_last = 0  # of digits that decide about the part of 2 and 5
        while 10**self._num_last % self._even:
            self._num_last += 1
        low, high = wanted.low, wanted.high
        farthest = None if low is None or high is None else max(abs(low), abs(high))
        self._has_large = wanted.is_integer is None and (farthest is None or farthest >= 10**LARGE_EXPONENT)
        self._num_digits = None if farthest is None else self._most_digits(farthest)
        powers = _prime_powers(odd)
        self._check_size(powers)
        self._known: dict[str, str] = {}
        self._odd = [self._remainders(powers)] if powers else []

    def write(self) -> str:
        forms = [self._aligned(self._places, self._places)]
        if not self._wanted.is_integer:
            forms += self._small()
            if self._has_large:
                forms += self._large()
        within = self._grammar.symbol(texts_within(self._wanted, self._work))
        return self._terminal(f"(/-?/ ({' | '.join(forms)})) & {within}", is_shared=False)

    def _small(self) -> list[str]:
        """Less than 1e-4: all places that an exponent moves away."""
        forms = []
        for exponent in range(SMALL_EXPONENT, -self._places - 1, -1):
            places = self._places + exponent
            form = f"({self._aligned(places, places)} & /[1-9](\\.[0-9]+)?/) {self._exponents(exponent, exponent)}"
            forms.append(form)
        return forms

    def _large(self) -> list[str]:
        """At least 1e16, in no more digits than a float has."""
        free = max(LARGE_EXPONENT, _FLOAT_PLACES + self._num_last - self._places)
        shape = f"/[1-9](\\.[0-9]{{1,{_FLOAT_PLACES}}})?/"
        forms = []
        if free <= MAX_EXPONENT:
            forms.append(f"({' & '.join([shape, *self._odd])}) {self._exponents(free, None)}")
        for exponent in range(LARGE_EXPONENT, min(free, MAX_EXPONENT + 1)):
            digits = self._aligned(self._places + exponent, _FLOAT_PLACES)
            forms.append(f"({digits} & {shape}) {self._exponents(exponent, exponent)}")
        return forms

    def _exponents(self, low: int, high: int | None) -> str:
        return self._grammar.symbol(exponents(low=low) if high is None else exponents(low=low, high=high))

    def _aligned(self, places: int, most: int) -> str:
        """Digits whose number, written with `places` digits after the point, divides; at most `most` of them are there."""
        free = min(places - self._num_last, most)  # up to here the zeros that are not written do
        forms = []
        if free >= 0:
            forms.append(f"/[0-9]+(\\.[0-9]{{1,{free}}})?/" if free else "/[0-9]+/")
        for there in range(max(free + 1, 0), most + 1):
            divisor = self._even // gcd(self._even, 10 ** (places - there))
            digits = f"/[0-9]+\\.[0-9]{{{there}}}/" if there else "/[0-9]+/"
            forms.append(f"({digits} & {self._last_digits(divisor)})")
        return self._terminal(" & ".join([f"({' | '.join(forms)})", *self._odd]))

    def _check_size(self, powers: list[int]) -> None:
        odd, even = prod(powers), self._even
        while even % 10 == 0:
            even //= 10
        is_power_of_five = even > 1 and even % 2 == 1
        last = 2 * self._num_last if is_power_of_five else even  # powers of 5 have few states
        size = odd * last * (2 if odd > 1 and last > 1 else 1)
        is_endless = self._num_digits is None
        is_whole = bool(self._wanted.is_integer)
        if not is_endless and not self._has_large:
            limit = _MAX_BOUNDED
        else:
            limit = _MAX_WHOLE if is_whole else _MAX_OTHER
        if (
            even > _MAX_LAST_DIGITS
            or size > limit
            or (is_endless and any(power > _MAX_LOOPED for power in powers))
            or (is_endless and odd > _MAX_LOOPED_ENDING and self._num_last > (0 if is_whole else 1))
            or odd * (self._num_digits or _UNROLLED) > _MAX_STATES
        ):
            hint = "" if is_whole else ', or ask for "type": "integer"'
            raise TooManyRemainders(
                f"its multiples have some {odd * even} remainders to tell apart; give them both a minimum and a maximum{hint}"
            )

    def _most_digits(self, farthest: Fraction) -> int | None:
        """How many digits the multiples up to `farthest` have; None for so many that loops are shorter."""
        whole = len(str(int(farthest)))
        digits = max(whole, 1 + _FLOAT_PLACES if self._has_large else 1) + self._places
        return digits if digits <= _MAX_UNROLLED else None

    # ---- the part of 2 and 5

    def _last_digits(self, divisor: int) -> str:
        """Digits, with a point anywhere, that `divisor` = 2^a · 5^b divides."""
        num_zeros = 0
        while divisor % 10 == 0:
            divisor, num_zeros = divisor // 10, num_zeros + 1
        zeros = " /\\.?0/" * num_zeros
        if divisor == 1:
            # A number of fewer digits is zero.
            return self._terminal(f"(/[0-9.]*/{zeros}) | /[0.]*/")
        size = 0
        while 10**size % divisor:
            size += 1
        state = self._last_states(divisor)
        # A number of fewer digits begins with zeros that are not written.
        starts = [start for index in range(size) if (start := state(size - index, 0)) is not None]
        whole = self._terminal(f"/[0-9.]*/ {starts[0]} | {' | '.join(starts)}")
        return self._terminal(f"({whole}{zeros}) | /[0.]*/") if num_zeros else whole

    def _last_states(self, divisor: int) -> Callable[[int, int], str | None]:
        """The states of an automaton: so many more digits, after a remainder, make a number that `divisor` divides."""
        known: dict[tuple[int, int], str | None] = {}

        def state(size: int, remainder: int) -> str | None:
            if (size, remainder) not in known:
                self._work.tick()
                # Of what comes before the last `size - 1` digits, no more than this matters.
                matters = divisor // gcd(divisor, 10 ** (size - 1))
                parts = []
                for after, digits in _digits_by_next(matters, remainder).items():
                    if size == 1:
                        parts += [f"/\\.?[{digits}]/"] if after == 0 else []
                    elif (then := state(size - 1, after)) is not None:
                        parts.append(f"/\\.?[{digits}]/ {then}")
                known[size, remainder] = self._terminal(" | ".join(parts)) if parts else None
            return known[size, remainder]

        return state

    # ---- the part that is prime to 10

    def _remainders(self, powers: list[int]) -> str:
        """Digits, with a point anywhere, that all of `powers` divide.

        The first digits are states of their own, which the backend follows with ease; loops cost it much more.
        """
        divisor = prod(powers)
        states = {0: ""}
        if self._num_digits is None:
            loops = {power: self._loops(power) for power in powers}
            states = {
                remainder: self._terminal(" & ".join(ends[remainder % power] for power, ends in loops.items()))
                for remainder in range(divisor)
            }
        for _ in range(self._num_digits or _UNROLLED):
            earlier: dict[int, str] = {}
            for remainder in range(divisor):
                self._work.tick()
                parts = [
                    f"/\\.?[{digits}]/ {states[after]}"
                    for after, digits in _digits_by_next(divisor, remainder).items()
                    if after in states
                ]
                if parts:
                    form = f"({' | '.join(parts)}){'' if remainder else '?'}"
                    earlier[remainder] = self._terminal(form)
            states = earlier
        return states[0]

    def _loops(self, divisor: int) -> dict[int, str]:
        """For each remainder, digits without end that lead from it to 0."""
        ways = {
            (before, after): f"/\\.?[{digits}]/"
            for before in range(divisor)
            for after, digits in _digits_by_next(divisor, before).items()
        }
        onward: list[list[tuple[int, str]]] = [[] for _ in range(divisor)]  # from each state, through greater ones only
        loop = [""] * divisor
        for taken in range(divisor - 1, -1, -1):
            if (taken, taken) in ways:
                loop[taken] = f"({self._terminal(ways[taken, taken])})*"
            onward[taken] = [(b, self._terminal(way)) for (a, b), way in ways.items() if a == taken and b < taken]
            into = [(a, self._terminal(way)) for (a, b), way in ways.items() if b == taken and a < taken]
            ways = {pair: way for pair, way in ways.items() if max(pair) < taken}
            for a, before in into:
                for b, after in onward[taken]:
                    self._work.tick()
                    path = f"{before} {loop[taken]} {after}"
                    ways[a, b] = self._terminal(f"{ways[a, b]} | {path}" if (a, b) in ways else path)
        ends = {0: self._terminal(loop[0])}
        for state in range(1, divisor):
            paths = " | ".join(f"{way} {ends[b]}" for b, way in onward[state])
            ends[state] = self._terminal(f"{loop[state]} ({paths})")
        return ends

    def _terminal(self, expression: str, *, is_shared: bool = True) -> str:
        """A terminal for `expression`, the same one for the same expression; a name stands for itself."""
        if expression.isalnum():
            return expression
        name = self._known.get(expression) if is_shared else None
        if name is None:
            name = self._known[expression] = self._grammar.define(self._grammar.new_rule().upper(), [expression])
        return name


def _over_a_power_of_ten(value: Fraction) -> tuple[int, int]:
    places = 0
    while (10**places * value.numerator) % value.denominator:
        places += 1
    return 10**places * value.numerator // value.denominator, places


def _digits_by_next(divisor: int, remainder: int) -> dict[int, str]:
    """The digits that lead from one remainder to each other."""
    digits: dict[int, str] = {}
    for digit in range(10):
        after = (10 * remainder + digit) % divisor
        digits[after] = digits.get(after, "") + str(digit)
    return digits


def _split(number: int) -> tuple[int, int]:
    """Its part of 2 and 5, and the rest."""
    rest = number
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return number // rest, rest


def _prime_powers(number: int) -> list[int]:
    found, prime = [], 3
    while prime**2 <= number and prime < _MAX_STATES:
        power = 1
        while number % prime == 0:
            number, power = number // prime, power * prime
        if power > 1:
            found.append(power)
        prime += 2
    return found + ([number] if number > 1 else [])
