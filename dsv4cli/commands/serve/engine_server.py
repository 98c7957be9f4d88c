"""`dsv4 serve --engine`: plan the server of another engine, print its commands or run it, and verify it."""

import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from dsv4cli.commands.chat.remote import read_key
from dsv4cli.commands.serve.engine_options import EngineOptions
from dsv4cli.commands.verify.options import VerifyOptions
from dsv4cli.commands.verify.run import carry_out
from dsv4cli.errors import Dsv4Error, UsageError
from dsv4cli.harmless import shell_word
from dsv4cli.options import ModelOptions
from dsv4cli.output import Output, ReaderGone, duration_text

if TYPE_CHECKING:
    from dsv4cli.commands.serve.engine_process import EngineProcess
    from dsv4cli.engine.deployment.flags import EngineName
    from dsv4cli.engine.deployment.plan import DeploymentPlan

HEAD = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?")
HEAD_REMEDY = "give the address of machine 0 that all machines can reach: --head 10.0.0.1"
# addresses on which a server listens -> the address to reach it from this machine
REACHABLE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
# seconds between two looks at a server that runs
PAUSE = 60.0


class Listen(NamedTuple):
    """The options of `serve` that both kinds of servers have."""

    host: str
    port: int
    names: tuple[str, ...]
    tp: int | None
    key_file: Path | None
    grace: float

    @property
    def url(self) -> str:
        """The URL of the server from this machine."""
        host = REACHABLE.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def serve_with_engine(out: Output, options: ModelOptions, wanted: EngineOptions, listen: Listen) -> None:
    """Print the commands of the deployment, or run this machine's part until a signal ends it.

    Raises:
        UsageError, UnsupportedHardware, NotEnoughMemory: the deployment is impossible.
        ServerError: the server ends by itself, or is not ready in time.
    """
    assert wanted.engine is not None
    plan = _plan(out, options, wanted, listen, wanted.engine)
    for note in plan.notes():
        out.status(note)
    command = list(plan.engine.command)
    if wanted.engine_python is not None:
        command = [str(wanted.engine_python), *plan.engine.module]
    if wanted.only_print:
        _print(out, plan, command, wanted.node_rank, listen.key_file)
        return
    if len(plan.nodes) > 1 and (wanted.node_rank is None or wanted.head is None):
        raise UsageError(
            "several machines need --node-rank and --head", f"number this machine from 0, and {HEAD_REMEDY}"
        )
    if shutil.which(command[0]) is None:
        raise UsageError(
            f"there is no program {command[0]}",
            f"install {plan.engine.name} in an environment of its own, and name its Python: --engine-python PATH",
        )
    if not wanted.node_rank:
        _warn(out, listen)
    with _signals():
        _run(out, plan, command, wanted, listen)


def _warn(out: Output, listen: Listen) -> None:
    """Print a warning if other machines can use the server without a key."""
    from dsv4cli.engine.server.guard import is_loopback

    if listen.key_file is None and not is_loopback(listen.host):
        out.warning(f"anyone who can reach {listen.host} can use this server; to require a key, use --api-key-file")


def _plan(
    out: Output, options: ModelOptions, wanted: EngineOptions, listen: Listen, engine: "EngineName"
) -> "DeploymentPlan":
    from dsv4cli.engine.deployment.flags import ServerSettings
    from dsv4cli.engine.deployment.plan import plan_deployment
    from dsv4cli.engine.inspection.consumers.served import served_model
    from dsv4cli.engine.inspection.fit.cluster import parse_cluster
    from dsv4cli.engine.settings import parse_drafting, require

    require(listen.port > 0, "--port", "0", "choose the port of the engine's server")
    cluster = parse_cluster(wanted.gpus, wanted.nodes)
    rank = wanted.node_rank or 0
    require(rank < cluster.nodes, "--node-rank", rank, f"the machines are numbered from 0 to {cluster.nodes - 1}")
    head = HEAD.fullmatch(wanted.head or "HEAD")
    if head is None or int(head[2] or 1) > 65535:
        raise UsageError(f"--head cannot be {wanted.head!r}", HEAD_REMEDY)
    drafting = parse_drafting(options.draft)
    given = ServerSettings(
        listen.host, listen.port, listen.names, options.max_context, drafting.most, head[1],
        int(head[2] or ServerSettings.head_port), wanted.ready_timeout,
    )  # fmt: skip
    model, verdict = served_model(options.model, engine)
    if verdict is not None and verdict.loads is None:
        out.warning(f"it is not known whether {verdict.version} loads {options.model}: {verdict.reasons[0]}")
    return plan_deployment(engine, model, cluster, given, listen.tp)


def _print(
    out: Output, plan: "DeploymentPlan", command: Sequence[str], only: int | None, key_file: Path | None
) -> None:
    """Print the command of one machine or of each."""
    keys = "" if key_file is None else f'"$(head -n 1 {shell_word(key_file)})"'
    for node in plan.nodes if only is None else [only]:
        if len(plan.nodes) > 1:
            out.line(f"# machine {node}")
        out.line(plan.shell_line(node, command, keys))


