"""`dsv4 chat`: a conversation, on a terminal or through pipes."""

import math
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from dsv4cli.commands.chat_input import Input, Lines, Plain, Readline
from dsv4cli.commands.chat_ranks import open_talk
from dsv4cli.commands.chat_session import Journal, Session, newest_journal, read_journal, state_folder
from dsv4cli.commands.chat_slash import COMMANDS, check_budget, obey
from dsv4cli.commands.chat_tools import Tools, read_tools, split_command
from dsv4cli.commands.chat_turn import Chat, Interrupts
from dsv4cli.commands.run_experts import memory_limits
from dsv4cli.commands.run_modes import Job
from dsv4cli.errors import Dsv4Error, RankLost, UsageError
from dsv4cli.options import (
    BackendOpt,
    DeviceOpt,
    DtypeOpt,
    GpuMemoryOpt,
    HostMemoryOpt,
    MaxContextOpt,
    MaxTokensOpt,
    ModelOpt,
    PrefillChunkOpt,
    SeedOpt,
    SpecialTokensOpt,
    StopOpt,
    SystemOpt,
    TemperatureOpt,
    ThinkOpt,
    TopPOpt,
    TorchrunOpt,
)
from dsv4cli.output import Output, counted

ContinueOpt = Annotated[bool, typer.Option("--continue", "-c", help="Go on with the session that was last.")]
SessionOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json", help="Go on with the messages of this file, if it is there, and keep it up to date."
    ),
]
ThinkBudgetOpt = Annotated[
    int | None, typer.Option(help="The most tokens of thinking; then the model has to answer. Without it: its limit.")
]
ToolsOpt = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Tools to offer, as in the OpenAI API; you give the results.")
]
ToolExecOpt = Annotated[
    str | None,
    typer.Option(metavar="COMMAND", help="Carries out calls: gets {name, arguments} as JSON and prints JSON."),
]
ToolTimeoutOpt = Annotated[float, typer.Option(help="The most seconds of a call.")]
YesOpt = Annotated[bool, typer.Option("--yes", help="Run --tool-exec without asking.")]
ShowThinkingOpt = Annotated[bool, typer.Option("--show-thinking", help="Show reasoning as it comes, not in one line.")]
NoMarkdownOpt = Annotated[
    bool, typer.Option("--no-markdown", help="Show answers as they are written, also on a terminal.")
]
NoHistoryOpt = Annotated[bool, typer.Option("--no-history", help="Keep no history of inputs.")]
ChatTpOpt = Annotated[
    int | None, typer.Option("--tp", min=1, help="Processes of this machine that share the model, one GPU each.")
]
StateHomeOpt = Annotated[Path | None, typer.Option(envvar="XDG_STATE_HOME", hidden=True)]
TermOpt = Annotated[str, typer.Option(envvar="TERM", hidden=True)]


def chat(
    context: typer.Context,
    model: ModelOpt = "nano",
    system: SystemOpt = None,
    go_on: ContinueOpt = False,
    session: SessionOpt = None,
    think: ThinkOpt = "off",
    think_budget: ThinkBudgetOpt = None,
    show_thinking: ShowThinkingOpt = False,
    tools: ToolsOpt = None,
    tool_exec: ToolExecOpt = None,
    tool_timeout: ToolTimeoutOpt = 60.0,
    yes: YesOpt = False,
    no_markdown: NoMarkdownOpt = False,
    no_history: NoHistoryOpt = False,
    max_tokens: MaxTokensOpt = 4096,
    temperature: TemperatureOpt = None,
    top_p: TopPOpt = None,
    seed: SeedOpt = None,
    stop: StopOpt = None,
    special_tokens: SpecialTokensOpt = False,
    prefill_chunk: PrefillChunkOpt = 4096,
    max_context: MaxContextOpt = None,
    device: DeviceOpt = "auto",
    dtype: DtypeOpt = "auto",
    backend: BackendOpt = "auto",
    tp: ChatTpOpt = None,
    gpu_memory: GpuMemoryOpt = None,
    host_memory: HostMemoryOpt = None,
    torchrun: TorchrunOpt = None,
    state_home: StateHomeOpt = None,
    term: TermOpt = "dumb",
) -> None:
    """Talk with the model, as long as you like.

    On a terminal it edits lines, keeps a history and renders Markdown; /help lists its commands. Ctrl-C stops an
    answer, twice it quits. Piped lines are questions; stdout has the answers, and the exit code is the last error's.
    Every finished turn is on the disk, in $XDG_STATE_HOME/dsv4 or ~/.local/state/dsv4: --continue goes on after a kill.
    """
    from dsv4cli.engine.settings import Limits
    from dsv4cli.engine.source import resolve_model

    _check(device, torchrun)
    limits, source = Limits(max_tokens, max_context, prefill_chunk, 0, tuple(stop or ())), resolve_model(model)
    sampling = source.sampling.chosen(temperature, top_p, seed)
    state, memory = state_folder(state_home), memory_limits(gpu_memory, host_memory)
    job = Job(Output(context.obj), source, think, device, dtype, backend, limits, sampling, memory, special_tokens)
    begun = _session(state, go_on, session, system, tools)
    wishes = Wishes(check_budget(think_budget), show_thinking, not no_markdown, term)
    _start(job, tp or 1, begun, wishes, _calls(tool_exec, tool_timeout, yes), None if no_history else state / "history")


