"""Human-readable output of `dsv4 trace`: one line per layer, then the first stage that rounding does not explain."""

from collections.abc import Sequence
from itertools import groupby
from math import isfinite
from typing import TYPE_CHECKING

from dsv4cli.output import Output, counted

if TYPE_CHECKING:
    from dsv4cli.engine.tracing.judge import StageVerdict
    from dsv4cli.engine.tracing.report import TraceComparison

HEADER = ("stage", "cosine", "relative L2", "noise", "times the limit")


def show_comparison(out: Output, comparison: "TraceComparison", *, every: bool) -> None:
    """Print the table, the first stage beyond rounding with its largest difference, and the layers that diverge."""
    shown = comparison.verdicts if every else _worst(comparison.verdicts)
    out.table([HEADER, *map(_row, shown)], numbers=True)
    out.line()
    first, manifest = comparison.first, comparison.one.manifest
    if first is None:
        tokens = counted(sum(len(text.ids) for text in manifest.texts), "token")
        stages = counted(len(comparison.verdicts), "stage")
        verdict = "both are identical" if comparison.identical else "rounding explains every difference"
        rest = "; drafters are not compared" if comparison.drafters else ""
        out.line(f"{verdict}: {stages}, {tokens}{rest}", strong=True)
        return
    out.line(f"{first.place}: {_times(first)}", strong=True)
    found = first.difference
    if found.largest is not None:
        where = f"token {found.largest.position}" + (f" of text {found.largest.text}" if found.largest.text else "")
        index = ", ".join(map(str, found.largest.index))
        out.line(f"the largest difference is {found.largest.difference:.3g}, at {where}, index {index}")
    layers = [verdict.difference.layer for verdict in comparison.beyond if verdict.difference.stage == found.stage]
    if len(layers) > 1:
        out.line(f"the same stage diverges in layers {_listed(layers, manifest.ratios)}")


def _worst(verdicts: "Sequence[StageVerdict]") -> "list[StageVerdict]":
    """Return each layer's first stage beyond rounding. If there is none, the last of those closest to the limit."""
    worst = []
    for _, layer in groupby(verdicts, key=lambda verdict: verdict.difference.layer):
        own = list(layer)
        worst.append(next((one for one in own if one.beyond), max(reversed(own), key=lambda one: one.excess)))
    return worst


def _row(verdict: "StageVerdict") -> tuple[str, ...]:
    found = verdict.difference
    return (
        verdict.place,
        f"{found.cosine:.8f}",
        f"{found.relative:.2e}",
        f"{verdict.noise:.2e}",
        _share(verdict.excess),
    )


def _share(excess: float) -> str:
    if not isfinite(excess):
        return "beyond"
    return f"{excess:.2f}" if excess < 10 else f"{excess:,.0f}"


def _times(first: "StageVerdict") -> str:
    if isfinite(first.excess):
        return f"{first.excess:,.1f} times the difference that rounding explains"
    return "rounding cannot explain this difference"


def _listed(layers: Sequence[int], ratios: Sequence[int]) -> str:
    """Return the layers as text, with their compression ratio if they share one: it tells which kind is wrong."""
    common = {ratios[layer] for layer in layers if layer < len(ratios)}
    kind = f", of ratio {min(common)}" if len(common) == 1 else ""
    return ", ".join(map(str, layers)) + kind
