"""DSML markup in an answer's text: recognizes tags, including damaged ones, and separates them from content."""

import re
from typing import TYPE_CHECKING, Literal

from dsv4cli.engine.text.plain_text import open_tail
from dsv4cli.engine.text.tokens import DSML

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

TextKind = Literal["content", "calls"]

# includes names that models misspell
BLOCK_NAMES = ("tool_calls", "tool_call", "toolcalls", "tool", "function_calls")
CALL_NAMES = ("invoke", "parameter", "param")
TAG_NAMES = (*BLOCK_NAMES, *CALL_NAMES)
# beginnings of tag names, for a tag that was cut off
BEGUN_NAMES = sorted({name[:length] for name in TAG_NAMES for length in range(1, len(name))})
# an empty line before a block is part of the block
MARKS = (f"\n\n<{DSML}", f"<{DSML}", f"</{DSML}", DSML)
_NAME = re.compile(r"( ?)([a-z_]*)")
_TAG_END = re.compile(" *>")


class MarkupStream:
    """Splits an answer's text, which may arrive in pieces, into content and the markup of calls.

    Closing tags without a call, empty blocks and single marks count as markup; the text around them is content. From
    the first invoke or parameter tag on, everything is of kind "calls". The pieces of each kind join to the same text
    however the input is divided.
    """

    def __init__(self) -> None:
        self._held = ""
        self._final = False
        self._read: Callable[[], Iterable[tuple[TextKind, str]] | None] = self._text
        self._opens = False  # the last mark is that of an opening tag
        self._in_block = False

    def push(self, text: str) -> list[tuple[TextKind, str]]:
        """Return the pieces that `text` makes certain, in order and without empty ones."""
        self._held += text
        pieces: list[tuple[TextKind, str]] = []
        while (found := self._read()) is not None:
            pieces += found
        return [piece for piece in pieces if piece[1]]

    def flush(self) -> list[tuple[TextKind, str]]:
        """Return the text that was held back, because no more text follows."""
        self._final = True
        return self.push("")

    def _taken(self, kind: TextKind, length: int) -> list[tuple[TextKind, str]]:
        text, self._held = self._held[:length], self._held[length:]
        return [(kind, text)]

    def _text(self) -> list[tuple[TextKind, str]] | None:
        """Read content up to the next mark."""
        if not self._held:
            return None
        at, mark = self._next_mark()
        if mark:
            pieces = self._taken("content", at)
            self._read, self._opens = self._name, "/" not in mark
            return pieces + self._taken("calls", len(mark))
        certain = len(self._held) if self._final else len(self._held) - open_tail(self._held, MARKS)
        return self._taken("content", certain) if certain else None

    def _next_mark(self) -> tuple[int, str]:
        hits = ((self._held.find(mark), mark) for mark in MARKS)
        return min((hit for hit in hits if hit[0] >= 0), default=(-1, ""))

    def _name(self) -> list[tuple[TextKind, str]] | None:
        """Read the name of a tag after its mark. A mark without a name is not a tag."""
        found = _NAME.match(self._held)
        assert found is not None
        if found.end() == len(self._held) and not self._final:
            return None  # more letters may follow
        space, name = found.groups()
        if found.end() == len(self._held) and name in BEGUN_NAMES:
            return self._taken("calls", len(self._held))
        misspelt = name not in TAG_NAMES and name and not space
        if self._opens and (name in CALL_NAMES or misspelt):
            self._read = self._calls
            return []
        if name in TAG_NAMES or (misspelt and self._held[found.end() :].startswith(">")):
            self._in_block, self._read = self._opens, self._tag_end
            return self._taken("calls", found.end())
        self._read = self._calls if self._in_block else self._text
        return []

    def _tag_end(self) -> list[tuple[TextKind, str]] | None:
        """Read the end of a tag, which may be missing."""
        if not self._held.strip(" ") and not self._final:
            return None
        end = _TAG_END.match(self._held)
        self._read = self._block if self._in_block else self._text
        return self._taken("calls", end.end() if end else 0)

    def _block(self) -> list[tuple[TextKind, str]] | None:
        """Read what follows the tag that opens a block, up to the next tag."""
        spaces = len(self._held) - len(self._held.lstrip())
        if spaces or not self._held:
            return self._taken("calls", spaces) if spaces else None
        mark = next((mark for mark in MARKS if self._held.startswith(mark)), "")
        if mark:
            self._read, self._opens = self._name, "/" not in mark
            return self._taken("calls", len(mark))
        if not self._final and any(mark.startswith(self._held) for mark in MARKS):
            return None
        self._read = self._calls
        return []

    def _calls(self) -> list[tuple[TextKind, str]] | None:
        return self._taken("calls", len(self._held)) if self._held else None
