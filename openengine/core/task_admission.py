"""`TaskPreparer`: from an embed, classify or score request to items that the loop can run, or a typed error.

    request ── check against capabilities ── tokenize ──▶ PreparedTask ── group(start, stop) ──▶ SequenceGroup → loop
                                                                       ◀─ respond(raw arrays) ── response

Everything that can be wrong is found here, in the caller's thread, before acceptance. Safe from any number of threads.
Does not own tokens (task_tokens.py), what raw arrays mean (task_output.py), nor how long lists are split (tasks.py).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from openengine.core.sequence import SequenceGroup
from openengine.core.task_capabilities import abilities, task_capabilities
from openengine.core.task_kinds import TaskKind
from openengine.core.task_output import (
    ScoreHead,
    embed_outputs,
    label_scores,
    resolve_label_scores,
    score_outputs,
)
from openengine.core.task_profile import TaskProfile
from openengine.core.task_tokens import TaskTokenizer
from openengine.core.task_work import TaskItem, TaskWork
from openengine.errors import InvalidArgument, ModelNotFound, RequestTooLarge, UnsupportedTask
from openengine.task_types import (
    ClassifyOptions,
    ClassifyRequest,
    ClassifyResponse,
    EmbedCapabilities,
    EmbeddingEncoding,
    EmbedOptions,
    EmbedRequest,
    EmbedResponse,
    MultimodalTaskInput,
    ScoreCapabilities,
    ScoreGroup,
    ScoreNormalization,
    ScoreOptions,
    ScoreRequest,
    ScoreResponse,
    TaskInput,
    TaskInputType,
    TaskOutputGranularity,
    TaskRequestContext,
    TaskUsage,
    TaskValueSemantics,
)
from openengine.types import NameEnum

__all__ = ["PreparedTask", "TaskLimits", "TaskPreparer"]

_INT32 = 1 << 31
_Enum = TypeVar("_Enum", bound=NameEnum)
Response = EmbedResponse | ClassifyResponse | ScoreResponse


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """`max_length`: the tokens of an item.  `num_kv_tokens`: what the whole KV pool holds, None for an encoder."""

    model_names: tuple[str, ...]
    vocab_size: int
    max_length: int
    num_kv_tokens: int | None = None


@dataclass(slots=True)
class PreparedTask:
    """A request that nothing is wrong with. `respond` takes the raw array of every item, in order, and the usage.

    `num_values` counts the floats of a dense response.
    """

    request_id: str
    work: TaskWork
    items: Sequence[TaskItem]
    priority: int
    num_values: int
    respond: Callable[[Sequence[np.ndarray], TaskUsage], Response]

    def group(self, start: int = 0, stop: int | None = None, *, request_id: str | None = None) -> SequenceGroup:
        """The items from `start` to before `stop` as a request of their own."""
        items = tuple(self.items[start:stop])
        return SequenceGroup.of_task(request_id or self.request_id, self.work, items, priority=self.priority)


class TaskPreparer:
    """Validates and tokenizes. `kept` names the kinds of work that need more than an item's last hidden row."""

    def __init__(
        self,
        profile: TaskProfile,
        score_head: ScoreHead | None,
        tokenizer: TaskTokenizer,
        limits: TaskLimits,
        *,
        kept: frozenset[TaskKind],
    ) -> None:
        self._profile = profile
        self._score_head = score_head
        self._tokenizer = tokenizer
        self._limits = limits
        self._kept = kept
        self.capabilities = task_capabilities(profile, score_head, tokenizer, vocab_size=limits.vocab_size)
        self.abilities = abilities(profile, self.capabilities)

    # ---- the three tasks -------------------------------------------------------------------------

    def embed(
        self,
        request: EmbedRequest,
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: str = "error",
        is_split: bool = False,
    ) -> PreparedTask:
        """Check `request` against the model and tokenize it; most keywords are those of `TaskTokenizer.encode`.

        `is_split`: it will not run as one request, so that no limit holds for the number of its inputs. Raises the error
        that a server would answer with.
        """
        request_id, priority = self._context(request, EmbedRequest)
        can, spec = self._capability("embed"), self._profile.embedding
        options = _typed("options", request.options, EmbedOptions)
        granularity = _choice("granularity", options.granularity, TaskOutputGranularity, can.granularities)
        encoding = _choice("encoding", options.encoding, EmbeddingEncoding, can.encodings)
        normalize = _flag("normalize", options.normalize)
        if normalize is not None and not can.supports_normalization:
            raise InvalidArgument("normalize: this model's vectors are given as they are; leave it out")
        by_token = granularity is TaskOutputGranularity.TOKEN
        dimensions = self._dimensions(options.dimensions, can, is_default=not by_token)
        texts, item_ids = self._inputs(request.inputs, can.input_types, None if is_split else can.max_batch_size)
        items = self._tokenizer.encode(texts, prompt=prompt, prompt_name=prompt_name, truncate=truncate)
        kind = TaskKind.EMBED_TOKENS if by_token else TaskKind.EMBED
        if encoding is EmbeddingEncoding.SPARSE:
            kind = TaskKind.EMBED_SPARSE
        # The tokens' vectors are the model's own: what normalizes a text's vector comes after them.
        is_normalized = normalize if normalize is not None else spec.normalize and not by_token

        def respond(values: Sequence[np.ndarray], usage: TaskUsage) -> EmbedResponse:
            outputs = embed_outputs(
                values,
                item_ids,
                kind=kind,
                normalize=is_normalized,
                dimensions=dimensions,
                vocab_size=self._limits.vocab_size,
                token_ids=[item.token_ids.tolist() for item in items] if by_token else None,
            )
            return EmbedResponse(request_id=request_id, outputs=outputs, usage=usage)

        width = 0 if kind is TaskKind.EMBED_SPARSE else dimensions or spec.dimension
        return self._prepared(request_id, TaskWork(kind), items, priority, width, respond)

    def classify(self, request: ClassifyRequest, *, truncate: str = "error", is_split: bool = False) -> PreparedTask:
        """As `embed`."""
        request_id, priority = self._context(request, ClassifyRequest)
        can, head = self._capability("classify"), self._profile.class_head
        options = _typed("options", request.options, ClassifyOptions)
        granularity = _choice("granularity", options.granularity, TaskOutputGranularity, can.granularities)
        semantics = _choice("output_semantics", options.output_semantics, TaskValueSemantics, can.semantics)
        texts, item_ids = self._inputs(request.inputs, can.input_types, None if is_split else can.max_batch_size)
        items = self._tokenizer.encode(texts, truncate=truncate)
        by_token = granularity is TaskOutputGranularity.TOKEN
        kind = TaskKind.CLASSIFY_TOKENS if by_token else TaskKind.CLASSIFY

        def respond(values: Sequence[np.ndarray], usage: TaskUsage) -> ClassifyResponse:
            token_ids = [item.token_ids.tolist() for item in items] if by_token else None
            outputs = head.outputs(values, item_ids, kind=kind, semantics=semantics, token_ids=token_ids)
            return ClassifyResponse(request_id=request_id, outputs=outputs, usage=usage)

        return self._prepared(request_id, TaskWork(kind), items, priority, len(head.labels), respond)

    def score(
        self, request: ScoreRequest, *, labels: Sequence[str] = (), truncate: str = "error", is_split: bool = False
    ) -> PreparedTask:
        """As `embed`. `labels` are texts of one token each, in place of the request's `label_token_ids`."""
        request_id, priority = self._context(request, ScoreRequest)
        can, head = self._capability("score"), self._score_head
        options = _typed("options", request.options, ScoreOptions)
        granularity = _choice("granularity", options.granularity, TaskOutputGranularity, can.granularities)
        semantics = _choice("output_semantics", options.output_semantics, TaskValueSemantics, can.semantics, None)
        wanted = _choice("normalization", options.normalization, ScoreNormalization, can.normalizations, None)
        label_ids = self._label_ids(options.label_token_ids, labels, can)
        instruction = _text("instruction", options.instruction)
        if instruction and not can.supports_instruction:
            raise InvalidArgument("instruction: this model's pairs have no place for one; leave it out")
        if label_ids:
            work = TaskWork(TaskKind.LABELS, label_ids)
            semantics, normalization = resolve_label_scores(semantics, wanted, len(label_ids))
        elif head is None:
            raise InvalidArgument(
                "this model scores label tokens only: give labels, texts of one token each such as labels=[' yes', ' no'], or "
                "label_token_ids, or create the engine with a score_template, if its tokenizer has the tokens 'yes' and 'no'"
            )
        else:
            work = TaskWork(TaskKind.LABELS, head.label_ids) if head.label_ids else TaskWork(TaskKind.SCORE)
            semantics, normalization = head.resolve(semantics, wanted)
        groups = self._groups(request.groups, can, is_split=is_split)
        items = self._pairs(groups, instruction, truncate)
        num_scores = len(label_ids) or head.num_scores

        def respond(values: Sequence[np.ndarray], usage: TaskUsage) -> ScoreResponse:
            if label_ids:
                scores = label_scores(values, semantics, normalization)
            else:
                scores = head.scores(values, semantics)
            return ScoreResponse(
                request_id=request_id,
                groups=score_outputs(groups, scores),
                granularity=granularity,
                semantics=semantics,
                normalization=normalization,
                higher_is_better=True if num_scores == 1 else None,
                label_token_ids=label_ids,
                usage=usage,
            )

        return self._prepared(request_id, work, items, priority, num_scores, respond)

    def probe(self) -> SequenceGroup:
        """The smallest thing that the model can be asked, for a probe of its health."""
        profile = self._profile
        if profile.embedding is not None:
            kind = TaskKind.EMBED if profile.embedding.sparse is None else TaskKind.EMBED_SPARSE
        else:
            kind = TaskKind.CLASSIFY_TOKENS if profile.head_kind == "token_classification" else TaskKind.CLASSIFY
        work = TaskWork(kind, keeps_rows=kind in self._kept)
        item = TaskItem(np.zeros(1, dtype=np.int32))
        return SequenceGroup.of_task(str(uuid.uuid4()), work, (item,), publish=False)

    # ---- what all share --------------------------------------------------------------------------

    def _context(self, request: Any, kind: type) -> tuple[str, int]:
        """Request id and priority. Raises ModelNotFound for a name that is not served."""
        if not isinstance(request, kind):
            raise InvalidArgument(f"a request must be of type {kind.__name__}, not {request!r:.80}")
        context = _typed("context", request.context, TaskRequestContext)
        request_id, model = context.request_id, context.model
        if request_id == "":
            raise InvalidArgument("request_id is empty; leave it out to get a fresh one")
        if model is not None and not (isinstance(model, str) and model in self._limits.model_names):
            served = ", ".join(self._limits.model_names)
            raise ModelNotFound(f"model {model!r:.80} is not served; served are {served}")
        if request_id is not None:
            _text("request_id", request_id)
        self._capability(_TASKS[kind])
        if context.lora_name is not None and _text("lora_name", context.lora_name):
            raise InvalidArgument(f"lora_name {context.lora_name!r:.80}: this task takes no adapter; leave it out")
        if not isinstance(context.metadata, Mapping):
            raise InvalidArgument(f"metadata must be a mapping of texts, not {context.metadata!r:.80}")
        for key, value in context.metadata.items():
            _text(f"metadata key {key!r:.40}", key)
            _text(f"metadata[{key!r:.40}]", value)
        priority = 0 if context.priority is None else _integer("priority", context.priority, -_INT32, _INT32 - 1)
        return request_id or str(uuid.uuid4()), priority

    def check(self, task: str) -> None:
        """Raises UnsupportedTask for a task that the model does not perform."""
        self._capability(task)

    def _capability(self, task: str) -> Any:
        capability = getattr(self.capabilities, task, None)
        if capability is None:
            raise UnsupportedTask(f"{task}: the model does not {task}; it can {self.abilities}")
        return capability

    def _dimensions(self, dimensions: int | None, can: EmbedCapabilities, *, is_default: bool) -> int | None:
        if dimensions is None:
            return self._profile.embedding.truncate_dim if is_default else None
        native = self._profile.embedding.dimension
        dimensions = _integer("dimensions", dimensions, 1, native, note=", the model's own number")
        if dimensions == native:
            return None
        if not can.supports_dimension_override:
            raise InvalidArgument(f"dimensions {dimensions}: this model has {native} and gives no fewer")
        return dimensions

    def _prepared(
        self,
        request_id: str,
        work: TaskWork,
        items: list[TaskItem],
        priority: int,
        width: int,
        respond: Callable[[Sequence[np.ndarray], TaskUsage], Response],
    ) -> PreparedTask:
        available = self._limits.num_kv_tokens
        longest = max(len(item.token_ids) for item in items)
        if available is not None and longest > available:
            raise RequestTooLarge(
                f"an item of {longest} tokens needs more KV memory than the whole pool holds, {available} tokens; shorten it or "
                "raise num_kv_blocks",
                details={"needed_tokens": longest, "available_tokens": available},
            )
        rows = sum(len(item.token_ids) for item in items) if work.kind.is_per_token else len(items)
        if work.kind in self._kept:
            work = replace(work, keeps_rows=True)
        return PreparedTask(request_id, work, items, priority, rows * width, respond)

    # ---- inputs ----------------------------------------------------------------------------------

    def _inputs(
        self, inputs: Any, allowed: Sequence[TaskInputType], most: int | None
    ) -> tuple[list[str | Sequence[int]], list[str]]:
        """Texts or token ids, and item ids."""
        inputs = _several("inputs", inputs, TaskInput)
        _check_count("inputs", len(inputs), most)
        seen: set[str] = set()
        texts = [_content(f"inputs[{index}]", item, allowed, seen) for index, item in enumerate(inputs)]
        return texts, [item.item_id for item in inputs]

    def _groups(self, groups: Any, can: ScoreCapabilities, *, is_split: bool) -> tuple[ScoreGroup, ...]:
        groups = _several("groups", groups, ScoreGroup)
        _check_count("groups", len(groups), None if is_split else can.max_groups)
        group_ids: set[str] = set()
        for index, group in enumerate(groups):
            where = f"groups[{index}]"
            if not isinstance(group.group_id, str) or not group.group_id or group.group_id in group_ids:
                raise InvalidArgument(f"{where}: group_id {group.group_id!r:.80} is empty or used twice")
            _text(f"{where}: group_id", group.group_id)
            group_ids.add(group.group_id)
            if group.query is None:
                raise InvalidArgument(f"{where} has no query")
            candidates = _several(f"{where}.candidates", group.candidates, TaskInput)
            _check_count(f"{where}.candidates", len(candidates), None if is_split else can.max_candidates_per_group)
            seen: set[str] = set()
            _content(f"{where}.query", _typed(f"{where}.query", group.query, TaskInput), can.input_types, seen)
            for number, candidate in enumerate(candidates):
                _content(f"{where}.candidates[{number}]", candidate, can.input_types, seen)
        return groups

    def _pairs(self, groups: Sequence[ScoreGroup], instruction: str, truncate: str) -> list[TaskItem]:
        items: list[TaskItem] = []
        for index, group in enumerate(groups):
            pairs = self._tokenizer.encode_pairs(
                _given(group.query),
                [_given(candidate) for candidate in group.candidates],
                instruction=instruction,
                truncate=truncate,
                name=f"groups[{index}].candidates",
                query_name=f"groups[{index}].query",
            )
            items += _with_shared(pairs, index) if self._limits.num_kv_tokens is not None else pairs
        return items

    def _label_ids(self, label_ids: Any, labels: Sequence[str], can: ScoreCapabilities) -> tuple[int, ...]:
        ids = _several("label_token_ids", label_ids, (int, np.integer))
        if labels:
            encoded = [self._tokenizer.tokenizer.encode(label, add_special_tokens=False) for label in labels]
            for label, tokens in zip(labels, encoded):
                if len(tokens) != 1:
                    raise InvalidArgument(
                        f"label {label!r:.80} is {len(tokens)} tokens, and a label must be one; try it with or without a "
                        "space before it, or give label_token_ids"
                    )
            ids = tuple(tokens[0] for tokens in encoded)
        if ids and not can.supports_label_token_scoring:
            raise InvalidArgument(
                "labels and label_token_ids are for causal language models; leave them out for this model's scores"
            )
        if ids and len(ids) > can.max_label_token_ids:
            raise InvalidArgument(f"{len(ids)} label_token_ids, the limit is {can.max_label_token_ids}; give fewer")
        checked = tuple(_integer("label token id", i, 0, self._limits.vocab_size - 1) for i in ids)
        if len(set(checked)) < len(checked):
            twice = next(i for i in checked if checked.count(i) > 1)
            raise InvalidArgument(f"label token id {twice} is given twice; give each once")
        return checked


