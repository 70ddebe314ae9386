"""What the keywords about an object's members, or their negations, do to an object shape under construction.

As in schema_keywords.py, which lists them: each takes one state and returns the states that also meet its keywords.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from openengine.core.guides.language import EMPTY, complement, intersect, literal
from openengine.core.guides.schema_shapes import Demand, MemberRule, ObjectDraft, State, check_size, counted, unique
from openengine.core.guides.schema_source import Schema, unsupported

if TYPE_CHECKING:
    from openengine.core.guides.schema_solver import ShapeSolver

__all__ = ["dependencies", "max_properties", "min_properties", "properties", "property_names", "required"]


def properties(solver: ShapeSolver, state: ObjectDraft, schema: Schema, holds: bool) -> list[State]:
    """`properties`, `patternProperties` and `additionalProperties`, which divide the members among them."""
    content = schema.content
    named = {name: solver.document.child(schema, "properties", name) for name in content.get("properties", {})}
    # In pairs, for two patterns may be the same language.
    patterns = [
        (
            solver.document.pattern(text, schema, "patternProperties"),
            solver.document.child(schema, "patternProperties", text),
        )
        for text in content.get("patternProperties", {})
    ]
    rest = solver.document.child(schema, "additionalProperties") if "additionalProperties" in schema else None
    keyword = next(each for each in ("properties", "patternProperties", "additionalProperties") if each in schema)
    where = (schema.at(keyword), keyword)
    if holds:
        source = MemberRule(
            tuple((name, solver.goal(Demand(part, True))) for name, part in named.items()),
            tuple((language, solver.goal(Demand(part, True))) for language, part in patterns),
            solver.goal(Demand(rest, True)) if rest else (),
        )
        return [replace(state, sources=(*state.sources, source), where=where)]
    found: list[State] = []
    for name, part in named.items():
        source = MemberRule(((name, solver.goal(Demand(part, False))),))
        found.append(replace(_with_required(state, [name]), sources=(*state.sources, source), where=where))
    outside = intersect(*(complement(literal(name)) for name in named), *(complement(each) for each, _ in patterns))
    for keyword, part, names in (
        *(("patternProperties", part, language) for language, part in patterns),
        *((("additionalProperties", rest, outside),) if rest else ()),
    ):
        if part.content is False:
            found.append(replace(state, some=(*state.some, names), where=where))
        elif part.content not in (True, {}):
            raise unsupported(schema.at(keyword), keyword, "it cannot be negated")
    return found


def required(solver: ShapeSolver, state: ObjectDraft, schema: Schema, holds: bool) -> list[State]:
    names = schema.content["required"]
    if isinstance(names, bool):
        return [state] if holds else []
    if holds:
        return [] if state.absent & set(names) else [_with_required(state, names)]
    return [replace(state, absent=state.absent | {name}) for name in names if name not in state.required]


def dependencies(solver: ShapeSolver, state: ObjectDraft, schema: Schema, holds: bool) -> list[State]:
    states: list[State] = [state]
    denied: list[State] = []
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        for name, wanted in schema.content.get(keyword, {}).items():
            if isinstance(wanted, list):
                part = solver.document.made((id(wanted), "required"), {"required": wanted}, schema.at(keyword))
            else:
                part = solver.document.child(schema, keyword, name)
            present = solver.document.made(("present", name), {"required": [name]}, schema.at(keyword))
            if not holds:
                denied += solver.refine_all([state], (Demand(present, True), Demand(part, False)))
            else:
                without = solver.refine(states, present, False)
                states = unique([*without, *solver.refine_all(states, (Demand(present, True), Demand(part, True)))])
                check_size(states, schema, (keyword,))
    return states if holds else denied


def property_names(solver: ShapeSolver, state: ObjectDraft, schema: Schema, holds: bool) -> list[State]:
    part = solver.document.child(schema, "propertyNames")
    where = (schema.at("propertyNames"), "propertyNames")
    if holds:
        return [replace(state, names=solver.goal(state.names, Demand(part, True)), where=where)]
    wrong = solver.string_language(solver.goal(Demand(part, False)))
    return [] if wrong == EMPTY else [replace(state, some=(*state.some, wrong), where=where)]


def min_properties(solver: ShapeSolver, state: ObjectDraft, schema: Schema, holds: bool) -> list[State]:
    bound = schema.content["minProperties"]
    states = counted(state, bound, None) if holds else counted(state, 0, bound - 1)
    return [replace(each, where=(schema.at("minProperties"), "minProperties")) for each in states]


def max_properties(solver: ShapeSolver, state: ObjectDraft, schema: Schema, holds: bool) -> list[State]:
    bound = schema.content["maxProperties"]
    states = counted(state, 0, bound) if holds else counted(state, bound + 1, None)
    return [replace(each, where=(schema.at("maxProperties"), "maxProperties")) for each in states]


def _with_required(state: ObjectDraft, names: Iterable[str]) -> ObjectDraft:
    return replace(state, required=tuple(dict.fromkeys((*state.required, *names))))
