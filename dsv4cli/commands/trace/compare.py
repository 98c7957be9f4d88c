"""`dsv4 trace compare`: find where two recordings diverge."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsv4cli.commands.starting import import_torch
from dsv4cli.commands.trace.report import show_comparison
from dsv4cli.errors import UsageError
from dsv4cli.harmless import shell_word
from dsv4cli.options import JsonOpt, QuietOpt
from dsv4cli.output import Output

if TYPE_CHECKING:
    from dsv4cli.engine.tracing.judge import Noise
    from dsv4cli.engine.tracing.recording import Recording
    from dsv4cli.engine.tracing.report import TraceComparison

OneArg = Annotated[Path, typer.Argument(metavar="A", help="First recording.")]
OtherArg = Annotated[
    Path, typer.Argument(metavar="B", help="Second recording of the same tokens, or a folder of ATOM's .pt files.")
]
PlotOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Draw the differences, layers × tokens, into a .png or .svg file; needs the extra plot."
    ),
]
StagesOpt = Annotated[bool, typer.Option("--stages", help="Show every stage instead of the worst of each layer.")]
COMPARE_EXAMPLES = (
    "dsv4 trace compare A B",
    "dsv4 trace compare A B --stages",
    "dsv4 trace compare A B --plot parts.png",
)


def compare(
    context: typer.Context,
    one: OneArg,
    other: OtherArg,
    stages: StagesOpt = False,
    plot: PlotOpt = None,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Compare two recordings stage by stage.

    The report shows each stage's cosine similarity and relative L2 distance, in double precision, with its noise: the
    distance that rounding alone causes, as measured by `record`. It names the first stage whose distance rounding does
    not explain. The exit code is 3 if there is one.
    """
    out = Output(context.obj.colours, as_json, quiet)
    import_torch(out)
    from dsv4cli.engine.tracing.opened import open_recording
    from dsv4cli.engine.tracing.report import compared

    with checked(plot) as draw:
        left = open_recording(one)
        right = open_recording(other, left.manifest)
        if None not in (weights := {left.manifest.weights, right.manifest.weights}) and len(weights) > 1:
            out.warning(f"{one} and {other} were recorded with different weights")
        noise, halves = _noise(left, right)
        comparison = compared(left, right, noise, fed=right.manifest.fed, halves=halves)
        draw(comparison)
    out.document({"schema": "dsv4.trace.compare/1", **comparison.record()})
    show_comparison(out, comparison, every=stages)
    if comparison.first is not None:
        raise typer.Exit(3)


@contextmanager
def checked(plot: Path | None) -> "Iterator[Callable[[TraceComparison], None]]":
    """Yield a function that draws a comparison into the `plot` file, or does nothing without one.

    Raises UsageError if the file cannot be drawn.
    """
    from dsv4cli.engine.profiling.plot import check_plot
    from dsv4cli.engine.tracing.plot import draw_differences

    if plot is None:
        yield lambda comparison: None
        return
    check_plot(plot)
    yield lambda comparison: draw_differences(comparison, plot)


def _noise(one: "Recording", other: "Recording") -> "tuple[Noise, Noise | None]":
    """Return the noise to judge by, and the noise of fed halves if the comparison can use it.

    Either recording may have measured the noise.

    Raises:
        UsageError: neither recording has a noise measurement.
    """
    from dsv4cli.engine.tracing.judge import load_noise
    from dsv4cli.engine.tracing.record import has_noise_of

    for recording in (one, other):
        folder = Path(recording.name)
        noise = load_noise(folder, fed=other.manifest.fed)
        if noise is not None:
            is_sharper = not other.manifest.fed and has_noise_of(recording.manifest, one.manifest, other.manifest)
            return noise, load_noise(folder, fed=True) if is_sharper else None
    raise UsageError(
        f"neither {one.name} nor {other.name} has a noise measurement, which compare needs",
        f"record one of them again: dsv4 trace record MODEL --like {shell_word(Path(one.name))} --out DIR",
    )
