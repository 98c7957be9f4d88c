"""Removal of special tokens from text that may arrive in pieces."""

from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.lookalikes import LONGEST

_LAST = {token[-1] for token in tokens.SPECIAL}


def open_tail(text: str, marks: tuple[str, ...]) -> int:
    """Return the length of the longest end of the text that is an incomplete beginning of one of the marks."""
    longest = max(map(len, marks)) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((length for length in lengths if any(mark.startswith(text[-length:]) for mark in marks)), 0)


class PlainText:
    """Removes special tokens from a text, including ones that form when text around a removed token joins.

    Attributes:
        removed: the tokens that were removed.
    """

    def __init__(self) -> None:
        self.removed: list[str] = []
        self._held = ""

    def push(self, text: str) -> str:
        """Add text. Return the text that is now certain."""
        held = [*self._held]  # a list, because a string would be copied for each added character
        for character in text:
            held.append(character)
            if character in _LAST:
                self._remove(held)
        certain = len(held) - open_tail(_end(held), tokens.SPECIAL)
        given, self._held = "".join(held[:certain]), "".join(held[certain:])
        return given

    @property
    def open(self) -> bool:
        """Whether the end of the text may be the beginning of a special token."""
        return bool(self._held)

    def flush(self) -> str:
        """Return the rest, because no more text follows."""
        given, self._held = self._held, ""
        return given

    def _remove(self, held: list[str]) -> None:
        end = _end(held)
        token = next((token for token in tokens.SPECIAL if end.endswith(token)), None)
        if token is not None:
            self.removed.append(token)
            del held[-len(token) :]


class PlainPart:
    """Reasoning or content without special tokens. Trailing whitespace is held back: it is dropped before markup."""

    def __init__(self) -> None:
        self._plain, self._spaces = PlainText(), ""

    @property
    def removed(self) -> list[str]:
        """The special tokens that have been removed so far."""
        return self._plain.removed

    def push(self, text: str) -> str:
        """Add text. Return the text that is now certain."""
        text = self._spaces + self._plain.push(text)
        certain = text.rstrip()
        self._spaces = text[len(certain) :]
        return certain

    def settle(self) -> str:
        """Return the held whitespace, which belongs to the text if well-formed calls follow."""
        if self._plain.open:
            return ""
        spaces, self._spaces = self._spaces, ""
        return spaces

    def flush(self) -> str:
        """Return the rest, because no more text follows."""
        text, self._spaces = self._spaces + self._plain.flush(), ""
        return text


def _end(held: list[str]) -> str:
    return "".join(held[-LONGEST:])
