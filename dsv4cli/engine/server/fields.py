"""Validated access to the fields of a JSON body. Fields that are never read count as unknown. Does not import torch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dsv4cli.engine.server.refusals import bad_field


class Fields:
    """A JSON object of a request body.

    A field that is absent or null is None. Each method that reads a field raises `Refusal`, naming the field, if its
    value is invalid.
    """

    def __init__(self, given: Mapping[str, Any], where: str = "") -> None:
        self._given, self._where = given, where
        self._known: set[str] = set()

    @property
    def unknown(self) -> list[str]:
        """The names of fields that were never read."""
        return [self.name(name) for name in self._given if name not in self._known]

    @property
    def names(self) -> list[str]:
        """The names of all fields."""
        return list(self._given)

    def name(self, name: str) -> str:
        """Return a field's full name within the body, as errors show it."""
        return f"{self._where}.{name}" if self._where else name

    def value(self, name: str) -> Any:
        """Return a field of any type."""
        self._known.add(name)
        return self._given.get(name)

    def text(self, name: str) -> str | None:
        """Return a string."""
        value = self.value(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "expected a string", value)
        return value

    def needed(self, name: str) -> str:
        """Return a required string."""
        value = self.text(name)
        if value is None:
            raise bad_field(self.name(name), "expected a string, got nothing")
        return value

    def flag(self, name: str, otherwise: bool = False) -> bool:
        """Return a boolean, or `otherwise` if it is absent."""
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "expected true or false", value)
        return otherwise if value is None else value

    def integer(self, name: str) -> int | None:
        """Return an integer of any size."""
        value = self._whole(name)
        if value is not None and type(value) is not int:
            raise self.wrong(name, "expected a whole number", value)
        return value

    def whole(self, name: str, low: int, high: int | None = None) -> int | None:
        """Return an integer from `low` to `high`, or without an upper limit."""
        value = self._whole(name)
        if value is None:
            return None
        if type(value) is not int or value < low or (high is not None and value > high):
            bounds = f"of {low:,} or more" if high is None else f"from {low:,} to {high:,}"
            raise self.wrong(name, f"expected a whole number {bounds}", value)
        return value

    def _whole(self, name: str) -> Any:
        """Return a field, with a float of integer value (1.0) as an int."""
        value = self.value(name)
        return int(value) if isinstance(value, float) and value.is_integer() else value

    def number(self, name: str, low: float, high: float) -> float | None:
        """Return a finite number from `low` to `high`, as a float."""
        value = self.value(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not low <= value <= high or not math.isfinite(value):
            raise self.wrong(name, f"expected a number from {low:g} to {high:g}", value)
        return float(value)

    def choice(self, name: str, allowed: Sequence[str]) -> str | None:
        """Return a string that is one of `allowed`."""
        value = self.text(name)
        if value is not None and value not in allowed:
            raise self.wrong(name, f"expected one of {', '.join(allowed)}", value)
        return value

    def mapping(self, name: str) -> "Fields | None":
        """Return an object."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "expected an object", value)
        return Fields(value, self.name(name))

    def items(self, name: str) -> list[Any] | None:
        """Return a list."""
        value = self.value(name)
        if value is not None and not isinstance(value, list):
            raise self.wrong(name, "expected a list", value)
        return value

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """Return up to `most` non-empty strings from a string or a list. An empty string counts as an empty list."""
        value = self.value(name)
        given = [] if value in (None, "") else [value] if isinstance(value, str) else value
        if not isinstance(given, list) or not all(isinstance(one, str) and one for one in given) or len(given) > most:
            raise self.wrong(name, f"expected a string or a list of up to {most} strings, none of them empty", value)
        return tuple(given)

    def ignored(self, *names: str) -> None:
        """Mark fields as known that are accepted and have no effect."""
        self._known.update(names)

    def wrong(self, name: str, reason: str, value: object) -> Exception:
        """Return the `Refusal` for a field's value."""
        shown = repr(value)
        return bad_field(self.name(name), f"{reason}, got {shown if len(shown) <= 60 else shown[:60] + '...'}")
