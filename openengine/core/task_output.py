"""Raw arrays of finished items (`TaskKind` says their shapes) to what callers get: vectors, scores, labels.

    EMBED, EMBED_TOKENS, EMBED_SPARSE   cut to the wanted dimensions, then normalized                embed_outputs
    CLASSIFY, CLASSIFY_TOKENS           logits, probabilities or their logs                          ClassHead
    SCORE, LABELS                       the model's own score of a pair, or one score per label      ScoreHead, label_scores

Owns what a head's numbers mean: which semantics there are, which is the default, which combination makes sense. Does not
own the checks of requests against what is advertised (task_admission.py). Numpy only, over all items of a request at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from openengine.core.task_kinds import TaskKind
from openengine.core.task_specs import ScoreSpec
from openengine.errors import InvalidArgument
from openengine.task_results import (
    ClassificationOutput,
    DenseFloatTensor,
    EmbeddingOutput,
    ScoreCandidateOutput,
    ScoreGroupOutput,
    SparseFloatTensor,
)
from openengine.task_types import ScoreGroup, ScoreNormalization, TaskOutputGranularity, TaskValueSemantics

__all__ = [
    "ClassHead",
    "ScoreHead",
    "embed_outputs",
    "label_scores",
    "resolve_label_scores",
    "score_outputs",
]

_LOGITS, _PROBABILITIES = TaskValueSemantics.LOGITS, TaskValueSemantics.PROBABILITIES
_LOG_PROBABILITIES = TaskValueSemantics.LOG_PROBABILITIES
_PROBABILISTIC = (_PROBABILITIES, _LOGITS, _LOG_PROBABILITIES)
_NONE, _SOFTMAX = ScoreNormalization.NONE, ScoreNormalization.SOFTMAX


# ---- embed ---------------------------------------------------------------------------------------


def embed_outputs(
    values: Sequence[np.ndarray],
    item_ids: Sequence[str],
    *,
    kind: TaskKind,
    normalize: bool,
    dimensions: int | None = None,
    vocab_size: int | None = None,
    token_ids: Sequence[Sequence[int]] | None = None,
) -> tuple[EmbeddingOutput, ...]:
    """One output per item, in order. values: the raw arrays of `kind`.

    dimensions: take the first so many components, before `normalize` brings each vector to the L2 norm 1 (a vector of
    zeros stays one).  vocab_size: the length of sparse vectors.  token_ids: of each item, to come with its tokens' vectors.
    """
    granularity = TaskOutputGranularity.TOKEN if kind.is_per_token else TaskOutputGranularity.SEQUENCE
    tensors: list[DenseFloatTensor] | list[SparseFloatTensor]
    if kind is TaskKind.EMBED_SPARSE:
        tensors = [_sparse(array, vocab_size, normalize=normalize) for array in values]
    elif kind is TaskKind.EMBED:
        vectors = _vectors(np.stack(values), dimensions, normalize=normalize)
        tensors = [DenseFloatTensor(shape=vector.shape, values=vector) for vector in vectors]
    else:
        arrays = [_vectors(array, dimensions, normalize=normalize) for array in values]
        tensors = [DenseFloatTensor(shape=array.shape, values=array.reshape(-1)) for array in arrays]
    ids = token_ids if token_ids is not None and kind.is_per_token else [()] * len(tensors)
    return tuple(
        EmbeddingOutput(
            item_id=item_id, input_index=index, granularity=granularity, embedding=tensor, token_ids=tuple(tokens)
        )
        for index, (item_id, tensor, tokens) in enumerate(zip(item_ids, tensors, ids, strict=True))
    )


def _vectors(values: np.ndarray, dimensions: int | None, *, normalize: bool) -> np.ndarray:
    """f32 [N, D] -> f32 [N, dimensions], contiguous."""
    values = values if dimensions is None else values[:, :dimensions]
    return np.ascontiguousarray(_normalized(values) if normalize else values)


def _normalized(values: np.ndarray) -> np.ndarray:
    norms = np.sqrt(np.square(values, dtype=np.float64).sum(-1, keepdims=True))
    return (values / np.where(norms > 0, norms, 1)).astype(np.float32)


def _sparse(values: np.ndarray, vocab_size: int, *, normalize: bool) -> SparseFloatTensor:
    indices, weights = values
    weights = _normalized(weights) if normalize else weights
    return SparseFloatTensor(shape=(vocab_size,), indices=indices.astype(np.uint64), values=weights)


# ---- classify ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClassHead:
    """A head over classes. `labels` name them in the order of the logits.

    Of a multi-label head every class has a probability of its own, as has a single class; else they sum to 1. A regression
    head's values are no logits of probabilities.
    """

    labels: tuple[str, ...]
    is_multi_label: bool = False
    is_regression: bool = False

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any], num_labels: int) -> ClassHead:
        """Labels and kind as config.json has them.

        Raises: InvalidArgument when the labels are not numbered from 0 to `num_labels` - 1, or the kind is unknown.
        """
        names = hf_config.get("id2label") or {}
        labels = {str(key): str(name) for key, name in names.items()} if isinstance(names, Mapping) else {}
        if not labels:
            labels = {str(index): f"LABEL_{index}" for index in range(num_labels)}
        if labels.keys() != {str(index) for index in range(num_labels)}:
            raise InvalidArgument(f"config: id2label names {len(labels)} classes, and the model has {num_labels}")
        kind = hf_config.get("problem_type")
        if kind not in (None, "regression", "single_label_classification", "multi_label_classification"):
            raise InvalidArgument(f"config: problem_type {kind!r:.80} is not known")
        return cls(
            tuple(labels[str(index)] for index in range(num_labels)),
            is_multi_label=kind == "multi_label_classification",
            is_regression=kind == "regression",
        )

    @property
    def semantics(self) -> tuple[TaskValueSemantics, ...]:
        """What its values can be given as, the default first."""
        return (_LOGITS,) if self.is_regression else _PROBABILISTIC

    @property
    def is_independent(self) -> bool:
        return self.is_multi_label or len(self.labels) == 1

    def outputs(
        self,
        values: Sequence[np.ndarray],
        item_ids: Sequence[str],
        *,
        kind: TaskKind,
        semantics: TaskValueSemantics,
        token_ids: Sequence[Sequence[int]] | None = None,
    ) -> tuple[ClassificationOutput, ...]:
        """One output per item, in order. values: the raw arrays of `kind`; token_ids: of each item, to come along."""
        granularity = TaskOutputGranularity.TOKEN if kind.is_per_token else TaskOutputGranularity.SEQUENCE
        lens = [len(array) for array in values] if kind.is_per_token else None
        logits = np.concatenate(values) if kind.is_per_token else np.stack(values)
        scores = _as(semantics, logits, independent=self.is_independent)
        parts = list(scores) if lens is None else np.split(scores, np.cumsum(lens)[:-1])
        ids = token_ids if token_ids is not None and kind.is_per_token else [()] * len(parts)
        return tuple(
            ClassificationOutput(
                item_id=item_id,
                input_index=index,
                granularity=granularity,
                semantics=semantics,
                scores=DenseFloatTensor(shape=part.shape, values=part.reshape(-1)),
                labels=self.labels,
                token_ids=tuple(tokens),
            )
            for index, (item_id, part, tokens) in enumerate(zip(item_ids, parts, ids, strict=True))
        )


# ---- score ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """A model's own way to score a pair: with a classification head, or by the logits of one or two tokens.

    `num_scores` is that of each candidate. `label_ids` are the tokens, (true, false) or (true,), of which one score is made;
    empty for a head. `activation` is what a single score goes through by default.
    """

    num_scores: int
    label_ids: tuple[int, ...] = ()
    activation: str = "sigmoid"
    is_multi_label: bool = False
    is_regression: bool = False

    @classmethod
    def of_classes(cls, head: ClassHead, spec: ScoreSpec) -> ScoreHead:
        """A classification head's."""
        num_scores = len(head.labels)
        activation = spec.activation or ("sigmoid" if num_scores == 1 else "identity")
        return cls(num_scores, (), activation, head.is_multi_label, num_scores > 1 and head.is_regression)

    @classmethod
    def of_labels(cls, label_ids: Sequence[int], spec: ScoreSpec | None = None) -> ScoreHead:
        """That of a causal model which answers with one of these tokens."""
        activation = (spec and spec.activation) or "sigmoid"
        return cls(1, tuple(label_ids), activation)

    @property
    def semantics(self) -> tuple[TaskValueSemantics, ...]:
        """What its scores can be given as, the default first."""
        if self.is_regression:
            return (_LOGITS,)
        if self.activation == "sigmoid":
            return _PROBABILISTIC
        return (_LOGITS, _PROBABILITIES, _LOG_PROBABILITIES)

    @property
    def normalizations(self) -> tuple[ScoreNormalization, ...]:
        """Softmax needs several scores that exclude each other."""
        return (_NONE, _SOFTMAX) if self._is_exclusive else (_NONE,)

    @property
    def higher_is_better(self) -> bool | None:
        """True for a single score; several do not rank."""
        return True if self.num_scores == 1 else None

    def resolve(
        self, semantics: TaskValueSemantics | None, normalization: ScoreNormalization | None
    ) -> tuple[TaskValueSemantics, ScoreNormalization]:
        """What is given where one or both are left open.

        Raises: InvalidArgument for a pair that makes no sense, or that this head does not have.
        """
        if semantics is None:
            semantics = _PROBABILITIES if normalization is _SOFTMAX else self.semantics[0]
        if semantics not in self.semantics:
            raise InvalidArgument(f"these scores are given as {_listed(self.semantics)}, not as {semantics}")
        fitting = _SOFTMAX if self._is_exclusive and semantics is not _LOGITS else _NONE
        if normalization not in (None, fitting):
            raise InvalidArgument(f"{semantics} of this model go with normalization {fitting}, not {normalization}")
        return semantics, fitting

    def scores(self, values: Sequence[np.ndarray], semantics: TaskValueSemantics) -> np.ndarray:
        """f32 [N, num_scores] of the raw arrays of SCORE, or of LABELS for `label_ids`."""
        logits = np.stack(values)
        if self.label_ids:
            true, *false = logits[:, : len(self.label_ids)].astype(np.float64).T
            logits = (true - false[0] if false else true)[:, None]
        return _as(semantics, logits, independent=not self._is_exclusive)

    @property
    def _is_exclusive(self) -> bool:
        return self.num_scores > 1 and not self.is_multi_label and not self.is_regression


