"""`dsv4 profile warm`: compile a model's kernels in advance, also for a GPU that this machine does not have."""

from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4cli.commands.compiling import compiled_sentence
from dsv4cli.commands.starting import import_torch
from dsv4cli.errors import Dsv4Error, UsageError
from dsv4cli.model_names import complete_model
from dsv4cli.options import DraftOpt, ExactOpt, JsonOpt, QuietOpt
from dsv4cli.output import Output, counted

if TYPE_CHECKING:
    from dsv4cli.engine.compiling.demand import Demand
    from dsv4cli.engine.weights.placement import FreeMemory

# maximum failures listed
MOST_SHOWN = 5
ShapesArg = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        autocompletion=complete_model,
        help="Model to compile for: flash, pro, flash-0731, tiny (no files needed), or any other that run accepts.",
    ),
]
RanksOpt = Annotated[int, typer.Option("--tp", min=1, help="Number of tensor-parallel ranks to compile for.")]
LengthOpt = Annotated[
    int | None,
    typer.Option(
        "--max-context", min=2, help="Maximum context length in tokens, prompt and answer together. Defaults to 131072."
    ),
]
SequencesOpt = Annotated[int, typer.Option("--batch", min=1, max=64, help="Number of prompts answered at once.")]
ServeOpt = Annotated[
    bool, typer.Option("--serve", help="Compile what serve needs: prompts of any length, up to 64 answered at once.")
]
CardOpt = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="GPU to compile for, for example h200. Defaults to the GPU of this machine."),
]
WARM_EXAMPLES = (
    "dsv4 profile warm --model flash",
    "dsv4 profile warm --model flash --tp 2 --batch 16",
    "TRITON_CACHE_DIR=cache dsv4 profile warm --model flash --card h200",
)


def warm(
    context: typer.Context,
    model: ShapesArg = "nano",
    tp: RanksOpt = 1,
    length: LengthOpt = None,
    batch: SequencesOpt = 1,
    serve: ServeOpt = False,
    draft: DraftOpt = "auto",
    exact: ExactOpt = False,
    card: CardOpt = None,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Compile a model's kernels in advance.

    The kernels go into Triton's cache, TRITON_CACHE_DIR or ~/.triton/cache. `run`, `chat` and `serve` compile missing
    kernels while they load the model. Neither weights nor a GPU is needed: with --card you can fill the cache while
    you build a container image. Use the same versions of Triton and dsv4 there as in production.
    """
    out = Output(context.obj.colours, as_json, quiet)
    if serve and batch > 1:
        raise UsageError("--serve and --batch cannot be combined", "remove --batch: serve answers up to 64 at once")
    import_torch(out)
    from dsv4cli.engine.compiling.card import find_card
    from dsv4cli.engine.compiling.compile_ahead import Compilation, found_memory
    from dsv4cli.engine.compiling.process import cache_folder, check_cache_folder
    from dsv4cli.engine.weights.placement import MemoryLimits

    check_cache_folder()
    name, found, device = find_card(card)
    memory = None if device is None else found_memory(device, MemoryLimits(), tp)
    demand = _demand(model, tp, length, batch, serve, draft, exact, memory)
    start = perf_counter()
    with Compilation(demand, found) as ahead, out.counting(f"compiling kernels for {name}") as show:
        counts = ahead.wait(lambda counts: show(counts.done, counts.found, ""))
    seconds = perf_counter() - start
    if counts.compiled:
        out.status(compiled_sentence(counts, seconds))
    out.line(f"{counted(counts.found - len(counts.failed), 'kernel')} of {model} for {name} in {cache_folder()}")
    document: dict[str, Any] = {"schema": "dsv4.profile.warm/1", "model": model, "card": name, "tp": tp}
    document |= {"kernels": counts.found, "compiled": counts.compiled, "already_there": counts.present}
    out.document(document | {"failed": counts.failed, "seconds": seconds, "folder": str(cache_folder())})
    if counts.failed:
        raise Dsv4Error(
            f"cannot compile {counted(len(counts.failed), 'kernel')} in advance",
            "run the command again; kernels that still fail are compiled at their first launch",
            counts.failed[:MOST_SHOWN],
        )


def _demand(
    model: str,
    tp: int,
    length: int | None,
    batch: int,
    serve: bool,
    draft: str,
    exact: bool,
    memory: "FreeMemory | None",
) -> "Demand":
    """Return the demand of `run` and `chat`, or of `serve`. Raises Dsv4Error."""
    from dsv4cli.engine.checkpoint.gguf.loading import split_tensors
    from dsv4cli.engine.checkpoint.sharding import check_ranks
    from dsv4cli.engine.checkpoint.source import check_drafter, resolve_model
    from dsv4cli.engine.compiling.demand import SAMPLING_KINDS, demand_of
    from dsv4cli.engine.config.capacity import MAX_SLOTS
    from dsv4cli.engine.config.presets import PRESETS
    from dsv4cli.engine.model.numerics import Numerics
    from dsv4cli.engine.settings import Limits, parse_drafting
    from dsv4cli.engine.weights.reserve import FAR

    source, drafting = resolve_model(f"random:{model}" if model in PRESETS else model), parse_drafting(draft)
    check_drafter(source, drafting)
    config, formats = source.identity.config, source.identity.formats
    check_ranks(config, split_tensors(source.identity).values(), tp, rounds=True)
    context = min(length or FAR, config.max_position_embeddings)
    return demand_of(
        config,
        formats,
        Numerics.reference(exact),
        Limits(max_context=length if serve else context),
        [source.sampling, *SAMPLING_KINDS],
        drafting,
        [context] * batch if batch > 1 else None,
        ranks=tp,
        sequences=MAX_SLOTS if serve else 1,
        memory=memory,
        gguf_types=source.identity.gguf_types,
    )
