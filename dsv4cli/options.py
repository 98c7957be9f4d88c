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
  0 ok; 1 failure; 2 usage error; 3 checked, and the answer is no;
  4 unsupported checkpoint or hardware; 5 not enough disk, RAM or VRAM;
  6 network or Hub error; 7 finished, but the result is invalid;
  130 interrupted; 143 terminated"""

MODEL_HELP = (
    "Model to use: a checkpoint folder or a GGUF file; a built-in model (nano, nano-0731); flash, pro, "
    "flash-0731 or org/name[@revision] from the Hugging Face cache; org/name:NAME for one GGUF model of a repository "
    "(run, chat, serve, eval and trace download it if needed); or random:PRESET[,KEY=N,...] for random weights without "
    "files (keys: layers, experts, seed)."
)

ModelArg = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model)]
ModelOpt = Annotated[
    str,
    typer.Option("--model", "-m", metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model),
]
DeviceOpt = Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N. auto uses a GPU if one is available.")]
BackendOpt = Annotated[
    Literal["auto", "triton", "torch"],
    typer.Option(help="Kernels to use. auto selects Triton on a GPU and plain PyTorch elsewhere."),
]
TpOpt = Annotated[
    int | None,
    typer.Option(
        "--tp",
        min=1,
        help="Number of tensor-parallel ranks (one process and one GPU each). To span several machines, "
        "start the command with torchrun.",
    ),
]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout and nothing else.")]

QuietOpt = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors to stderr.")]
SpecialTokensOpt = Annotated[
    bool,
    typer.Option(
        "--special-tokens",
        help="Parse special tokens in messages, files and tool results as tokens instead of text.",
    ),
]


def argument_text(param: typer.CallbackParam, value: Any) -> Any:
    """Return a command-line text, or a list of texts, as valid Unicode.

    Bytes that a locale without UTF-8 (LC_ALL=C) cannot decode are decoded as UTF-8. Raises UsageError if they are not.
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
            f"{name} is not UTF-8: {where}", "set the terminal to UTF-8, or put the text in a file"
        ) from None


SystemOpt = Annotated[str | None, typer.Option("--system", "-s", help="System message.", callback=argument_text)]
ThinkOpt = Annotated[
    Literal["off", "low", "high", "max"],
    typer.Option(help="Reasoning effort before the answer: off, high or max; also low for releases from 0731 on."),
]
MaxTokensOpt = Annotated[int, typer.Option(help="Maximum number of tokens in an answer.")]
TemperatureOpt = Annotated[
    float | None,
    typer.Option(
        help="Sampling temperature; 0 always picks the most likely token. Defaults to the model's own value, or 1."
    ),
]
TopPOpt = Annotated[
    float | None,
    typer.Option(
        help="Sample only from the most likely tokens whose probabilities add up to this value. Defaults to the "
        "model's own value, or 1."
    ),
]
TopKOpt = Annotated[
    int | None,
    typer.Option(help="Sample only from this number of most likely tokens; 0 (the default) sets no limit."),
]
MinPOpt = Annotated[
    float | None,
    typer.Option(
        help="Sample only from tokens whose probability is at least this fraction of the most likely token's; 0 (the "
        "default) sets no minimum."
    ),
]
PresencePenaltyOpt = Annotated[
    float | None,
    typer.Option(help="Subtract this from the logit of every token already in the answer; -2 to 2, default 0."),
]
FrequencyPenaltyOpt = Annotated[
    float | None,
    typer.Option(help="Subtract this from a token's logit once for each occurrence in the answer; -2 to 2, default 0."),
]
RepetitionPenaltyOpt = Annotated[
    float | None,
    typer.Option(
        help="Make tokens that appear in the prompt or the answer less likely: positive logits are divided by this, "
        "negative ones multiplied; 0.01 to 100, default 1."
    ),
]
SeedOpt = Annotated[
    int | None,
    typer.Option(help="Random seed, for repeatable answers. By default every run uses a new seed; eval uses 0."),
]
StopOpt = Annotated[
    list[str] | None, typer.Option(help="Text that ends an answer; may be repeated.", callback=argument_text)
]
PrefillChunkOpt = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of prompt tokens per prefill step. Larger chunks are faster and need more "
        "memory; 1 computes the prompt like decode steps. Defaults to 512 on a CPU. On a GPU, defaults "
        "to 8192 if that fits in memory together with all weights, otherwise to 4096 or less."
    ),
]
MaxContextOpt = Annotated[
    int | None,
    typer.Option(
        help="Maximum context length in tokens, prompt and answer together. Defaults to the model's own limit."
    ),
]
DtypeOpt = Annotated[
    Literal["auto", "bfloat16", "float32"],
    typer.Option(
        help="auto rounds like the official code; bfloat16 and float32 compute in that type, without quantization."
    ),
]
DraftOpt = Annotated[
    str,
    typer.Option(
        metavar="auto|off|N",
        help="Speculative decoding: auto chooses how many draft tokens to verify per step, off disables "
        "drafting, and N (1 to 7) sets a maximum. Drafts do not change the answer; on a GPU, add "
        "--exact for bit-identical results.",
    ),
]
ExactOpt = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="On a GPU, make the result of each row independent of the other rows in its step, bit for "
        "bit, for up to 8 rows. Without it, the last bits depend on how many prompts and draft tokens "
        "share the step. A CPU always does this.",
    ),
]

