"""Options of `dsv4 serve --engine`: another engine's server, and the machines it runs on."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import typer

from dsv4cli.errors import UsageError

# the panel of the help page, as command.py calls it
PANEL = "Other engine"
# options of `serve` that another engine's server has too
SHARED = {
    "model",
    "named_model",
    "host",
    "port",
    "alias",
    "tp",
    "api_key_file",
    "max_context",
    "draft",
    "grace",
    "quiet",
}

EngineOpt = Annotated[
    Literal["vllm", "sglang"] | None,
    typer.Option(
        help="Start the server of this engine, which must be installed, with the flags for the model and the GPUs."
    ),
]
EnginePythonOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="Python of the environment that has the engine. Defaults to the engine's program on PATH."
    ),
]
NodesOpt = Annotated[int | None, typer.Option(min=1, max=1024, help="Number of machines; run the command on each.")]
NodeRankOpt = Annotated[
    int | None,
    typer.Option(min=0, help="Number of this machine, from 0. Machine 0 has the API."),
]
HeadOpt = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS[:PORT]", help="Address of machine 0, and a free port there (29501)."),
]
ClusterOpt = Annotated[
    str | None,
    typer.Option(
        metavar="NxGPUS",
        help="GPUs to plan for instead of this machine's: 8xH200, or 2x8xH200 for two machines.",
        rich_help_panel=PANEL,
    ),
]
PrintOpt = Annotated[bool, typer.Option("--print", help="Print the command of each machine, and start nothing.")]
ReadyTimeoutOpt = Annotated[
    int,
    typer.Option(min=1, metavar="SECONDS", help="Time that the engine has to load the model."),
]
NoVerifyOpt = Annotated[
    bool,
    typer.Option("--no-verify", help="Do not check the answers of the server."),
]


@dataclass(frozen=True)
class EngineOptions:
    """The options, as given."""

    engine: EngineOpt = None
    engine_python: EnginePythonOpt = None
    nodes: NodesOpt = None
    node_rank: NodeRankOpt = None
    head: HeadOpt = None
    gpus: ClusterOpt = None
    only_print: PrintOpt = False
    ready_timeout: ReadyTimeoutOpt = 3600
    no_verify: NoVerifyOpt = False


def check_combination(context: typer.Context, options: EngineOptions) -> None:
    """Raise UsageError for an option that needs --engine, or that another engine's server does not have."""
    own = {one.name for one in fields(EngineOptions)}
    for param in context.command.params:
        name = param.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name == "DEFAULT":
            continue
        if options.engine is None and name in own:
            raise UsageError(f"{param.opts[0]} needs --engine", "add --engine vllm or --engine sglang")
        if options.engine is not None and name not in own | SHARED:
            raise UsageError(
                f"{param.opts[0]} has no effect on the server of {options.engine}",
                f"remove {param.opts[0]}, or remove --engine to use dsv4's own server",
            )
