"""The small files beside a vocabulary: tokenizer_config.json and its companions, chat templates.

Owns: reading and checking them. Does not own: the vocabulary files (hf_tokenizer.py, sentencepiece_tokenizer.py).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openengine.errors import InvalidArgument

__all__ = ["DEFAULT_TEMPLATE", "AddedTokenFlags", "TokenizerFiles", "is_present", "read_json_file", "read_json_object"]

DEFAULT_TEMPLATE = "default"
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")
_ID_DIGITS = 10  # no vocabulary is larger


@dataclass(frozen=True, slots=True)
class AddedTokenFlags:
    """A token kept whole wherever it occurs in a text, and how its surroundings are matched."""

    content: str
    special: bool = False
    normalized: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False

    def as_dict(self) -> dict[str, bool]:
        return {name: getattr(self, name) for name in _FLAGS}


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What the files of a tokenizer directory say, apart from the vocabulary.

    `named` maps "bos_token" and its like to the token's text. `added` holds tokens by id.
    `chat_templates` maps a name to a template; the only or main one is called "default".
    """

    directory: Path
    config: dict[str, Any]
    named: dict[str, str]
    extra_special: tuple[str, ...]
    added: dict[int, AddedTokenFlags]
    chat_templates: dict[str, str]

    @classmethod
    def read(cls, directory: Path) -> TokenizerFiles:
        """Raises: InvalidArgument naming the file that cannot be read as what it should be."""
        config = read_json_object(directory / "tokenizer_config.json", required=False)
        special_map = read_json_object(directory / "special_tokens_map.json", required=False)
        named = {}
        for name in _NAMED:
            value = config.get(name, special_map.get(name))
            if value is not None:
                named[name] = _token_text(value, directory / "tokenizer_config.json", name)
        return cls(
            directory=directory,
            config=config,
            named=named,
            extra_special=_extra_special(directory, config, special_map),
            added=_added_tokens(directory, config),
            chat_templates=_chat_templates(directory, config),
        )

    def flag(self, name: str) -> bool | None:
        """A boolean of tokenizer_config.json; None where the file leaves it open."""
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidArgument(
                f"{self.directory / 'tokenizer_config.json'}: {name} is {value!r}, expected true or false"
            )
        return value


def is_present(path: Path) -> bool:
    """Whether something has this name, be it a link to nothing or unreadable, so that reading it says what is wrong."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
    return True


def read_json_file(path: Path) -> Any:
    """Raises: InvalidArgument when the file is missing, unreadable or not JSON, or holds a lone surrogate."""
    if not os.path.isfile(path):
        raise InvalidArgument(f"{str(path)!r:.300} does not exist, or is no regular file")
    try:
        value = json.loads(path.read_bytes())
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        raise InvalidArgument(f"{path} holds a lone surrogate, which is no character; correct it") from exc
    except (OSError, ValueError, RecursionError) as exc:
        raise InvalidArgument(f"{path} is not a readable JSON file: {exc}; download it again") from exc
    return value


def read_json_object(path: Path, *, required: bool = True) -> dict[str, Any]:
    """The file's object; an empty one where an optional file is absent. Raises as `read_json_file`."""
    if not required and not is_present(path):
        return {}
    value = read_json_file(path)
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def _token_text(value: Any, path: Path, name: str) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise InvalidArgument(f"{path}: {name} is {value!r}, expected a text or an object with 'content'")
    return text


def _extra_special(directory: Path, config: dict[str, Any], special_map: dict[str, Any]) -> tuple[str, ...]:
    texts: dict[str, None] = {}
    for source, file in ((config, "tokenizer_config.json"), (special_map, "special_tokens_map.json")):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            value = source.get(key)
            if value is not None and not isinstance(value, (list, dict)):
                raise InvalidArgument(f"{directory / file}: {key} is {value!r:.80}, expected a list or an object")
            for item in value.values() if isinstance(value, dict) else value or ():
                texts[_token_text(item, directory / file, key)] = None
    return tuple(texts)


def _added_tokens(directory: Path, config: dict[str, Any]) -> dict[int, AddedTokenFlags]:
    added = {}
    legacy = directory / "added_tokens.json"
    for content, token_id in read_json_object(legacy, required=False).items():
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidArgument(f"{legacy}: the id of {content!r} is {token_id!r}, expected an integer")
        added[token_id] = AddedTokenFlags(content)
    path = directory / "tokenizer_config.json"
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise InvalidArgument(f"{path}: added_tokens_decoder is a {type(decoder).__name__}, expected an object")
    for key, value in decoder.items():
        is_id = key.isdecimal() and len(key) <= _ID_DIGITS
        if not (is_id and isinstance(value, dict) and isinstance(value.get("content"), str)):
            raise InvalidArgument(
                f"{path}: added_tokens_decoder[{key!r:.40}] is {value!r:.80}, expected an id and its token"
            )
        flags = {name: value[name] for name in _FLAGS if name in value}
        if not all(isinstance(flag, bool) for flag in flags.values()):
            raise InvalidArgument(
                f"{path}: added_tokens_decoder[{key!r}] has flags {flags!r:.80}, expected true or false"
            )
        added[int(key)] = AddedTokenFlags(value["content"], **flags)
    return added


def _chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """A template file wins over tokenizer_config.json, where the template is a text or a list of named ones."""
    single = directory / "chat_template.jinja"
    if is_present(single):
        extra = sorted((directory / "additional_chat_templates").glob("*.jinja"))
        named = {path.stem: path for path in extra} | {DEFAULT_TEMPLATE: single}
        return {name: _read_text(path) for name, path in named.items()}
    value, path = config.get("chat_template"), directory / "tokenizer_config.json"
    if value is None and is_present(directory / "chat_template.json"):
        path = directory / "chat_template.json"
        value = read_json_object(path).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    entries = [{"name": k, "template": v} for k, v in value.items()] if isinstance(value, dict) else value
    try:
        templates = {entry["name"]: entry["template"] for entry in entries}
    except (TypeError, KeyError) as exc:
        raise InvalidArgument(f"{path}: chat_template is neither a text nor a list of named templates") from exc
    for item in templates.items():
        if not all(isinstance(text, str) for text in item):
            raise InvalidArgument(f"{path}: chat_template has {item!r:.80}, expected a name and a template, both texts")
    return templates


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        raise InvalidArgument(f"{path} is not a readable template: {exc}; download it again") from exc
