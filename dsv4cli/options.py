"""Arguments, options and help texts that commands share, each declared once."""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter
from typing import Annotated, Any, Literal

import typer

from dsv4cli.errors import UsageError
from dsv4cli.model_names import complete_model

EXIT_CODES = """\b
Exit codes:
  0 ok; 1 failure; 2 usage; 3 checked, and the answer is no;
  4 unsupported checkpoint or hardware; 5 not enough disk, RAM or VRAM;
  6 network or hub; 7 finished, but the result is unsound;
  130 interrupted; 143 terminated"""

MODEL_HELP = (
    "A checkpoint folder; nano or nano-0731, which are built in; flash, pro, flash-0731 or org/name[@revision] in the "
    "Hugging Face cache; or random:PRESET[,KEY=N,...], random weights without files (KEY: layers, experts, seed)."
)

ModelArg = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model)]
ModelOpt = Annotated[
    str,
    typer.Option("--model", "-m", metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model),
]
DeviceOpt = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; auto uses a GPU if there is one.")]
BackendOpt = Annotated[
    Literal["auto", "triton", "torch"],
    typer.Option(help="Which kernels to use: auto is Triton on a GPU and plain PyTorch elsewhere."),
]
TpOpt = Annotated[
    int | None,
    typer.Option(
        "--tp",
        min=1,
        help="Processes that share the model, one GPU each; torchrun can start them on other machines too.",
    ),
]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout and nothing else.")]

QuietOpt = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors to stderr.")]
SpecialTokensOpt = Annotated[
    bool,
    typer.Option(
        "--special-tokens",
        help="Read special tokens in messages, files and tool results as tokens, not as text.",
    ),
]


def argument_text(param: typer.CallbackParam, value: Any) -> Any:
    """Return a text of the command line, or a list of texts, for the model.

    Bytes that a locale without UTF-8 (LC_ALL=C) cannot decode are read as UTF-8. Raises UsageError for other bytes.
    """
    if isinstance(value, list | tuple):
        return [argument_text(param, one) for one in value]
    if value is None or not any("\udc80" <= character <= "\udcff" for character in value):
        return value
    content = os.fsencode(value)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        name = param.metavar if param.param_type_name == "argument" else param.opts[0]
        where = f"byte {content[error.start]:#04x} at offset {error.start}"
        raise UsageError(
            f"{name} is not UTF-8: {where}", "set the terminal to UTF-8, or give the text in a file"
        ) from None


SystemOpt = Annotated[str | None, typer.Option("--system", "-s", help="The system message.", callback=argument_text)]
ThinkOpt = Annotated[
    Literal["off", "low", "high", "max"],
    typer.Option(help="How hard to reason first: off, high or max; releases from 0731 on also low."),
]
MaxTokensOpt = Annotated[int, typer.Option(help="The most tokens in an answer.")]
TemperatureOpt = Annotated[
    float | None, typer.Option(help="0 takes the likeliest token. If absent, the model's own value, or 1.")
]
TopPOpt = Annotated[
    float | None,
    typer.Option(
        help="Draw from the likeliest tokens with this total probability. If absent, the model's own value, or 1."
    ),
]
SeedOpt = Annotated[
    int | None, typer.Option(help="Makes the draws repeatable. If absent, each run differs; eval takes 0.")
]
StopOpt = Annotated[
    list[str] | None, typer.Option(help="Text that ends an answer; may be repeated.", callback=argument_text)
]
PrefillChunkOpt = Annotated[
    int | None,
    typer.Option(
        help="The most prompt tokens in one step: more is faster and takes more memory; 1 computes as decoding does. "
        "If absent, 8192 on a GPU that has room for that beside all weights, else 4096, 512 on a CPU, or fewer where "
        "room is short."
    ),
]
MaxContextOpt = Annotated[
    int | None, typer.Option(help="The most tokens of prompt and answer together. If absent, the model's own limit.")
]
DtypeOpt = Annotated[
    Literal["auto", "bfloat16", "float32"],
    typer.Option(help="auto rounds as the official code does; the others compute in that type, without quantisation."),
]
DraftOpt = Annotated[
    str,
    typer.Option(
        metavar="auto|off|N",
        help="How many tokens the model's drafter guesses ahead of a step, which then checks them: as many as pay, "
        "none, or at most N, 1 to 7. The answer stays the same, on a GPU to the last bit with --exact.",
    ),
]
ExactOpt = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="On a GPU, steps of up to 8 rows give each row the same bits whatever the other rows are. Else the last "
        "bits depend on how many prompts and drafts a step has. A CPU always does.",
    ),
]

GpuMemoryOpt = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="The most GPU memory for weights, as in 120GB. If absent, the free memory less what prompts and their "
        "answers need. Experts beyond it stay in host memory.",
    ),
]
HostMemoryOpt = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="The most host memory for experts and the embedding, for all ranks of a machine together. If absent, 7/8 "
        "of the free memory. Give it where the system reports less than there is.",
    ),
]

LayersOpt = Annotated[
    str | None,
    typer.Option(metavar="A-B", help="Only these main layers, as in 0-3, and everything outside the layers."),
]
NoMtpOpt = Annotated[bool, typer.Option("--no-mtp", help="Leave out the drafter: all tensors under mtp.")]
RevisionOpt = Annotated[
    str | None, typer.Option(metavar="REV", help="Branch, tag or commit of the repository on the hub; main by default.")
]


@dataclass(frozen=True)
class ModelOptions:
    """Which model, how it answers and where it computes: the options that `run`, `chat`, `serve` and `eval` share."""

    model: ModelOpt = "nano"
    think: ThinkOpt = "off"
    max_tokens: MaxTokensOpt = 4096
    temperature: TemperatureOpt = None
    top_p: TopPOpt = None
    seed: SeedOpt = None
    stop: StopOpt = None
    special_tokens: SpecialTokensOpt = False
    draft: DraftOpt = "auto"
    prefill_chunk: PrefillChunkOpt = None
    max_context: MaxContextOpt = None
    device: DeviceOpt = "auto"
    dtype: DtypeOpt = "auto"
    exact: ExactOpt = False
    backend: BackendOpt = "auto"
    gpu_memory: GpuMemoryOpt = None
    host_memory: HostMemoryOpt = None


Function = Callable[..., None]


def takes_model_options(**other: Any) -> Callable[[Function], Function]:
    """Return a decorator that gives a command every option of `ModelOptions`, and its parameter `options` their values.

    Args:
        other: How some of these options are declared for this command, as annotations.
    """

    def expand(command: Function) -> Function:
        @wraps(command)
        def expanded(**given: Any) -> None:
            options = ModelOptions(**{one.name: given.pop(one.name) for one in fields(ModelOptions)})
            command(options=options, **given)

        shared = [
            Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=other.get(one.name, one.type))
            for one in fields(ModelOptions)
        ]
        written = inspect.signature(command).parameters.values()
        own = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in written if one.name != "options"]
        expanded.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]  # what Typer reads
        expanded.__annotations__ = {one.name: one.annotation for one in (*shared, *own)}
        return expanded

    return expand


def epilog(*examples: str) -> str:
    """The end of a help page: exit codes, then examples."""
    return "\n".join([EXIT_CODES, "", "\b", "Examples:", *(f"  {example}" for example in examples)])
