"""GBNF grammars as guides."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("llguidance")

from guided_tools import byte_compiler

from openengine.core.guides.compiler import GuideCompiler
from openengine.core.guides.gbnf import parse_gbnf
from openengine.core.guides.language import Language, matches
from openengine.core.guides.rule_nodes import Choice, Node, Reference, Sequence
from openengine.errors import InvalidArgument
from openengine.types import GuidedDecoding


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> Iterator[GuideCompiler]:
    compiler = byte_compiler(tmp_path_factory.mktemp("bytes"), timeout_s=30)
    yield compiler
    compiler.close()


def judged(compiler: GuideCompiler, guide: GuidedDecoding, texts: list[str]) -> list[str]:
    compiled = compiler.compile(guide)
    return [text for text in texts if compiled.accepts(text)]


GRAMMARS: dict[str, tuple[str, list[str], list[str]]] = {
    "literals_that_share_a_beginning": ('root ::= "a" "b" | "ab" "c" x?\nx ::= "(" x ")" | "y"', ["ab", "abc", "abc((y))"], ["aby", "ab(", "a"]),
    "left_recursion": ('root ::= root "a" | "b"', ["b", "baa"], ["a", "ab", ""]),
    "right_recursion": ('root ::= x "!"\nx ::= "a" x | ""', ["!", "aaa!"], ["aaa"]),
    "palindromes": ('root ::= "a" root "a" | "b" root "b" | [ab] | ""', ["", "abba", "aba", "aaaa"], ["ab", "abab"]),
    "white_space_twice": ('root ::= ws item ws\nitem ::= "x" | "(" ws item ws ")"\nws ::= [ \\t\\n]*', [" x ", " ( (x ) )\n"], ["((x)", ""]),
    "escapes": (r'root ::= "caf\u00e9 \x41\U0001F600" [^\n\]]* ("z"){2}', ["café A😀qzz"], ["café A😀z", "café A😀]zz"]),
    "white_space_before_what_begins_with_it": ('root ::= ws e\nws ::= [ \\t]*\ne ::= " - " e | "x"', [" x", " - x", "  - x", "   -  - x"], ["-x", " -x"]),
    "a_loop_before_what_begins_like_it": ('root ::= ("ab")* p\np ::= "a" p "b" | "x"', ["axb", "abx", "abaxb", "ababaxb"], ["abxb", "aab"]),
    "a_loop_beside_the_rule_itself": ('root ::= ("c"* | root | "bcb") "cbc"', ["ccbc", "cbc", "cbccbc", "bcbcbc"], ["cb", "bcbc"]),
    "a_loop_beside_nothing_else": ('root ::= ("a"* | root) "aza"', ["aza", "aaza", "azaaza"], ["az", "za", "azaza"]),
    "two_rules_in_a_circle": ('root ::= ("ba"* x ("c" root)) | "bbc"\nx ::= root', ["bbc", "bbccbbc", "babbccbbc"], ["bbcbbc", "b"]),
    "a_loop_beside_itself_and_one_letter": ('root ::= ("c"* | root) "czc"', ["czc", "cczc", "czcczc"], ["cz", "zc", "czczc"]),
    "no_times": ('root ::= "a" (root "x"){0} "b" (x){0,0} | "c" x{0}\nx ::= "(" x ")" | "y"', ["ab", "c"], ["abx", "cy", "a", "axb"]),
    "no_times_what_has_no_end": ('root ::= "a" x{0}\nx ::= x "y"', ["a"], ["ay", ""]),
    "a_list_by_right_recursion": ('root ::= item ", " root | item\nitem ::= [a-z]+ | "(" root ")"', ["a", "a, b", "(a, b), c"], ["a,b", "a, ", ""]),
    "right_recursion_of_an_option": ('root ::= ws "x" ws\nws ::= ([ \\t] ws)?', ["x", " x", "  \t x \t"], [" ", "xx"]),
    "right_recursion_at_several_ends": ('root ::= "a" (root | "b" root | "c") | "e"?', ["", "e", "ac", "abac", "aabe", "aab"], ["a c", "aca", "ee", "b"]),
    "right_recursion_of_nothing_but_itself": ('root ::= root | "a" root | "b"', ["b", "aab"], ["a", "ba"]),
    "any_character": ('root ::= "<" . ">"', ["<é>", "<\n>"], ["<>", "<ab>"]),
    "a_bound_above_alone": ('root ::= "b" "a"{,2} "."', ["b.", "baa."], ["baaa.", "."]),
    "bounds": ("root ::= [0-9]{2,3} (\",\" [0-9]{2})*", ["12", "123,45,67"], ["1", "1234", "12,3"]),
    "several_lines_and_notes": ('root ::= # begins here\n  "a"\n  | b # or this\n\nb ::= (\n "b"\n "c"?\n)', ["a", "b", "bc"], ["ab"]),
    "rules_in_notes": ("root ::= x # a ::= b\nx ::= \"a\" | ( y # ::= \n)\ny ::= \"b\" # ::= (", ["a", "b"], ["ab", ""]),
    "json": (
        r'''root ::= object
            value ::= object | array | string | [0-9]+ ("." [0-9]+)? ws | ("true" | "null") ws
            object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
            array ::= "[" ws (value ("," ws value)*)? "]" ws
            string ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
            ws ::= | " " | "\n" [ \t]{0,20}''',
        ['{"a": [1, 2.5, "x\\n", null], "b": {}}', "{}"], ['{"a": 1,}', '{"a":}', "[]"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAMMARS)
def test_gde_03_an_output_derives_from_the_grammar(compiler, name):
    grammar, valid, invalid = GRAMMARS[name]
    assert judged(compiler, GuidedDecoding(ebnf_grammar=grammar), valid + invalid) == valid


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("", "no rule named 'root'"), ('a ::= "b"', "no rule named 'root'"), ("root ::= b", "no rule 'b'"), ('root ::= "a', "line 1, column 10"),
        ("root ::= [a", "missing ']'"), ('root ::= root "x"', "no text derives"), ("root ::= (a", "missing ')'"), ('root = "x"', "expected '::='"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule 'root' is defined twice"), ('root ::= "\\q"', r"the escape \q"),
        ('root ::= "a"{2 3}', "a repetition is written"), ('root ::= "a"{٣}', "a repetition is written"),
        ("root ::= <[1000]>", "a token by id or name"), ('root ::= "a" )', "unmatched ')'"), ('root ::= "a"{3,2}', "wrong order"),
        ("root ::= [b-a]", "wrong order"), ("root ::= " + "(" * 200, "nested more than"), ('root ::= "\\ud800"', "is no character"),
    ],
)  # fmt: skip
def test_gde_07_a_malformed_grammar_is_refused_with_its_place(compiler, grammar, said):
    with pytest.raises(InvalidArgument) as caught:
        compiler.compile(GuidedDecoding(ebnf_grammar=grammar))
    assert said in caught.value.message


@pytest.mark.parametrize("name", ["two_rules_in_a_circle", "a_loop_beside_itself_and_one_letter"])
def test_a_grammar_of_circles_compiles_at_once(tmp_path, name):
    compiler = byte_compiler(tmp_path, timeout_s=2)
    assert compiler.compile(GuidedDecoding(ebnf_grammar=GRAMMARS[name][0])).accepts(GRAMMARS[name][1][0])
    compiler.close()


@pytest.mark.parametrize(
    "filler", ["#" * 400_000, "#\n" * 200_000, " " * 400_000, "\n" * 400_000, "# ::=" + " " * 400_000]
)
def test_gde_07_long_notes_and_spaces_are_read_at_once(filler):
    began = time.thread_time()
    rules = parse_gbnf(f'root ::= item\n{filler}\nitem ::= "a" {filler}\n "b"')
    assert set(rules) == {"root", "item"}
    with pytest.raises(InvalidArgument, match="a repetition is written"):
        parse_gbnf('root ::= "a"{' + " " * 400_000)
    assert time.thread_time() - began < 5


@pytest.mark.parametrize(
    "grammar", ['root ::= item "," root | item', 'root ::= (item ",")* item', 'root ::= root "," item | item']
)
def test_a_list_may_be_long_however_its_grammar_is_written(compiler, grammar):
    guide = compiler.compile(GuidedDecoding(ebnf_grammar=grammar + '\nitem ::= [0-9] | "(" item ")"'))
    text = ",".join(["1", "(2)", "((3))"] * 1000)
    assert guide.accepts(text) and not guide.accepts(text + ",") and not guide.accepts("," + text)


LENGTH = 4
WORDS = ["".join(letters) for length in range(LENGTH + 1) for letters in itertools.product("abc", repeat=length)]


def derived(node: Node, rules: dict[str, set[str]]) -> set[str]:
    """All texts of up to LENGTH characters that `node` derives, given those of the rules."""

    def join(first: set[str], second: set[str]) -> set[str]:
        return {a + b for a in first for b in second if len(a + b) <= LENGTH}

    if isinstance(node, Language):
        return {word for word in WORDS if matches(node, word)}
    if isinstance(node, Reference):
        return rules[node.name]
    if isinstance(node, Choice):
        return set().union(*(derived(part, rules) for part in node.parts))
    result = {""}
    if isinstance(node, Sequence):
        for part in node.parts:
            result = join(result, derived(part, rules))
        return result
    inner = derived(node.inner, rules)
    for _ in range(node.low):
        result = join(result, inner)
    for _ in range((LENGTH if node.high is None else node.high) - node.low):
        result = result | join(result, inner)
    return result


def random_grammar(rng: random.Random) -> str:
    atoms = ['"a"', '"b"', '"ab"', '"abc"', '"c"', "[ab]", "[^a]", "[a-c]", "A", "B", "root"]

    def build(depth: int) -> str:
        kind = rng.random()
        if depth == 0 or kind < 0.35:
            return rng.choice(atoms)
        if kind < 0.65:
            return " ".join(build(depth - 1) for _ in range(rng.randint(2, 3)))
        if kind < 0.85:
            return f"({' | '.join(build(depth - 1) for _ in range(rng.randint(2, 3)))}{rng.choice(['', ' | '])})"
        return f"({build(depth - 1)}){rng.choice(['*', '+', '?', '{2}', '{1,2}', '{0,3}'])}"

    return f"root ::= {build(3)}\nA ::= {build(2)}\nB ::= {build(2)}\n"


def test_gde_03_random_grammars_agree_with_their_derivations(compiler):
    """Terminals are read by longest match; whatever the grammar, that must not cost or add a text."""
    rng, num_checked = random.Random(3), 0
    for _ in range(40):
        grammar = random_grammar(rng)
        rules = parse_gbnf(grammar)
        known: dict[str, set[str]] = {name: set() for name in rules}
        while (more := {name: derived(node, known) | known[name] for name, node in rules.items()}) != known:
            known = more
        try:
            guide = compiler.compile(GuidedDecoding(ebnf_grammar=grammar))
        except InvalidArgument as exc:
            assert "derives" in exc.message and not known["root"], grammar
            continue
        num_checked += 1
        assert [word for word in WORDS if guide.accepts(word) is not (word in known["root"])] == [], grammar
    assert num_checked > 25
