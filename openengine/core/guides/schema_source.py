"""A JSON Schema document: its subschemas, what their references mean, and whether their keywords are well formed.

Drafts 4, 6, 7, 2019-09 and 2020-12, chosen by `$schema` (2020-12 when absent). Only references within the document are
followed; nothing is ever fetched. Every error names a JSON pointer and the keyword.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from openengine.core.guides.language import Language
from openengine.core.guides.regex import search
from openengine.core.guides.work import Work
from openengine.errors import InvalidArgument

__all__ = ["TOO_COMPLEX", "TYPES", "Schema", "SchemaDocument", "circular", "parse_json", "schema_error", "unsupported"]

TOO_COMPLEX = (
    "it is too complex: what it asks for is nested too deeply, has too many alternatives, combines too many patterns, or "
    "repeats large repetitions"
)

TYPES = ("null", "boolean", "number", "string", "array", "object")

_MAX_DEPTH = 400
_MAX_NUMBER_CHARS = 1000
_LEGACY = ("draft-04", "draft-06", "draft-07")
_DRAFTS = (*_LEGACY, "2019-09", "2020-12")
# The first draft that knows a keyword; to earlier ones it means nothing.
_SINCE = {
    **dict.fromkeys(("const", "contains", "propertyNames"), "draft-06"),
    **dict.fromkeys(("if", "then", "else"), "draft-07"),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "maxContains", "minContains"), "2019-09"),
    "prefixItems": "2020-12",
}
_ONE = ("additionalItems", "additionalProperties", "contains", "else", "if", "not", "propertyNames", "then")
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_COUNTS = (
    "maxContains",
    "maxItems",
    "maxLength",
    "maxProperties",
    "minContains",
    "minItems",
    "minLength",
    "minProperties",
)


@dataclass(frozen=True, slots=True, eq=False)
class Schema:
    """One subschema. `pointer` is where it stands in the document; equality is identity.

    content: the keywords, or True or False.  base: the URI that its references are relative to.
    """

    content: dict[str, Any] | bool
    pointer: str
    base: str

    def at(self, keyword: str) -> str:
        """The pointer of one keyword."""
        return _below(self.pointer, keyword)

    def __contains__(self, keyword: str) -> bool:
        return isinstance(self.content, dict) and keyword in self.content


def parse_json(text: str, what: str) -> Any:
    """JSON with exact numbers (int and Fraction). Raises InvalidArgument naming `what` and what is wrong in it.

    An object that has a name twice is refused, and so is a string that holds half of a surrogate pair.
    """
    try:
        value = json.loads(
            text,
            parse_int=_whole,
            parse_float=_exact,
            parse_constant=_refuse_constant,
            object_pairs_hook=_members,
        )
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        return value
    except RecursionError:
        raise InvalidArgument(f"{what} is nested too deeply; the limit is some {_MAX_DEPTH} levels") from None
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"{what} has a string that holds a lone surrogate (\\ud800 to \\udfff), which is no character"
        ) from None
    except ValueError as exc:
        raise InvalidArgument(f"{what} is not valid JSON: {exc}") from None


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"an object has the name {_show(name)} twice")
    return members


def _whole(text: str) -> int:
    if len(text) > _MAX_NUMBER_CHARS:
        raise _out_of_range(text)
    return int(text)


def _out_of_range(text: str) -> ValueError:
    return ValueError(f"the number {text[:40]}{'…' if len(text) > 40 else ''} is out of range")


def _exact(text: str) -> Fraction | int:
    if len(text) > _MAX_NUMBER_CHARS:
        raise _out_of_range(text)
    try:
        value = Decimal(text)
    except ArithmeticError:  # an exponent beyond what can be said
        raise _out_of_range(text) from None
    if value and abs(value.adjusted()) > 400:
        raise _out_of_range(text)
    exact = Fraction(value)
    return exact.numerator if exact.denominator == 1 else exact


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def schema_error(pointer: str, keyword: str, problem: str) -> InvalidArgument:
    return InvalidArgument(
        f"the JSON schema is malformed at {pointer or '#'}: {keyword} {problem}",
        details={"pointer": pointer, "keyword": keyword},
    )


def unsupported(pointer: str, keyword: str, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"the JSON schema cannot be enforced exactly because of {keyword!r} at {pointer or '#'}: {why}",
        details={"pointer": pointer, "keyword": keyword},
    )


def circular(schema: Schema) -> InvalidArgument:
    """For a `schema` whose reference leads back to it."""
    return unsupported(schema.at("$ref"), "$ref", "the schema refers to itself without anything in between")


class SchemaDocument:
    """Looks schemas up. `root` is the whole document; a dict of the document is always the same `Schema`."""

    def __init__(self, content: Any, work: Work) -> None:
        _check_is_schema(content, "", "the document")
        self.work = work
        self._patterns: dict[str, Language] = {}
        self._known: dict[int, Schema] = {}
        self._anchors: dict[str, Schema] = {}
        self._made: dict[Any, Schema] = {}
        self._draft = _draft_of(content, "/$schema")
        self.is_legacy = self._draft in _LEGACY
        # Drafts after draft-07 replaced `dependencies`, and many a schema has them nonetheless.
        self.has_unknown_dependencies = False
        self.root = self._index(content, "", "")

    def child(self, parent: Schema, *path: str | int) -> Schema:
        """The subschema of `parent` under keywords and indices."""
        content, pointer = parent.content, parent.pointer
        for step in path:
            content = content[step]
            pointer = _below(pointer, step)
        if isinstance(content, bool):
            return self.made((pointer, content), content, pointer, parent.base)
        return self._known.get(id(content)) or self._index(content, pointer, parent.base)

    def made(self, key: Any, content: dict[str, Any] | bool, pointer: str, base: str = "") -> Schema:
        """A schema that does not stand in the document; the same one for the same key."""
        schema = self._made.get(key)
        if schema is None:
            schema = self._made[key] = Schema(content, pointer, base)
        return schema

    def pattern(self, text: str, schema: Schema, keyword: str) -> Language:
        """The strings in which `text` matches; worked out once, in the document's time.

        Raises InvalidArgument naming `keyword` of `schema`, which asks for it, when it is malformed or unsupported.
        """
        if text not in self._patterns:
            try:
                self._patterns[text] = search(text, self.work)
            except InvalidArgument as exc:
                raise unsupported(schema.at(keyword), keyword, exc.message) from None
        return self._patterns[text]

    def resolve(self, schema: Schema) -> Schema:
        """What the `$ref` of `schema` refers to. Raises InvalidArgument when that is not in the document."""
        reference, pointer = schema.content["$ref"], schema.at("$ref")
        if not isinstance(reference, str):
            raise schema_error(pointer, "$ref", f"must be a string, not {_show(reference)}")
        location, fragment = _joined(schema.base, reference, pointer, "$ref")
        target = self._anchors.get(location)
        if target is None and reference.startswith("#"):
            target = self._anchors.get(schema.base, self.root)
        if target is None:
            raise InvalidArgument(
                f"the JSON schema's $ref {_show(reference)} at {pointer} is not in the document; other documents are never "
                "fetched, so put the schema under $defs and refer to it as '#/$defs/…'",
                details={"pointer": pointer, "keyword": "$ref"},
            )
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            anchored = self._anchors.get(f"{location}#{fragment}")
            if anchored is None:
                raise schema_error(pointer, "$ref", f"{_show(reference)} names an anchor that does not exist")
            return anchored
        return self._walk(target, fragment, pointer, reference)

    def _walk(self, start: Schema, fragment: str, pointer: str, reference: str) -> Schema:
        content, base, path = start.content, start.base, start.pointer
        for step in fragment.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(content, dict) and step in content:
                content = content[step]
            elif isinstance(content, list) and step.isdecimal() and len(step) < 10 and int(step) < len(content):
                content = content[int(step)]
            else:
                raise schema_error(pointer, "$ref", f"{_show(reference)} points to nothing")
            path = _below(path, step)
            if isinstance(content, dict) and (known := self._known.get(id(content))):
                base = known.base
        _check_is_schema(content, path, f"the target of $ref {_show(reference)}")
        if isinstance(content, bool):
            return self.made((path, content), content, path, base)
        return self._known.get(id(content)) or self._index(content, path, base)

    def _index(self, content: dict[str, Any] | bool, pointer: str, base: str) -> Schema:
        """Register a schema and all under it, without recursion: schemas may be deeper than Python's stack."""
        pending = [(content, pointer, base)]
        first: Schema | None = None
        while pending:
            content, pointer, base = pending.pop()
            self.work.tick()
            if isinstance(content, bool):
                schema = self.made((pointer, content), content, pointer, base)
            else:
                if id(content) in self._known:
                    continue
                if pointer.count("/") > 2 * _MAX_DEPTH:
                    raise unsupported(
                        pointer, pointer.rpartition("/")[2], f"it is nested more than {_MAX_DEPTH} levels deep"
                    )
                schema = self._register(content, pointer, base)
                pending.extend((inner, at, schema.base) for inner, at in _subschemas(schema))
            first = first or schema
        assert first is not None
        return first

    def _register(self, content: dict[str, Any], pointer: str, base: str) -> Schema:
        # What stands beside a reference means nothing in the older drafts, and so names nothing.
        named = {} if self.is_legacy and "$ref" in content else content
        keyword = "id" if self._draft == "draft-04" else "$id"
        own = named.get(keyword)
        is_anchor = self.is_legacy and isinstance(own, str) and own.startswith("#")
        if isinstance(own, str) and not is_anchor:
            base = _joined(base, own, _below(pointer, keyword), keyword)[0]
        schema = Schema(content, pointer, base)
        if isinstance(own, str):
            self._anchors.setdefault(base + own if is_anchor else base, schema)
        if not pointer:
            self._anchors.setdefault("", schema)
        for name in ("$anchor", "$dynamicAnchor"):
            if isinstance(named.get(name), str):
                self._anchors.setdefault(f"{base}#{named[name]}", schema)
        self._known[id(content)] = schema
        self.has_unknown_dependencies |= "dependencies" in content and not self.is_legacy
        self._check_draft(schema)
        _check_keywords(schema)
        return schema

    def _check_draft(self, schema: Schema) -> None:
        """Refuse what the draft that `$schema` names does not know, for its author meant another."""
        if "$schema" in schema and (draft := _draft_of(schema.content, schema.at("$schema"))) != self._draft:
            raise unsupported(
                schema.at("$schema"),
                "$schema",
                f"it names {draft} within a schema of {self._draft}; write all of the document in one draft",
            )
        for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
            bound = schema.content.get(keyword)
            if self._draft == "draft-04" and _is_number(bound):
                why = "in draft-04 it is true or false beside a bound; name draft-06 or later in $schema"
                raise unsupported(schema.at(keyword), keyword, why)
            if self._draft != "draft-04" and isinstance(bound, bool):
                why = f"it is true or false in draft-04 only, and a number in {self._draft}; write the bound itself"
                raise unsupported(schema.at(keyword), keyword, why)
        for keyword, first in _SINCE.items():
            if keyword in schema and _DRAFTS.index(first) > _DRAFTS.index(self._draft):
                raise unsupported(
                    schema.at(keyword),
                    keyword,
                    f"it means nothing in {self._draft}, which $schema names; name {first} or later, or leave it out",
                )


