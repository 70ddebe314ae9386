"""Templates that write a query and a document into one text, for a causal model that is asked about them, or for a head.

Owns: the templates that are known by name, the user's own, those in a model's chat template, and telling which one a model
has. Does not own: token ids (task_tokens.py), how chat templates run (chat.py).
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from openengine.core.task_specs import ScoreSpec
from openengine.core.tokenizer import Tokenizer
from openengine.errors import InvalidArgument

__all__ = ["JOINED", "ChatScoreTemplate", "FormatTemplate", "ScoreTemplate", "find_score_template", "yes_no_ids"]

# The prompt of Qwen3-Reranker, from its model card.
_QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_MARK = "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
_NAMED = {"qwen3-reranker": (_QWEN3_RERANKER, _QWEN3_INSTRUCTION)}

# Texts that no template contains, and that none changes unless it changes texts.
_PROBES = (" \ufdd0q\ufdd1 ", " \ufdd0d\ufdd1 ", " \ufdd0i\ufdd1 ")


class ScoreTemplate(Protocol):
    """Writes a pair as one text."""

    @property
    def is_complete(self) -> bool:
        """Whether the text has all special tokens, also those that the tokenizer puts at the start of any text."""

    @property
    def takes_instruction(self) -> bool: ...

    def render(self, query: str, document: str, instruction: str = "") -> str:
        """The whole text. "" asks for the template's own instruction."""

    def pieces(self, instruction: str = "") -> tuple[str, str, str] | None:
        """What stands before the query, between it and the document, and after; None where texts are not left as they are."""


@dataclass(frozen=True, slots=True)
class FormatTemplate:
    """A text with `{query}`, `{document}` and perhaps `{instruction}`; `{{` and `}}` are braces.

    Raises: InvalidArgument when a field is missing, unknown or has a format.
    """

    text: str
    instruction: str = ""
    _parts: tuple[tuple[str, str | None], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            parsed = list(string.Formatter().parse(self.text))
        except ValueError as exc:
            raise InvalidArgument(f"score_template is no format string: {exc}; write {{{{ for a brace") from exc
        names = [name for _, name, _, _ in parsed if name is not None]
        if any(spec or conversion for _, _, spec, conversion in parsed):
            raise InvalidArgument("score_template has a field with a format; write plain {query} and {document}")
        if unknown := set(names) - {"query", "document", "instruction"}:
            raise InvalidArgument(
                f"score_template has the field {{{min(unknown)}}}; known are {{query}}, {{document}} and {{instruction}}"
            )
        if names.count("query") != 1 or names.count("document") != 1:
            raise InvalidArgument("score_template needs each of {query} and {document} once")
        object.__setattr__(self, "_parts", tuple((literal, name) for literal, name, _, _ in parsed))

    @property
    def is_complete(self) -> bool:
        return False

    @property
    def takes_instruction(self) -> bool:
        return any(name == "instruction" for _, name in self._parts)

    def render(self, query: str, document: str, instruction: str = "") -> str:
        values = {"query": query, "document": document, "instruction": instruction or self.instruction}
        return "".join(literal + (values[name] if name is not None else "") for literal, name in self._parts)

    def pieces(self, instruction: str = "") -> tuple[str, str, str] | None:
        return _pieces(self, instruction)


JOINED = FormatTemplate("{query}{document}")
"""What a causal model without a template is given: the document right after the query."""


@dataclass(frozen=True, slots=True, eq=False)
class ChatScoreTemplate:
    """A model's chat template that knows the roles "query" and "document"; a "system" message has the instruction."""

    tokenizer: Tokenizer
    instruction: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    is_structured: bool = False

    @property
    def is_complete(self) -> bool:
        return True

    @property
    def takes_instruction(self) -> bool:
        _, _, probe = _PROBES
        return probe.strip() in self.render("q", "d", probe)

    def render(self, query: str, document: str, instruction: str = "") -> str:
        texts = {"system": instruction or self.instruction, "query": query, "document": document}
        messages = [self._message(role, text) for role, text in texts.items() if role != "system" or text]
        options = {"add_generation_prompt": False, **self.options}
        return self.tokenizer.apply_chat_template(messages, **options)

    def pieces(self, instruction: str = "") -> tuple[str, str, str] | None:
        return _pieces(self, instruction)

    def carries_both(self) -> bool:
        """Whether the query and the document reach the text."""
        query, document, _ = _PROBES
        try:
            text = self.render(query, document)
        except InvalidArgument:
            return False
        return query.strip() in text and document.strip() in text

    def _message(self, role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if self.is_structured else text}


def find_score_template(
    tokenizer: Tokenizer, *, spec: ScoreSpec | None = None, score_template: str | None = None
) -> ScoreTemplate | None:
    """The template of a model: the caller's, that of its sentence-transformers files, or that of its chat template.

    score_template: the name of a known one ("qwen3-reranker") or a format string, see `FormatTemplate`.

    None for a model that has none. Raises: InvalidArgument for a malformed one, or a chat template that loses the pair.
    """
    if score_template is not None:
        text, instruction = _NAMED.get(score_template, (score_template, ""))
        if "{" not in text:
            raise InvalidArgument(
                f"score_template {score_template!r:.80} is neither a known one ({', '.join(_NAMED)}) nor a text with "
                "{query} and {document}"
            )
        return FormatTemplate(text, instruction)
    if spec is not None and spec.uses_chat_template:
        instruction = "" if spec.default_prompt is None else spec.prompts[spec.default_prompt]
        template = ChatScoreTemplate(tokenizer, instruction, spec.template_options, spec.is_structured)
        if not template.carries_both():
            raise InvalidArgument(
                "the model scores pairs through its chat template, which loses the messages of the roles 'query' and "
                "'document'; give score_template=..."
            )
        return template
    return _recognized(tokenizer)


def yes_no_ids(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """The tokens that answer a template: "yes" and "no", where each is one."""
    answers = [tokenizer.encode(text, add_special_tokens=False) for text in ("yes", "no")]
    return (answers[0][0], answers[1][0]) if all(len(ids) == 1 for ids in answers) else None


def _recognized(tokenizer: Tokenizer) -> ScoreTemplate | None:
    text = tokenizer.chat_template or ""
    # Many templates write messages of any role; one that is meant for pairs names both.
    if all(f"'{role}'" in text or f'"{role}"' in text for role in ("query", "document")):
        template = ChatScoreTemplate(tokenizer)
        if template.carries_both():
            return template
    return FormatTemplate(*_NAMED["qwen3-reranker"]) if _QWEN3_MARK in text else None


def _pieces(template: ScoreTemplate, instruction: str) -> tuple[str, str, str] | None:
    query, document, _ = _PROBES
    text = template.render(query, document, instruction)
    if text.count(query) != 1 or text.count(document) != 1:
        return None
    before, _, rest = text.partition(query)
    between, found, after = rest.partition(document)
    return (before, between, after) if found else None
