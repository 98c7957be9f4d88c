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
# set in the processes that torchrun starts, and those of --tp
TorchrunOpt = Annotated[str | None, typer.Option(envvar="TORCHELASTIC_RUN_ID", hidden=True)]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout and nothing else.")]

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