def _draft_of(content: Any, pointer: str) -> str:
    """The draft that the `$schema` at `pointer` names, one of _DRAFTS; the latest without one."""
    dialect = content.get("$schema", "") if isinstance(content, dict) else ""
    if not isinstance(dialect, str):
        raise schema_error(pointer, "$schema", f"must be a string, not {_show(dialect)}")
    steps = _joined("", dialect, pointer, "$schema")[0].split("/")
    named = [draft for draft in _DRAFTS if draft in steps]
    if named and "json-schema.org" in steps:
        return named[0]
    if not dialect or steps[-2:] == ["json-schema.org", "schema"]:
        return _DRAFTS[-1]
    raise unsupported(pointer, "$schema", f"{_show(dialect)} is not known; name one of {', '.join(_DRAFTS)}")


def _joined(base: str, reference: str, pointer: str, keyword: str) -> tuple[str, str]:
    """The location and the fragment of a reference within `base`."""
    try:
        location, fragment = urldefrag(urljoin(base, reference) if reference else base)
    except ValueError as exc:
        raise schema_error(pointer, keyword, f"{_show(reference)} is no URI reference: {exc}") from None
    return location, fragment


def _below(pointer: str, step: str | int) -> str:
    """The pointer of what is under `step` of what `pointer` names."""
    return f"{pointer}/{str(step).replace('~', '~0').replace('/', '~1')}"


