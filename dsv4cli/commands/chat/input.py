"""Input sources of `dsv4 chat`: lines of a pipe, a plain terminal, or prompt_toolkit's editor.

Input is read between turns only. The model runs in the main thread, where Ctrl-C arrives as a signal. Keys typed
during an answer are not echoed and wait in the terminal for the next input. So typing never waits for the model, and
no second thread writes into an answer.
"""

import sys
from typing import Protocol

from dsv4cli.commands.terminal import drop_typed_ahead
from dsv4cli.errors import UsageError
from dsv4cli.output import Output

PROMPT, MORE = "> ", ". "
QUOTES = '"""'
# the character of Ctrl-D
END_KEY = "\x04"


class InputLost(UsageError):
    """The input can no longer be read."""


class Input(Protocol):
    """A source of messages. `edits`: whether it can start with a draft."""

    edits: bool

    def read(self, draft: str) -> str:
        """Read the next message, with `draft` as its initial text. Ctrl-C discards the draft.

        Raises EOFError at the end, KeyboardInterrupt on Ctrl-C, InputLost, and UsageError for invalid encoding.
        """

    def collect(self) -> None:
        """Read keys typed during an answer from the terminal's buffer: once that is full, Ctrl-C would not arrive."""

    def drop(self) -> None:
        """Discard what was typed ahead on a terminal."""


class Lines:
    """Messages from a pipe or a file, one per line."""

    edits = False

    def read(self, draft: str) -> str:
        """Return the next line. The draft is ignored, because nobody can edit it."""
        from dsv4cli.engine.text.inputs import decoded

        try:
            line = sys.stdin.buffer.readline() if sys.stdin is not None else b""
        except OSError as error:  # nohup opens stdin for writing only
            raise InputLost(f"cannot read stdin: {error.strerror}", "pass the question as an argument") from None
        if not line:
            raise EOFError
        return decoded(line, "stdin").removesuffix("\n").removesuffix("\r")

    def collect(self) -> None:
        """Do nothing: the lines wait in the pipe."""

    def drop(self) -> None:
        """Do nothing: the lines of a pipe were not typed ahead."""


class Plain:
    """Input from a terminal without prompt_toolkit: one line, or several between triple quotes."""

    edits = False

    def __init__(self, out: Output) -> None:
        self._out = out

    def read(self, draft: str) -> str:
        """Return the next message."""
        try:
            text = self._line(PROMPT, draft)
            while open_quotes(text):
                text += "\n" + self._line(MORE, "")
        except (EOFError, KeyboardInterrupt):  # the prompt's line has not ended
            self._out.forget_line()
            self._out.new_line()
            raise
        except UnicodeDecodeError as error:
            raise UsageError(f"the input is not valid {error.encoding}", "set the terminal to this encoding") from None
        return unquoted(text)

    def collect(self) -> None:
        """Do nothing: the lines wait in the terminal's buffer, which holds 4 KiB."""

    def drop(self) -> None:
        """Discard the lines that wait in the terminal."""
        drop_typed_ahead()

    def _line(self, prompt: str, draft: str) -> str:
        if sys.stdout.isatty():
            self._out.stream(prompt)
        line = sys.stdin.readline()
        self._out.forget_line()  # the terminal has echoed the line break
        if not line or END_KEY in line:  # Ctrl-D is a character if it was typed ahead
            raise EOFError
        return line.removesuffix("\n")


class Readline(Plain):
    """`Plain` with the keys of Python's readline. Raises ImportError if Python has none."""

    edits = True

    def __init__(self, out: Output) -> None:
        import readline

        super().__init__(out)
        self._readline = readline

    def _line(self, prompt: str, draft: str) -> str:
        self._readline.set_startup_hook(lambda: self._readline.insert_text(draft))
        try:
            return input(prompt)
        finally:
            self._readline.set_startup_hook()


def open_quotes(text: str) -> bool:
    """Return whether a message starts with triple quotes that are not closed."""
    return text.startswith(QUOTES) and QUOTES not in text[len(QUOTES) :]


def unquoted(text: str) -> str:
    """Return the text between triple quotes; any other message unchanged."""
    if not text.startswith(QUOTES):
        return text
    return text[len(QUOTES) :].rstrip().removesuffix(QUOTES).strip("\n")
