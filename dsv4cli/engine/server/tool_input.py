"""The input of a custom tool, decoded from the JSON of its only argument while that is generated. No torch."""

import json
import re

from dsv4cli.engine.server.response_tools import INPUT
from dsv4cli.engine.text.prompt_text import to_json

_BEGIN = f'{{{to_json(INPUT)}: "'
# the part of a JSON string that is certain: no incomplete escape at its end, nor half of a surrogate pair
_CERTAIN = re.compile(r'(?:[^"\\]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\[^u])*')


class ToolInput:
    """Decodes `{"input": "..."}` piece by piece."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._json: list[str] = []
        self._held = ""  # JSON that was not decoded
        self._begun = False

    @property
    def text(self) -> str:
        """The input so far."""
        return "".join(self._texts)

    def push(self, part: str) -> str:
        """Add a part of the JSON, and return the text that is now certain."""
        self._json.append(part)
        self._held += part
        if not self._begun and self._held.startswith(_BEGIN):
            self._begun, self._held = True, self._held[len(_BEGIN) :]
        if not self._begun:
            return ""
        found = _CERTAIN.match(self._held)
        assert found is not None
        self._held = self._held[found.end() :]
        return self._give(json.loads(f'"{found[0]}"', strict=False))

    def finish(self) -> str:
        """Return the rest of the text, at the end of the JSON."""
        return self._give(_input_of("".join(self._json))[len(self.text) :])

    def _give(self, text: str) -> str:
        self._texts.append(text)
        return text


def _input_of(arguments: str) -> str:
    """Return the input in a call's arguments.

    If the model has written another argument instead, it is the only argument that is a text, or else the JSON.
    """
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(value, dict):
        return arguments
    given = [value[INPUT]] if INPUT in value else list(value.values())
    return given[0] if len(given) == 1 and isinstance(given[0], str) else arguments
