"""Numbers of a JSON schema, decided exactly: jsonschema judges the same texts in rational arithmetic."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

from guided_tools import byte_compiler, compiled, random_output

from openengine.core.guides.compiler import GuideCompiler
from openengine.errors import InvalidArgument


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> Iterator[GuideCompiler]:
    compiler = byte_compiler(tmp_path_factory.mktemp("bytes"), timeout_s=60, max_bytes=4 << 20)
    yield compiler
    compiler.close()


def exactly(text: str) -> Any:
    def number(text: str) -> int | Fraction:
        value = Fraction(text)
        return value.numerator if value.denominator == 1 else value

    return json.loads(text, parse_float=number)


def is_valid(schema: dict, text: str) -> bool:
    return jsonschema.Draft202012Validator(exactly(json.dumps(schema))).is_valid(exactly(text))


STEPS = [
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15, 20, 25, 30, 33, 60, 64, 77, 100, 360, 1000, 1024, 86400, 10**9),
    *(0.01, 0.5, 0.25, 0.1, 0.05, 0.001, 0.0001, 0.3, 1.5, 2.5, 0.07, 0.75, 0.125, 0.15, 1e-5, 3e-6, 2.5e-7, 1.1, 12.5),
]


def random_schema(rng: random.Random) -> dict:
    def bound() -> Any:
        size = rng.choice([10, 100, 5000, 10**6, 10**17])
        whole = rng.randint(-size, size)
        return (
            whole
            if rng.random() < 0.6
            else round(whole / rng.choice([10, 100, 1000]), 3)
            if size < 10**9
            else whole * 10
        )

    schema: dict[str, Any] = {"type": rng.choice(["integer", "number", "number"])}
    if rng.random() < 0.85:
        schema["multipleOf"] = rng.choice(STEPS)
    for names in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if rng.random() < 0.4:
            schema[rng.choice(names)] = bound()
    if rng.random() < 0.15:
        schema["not"] = {"const": rng.choice([0, bound(), rng.choice(STEPS) * rng.randint(-9, 9)])}
    if rng.random() < 0.15:
        schema["allOf"] = [{"multipleOf": rng.choice(STEPS)}]
    if schema["type"] == "number" and "not" not in schema and rng.random() < 0.05:
        schema["not"] = {"type": "integer"}
    return schema


def number_text(schema: dict, rng: random.Random) -> str:
    """A number on or near what the schema speaks of, as it may be written."""
    steps = [Fraction(str(part["multipleOf"])) for part in [schema, *schema.get("allOf", ())] if "multipleOf" in part]
    bounds = [value for name, value in schema.items() if "imum" in name]
    near = [*(Fraction(str(bound)) for bound in bounds), Fraction(0), Fraction(rng.randint(-(10**4), 10**4))]
    near.append(Fraction(rng.randint(-(10**18), 10**18)))
    step = rng.choice(steps or [Fraction(1)])
    value = round(rng.choice(near) / step + rng.randint(-3, 3)) * step
    if rng.random() < 0.3:
        value += Fraction(rng.randint(-99, 99), 10 ** rng.randint(0, 9))
    if rng.random() < 0.3:
        return json.dumps(float(value))
    places = 0
    while (value * 10**places).denominator != 1:
        places += 1
    places += rng.choice([0, 0, 0, 1, 2])
    digits = f"{abs(int(value * 10**places)):0{places + 1}d}"
    sign = "-" if value < 0 or rng.random() < 0.05 else ""
    return f"{sign}{digits[:-places]}.{digits[-places:]}" if places else sign + digits


def must_be_accepted(schema: dict, text: str) -> bool:
    """Whether a valid number has the form in which it is written: that of `json.dumps`, by the README's rules."""
    if text != json.dumps(json.loads(text)) or text.endswith(".0"):
        return False
    if schema["type"] == "integer" and not text.lstrip("-").isdecimal():
        return False
    multiples = "multipleOf" in schema or "allOf" in schema
    mantissa, has_exponent, _ = text.partition("e")
    within = {name: value for name, value in schema.items() if "imum" in name}
    if has_exponent and (within or "not" in schema) and not is_valid(within, mantissa):
        return False
    return multiples or schema["type"] == "integer" or len(text.strip("-").replace(".", "").lstrip("0")) < 15


def check(compiler: GuideCompiler, seed: int, num_schemas: int, num_texts: int = 40) -> tuple[int, list]:
    """How many schemas were handled, and what was judged wrongly."""
    rng = random.Random(seed)
    handled, wrong = 0, []
    for _ in range(num_schemas):
        schema = random_schema(rng)
        try:
            guide = compiled(compiler, schema)
        except InvalidArgument as exc:
            assert exc.details["keyword"] and "pointer" in exc.details, (schema, exc)
            continue
        handled += 1
        for _ in range(num_texts):
            text = number_text(schema, rng)
            accepted, valid = guide.accepts(text), is_valid(schema, text)
            if accepted > valid or (valid and not accepted and must_be_accepted(schema, text)):
                wrong.append((schema, text, accepted))
        if sum("imum" in name for name in schema) == 2:  # else multiples may be out of the reach of chance
            output = random_output(compiler, guide, rng).decode()
            if not is_valid(schema, output):
                wrong.append((schema, output, True))
    return handled, wrong


