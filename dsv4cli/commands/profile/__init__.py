"""`dsv4 profile`: time a model's operations and steps on this machine, and compile its kernels in advance."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4cli.command import Application
from dsv4cli.commands.hidden_folder import note_hidden_folder
from dsv4cli.commands.profile.draft_report import show_drafts
from dsv4cli.commands.profile.report import show_changes, show_kernels, show_step
from dsv4cli.commands.profile.warm import WARM_EXAMPLES, warm
from dsv4cli.commands.starting import import_torch
from dsv4cli.errors import UnsoundResult
from dsv4cli.model_names import complete_model
from dsv4cli.options import BackendOpt, DeviceOpt, JsonOpt, ModelArg, QuietOpt, epilog
from dsv4cli.output import Output, counted, size_text

if TYPE_CHECKING:
    import torch

    from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource
    from dsv4cli.engine.model.transformer import Transformer
    from dsv4cli.engine.weights.reserve import Workload

ShapesArg = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        autocompletion=complete_model,
        help="Model whose shapes to use: flash, pro, flash-0731, tiny (no files needed), or any other.",
    ),
]
CasesOpt = Annotated[
    str,
    typer.Option(
        metavar="N,N",
        help="Tokens per step, separated by commas. Up to 64, each token is a sequence of its own; more "
        "are one prompt.",
    ),
]
ContextOpt = Annotated[
    int, typer.Option("--context", help="Context length of each sequence in tokens, including those of the step.")
]
RanksOpt = Annotated[int, typer.Option(min=1, help="Number of tensor-parallel ranks; uses the shapes of one rank.")]
OnlyOpt = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Only this operation or family; may be repeated.")
]
BaselineOpt = Annotated[
    Path | None,
    typer.Option(metavar="OLD.json", help="Earlier output of --json to compare with; show what has changed."),
]
PlotOpt = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw a roofline plot into a .png or .svg file; needs the extra plot."),
]
StepTokensOpt = Annotated[
    int, typer.Option(min=1, help="Tokens of each sequence in the step: 1 to decode, more for a prefill chunk.")
]
BeforeOpt = Annotated[
    int | None,
    typer.Option("--context", min=0, help="Tokens before the step. Defaults to 4096 for decoding and 0 for prefill."),
]
BatchOpt = Annotated[int, typer.Option(min=1, max=64, help="Number of sequences in the step.")]
DraftsOpt = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="auto|off|N",
        help="Also time decoding with N draft tokens per step, 1 to 7: show the cost of each additional "
        "row, of drafting, and per token. auto uses the drafter's default draft length.",
    ),
]
AcceptOpt = Annotated[
    float | None,
    typer.Option(
        metavar="LENGTH",
        help="With --draft: tokens generated per step (accepted drafts plus one), from 1 to N + 1. "
        "By default, show all whole numbers in this range.",
    ),
]
TraceOpt = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Write one step as a trace for Perfetto or chrome://tracing.")
]

profile = Application(
    help="Measure how fast a model's operations and steps are on this machine.",
    epilog=epilog("dsv4 profile kernels --model flash", "dsv4 profile step", "dsv4 profile warm --model flash"),
)


@profile.command(
    epilog=epilog(
        "dsv4 profile kernels",
        "dsv4 profile kernels --model flash --tokens 1,16,4096 --tp 2",
        "dsv4 profile kernels --model pro --only attention --context 131072",
        "dsv4 profile kernels --json > old.json",
        "dsv4 profile kernels --baseline old.json",
    )
)
def kernels(
    context: typer.Context,
    model: ShapesArg = "nano",
    tokens: CasesOpt = "1,16",
    length: ContextOpt = 4096,
    tp: RanksOpt = 1,
    only: OnlyOpt = None,
    baseline: BaselineOpt = None,
    plot: PlotOpt = None,
    device: DeviceOpt = "auto",
    backend: BackendOpt = "auto",
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Time every operation of a model, one by one.

    The command first measures how fast this device can copy, read and multiply. It compares each operation with its
    reference before it shows a time. On a GPU, the inputs come from memory, not from the cache.

    With --json, every operation is timed again at the end of the run; with --baseline, only those that seem to have
    changed. A change is reported only if every pass shows it.
    """
    out = import_torch(Output(context.obj.colours, as_json, quiet))
    from dsv4cli.engine.profiling.ceilings import measure_ceilings
    from dsv4cli.engine.profiling.document import kernels_document
    from dsv4cli.engine.profiling.kernels import check_context, profile_kernels, read_shapes, read_tokens, time_again
    from dsv4cli.engine.profiling.plot import check_plot, draw_roofline
    from dsv4cli.engine.system.backend import resolve_backend
    from dsv4cli.engine.system.device import resolve_device

    counts, torch_device = read_tokens(tokens), resolve_device(device)
    chosen, old = resolve_backend(backend, torch_device), _baseline(baseline, "kernels")
    if plot is not None:
        check_plot(plot)
    shapes = read_shapes(model, tp)
    check_context(shapes, counts, length)
    measured = profile_kernels(shapes, counts, length, only or (), torch_device, chosen)
    out.status(f"measuring on {torch_device}; this takes a while for a large model")
    document = kernels_document(model, chosen, tp, torch_device, measure_ceilings(torch_device), measured)
    again = _again(document, old, as_json)
    if again:
        out.status(f"timing {counted(len(again), 'operation')} again, to tell changes from noise")
        time_again(shapes, again, torch_device, chosen)
    if plot is not None:
        draw_roofline(document, plot)
    _report(out, document, old)
    _raise_if_wrong(document)


