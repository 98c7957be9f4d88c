"""The slash commands of `dsv4 chat`: their table, and the commands that change the conversation."""

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from dsv4cli.commands.chat import settings as settings
from dsv4cli.commands.chat import show_commands as show_commands
from dsv4cli.commands.chat.journal import find_journal, session_rows
from dsv4cli.commands.chat.session import Session
from dsv4cli.commands.chat.turn import Chat
from dsv4cli.errors import UsageError
from dsv4cli.output import counted

# a file name, quoted if it has spaces, then the rest of the line
FILE = re.compile(r"""("[^"]+"|'[^']+'|\S*)\s*(.*)""", re.DOTALL)
QUOTED = re.compile(r"""(["'])(.+)\1""")
# number of newest sessions to list
MOST_SESSIONS = 20


class Draft(NamedTuple):
    """The text that the next input starts with."""

    text: str


class Slash(NamedTuple):
    """A slash command.

    Attributes:
        arguments: As help shows them.
        function: Runs the command. A returned text is sent to the model as a question; a draft is edited first.
        other_names: Aliases.
    """

    arguments: str
    help: str
    function: Callable[[Chat, str], str | Draft | None]
    other_names: tuple[str, ...] = ()


def run_slash_command(chat: Chat, line: str) -> str | Draft | None:
    """Run a line that begins with a slash. Return the question to send to the model or to edit, if any.

    `//text` is the question `/text`. Raises UsageError, and EOFError to quit.
    """
    if line.startswith("//"):
        return line[1:]
    name, *rest = re.split(r"\s", line[1:], maxsplit=1)
    argument = "".join(rest).strip()
    command = _command(name)
    if argument and not command.arguments:
        raise UsageError(f"/{name} takes no argument", f"use /{name} alone")
    return command.function(chat, argument)


def _command(name: str) -> Slash:
    """Return the command with a name or an alias. Raises UsageError."""
    names = helps()
    if name not in names:
        near = get_close_matches(name, names, 1, 0.5) or [one for one in names if name and one.startswith(name)]
        remedy = f"did you mean /{near[0]}? " if near else ""
        raise UsageError(
            f"there is no command /{name}", f"{remedy}type /help for the list; start a question with // to send a slash"
        )
    return next(one for first, one in COMMANDS.items() if name in (first, *one.other_names))


def helps() -> dict[str, str]:
    """Return the help text of every command name and alias."""
    return {name: one.help for first, one in COMMANDS.items() for name in (first, *one.other_names)}


def _help(chat: Chat, name: str) -> None:
    command = _command(name.removeprefix("/")) if name else None
    chosen = {first: one for first, one in COMMANDS.items() if command in (None, one)}
    chat.out.table([[f"/{first} {one.arguments}".rstrip(), _help_text(one)] for first, one in chosen.items()])
    if command is None:
        chat.out.table([[line] for line in (*KEYS, *(EDITOR_KEYS if chat.source.edits else ()))])


def _help_text(command: Slash) -> str:
    other = ", ".join(f"/{name}" for name in command.other_names)
    return f"{command.help} Also {other}." if other else command.help


def _new(chat: Chat, _: str) -> None:
    kept, file = chat.session.journal.name, chat.session.file
    chat.session.begin_anew()
    chat.out.status(
        ("a new session" + ("; the system message stays" if chat.session.system else ""))
        + (f"; to return to the previous one, use /resume {kept}" if kept else "")
        + (f"; {file} is not changed" if file else "")
    )


def _sessions(chat: Chat, _: str) -> None:
    rows = session_rows(chat.session.journal.folder, MOST_SESSIONS)
    if not rows:
        chat.out.status("there are no sessions yet")
        return
    chat.out.table(rows)
    chat.out.status("to continue a session, use /resume NUMBER")


def _resume(chat: Chat, which: str) -> None:
    if not which:
        raise UsageError("/resume needs the number of a session", "use /sessions to list them")
    choices = chat.session.choices
    chat.session.take_up(find_journal(chat.session.journal.folder, which, "/sessions"))
    chat.session.choices, chat.window.left_out = choices, 0  # keep the current settings
    chat.out.status(f"continuing after {counted(len(chat.session.messages), 'message')}; /history shows them")


def _exit(chat: Chat, _: str) -> None:
    raise EOFError


def _clear(chat: Chat, _: str) -> None:
    chat.session.clear()
    chat.save()
    chat.out.status("conversation cleared" + ("; the system message stays" if chat.session.system else ""))


def _undo(chat: Chat, _: str) -> None:
    question = chat.session.take_back()
    chat.save()
    chat.out.status(f"removed: {show_commands.excerpt(question)}")


def _retry(chat: Chat, _: str) -> str | None:
    if not chat.session.has_results():
        return chat.session.take_back()
    chat.answer_again()
    return None


