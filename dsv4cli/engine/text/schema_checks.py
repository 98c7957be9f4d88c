"""Checks of JSON schemas before they are compiled to grammars: numbers, recursion and `oneOf`. No torch."""

from collections.abc import Iterator
from math import isfinite
from typing import Any

from dsv4cli.engine.text.schema_alternatives import overlapping
from dsv4cli.engine.text.schema_references import Schema, at_pointer, reference_of
from dsv4cli.errors import UsageError

# keywords whose value is a schema per name, a list of schemas, or one schema
_NAMED = ("properties", "patternProperties")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_LENGTHS = ("minLength", "maxLength")
_VALUES = ("const", "enum", "multipleOf", "minItems", "maxItems", "minProperties", "maxProperties")
# llguidance parses numbers as fp64, which represents all integers up to _EXACT, and stores integers as int64
_EXACT, _INT64 = 2**53, 2**63
# llguidance supports bounds of up to 18 digits, and its lengths are 32-bit integers
_LARGEST_BOUND, _LARGEST_LENGTH = 10**18, 2**32


def check_schema(schema: Schema, what: str, *, lenient: bool) -> None:
    """Check that a grammar can express a schema and everything that it refers to.

    Args:
        schema: the schema, with its definitions.
        what: its name in errors, such as "the schema".
        lenient: accept `oneOf` even if several alternatives can match.

    Raises:
        UsageError: a number cannot be represented exactly, a recursion never ends, or alternatives of `oneOf` overlap.
    """
    parts = _reachable(schema)
    endless = _endless(parts)
    if endless is not None:
        raise UsageError(
            f"the grammar allows no finite answer: {what} at {endless} requires itself recursively",
            "make a property in this recursion optional, or allow null",
        )
    for place, part in parts.items():
        for keyword, number in _numbers(part):
            limit = f"less than {_LARGEST_LENGTH:,}" if keyword in _LENGTHS else f"integers within ±{_EXACT:,}"
            raise UsageError(
                f"{what} at {place}: {keyword} has the number {number}, which a grammar cannot represent exactly",
                f"use {limit}, or remove {keyword}",
            )
        pair = None if lenient else overlapping(part.get("oneOf"), schema)
        if pair is not None:
            raise UsageError(
                f"{what} at {place}: alternatives {pair[0]} and {pair[1]} of oneOf can both match",
                "use anyOf, or give the alternatives different types, or a required property with different constants",
            )


def parts_of(schema: Schema) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the direct subschemas of a schema, each with its relative JSON pointer."""
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            held = [(_pointer(key, name), part) for name, part in value.items()]
        elif key in _LISTED and isinstance(value, list):
            held = [(_pointer(key, number), part) for number, part in enumerate(value)]
        else:
            held = [(f"/{key}", value)] if key in _SINGLE else []
        yield from ((place, part) for place, part in held if isinstance(part, dict))


def _pointer(key: str, name: object) -> str:
    return f"/{key}/{str(name).replace('~', '~0').replace('/', '~1')}"


def _reachable(schema: Schema) -> dict[str, Schema]:
    """Return the schema with all subschemas and everything that it refers to, by JSON pointer."""
    found: dict[str, Schema] = {}
    left: list[tuple[str, Any]] = [("#", schema)]
    while left:
        place, part = left.pop()
        if place not in found and isinstance(part, dict):
            found[place] = part
            left += [(place + within, one) for within, one in parts_of(part)]
            if (reference := reference_of(part)) is not None:
                left.append((reference, at_pointer(schema, reference)))
    return found


def _numbers(part: Schema) -> Iterator[tuple[str, int | float]]:
    """Yield the keywords and numbers of a schema that a grammar cannot represent exactly."""
    for keyword in _VALUES:
        yield from ((keyword, one) for one in _numbers_in(part.get(keyword)) if not _held(one))
    for keyword in _BOUNDS:
        for one in _numbers_in(part.get(keyword)):
            # llguidance clips bounds at the maximum of int64
            if not (_held(one) and abs(one) < _LARGEST_BOUND) and (keyword, one) != ("maximum", _INT64 - 1):
                yield keyword, one
    for keyword in _LENGTHS:
        yield from ((keyword, one) for one in _numbers_in(part.get(keyword)) if one >= _LARGEST_LENGTH)


def _numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(one)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def _held(number: int | float) -> bool:
    if isinstance(number, float):
        return isfinite(number) and number != -_INT64  # the smallest int64 overflows llguidance's stack
    return abs(number) < _INT64 and int(float(number)) == number


def _endless(parts: dict[str, Schema]) -> str | None:
    """Return the JSON pointer of a schema whose values always contain another value of it, or None if there is none."""
    ending = _ending(parts)
    place = next((place for place in parts if place not in ending), None)
    passed: set[str] = set()
    while place is not None and place not in passed:
        passed.add(place)
        inside = [place + within for within, _ in parts_of(parts[place])] + [reference_of(parts[place])]
        place = next(one for one in inside if one in parts and one not in ending)
    return place


def _ending(parts: dict[str, Schema]) -> set[str]:
    """Return the JSON pointers of the schemas that allow a value of finite size."""
    ending: set[str] = set()
    before = -1
    while len(ending) > before:
        before = len(ending)
        for place in reversed(parts):  # schemas precede their subschemas
            if place not in ending and _Ends(parts, ending, place).whole():
                ending.add(place)
    return ending


class _Ends:
    """Decides whether a schema allows a value of finite size, from the pointers of schemas that are known to."""

    def __init__(self, parts: dict[str, Schema], ending: set[str], place: str) -> None:
        self._parts, self._ending, self._place = parts, ending, place
        self._schema = parts[place]

    def whole(self) -> bool:
        schema = self._schema
        if not self._known(reference_of(schema)):
            return False
        if any(self._listed(key) and not any(self._listed(key)) for key in ("anyOf", "oneOf")):
            return False
        return all(self._listed("allOf")) and ("const" in schema or "enum" in schema or self._own())

    def _own(self) -> bool:
        types = self._schema.get("type")
        types = types if isinstance(types, list) else [types]
        if any(kind not in ("object", "array") for kind in types):
            return True
        return not types or ("object" in types and self._object()) or ("array" in types and self._array())

    def _object(self) -> bool:
        properties, required = self._schema.get("properties"), self._schema.get("required")
        named = properties if isinstance(properties, dict) else {}
        others = self._at("/additionalProperties")
        for name in required if isinstance(required, list) else ():
            if not (self._at(_pointer("properties", name)) if str(name) in named else others):
                return False
        fewest = self._schema.get("minProperties")
        if others or "patternProperties" in self._schema or not isinstance(fewest, int):
            return True
        return sum(self._at(_pointer("properties", name)) for name in named) >= fewest

    def _array(self) -> bool:
        fewest, first = self._schema.get("minItems"), self._listed("prefixItems")
        if not isinstance(fewest, int):
            return True
        return all(first[:fewest]) and (fewest <= len(first) or self._at("/items"))

    def _listed(self, key: str) -> list[bool]:
        value = self._schema.get(key)
        return [self._at(_pointer(key, number)) for number in range(len(value))] if isinstance(value, list) else []

    def _at(self, within: str) -> bool:
        return self._known(self._place + within)

    def _known(self, place: str | None) -> bool:
        return place in self._ending or place not in self._parts
