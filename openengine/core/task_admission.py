"""`TaskPreparer`: from an embed, classify or score request to items that the loop can run, or a typed error.

    request ── check against capabilities ── tokenize ──▶ PreparedTask ── group(start, stop) ──▶ SequenceGroup → loop
                                                                       ◀─ respond(raw arrays) ── response

Everything that can be wrong is found here, in the caller's thread, before acceptance. Safe from any number of threads.
Does not own the checks of single values (task_checks.py), tokens (task_tokens.py), what raw arrays mean (task_output.py),
nor how long lists are split (tasks.py).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from openengine.core.sequence import SequenceGroup
from openengine.core.task_capabilities import abilities, task_capabilities
from openengine.core.task_checks import (
    check_count,
    checked_choice,
    checked_content,
    checked_flag,
    checked_integer,
    checked_items,
    checked_text,
)
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
from openengine.errors import InvalidArgument, RequestTooLarge, UnsupportedTask
from openengine.names import check_request_id, check_served
from openengine.task_results import ClassifyResponse, EmbedResponse, ScoreResponse, TaskUsage
from openengine.task_types import (
    ClassifyOptions,
    ClassifyRequest,
    EmbedCapabilities,
    EmbeddingEncoding,
    EmbedOptions,
    EmbedRequest,
    ScoreCapabilities,
    ScoreGroup,
    ScoreNormalization,
    ScoreOptions,
    ScoreRequest,
    TaskInput,
    TaskInputType,
    TaskOutputGranularity,
    TaskRequestContext,
    TaskValueSemantics,
)
from openengine.validation import checked_type

__all__ = ["PreparedTask", "TaskLimits", "TaskPreparer"]

_INT32 = 1 << 31
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
        options = checked_type("options", request.options, EmbedOptions)
        granularity = checked_choice("granularity", options.granularity, TaskOutputGranularity, can.granularities)
        encoding = checked_choice("encoding", options.encoding, EmbeddingEncoding, can.encodings)
        normalize = checked_flag("normalize", options.normalize)
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
        options = checked_type("options", request.options, ClassifyOptions)
        granularity = checked_choice("granularity", options.granularity, TaskOutputGranularity, can.granularities)
        semantics = checked_choice("output_semantics", options.output_semantics, TaskValueSemantics, can.semantics)
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
        options = checked_type("options", request.options, ScoreOptions)
        granularity = checked_choice("granularity", options.granularity, TaskOutputGranularity, can.granularities)
        semantics = checked_choice(
            "output_semantics", options.output_semantics, TaskValueSemantics, can.semantics, None
        )
        wanted = checked_choice("normalization", options.normalization, ScoreNormalization, can.normalizations, None)
        label_ids = self._label_ids(options.label_token_ids, labels, can)
        instruction = checked_text("instruction", options.instruction)
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
        context = checked_type("context", request.context, TaskRequestContext)
        request_id = context.request_id
        check_request_id(request_id)
        check_served(context.model, self._limits.model_names)
        if request_id is not None:
            checked_text("request_id", request_id)
        self._capability(_TASKS[kind])
        if context.lora_name is not None and checked_text("lora_name", context.lora_name):
            raise InvalidArgument(f"lora_name {context.lora_name!r:.80}: this task takes no adapter; leave it out")
        if not isinstance(context.metadata, Mapping):
            raise InvalidArgument(f"metadata must be a mapping of texts, not {context.metadata!r:.80}")
        for key, value in context.metadata.items():
            checked_text(f"metadata key {key!r:.40}", key)
            checked_text(f"metadata[{key!r:.40}]", value)
        priority = 0 if context.priority is None else checked_integer("priority", context.priority, -_INT32, _INT32 - 1)
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
        dimensions = checked_integer("dimensions", dimensions, 1, native, note=", the model's own number")
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
        inputs = checked_items("inputs", inputs, TaskInput)
        check_count("inputs", len(inputs), most)
        seen: set[str] = set()
        texts = [checked_content(f"inputs[{index}]", item, allowed, seen) for index, item in enumerate(inputs)]
        return texts, [item.item_id for item in inputs]

    def _groups(self, groups: Any, can: ScoreCapabilities, *, is_split: bool) -> tuple[ScoreGroup, ...]:
        groups = checked_items("groups", groups, ScoreGroup)
        check_count("groups", len(groups), None if is_split else can.max_groups)
        group_ids: set[str] = set()
        for index, group in enumerate(groups):
            where = f"groups[{index}]"
            if not isinstance(group.group_id, str) or not group.group_id or group.group_id in group_ids:
                raise InvalidArgument(f"{where}: group_id {group.group_id!r:.80} is empty or used twice")
            checked_text(f"{where}: group_id", group.group_id)
            group_ids.add(group.group_id)
            if group.query is None:
                raise InvalidArgument(f"{where} has no query")
            candidates = checked_items(f"{where}.candidates", group.candidates, TaskInput)
            check_count(f"{where}.candidates", len(candidates), None if is_split else can.max_candidates_per_group)
            seen: set[str] = set()
            checked_content(
                f"{where}.query", checked_type(f"{where}.query", group.query, TaskInput), can.input_types, seen
            )
            for number, candidate in enumerate(candidates):
                checked_content(f"{where}.candidates[{number}]", candidate, can.input_types, seen)
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
        ids = checked_items("label_token_ids", label_ids, (int, np.integer))
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
        checked = tuple(checked_integer("label token id", i, 0, self._limits.vocab_size - 1) for i in ids)
        if len(set(checked)) < len(checked):
            twice = next(i for i in checked if checked.count(i) > 1)
            raise InvalidArgument(f"label token id {twice} is given twice; give each once")
        return checked


_TASKS = {EmbedRequest: "embed", ClassifyRequest: "classify", ScoreRequest: "score"}


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
