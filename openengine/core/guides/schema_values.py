"""Whether a given value meets a schema; used for the values that a schema lists, one by one.

Owns which JSON values are equal, and each keyword's verdict on a value. Sets of values that no schema lists are the shapes
of schema_keywords.py, which knows the same keywords.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from openengine.core.guides.formats import format_language
from openengine.core.guides.language import matches
from openengine.core.guides.schema_source import Schema, SchemaDocument, circular

__all__ = ["Validator", "Value", "type_of"]


@dataclass(frozen=True, slots=True)
class Value:
    """A JSON value, equal to those that JSON Schema calls equal: 1 and 1.0, objects in any order."""

    key: Hashable
    content: Any = field(compare=False)

    @classmethod
    def of(cls, content: Any) -> Value:
        return cls(_key(content), content)


def _key(value: Any) -> Hashable:
    kind = type_of(value)
    if kind == "array":
        return (kind, tuple(map(_key, value)))
    if kind == "object":
        return (kind, frozenset((name, _key(inner)) for name, inner in value.items()))
    return (kind, Fraction(value) if kind == "number" else value)


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | Fraction):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


class Validator:
    """Judges values by the schemas of one document."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self._enums: dict[Schema, frozenset[Value]] = {}
        self._open: set[tuple[Schema, int]] = set()  # references that are being followed for a value

    def holds(self, schema: Schema, value: Any) -> bool:
        """Whether `value` meets `schema`."""
        if isinstance(schema.content, bool):
            return schema.content
        if "$ref" in schema:
            question = (schema, id(value))
            if question in self._open:
                raise circular(schema)
            self._open.add(question)
            try:
                if not self.holds(self._document.resolve(schema), value):
                    return False
            finally:
                self._open.remove(question)
            if self._document.is_legacy:
                return True
        rules = (_GENERAL, _BY_TYPE.get(type_of(value), {}))
        return all(rule(self, schema, value) for group in rules for keyword, rule in group.items() if keyword in schema)

    def _child(self, schema: Schema, value: Any, *path: str | int) -> bool:
        return self.holds(self._document.child(schema, *path), value)

    def _each(self, schema: Schema, value: Any, keyword: str) -> list[bool]:
        return [self._child(schema, value, keyword, index) for index in range(len(schema.content[keyword]))]

    def _finds(self, schema: Schema, keyword: str, pattern: str, text: str) -> bool:
        """Whether `pattern`, which `keyword` of `schema` asks for, matches somewhere in `text`."""
        return matches(self._document.pattern(pattern, schema, keyword), text, self._document.work)

    def _type(self, schema: Schema, value: Any) -> bool:
        wanted = schema.content["type"]
        names = wanted if isinstance(wanted, list) else [wanted]
        kind = type_of(value)
        return kind in names or (kind == "number" and "integer" in names and Fraction(value).denominator == 1)

    def _enum(self, schema: Schema, value: Any) -> bool:
        if schema not in self._enums:
            self._enums[schema] = frozenset(map(Value.of, schema.content["enum"]))
        return Value.of(value) in self._enums[schema]

    def _if(self, schema: Schema, value: Any) -> bool:
        branch = "then" if self._child(schema, value, "if") else "else"
        return branch not in schema or self._child(schema, value, branch)

    def _items(self, schema: Schema, value: list[Any]) -> bool:
        content = schema.content
        first, rest = (
            ("items", "additionalItems") if isinstance(content.get("items"), list) else ("prefixItems", "items")
        )
        size = len(content.get(first, ()))
        if not all(self._child(schema, item, first, index) for index, item in enumerate(value[:size])):
            return False
        return rest not in content or all(self._child(schema, item, rest) for item in value[size:])

    def _contains(self, schema: Schema, value: list[Any]) -> bool:
        count = sum(self._child(schema, item, "contains") for item in value)
        if self._document.is_legacy:
            return count > 0
        return schema.content.get("minContains", 1) <= count <= schema.content.get("maxContains", count)

    def _members(self, schema: Schema, value: dict[str, Any]) -> bool:
        content = schema.content
        for name, inner in value.items():
            found = [("properties", name)] if name in content.get("properties", {}) else []
            for text in content.get("patternProperties", {}):
                if self._finds(schema, "patternProperties", text, name):
                    found.append(("patternProperties", text))
            if not found and "additionalProperties" in content:
                found = [("additionalProperties",)]
            if not all(self._child(schema, inner, *path) for path in found):
                return False
        return True

    def _dependencies(self, schema: Schema, value: dict[str, Any]) -> bool:
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, wanted in schema.content.get(keyword, {}).items():
                if name in value and isinstance(wanted, list) and not value.keys() >= set(wanted):
                    return False
                if name in value and not isinstance(wanted, list) and not self._child(schema, value, keyword, name):
                    return False
        return True

    def _format(self, schema: Schema, value: str) -> bool:
        language = format_language(schema.content["format"])
        return language is None or matches(language, value, self._document.work)


