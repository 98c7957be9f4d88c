"""Options of `dsv4 verify`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

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
RecordOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json",
        help="Write what this server answers as a reference for --against: log-probabilities of texts, and tool calls.",
    ),
]
AgainstOpt = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.json",
        help="Compare with the answers of another server, written with --record. nano names the built-in reference, "
        "which is the default for a model of this name.",
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


@dataclass(frozen=True)
class VerifyOptions:
    """The options of `dsv4 verify`, as given."""

    url: str
    model: str | None
    api_key_file: Path | None
    quick: bool
    long: bool
    only: str | None
    release: Literal["v4", "0731"] | None
    tokenizer: str | None
    record: Path | None
    against: str | None
    concurrency: int
    timeout: float
    dry_run: bool
    out: Path | None
    report: Path | None
    junit: Path | None
