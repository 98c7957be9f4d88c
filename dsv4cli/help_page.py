"""Help pages in plain text: sections and tables that wrap between words at any width."""

import inspect
import re
import textwrap
from collections.abc import Sequence

WIDEST = 80  # columns of a page on a wider terminal: longer lines are hard to read
MARGIN = 2  # columns left free on the right, as in Click's own help pages
NARROW = 60  # columns below which a description goes under its term: two columns would be a word wide
LONGEST_TERM = 30  # columns of the left side of a table; a longer term gets a line of its own
UNDER_TERM = 6  # columns by which a description under its term is indented
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
# stands for a space inside quotes while a command is wrapped
HELD_SPACE = "\0"


class HelpPage:
    """A help page of a given width, written from top to bottom."""

    def __init__(self, columns: int) -> None:
        self._narrow = columns < NARROW
        self._width = max(min(columns, WIDEST) - MARGIN, 20)
        self._lines: list[str] = []

    def __str__(self) -> str:
        return "\n".join(self._lines)

    def usage(self, program: str, pieces: Sequence[str]) -> None:
        """Add the first line: the program and what it accepts."""
        self._wrap(" ".join([program, *pieces]), "Usage: ", "  " if self._narrow else " " * len("Usage: "))

    def text(self, text: str) -> None:
        """Add paragraphs, separated by empty lines.

        A paragraph that starts with `\\b` keeps its lines. Lines under `Examples:` are shell commands.
        """
        for paragraph in inspect.cleandoc(text).split("\n\n"):
            first, *lines = paragraph.split("\n")
            self._lines.append("")
            if first != "\b":
                self._wrap(" ".join([first, *lines]), "  ", "  ")
                continue
            for line in lines:
                self._command(f"  {line}") if lines[0] == "Examples:" else self._row(f"  {line}")

    def section(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Add a titled table of terms and their descriptions; nothing if it has no rows."""
        if not rows:
            return
        self._lines += ["", f"{title}:"]
        column = 2 + min(LONGEST_TERM, max(len(term) for term, _ in rows)) + 2
        for term, description in rows:
            if self._narrow or len(term) > LONGEST_TERM:
                self._wrap(term, "  ", "    ")
                indent = " " * (UNDER_TERM if self._narrow else column)
                self._wrap(description, indent, indent)
            else:
                self._wrap(description, f"  {term}".ljust(column), " " * column)

    def _row(self, line: str) -> None:
        """Add a line, wrapped under its second column, or under its first on a narrow page."""
        columns = re.match(r"( *)(\S+ {2,})?", line)
        assert columns is not None
        indent = len(columns[1]) + 4 if self._narrow else len(columns[0])
        self._wrap(line[len(columns[1]) :], columns[1], " " * indent)

    def _command(self, line: str) -> None:
        """Add a command that can be pasted into a shell."""
        held = QUOTED.sub(lambda quoted: quoted[0].replace(" ", HELD_SPACE), line.strip())
        indent = " " * (len(line) - len(line.lstrip()))
        parts = textwrap.wrap(
            held, self._width - len(" \\"), initial_indent=indent, subsequent_indent=f"{indent}    ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        self._lines += " \\\n".join(parts).replace(HELD_SPACE, " ").split("\n")

    def _wrap(self, text: str, first: str, further: str) -> None:
        self._lines += textwrap.wrap(
            text, self._width, initial_indent=first, subsequent_indent=further,
            break_long_words=False, break_on_hyphens=False,
        ) or [first.rstrip()]  # fmt: skip
