"""The loop of `dsv4 chat`: a message or a command after the other, to the end."""

import typer

from dsv4cli.commands.chat.input import Input, InputLost
from dsv4cli.commands.chat.slash import run_slash_command
from dsv4cli.commands.chat.turn import Chat
from dsv4cli.errors import Dsv4Error, RankLost
from dsv4cli.output import counted


def converse(chat: Chat, source: Input, question: str | None) -> None:
    """Reads and answers to the end, first the question, if there is one, and elsewhere than on a terminal only that.

    Exits with 130 when it was Ctrl-C, and in a pipe as the last error would.
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
    """What follows Ctrl-C in a turn: what was typed or pasted meanwhile is not asked in its place."""
    if not chat.on_terminal:
        raise typer.Exit(130)
    source.drop()


def greet(chat: Chat) -> None:
    """What a conversation begins with on a terminal."""
    if chat.session.messages:
        chat.out.status(f"continuing after {counted(len(chat.session.messages), 'message')}; /history shows them")
    if chat.on_terminal:
        chat.out.status("/help lists the commands; Ctrl-D quits")


def _take(chat: Chat, line: str, edited: bool) -> None:
    """A message or a command of the user; edited: a message takes the place of the last question."""
    before = list(chat.session.messages)
    question: str | None = line
    if line.startswith("/"):
        question = run_slash_command(chat, line)
    if question is not None and question.strip():
        if edited:
            chat.session.take_back()
        chat.ask(question, before)