def _edit(chat: Chat, text: str) -> str | Draft | None:
    if text:
        chat.session.take_back()
    elif chat.source.edits:
        question = chat.session.last_question()
        return Draft(f"/{question}" if question.startswith("/") else question)
    else:
        raise UsageError("the line editor is not available", "type the new text after /edit")
    return text or None


def _read(chat: Chat, words: str) -> str:
    from dsv4cli.engine.text.inputs import read_text

    found = FILE.match(words)
    assert found is not None
    text = read_text(_path(found[1])).removesuffix("\n")
    return "\n\n".join(part for part in (found[2], text) if part)


def _save(chat: Chat, name: str) -> None:
    path = _path(name)
    _check_replaceable(chat, path)
    try:
        chat.session.write_file(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", "use another file") from None
    chat.out.status(f"saved {counted(len(chat.session.messages), 'message')} to {path}")


def _check_replaceable(chat: Chat, path: Path) -> None:
    """Raise UsageError if a file exists that is not a conversation, so that a typo cannot destroy it."""
    own = chat.session.file is not None and path.resolve() == chat.session.file.resolve()
    if own or not path.is_file() or not path.stat().st_size:
        return
    try:
        Session(chat.session.journal).load_file(path)
    except UsageError:
        raise UsageError(f"{path} exists and is not a conversation", "use another name, or remove it") from None


def _load(chat: Chat, name: str) -> None:
    chat.session.load_file(_path(name))
    chat.window.left_out = 0
    chat.save()
    chat.out.status(f"loaded {counted(len(chat.session.messages), 'message')} from {name}")


KEYS = (
    'For a message of several lines, press Alt-Enter or put it between """ and """. //text sends /text.',
    "Ctrl-C stops an answer or clears the line; twice quits, as Ctrl-D does.",
)
EDITOR_KEYS = ("Ctrl-R searches the history, Tab completes a command, Ctrl-X Ctrl-E opens $EDITOR and sends its text.",)


def _path(name: str) -> Path:
    """Return the path in a command's argument, which may be quoted. Raises UsageError if it is missing, or is `-`."""
    quoted = QUOTED.fullmatch(name)
    name = quoted[2] if quoted else name
    if not name:
        raise UsageError("the file name is missing", "type it after the command")
    if name == "-" or "\0" in name:
        raise UsageError(f"{name!r} is not a file name", "use another name")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # ~name of an unknown user
        raise UsageError(f"{name} is not a path: {error}", "use the full path") from None


COMMANDS: Mapping[str, Slash] = {
    "help": Slash("[COMMAND]", "Show all commands, or one.", _help),
    "undo": Slash("", "Remove the last question and its answer.", _undo),
    "retry": Slash("", "Ask the last question again.", _retry, ("regenerate",)),
    "edit": Slash("[TEXT]", "Replace the last question with TEXT, or edit it.", _edit),
    "clear": Slash("", "Clear the conversation; keep the system message.", _clear),
    "new": Slash("", "Start a new session; this one stays saved.", _new),
    "sessions": Slash("", f"List the last {MOST_SESSIONS} sessions.", _sessions),
    "resume": Slash("NUMBER", "Continue a session of that list.", _resume),
    "history": Slash("", "Show the conversation.", show_commands.show_history),
    "model": Slash("[MODEL]", "Show the model, or switch to another one.", settings.model),
    "system": Slash("[TEXT]", "Show or set the system message.", settings.system),
    "think": Slash("[LEVEL]", "Show or set the reasoning effort: off, low, high, max.", settings.think),
    "show-thinking": Slash(
        "[on|off]", "Stream reasoning or hide it; without argument, show the last reasoning.", settings.show_thinking
    ),
    "set": Slash("[NAME=VALUE]", f"Show or set {', '.join(settings.SETTINGS)}.", settings.set_value),
    "read": Slash("FILE [QUESTION]", "Ask a question followed by the text of a file. Quote a name with spaces.", _read),
    "save": Slash("FILE", "Write the conversation as JSON messages.", _save),
    "load": Slash("FILE", "Replace the conversation with one from a file of JSON messages.", _load),
    "json": Slash("", "Print the conversation as JSON messages.", show_commands.show_json),
    "copy": Slash("", "Copy the last answer to the terminal's clipboard.", show_commands.copy),
    "stats": Slash("", "Show token counts and speed of this session.", show_commands.show_stats),
    "tokens": Slash("[TEXT]", "Show the tokens of a text, or of each message.", show_commands.show_tokens),
    "context": Slash("", "Show how much of the context is used.", show_commands.show_context),
    "exit": Slash("", "Quit; to continue this session later, use --continue.", _exit, ("quit", "bye")),
}
