"""`dsv4 trace bisect`: record two sides and find where they diverge."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dsv4cli.command import OTHER_SIDE
from dsv4cli.commands.starting import import_torch
from dsv4cli.commands.trace.compare import PlotOpt, StagesOpt, checked
from dsv4cli.commands.trace.report import show_comparison
from dsv4cli.commands.trace.side import LayersOpt, WhatOpt, parts_of
from dsv4cli.commands.trace.sides import DRAFTS, SideOptions, Sides, kept
from dsv4cli.commands.trace.texts import IdsOpt, PromptOpt, PromptsOpt, StepsOpt, TextOptions
from dsv4cli.errors import UsageError
from dsv4cli.model_names import complete_model
from dsv4cli.options import JsonOpt, ModelArg, QuietOpt
from dsv4cli.output import Output

AgainstOpt = Annotated[
    str | None,
    typer.Option(
        metavar="OTHER",
        autocompletion=complete_model,
        help="Another model or a recording; also a folder of ATOM's .pt files.",
        rich_help_panel=OTHER_SIDE,
    ),
]
BackendSideOpt = Annotated[
    Literal["triton", "torch"] | None, typer.Option("--backend", help="Other kernels.", rich_help_panel=OTHER_SIDE)
]
NumericsOpt = Annotated[
    Literal["plain"] | None,
    typer.Option(help="plain computes in FP32, without the official rounding.", rich_help_panel=OTHER_SIDE),
]
DeviceSideOpt = Annotated[str | None, typer.Option("--device", help="Another device.", rich_help_panel=OTHER_SIDE)]
TpSideOpt = Annotated[
    int | None, typer.Option("--tp", min=2, help="Several tensor-parallel ranks.", rich_help_panel=OTHER_SIDE)
]
ChunkSideOpt = Annotated[
    int | None,
    typer.Option(
        "--prefill-chunk",
        min=1,
        help="Fewer prompt tokens per prefill step; 1 computes the prompt like decode steps.",
        rich_help_panel=OTHER_SIDE,
    ),
]
DraftsOpt = Annotated[
    bool, typer.Option("--drafts", help=f"Steps that verify {DRAFTS} draft tokens.", rich_help_panel=OTHER_SIDE)
]
SlotsOpt = Annotated[
    bool,
    typer.Option(
        "--slots",
        help="The same text in a cache slot that another text has used, and in a batch with three others.",
        rich_help_panel=OTHER_SIDE,
    ),
]
KeepOpt = Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the recordings in this new or empty folder.")]
BISECT_EXAMPLES = (
    "dsv4 trace bisect flash --backend torch",
    "dsv4 trace bisect flash --against OUT",
    "dsv4 trace bisect nano --prefill-chunk 1",
    "dsv4 trace bisect nano --drafts",
    "dsv4 trace bisect nano --slots",
)


def bisect(
    context: typer.Context,
    model: ModelArg = "nano",
    against: AgainstOpt = None,
    backend: BackendSideOpt = None,
    numerics: NumericsOpt = None,
    device: DeviceSideOpt = None,
    tp: TpSideOpt = None,
    chunk: ChunkSideOpt = None,
    drafts: DraftsOpt = False,
    slots: SlotsOpt = False,
    prompt: PromptOpt = None,
    ids: IdsOpt = None,
    prompts: PromptsOpt = None,
    steps: StepsOpt = 4,
    layers: LayersOpt = None,
    what: WhatOpt = None,
    stages: StagesOpt = False,
    plot: PlotOpt = None,
    keep: KeepOpt = None,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Find the first stage where two computations of the same tokens diverge.

    One side is the model as `run` computes it with default settings, without a batch; the options set what is different
    on the other side. Each half of a block on the other side receives the first side's streams as its input, so that
    every layer is judged by itself. The report names the first stage whose distance rounding does not explain. The exit
    code is 3 if there is one.
    """
    change = SideOptions(against, backend, numerics, device, tp, chunk, drafts)
    _check(change, slots=slots)
    out, given, parts = (
        Output(context.obj.colours, as_json, quiet),
        TextOptions(prompt, ids, prompts, steps),
        parts_of(layers, what),
    )
    import_torch(out)
    with kept(keep) as folder, checked(plot) as draw:
        sides = Sides(out, model, change, given, parts, folder)
        comparisons = sides.slots() if slots else [sides.compared()]
        worst = next((one for one in comparisons if one.first is not None), comparisons[0])
        draw(worst)
        out.document({"schema": "dsv4.trace.bisect/1", "comparisons": [one.record() for one in comparisons]})
        for one in comparisons:
            out.line(f"{one.one.name} and {one.other.name}")
            out.line()
            show_comparison(out, one, every=stages)
    if worst.first is not None:
        raise typer.Exit(3)


def _check(change: SideOptions, *, slots: bool) -> None:
    """Raise UsageError unless the options change the other side, and do not combine --slots with other changes."""
    if slots == (change != SideOptions()):
        raise UsageError(
            "--slots cannot be combined with other changes" if slots else "no option sets how the other side differs",
            "use --slots alone, or any of --against, --backend, --numerics, --device, --tp, --prefill-chunk, --drafts",
        )
