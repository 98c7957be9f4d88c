"""Options of `dsv4 convert`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dsv4cli.model_names import complete_model

SOURCE_HELP = (
    "Checkpoint to convert: a folder in any of these layouts or a GGUF file; or flash, pro or org/name in "
    "the Hugging Face cache."
)
SourceArg = Annotated[str | None, typer.Argument(metavar="SRC", help=SOURCE_HELP, autocompletion=complete_model)]
OutputArg = Annotated[
    Path | None, typer.Argument(metavar="DST", help="Folder to write: new, empty or from an interrupted run.")
]
ToOpt = Annotated[
    Literal["official", "bf16", "fp8", "base", "nvfp4", "mp", "transformers", "gguf", "compressed-tensors"] | None,
    typer.Option("--to", metavar="LAYOUT", help="Target layout; see the list above."),
]
RanksOpt = Annotated[int | None, typer.Option(min=1, help="With --to mp: number of GPUs to split the model for.")]
ExpertsOpt = Annotated[
    Literal["fp4", "nvfp4", "fp8", "bf16"] | None, typer.Option(help="Store the routed experts in this format instead.")
]
AttentionOpt = Annotated[
    Literal["fp8", "bf16"] | None,
    typer.Option(help="Store attention and the other matrices outside the routed experts in this format instead."),
]
SizeOpt = Annotated[str, typer.Option(metavar="SIZE", help="Maximum size of an output file; tensors are never split.")]
WorkersOpt = Annotated[
    int | None, typer.Option("--max-workers", min=1, help="Number of threads. Defaults to one per core, at most 16.")
]
VerifyOpt = Annotated[
    Literal["sample", "full", "off"],
    typer.Option(
        "--verify",
        help="Compare the output with the source: sample reads 1/16 of each large tensor, full reads everything.",
    ),
]
DryRunOpt = Annotated[bool, typer.Option("--dry-run", help="Show the plan and the expected speed; write nothing.")]
ShardOpt = Annotated[
    str | None, typer.Option(metavar="I/N", help="Convert part I of N, to split the work over N machines.")
]
FinishOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="DST",
        help="Join the parts of a --shard conversion: check them, then write the configuration and the index.",
    ),
]
CheckOpt = Annotated[
    Path | None,
    typer.Option("--check", metavar="DST", help="Compare a finished output with its recorded hashes; write nothing."),
]
AgainstOpt = Annotated[
    str | None,
    typer.Option(
        metavar="SRC", autocompletion=complete_model, help="With --finish or --check: also compare the output with SRC."
    ),
]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON object per file and a summary, as JSON lines.")]