_Rule = Callable[[Validator, Schema, Any], bool]

_GENERAL: dict[str, _Rule] = {
    "type": Validator._type,
    "enum": Validator._enum,
    "const": lambda _, schema, value: Value.of(value) == Value.of(schema.content["const"]),
    "allOf": lambda self, schema, value: all(self._each(schema, value, "allOf")),
    "anyOf": lambda self, schema, value: any(self._each(schema, value, "anyOf")),
    "oneOf": lambda self, schema, value: sum(self._each(schema, value, "oneOf")) == 1,
    "not": lambda self, schema, value: not self._child(schema, value, "not"),
    "if": Validator._if,
}


def _bound(keyword: str, compare: Callable[[Any, Any], bool]) -> _Rule:
    def rule(_: Validator, schema: Schema, value: Any) -> bool:
        bound = schema.content[keyword]
        if isinstance(bound, bool):  # Draft 4: it makes `minimum` or `maximum` strict
            other = schema.content.get("minimum" if keyword == "exclusiveMinimum" else "maximum")
            return not bound or other is None or value != other
        return compare(value, bound)

    return rule


def _size(keyword: str, compare: Callable[[int, int], bool]) -> _Rule:
    return lambda _, schema, value: compare(len(value), schema.content[keyword])


def _at_least(value: Any, bound: Any) -> bool:
    return value >= bound


def _at_most(value: Any, bound: Any) -> bool:
    return value <= bound


_BY_TYPE: dict[str, dict[str, _Rule]] = {
    "number": {
        "minimum": _bound("minimum", _at_least),
        "maximum": _bound("maximum", _at_most),
        "exclusiveMinimum": _bound("exclusiveMinimum", lambda value, bound: value > bound),
        "exclusiveMaximum": _bound("exclusiveMaximum", lambda value, bound: value < bound),
        "multipleOf": lambda _, schema, value: (Fraction(value) / schema.content["multipleOf"]).denominator == 1,
    },
    "string": {
        "minLength": _size("minLength", _at_least),
        "maxLength": _size("maxLength", _at_most),
        "pattern": lambda self, schema, value: self._finds(schema, "pattern", schema.content["pattern"], value),
        "format": Validator._format,
    },
    "array": {
        **dict.fromkeys(("prefixItems", "items", "additionalItems"), Validator._items),
        "minItems": _size("minItems", _at_least),
        "maxItems": _size("maxItems", _at_most),
        "uniqueItems": lambda _, schema, value: (
            not schema.content["uniqueItems"] or len(set(map(Value.of, value))) == len(value)
        ),
        "contains": Validator._contains,
    },
    "object": {
        **dict.fromkeys(("properties", "patternProperties", "additionalProperties"), Validator._members),
        "required": lambda _, schema, value: (
            isinstance(schema.content["required"], bool) or value.keys() >= set(schema.content["required"])
        ),
        **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), Validator._dependencies),
        "propertyNames": lambda self, schema, value: all(self._child(schema, name, "propertyNames") for name in value),
        "minProperties": _size("minProperties", _at_least),
        "maxProperties": _size("maxProperties", _at_most),
    },
}
