"""Guided decoding: from what a request asks of its output to the tokens that may come next.

    texts           language                sets of texts, by derivatives
                    regex_syntax, regex     regular expressions to languages; unicode_categories: their `\\p{…}`
                    numbers, formats        JSON numbers within bounds; the values of `format`
                    json_text               JSON strings and punctuation

    JSON schemas    schema_source           the document, its references, whether it is well formed
                    schema_values           whether one value meets a schema
                    schema_keywords         what each keyword asks; schema_member_keywords: of objects
                    schema_shapes           the alternatives that are left; schema_solver: works them out
                    schema_grammar          the rules; of schema_members, schema_arrays and schema_multiples too

    context free    gbnf                    grammars
                    structural_tag          text with tags; tag_fields: its members; number_ends: where numbers end
                    rule_nodes              the rules of both
                    context_free            those rules as the backend's; longest_match: where its terminals would clash

    the backend     given                   which of these a guide is; front_ends: who reads it
                    grammar                 the text that the backend reads
                    backend                 the backend's own compiler and matchers

    a request       compiler, workers       guides compiled beside the engine, each within its time (work)
                    compiled, state         a compiled guide, and how far one output has followed it

Each module says what it owns, and what it leaves to others.
"""
