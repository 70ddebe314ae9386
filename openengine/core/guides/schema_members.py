"""The members of an object as rules of the backend's grammar: declared ones in order, then those that are not declared.

Owns how members are left out, counted and required; their values are symbols that the caller gives for their goals.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from openengine.core.guides.grammar import Grammar
from openengine.core.guides.json_text import CLOSE_OBJECT, COMMA, OPEN_OBJECT, key_of
from openengine.core.guides.language import Language, complement, intersect, literal
from openengine.core.guides.schema_shapes import Goal, ObjectShape
from openengine.core.guides.schema_solver import ShapeSolver
from openengine.core.guides.schema_source import unsupported

__all__ = ["MemberWriter", "check_optional", "repeated"]

_MAX_WANTED = 3  # any of them may come first, so that each more doubles the rules
_BLOCK = 32  # the members of a block are written once for each that may be its first
_MAX_COUNTED = 10_000  # each member is written once for each number of those before it
_MAX_COUNTED_MEMBERS = 200  # each is a rule within that of the one before
_MAX_OPTIONAL = 900  # each is two of the 2000 items that the backend follows at one place of a text


def check_optional(shape: ObjectShape) -> None:
    """Raises InvalidArgument where the backend could not follow all the members that may come next."""
    runs = itertools.groupby(is_required for _, _, is_required in shape.declared)
    longest = max((sum(1 for _ in run) for is_required, run in runs if not is_required), default=0)
    if longest > _MAX_OPTIONAL and (shape.high is None or shape.high >= len(shape.declared)):
        raise unsupported(
            *shape.where, f"{longest} optional members follow one another, the limit is {_MAX_OPTIONAL}; require some"
        )


def repeated(part: str, low: int, high: int | None) -> str:
    """`part` between `low` and `high` times, None without end."""
    if high == 0:
        return ""
    if high is None:
        return f"({part})*" if low == 0 else f"({part}){{{low},}}"
    return f"({part}){{{low},{high}}}"


class MemberWriter:
    """Writes objects. has: whether some value meets a goal.  symbol: that of the values which meet one."""

    def __init__(
        self, grammar: Grammar, solver: ShapeSolver, has: Callable[[Goal], bool], symbol: Callable[[Goal], str]
    ) -> None:
        self._grammar = grammar
        self._solver = solver
        self._has = has
        self._symbol = symbol
        self._comma = grammar.symbol(COMMA)

    def write(self, shape: ObjectShape) -> str:
        """What an object of this shape is written as, brackets and all."""
        declared = [(self._member(literal(name), goal), must) for name, goal, must in shape.declared if self._has(goal)]
        others = [(language, goal) for language, goal in shape.others if self._has(goal)]
        rest = self._grammar.rule([self._member(*each) for each in others]) if others else None
        start, end = self._grammar.symbol(OPEN_OBJECT), self._grammar.symbol(CLOSE_OBJECT)
        num_required = sum(must for _, must in declared)
        is_bounded = shape.high is not None and (shape.high < len(declared) or bool(others))
        if not is_bounded and shape.low <= num_required and not shape.some:
            return f"{start} {self._free_members(declared, rest)} {end}"
        return f"{start} {self._counted_members(shape, declared, others, rest)} {end}"

    def _member(self, names: Language, goal: Goal) -> str:
        self._solver.work.tick()
        return f"{self._grammar.symbol(key_of(names))} {self._symbol(goal)}"

    def _free_members(self, declared: list[tuple[str, bool]], rest: str | None) -> str:
        """Members without a bound on their number: after the first, each is optional or required on its own.

        In blocks, so that the grammar stays flat and its size linear however many members there are.
        """
        blocks = [declared[start : start + _BLOCK] for start in range(0, len(declared), _BLOCK)]
        following = [self._later(block) for block in blocks]
        if len(blocks) > 1:
            following = [self._grammar.rule([each]) for each in following]
        following.append(f"({self._comma} {rest})*" if rest else "")
        heads: list[str] = []
        for index, block in enumerate(blocks):
            firsts: list[str] = []
            for place, (member, must) in enumerate(block):
                firsts.append(f"{member} {self._later(block[place + 1 :])}")
                if must:
                    break
            first = firsts[0] if len(firsts) == 1 else self._grammar.rule(firsts)
            heads.append(" ".join([first, *following[index + 1 :]]))
            if any(must for _, must in block):
                return heads[0] if len(heads) == 1 else self._grammar.rule(heads)
        if rest:
            heads.append(f"{rest} {following[-1]}")
        return self._grammar.rule([*heads, '""'])

    def _later(self, members: list[tuple[str, bool]]) -> str:
        """Members after the first."""
        return " ".join(f"{self._comma} {member}" if must else f"({self._comma} {member})?" for member, must in members)

    def _counted_members(
        self,
        shape: ObjectShape,
        declared: list[tuple[str, bool]],
        others: list[tuple[Language, Goal]],
        rest: str | None,
    ) -> str:
        """Members with their number between bounds, or with a name required of those that are not declared."""
        wanted = self._wanted(shape, others, rest) if shape.some else None
        if (
            len(declared) * min(len(declared), shape.high or shape.low or 1) > _MAX_COUNTED
            or len(declared) > _MAX_COUNTED_MEMBERS
        ):
            raise unsupported(*shape.where, "it bounds the number of members of an object with too many of them")
        known: dict[tuple[int, int], str | None] = {}

        def after(index: int, count: int) -> str | None:
            """A rule for the members from `index` on when `count` came before; None if there is no way on."""
            if (index, count) not in known:
                known[index, count] = None
                options = at_end(count) if index == len(declared) else choose(index, count)
                known[index, count] = self._grammar.rule(options) if options else None
            return known[index, count]

        def choose(index: int, count: int) -> list[str]:
            member, must = declared[index]
            options = []
            if shape.high is None or count < shape.high:
                more = after(index + 1, count + 1)
                options += [] if more is None else [f"{self._comma if count else ''} {member} {more}"]
            if not must and (more := after(index + 1, count)) is not None:
                options.append(more)
            return options

        def at_end(count: int) -> list[str]:
            low, high = max(shape.low - count, 0), None if shape.high is None else shape.high - count
            if wanted is not None:
                if low > 1 or high is not None:
                    raise unsupported(*shape.where, "it bounds the number of members and requires an undeclared one")
                return [f"{self._comma} {wanted}" if count else wanted]
            if rest is None or high == 0:
                return ['""'] if low == 0 else []
            if low > 1:
                raise unsupported(
                    *shape.where, "it requires several members that are not declared, and their names could repeat"
                )
            item = f"{self._comma} {rest}"
            if count:
                return [repeated(item, low, high)]
            first = f"{rest} {repeated(item, 0, None if high is None else high - 1)}"
            return [first] if low else [first, '""']

        start = after(0, 0)
        assert start is not None, "unproductive shapes are left out before"
        return start

    def _wanted(self, shape: ObjectShape, others: list[tuple[Language, Goal]], rest: str | None) -> str:
        """Undeclared members, among them one of each set of names in `shape.some`."""
        if len(shape.some) > _MAX_WANTED:
            raise unsupported(*shape.where, f"it asks for more than {_MAX_WANTED} undeclared members")
        every = frozenset(range(len(shape.some)))
        subsets = [frozenset(each) for size in range(1, len(every) + 1) for each in itertools.combinations(every, size)]
        after = {frozenset(): f"({self._comma} {rest})*"}
        for missing in subsets:
            # A member belongs to just one of these, so that there is one way to each object.
            options = []
            for subset in (each for each in subsets if each <= missing):
                member = self._members_in(shape, others, subset, missing - subset)
                comma = f" {self._comma}" if subset != missing else ""
                options += [f"{member}{comma} {after[missing - subset]}"] if member else []
            no_matter = self._members_in(shape, others, frozenset(), missing)
            before = f"({no_matter} {self._comma})* " if no_matter else ""
            after[missing] = self._grammar.rule([f"{before}({' | '.join(options)})"])
        return after[every]

    def _members_in(
        self, shape: ObjectShape, others: list[tuple[Language, Goal]], within: frozenset[int], outside: frozenset[int]
    ) -> str | None:
        """Undeclared members whose names are in some of the sets of `shape.some` and not in others; None if there are none."""
        sets = [shape.some[index] for index in within] + [complement(shape.some[index]) for index in outside]
        named = [(intersect(names, *sets), goal) for names, goal in others]
        found = [self._member(names, goal) for names, goal in named if not self._solver.surely_empty(names)]
        return self._grammar.rule(found) if found else None
