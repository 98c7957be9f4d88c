"""Start of a session of `dsv4 chat`: a new one, the last one, one from the list, or one from a file."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import typer

from dsv4cli.commands.chat.journal import SessionChoices, SessionJournal, find_journal, session_rows
from dsv4cli.commands.chat.session import Session
from dsv4cli.commands.chat.tools import read_tools
from dsv4cli.errors import UsageError
from dsv4cli.options import is_given
from dsv4cli.output import Output


class Beginning(NamedTuple):
    """How to start a session.

    Attributes:
        folder: Folder of the journals.
        go_on: Continue the last session.
        resume: Number or name of the session to continue.
        file: File of the conversation to continue.
        listed: Only list the sessions.
    """

    folder: Path
    go_on: bool
    resume: str | None
    file: Path | None
    listed: bool


def begin_session(
    out: Output, begin: Beginning, system: str | None, tools: Path | None, given: dict[str, Any]
) -> Session:
    """Return the session to start with, with `given` choices replacing its own.

    Raises UsageError. Exits after listing, if only a list was requested.
    """
    if begin.listed:
        _list_sessions(out, begin.folder)
    options = {"--continue": begin.go_on, "--resume": begin.resume is not None, "--session": begin.file is not None}
    names = [name for name, chosen in options.items() if chosen]
    if len(names) > 1:
        raise UsageError(f"{names[0]} and {names[1]} cannot be combined", "use one of them")
    session, file = Session(SessionJournal(begin.folder), begin.file), begin.file
    if begin.go_on or begin.resume is not None:
        session.take_up(find_journal(begin.folder, "1" if begin.resume is None else begin.resume))
    elif file is not None and file.exists():
        if not file.is_file():
            raise UsageError(
                f"--session {file} is not a file", "use another file, or use --continue for the last session"
            )
        session.load_file(file)
    elif file is not None and not file.parent.is_dir():
        raise UsageError(
            f"cannot write {file}: the folder {file.parent} does not exist", "create it, or use another file"
        )
    session.choices = replace(session.choices, **given)
    if system is not None:
        session.system = system
    if tools is not None:
        session.tools = read_tools(tools)
    return session


def given_choices(context: typer.Context, choices: SessionChoices) -> dict[str, Any]:
    """Return the choices that were set on the command line."""
    return {name: value for name, value in asdict(choices).items() if is_given(context, name)}


def _list_sessions(out: Output, folder: Path) -> NoReturn:
    """Print the sessions and exit."""
    rows = session_rows(folder)
    if rows:
        out.table(rows)
        out.hint("to continue a session: dsv4 chat --resume NUMBER")
    else:
        out.status(f"there are no sessions in {folder} yet")
    raise typer.Exit