GpuMemoryOpt = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Maximum GPU memory for weights, for example 120GB. Experts that do not fit stay in host "
        "memory. Defaults to the free memory minus what prompts and answers need.",
    ),
]
HostMemoryOpt = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Maximum host memory for experts and the embedding, for all ranks of a machine together. "
        "Defaults to 7/8 of the free memory. Set it if the system reports less memory than there is.",
    ),
]

LayersOpt = Annotated[
    str | None,
    typer.Option(metavar="A-B", help="Only these main layers, for example 0-3, and all tensors outside the layers."),
]
NoMtpOpt = Annotated[bool, typer.Option("--no-mtp", help="Leave out the drafter (all tensors under mtp).")]
RevisionOpt = Annotated[
    str | None,
    typer.Option(
        metavar="REV", help="Branch, tag or commit of the repository on the Hugging Face Hub. Defaults to main."
    ),
]


@dataclass(frozen=True)
class ModelOptions:
    """Options that `run`, `chat`, `serve` and `eval` share: the model, its answers and its computation."""

    model: ModelOpt = "nano"
    think: ThinkOpt = "off"
    max_tokens: MaxTokensOpt = 4096
    temperature: TemperatureOpt = None
    top_p: TopPOpt = None
    top_k: TopKOpt = None
    min_p: MinPOpt = None
    presence_penalty: PresencePenaltyOpt = None
    frequency_penalty: FrequencyPenaltyOpt = None
    repetition_penalty: RepetitionPenaltyOpt = None
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


def takes_options(kind: type[Any], parameter: str, **other: Any) -> Callable[[Function], Function]:
    """Return a decorator that adds every option of a dataclass to a command and passes them as one argument.

    Args:
        kind: The dataclass, whose fields are annotated as parameters of a command are.
        parameter: The parameter of the command that accepts it.
        other: Annotations that replace those of the dataclass for this command, by name.
    """

    def expand(command: Function) -> Function:
        @wraps(command)
        def expanded(**given: Any) -> None:
            options = kind(**{one.name: given.pop(one.name) for one in fields(kind)})
            command(**{parameter: options}, **given)

        shared = [
            Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=other.get(one.name, one.type))
            for one in fields(kind)
        ]
        written = inspect.signature(command).parameters.values()
        own = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in written if one.name != parameter]
        expanded.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]  # what Typer reads
        expanded.__annotations__ = {one.name: one.annotation for one in (*shared, *own)}
        return expanded

    return expand


def takes_model_options(**other: Any) -> Callable[[Function], Function]:
    """Return a decorator that adds every option of `ModelOptions` to a command and passes them as `options`.

    Args:
        other: Annotations that replace those of `ModelOptions` for this command, by name.
    """
    return takes_options(ModelOptions, "options", **other)


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether a parameter was set on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def epilog(*examples: str) -> str:
    """Return the end of a help page: exit codes, then examples."""
    return "\n".join([EXIT_CODES, "", "\b", "Examples:", *(f"  {example}" for example in examples)])