@profile.command(
    short_help="Time a whole step of a model and each part of it.",
    epilog=epilog(
        "dsv4 profile step",
        "dsv4 profile step --model flash --context 131072",
        "dsv4 profile step --model random:flash,layers=6 --tokens 2048",
        "dsv4 profile step --batch 16 --trace step.json",
        "dsv4 profile step --draft 3 --accept 2.34",
    ),
)
def step(
    context: typer.Context,
    model: ModelArg = "nano",
    tokens: StepTokensOpt = 1,
    before: BeforeOpt = None,
    batch: BatchOpt = 1,
    draft: DraftsOpt = "off",
    accept: AcceptOpt = None,
    baseline: BaselineOpt = None,
    trace: TraceOpt = None,
    device: DeviceOpt = "auto",
    backend: BackendOpt = "auto",
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Time a whole step of a model, prefill or decode, and each part of it.

    The KV cache holds random values for the tokens before the step, so nothing has to be prefilled.

    --draft also times steps that verify draft tokens. Their rows are random tokens, which share few experts. Rows of
    real text share more experts and cost no more.
    """
    out = import_torch(Output(context.obj.colours, as_json, quiet))
    from dsv4cli.engine.checkpoint.source import check_drafter, resolve_model
    from dsv4cli.engine.profiling.ceilings import measure_ceilings
    from dsv4cli.engine.profiling.document import step_document
    from dsv4cli.engine.profiling.drafting import choose_drafts, profile_drafts
    from dsv4cli.engine.profiling.output_file import check_writable
    from dsv4cli.engine.profiling.step import choose_load, profile_step
    from dsv4cli.engine.settings import parse_drafting
    from dsv4cli.engine.system.backend import resolve_backend
    from dsv4cli.engine.system.device import resolve_device

    source, torch_device, drafting = resolve_model(model), resolve_device(device), parse_drafting(draft)
    note_hidden_folder(out, model)
    chosen, old = resolve_backend(backend, torch_device), _baseline(baseline, "step")
    if trace is not None:
        check_writable("--trace", trace)
    load = choose_load(source.identity.config, tokens, before, batch)
    check_drafter(source, drafting)
    drafts = choose_drafts(source.identity.config, load, drafting, accept)
    ceilings = measure_ceilings(torch_device)
    transformer = _load(out, source, torch_device, drafts.drafts if drafts else 0, load.workload)
    found = profile_step(transformer, load, torch_device, chosen, trace)
    options = (source.sampling, torch_device, chosen)
    drafted = None if drafts is None else profile_drafts(transformer, load, drafts, *options)
    document = step_document(model, chosen, torch_device, load, ceilings, found, drafted)
    _report(out, document, old)
    if trace is not None:
        out.hint(f"open {trace} in https://ui.perfetto.dev")


profile.command(epilog=epilog(*WARM_EXAMPLES))(warm)


def _baseline(path: Path | None, kind: str) -> dict[str, Any] | None:
    from dsv4cli.engine.profiling.compare import read_baseline

    return None if path is None else read_baseline(path, kind)


def _raise_if_wrong(document: dict[str, Any]) -> None:
    wrong = next((line for line in document["results"] if line["wrong"]), None)
    if wrong is not None:
        raise UnsoundResult(
            f"{wrong['name']} with {wrong['tokens']} tokens: {wrong['wrong']}",
            "compare with --backend torch or another --device",
        )


def _again(document: dict[str, Any], old: dict[str, Any] | None, as_json: bool) -> list[dict[str, Any]]:
    """Return the operations to time a second time.

    With --json these are all, because later runs compare with the file. Otherwise, they are those that seem to differ
    from the baseline.
    """
    from dsv4cli.engine.profiling.compare import in_doubt

    lines = document["results"] if as_json else in_doubt(old, document) if old else []
    return [line for line in lines if line["seconds"]]


def _load(
    out: Output, source: "FolderSource | RandomSource", device: "torch.device", drafts: int, load: "Workload"
) -> "Transformer":
    from dsv4cli.engine.model.numerics import Numerics
    from dsv4cli.engine.settings import Drafting
    from dsv4cli.engine.weights.load import load_model

    with out.progress("loading") as progress:
        model = load_model(
            source, Numerics.reference(), device=device, progress=progress, drafting=Drafting(drafts), load=load
        )
    out.status(f"{source.name} on {device}: {size_text(sum(p.nbytes for p in model.parameters()))}")
    return model


def _report(out: Output, document: dict[str, Any], old: dict[str, Any] | None) -> None:
    from dsv4cli.engine.profiling.compare import compare

    comparison = None if old is None else compare(old, document)
    out.document(document | {"baseline": comparison and comparison.record()})
    (show_kernels if document["kind"] == "kernels" else show_step)(out, document)
    if document.get("draft"):
        show_drafts(out, document["draft"])
    if comparison is not None:
        show_changes(out, comparison)
