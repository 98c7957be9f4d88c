"""The options of `dsv4 inspect`."""

from typing import Annotated, Literal

import typer

from dsv4cli.model_names import complete_model

# default context length of --fit, in tokens
FIT_CONTEXT = 8192

InspectedArg = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        autocompletion=complete_model,
        help="Model to inspect: a checkpoint folder, a .safetensors file or a GGUF model; flash, pro, "
        "flash-0731 or org/name[@revision] from the Hugging Face cache, or from the Hub (headers only) if it is not "
        "cached; org/name:NAME for one GGUF model of a repository; hf://org/name if a local folder has that name, or "
        "to list the GGUF models on the Hub; or random:PRESET[,KEY=N,...] for random weights without files (keys: "
        "layers, experts, seed).",
    ),
]
ValuesOpt = Annotated[
    Literal["sample", "full"] | None,
    typer.Option(
        help="Read and check the weights: sample reads the first, middle and last rows of each tensor, "
        "full reads every byte. Errors set exit code 3; suspicious values are only reported."
    ),
]
TensorOpt = Annotated[
    str | None, typer.Option(metavar="NAME", help="Show one tensor: file, format, scales, statistics, histogram.")
]
LayerOpt = Annotated[str | None, typer.Option(metavar="N", help="Show the tensors of layer N, or of mtp.N.")]
TreeOpt = Annotated[
    bool, typer.Option("--tree", help="Show the whole model as a tree, with identical layers collapsed.")
]
TemplateOpt = Annotated[
    bool, typer.Option("--template", help="Print the chat template (Jinja) of the model's release, for other programs.")
]
ForOpt = Annotated[
    Literal["vllm", "sglang", "transformers", "official", "llama.cpp", "ds4", "dsv4"] | None,
    typer.Option(
        "--for",
        metavar="PROGRAM",
        help="Check whether this program can load the model; its verdict decides the exit code. PROGRAM is "
        "one of vllm, sglang, transformers, official, llama.cpp, ds4 and dsv4.",
    ),
]
FitOpt = Annotated[
    bool,
    typer.Option(
        "--fit",
        help="Check whether the model fits on this machine or on --gpus; show the memory per device and the command "
        "to run.",
    ),
]
GpusOpt = Annotated[
    str | None,
    typer.Option(
        metavar="NxSIZE",
        help="With --fit: GPUs to check instead of this machine's, such as 2x141GB, 24GB,48GB or 2xH100. With --for "
        "vllm or sglang: show the flags for them, also for several machines: 2x8xH200.",
    ),
]
RamOpt = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="With --fit: RAM, for example 192GB; with --gpus, the RAM of the machine with those GPUs."
    ),
]
ContextOpt = Annotated[
    int | None,
    typer.Option(
        "--max-context",
        min=1,
        help=f"With --fit: context length in tokens. Defaults to {FIT_CONTEXT}.",
    ),
]
BatchOpt = Annotated[int | None, typer.Option(min=1, help="With --fit: number of concurrent sequences. Defaults to 1.")]
DiffOpt = Annotated[
    str | None,
    typer.Option(
        metavar="OTHER",
        autocompletion=complete_model,
        help="Check whether two models have the same values. --layer or --tensor limits the comparison to a part.",
    ),
]
