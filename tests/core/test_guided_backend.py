"""What the backend says, in the terms of who wrote the guide."""

from __future__ import annotations

import pytest

from openengine.core.guides.backend import plain_error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("Parser Error: Current row has 2001 items; max is 2000; consider", "2001 possible continuations, the limit is 2000"),
        ("parser error: Too many items (limit 50; mask); try avoiding", "more than 50 readings"),
        ("lexer error: too many expressions constructed", "its patterns are too complex to be followed together"),
        ("fuel exhausted when checking relevance of lexemes (9)", "{m,n}"),
        ("lexer precomputation failed; either increase limits.initial_lexer_fuel", "fewer or simpler patterns"),
        ("lexer error: too many states: 70 >= 70", "more than 70 states"),
        ("at 1(2): initial lexer configuration (grammar) too big (limit for this grammar: 80)", "the limit is some 80 parts"),
        ("at 1(2): grammar size (number of symbols) too big (limit for this grammar: 90)", "more than 90 symbols"),
        ("panic: index out of bounds", "larger than the backend can take"),
        ("something else\nwith details", "something else"),
    ],
)  # fmt: skip
def test_what_the_backend_refuses_is_named_in_the_terms_of_the_guide(error, said):
    found = plain_error(error)
    assert said in found and "\n" not in found
    assert not any(word in found for word in ("fuel", "items;", "lexer", "lexeme", "row"))
