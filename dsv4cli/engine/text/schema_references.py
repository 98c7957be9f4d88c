"""References within a JSON schema. Does not import torch."""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]
DEFINITIONS = ("$defs", "definitions")
# name of the definition that contains the schema itself, for references to places outside the definitions
WHOLE = "the-whole"


def with_places(schema: Schema) -> Schema:
    """Return an equivalent schema whose subschemas need only its definitions.

    If a reference points to a place outside the definitions, or to the whole schema, the schema becomes a definition of
    itself (`WHOLE`) and the reference points into that.
    """
    moved = _moved(schema)
    definitions = moved.get("$defs", {})
    if moved == schema or not isinstance(definitions, dict):
        return schema
    return {**moved, "$defs": {**definitions, WHOLE: moved}}


def resolved(schema: Schema, definitions: Schema) -> Schema:
    """Return the definition, or part of one, that a schema refers to; the schema itself if it has no such reference."""
    seen: set[str] = set()
    while isinstance(reference := schema.get("$ref"), str) and reference not in seen:
        seen.add(reference)
        found = at_pointer(definitions, reference)
        if not isinstance(found, Mapping):
            break
        schema = found
    return schema


def _moved(value: Any) -> Any:
    """Return the value with references to places outside the definitions rewritten, for `with_places`."""
    if isinstance(value, Mapping):
        return {key: _reference(part) if key == "$ref" else _moved(part) for key, part in value.items()}
    return [_moved(part) for part in value] if isinstance(value, list) else value


def _reference(value: Any) -> Any:
    if not isinstance(value, str):
        return _moved(value)  # a property named "$ref"
    beginning, _, path = value.partition("/")
    if beginning != "#" or path.partition("/")[0] in DEFINITIONS:
        return value
    return f"#/$defs/{WHOLE}{value[1:]}"


def reference_of(schema: Schema) -> str | None:
    """Return the JSON pointer that a schema refers to, such as `#/$defs/x`, or None."""
    reference = schema.get("$ref")
    return reference if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")) else None


def at_pointer(value: Any, reference: str) -> Any:
    """Return the value that a reference such as `#/$defs/x` points to in a schema, or None."""
    for part in reference.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            value = {str(number): item for number, item in enumerate(value)}
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
