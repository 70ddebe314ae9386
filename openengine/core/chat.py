"""Renders a checkpoint's chat template: messages in, prompt text out.

Owns: the sandbox, the functions templates may call, checking of messages. Does not own: which template
a model has, nor its tokens (tokenizer.py).

A template comes from the internet. It runs in jinja's immutable sandbox: no attribute that leads to
Python's internals, no changing of the messages, ranges up to 100,000.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from openengine.errors import InvalidArgument, UnsupportedFeature

__all__ = ["render_chat_template"]


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    bos_token: str | None = None,
    eos_token: str | None = None,
    special_tokens: Mapping[str, str] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    **template_kwargs: Any,
) -> str:
    """The text `template` writes for `messages`.

    A message is a mapping with a `role` and a `content`: a text, a list of parts, or None (a call of tools).
    `special_tokens` maps names such as "bos_token" to texts; `bos_token` and `eos_token` override it.
    `template_kwargs` are visible to the template under their names.

    Raises: InvalidArgument for malformed messages, a broken template, or one that refuses these messages;
    UnsupportedFeature without the jinja2 package.
    """
    tokens = dict(special_tokens or {})
    tokens.update({k: v for k, v in (("bos_token", bos_token), ("eos_token", eos_token)) if v is not None})
    variables = tokens | {
        **template_kwargs,
        "messages": _checked_messages(messages),
        "tools": _checked_mappings(tools, "tools"),
        "documents": _checked_mappings(documents, "documents"),
        "add_generation_prompt": add_generation_prompt,
    }
    compiled = _compile(template)
    if tools and "tools" not in _names(template):
        raise InvalidArgument(
            "the chat template of this model does not use tools, which the model would never see; describe them in a message, "
            "or give a template that does as template_kwargs={'chat_template': …}"
        )
    try:
        return compiled.render(**variables)
    except Exception as exc:  # a template may fail in any way; all of them are its own fault or the messages'
        raise InvalidArgument(f"the chat template cannot render these messages: {exc}") from exc


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> Any:
    from jinja2 import TemplateSyntaxError

    try:
        return _environment().from_string(template)
    except TemplateSyntaxError as exc:
        raise InvalidArgument(f"the chat template is not valid jinja: line {exc.lineno}: {exc.message}") from exc


@functools.lru_cache(maxsize=32)
def _names(template: str) -> frozenset[str]:
    """The variables that a template reads."""
    from jinja2 import meta

    return frozenset(meta.find_undeclared_variables(_environment().parse(template)))


@functools.lru_cache(maxsize=1)
def _environment() -> Any:
    try:
        from jinja2 import nodes
        from jinja2.exceptions import TemplateError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as exc:
        raise UnsupportedFeature("chat templates need the jinja2 package: pip install jinja2") from exc

    class GenerationTag(Extension):
        """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it is its content."""

        tags = {"generation"}  # noqa: RUF012 (jinja's interface)

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML and sorts keys: models were not trained on that.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    checked = _checked_mappings(messages, "messages")
    if not checked:
        raise InvalidArgument('messages is empty; pass at least one, such as {"role": "user", "content": "Hi"}')
    for index, message in enumerate(checked):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise InvalidArgument(f"messages[{index}] has role {role!r}, expected a text such as 'user'")
        if "content" not in message and not message.get("tool_calls"):
            raise InvalidArgument(f"messages[{index}] has neither content nor tool_calls")
        if not (content is None or isinstance(content, str)):
            if not isinstance(content, list):
                raise InvalidArgument(
                    f"messages[{index}] has content of type {type(content).__name__}, "
                    "expected a text, a list of parts, or None"
                )
            for part_index, part in enumerate(content):
                if not isinstance(part, dict):
                    raise InvalidArgument(f"messages[{index}].content[{part_index}] is {part!r}, expected a mapping")
    return checked


def _checked_mappings(value: Any, name: str) -> list[dict[str, Any]] | None:
    if value is None and name != "messages":
        return None
    value = _plain(value)
    if not isinstance(value, list):
        example = '[{"role": "user", "content": "Hi"}]' if name == "messages" else "a list of mappings"
        raise InvalidArgument(f"{name} is a {type(value).__name__}, expected {example}")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise InvalidArgument(f"{name}[{index}] is a {type(item).__name__}, expected a mapping")
    return value


def _plain(value: Any) -> Any:
    """Mappings, sequences and numpy arrays as dict and list, all the way down, so that templates can test for them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    return value.item() if isinstance(value, np.generic) else value
