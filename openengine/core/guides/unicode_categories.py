"""The characters of Unicode's general categories, as ranges of code points: what `\\p{Lu}` stands for."""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata

from openengine.core.guides.work import Work

__all__ = ["category_ranges"]

_KINDS = ("", "gc", "General_Category")
_CATEGORY = re.compile("[LMNPSZC][a-z]?")
_LONG_NAMES = {
    "Letter": "L",
    "Lowercase_Letter": "Ll",
    "Uppercase_Letter": "Lu",
    "Mark": "M",
    "Number": "N",
    "Decimal_Number": "Nd",
    "Punctuation": "P",
    "Symbol": "S",
    "Separator": "Z",
    "Other": "C",
    "Any": "",
    "digit": "Nd",
    "punct": "P",
}
_BLOCK = 0x1000  # small enough for the clock to be looked at between two


def category_ranges(name: str, work: Work) -> tuple[tuple[int, int], ...]:
    """The code points of a category by its name, such as `Lu`, `L` or `gc=Letter`; none for what is no category."""
    kind, _, category = name.rpartition("=")
    category = _LONG_NAMES.get(category, category)
    if not name or kind not in _KINDS or (category and not _CATEGORY.fullmatch(category)):
        return ()
    found: list[tuple[int, int]] = []
    for block in range(0, 0x110000, _BLOCK):
        work.tick(8)
        for low, high, found_in in _runs(block):
            if not found_in.startswith(category):
                continue
            if found and found[-1][1] == low - 1:
                found[-1] = (found[-1][0], high)
            else:
                found.append((low, high))
    return tuple(found)


@functools.cache
def _runs(block: int) -> tuple[tuple[int, int, str], ...]:
    """(first, last, category) of the runs of one category from `block` on."""
    runs: list[tuple[int, int, str]] = []
    for name, group in itertools.groupby(range(block, block + _BLOCK), lambda code: unicodedata.category(chr(code))):
        codes = list(group)
        runs.append((codes[0], codes[-1], name))
    return tuple(runs)