def resolve_label_scores(
    semantics: TaskValueSemantics | None, normalization: ScoreNormalization | None, num_labels: int
) -> tuple[TaskValueSemantics, ScoreNormalization]:
    """What `label_scores` gives where one or both are left open: probabilities among the labels, if there are several.

    Raises: InvalidArgument for logits with softmax, and for semantics that labels do not have.
    """
    semantics = _PROBABILITIES if semantics is None else semantics
    if semantics not in _PROBABILISTIC:
        raise InvalidArgument(f"scores of labels are given as {_listed(_PROBABILISTIC)}, not as {semantics}")
    if normalization is None:
        normalization = _SOFTMAX if num_labels > 1 and semantics is not _LOGITS else _NONE
    if semantics is _LOGITS and normalization is _SOFTMAX:
        raise InvalidArgument("normalization softmax makes probabilities or log_probabilities, not logits")
    return semantics, normalization


def label_scores(
    values: Sequence[np.ndarray], semantics: TaskValueSemantics, normalization: ScoreNormalization
) -> np.ndarray:
    """f32 [N, labels] of the raw arrays of LABELS: among the labels with SOFTMAX, else in the whole vocabulary."""
    raw = np.stack(values)
    logits, log_total = raw[:, :-1], raw[:, -1:]
    if semantics is _LOGITS or normalization is _SOFTMAX:
        return _as(semantics, logits, independent=False)
    logs = np.minimum(logits.astype(np.float64) - log_total, 0)  # rounding may exceed the total
    return (logs if semantics is _LOG_PROBABILITIES else np.exp(logs)).astype(np.float32)


