"""What embed, classify and score give: tensors, one output per input, responses that go into arrays and data frames.

Names are the OpenEngine contract's in snake case. All are frozen dataclasses. Meanings: requirements TSK, EMB, CLS and SCR
of the contract. Does not own how raw arrays become outputs (core/task_output.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from openengine.errors import InvalidArgument
from openengine.task_types import ScoreNormalization, TaskOutputGranularity, TaskValueSemantics

__all__ = [
    "ClassificationOutput",
    "ClassifyResponse",
    "DenseFloatTensor",
    "EmbedResponse",
    "EmbeddingOutput",
    "ScoreCandidateOutput",
    "ScoreGroupOutput",
    "ScoreResponse",
    "SparseFloatTensor",
    "TaskUsage",
]


# ---- what the three share ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class DenseFloatTensor:
    """Row-major values; a scalar has shape (1,).

    values: f32 [product of shape], converted from what is given. Two tensors are equal when shape and values are.
    """

    shape: tuple[int, ...]
    values: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", np.asarray(self.values, dtype=np.float32))

    def numpy(self) -> np.ndarray:
        """f32 [*shape], a view of `values`."""
        return self.values.reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return _as_array(self.numpy(), dtype, copy)

    def __repr__(self) -> str:
        return f"DenseFloatTensor(shape={self.shape})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DenseFloatTensor):
            return NotImplemented
        return self.shape == other.shape and np.array_equal(self.values, other.values)

    __hash__ = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SparseFloatTensor:
    """The nonzero values of a tensor at strictly increasing row-major indices.

    indices: u64 [N].  values: f32 [N].  Both are converted from what is given.
    """

    shape: tuple[int, ...]
    indices: np.ndarray
    values: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "indices", np.asarray(self.indices, dtype=np.uint64))
        object.__setattr__(self, "values", np.asarray(self.values, dtype=np.float32))

    def numpy(self) -> np.ndarray:
        """f32 [*shape] with the zeros."""
        dense = np.zeros(math.prod(self.shape), dtype=np.float32)
        dense[self.indices.astype(np.int64)] = self.values
        return dense.reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return _as_array(self.numpy(), dtype, copy)

    def __repr__(self) -> str:
        return f"SparseFloatTensor(shape={self.shape}, nonzero={len(self.values)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SparseFloatTensor):
            return NotImplemented
        same_indices = np.array_equal(self.indices, other.indices)
        return self.shape == other.shape and same_indices and np.array_equal(self.values, other.values)

    __hash__ = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskUsage:
    """Tokens that were run, special tokens included; the cached ones are among them."""

    input_tokens: int
    cached_input_tokens: int | None = None


# ---- embed ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """One input's embedding: [dimension], or [token_count, dimension] by token, then perhaps with the `token_ids`."""

    item_id: str
    input_index: int
    granularity: TaskOutputGranularity
    embedding: DenseFloatTensor | SparseFloatTensor
    token_ids: tuple[int, ...] = ()

    def numpy(self) -> np.ndarray:
        """f32 [dimension], or [token_count, dimension] by token."""
        return self.embedding.numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return _as_array(self.numpy(), dtype, copy)

    def to_dict(self) -> dict[str, Any]:
        return {"item_id": self.item_id, "embedding": self.numpy()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedResponse:
    """One output per input, in order; `len`, indexing and iteration are those of `outputs`."""

    request_id: str
    outputs: tuple[EmbeddingOutput, ...]
    usage: TaskUsage | None = None

    def numpy(self) -> np.ndarray:
        """f32 [n, dimension]. Raises: InvalidArgument by token, where texts differ in their number of tokens."""
        return _stack([output.embedding for output in self.outputs])

    def to_dict(self) -> dict[str, Any]:
        """Columns for a data frame, a row per input."""
        return _columns(["item_id", "embedding"], [output.to_dict() for output in self.outputs])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return _as_array(self.numpy(), dtype, copy)

    def __len__(self) -> int:
        return len(self.outputs)

    def __getitem__(self, index: int) -> EmbeddingOutput:
        return self.outputs[index]

    def __iter__(self) -> Iterator[EmbeddingOutput]:
        return iter(self.outputs)


# ---- classify ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationOutput:
    """One input's scores: [class_count], or [token_count, class_count] by token. `labels` name the last dimension."""

    item_id: str
    input_index: int
    granularity: TaskOutputGranularity
    semantics: TaskValueSemantics
    scores: DenseFloatTensor
    labels: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()

    @property
    def label(self) -> str | list[str]:
        """The class of the highest score; of each token, by token. Its number where classes have no names."""
        best = self.scores.numpy().argmax(-1)
        names = self.labels or tuple(map(str, range(self.scores.shape[-1])))
        return [names[index] for index in best] if best.ndim else names[best]

    def numpy(self) -> np.ndarray:
        """f32 [class_count], or [token_count, class_count] by token."""
        return self.scores.numpy()

    def to_dict(self) -> dict[str, Any]:
        return {"item_id": self.item_id, "label": self.label, "scores": self.numpy()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyResponse:
    """One output per input, in order; `len`, indexing and iteration are those of `outputs`."""

    request_id: str
    outputs: tuple[ClassificationOutput, ...]
    usage: TaskUsage | None = None

    @property
    def labels(self) -> list[str | list[str]]:
        """The class that each input is given, by its highest score; see `ClassificationOutput.labels` for all names."""
        return [output.label for output in self.outputs]

    @property
    def scores(self) -> np.ndarray:
        """f32 [n, class_count]. Raises: InvalidArgument by token, where texts differ in their number of tokens."""
        return _stack([output.scores for output in self.outputs])

    def numpy(self) -> np.ndarray:
        """`scores`"""
        return self.scores

    def to_dict(self) -> dict[str, Any]:
        """Columns for a data frame, a row per input."""
        return _columns(["item_id", "label", "scores"], [output.to_dict() for output in self.outputs])

    def __len__(self) -> int:
        return len(self.outputs)

    def __getitem__(self, index: int) -> ClassificationOutput:
        return self.outputs[index]

    def __iter__(self) -> Iterator[ClassificationOutput]:
        return iter(self.outputs)


# ---- score ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCandidateOutput:
    candidate_id: str
    candidate_index: int
    scores: DenseFloatTensor
    token_ids: tuple[int, ...] = ()

    def numpy(self) -> np.ndarray:
        """f32 [1], or [labels]."""
        return self.scores.numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreGroupOutput:
    """Candidates in the request's order, never sorted."""

    group_id: str
    group_index: int
    candidates: tuple[ScoreCandidateOutput, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResponse:
    """`higher_is_better` is set when the scores rank.

    `len`, indexing and iteration go over the candidates of all groups, in the request's order.
    """

    request_id: str
    groups: tuple[ScoreGroupOutput, ...]
    granularity: TaskOutputGranularity
    semantics: TaskValueSemantics
    normalization: ScoreNormalization
    higher_is_better: bool | None = None
    label_token_ids: tuple[int, ...] = ()
    usage: TaskUsage | None = None

    @property
    def candidates(self) -> tuple[ScoreCandidateOutput, ...]:
        """Those of all groups, one group after the other."""
        return tuple(candidate for group in self.groups for candidate in group.candidates)

    @property
    def scores(self) -> np.ndarray:
        """f32 [n] of the n candidates in the request's order, or [n, k] where each has k scores."""
        scores = _stack([candidate.scores for candidate in self.candidates])
        return scores[:, 0] if scores.shape[1:] == (1,) else scores

    def numpy(self) -> np.ndarray:
        """`scores`"""
        return self.scores

    def ranking(self, group: int | None = None) -> list[int]:
        """Indices of the group's candidates, best first; those of equal score in the request's order.

        `group` may be left out where there is one. Raises: InvalidArgument where the scores do not rank: a candidate has
        several, or which end is better is not known.
        """
        if group is None and len(self.groups) != 1:
            raise InvalidArgument(f"the response has {len(self.groups)} groups; name one: ranking(0)")
        candidates = self.groups[group or 0].candidates
        several = next((c.scores.shape[-1] for c in candidates if c.scores.shape != (1,)), None)
        if several is not None:
            raise InvalidArgument(
                f"these scores do not rank: a candidate has {several} and needs one; score with one label, as in "
                "labels=[' yes'], or sort by one of them, as in (-response.scores[:, 0]).argsort()"
            )
        if self.higher_is_better is None:
            raise InvalidArgument(
                "these scores do not rank: whether higher is better is not known of this model; if you know it, sort .scores"
            )
        scores = np.array([candidate.scores.values[0] for candidate in candidates])
        return np.argsort(-scores if self.higher_is_better else scores, kind="stable").tolist()

    def to_dict(self) -> dict[str, Any]:
        """Columns for a data frame, a row per candidate."""
        rows = [
            {
                "group_id": group.group_id,
                "candidate_id": candidate.candidate_id,
                "score": float(candidate.scores.values[0]) if candidate.scores.shape == (1,) else candidate.numpy(),
            }
            for group in self.groups
            for candidate in group.candidates
        ]
        return _columns(["group_id", "candidate_id", "score"], rows)

    def __len__(self) -> int:
        return len(self.candidates)

    def __getitem__(self, index: int) -> ScoreCandidateOutput:
        return self.candidates[index]

    def __iter__(self) -> Iterator[ScoreCandidateOutput]:
        return iter(self.candidates)


# ---- of any task ---------------------------------------------------------------------------------


def total_usage(usages: Sequence[TaskUsage]) -> TaskUsage:
    """That of several requests together; what none tells stays untold."""
    cached = [usage.cached_input_tokens for usage in usages if usage.cached_input_tokens is not None]
    return TaskUsage(
        input_tokens=sum(usage.input_tokens for usage in usages), cached_input_tokens=sum(cached) if cached else None
    )


TaskResponse = EmbedResponse | ClassifyResponse | ScoreResponse
# Of a call: for one input outside a list, its output.
TaskResult = TaskResponse | EmbeddingOutput | ClassificationOutput


# ---- arrays and columns --------------------------------------------------------------------------


def _as_array(array: np.ndarray, dtype: Any, copy: bool | None) -> np.ndarray:
    """What numpy's `__array__` protocol asks for."""
    converted = array if dtype is None else array.astype(dtype, copy=False)
    return converted.copy() if copy and converted is array else converted


def _columns(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: [row[name] for row in rows] for name in names}


def _stack(tensors: Sequence[DenseFloatTensor | SparseFloatTensor]) -> np.ndarray:
    """f32 [n, *shape] of n tensors of one shape."""
    shapes = {tensor.shape for tensor in tensors}
    if len(shapes) > 1:
        raise InvalidArgument(
            f"the results have different shapes ({', '.join(map(str, sorted(shapes)[:3]))}, …), as many rows as the texts "
            "have tokens; take them one by one: result[0].numpy()"
        )
    return np.stack([tensor.numpy() for tensor in tensors]) if tensors else np.empty((0, 0), dtype=np.float32)
