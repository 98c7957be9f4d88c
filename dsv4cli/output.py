"""Terminal output: results go to stdout, messages to stderr. The only module that prints; standard library only.

Text from checkpoints, models and files is data: it is never interpreted as markup, its control characters never reach
a terminal, and a one-line message stays on one line (see `dsv4cli.harmless`).
"""

import base64
import errno
import json
import os
import stat
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TextIO

from dsv4cli.errors import Dsv4Error
from dsv4cli.folding import folded
from dsv4cli.harmless import LONGEST_WORD, brief_line, harmless, harmless_line
from dsv4cli.progress import LineClock, WorkProgress, bar, reported_regularly

# ECMA-48: select graphic rendition
BOLD, RED, YELLOW, DIM, RESET = "\x1b[1m", "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[0m"
# escaped in JSON in addition to C0: DEL, C1, bidirectional controls, and U+2028 and U+2029, which can end a line
DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
ESCAPED = {code: f"\\u{code:04x}" for code in (*range(127, 160), 0x2028, 0x2029, *DIRECTIONS)}
# columns of a paragraph
WIDTH = 80
# characters of a line of advice: a path may be that long (Linux's PATH_MAX), and a command is pasted whole
LONGEST_ADVICE = 4096
# what a table says once, wherever it shows bytes
UNIT_NOTE = "1 GB = 10^9 bytes"


class ReaderGone(Exception):
    """The reader of stdout or stderr, such as `head`, has closed it: exit quietly."""


@dataclass(frozen=True)
class Colours:
    """Whether stdout and stderr may use colors."""

    stdout: bool = False
    stderr: bool = False


