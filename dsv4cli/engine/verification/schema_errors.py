"""Checks a value against the part of JSON Schema that the tool scenarios use. No torch."""

from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def schema_errors(value: object, schema: Mapping[str, Any], where: str = "arguments") -> Iterator[str]:
    """Yield an error message for each way in which a value violates a schema."""
    if "anyOf" in schema:
        if all(any(schema_errors(value, one, where)) for one in schema["anyOf"]):
            yield f"{where} matches no alternative"
        return
    kind = schema.get("type")
    if kind is not None and not _is(value, kind):
        yield f"{where} is not of type {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is not one of {', '.join(map(str, schema['enum']))}"
    if isinstance(value, dict):
        yield from _object_errors(value, schema, where)
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{where} has {len(value)} elements"
        for number, one in enumerate(value):
            yield from schema_errors(one, schema.get("items", {}), f"{where}[{number}]")


def _object_errors(value: Mapping[str, object], schema: Mapping[str, Any], where: str) -> Iterator[str]:
    properties: Mapping[str, Any] = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{where} lacks {name}"
    for name, one in value.items():
        if name in properties:
            yield from schema_errors(one, properties[name], f"{where}.{name}")
        elif schema.get("additionalProperties") is False:
            yield f"{where} has {name}, which does not exist"


def _is(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])