_TASKS = {EmbedRequest: "embed", ClassifyRequest: "classify", ScoreRequest: "score"}


# ---- values --------------------------------------------------------------------------------------


def _content(where: str, item: TaskInput, allowed: Sequence[TaskInputType], seen: set[str]) -> str | Sequence[int]:
    """The text or token ids of an input whose id is none of those `seen`."""
    if not isinstance(item.item_id, str) or not item.item_id:
        raise InvalidArgument(f"{where}: item_id {item.item_id!r:.80} must be a text that is not empty")
    _text(f"{where}: item_id", item.item_id)
    if item.item_id in seen:
        raise InvalidArgument(f"{where}: item_id {item.item_id!r:.80} is used twice; give each item its own")
    seen.add(item.item_id)
    given = [kind for kind in TaskInputType if getattr(item, kind.value) is not None]
    if len(given) != 1:
        raise InvalidArgument(f"{where} takes exactly one of text, token_ids and multimodal, not {len(given)} of them")
    (kind,) = given
    if kind is TaskInputType.MULTIMODAL:
        media = _typed(f"{where}.multimodal", item.multimodal, MultimodalTaskInput).media
        if not media:
            raise InvalidArgument(f"{where}.multimodal has no media; give at least one, or a text")
    if kind not in allowed:
        raise InvalidArgument(f"{where} is {kind}; this task takes {', '.join(allowed)}")
    if kind is TaskInputType.TEXT:
        return _typed(f"{where}.text", item.text, str)
    if isinstance(item.token_ids, str):
        raise InvalidArgument(f"{where}.token_ids must be a sequence of token ids, not the text {item.token_ids!r:.80}")
    return item.token_ids


