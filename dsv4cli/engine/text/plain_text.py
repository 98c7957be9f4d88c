"""Text without special tokens, which may come in pieces."""

from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.lookalikes import LONGEST

_LAST = {token[-1] for token in tokens.SPECIAL}


def open_tail(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of a text that one of the marks begins with, the whole marks aside."""
    longest = max(map(len, marks)) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((length for length in lengths if any(mark.startswith(text[-length:]) for mark in marks)), 0)


class PlainText:
    """Takes the special tokens out of a text, those too that are made of what stood around others. removed: which."""

    def __init__(self) -> None:
        self.removed: list[str] = []
        self._held = ""

    def push(self, text: str) -> str:
        """What is certain now."""
        held = [*self._held]  # a text that grows by a character is copied each time
        for character in text:
            held.append(character)
            if character in _LAST:
                self._remove(held)
        certain = len(held) - open_tail(_end(held), tokens.SPECIAL)
        given, self._held = "".join(held[:certain]), "".join(held[certain:])
        return given

    @property
    def open(self) -> bool:
        """Whether the end of the text may begin a special token."""
        return bool(self._held)

    def flush(self) -> str:
        """The rest, now that nothing follows."""
        given, self._held = self._held, ""
        return given

    def _remove(self, held: list[str]) -> None:
        end = _end(held)
        token = next((token for token in tokens.SPECIAL if end.endswith(token)), None)
        if token is not None:
            self.removed.append(token)
            del held[-len(token) :]


class PlainPart:
    """Reasoning or content without special tokens. Spaces at its end are held back: before markup they are dropped."""

    def __init__(self) -> None:
        self._plain, self._spaces = PlainText(), ""

    @property
    def removed(self) -> list[str]:
        """The special tokens that were left out so far."""
        return self._plain.removed

    def push(self, text: str) -> str:
        """Return the text that is certain now."""
        text = self._spaces + self._plain.push(text)
        certain = text.rstrip()
        self._spaces = text[len(certain) :]
        return certain

    def settle(self) -> str:
        """Return the spaces that are certain because calls follow as they should."""
        if self._plain.open:
            return ""
        spaces, self._spaces = self._spaces, ""
        return spaces

    def flush(self) -> str:
        """Return the rest, now that nothing follows."""
        text, self._spaces = self._spaces + self._plain.flush(), ""
        return text


def _end(held: list[str]) -> str:
    return "".join(held[-LONGEST:])
