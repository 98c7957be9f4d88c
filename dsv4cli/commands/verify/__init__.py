"""`dsv4 verify`: check whether a server answers as DeepSeek-V4 does."""

import typer

from dsv4cli.commands.verify.options import (
    AgainstOpt,
    ConcurrencyOpt,
    DryRunOpt,
    JunitOpt,
    KeyFileOpt,
    LongOpt,
    OnlyOpt,
    OutOpt,
    QuickOpt,
    RecordOpt,
    ReleaseOpt,
    ReportOpt,
    ServerModelOpt,
    TimeoutOpt,
    TokenizerOpt,
    UrlArg,
    VerifyOptions,
)
from dsv4cli.commands.verify.run import carry_out
from dsv4cli.options import JsonOpt, QuietOpt
from dsv4cli.output import Output

EXIT_CODES = {"wrong": 3, "no answer": 6}
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
    record: RecordOpt = None,
    against: AgainstOpt = None,
    concurrency: ConcurrencyOpt = 16,
    timeout: TimeoutOpt = 600.0,
    dry_run: DryRunOpt = False,
    out: OutOpt = None,
    report: ReportOpt = None,
    junit: JunitOpt = None,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Check whether a server answers as DeepSeek-V4 does: prompts, replies, tools, batches and numbers.

    Works with any server that has an OpenAI-compatible chat API. The exit code is 3 if a check fails, and 6 if the
    server cannot be reached or does not answer in time.
    """
    options = VerifyOptions(
        url, model, api_key_file, quick, long, only, release, tokenizer,
        record, against, concurrency, timeout, dry_run, out, report, junit,
    )  # fmt: skip
    raise typer.Exit(EXIT_CODES.get(carry_out(Output(context.obj.colours, as_json, quiet), options), 0))
