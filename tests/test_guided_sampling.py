"""Hot samples of a real model under many guides, judged by checkers that know nothing of them: jsonschema, re, regex.

By default each guide draws one output; `pytest -m soak` draws 300 in all.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from openengine import CompiledGuide, Engine, GenerateRequest, GenerationOutput, SamplingParams, StoppingOptions

NAMES = ("name", "größe", "first name", "tags", "a/b", "kind", "x-1", "数")
REGEXES = (
    "[0-9]{3}-[0-9]{4}",
    r"(\+\d{1,3} )?\(\d{3}\) \d{3}",
    "[A-Z][a-z]{2,9}( [A-Z][a-z]{2,9}){1,3}",
    r"\w+@\w+\.(com|org)",
    "(yes|no|maybe)( indeed)?",
    r"#[0-9a-f]{6}",
    r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    "(a|ab)(c|bcd)(d*)",
    r"[^\s\d]{5,12}",
    "(ha|ho){2,6}!",
    r"-?(0|[1-9]\d{0,4})(\.\d{1,3})?",
    "[α-ω]{3,8}",
    "(é|ê|è|ñ){4}",
    r"[Hh]ello,? world\??",
    r"<(b|i)>[a-z ]{1,20}</(b|i)>",
    "[01]{8}",
    "(one|two|three)(, (one|two|three)){0,4}",
    r"/(\w{1,6}/){1,4}",
    r"[^\"]{0,30}",
    "x{1,30}y?",
)
# GBNF, and the same as a recursive pattern of the package regex.
GRAMMARS = {
    'root ::= "(" (root | [a-c]+) ")"': r"\((?:(?R)|[a-c]+)\)",
    'root ::= "a" root "b" | "ab"': r"a(?:(?R)|)b",
    'root ::= item (", " item){0,4}\nitem ::= [A-Z] [a-z]{2,6}': r"[A-Z][a-z]{2,6}(?:, [A-Z][a-z]{2,6}){0,4}",
    'root ::= "[" (root ("," root){0,3})? "]"': r"\[(?:(?R)(?:,(?R)){0,3})?\]",
    'root ::= sum\nsum ::= term ("+" term){0,5}\nterm ::= [0-9] | "(" sum ")"': r"(?P<s>(?:\d|\((?&s)\))(?:\+(?:\d|\((?&s)\))){0,5})",
    'root ::= ("do" | "undo") " " [a-z]{1,8} "."': r"(?:do|undo) [a-z]{1,8}\.",
    'root ::= "<" [a-z]{1,3} ">" ([^<>]{0,10} | root) "</>"': r"<[a-z]{1,3}>(?:[^<>]{0,10}|(?R))</>",
    'root ::= "x" root? "y"': r"x(?R)?y",
    r'root ::= "caf\u00e9 " [0-9]{1,2}': r"café [0-9]{1,2}",
    'root ::= a | b\na ::= "a" b?\nb ::= "b" a?': r"(?P<a>a(?P<b>b(?&a)?)?)|b(?:a(?:b(?&a)?)?)?",
}


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema whose shortest instances are short."""
    kinds = ["string", "pattern", "integer", "number", "enum", "boolean", "format"]
    kind = rng.choice(kinds if depth > 1 else [*kinds, "object", "object", "object", "array", "anyOf"])
    if kind == "string":
        return {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 12)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", "^[A-Z]\\d+$", "^x.y$", "^(a|b)+c"])}
    if kind == "integer":
        return {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 999)}
    if kind == "number":
        return {"type": "number", "exclusiveMinimum": rng.randint(-5, 0), "maximum": rng.randint(1, 50)}
    if kind == "enum":
        return {"enum": rng.sample(["在线", "off line", 3, None, True, [1, 2], {"a": "é"}, 'quo"te'], 3)}
    if kind == "boolean":
        return {"type": "boolean"}
    if kind == "format":
        return {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid"])}
    if kind == "array":
        return {"type": "array", "items": schema(rng, depth + 1), "maxItems": rng.randint(1, 4)}
    if kind == "anyOf":
        return {"anyOf": [schema(rng, depth + 1), schema(rng, depth + 1)]}
    names = rng.sample(NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: schema(rng, depth + 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": rng.choice([False, False, {"type": "integer"}]),
    }


def judge_of_schema(content: dict[str, Any]) -> tuple[Callable[[str], bool], None]:
    jsonschema = pytest.importorskip("jsonschema")
    checker = jsonschema.Draft202012Validator(content, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    return lambda text: checker.is_valid(json.loads(text)), None


def judge_of_pattern(pattern: str) -> tuple[Callable[[str], bool], Callable[[str], bool] | None]:
    regex = pytest.importorskip("regex")
    compiled = regex.compile(pattern, regex.ASCII | regex.V0)
    return (
        lambda text: compiled.fullmatch(text) is not None,
        lambda text: compiled.fullmatch(text, partial=True) is not None,
    )


def guides() -> list[tuple[dict[str, Any], Callable[[str], bool], Callable[[str], bool] | None]]:
    """Guides with what judges whole texts, and cut ones where that is possible without the guide."""
    rng = random.Random(5)
    found: list[Any] = []
    while len(found) < 60:
        content = schema(rng)
        found.append(({"json_schema": content}, *judge_of_schema(content)))
    for pattern in REGEXES:
        _, cut = judge_of_pattern(pattern)
        compiled = re.compile(pattern, re.ASCII)
        found.append(({"regex": pattern}, lambda text, compiled=compiled: compiled.fullmatch(text) is not None, cut))
    for grammar, pattern in GRAMMARS.items():
        found.append(({"grammar": grammar}, *judge_of_pattern(pattern)))
    return found


def completed(engine: Engine, guide: CompiledGuide, output: GenerationOutput) -> str:
    """The text of a cut output with an end that the guide allows."""
    state, token_ids = guide.start(output.token_ids), list(output.token_ids)
    closing = [engine.tokenize(text, add_special_tokens=False)[-1] for text in '"}],:e-10.aA']
    row = np.empty((1, -(-engine._limits.vocab_size // 32)), np.int32)
    while not state.may_end and len(token_ids) < 500:
        engine._guides.fill_masks([state], row)
        legal = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        token = next((token for token in closing if token in legal), int(legal[0]))
        state.accept(token)
        token_ids.append(token)
    assert state.may_end, engine.detokenize(token_ids)
    return engine.detokenize(token_ids)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_hot_samples_hold_for_independent_checkers_and_cut_ones_are_beginnings(smollm2, request):
    count = 300 if request.config.option.markexpr == "soak" else 90
    cases = guides()
    with Engine(smollm2, num_threads=1, progress=False) as engine:
        compiled = [engine.compile_guide(**options) for options, _, _ in cases]
        requests = [
            GenerateRequest(
                prompt="The answer in the form that you asked for:\n",
                guided=compiled[index % len(cases)],
                sampling=SamplingParams(temperature=1.5, seed=index),
                stopping=StoppingOptions(max_tokens=20 if index % 7 == 0 else 80),
            )
            for index in range(count)
        ]
        wrong, num_cut = [], 0
        for index, result in enumerate(engine.generate(requests, progress=False)):
            options, is_whole, is_beginning = cases[index % len(cases)]
            output = result.outputs[0]
            if output.finish_reason == "stop":
                good = is_whole(output.text)
            elif is_beginning is not None:
                num_cut, good = num_cut + 1, is_beginning(output.text.removesuffix("\ufffd"))
            else:
                num_cut, good = num_cut + 1, is_whole(completed(engine, compiled[index % len(cases)], output))
            if not good:
                wrong.append((options, output.text, str(output.finish_reason)))
    print(f"\n{count} outputs at temperature 1.5 under {len(cases)} guides: {count - num_cut} whole, {num_cut} cut")
    assert wrong == []
    assert 0 < num_cut < count / 2
