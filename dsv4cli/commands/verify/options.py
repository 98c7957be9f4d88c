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
        help="Run only these checks, separated by commas: encoding, replies, tools, batching (and the prefix "
        "cache), numbers, limits, long.",
    ),
]
ReleaseOpt = Annotated[
    Literal["v4", "0731"] | None,
    typer.Option(help="Prompt format release. By default, it is detected from the prompt token counts."),
]
TokenizerOpt = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Model, folder or tokenizer.json to count tokens with. By default, tries the DeepSeek-V4 tokenizers "
        "on this machine.",
    ),
]
RecordOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json",
        help="Save this server's log-probabilities and tool calls as a reference for --against.",
    ),
]
AgainstOpt = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.json",
        help="Compare with another server's reference, saved with --record. 'nano' is the built-in reference, and the "
        "default if the server's model is nano.",
    ),
]
ConcurrencyOpt = Annotated[int, typer.Option(min=1, max=256, help="Maximum number of concurrent requests.")]
TimeoutOpt = Annotated[float, typer.Option(min=1, help="Seconds to wait for a response.")]
DryRunOpt = Annotated[
    bool, typer.Option("--dry-run", help="Print how many requests and tokens the checks need, and exit.")
]
OutOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help="Write each response to this file as it arrives. To continue after an interruption, run the same "
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