def test_random_bounds_and_multiples_are_judged_as_rational_arithmetic_does(compiler):
    handled, wrong = check(compiler, seed=0, num_schemas=300)
    assert wrong == []
    assert handled >= 250  # the others have no values, or too many remainders


EXACT: dict[str, tuple[dict, list[str], list[str]]] = {
    "hundredths": (
        {"type": "number", "multipleOf": 0.01, "minimum": 0, "exclusiveMaximum": 100},
        ["0", "0.1", "0.10", "7.07", "99.99", "1.0"], ["0.001", "-0.01", "100", "100.00", "00.1", ".5", "1.", "1e0", "1.000"],
    ),
    "quarters": ({"type": "number", "multipleOf": 0.25}, ["0.5", "0.50", "0.25", "-12.75", "3"], ["0.1", "0.55", "12.751"]),
    "seven_hundredths": ({"type": "number", "multipleOf": 0.07}, ["0.07", "0.7", "7", "7.7", "21.0", "0.98"], ["0.1", "7.1", "0.077"]),
    "beyond_floats": (
        {"type": "integer", "multipleOf": 3, "minimum": 9007199254740993, "maximum": 12345678901234567890},
        ["9007199254740993", "12345678901234567890"], ["9007199254740990", "9007199254740992", "12345678901234567893"],
    ),
    "small_numbers_have_exponents": (
        {"type": "number", "multipleOf": 1e-06}, ["5e-05", "1.2e-05", "0.00005", "0.123456"], ["1.23e-05", "5e-07", "5E-05", "5e-5"],
    ),
    "large_numbers_have_exponents": (
        {"type": "number", "multipleOf": 7}, ["7e+16", "1.4e+17", "7.0", "-0", "0.0"], ["1e+16", "7e+15", "7e16", "7.7"],
    ),
    "integers_have_none": ({"type": "integer", "multipleOf": 1.5}, ["0", "3", "-6", "-0"], ["1.5", "3.0", "3e+16", "4", "03"]),
    "two_steps": ({"type": "number", "multipleOf": 0.4, "allOf": [{"multipleOf": 0.6}]}, ["1.2", "12", "3.6"], ["0.4", "0.6", "2", "1.8"]),
    "not_one_of_them": ({"type": "number", "multipleOf": 0.5, "not": {"enum": [1, 2.5]}}, ["0.5", "1.5", "10", "25"], ["1", "1.0", "2.5"]),
    "not_whole": ({"type": "number", "multipleOf": 0.5, "not": {"type": "integer"}}, ["0.5", "-1.5"], ["1", "1.0", "5e+16", "0"]),
    "an_open_bound_at_a_multiple": (
        {"type": "number", "multipleOf": 0.1, "exclusiveMinimum": 0.3, "maximum": 1e6}, ["0.4", "1000000"], ["0.3", "0.35", "1000000.1"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_multiples_are_exact_decimals(compiler, name):
    schema, right, wrong = EXACT[name]
    guide = compiled(compiler, schema)
    assert [text for text in right if not guide.accepts(text)] == []
    assert [text for text in wrong if guide.accepts(text)] == []


def test_multiples_that_jsonschema_decides_exactly_in_floats_agree_with_it(compiler):
    rng = random.Random(1)
    for step in (0.5, 0.25, 2, 3, 10):
        schema = {"type": "number", "multipleOf": step}
        guide, judge = compiled(compiler, schema), jsonschema.Draft202012Validator(schema)
        for _ in range(60):
            number = rng.randint(-4000, 4000) / rng.choice([1, 2, 4, 8])
            text = json.dumps(int(number) if number.is_integer() else number)
            assert guide.accepts(text) is judge.is_valid(json.loads(text)), (step, text)


def test_multiples_of_any_length_are_told_apart(compiler):
    rng = random.Random(2)
    for step in (3, 7, 12, 17, 35, 360, 1009, Fraction(3, 10), Fraction(7, 100)):
        is_whole = isinstance(step, int)
        guide = compiled(
            compiler, {"type": "integer" if is_whole else "number", "multipleOf": step if is_whole else float(step)}
        )
        places = 0 if is_whole else len(str(float(step))) - 2
        for size in (5, 18, 25, 60, 200):
            value = rng.randrange(10**size) * step
            for number in (value, value + 1, value + step):
                digits = str(int(number * 10**places)).rjust(places + 1, "0")
                text = f"{digits[:-places]}.{digits[-places:]}" if places else digits
                assert guide.accepts(text) is ((number / Fraction(step)).denominator == 1), (step, text)


def test_bounds_of_any_size_are_looked_at_without_listing_what_is_between_them(compiler):
    huge = 10**300
    guide = compiled(compiler, {"type": "integer", "minimum": -huge, "maximum": huge, "multipleOf": 6})
    assert guide.accepts("-12") and guide.accepts(str(huge - huge % 6)) and not guide.accepts(str(huge + 6 - huge % 6))
    with pytest.raises(InvalidArgument, match="no value meets"):
        compiled(compiler, {"type": "integer", "minimum": 1, "maximum": 5, "multipleOf": 6})