def _run(out: Output, plan: "DeploymentPlan", command: Sequence[str], wanted: EngineOptions, listen: Listen) -> None:
    """Run this machine's server until it ends or a signal arrives."""
    from dsv4cli.commands.serve.engine_process import EngineProcess, key_options, wait_until_ready
    from dsv4cli.engine.system.ending import signals_held

    node, title = wanted.node_rank or 0, plan.engine.name
    variables = {one.name: one.values[0] for one in plan.environment(node)}
    keys = _keys(listen.key_file, plan) if node == 0 else ()
    with ExitStack() as ending:
        words = [*command, *plan.arguments(node), *ending.enter_context(key_options(keys, plan.engine.many_keys))]
        out.status(f"starting {plan.shell_line(node, command)}")
        with signals_held():
            try:
                process = EngineProcess(words, variables, _log_to(out))
            except OSError as error:
                what = f"{command[0]} cannot be started: {error.strerror}"
                raise UsageError(what, "correct --engine-python") from None
            ending.enter_context(_ended(out, process, listen.grace))
        if node == 0:
            taken = wait_until_ready(
                process, listen.url, wanted.ready_timeout, title,
                lambda seconds: out.status(f"{title} has been loading for {duration_text(seconds)}"),
            )  # fmt: skip
            out.status(f"{title} is ready after {duration_text(taken)}; press Ctrl-C to stop")
            out.line(listen.url)
            if not wanted.no_verify:
                _verify(out, plan, listen)
        while not process.wait(PAUSE):
            pass
        raise process.failure(title)


def _keys(file: Path | None, plan: "DeploymentPlan") -> tuple[str, ...]:
    """Return the API keys. Raises UsageError for what the engine does not support."""
    from dsv4cli.engine.server.api_keys import read_keys

    if file is None:
        return ()
    keys = read_keys(file)
    if any(key.requests is not None or key.tokens is not None for key in keys):
        raise UsageError(f"{file} limits a key, and {plan.engine.name} has no limits", "remove requests= and tokens=")
    if len(keys) > 1 and not plan.engine.many_keys:
        raise UsageError(f"{file} has {len(keys)} keys, and {plan.engine.name} accepts one", "keep one key")
    if read_key(file) != keys[0].secret.decode():
        raise UsageError(f"{file} has more than a key on its first line", "put only the key there")
    return tuple(key.secret.decode() for key in keys)


@contextmanager
def _ended(out: Output, process: "EngineProcess", grace: float) -> Iterator[None]:
    """End the server after the block, gently if a signal ended the block."""
    number = 0
    try:
        yield
    except KeyboardInterrupt:
        number = signal.SIGINT
        raise
    except SystemExit:
        number = signal.SIGTERM
        raise
    finally:
        if number:
            with suppress(ReaderGone):
                out.status(f"running answers have {grace:g} s to finish; press Ctrl-C again to stop at once")
        process.end(number or signal.SIGTERM, grace)


@contextmanager
def _signals() -> Iterator[None]:
    """Let SIGHUP end this process as SIGTERM does, unless it is ignored, as under nohup."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.getsignal(signal.SIGHUP)
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


class _Remarks(Output):
    """An Output that prints results to stderr: stdout has the address of the server alone."""

    def line(self, text: str = "", *, strong: bool = False) -> None:
        """Print a line."""
        self.status(text)

    def paragraph(self, text: str, indent: str = "", *, strong: bool = False) -> None:
        """Print a paragraph."""
        self.status(f"{indent}{text}")

    def table(self, rows: Sequence[Sequence[str]], *, numbers: bool = False) -> None:
        """Print a table."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            self.status("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _verify(out: Output, plan: "DeploymentPlan", listen: Listen) -> None:
    """Run `dsv4 verify --quick`, and print its verdict. A failed check does not end the server."""
    settings = plan.deployment.settings
    name = (settings.names or (plan.deployment.model.label,))[0]
    options = VerifyOptions(
        url=listen.url, model=name, api_key_file=listen.key_file, quick=True, long=False, only=None, release=None,
        tokenizer=None, record=None, against=None, concurrency=16, timeout=600.0, dry_run=False, out=None, report=None,
        junit=None,
    )  # fmt: skip
    again = f"dsv4 verify {listen.url}"
    try:
        verdict = carry_out(_Remarks(out.colours, quiet=out.silent), options)
    except Dsv4Error as error:
        out.warning(f"the server could not be verified: {error.message}")
        return
    if verdict == "wrong":
        out.warning(f"the server fails checks; see the lines above, and run all checks with: {again}")
    elif verdict == "no answer":
        out.warning(f"the server did not answer all requests in time; run the checks again with: {again}")


def _log_to(out: Output) -> Callable[[str], None]:
    """Return the function that prints a line of the server's log."""

    def log(line: str) -> None:
        if not out.silent:
            with suppress(ReaderGone):
                out.log(line)

    return log
