"""The small files beside a vocabulary: tokenizer_config.json and its companions, chat templates.

Owns: reading and checking them. Does not own: the vocabulary files (hf_tokenizer.py, sentencepiece_tokenizer.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openengine.errors import InvalidArgument

__all__ = ["DEFAULT_TEMPLATE", "AddedTokenFlags", "TokenizerFiles", "read_json_file"]

DEFAULT_TEMPLATE = "default"
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")


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
        config = _read_object(directory / "tokenizer_config.json")
        special_map = _read_object(directory / "special_tokens_map.json")
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


def read_json_file(path: Path) -> Any:
    """Raises: InvalidArgument when the file is missing, unreadable or not JSON."""
    if not path.is_file():
        raise InvalidArgument(f"{path} does not exist, or is no regular file")
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise InvalidArgument(f"{path} is not a readable JSON file: {exc}; download it again") from exc


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists() and not path.is_symlink():
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
            value = source.get(key) or []
            for item in value.values() if isinstance(value, dict) else value:
                texts[_token_text(item, directory / file, key)] = None
    return tuple(texts)


def _added_tokens(directory: Path, config: dict[str, Any]) -> dict[int, AddedTokenFlags]:
    added = {}
    legacy = directory / "added_tokens.json"
    for content, token_id in _read_object(legacy).items():
        if not isinstance(token_id, int):
            raise InvalidArgument(f"{legacy}: the id of {content!r} is {token_id!r}, expected an integer")
        added[token_id] = AddedTokenFlags(content)
    path = directory / "tokenizer_config.json"
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise InvalidArgument(f"{path}: added_tokens_decoder is a {type(decoder).__name__}, expected an object")
    for key, value in decoder.items():
        if not (str(key).isdecimal() and isinstance(value, dict) and isinstance(value.get("content"), str)):
            raise InvalidArgument(f"{path}: added_tokens_decoder[{key!r}] is {value!r}, expected an id and its token")
        flags = {name: bool(value[name]) for name in _FLAGS if name in value}
        added[int(key)] = AddedTokenFlags(value["content"], **flags)
    return added


def _chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """A template file wins over tokenizer_config.json, where the template is a text or a list of named ones."""
    single = directory / "chat_template.jinja"
    if single.exists():
        extra = sorted((directory / "additional_chat_templates").glob("*.jinja"))
        named = {path.stem: path for path in extra} | {DEFAULT_TEMPLATE: single}
        return {name: path.read_text(encoding="utf-8") for name, path in named.items()}
    value, path = config.get("chat_template"), directory / "tokenizer_config.json"
    if value is None and (directory / "chat_template.json").exists():
        path = directory / "chat_template.json"
        value = _read_object(path).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    entries = [{"name": k, "template": v} for k, v in value.items()] if isinstance(value, dict) else value
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in entries}
    except (TypeError, KeyError) as exc:
        raise InvalidArgument(f"{path}: chat_template is neither a text nor a list of named templates") from exc
