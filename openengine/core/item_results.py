"""`ItemCollector`: puts the raw arrays of a request's items in order, as the loop delivers them.

The twin of `ResultCollector` (output.py) for tasks. What the arrays mean is not its business (task_output.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from openengine.core.sequence import SequenceGroup
from openengine.core.task_work import TaskItemOutput
from openengine.results import Timing
from openengine.task_results import TaskUsage

__all__ = ["ItemCollector", "ItemResults"]


@dataclass(frozen=True, slots=True, eq=False)
class ItemResults:
    """The array of every item of a request, in order."""

    values: Sequence[np.ndarray]
    usage: TaskUsage


class ItemCollector:
    """Written by the loop thread; `result` may be asked for once all items are there."""

    def __init__(self, group: SequenceGroup) -> None:
        self._group = group
        self._values: dict[int, np.ndarray] = {}

    def add(self, event: TaskItemOutput) -> None:
        self._values[event.index] = event.values

    def result(self, *, timing: Timing) -> ItemResults:
        """Everything at once; `timing` goes into the twin's result; a response of a task has no place for it."""
        group = self._group
        usage = TaskUsage(input_tokens=group.num_prompt, cached_input_tokens=group.num_cached_tokens)
        return ItemResults([self._values[index] for index in range(len(group.items))], usage)
