"""From what a caller of embed, classify or score writes to the contract's requests: texts, ids, lists, keywords.

    embed(["a", "b"], normalize=True)  ->  EmbedRequest(inputs=(TaskInput("0", text="a"), …), options=EmbedOptions(…))

What the contract has no field for goes into `LocalOptions`. Nothing is judged here that needs a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from openengine.errors import InvalidArgument, OpenEngineError
from openengine.options import batch_items, is_single_prompt, suggest
from openengine.task_types import (
    ClassifyOptions,
    ClassifyRequest,
    EmbedOptions,
    EmbedRequest,
    ScoreGroup,
    ScoreOptions,
    ScoreRequest,
    TaskInput,
    TaskRequestContext,
)

__all__ = ["LocalOptions", "Text", "build_classify", "build_embed", "build_score"]

Text = str | Sequence[int]  # a text, or its token ids, special tokens included


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Options of a call in process that the contract's requests have no field for.

    truncate: what becomes of a text longer than the model takes: "error", or which side of it is cut, special tokens kept.
    prompt, prompt_name: a text put before every input, or the name of one that the model comes with.
    labels: texts of one token each, in place of `label_token_ids`.
    is_single: the call was for one input, not a list of them.
    """

    truncate: str = "error"
    prompt: str | None = None
    prompt_name: str | None = None
    labels: tuple[str, ...] = ()
    is_single: bool = False


_CONTEXT = frozenset(field.name for field in dataclasses.fields(TaskRequestContext))
_EMBED_LOCAL = frozenset({"truncate", "prompt", "prompt_name"})
_SCORE_LOCAL = frozenset({"truncate", "labels"})
# What other libraries call the same thing.
_ELSEWHERE = {
    "normalize_embeddings": "normalize",
    "truncate_dim": "dimensions",
    "semantics": "output_semantics",
    "label_ids": "label_token_ids",
}


def build_embed(inputs: Any, options: Mapping[str, Any]) -> tuple[EmbedRequest, LocalOptions]:
    """Raises InvalidArgument for an unknown keyword, options beside a request, and what is no input, naming its index."""
    if isinstance(inputs, EmbedRequest):
        _refuse_beside(inputs, options)
        return inputs, LocalOptions()
    options = _known(options, EmbedOptions, _EMBED_LOCAL)
    items, is_single = _inputs(inputs)
    request = EmbedRequest(
        inputs=items, context=_pick(TaskRequestContext, options), options=_pick(EmbedOptions, options)
    )
    return request, _local(options, is_single)


def build_classify(inputs: Any, options: Mapping[str, Any]) -> tuple[ClassifyRequest, LocalOptions]:
    """As `build_embed`."""
    if isinstance(inputs, ClassifyRequest):
        _refuse_beside(inputs, options)
        return inputs, LocalOptions()
    options = _known(options, ClassifyOptions, frozenset({"truncate"}))
    items, is_single = _inputs(inputs)
    context, own = _pick(TaskRequestContext, options), _pick(ClassifyOptions, options)
    return ClassifyRequest(inputs=items, context=context, options=own), _local(options, is_single)


def build_score(query: Any, candidates: Any, options: Mapping[str, Any]) -> tuple[ScoreRequest, LocalOptions]:
    """One query with its candidates is one group; a list of queries has one candidate, or a list of them, for each."""
    if isinstance(query, ScoreRequest):
        if candidates is not None:
            raise InvalidArgument("a ScoreRequest has its own candidates; leave them out")
        _refuse_beside(query, options)
        return query, LocalOptions()
    options = _known(options, ScoreOptions, _SCORE_LOCAL)
    if candidates is None:
        raise InvalidArgument("give the candidates: score(query, [document, …])")
    if is_single_prompt(query):
        groups = (_group(0, query, candidates),)
    else:
        queries = batch_items(query)
        several = None if is_single_prompt(candidates) else batch_items(candidates)
        if several is None or len(several) != len(queries):
            found = "one" if several is None else len(several)
            raise InvalidArgument(
                f"{len(queries)} queries have {found} candidates: a list of queries takes a list of the same length, each item "
                "a candidate or a list of them"
            )
        groups = tuple(_group(index, *pair) for index, pair in enumerate(zip(queries, several)))
    values = {**options, "label_token_ids": _ids(options.get("label_token_ids"))}
    request = ScoreRequest(
        groups=groups, context=_pick(TaskRequestContext, values), options=_pick(ScoreOptions, values)
    )
    return request, _local(options, False)


