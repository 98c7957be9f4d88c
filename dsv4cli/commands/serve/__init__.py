"""`dsv4 serve`: an HTTP server with OpenAI- and Anthropic-compatible APIs."""

from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dsv4cli.commands.compiling import early_compiler
from dsv4cli.commands.job import open_job
from dsv4cli.commands.serve.access import (
    AccessOptions,
    UdsOpt,
    address_of,
    guard_of,
)
from dsv4cli.commands.serve.engine_options import EngineOptions, check_combination
from dsv4cli.commands.serve.engine_server import Listen, serve_with_engine
from dsv4cli.commands.serve.run_server import Policy, serve_model
from dsv4cli.commands.starting import import_torch
from dsv4cli.errors import UsageError, extra_remedy
from dsv4cli.options import ModelArg, ModelOptions, QuietOpt, takes_model_options, takes_options
from dsv4cli.output import Output

if TYPE_CHECKING:
    from dsv4cli.engine.server.warm import CacheOptions

ServeTpOpt = Annotated[
    int | None,
    typer.Option("--tp", min=1, help="Number of tensor-parallel ranks on this machine (one process and one GPU each)."),
]
HostOpt = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS", help="Address to listen on. 0.0.0.0 accepts other machines: use it with --api-key-file."
    ),
]
PortOpt = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free port.")]
AliasOpt = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Model name for clients; may be repeated. Defaults to the model's own name."),
]
MaxQueueOpt = Annotated[
    int,
    typer.Option(
        min=0,
        help="Maximum number of requests that wait while 64 are running; further requests are rejected with 503.",
    ),
]
StepMsOpt = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Target for the mean inter-token latency in milliseconds while other prompts are prefilled; 0 "
        "sets no target. Defaults to 50 on a GPU and 400 elsewhere.",
    ),
]
CacheMemoryOpt = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Maximum GPU memory for the KV cache: running requests and cached prefixes. The same "
        "amount of host memory holds prefixes evicted from the GPU. Defaults to half of the memory that the weights "
        "leave free.",
    ),
]
GraceOpt = Annotated[
    float,
    typer.Option(min=0, max=86400, help="Seconds to let running answers finish after Ctrl-C, SIGTERM or SIGHUP."),
]
ReasoningFieldOpt = Annotated[
    Literal["both", "reasoning_content", "reasoning"],
    typer.Option(
        help="Field of OpenAI API responses that contains the reasoning; clients differ in which one they read."
    ),
]
HungSecondsOpt = Annotated[
    float,
    typer.Option(
        "--health-timeout",
        min=0,
        metavar="SECONDS",
        help="/health returns 503 if requests are running and no step has finished for this long. Time spent compiling "
        "kernels does not count.",
    ),
]
LogJsonOpt = Annotated[
    bool, typer.Option("--log-json", help="Write the log to stderr as JSON, one object per line, and nothing else.")
]
LogPromptsOpt = Annotated[bool, typer.Option("--log-prompts", help="Print each prompt to stderr.")]
NoStoreOpt = Annotated[
    bool,
    typer.Option(
        "--no-store",
        help="Do not store responses of the Responses API; clients must send the whole conversation each time.",
    ),
]
SERVE_EXAMPLES = (
    "dsv4 serve --model flash --tp 2",
    "dsv4 serve --port 9000 --alias deepseek-chat --think high",
    "dsv4 serve --model flash --host 0.0.0.0 --api-key-file keys.txt",
    "dsv4 serve --model flash --allow-host llm.example.com --api-key-file keys.txt",
    "dsv4 serve --model pro --engine vllm --gpus 2x8xH200 --print",
)


@takes_model_options(model=ModelArg)
@takes_options(AccessOptions, "access")
@takes_options(EngineOptions, "engine_options")
def serve(
    context: typer.Context,
    options: ModelOptions,
    engine_options: EngineOptions,
    access: AccessOptions,
    host: HostOpt = "127.0.0.1",
    port: PortOpt = 8000,
    alias: AliasOpt = None,
    tp: ServeTpOpt = None,
    uds: UdsOpt = None,
    max_queue: MaxQueueOpt = 256,
    step_ms: StepMsOpt = None,
    cache_memory: CacheMemoryOpt = None,
    grace: GraceOpt = 30.0,
    reasoning_field: ReasoningFieldOpt = "both",
    health_timeout: HungSecondsOpt = 600.0,
    log_json: LogJsonOpt = False,
    log_prompts: LogPromptsOpt = False,
    no_store: NoStoreOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Serve the model over HTTP with OpenAI- and Anthropic-compatible APIs.

    Sampling options are defaults for requests that do not set their own. The server prints its address to stdout when
    it is ready. Ctrl-C lets running answers finish; press it twice to stop at once. With --engine, the server is that
    of vLLM or SGLang.

    Environment variables set options too: DSV4_SERVE_MAX_QUEUE=64 is --max-queue 64. Options on the command line win.
    """
    start, out = perf_counter(), Output(context.obj.colours, quiet=quiet or log_json)
    names = tuple(alias or ())
    check_combination(context, engine_options)
    address = address_of(context, host, port, uds)
    _check(options.device, context.obj.torchrun, host, names)
    if engine_options.engine is not None:
        listen = Listen(host, port, names, tp, access.api_key_file, grace)
        return serve_with_engine(out, options, engine_options, listen)
    _check_packages()
    compiler = early_compiler(options)
    import_torch(out)
    fields = ("reasoning_content", "reasoning") if reasoning_field == "both" else (reasoning_field,)
    policy = Policy(
        guard_of(address, access), _cache(cache_memory, step_ms), names, max_queue, grace, options.seed, fields,
        log_prompts, not no_store, access.api_key_file, access.root_path, health_timeout, log_json and not quiet,
    )  # fmt: skip
    policy.warn(out)
    raise typer.Exit(serve_model(open_job(out, options, compiler=compiler), tp or 1, address, policy, start))


def _check(device: str, torchrun: bool, host: str, names: tuple[str, ...]) -> None:
    from dsv4cli.engine.settings import check_device, require

    check_device(device)
    require(bool(host), "--host", "empty", "use 127.0.0.1, 0.0.0.0 or an address of this machine")
    require(all(map(str.strip, names)), "--alias", "empty", "use a name, or remove --alias")
    if torchrun:
        raise UsageError(
            "serve cannot run under torchrun: it starts its own ranks, on one machine",
            "run it without torchrun and with --tp",
        )


def _cache(cache_memory: str | None, step_ms: float | None) -> "CacheOptions":
    from dsv4cli.engine.server.warm import CacheOptions
    from dsv4cli.engine.settings import parse_size

    return CacheOptions(None if cache_memory is None else parse_size("--cache-memory", cache_memory), step_ms)


def _check_packages() -> None:
    """Raise UsageError if a package of dsv4's own server is missing."""
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UsageError(f"dsv4 serve needs the package {error.name}", extra_remedy("serve")) from None
