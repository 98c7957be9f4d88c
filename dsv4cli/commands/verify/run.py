"""Runs the checks of `dsv4 verify`, and reports them."""

from pathlib import Path
from typing import TYPE_CHECKING

from dsv4cli.commands.chat.remote import read_key
from dsv4cli.commands.verify.options import VerifyOptions
from dsv4cli.commands.verify.report import print_report, write_reports
from dsv4cli.errors import Dsv4Error, UsageError
from dsv4cli.output import Output, counted

if TYPE_CHECKING:
    from dsv4cli.engine.verification.check import Check
    from dsv4cli.engine.verification.checked_server import CheckedServer
    from dsv4cli.engine.verification.plan import Scope
    from dsv4cli.engine.verification.reference import ServerReference
    from dsv4cli.engine.verification.sender import Sender
    from dsv4cli.engine.verification.verify_run import VerifyRun


def carry_out(output: Output, options: VerifyOptions) -> str:
    """Check the server, and report.

    Returns:
        "right", "wrong", "no answer" if requests had no answer in time, or "not checked" with --dry-run.

    Raises:
        UsageError: an option is invalid.
        ServerError: the server cannot be reached, or has no chat API.
    """
    from dsv4cli.engine.verification.journal import ReplyJournal
    from dsv4cli.engine.verification.sender import Sender

    key, scope = read_key(options.api_key_file), _scope(options)
    for path in (options.report, options.junit, options.record):
        if path is not None:
            _check_folder(path)
    url = Sender(options.url, key, 1, 1).url
    journal = None if options.out is None else ReplyJournal(options.out, url)
    sender = Sender(url, key, options.concurrency, options.timeout, journal)
    try:
        if journal is not None and len(journal):
            output.status(f"{options.out} has {counted(len(journal), 'response')}, which are not requested again")
        return _verified(output, sender, options, scope, bool(key))
    finally:
        sender.close()
        if journal is not None:
            journal.close()


def _scope(options: VerifyOptions) -> "Scope":
    from dsv4cli.engine.verification.plan import Scope, check_scope

    only = frozenset(name.strip() for name in options.only.split(",")) if options.only else frozenset()
    scope = Scope(options.quick, options.long, only)
    check_scope(scope)
    return scope


def _check_folder(path: Path) -> None:
    """Raise UsageError if a file cannot be created because its folder does not exist."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", f"create it, or write {path.name} elsewhere")


def _verified(output: Output, sender: "Sender", options: VerifyOptions, scope: "Scope", keyed: bool) -> str:
    from dsv4cli.engine.verification.check import verdict_of_run
    from dsv4cli.engine.verification.discover import ServerHints, discover
    from dsv4cli.engine.verification.plan import plan_checks
    from dsv4cli.engine.verification.verify_run import VerifyRun

    done, given = VerifyRun(sender), _reference(options, "")  # a broken file fails before the first request
    server = discover(sender.url, sender.send, ServerHints(options.model, options.release, options.tokenizer))
    size = "" if server.limit is None else f", a context of {server.limit:,} tokens"
    output.status(f"{server.url}: {server.model}{size}; release {server.release}, {server.release_found}")
    if server.tokenizer is None:
        output.warning("no tokenizer on this machine fits the server's model: name it with --tokenizer")
    reference = given or _reference(options, server.model)
    checks = plan_checks(server, scope, lambda: done.calls, reference, recorded=options.record is not None)
    _announce(output, done, checks, options.dry_run)
    if options.dry_run:
        return "not checked"
    with output.counting("requests") as update:
        done.run(checks, lambda count, total: update(count, total, ""))
    if options.record is not None:
        _record(output, options.record, server, done)
    write_reports(output, server, done, options.report, options.junit, keyed)
    print_report(output, server, done, keyed)
    return verdict_of_run(done.results)


def _reference(options: VerifyOptions, model: str) -> "ServerReference | None":
    """Return the reference to compare with: that of --against, or the built-in one for nano."""
    from dsv4cli.engine.verification.reference import NANO, read_reference

    name = options.against or (NANO if model == NANO and options.record is None else None)
    return None if name is None else read_reference(name)


def _record(output: Output, path: Path, server: "CheckedServer", done: "VerifyRun") -> None:
    """Write the reference of --record. Raises Dsv4Error if the file cannot be written."""
    from dsv4cli.engine.verification.reference import reference_of

    found = reference_of(server, done.calls, done.replies)
    try:
        found.write(path)
    except OSError as error:
        raise Dsv4Error(f"{path} cannot be written: {error.strerror}", "choose another file") from None
    texts = f"{counted(len(found.texts) + len(found.answers), 'text')} and {counted(len(found.calls), 'tool scenario')}"
    output.status(f"wrote {path}: {texts}")


def _announce(output: Output, done: "VerifyRun", checks: "list[Check]", dry_run: bool) -> None:
    """Print the cost of the checks before they begin."""
    cost = done.cost(checks)
    text = (
        f"{counted(len(checks), 'check')}, {counted(cost.requests, 'request')}: about {cost.tokens_in:,} tokens in, at "
        f"most {cost.tokens_out:,} out"
    )
    if not dry_run:
        output.status(text)
        return
    rows = [["checks", "requests", "tokens in", "tokens out"]]
    families = dict.fromkeys(check.family for check in checks)
    parts = {name: done.cost([check for check in checks if check.family == name]) for name in families}
    rows += [
        [name, *(f"{number:,}" for number in (one.requests, one.tokens_in, one.tokens_out))]
        for name, one in {**parts, "all": cost}.items()
    ]
    output.table(rows, numbers=True)
    output.document(
        {
            "schema": "dsv4.verify-plan/1",
            "requests": cost.requests,
            "tokens_in": cost.tokens_in,
            "tokens_out": cost.tokens_out,
        }
    )
