"""`dsv4 chat`: a conversation, on a terminal or through pipes."""

import math
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from dsv4cli.commands.chat.begin import Beginning, begin_session, given_choices
from dsv4cli.commands.chat.input import Input, Lines, Plain, Readline
from dsv4cli.commands.chat.journal import SessionChoices, state_folder
from dsv4cli.commands.chat.loop import converse, greet
from dsv4cli.commands.chat.model import Models, find_model, model_name
from dsv4cli.commands.chat.session import Session
from dsv4cli.commands.chat.settings import check_budget
from dsv4cli.commands.chat.slash import helps
from dsv4cli.commands.chat.tools import Tools, split_command
from dsv4cli.commands.chat.turn import Chat, Interrupts
from dsv4cli.commands.compiling import early_compiler
from dsv4cli.commands.job import Job, open_job
from dsv4cli.commands.terminal import keys_wait
from dsv4cli.errors import UsageError
from dsv4cli.options import ModelOptions, SystemOpt, TorchrunOpt, takes_model_options
from dsv4cli.output import Output

QuestionArg = Annotated[
    str | None,
    typer.Argument(help="A question to ask first. On a terminal the conversation goes on after it, elsewhere it ends."),
]
ContinueOpt = Annotated[bool, typer.Option("--continue", "-c", help="Continue the last session.")]
ResumeOpt = Annotated[
    str | None,
    typer.Option("--resume", "-r", metavar="WHICH", help="Continue a session of --sessions, by its number or name."),
]
SessionsOpt = Annotated[bool, typer.Option("--sessions", help="List the sessions, the newest first, and exit.")]
SessionOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json", help="Continue with the messages of this file, if it exists, and keep it up to date."
    ),
]
ThinkBudgetOpt = Annotated[
    int | None,
    typer.Option(
        help="The most tokens of thinking; then the model must answer. If absent, only the answer's limits count."
    ),
]
ToolsOpt = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Tools to offer, as in the OpenAI API; you type the results.")
]
ToolExecOpt = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND",
        help="A program that carries out calls: it reads {name, arguments} as JSON and prints text or JSON.",
    ),
]
ToolTimeoutOpt = Annotated[float, typer.Option(help="The most seconds that a call may take.")]
YesOpt = Annotated[bool, typer.Option("--yes", help="Run --tool-exec without asking.")]
MaxRoundsOpt = Annotated[
    int, typer.Option(min=1, help="Rounds of calls in a turn; after them --yes asks nevertheless, or ends the answer.")
]
ShowThinkingOpt = Annotated[bool, typer.Option("--show-thinking", help="Show reasoning as it comes, not in one line.")]
NoMarkdownOpt = Annotated[
    bool, typer.Option("--no-markdown", help="Show answers as the model writes them, on a terminal too.")
]
NoHistoryOpt = Annotated[bool, typer.Option("--no-history", help="Keep no history of inputs.")]
ChatTpOpt = Annotated[
    int | None, typer.Option("--tp", min=1, help="Processes of this machine that share the model, one GPU each.")
]
StateHomeOpt = Annotated[Path | None, typer.Option(envvar="XDG_STATE_HOME", hidden=True)]
TermOpt = Annotated[str, typer.Option(envvar="TERM", hidden=True)]


@takes_model_options(system="model", think_budget="think", tp="backend", torchrun="host_memory")
def chat(
    context: typer.Context,
    options: ModelOptions,
    question: QuestionArg = None,
    system: SystemOpt = None,
    go_on: ContinueOpt = False,
    resume: ResumeOpt = None,
    sessions: SessionsOpt = False,
    session: SessionOpt = None,
    think_budget: ThinkBudgetOpt = None,
    show_thinking: ShowThinkingOpt = False,
    tools: ToolsOpt = None,
    tool_exec: ToolExecOpt = None,
    tool_timeout: ToolTimeoutOpt = 60.0,
    yes: YesOpt = False,
    max_rounds: MaxRoundsOpt = 25,
    no_markdown: NoMarkdownOpt = False,
    no_history: NoHistoryOpt = False,
    tp: ChatTpOpt = None,
    torchrun: TorchrunOpt = None,
    state_home: StateHomeOpt = None,
    term: TermOpt = "dumb",
) -> None:
    """Conversation with the model, as long as you like.

    On a terminal it edits lines, keeps a history and renders Markdown; /help lists its commands. Ctrl-C stops an
    answer, twice it quits. Piped lines are questions; the exit code is that of the last error. Later,
    --continue continues the session.
    """
    out, state = Output(context.obj), state_folder(state_home)
    _check(options.device, torchrun, question)
    given = given_choices(context, SessionChoices(options.model, options.think, options.temperature, options.top_p))
    begun = begin_session(out, Beginning(state / "sessions", go_on, resume, session, sessions), system, tools, given)
    compiler = early_compiler(options)
    job = replace(_job(out, begun, "model" in given, options), compiler=compiler)
    display = Display(check_budget(think_budget), show_thinking, not no_markdown, term, question)
    _start(job, tp or 1, begun, display, _calls(tool_exec, tool_timeout, yes, max_rounds), _history(state, no_history))


