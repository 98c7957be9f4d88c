"""Detection of `oneOf` alternatives in a JSON schema that can match the same value. Does not import torch."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from dsv4cli.engine.text.schema_references import Schema, at_pointer, reference_of

# types of JSON values; "number" means a number with a fraction
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "object", "array"})


def overlapping(alternatives: object, root: Schema) -> tuple[int, int] | None:
    """Find two alternatives that may match the same value.

    Alternatives exclude each other by their types, by `const` or `enum`, or by a property that all object alternatives
    require and whose schemas exclude each other.

    Args:
        alternatives: the value of `oneOf`.
        root: the schema in which references are resolved.

    Returns:
        The indices of two alternatives that may overlap, None if there are none.
    """
    if not isinstance(alternatives, list):
        return None
    return _overlapping([_View([one], root) for one in alternatives])


class _View:
    """The requirements of several schemas, all of which a value must match."""

    def __init__(self, schemas: Sequence[Any], root: Schema, followed: Iterable[str] = ()) -> None:
        """Collect the requirements.

        Args:
            schemas: the schemas that a value must match.
            root: the schema in which references are resolved.
            followed: references that have already been resolved; repeating one adds nothing.
        """
        self._root, self._followed = root, set(followed)
        self._never = any(one is False for one in schemas)
        self._schemas: list[Schema] = []
        self._add(schemas)
        self.values = next((found for one in self._schemas if (found := _values(one)) is not None), None)

    def _add(self, schemas: Sequence[Any]) -> None:
        for one in schemas:
            if not isinstance(one, dict):
                continue
            self._schemas.append(one)
            if isinstance(parts := one.get("allOf"), list):
                self._add(parts)
            reference = reference_of(one)
            if reference is not None and reference not in self._followed:
                self._followed.add(reference)
                self._add([at_pointer(self._root, reference)])

    @property
    def types(self) -> frozenset[str]:
        """The types that a matching value may have."""
        found = frozenset[str]() if self._never else _TYPES
        for one in self._schemas:
            for branches in (one.get("anyOf"), one.get("oneOf")):
                if isinstance(branches, list):
                    views = [_View([branch], self._root, self._followed) for branch in branches]
                    found &= frozenset[str]().union(*(view.types for view in views))
            found &= _declared(one.get("type"))
        return found if self.values is None else found & frozenset(_type_of(value) for value in self.values.values())

    @property
    def required(self) -> set[str]:
        """The properties that a matching object must have."""
        listed = [one["required"] for one in self._schemas if isinstance(one.get("required"), list)]
        return {name for names in listed for name in names if isinstance(name, str)}

    def property(self, name: str) -> "_View":
        """Return the requirements for the value of a property."""
        named = [one["properties"] for one in self._schemas if isinstance(one.get("properties"), dict)]
        return _View([properties[name] for properties in named if name in properties], self._root)


def _overlapping(views: Sequence[_View]) -> tuple[int, int] | None:
    of_type: dict[str, list[int]] = {}
    for number, view in enumerate(views):
        for kind in view.types:
            of_type.setdefault(kind, []).append(number)
    for kind, numbers in of_type.items():
        pair = _same_value([views[number] for number in numbers], kind)
        if pair is not None and kind == "object" and _discriminated([views[number] for number in numbers]):
            continue
        if pair is not None:
            return numbers[pair[0]], numbers[pair[1]]
    return None


def _same_value(views: Sequence[_View], kind: str) -> tuple[int, int] | None:
    """Return two of the schemas, all of one type, whose constants do not exclude each other, or None."""
    owner: dict[str, int] = {}
    for number, view in enumerate(views):
        if view.values is None:
            if len(views) > 1:
                return (0, 1) if number == 0 else (0, number)
            continue
        for key in (key for key, value in view.values.items() if _type_of(value) == kind):
            if owner.setdefault(key, number) != number:
                return owner[key], number
    return None


def _discriminated(views: Sequence[_View]) -> bool:
    """Return True if the object schemas exclude each other by a property that all of them require."""
    shared = set.intersection(*(view.required for view in views))
    return any(_overlapping([view.property(name) for view in views]) is None for name in sorted(shared))


def _values(schema: Schema) -> dict[str, Any] | None:
    """Return the values that a schema lists, or None. Equal values have the same key."""
    if "const" in schema:
        return {_key(schema["const"]): schema["const"]}
    values = schema.get("enum")
    return {_key(value): value for value in values} if isinstance(values, list) else None


def _key(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """Return a JSON value with integral floats (1.0) as integers, because both are equal in JSON Schema."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _declared(types: object) -> frozenset[str]:
    if types is None:
        return _TYPES
    listed = types if isinstance(types, list) else [types]
    named = frozenset(one for one in listed if isinstance(one, str))
    return named | {"integer"} if "number" in named else named


def _type_of(value: Any) -> str:
    value = _plain(value)
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    names: dict[type, str] = {int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    return names[type(value)]
