"""The main loop of `dsv4 chat`: reads messages and commands until the end."""

import typer

from dsv4cli.commands.chat.input import Input, InputLost
from dsv4cli.commands.chat.slash import run_slash_command
from dsv4cli.commands.chat.turn import Chat
from dsv4cli.errors import Dsv4Error, RankLost
from dsv4cli.output import counted


def converse(chat: Chat, source: Input, question: str | None) -> None:
    """Run the conversation until the input ends, starting with the question, if any.

    Without a terminal, a question is answered alone. Exits with 130 after Ctrl-C; without a terminal, exits with the
    code of the last error.
    """
    code, asked = 0, question
    while question is None or asked is not None or chat.on_terminal:
        draft, chat.draft, chat.stopped = chat.draft, None, False
        try:
            line, asked = (source.read(draft or "") if asked is None else asked), None
            _take(chat, line, edited=draft is not None)
        except EOFError:
            break
        except (RankLost, InputLost):
            raise
        except Dsv4Error as error:
            if chat.leaving:
                raise
            chat.out.error(error)
            code = error.exit_code
        except KeyboardInterrupt:
            if chat.leaving or chat.interrupts.again() or not chat.on_terminal:
                raise
            kept = "nothing changed; " if draft is not None else ""
            chat.out.status(f"{kept}Ctrl-C again, or Ctrl-D, quits")
        if chat.stopped:
            _stop(chat, source)
    if code and not chat.on_terminal:
        raise typer.Exit(code)


def _stop(chat: Chat, source: Input) -> None:
    """After Ctrl-C in a turn, discard what was typed or pasted meanwhile."""
    if not chat.on_terminal:
        raise typer.Exit(130)
    source.drop()


def greet(chat: Chat) -> None:
    """Print the first lines of a conversation."""
    if chat.session.messages:
        chat.out.status(f"continuing after {counted(len(chat.session.messages), 'message')}; /history shows them")
    if chat.on_terminal:
        chat.out.status("/help lists the commands; Ctrl-D quits")


def _take(chat: Chat, line: str, edited: bool) -> None:
    """Handle a message or a command. edited: a message replaces the last question."""
    before = list(chat.session.messages)
    question: str | None = line
    if line.startswith("/"):
        question = run_slash_command(chat, line)
    if question is not None and question.strip():
        if edited:
            chat.session.take_back()
        chat.ask(question, before)