def _subschemas(schema: Schema) -> Iterator[tuple[Any, str]]:
    content = schema.content
    for keyword in _ONE:
        if keyword in content:
            yield content[keyword], schema.at(keyword)
    for keyword in _MANY:
        for index, inner in enumerate(content.get(keyword, ())):
            yield inner, _below(schema.at(keyword), index)
    if "items" in content:
        items = content["items"]
        if isinstance(items, list):
            yield from ((inner, _below(schema.at("items"), index)) for index, inner in enumerate(items))
        else:
            yield items, schema.at("items")
    for keyword in (*_NAMED, "dependencies"):
        for name, inner in content.get(keyword, {}).items():
            if not (keyword == "dependencies" and isinstance(inner, list)):
                yield inner, _below(schema.at(keyword), name)


# ---- well-formedness -------------------------------------------------------------------------------


def _check_is_schema(content: Any, pointer: str, what: str) -> None:
    if not isinstance(content, dict | bool):
        raise schema_error(pointer, what, f"must be an object or a boolean, not {_show(content)}")


def _check_keywords(schema: Schema) -> None:
    content = schema.content
    for keyword in _ONE:
        if keyword in content:
            _check_is_schema(content[keyword], schema.at(keyword), keyword)
    for keyword in _MANY:
        if keyword in content and not (isinstance(content[keyword], list) and content[keyword]):
            raise schema_error(schema.at(keyword), keyword, "must be a list of schemas that is not empty")
    lists = {keyword: content.get(keyword, ()) for keyword in _MANY}
    if isinstance(content.get("items"), list):
        lists["items"] = content["items"]
    elif "items" in content:
        _check_is_schema(content["items"], schema.at("items"), "items")
    for keyword, listed in lists.items():
        for index, each in enumerate(listed):
            _check_is_schema(each, _below(schema.at(keyword), index), keyword)
    for keyword in (*_NAMED, "dependencies", "dependentRequired"):
        named = content.get(keyword, {})
        if not isinstance(named, dict):
            raise schema_error(schema.at(keyword), keyword, f"must be an object, not {_show(named)}")
        for name, inner in named.items():
            if keyword == "dependentRequired" or (keyword == "dependencies" and isinstance(inner, list)):
                _check_names(inner, _below(schema.at(keyword), name), keyword)
            else:
                _check_is_schema(inner, _below(schema.at(keyword), name), keyword)
    _check_scalars(schema)
    if "prefixItems" in content and isinstance(content.get("items"), list):
        why = "it lists schemas beside prefixItems, which does so since 2020-12; write the schema of the items after those"
        raise unsupported(schema.at("items"), "items", why)
    if content.get("required") is True:
        why = "it is draft-03's, and later drafts do not know it; list the name in the object's required"
        raise unsupported(schema.at("required"), "required", why)
    wanted = content.get("type")
    if content.get("nullable") is True and "null" not in (wanted if isinstance(wanted, list) else [wanted]):
        raise unsupported(
            schema.at("nullable"),
            "nullable",
            "it is OpenAPI's, and JSON Schema does not know it; write "
            + (f'"type": ["{wanted}", "null"]' if isinstance(wanted, str) else 'anyOf with {"type": "null"}'),
        )