class Output:
    """Writer for stdout and stderr, as text or JSON. With `--json` or `quiet`, stderr has only errors."""

    def __init__(self, colours: Colours, as_json: bool = False, quiet: bool = False) -> None:
        self.colours = colours
        self.as_json = as_json
        self.silent = as_json or quiet
        self._open: TextIO | None = None  # the stream whose last piece left a line open
        self._waiting = 0  # characters of a wait that is shown
        self._clock = LineClock()

    def line(self, text: str = "", *, strong: bool = False) -> None:
        """Print a line of a human-readable result; newlines are shown as `\\n`. Prints nothing in JSON mode."""
        if not self.as_json:
            _write(sys.stdout, _styled(harmless_line(text), BOLD, strong and self.colours.stdout))

    def paragraph(self, text: str, indent: str = "", *, strong: bool = False) -> None:
        """Print a sentence wrapped at 80 columns, later lines indented by two more. Very long words are shortened."""
        further = indent + "  "
        for line in textwrap.wrap(
            brief_line(text), WIDTH, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False
        ):
            self.line(line, strong=strong)

    def table(self, rows: Sequence[Sequence[str]], *, numbers: bool = False) -> None:
        """Print aligned columns. Very long cells are shortened.

        On a terminal that is too narrow, lines wrap between words. `numbers` right-aligns every column but the first.
        """
        rows = [[brief_line(cell, line=LONGEST_WORD) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = [
                cell.rjust(width) if numbers and column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            for line in folded("  ".join(cells).rstrip(), sys.stdout).split("\n"):
                self.line(line)

    def document(self, value: Mapping[str, Any]) -> None:
        """Print the single JSON document of a command. Prints nothing in human mode."""
        if self.as_json:
            _write(sys.stdout, _json(value))

    def record(self, value: Mapping[str, Any]) -> None:
        """Print one JSON line immediately, in both modes."""
        _write(sys.stdout, _json(value))

    def stream(self, text: str) -> None:
        """Print a piece of streamed text. It is exact unless stdout is a terminal. Prints nothing in JSON mode."""
        if not self.as_json:
            self._piece(sys.stdout, harmless(text) if sys.stdout.isatty() else text)

    def rendered(self, lines: Sequence[str]) -> None:
        """Print lines with escape codes that `commands/chat/renderer.py` has made from harmless text."""
        self.end_line()
        for line in lines:
            _write(sys.stdout, line)

    def clipboard(self, text: str) -> None:
        """Ask the terminal to copy a text to the clipboard with OSC 52, which also works over ssh."""
        _write(sys.stdout, f"\x1b]52;c;{base64.b64encode(text.encode(errors='replace')).decode()}\x07", end="")

    def reasoning(self, text: str) -> None:
        """Print a piece of streamed reasoning to stderr, dimmed. Prints nothing if stderr is silent."""
        if not self.silent:
            self._piece(sys.stderr, harmless(text), DIM if self.colours.stderr else "")

    def end_line(self) -> None:
        """End the line that the last streamed piece left open, if any."""
        stream, self._open = self._open, None
        if stream is not None:
            _write(stream, "")

    def forget_line(self) -> None:
        """Note that the user has ended the line that the last streamed piece left open."""
        self._open = None

    def new_line(self) -> None:
        """Move the terminal to a new line, after the ^C that it has echoed."""
        terminal = next((stream for stream in (sys.stderr, sys.stdout) if stream.isatty()), None)
        if terminal is not None:
            _write(terminal, "")

    def _piece(self, stream: TextIO, text: str, style: str = "") -> None:
        if not text:
            return
        if self._open is not stream:
            self.end_line()
        _write(stream, _styled(text, style, bool(style)), end="")
        self._open = None if text.endswith("\n") else stream

    @contextmanager
    def progress(self, label: str, note: Callable[[], str] = str) -> Iterator[Callable[[int, int], None]]:
        """Yield a callback (bytes done, total bytes) that shows progress, rate and remaining time.

        A terminal shows a bar, with other messages above it, or nothing if it cannot move its cursor. Elsewhere
        a line appears every 30 seconds.

        Args:
            note: Returns extra text for the bar, about what else is in progress.
        """
        if self.silent or not sys.stderr.isatty():
            with self._lines(label, lambda count: size_text(round(count))) as told:
                yield lambda done, total: told.update(done, total)
            return
        from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        with bar(label, self.colours.stderr, BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn()) as update:
            yield lambda done, total: update(completed=done, total=total, description=f"{brief_line(label)}{note()}")

    @contextmanager
    def counting(self, label: str) -> Iterator[Callable[[int, int, str], None]]:
        """Like `progress`, for countable items: yields a callback (done, total, text for the rate)."""
        if self.silent or not sys.stderr.isatty():
            with self._lines(label, "{:,}".format) as told:
                yield told.update
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

        rates = TextColumn("{task.fields[rate]}", markup=False)
        with bar(label, self.colours.stderr, BarColumn(), MofNCompleteColumn(), rates, TimeRemainingColumn()) as update:
            yield lambda done, total, rate: update(completed=done, total=total, rate=rate)

    @contextmanager
    def _lines(self, label: str, amount: Callable[[float], str]) -> Iterator[WorkProgress]:
        progress = WorkProgress(label, amount, duration_text)
        with nullcontext() if self.silent else reported_regularly(progress, self._print_progress):
            yield progress

    def _print_progress(self, text: str) -> bool:
        try:
            self.status(text)
        except (ReaderGone, OSError):  # stderr is closed or its disk is full: the command's next line reports that
            return False
        return True

    def compiling(self, waiting: bool) -> None:
        """Show on a terminal that kernels are being compiled, until it is called with False."""
        self.wait("compiling kernels …" if waiting else "")

    def wait(self, text: str) -> None:
        """Show what the command waits for: in place on a terminal, otherwise every 30 seconds. '' ends the wait."""
        if not sys.stderr.isatty() and self._clock.due(bool(text)):
            self.status(text)
        if self.silent or self._open is not None or not sys.stderr.isatty() or not (text or self._waiting):
            return
        _write(sys.stderr, f"\r{' ' * self._waiting}\r{_styled(text, DIM, bool(text) and self.colours.stderr)}", end="")
        self._waiting = len(text)

    def status(self, text: str) -> None:
        """Print what is in progress, or a measurement."""
        self._remark(brief_line(text), DIM)

    def log(self, text: str) -> None:
        """Print a line of a log for programs to stderr, even if nothing else is printed there. It is never cut."""
        _write(sys.stderr, harmless_line(text))

    def hint(self, text: str) -> None:
        """Print what to do next. Quote words for a shell with `shell_word`."""
        self._remark(_advice(text), DIM)

    def warning(self, text: str) -> None:
        """Print a warning."""
        self._remark(brief_line(f"warning: {text}"), YELLOW)

    def error(self, error: Dsv4Error) -> None:
        """Print the error that ends the command, and its remedy, in both modes."""
        _write(sys.stderr, _styled(brief_line(f"error: {error.message}"), RED, self.colours.stderr))
        for detail in error.details:
            _write(sys.stderr, f"  {brief_line(detail)}")
        if error.remedy:
            _write(sys.stderr, _advice(error.remedy))

    def _remark(self, text: str, style: str) -> None:
        if not self.silent:
            _write(sys.stderr, _styled(folded(text, sys.stderr), style, self.colours.stderr))


def stdout_columns() -> int:
    """Return the current width of stdout's terminal, or 80 if it is unknown."""
    return (os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else 0) or 80


def _write(stream: TextIO, text: str, end: str = "\n") -> None:
    try:
        print(text, file=stream, end=end, flush=True)
    except BrokenPipeError:
        raise ReaderGone from None
    except OSError as error:
        if error.errno == errno.EIO and stat.S_ISCHR(os.fstat(stream.fileno()).st_mode):  # a terminal that was closed
            raise ReaderGone from None
        raise


def _json(value: Mapping[str, Any]) -> str:
    # a stream of another encoding escapes what it lacks, not always as JSON does
    ascii_only = (sys.stdout.encoding or "").lower() not in ("utf-8", "utf8")
    return json.dumps(value, ensure_ascii=ascii_only, allow_nan=False).translate(ESCAPED)


def _styled(text: str, style: str, wanted: bool) -> str:
    return f"{style}{text}{RESET}" if wanted else text


def _advice(text: str) -> str:
    return brief_line(f"→ {text}", LONGEST_ADVICE, 2 * LONGEST_ADVICE)


def size_text(nbytes: int) -> str:
    """Format bytes in decimal units, as checkpoint publishers do: '159.61 GB', '7.35 MB', '334 B'."""
    for unit, value in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= value:
            return f"{nbytes / value:,.2f} {unit}"
    return f"{nbytes} B"


def count_text(count: int) -> str:
    """Format a number of parameters or tokens: '284.33B', '7.16M', '69,187'."""
    for unit, value in (("B", 10**9), ("M", 10**6)):
        if count >= value:
            return f"{count / value:,.2f}{unit}"
    return f"{count:,}"


def counted(count: int, noun: str) -> str:
    """Format a number with its noun: '1 file', '69,187 tensors'."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration_text(seconds: float) -> str:
    """Format a duration: '0.4 s', '12 s', '3 min 20 s', '2 h 05 min'."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
