"""Arguments, options and help texts that commands share, each declared once."""

from typing import Annotated, Literal

import typer

EXIT_CODES = """\b
Exit codes:
  0 ok; 1 failure; 2 usage; 3 checked, and the answer is no;
  4 unsupported checkpoint or hardware; 5 not enough disk, RAM or VRAM;
  6 network or hub; 7 finished, but the result is unsound;
  130 interrupted; 143 terminated"""

MODEL_HELP = (
    "A checkpoint folder; nano, which is built in; flash, pro, flash-0731 or org/name[@revision] in the Hugging Face "
    "cache; or random:PRESET[,layers=N][,experts=N][,seed=N], which needs no files."
)

ModelOpt = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
DeviceOpt = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; auto takes a GPU where there is one.")]
BackendOpt = Annotated[
    Literal["auto", "triton", "torch"],
    typer.Option(help="Which kernels compute: auto takes Triton on a GPU and plain PyTorch elsewhere."),
]
TpOpt = Annotated[
    int | None,
    typer.Option(
        "--tp", min=1, help="Processes that share the model, one GPU each; torchrun starts them elsewhere too."
    ),
]
# set in the processes that torchrun starts
TorchrunOpt = Annotated[str | None, typer.Option(envvar="TORCHELASTIC_RUN_ID", hidden=True)]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout and nothing else.")]

QuietOpt = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but errors.")]
SpecialTokensOpt = Annotated[
    bool,
    typer.Option(
        "--special-tokens",
        help="Read special tokens that messages, files and tool results spell as these, not as text.",
    ),
]

SystemOpt = Annotated[str | None, typer.Option("--system", "-s", help="The system message.")]
ThinkOpt = Annotated[
    Literal["off", "low", "high", "max"],
    typer.Option(help="How hard to reason first: off, high or max; releases from 0731 on also low."),
]
MaxTokensOpt = Annotated[int, typer.Option(help="The most tokens of an answer.")]
TemperatureOpt = Annotated[
    float | None, typer.Option(help="0 takes the likeliest token; what the model asks for if absent, or 1.")
]
TopPOpt = Annotated[
    float | None,
    typer.Option(help="Draw from the likeliest tokens of this total probability; the model's own if absent, or 1."),
]
SeedOpt = Annotated[int | None, typer.Option(help="Makes the draws repeatable; without it each run differs.")]
StopOpt = Annotated[list[str] | None, typer.Option(help="Text that ends an answer; may be given again.")]
PrefillChunkOpt = Annotated[
    int,
    typer.Option(help="The most tokens of a prompt in one step: more are faster and take more memory; 1 is decoding."),
]
MaxContextOpt = Annotated[
    int | None, typer.Option(help="The most tokens of prompt and answer together; the model's own limit if absent.")
]
DtypeOpt = Annotated[
    Literal["auto", "bfloat16", "float32"],
    typer.Option(help="auto rounds as the official code does; a dtype computes in it, without quantisation."),
]

GpuMemoryOpt = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="The most GPU memory for weights, as in 120GB; what is free but 7 GB if absent. Experts beyond it stay in "
        "host memory.",
    ),
]
HostMemoryOpt = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="The most host memory for experts, for all ranks of a machine together; 7/8 of what is free if absent. "
        "Name it where the system tells of less than there is.",
    ),
]

LayersOpt = Annotated[
    str | None, typer.Option(metavar="A-B", help="Only these main layers, as in 0-3, with all outside the layers.")
]
NoMtpOpt = Annotated[bool, typer.Option("--no-mtp", help="Leave out the drafter, all under mtp.")]
RevisionOpt = Annotated[
    str | None, typer.Option(metavar="REV", help="Branch, tag or commit of the repository on the hub; main by default.")
]


def epilog(*examples: str) -> str:
    """The end of a help page: exit codes, then examples."""
    return "\n".join([EXIT_CODES, "", "\b", "Examples:", *(f"  {example}" for example in examples)])