def _check(device: str, torchrun: str | None) -> None:
    from dsv4cli.engine.settings import check_device

    check_device(device)
    if torchrun is not None:
        raise UsageError("chat starts its ranks itself, on one machine", "leave out torchrun and give --tp")


class Wishes(NamedTuple):
    """How a conversation is led and shown."""

    think_budget: int | None
    show_thinking: bool
    markdown: bool
    term: str


class Calls(NamedTuple):
    """How calls are carried out."""

    command: list[str]
    seconds: float
    ask_first: bool


def _start(job: Job, ranks: int, session: Session, wishes: Wishes, calls: Calls, history: Path | None) -> None:
    """Loads the model and talks."""
    terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    with open_talk(job, ranks) as talk:
        chat = Chat(job.out, job.source.name, talk, session, job.sampling, Interrupts(), on_terminal=terminal)
        chat.think_budget, chat.show_thinking = wishes.think_budget, wishes.show_thinking
        chat.markdown = wishes.markdown and job.out.colours.stdout
        chat.copies = terminal and wishes.term != "dumb"
        source = _input(chat, wishes.term, history)
        chat.edits = source.edits
        talk.tell_waits(job.out.compiling)
        chat.run_calls = Tools(job.out, source, *calls).run
        _converse(chat, source)


def _calls(tool_exec: str | None, seconds: float, yes: bool) -> Calls:
    """How calls are carried out. Raises UsageError, also where it needs a word of consent and nobody can give it."""
    from dsv4cli.engine.settings import require

    require(0 < seconds < math.inf, "--tool-timeout", seconds, "use more than 0 seconds")
    if tool_exec is None:
        return Calls([], seconds, not yes)
    if not yes and (sys.stdin is None or not sys.stdin.isatty()):
        raise UsageError("--tool-exec asks before each call, and there is no terminal", "add --yes")
    return Calls(split_command(tool_exec), seconds, not yes)


def _session(state: Path, go_on: bool, file: Path | None, system: str | None, tools: Path | None) -> Session:
    """The session to begin with. Raises UsageError."""
    journal = Journal(state / "sessions")
    session = Session(journal, file)
    if go_on and file is not None:
        raise UsageError("--continue and --session cannot be combined", "give one of them")
    if go_on:
        session.messages, session.tools = read_journal(newest_journal(journal.folder))
    elif file is not None and file.exists():
        session.load_file(file)
    elif file is not None and not file.parent.is_dir():
        raise UsageError(f"{file} cannot be written: there is no folder {file.parent}", "make it, or name another file")
    if system is not None:
        session.system = system
    if tools is not None:
        session.tools = read_tools(tools)
    return session


def _input(chat: Chat, term: str, history: Path | None) -> Input:
    """The best way to read messages that there is here."""
    if sys.stdin is None or not sys.stdin.isatty():
        return Lines()
    if not chat.on_terminal or term == "dumb":
        return Plain(chat.out)
    try:
        from dsv4cli.commands.chat_editor import Editor
    except ImportError:
        chat.out.hint("pip install prompt_toolkit gives this prompt a history and an editor")
        return _readline(chat.out)
    return Editor(history, {name: command.help for name, command in COMMANDS.items()}, chat.interrupts)


def _readline(out: Output) -> Input:
    try:
        return Readline(out)
    except ImportError:
        return Plain(out)


def _converse(chat: Chat, source: Input) -> None:
    """Reads and answers to the end. Exits with 130 when it was Ctrl-C, and in a pipe as the last error would."""
    code = 0
    _greet(chat)
    while True:
        try:
            draft, chat.draft = chat.draft, ""
            _take(chat, source.read(draft))
        except EOFError:
            break
        except RankLost:
            raise
        except Dsv4Error as error:
            chat.out.error(error)
            code = error.exit_code
        except KeyboardInterrupt:
            if chat.leaving or chat.interrupts.again() or not chat.on_terminal:
                raise
            chat.out.status("Ctrl-C again, or Ctrl-D, quits")
        if chat.stopped and not chat.on_terminal:
            raise typer.Exit(130)
    if code and not chat.on_terminal:
        raise typer.Exit(code)


def _greet(chat: Chat) -> None:
    if chat.session.messages:
        chat.out.status(f"going on after {counted(len(chat.session.messages), 'message')}")
    if chat.on_terminal:
        chat.out.status("/help lists the commands; Ctrl-D quits")


def _take(chat: Chat, line: str) -> None:
    """A message or a command of the user."""
    before = list(chat.session.messages)
    question: str | None = line
    if line.startswith("/"):
        question = obey(chat, line)
    if question is not None and question.strip():
        chat.ask(question, before)
