"""The main loop of `dsv4 chat`: reads messages and commands until the end."""

import typer

from dsv4cli.commands.chat.input import InputLost
from dsv4cli.commands.chat.slash import Draft, run_slash_command
from dsv4cli.commands.chat.turn import Chat
from dsv4cli.errors import Dsv4Error, RankLost
from dsv4cli.output import counted


def converse(chat: Chat, question: str | None) -> None:
    """Run the conversation until the input ends, starting with the question, if any.

    Without a terminal, a question is answered alone. Exits with 130 after Ctrl-C; without a terminal, exits with the
    code of the last error.
    """
    code, asked, draft = 0, question, None
    while question is None or asked is not None or chat.view.on_terminal:
        edited, draft, chat.interrupts.stopped = draft, None, False
        try:
            line, asked = (chat.source.read(edited or "") if asked is None else asked), None
            draft = _take(chat, line, edited=edited is not None)
        except EOFError:
            break
        except (RankLost, InputLost):
            raise
        except Dsv4Error as error:
            if chat.interrupts.leaving:
                raise
            chat.out.error(error)
            code = error.exit_code
        except KeyboardInterrupt:
            if chat.interrupts.leaving or chat.interrupts.again() or not chat.view.on_terminal:
                raise
            kept = "nothing changed; " if edited is not None else ""
            chat.out.status(f"{kept}Ctrl-C again, or Ctrl-D, quits")
        if chat.interrupts.stopped:
            _stop(chat)
    if code and not chat.view.on_terminal:
        raise typer.Exit(code)


def _stop(chat: Chat) -> None:
    """After Ctrl-C in a turn, discard what was typed or pasted meanwhile."""
    if not chat.view.on_terminal:
        raise typer.Exit(130)
    chat.source.drop()


def greet(chat: Chat) -> None:
    """Print the first lines of a conversation."""
    if chat.session.messages:
        chat.out.status(f"continuing after {counted(len(chat.session.messages), 'message')}; /history shows them")
    if chat.view.on_terminal:
        chat.out.status("/help lists the commands; Ctrl-D quits")


def _take(chat: Chat, line: str, edited: bool) -> str | None:
    """Handle a message or a command. Return the text that the next input starts with, if a command asks for one.

    Args:
        edited: a message replaces the last question.
    """
    before = list(chat.session.messages)
    question: str | Draft | None = line
    if line.startswith("/"):
        question = run_slash_command(chat, line)
    if isinstance(question, Draft):
        return question.text
    if question is not None and question.strip():
        if edited:
            chat.session.take_back()
        chat.ask(question, before)
    return None
