"""Syntax highlighting of streamed code, line by line."""

from time import perf_counter
from typing import TYPE_CHECKING, Any

from dsv4cli.commands.chat.layout import DIM, Run

if TYPE_CHECKING:
    from collections.abc import Iterator

# SGR parameters by Pygments token type. Of the 16 terminal colors, magenta, red and bright blue are readable on
# black and on white (tests/commands/chat/test_code.py). No background is set
STYLES = {
    "Token": "",
    "Token.Comment": DIM,
    "Token.Keyword": "35",
    "Token.Operator.Word": "35",
    "Token.Name.Function": "1",
    "Token.Name.Class": "1",
    "Token.Name.Tag": "35",
    "Token.Name.Builtin": "94",
    "Token.Name.Decorator": "94",
    "Token.Literal.String": "31",
    "Token.Literal.Number": "94",
    "Token.Generic.Deleted": "31",
    "Token.Generic.Inserted": "94",
    "Token.Generic.Heading": "1",
    "Token.Generic.Prompt": DIM,
}
# maximum lines of context for a line's colors; maximum characters of a line, above which it is not colored
MOST_LINES, LONGEST_LINE = 80, 300
# seconds for a line, after which highlighting stops: Pygments' regular expressions can be slow on adversarial text
SLOW = 0.25


class Code:
    """A block of code in a named language; not highlighted if Pygments does not know it."""

    def __init__(self, language: str) -> None:
        self._lexer = _lexer(language)
        self._lines: list[str] = []

    def push(self, line: str) -> list[Run]:
        """Return the next line in its colors; no character is lost."""
        if self._lexer is None or len(line) > LONGEST_LINE:
            return [Run(line)]
        self._lines.append(line)
        if len(self._lines) > MOST_LINES:
            del self._lines[: MOST_LINES // 2]
        start = perf_counter()
        runs = _last_line(self._lexer.get_tokens("\n".join(self._lines)))
        if perf_counter() - start > SLOW:
            self._lexer = None
        return runs if "".join(run.text for run in runs) == line else [Run(line)]


def _lexer(language: str) -> Any:
    from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]  # the package has no type annotations
    from pygments.util import ClassNotFound  # type: ignore[import-untyped]  # the package has no type annotations

    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=True) if language else None
    except ClassNotFound:
        return None


def _last_line(tokens: "Iterator[tuple[Any, str]]") -> list[Run]:
    runs: list[Run] = []
    ended = False  # whether the line break that Pygments appends has been reached
    for kind, text in tokens:
        for nth, part in enumerate(text.split("\n")):
            if nth:
                if ended:
                    runs = []
                ended = True
            if part:
                if ended:
                    runs, ended = [], False
                runs.append(Run(part, _style(kind)))
    return runs


def _style(kind: Any) -> str:
    while str(kind) not in STYLES:
        kind = kind.parent
    return STYLES[str(kind)]
