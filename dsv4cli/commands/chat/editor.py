"""Line editor of `dsv4 chat` for terminals with cursor control: prompt_toolkit with the key bindings of chat."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input.typeahead import clear_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from dsv4cli.commands.chat.input import MORE, PROMPT, open_quotes, unquoted
from dsv4cli.commands.chat.interrupts import Interrupts
from dsv4cli.commands.terminal import drop_typed_ahead, in_foreground, mark_pastes


class Editor:
    """Reads messages with prompt_toolkit.

    Supports history with Ctrl-R, several lines by Alt-Enter or between triple quotes, pasting as one message,
    completion of slash commands, and the user's own editor by Ctrl-X Ctrl-E.
    """

    edits = True

    def __init__(self, history: Path | None, commands: Mapping[str, str], interrupts: Interrupts) -> None:
        """Create the editor.

        Args:
            history: History file; None keeps no history file.
            commands: Help text of each slash command.
        """
        self._interrupts, self._draft = interrupts, ""
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=MORE,
            history=_history(history),
            completer=SlashCompleter(commands),
            complete_while_typing=False,
            reserve_space_for_menu=4,
            enable_open_in_editor=True,
            enable_suspend=True,
            tempfile_suffix=".md",
            key_bindings=_keys(self._clears),
        )

    def read(self, draft: str) -> str:
        """Read the next message, starting with `draft`. Raises EOFError at the end, KeyboardInterrupt on Ctrl-C."""
        self._draft = draft
        try:
            return unquoted(self._session.prompt(default=draft))
        finally:
            mark_pastes()  # the editor has disabled bracketed paste

    def collect(self) -> None:
        """Read keys typed during an answer from the terminal's buffer: once that is full, Ctrl-C would not arrive."""
        source = self._session.app.input
        while in_foreground() and (keys := source.read_keys()):
            store_typeahead(source, keys)

    def drop(self) -> None:
        """Discard keys typed ahead, including those typed after the last message was sent."""
        clear_typeahead(self._session.app.input)
        drop_typed_ahead()

    def _clears(self, text: str) -> bool:
        """Return whether Ctrl-C only clears the line. A draft or a second Ctrl-C raises KeyboardInterrupt instead."""
        return bool(text) and not self._draft and not self._interrupts.again()


def _keys(clears: Callable[[str], bool]) -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter", filter=has_focus(DEFAULT_BUFFER))
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if open_quotes(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=has_focus(DEFAULT_BUFFER))
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if clears(buffer.text):
            buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys


class SlashCompleter(Completer):
    """Completes slash commands at the start of a message, and file names after commands that take a file."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        self._commands = commands

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Yield the completions at the cursor."""
        text = document.text_before_cursor
        if not text.startswith("/"):
            return
        command, space, rest = text[1:].partition(" ")
        if not space:
            for name, help_text in self._commands.items():
                if name.startswith(command):
                    yield Completion(name, start_position=-len(command), display_meta=help_text)
        elif command in ("read", "save", "load"):
            yield from _files(rest)


def _files(text: str) -> Iterator[Completion]:
    """Yield the files that complete a path, quoted if it contains a space."""
    quote = text[:1] if text[:1] in ("'", '"') else ""
    folder, slash, beginning = text.removeprefix(quote).rpartition("/")
    try:
        entries = sorted(Path(f"{folder}{slash}" or ".").expanduser().iterdir())
    except (OSError, RuntimeError, ValueError):
        return
    for entry in entries:
        if entry.name.startswith(beginning) and (beginning or not entry.name.startswith(".")):
            path, is_folder = f"{folder}{slash}{entry.name}", entry.is_dir()
            mark = quote or ('"' if " " in path else "")
            shown = f"{entry.name}/" if is_folder else entry.name
            yield Completion(f"{mark}{path}{'/' if is_folder else mark}", start_position=-len(text), display=shown)


class _Private(FileHistory):
    """A history file that skips messages beginning with a space."""

    def store_string(self, string: str) -> None:
        """Append a message to the file. Write errors are ignored here, because saving the session reports them."""
        if not string.startswith(" "):
            with suppress(OSError):
                super().store_string(string)


def _history(path: Path | None) -> History:
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        path.chmod(0o600)
    except OSError:  # saving the journal reports the error
        return InMemoryHistory()
    return _Private(str(path))