def _history(state: Path, none: bool) -> Path | None:
    return None if none else state / "history"


def _check(device: str, torchrun: str | None, question: str | None) -> None:
    from dsv4cli.engine.settings import check_device

    check_device(device)
    if torchrun is not None:
        raise UsageError("chat starts its ranks itself, on one machine", "leave out torchrun and give --tp")
    if question is not None and not question.strip():
        raise UsageError("the question is empty", 'ask something: dsv4 chat "What is 17 + 25?"')


def _job(out: Output, session: Session, named: bool, options: ModelOptions) -> Job:
    """What is to be loaded, as the session asks for it; named: the model, on the command line. Raises Dsv4Error."""
    find = partial(find_model, kept=not named and bool(session.messages))
    job = open_job(out, replace(options, **asdict(session.choices)), find=find)
    session.choices = replace(session.choices, model=model_name(job.source))
    return job


class Display(NamedTuple):
    """How a conversation is led and shown."""

    think_budget: int | None
    show_thinking: bool
    markdown: bool
    term: str
    question: str | None


class CallOptions(NamedTuple):
    """How calls are carried out."""

    command: list[str]
    seconds: float
    ask_first: bool
    rounds: int


def _start(job: Job, ranks: int, session: Session, display: Display, calls: CallOptions, history: Path | None) -> None:
    """Loads the model and leads the conversation."""
    terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    with Models(job, ranks) as models:
        with keys_wait():
            conversation = models.open()
            chat = Chat(
                job.out, job.source.name, conversation, session, job.sampling, Interrupts(), on_terminal=terminal
            )
            del conversation  # the chat has it alone, for /model to free
            chat.think_budget, chat.show_thinking = display.think_budget, display.show_thinking
            chat.markdown = display.markdown and sys.stdout.isatty() and display.term != "dumb"
            chat.copies = terminal and display.term != "dumb"
            chat.change_model = partial(models.change, chat)
            source = _input(chat, display.term, history)
            chat.edits = source.edits
            chat.run_calls = Tools(job.out, source, *calls).run
            greet(chat)
        converse(chat, source, display.question)


def _calls(tool_exec: str | None, seconds: float, yes: bool, rounds: int) -> CallOptions:
    """How calls are carried out. Raises UsageError, also where it needs a word of consent and nobody can give it."""
    from dsv4cli.engine.settings import require

    require(0 < seconds < math.inf, "--tool-timeout", seconds, "use more than 0 seconds")
    if tool_exec is None:
        return CallOptions([], seconds, not yes, rounds)
    if not yes and (sys.stdin is None or not sys.stdin.isatty()):
        raise UsageError("--tool-exec asks before each call, and there is no terminal", "add --yes")
    return CallOptions(split_command(tool_exec), seconds, not yes, rounds)


def _input(chat: Chat, term: str, history: Path | None) -> Input:
    """The best way to read messages that there is here."""
    if sys.stdin is None or not sys.stdin.isatty():
        return Lines()
    if not chat.on_terminal or term == "dumb":
        return Plain(chat.out)
    try:
        from dsv4cli.commands.chat.editor import Editor
    except ImportError:
        chat.out.hint("pip install prompt_toolkit gives this prompt a history and an editor")
        return _readline(chat.out)
    return Editor(history, helps(), chat.interrupts)


def _readline(out: Output) -> Input:
    try:
        return Readline(out)
    except ImportError:
        return Plain(out)
