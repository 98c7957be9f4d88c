"""`dsv4 verify`: check whether a server answers as DeepSeek-V4 does."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dsv4cli.commands.chat.remote import read_key
from dsv4cli.commands.verify.report import print_report, write_reports
from dsv4cli.errors import UsageError
from dsv4cli.options import JsonOpt, QuietOpt
from dsv4cli.output import Output, counted

if TYPE_CHECKING:
    from dsv4cli.engine.verification.check import Check
    from dsv4cli.engine.verification.discover import Given
    from dsv4cli.engine.verification.plan import Scope
    from dsv4cli.engine.verification.sender import Sender
    from dsv4cli.engine.verification.target import Target
    from dsv4cli.engine.verification.verify import Verification

UrlArg = Annotated[
    str, typer.Argument(metavar="URL", help="Server to check, for example http://localhost:8000, with or without /v1.")
]
ServerModelOpt = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="NAME", help="Model of the server to check. Defaults to its first model."),
]
KeyFileOpt = Annotated[
    Path | None,
    typer.Option("--api-key-file", metavar="FILE", help="File with the server's API key on its first line."),
]
QuickOpt = Annotated[bool, typer.Option("--quick", help="Make at most 60 requests instead of about 400.")]
LongOpt = Annotated[
    bool, typer.Option("--long", help="Also check long contexts, up to the limit that the server announces.")
]
OnlyOpt = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Make only these checks, separated by commas: encoding, replies, tools, company, numbers, limits, long.",
    ),
]
ReleaseOpt = Annotated[
    Literal["v4", "0731"] | None,
    typer.Option(help="Release of the model's prompt format. By default, the length of prompts shows it."),
]
TokenizerOpt = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Model, folder or tokenizer.json with the model's vocabulary. By default, the vocabularies on this "
        "machine are tried.",
    ),
]
ConcurrencyOpt = Annotated[int, typer.Option(min=1, max=256, help="Maximum number of requests at a time.")]
TimeoutOpt = Annotated[float, typer.Option(min=1, help="Seconds to wait for a response.")]
DryRunOpt = Annotated[bool, typer.Option("--dry-run", help="Print what the checks would cost, and exit.")]
OutOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help="Write each response to this file when it arrives. To continue after an interruption, run the same "
        "command again.",
    ),
]
ReportOpt = Annotated[Path | None, typer.Option(metavar="FILE.md", help="Write a report in Markdown, with a badge.")]
JunitOpt = Annotated[Path | None, typer.Option(metavar="FILE.xml", help="Write a report in JUnit XML, for CI.")]
VERIFY_EXAMPLES = (
    "dsv4 verify http://localhost:8000",
    "dsv4 verify http://localhost:8000 --quick",
    "dsv4 verify https://api.example.com --model deepseek-v4-flash --api-key-file key.txt --dry-run",
    "dsv4 verify http://localhost:8000 --out run.jsonl --report report.md --junit report.xml",
)


def verify(
    context: typer.Context,
    url: UrlArg,
    model: ServerModelOpt = None,
    api_key_file: KeyFileOpt = None,
    quick: QuickOpt = False,
    long: LongOpt = False,
    only: OnlyOpt = None,
    release: ReleaseOpt = None,
    tokenizer: TokenizerOpt = None,
    concurrency: ConcurrencyOpt = 16,
    timeout: TimeoutOpt = 120.0,
    dry_run: DryRunOpt = False,
    out: OutOpt = None,
    report: ReportOpt = None,
    junit: JunitOpt = None,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Check whether a server answers as DeepSeek-V4 does: prompts, replies, tools, batches and numbers.

    The server may be any that has the OpenAI chat API. The exit code is 3 if something is wrong, and 6 if the server
    cannot be reached.
    """
    from dsv4cli.engine.verification.discover import Given
    from dsv4cli.engine.verification.journal import Journal
    from dsv4cli.engine.verification.plan import Scope, check_scope
    from dsv4cli.engine.verification.sender import Sender

    output, key = Output(context.obj.colours, as_json, quiet), read_key(api_key_file)
    scope = Scope(quick, long, frozenset(name.strip() for name in only.split(",")) if only else frozenset())
    check_scope(scope)
    for path in (report, junit):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(
                f"there is no folder {path.absolute().parent}", f"create it, or write {path.name} elsewhere"
            )
    plain = Sender(url, key, concurrency, timeout).url
    journal = None if out is None else Journal(out, plain)
    sender = Sender(url, key, concurrency, timeout, journal)
    try:
        if journal is not None:
            output.status(f"{out} has {counted(len(journal), 'response')}, which are not requested again")
        target, done = _run(output, sender, Given(model, release, tokenizer), scope, dry_run)
    finally:
        sender.close()
        if journal is not None:
            journal.close()
    if done is None:
        return
    write_reports(output, target, done, report, junit, bool(key))
    print_report(output, target, done, bool(key))
    if done.wrong:
        raise typer.Exit(3)


def _run(
    output: Output, sender: "Sender", given: "Given", scope: "Scope", dry_run: bool
) -> "tuple[Target, Verification | None]":
    """Return what the server offers, and the finished verification; None with --dry-run."""
    from dsv4cli.engine.verification.discover import discover
    from dsv4cli.engine.verification.plan import plan_checks
    from dsv4cli.engine.verification.verify import Verification

    done = Verification(sender)
    target = discover(sender.url, sender.send, given)
    size = "" if target.limit is None else f", a context of {target.limit:,} tokens"
    output.status(f"{target.url}: {target.model}{size}; release {target.release}, {target.release_found}")
    if target.tokenizer is None:
        output.warning("no tokenizer on this machine fits the server's model: name it with --tokenizer")
    checks = plan_checks(target, scope, lambda: done.calls)
    _announce(output, done, checks, dry_run)
    if dry_run:
        return target, None
    with output.counting("requests") as update:
        done.run(checks, lambda count, total: update(count, total, ""))
    return target, done


def _announce(output: Output, done: "Verification", checks: "list[Check]", dry_run: bool) -> None:
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
