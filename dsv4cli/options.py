"""Arguments, options and help texts that commands share, each declared once."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter
from typing import Annotated, Any, Literal

import typer

EXIT_CODES = """\b
Exit codes:
  0 ok; 1 failure; 2 usage; 3 checked, and the answer is no;
  4 unsupported checkpoint or hardware; 5 not enough disk, RAM or VRAM;
  6 network or hub; 7 finished, but the result is unsound;
  130 interrupted; 143 terminated"""

MODEL_HELP = (
    "A checkpoint folder; nano or nano-0731, which are built in; flash, pro, flash-0731 or org/name[@revision] in the "
    "Hugging Face cache; or random:PRESET[,layers=N][,experts=N][,seed=N], which needs no files."
)

ModelOpt = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
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
# set in the processes that torchrun starts
TorchrunOpt = Annotated[str | None, typer.Option(envvar="TORCHELASTIC_RUN_ID", hidden=True)]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout and nothing else.")]

QuietOpt = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors to stderr.")]
SpecialTokensOpt = Annotated[
    bool,
    typer.Option(
        "--special-tokens",
        help="Read special tokens in messages, files and tool results as tokens, not as text.",
    ),
]

SystemOpt = Annotated[str | None, typer.Option("--system", "-s", help="The system message.")]
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
StopOpt = Annotated[list[str] | None, typer.Option(help="Text that ends an answer; may be repeated.")]
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
    """Which model, how it answers and where it computes: what `run` and `chat` both take, in the order of --help."""

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


Command = Callable[..., None]


def takes_model_options(**after: str) -> Callable[[Command], Command]:
    """Gives a command every option of `ModelOptions`, and its parameter `options` their values.

    after: some parameters of the command, and the shared option behind which --help lists each.
    """

    def expand(command: Command) -> Command:
        @wraps(command)
        def expanded(**given: Any) -> None:
            options = ModelOptions(**{field.name: given.pop(field.name) for field in fields(ModelOptions)})
            command(options=options, **given)

        parameters = list(_merged(inspect.signature(command), after))
        expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what Typer reads
        expanded.__annotations__ = {one.name: one.annotation for one in parameters}
        return expanded

    return expand


def _merged(own: inspect.Signature, after: dict[str, str]) -> Iterator[Parameter]:
    """The parameters of a command, and behind some of them, as far as `after` says, the shared ones."""
    shared = [
        Parameter(field.name, Parameter.POSITIONAL_OR_KEYWORD, default=field.default, annotation=field.type)
        for field in fields(ModelOptions)
    ]
    names = [one.name for one in shared]
    listed = 0
    for parameter in own.parameters.values():
        if parameter.name in after:
            end = names.index(after[parameter.name]) + 1
            yield from shared[listed:end]
            listed = end
        if parameter.name != "options":
            yield parameter
    yield from shared[listed:]


def epilog(*examples: str) -> str:
    """The end of a help page: exit codes, then examples."""
    return "\n".join([EXIT_CODES, "", "\b", "Examples:", *(f"  {example}" for example in examples)])
