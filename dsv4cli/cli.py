"""The `dsv4` program: registers the commands, reads the environment, and turns failures into two-line errors."""

import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from dsv4cli.command import WRONG_ARGUMENT, Application, CommandGroup
from dsv4cli.commands.chat import CHAT_EXAMPLES, chat
from dsv4cli.commands.compiling import compile_ahead
from dsv4cli.commands.convert import CONVERT_EXAMPLES, convert
from dsv4cli.commands.download import DOWNLOAD_EXAMPLES, download
from dsv4cli.commands.eval import EVAL_EXAMPLES, evaluate
from dsv4cli.commands.inspect import INSPECT_EXAMPLES, inspect
from dsv4cli.commands.profile import profile
from dsv4cli.commands.ranks import follow
from dsv4cli.commands.run import RUN_EXAMPLES, run
from dsv4cli.commands.serve import SERVE_EXAMPLES, serve
from dsv4cli.commands.trace import trace
from dsv4cli.commands.verify import VERIFY_EXAMPLES, verify
from dsv4cli.environment import Environment
from dsv4cli.errors import DISK_FULL, Dsv4Error, NotEnoughDisk, NotEnoughMemory, compiler_refusal, missing_package
from dsv4cli.harmless import brief_line
from dsv4cli.options import epilog
from dsv4cli.output import Colours, Output, ReaderGone
from dsv4cli.version import __version__

# prefix of environment variables that set options of `serve`
SERVE_VARIABLES = "DSV4_SERVE"


class _Commands(CommandGroup):
    """The top-level command group. It prints errors in arguments on one line."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _one_line():
            # completion runs no callback, and needs the environment too
            return super().make_context(*arguments, **{"obj": _environment()} | options)

    def invoke(self, *arguments: Any) -> Any:
        with _one_line():
            return super().invoke(*arguments)


@contextmanager
def _one_line() -> Iterator[None]:
    """Escape control characters in usage errors: Typer quotes the arguments, which must not reach the terminal raw."""
    try:
        yield
    except WRONG_ARGUMENT as error:
        error.message = brief_line(error.message)  # type: ignore[attr-defined]
        raise


app = Application(
    name="dsv4",
    cls=_Commands,
    help="Command-line toolkit for DeepSeek-V4 models: download, run, serve, convert, evaluate and debug them.",
    epilog=epilog(
        'dsv4 run "What is 17 + 25?"',
        "dsv4 download flash --dry-run",
        "dsv4 inspect flash",
        "dsv4 convert flash OUT --to bf16",
    ),
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=epilog(*CHAT_EXAMPLES))(chat)
# the ranks that --tp starts
app.command(hidden=True)(follow)
# the process that compiles kernels while a command loads its model
app.command(hidden=True)(compile_ahead)
app.command(
    # the first sentence of its help is too long for the list of commands
    short_help="Convert a checkpoint to another layout, and verify the result.",
    epilog=epilog(*CONVERT_EXAMPLES),
)(convert)
app.command(epilog=epilog(*DOWNLOAD_EXAMPLES))(download)
app.command(name="eval", epilog=epilog(*EVAL_EXAMPLES))(evaluate)
app.command(epilog=epilog(*INSPECT_EXAMPLES))(inspect)
app.command(epilog=epilog(*RUN_EXAMPLES))(run)
app.command(epilog=epilog(*SERVE_EXAMPLES), context_settings={"auto_envvar_prefix": SERVE_VARIABLES})(serve)
app.add_typer(profile, name="profile")
app.add_typer(trace, name="trace")
app.command(epilog=epilog(*VERIFY_EXAMPLES))(verify)


def _show_version(wanted: bool) -> None:
    if wanted:
        Output(Colours()).line(f"dsv4 {__version__}")
        raise typer.Exit


@app.callback()
def _start(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None: ...


def _environment() -> Environment:
    state, cache = os.environ.get("XDG_STATE_HOME"), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    # as huggingface_hub finds it
    hub = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    hub_cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(hub, "hub")
    hub_cache = os.path.expandvars(os.path.expanduser(hub_cache))
    return Environment(
        colours=_colours(),
        term=os.environ.get("TERM", "dumb"),
        state_home=Path(state) if state else None,
        torchrun="TORCHELASTIC_RUN_ID" in os.environ,
        hub_cache=Path(hub_cache),
        serve_variables=tuple(name for name in os.environ if name.startswith(f"{SERVE_VARIABLES}_")),
    )


def _colours() -> Colours:
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Colours(stdout=wanted and sys.stdout.isatty(), stderr=wanted and sys.stderr.isatty())


def _terminate(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> None:
    """Run the program and exit with a code from 0 to 7 (see the help), 130 after Ctrl-C, or 143 after SIGTERM."""
    signal.signal(signal.SIGTERM, _terminate)
    # log messages of torch's processes must not appear in a conversation
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a name that is not UTF-8, or a terminal that is not, must not end the program
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="dsv4")
    except ReaderGone:
        _be_silent()
        sys.exit(0)
    except KeyboardInterrupt:
        _interrupted()
    except SystemExit as leaving:
        if leaving.code == 130:  # Typer makes this of a KeyboardInterrupt
            _interrupted()
        raise
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        _fail(sentence)


def _sentence(error: Exception) -> Dsv4Error | None:
    """Return the failure as a Dsv4Error with message and remedy, or None for a bug in dsv4."""
    if isinstance(error, Dsv4Error):
        return error
    if isinstance(error, MemoryError):
        return NotEnoughMemory("the machine ran out of memory", "use a smaller model, or a machine with more memory")
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return NotEnoughDisk(
            f"no space left on the disk while writing {error.filename or 'the output'}", "free some space"
        )
    if isinstance(error, ModuleNotFoundError):
        return missing_package(error)
    return compiler_refusal(error)


class ClosedStdout(io.TextIOWrapper):
    """A replacement for a stdout that the caller closed. Only commands that write to it fail."""

    def write(self, text: str) -> int:
        """Raise Dsv4Error."""
        raise Dsv4Error(
            "stdout is closed, but the command writes its output there",
            "remove >&-, or discard the output with >/dev/null",
        )


def _open_closed_streams() -> None:
    # Python has None for a stream that the caller closed; the descriptor must not go to the next file opened either
    if sys.stdout is None:
        sys.stdout = ClosedStdout(open(os.devnull, "wb"), encoding="utf-8")  # noqa: SIM115 - open to the end
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open to the end


def _interrupted() -> NoReturn:
    Output(_colours()).new_line()
    sys.exit(130)


def _fail(error: Dsv4Error) -> None:
    if os.environ.get("DSV4_DEBUG"):
        traceback.print_exc()
    try:
        Output(_colours()).error(error)
        sys.stdout.flush()
    except (ReaderGone, OSError):  # stderr has no reader, or is on the full disk too
        _be_silent()
    sys.exit(error.exit_code)


def _be_silent() -> None:
    # the interpreter flushes both streams at exit: redirect them to a file that accepts the remaining output
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(devnull, stream.fileno())
