"""Arrays whose items depend on one another: `contains` and `uniqueItems` as a machine over items.

A state is the number of items so far (as far as it matters), how many of them were counted for each `contains`, and
which values were used where items must be unique. The machine may count an item for `contains` or not, so that several
ways through it may lead to the same array; what must not be counted is restricted to the negation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from openengine.core.guides.grammar import Grammar
from openengine.core.guides.schema_shapes import ArrayShape, Goal, NumberShape, Values
from openengine.core.guides.schema_solver import ShapeSolver
from openengine.core.guides.schema_source import unsupported
from openengine.core.guides.schema_values import Value
from openengine.errors import InvalidArgument

__all__ = ["ArrayMachine"]

_MAX_STATES = 3000  # each becomes a rule with a way for each of its items
_MAX_VALUES = 32  # each set of them that is taken is a state: those of three of 32 exceed _MAX_STATES already


@dataclass(frozen=True, slots=True)
class _State:
    num_items: int
    counts: tuple[int, ...]
    used: frozenset[Value]


@dataclass(frozen=True, slots=True)
class _Step:
    """One item: any that meets `goal`, or `value` alone."""

    goal: Goal
    value: Value | None
    then: _State


class ArrayMachine:
    """The states of one array shape.

    can_write: whether rules for the values that meet a goal can be written.
    """

    def __init__(self, shape: ArrayShape, solver: ShapeSolver, can_write: Callable[[Goal], bool]) -> None:
        self._shape = shape
        self._solver = solver
        self._where = shape.unique or shape.contains[0].where
        # More than one item is what makes them unique or not.
        self._is_unique = shape.unique is not None and (shape.high is None or shape.high > 1)
        self._start = _State(0, (0,) * len(shape.contains), frozenset())
        try:
            self._steps = self._all_steps(denies=True)
            is_written = all(entry.high is not None for entry in shape.contains) or all(map(can_write, self.goals))
        except InvalidArgument:
            is_written = False
        if not is_written:
            self._steps = self._all_steps(denies=False)

    @property
    def goals(self) -> list[Goal]:
        """Those of its items."""
        return list(dict.fromkeys(step.goal for steps in self._steps.values() for step in steps))

    def _all_steps(self, *, denies: bool) -> dict[_State, list[_Step]]:
        found: dict[_State, list[_Step]] = {}
        pending = [self._start]
        for state in pending:
            found[state] = list(self._next(state, denies))
            for step in found[state]:
                if step.then not in found:
                    found[step.then] = []
                    pending.append(step.then)
            if len(pending) > _MAX_STATES:
                raise unsupported(*self._where, "it needs too many states; lower its bounds")
        return found

    def is_productive(self, has: Callable[[Goal], bool]) -> bool:
        """Whether some array goes through, given which goals some value meets."""
        return self._start in self._live(has)

    def write(
        self,
        grammar: Grammar,
        has: Callable[[Goal], bool],
        symbol: Callable[[Goal], str],
        value_symbol: Callable[[Any], str],
        comma: str,
    ) -> str:
        """Add rules for what stands between the brackets; returns their symbol."""
        live = self._live(has)
        names = {state: grammar.new_rule() for state in self._steps if state in live and state.num_items}

        def item(step: _Step) -> str:
            return symbol(step.goal) if step.value is None else value_symbol(step.value.content)

        for state, name in names.items():
            steps = [step for step in self._steps[state] if step.then in live and has(step.goal)]
            loops = [f"{comma} {item(step)}" for step in steps if step.then == state]
            again = f"({' | '.join(loops)})* " if loops else ""
            onward = [f"{again}{comma} {item(step)} {names[step.then]}" for step in steps if step.then != state]
            grammar.define(name, onward + ([again or '""'] if self._accepts(state) else []))
        first = [f"{item(s)} {names[s.then]}" for s in self._steps[self._start] if s.then in live and has(s.goal)]
        return grammar.rule(first + (['""'] if self._accepts(self._start) else []))

    def _accepts(self, state: _State) -> bool:
        return state.num_items >= self._shape.low and all(
            count >= entry.low for count, entry in zip(state.counts, self._shape.contains, strict=True)
        )

    def _live(self, has: Callable[[Goal], bool]) -> set[_State]:
        """States from which an accepting one can be reached."""
        before: dict[_State, list[_State]] = {state: [] for state in self._steps}
        for state, steps in self._steps.items():
            for step in steps:
                if has(step.goal):
                    before[step.then].append(state)
        pending = [state for state in self._steps if self._accepts(state)]
        live = set(pending)
        for state in pending:
            for earlier in before[state]:
                if earlier not in live:
                    live.add(earlier)
                    pending.append(earlier)
        return live

    def _next(self, state: _State, denies: bool) -> Iterator[_Step]:
        """The steps from `state`. denies: what need not be counted, but could be, is restricted to the negation as well."""
        shape = self._shape
        if state.num_items == shape.high:
            return
        base = shape.prefix[state.num_items] if state.num_items < len(shape.prefix) else shape.items
        # At least one, so that the first item is told from the later ones, which follow a comma.
        last = max(shape.low, len(shape.prefix), 1) if shape.high is None else shape.high
        num_items = min(state.num_items + 1, last)
        choices = []
        for count, entry in zip(state.counts, shape.contains, strict=True):
            if entry.high is None and count == entry.low:
                choices.append([((), count)])
                continue
            can_count = entry.high is None or count < entry.high
            others = entry.others if denies or entry.high is not None else ()
            choices.append([(others, count)] + ([(entry.goal, count + 1)] if can_count else []))
        for chosen in itertools.product(*choices):
            goal = self._solver.goal(base, *(part for part, _ in chosen))
            counts = tuple(count for _, count in chosen)
            if not self._is_unique:
                yield _Step(goal, None, _State(num_items, counts, frozenset()))
                continue
            for value in self._values(goal):
                if value not in state.used:
                    yield _Step(goal, value, _State(num_items, counts, state.used | {value}))

    def _values(self, goal: Goal) -> list[Value]:
        found: list[Value] = []
        for shape in self._solver.shapes(goal):
            listed = shape.range.values(_MAX_VALUES) if isinstance(shape, NumberShape) else None
            if isinstance(shape, Values):
                found.extend(shape.values)
            elif listed is not None:
                found.extend(Value.of(value) for value in listed)
            else:
                raise unsupported(
                    *self._where,
                    "items can be compared only where they are drawn from a short list of values; give them an enum "
                    "(in pydantic: a set of an Enum or a Literal), or drop it (in pydantic: list in place of set)",
                )
        if len(found) > _MAX_VALUES:
            raise unsupported(
                *self._where, f"items can be compared only among at most {_MAX_VALUES} values; list fewer, or drop it"
            )
        return found