def score_outputs(groups: Sequence[ScoreGroup], scores: np.ndarray) -> tuple[ScoreGroupOutput, ...]:
    """scores: f32 [N, k] of the candidates of all groups, one group after the other."""
    rows = iter(scores)
    return tuple(
        ScoreGroupOutput(
            group_id=group.group_id,
            group_index=group_index,
            candidates=tuple(
                ScoreCandidateOutput(
                    candidate_id=candidate.item_id,
                    candidate_index=index,
                    scores=DenseFloatTensor(shape=row.shape, values=row),
                )
                for index, (candidate, row) in enumerate(zip(group.candidates, rows))
            ),
        )
        for group_index, group in enumerate(groups)
    )


# ---- logits and probabilities --------------------------------------------------------------------


def _as(semantics: TaskValueSemantics, logits: np.ndarray, *, independent: bool) -> np.ndarray:
    """f32, as `logits` [..., C] are: themselves, probabilities or their logs, of each alone or among the C."""
    if semantics is _LOGITS:
        return logits.astype(np.float32)
    wide = logits.astype(np.float64)
    if independent:
        logs = -np.logaddexp(0, -wide)
    else:
        logs = wide - np.logaddexp.reduce(wide, axis=-1, keepdims=True)
    return (logs if semantics is _LOG_PROBABILITIES else np.exp(logs)).astype(np.float32)


def _listed(semantics: Sequence[TaskValueSemantics]) -> str:
    return ", ".join(map(str, semantics))
