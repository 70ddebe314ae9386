"""What a task asks of the loop: `TaskWork` says what becomes of hidden rows, `TaskItem` is one text of a request,
`TaskItemOutput` is the raw array that came of it.

Values only. Does not own what callers see of them: requests (task_admission.py) and responses (task_output.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from openengine.core.task_kinds import TaskKind

__all__ = ["TaskItem", "TaskItemOutput", "TaskWork"]


@dataclass(frozen=True, slots=True)
class TaskWork:
    """What is done with the hidden rows of every item of a request; items of equal work are pooled together.

    `label_ids` are the token ids whose logits LABELS wants. `keeps_rows`: more than the last row of an item is needed, so
    that no token may come out of the prefix cache.
    """

    kind: TaskKind
    label_ids: tuple[int, ...] = ()
    keeps_rows: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TaskItem:
    """One text, or one pair of texts, as the model takes it.

    token_ids: i32[n], special tokens included.  token_types: i32[n], which text of a pair, None for a single one.
    num_skipped: how many tokens at its start are an instruction that pooling leaves out.
    num_shared: how many tokens at its start are those of every item of the same `query`, of a model with a KV cache.
    """

    token_ids: np.ndarray
    token_types: np.ndarray | None = None
    num_skipped: int = 0
    num_shared: int = 0
    query: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TaskItemOutput:
    """The array of the item at `index` of its request; `TaskKind` says its shape."""

    index: int
    values: np.ndarray
