"""`dsv4 serve`: the model behind an API that clients already speak."""

from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Literal

import typer

from dsv4cli.commands.compiling import early_compiler
from dsv4cli.commands.job import open_job
from dsv4cli.commands.serve.running import Address, Policy, serve_model
from dsv4cli.errors import UsageError
from dsv4cli.options import ModelArg, ModelOptions, QuietOpt, takes_model_options
from dsv4cli.output import Output

ServeTpOpt = Annotated[
    int | None, typer.Option("--tp", min=1, help="Processes of this machine that share the model, one GPU each.")
]
HostOpt = Annotated[
    str, typer.Option(metavar="ADDRESS", help="What to listen on; 0.0.0.0 lets other machines in: then give keys.")
]
PortOpt = Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes one that is free.")]
AliasOpt = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="What clients call the model; may be repeated. If absent, its own name."),
]
ApiKeyFileOpt = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Keys, one a line: clients must send one of them.")
]
MaxQueueOpt = Annotated[
    int, typer.Option(min=0, help="Requests that may wait beside the 64 that run; more are refused for now.")
]
StepMsOpt = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Milliseconds between two tokens of an answer while prompts of others are read; 0 reads them whole. If "
        "absent, 50 on a GPU and 400 elsewhere.",
    ),
]
CacheMemoryOpt = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="The most GPU memory for prompts and answers, of those that run and kept for those that begin alike; as "
        "much of host memory keeps more. If absent, half of what the weights leave.",
    ),
]
GraceOpt = Annotated[
    float, typer.Option(min=0, max=86400, help="Seconds that running answers have after Ctrl-C, SIGTERM or SIGHUP.")
]
ReasoningFieldOpt = Annotated[
    Literal["both", "reasoning_content", "reasoning"],
    typer.Option(help="Where OpenAI's API has the thinking of an answer: clients differ."),
]
LogPromptsOpt = Annotated[bool, typer.Option("--log-prompts", help="Show each prompt on stderr.")]


@takes_model_options(model=ModelArg)
def serve(
    context: typer.Context,
    options: ModelOptions,
    host: HostOpt = "127.0.0.1",
    port: PortOpt = 8000,
    alias: AliasOpt = None,
    tp: ServeTpOpt = None,
    api_key_file: ApiKeyFileOpt = None,
    max_queue: MaxQueueOpt = 256,
    step_ms: StepMsOpt = None,
    cache_memory: CacheMemoryOpt = None,
    grace: GraceOpt = 30.0,
    reasoning_field: ReasoningFieldOpt = "both",
    log_prompts: LogPromptsOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Serve the model over HTTP, with OpenAI's and Anthropic's APIs.

    Options of answers hold where a request does not say otherwise. stdout has the server's address once it is ready.
    Ctrl-C lets running answers finish, twice it ends at once.
    """
    start, out = perf_counter(), Output(context.obj.colours, quiet=quiet)
    names = tuple(alias or ())
    _check(options.device, context.obj.torchrun, host, names)
    compiler = early_compiler(options)
    from dsv4cli.engine.server.guard import Guard, is_loopback, read_keys
    from dsv4cli.engine.server.warm import Sharing
    from dsv4cli.engine.settings import parse_size

    keys = () if api_key_file is None else read_keys(api_key_file)
    if not keys and not is_loopback(host):
        out.warning(f"whoever reaches {host} can use this server: --api-key-file asks for a key")
    fields = ("reasoning_content", "reasoning") if reasoning_field == "both" else (reasoning_field,)
    memory = None if cache_memory is None else parse_size("--cache-memory", cache_memory)
    share = Sharing(memory, step_ms)
    policy = Policy(Guard(keys, host), share, names, max_queue, grace, options.seed, fields, log_prompts)
    code = serve_model(replace(open_job(out, options), compiler=compiler), tp or 1, Address(host, port), policy, start)
    raise typer.Exit(code)


def _check(device: str, torchrun: bool, host: str, names: tuple[str, ...]) -> None:
    from dsv4cli.engine.settings import check_device, require

    check_device(device)
    require(bool(host), "--host", "empty", "use 127.0.0.1, 0.0.0.0 or an address of this machine")
    require(all(map(str.strip, names)), "--alias", "empty", "give a name, or leave it out")
    if torchrun:
        raise UsageError("serve starts its ranks itself, on one machine", "leave out torchrun and give --tp")
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UsageError(f"dsv4 serve needs {error.name}", "pip install 'dsv4[serve]'") from None