def _check_scalars(schema: Schema) -> None:
    content = schema.content
    for keyword in _COUNTS:
        if keyword in content and not (_is_number(content[keyword], whole=True) and content[keyword] >= 0):
            raise schema_error(
                schema.at(keyword), keyword, f"must be a whole number >= 0, not {_show(content[keyword])}"
            )
    for keyword in ("minimum", "maximum", "multipleOf"):
        if keyword in content and not _is_number(content[keyword]):
            raise schema_error(schema.at(keyword), keyword, f"must be a number, not {_show(content[keyword])}")
    if content.get("multipleOf", 1) <= 0:
        raise schema_error(schema.at("multipleOf"), "multipleOf", "must be greater than 0")
    for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
        bound = content.get(keyword, 0)
        if not _is_number(bound) and not isinstance(bound, bool):
            raise schema_error(schema.at(keyword), keyword, f"must be a number, not {_show(bound)}")
    for keyword in ("pattern", "format"):
        if not isinstance(content.get(keyword, ""), str):
            raise schema_error(schema.at(keyword), keyword, f"must be a string, not {_show(content[keyword])}")
    if "enum" in content and not isinstance(content["enum"], list):
        raise schema_error(schema.at("enum"), "enum", f"must be a list, not {_show(content['enum'])}")
    if not isinstance(content.get("uniqueItems", True), bool):
        raise schema_error(schema.at("uniqueItems"), "uniqueItems", "must be a boolean")
    if "required" in content and not isinstance(content["required"], bool):
        _check_names(content["required"], schema.at("required"), "required")
    wanted = content.get("type", [])
    for name in wanted if isinstance(wanted, list) else [wanted]:
        if name not in (*TYPES, "integer"):
            raise schema_error(schema.at("type"), "type", f"{_show(name)} is no JSON type")


def _check_names(names: Any, pointer: str, keyword: str) -> None:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise schema_error(pointer, keyword, f"must be a list of property names, not {_show(names)}")


def _is_number(value: Any, *, whole: bool = False) -> bool:
    return isinstance(value, int if whole else int | Fraction) and not isinstance(value, bool)


class _Repr(reprlib.Repr):
    """Shows numbers with a fraction as they are written."""

    def repr_Fraction(self, value: Fraction, level: int) -> str:
        return str(Decimal(value.numerator) / value.denominator)


_REPR = _Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 80


def _show(value: Any) -> str:
    text = _REPR.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
