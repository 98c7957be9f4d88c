"""What a JSON schema refers to within itself; no torch."""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]
DEFINITIONS = ("$defs", "definitions")
# the definition that a schema is of itself, where it refers to places that are none of its definitions
WHOLE = "the-whole"


def with_places(schema: Schema) -> Schema:
    """A schema whose parts can stand alone with its definitions: where one refers to another place in it, or to all of
    it, that is a definition too."""
    moved = _moved(schema)
    definitions = moved.get("$defs", {})
    if moved == schema or not isinstance(definitions, dict):
        return schema
    return {**moved, "$defs": {**definitions, WHOLE: moved}}


def resolved(schema: Schema, definitions: Schema) -> Schema:
    """What a schema refers to, if it refers to one of the definitions or to a part of one."""
    seen: set[str] = set()
    while isinstance(reference := schema.get("$ref"), str) and reference not in seen:
        seen.add(reference)
        found = at_pointer(definitions, reference)
        if not isinstance(found, Mapping):
            break
        schema = found
    return schema


def _moved(value: Any) -> Any:
    """With references to places that are no definitions as `with_places` has them."""
    if isinstance(value, Mapping):
        return {key: _reference(part) if key == "$ref" else _moved(part) for key, part in value.items()}
    return [_moved(part) for part in value] if isinstance(value, list) else value


def _reference(value: Any) -> Any:
    if not isinstance(value, str):
        return _moved(value)  # a property of this name
    beginning, _, path = value.partition("/")
    if beginning != "#" or path.partition("/")[0] in DEFINITIONS:
        return value
    return f"#/$defs/{WHOLE}{value[1:]}"


def reference_of(schema: Schema) -> str | None:
    """Return the JSON pointer that a schema refers to, such as `#/$defs/x`, None without one."""
    reference = schema.get("$ref")
    return reference if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")) else None


def at_pointer(value: Any, reference: str) -> Any:
    """Return what a reference such as `#/$defs/x` points to in a schema, None if nothing is there."""
    for part in reference.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            value = {str(number): item for number, item in enumerate(value)}
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
