"""`dsv4 chat`: a conversation on a terminal or through pipes."""

import math
import sys
from dataclasses import asdict, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from dsv4cli.commands.chat.begin import Beginning, begin_session, given_choices
from dsv4cli.commands.chat.input import Input, Lines, Plain, Readline
from dsv4cli.commands.chat.interrupts import Interrupts
from dsv4cli.commands.chat.journal import SessionChoices, state_folder
from dsv4cli.commands.chat.loop import converse, greet
from dsv4cli.commands.chat.model import Models, find_model, model_name
from dsv4cli.commands.chat.options import (
    ApiKeyFileOpt,
    ChatTpOpt,
    ContinueOpt,
    MaxRoundsOpt,
    NoHistoryOpt,
    NoMarkdownOpt,
    QuestionArg,
    ResumeOpt,
    SessionOpt,
    SessionsOpt,
    ShowThinkingOpt,
    ThinkBudgetOpt,
    ToolExecOpt,
    ToolsOpt,
    ToolTimeoutOpt,
    UrlOpt,
    YesOpt,
)
from dsv4cli.commands.chat.prompt_window import PromptWindow
from dsv4cli.commands.chat.remote import OnCommandLine, ServerModels, check_no_key, check_options, read_key
from dsv4cli.commands.chat.session import Session
from dsv4cli.commands.chat.settings import check_budget
from dsv4cli.commands.chat.slash import helps
from dsv4cli.commands.chat.tools import Tools, split_command
from dsv4cli.commands.chat.turn import Chat, ChatView
from dsv4cli.commands.compiling import early_compiler
from dsv4cli.commands.job import Job, open_job
from dsv4cli.commands.terminal import keys_wait, pastes_marked
from dsv4cli.environment import Environment
from dsv4cli.errors import UsageError
from dsv4cli.options import ModelOptions, QuietOpt, SystemOpt, is_given, takes_model_options
from dsv4cli.output import Output

if TYPE_CHECKING:
    from subprocess import Popen

CHAT_EXAMPLES = (
    "dsv4 chat",
    "dsv4 chat --model flash --think high --think-budget 2000",
    "dsv4 chat --model flash --tp 2",
    'dsv4 chat "What is 17 + 25?"',
    "dsv4 chat --continue",
    "dsv4 chat --sessions",
    "dsv4 chat --resume 2",
    "dsv4 chat --session notes.json --system 'Answer in one sentence.'",
    "dsv4 chat --tools tools.json --tool-exec ./call.py",
    "printf 'What is 17 + 25?\\n' | dsv4 chat",
)


@takes_model_options()
def chat(
    context: typer.Context,
    options: ModelOptions,
    question: QuestionArg = None,
    url: UrlOpt = None,
    api_key_file: ApiKeyFileOpt = None,
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
    quiet: QuietOpt = False,
) -> None:
    """Chat with the model.

    On a terminal you can edit lines, recall earlier input and see rendered Markdown; /help lists the commands of the
    chat. Ctrl-C stops an answer; press it twice to quit. With piped input, every line is a question, and the exit
    code is that of the last error. To continue the session later, use --continue.
    """
    environment: Environment = context.obj
    if _edits(environment.term):
        context.with_resource(pastes_marked())
    # on a terminal, the output of slash commands is an answer, so --quiet does not hide it
    out = Output(environment.colours, quiet=quiet and not _on_terminal())
    loading, state = Output(environment.colours, quiet=quiet), state_folder(environment.state_home)
    _check(context, options.device, question, tool_exec)
    known: dict[str, Any] = {one.name: getattr(options, one.name, None) for one in fields(SessionChoices)}
    choices = SessionChoices(**known | {"url": url})
    given = given_choices(context, choices)
    if "model" in given and url is None:
        given["url"] = None  # --model without --url selects a local model, even if the session used a server
    with keys_wait():
        beginning = Beginning(state / "sessions", go_on, resume, session, sessions)
        begun = begin_session(out, beginning, system, tools, given)
        named = OnCommandLine("model" in given, "url" in given)
        models = _models(context, loading, begun, named, options, api_key_file, tp or 1)
    view = _view(environment.term, not no_markdown, show_thinking)
    budget, calls = check_budget(think_budget), _calls(tool_exec, tool_timeout, yes, max_rounds)
    history = None if no_history else state / "history"
    _start(out, models, begun, ConversationOptions(view, environment.term, question, budget, calls, history))


def _on_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def _edits(term: str) -> bool:
    """Return whether prompt_toolkit's editor reads the messages, without importing it."""
    return _on_terminal() and term != "dumb" and find_spec("prompt_toolkit") is not None


def _view(term: str, markdown: bool, show_thinking: bool) -> ChatView:
    """Return how the chat is shown on this terminal, or without one."""
    escapes, on_terminal = term != "dumb", _on_terminal()
    return ChatView(on_terminal, on_terminal and escapes, markdown and sys.stdout.isatty() and escapes, show_thinking)