def _with_shared(items: list[TaskItem], query: int) -> list[TaskItem]:
    """The items of one query, which know how many tokens they all begin with; each has one of its own at least."""
    first = items[0].token_ids
    count = min(len(item.token_ids) for item in items) - 1
    for item in items:
        differing = np.flatnonzero(item.token_ids[:count] != first[:count])
        count = int(differing[0]) if len(differing) else count
    return [replace(item, num_shared=count, query=query) for item in items] if len(items) > 1 and count else items


def _given(item: TaskInput) -> str | Sequence[int]:
    return item.text if item.text is not None else item.token_ids


def _several(name: str, values: Any, kind: type | tuple[type, ...]) -> tuple[Any, ...]:
    if not isinstance(values, (tuple, list)) or any(not isinstance(v, kind) or isinstance(v, bool) for v in values):
        expected = kind.__name__ if isinstance(kind, type) else kind[0].__name__
        raise InvalidArgument(f"{name} must be a tuple of {expected}, not {values!r:.80}")
    return tuple(values)


def _check_count(name: str, count: int, most: int | None) -> None:
    if not count:
        raise InvalidArgument(f"{name} is empty; give at least one")
    if most is not None and count > most:
        raise InvalidArgument(f"{count} {name}, the limit of one request is {most}; send several requests")