def _group(index: int, query: Text, candidates: Any) -> ScoreGroup:
    try:
        items, _is_single = _inputs(candidates)
    except OpenEngineError as exc:
        raise InvalidArgument(f"candidates of query {index}: {exc.message}") from exc
    return ScoreGroup(group_id=str(index), query=_input("query", query), candidates=items)


def _inputs(inputs: Any) -> tuple[tuple[TaskInput, ...], bool]:
    """The inputs, and whether it was one alone."""
    if isinstance(inputs, TaskInput):
        return (inputs,), True
    is_array = hasattr(inputs, "__array__")
    if isinstance(inputs, (bytes, bytearray, memoryview, Mapping)) or not (is_array or isinstance(inputs, Iterable)):
        raise InvalidArgument(
            f"an input is a str, a list of token ids or a TaskInput, not {type(inputs).__name__}; a list of those is a batch"
        )
    if is_single_prompt(inputs):
        return (_input("0", inputs),), True
    items = batch_items(inputs)
    made = []
    for index, item in enumerate(items):
        try:
            made.append(_input(str(index), item))
        except InvalidArgument as exc:
            raise InvalidArgument(f"item {index} of {len(items)}: {exc.message}") from exc
    return tuple(made), False


def _input(item_id: str, item: Any) -> TaskInput:
    if isinstance(item, TaskInput):
        return item
    if isinstance(item, (str, np.str_)):
        return TaskInput(item_id=item_id, text=str(item))
    if hasattr(item, "__len__") and not isinstance(item, (bytes, bytearray, Mapping)):
        return TaskInput(item_id=item_id, token_ids=item)
    raise InvalidArgument(f"an input is a str or a list of token ids, not {type(item).__name__}")


def _known(options: Mapping[str, Any], own: type, local: frozenset[str]) -> dict[str, Any]:
    """The options that are not None, under the contract's names."""
    known = _CONTEXT | local | {field.name for field in dataclasses.fields(own)}
    values = {}
    for given, value in options.items():
        name = _ELSEWHERE[given] if given == "semantics" and _ELSEWHERE[given] in known else given
        if name not in known:
            close = _ELSEWHERE.get(name)
            hint = f"; did you mean {close!r}?" if close in known else suggest(name, known)
            raise InvalidArgument(f"unknown option {given!r}{hint}")
        if value is not None:
            values[name] = value
    return values


def _pick(kind: type, options: Mapping[str, Any]) -> Any:
    return kind(**{field.name: options[field.name] for field in dataclasses.fields(kind) if field.name in options})


def _local(options: Mapping[str, Any], is_single: bool) -> LocalOptions:
    labels = options.get("labels", ())
    labels = (labels,) if isinstance(labels, str) or not isinstance(labels, Iterable) else tuple(labels)
    if not all(isinstance(label, str) for label in labels):
        raise InvalidArgument(f"labels must be a list of texts, not {labels!r:.80}")
    if labels and options.get("label_token_ids") is not None:
        raise InvalidArgument("labels and label_token_ids both name the labels; keep one of them")
    return LocalOptions(
        truncate=options.get("truncate", "error"),
        prompt=options.get("prompt"),
        prompt_name=options.get("prompt_name"),
        labels=labels,
        is_single=is_single,
    )


def _ids(value: Any) -> Any:
    if value is None:
        return ()
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return (int(value),)
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)) else value


def _refuse_beside(request: object, options: Mapping[str, Any]) -> None:
    if options:
        kind = type(request).__name__
        raise InvalidArgument(
            f"a request of type {kind} carries its own options; move {', '.join(sorted(options))} into it"
        )