def _check(context: typer.Context, device: str, question: str | None, tool_exec: str | None) -> None:
    from dsv4cli.engine.settings import check_device

    check_device(device)
    _check_used(context, question, tool_exec)
    if context.obj.torchrun:
        raise UsageError(
            "chat cannot run under torchrun: it starts its own ranks, on one machine",
            "run it without torchrun and with --tp",
        )
    if question is not None and not question.strip():
        raise UsageError("the question is empty", 'ask something: dsv4 chat "What is 17 + 25?"')


def _models(
    context: typer.Context,
    out: Output,
    session: Session,
    named: OnCommandLine,
    options: ModelOptions,
    key_file: Path | None,
    ranks: int,
) -> Models | ServerModels:
    """Return the session's models: of its server, or of this machine. Raises Dsv4Error."""
    if session.choices.url is None:
        check_no_key(key_file)
        return _local(out, session, named.model, options, ranks)
    check_options(context)
    return ServerModels(out, session.choices.url, read_key(key_file), _led(options, session), named)


def _local(out: Output, session: Session, named: bool, options: ModelOptions, ranks: int) -> Models:
    """Return the session's model, to be loaded in this process or in several ranks. Raises Dsv4Error.

    Args:
        named: Whether the model was given on the command line.
    """
    compiler = early_compiler(options)
    return Models(_job(out, session, named, options, compiler), ranks)


def _job(out: Output, session: Session, named: bool, options: ModelOptions, compiler: "Popen[str] | None") -> Job:
    """Return the job that the session's choices describe. Raises Dsv4Error."""
    find = partial(find_model, out, kept=not named and bool(session.messages))
    job = open_job(out, _led(options, session), compiler=compiler, find=find)
    session.choices = replace(session.choices, model=model_name(job.source))
    return job


def _led(options: ModelOptions, session: Session) -> ModelOptions:
    """Return the options, overridden by the choices saved in the session."""
    chosen = asdict(session.choices)
    del chosen["url"]
    return replace(options, **chosen)


class CallOptions(NamedTuple):
    """Options for running tool calls."""

    command: list[str]
    seconds: float
    ask_first: bool
    rounds: int


class ConversationOptions(NamedTuple):
    """Options of a conversation, apart from its model and session.

    Attributes:
        term: The terminal's type, as in TERM.
        question: The only question of a chat without a terminal; the first one on a terminal.
        history: File of earlier input; None keeps none.
    """

    view: ChatView
    term: str
    question: str | None
    think_budget: int | None
    calls: CallOptions
    history: Path | None


def _start(
    out: Output,
    models: Models | ServerModels,
    session: Session,
    options: ConversationOptions,
) -> None:
    """Load the model, or connect to its server, and run the conversation."""
    view, interrupts = options.view, Interrupts()
    with models:
        with keys_wait():
            conversation = models.open()
            if isinstance(models, ServerModels):
                session.choices = replace(session.choices, model=models.name, url=models.url)
            source = _input(out, options, interrupts)
            chat = Chat(
                out, models, conversation, session, models.sampling, options.think_budget, source,
                Tools(out, source, *options.calls), view, interrupts, PromptWindow(out, session),
            )  # fmt: skip
            del conversation  # the chat holds the only reference, so that /model can free it
            greet(chat)
        converse(chat, options.question)


def _check_used(context: typer.Context, question: str | None, tool_exec: str | None) -> None:
    """Raise UsageError for options that would have no effect."""
    if is_given(context, "sessions") and question is not None:
        raise UsageError("a question and --sessions cannot be combined", "use one of them")
    idle = [name for name in ("tool_timeout", "yes", "max_rounds") if is_given(context, name)]
    if tool_exec is None and idle:
        option = f"--{idle[0].replace('_', '-')}"
        raise UsageError(f"{option} needs --tool-exec", "add --tool-exec COMMAND")


def _calls(tool_exec: str | None, seconds: float, yes: bool, rounds: int) -> CallOptions:
    """Return the options of tool calls. Raises UsageError, also if calls need confirmation and there is no terminal."""
    from dsv4cli.engine.settings import require

    require(0 < seconds < math.inf, "--tool-timeout", seconds, "use more than 0 seconds")
    if tool_exec is None:
        return CallOptions([], seconds, not yes, rounds)
    if not yes and (sys.stdin is None or not sys.stdin.isatty()):
        raise UsageError("--tool-exec asks before each call, but there is no terminal for confirmation", "add --yes")
    return CallOptions(split_command(tool_exec), seconds, not yes, rounds)


def _input(out: Output, options: ConversationOptions, interrupts: Interrupts) -> Input:
    """Return the best input that is available here."""
    if sys.stdin is None or not sys.stdin.isatty():
        return Lines()
    if not options.view.on_terminal or options.term == "dumb":
        return Plain(out)
    if not _edits(options.term):
        out.hint("for history and line editing, run: pip install prompt_toolkit")
        return _readline(out)
    from dsv4cli.commands.chat.editor import Editor

    return Editor(options.history, helps(), interrupts)


def _readline(out: Output) -> Input:
    try:
        return Readline(out)
    except ImportError:
        return Plain(out)