def _typed(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise InvalidArgument(f"{name} must be a {kind.__name__}, not {value!r:.80}")
    return value


_FIRST: Any = object()


def _choice(name: str, value: Any, kind: type[_Enum], allowed: Sequence[_Enum], default: Any = _FIRST) -> _Enum | Any:
    """`value` as one of `allowed`; where it is None, `default`, and without one the first of them."""
    if value is None:
        return allowed[0] if default is _FIRST else default
    if not isinstance(value, str) or value not in tuple(kind):
        raise InvalidArgument(f"{name} must be one of {', '.join(kind)}, not {value!r:.80}")
    if value not in allowed:
        raise InvalidArgument(f"{name} {value!s:.80}: this model has {', '.join(allowed)}")
    return kind(value)


def _flag(name: str, value: Any) -> bool | None:
    if value is not None and not isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(f"{name} must be True or False, not {value!r:.80}")
    return None if value is None else bool(value)


def _text(name: str, value: Any) -> str:
    try:
        _typed(name, value, str).encode()
    except UnicodeEncodeError as exc:
        raise InvalidArgument(f"{name} holds a lone surrogate, which is no character") from exc
    return value


def _integer(name: str, value: Any, low: int, high: int, *, note: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise InvalidArgument(f"{name} must be an integer between {low} and {high}{note}, not {value!r:.80}")
    return int(value)
