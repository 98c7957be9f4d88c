"""Heat map of the differences between two recordings: one row per layer, one column per token."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from dsv4cli.engine.tracing.report import TraceComparison
from dsv4cli.engine.tracing.stages import STREAMS
from dsv4cli.errors import UsageError

SIZE, DPI = (13.0, 7.0), 120  # inches, dots per inch
# a smaller relative L2 is drawn as no difference: fp32 has 7 digits
LEAST = 1e-8
MAX_LABELS = 24  # names on the vertical axis


def draw_differences(comparison: TraceComparison, path: Path) -> None:
    """Draw the relative L2 difference of each token's residual streams after each layer, on a logarithmic scale.

    Values without a difference are gray; the first place that rounding does not explain is framed.

    Raises:
        UsageError: the recordings hold no residual streams.
    """
    found = [one.difference for one in comparison.verdicts if one.difference.stage == STREAMS]
    if not found:
        raise UsageError("--plot draws the residual streams, which these recordings lack", "record --what block too")
    figure = import_module("matplotlib.figure").Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    _heat_map(figure, axes, torch.stack([one.rows.nan_to_num(nan=1.0, posinf=1.0) for one in found]))
    names = ["embedding" if not one.layer else f"layer {one.layer - 1}" for one in found]
    step = -(-len(found) // MAX_LABELS)
    axes.set_yticks(range(0, len(found), step), names[::step])
    axes.set(xlabel="token", ylabel="residual streams after")
    _texts(axes, [len(text.ids) for text in comparison.one.manifest.texts])
    first = comparison.first
    if first is None:
        same = all(not one.rows.any() for one in found)
        axes.set_title("no difference" if same else "rounding explains every difference")
    else:
        axes.set_title(f"first difference that rounding does not explain: {first.place}")
        layers = [one.layer for one in found]
        if first.difference.layer in layers:
            row = layers.index(first.difference.layer)
            axes.axhspan(row - 0.5, row + 0.5, fill=False, edgecolor="red", linewidth=2)
    figure.savefig(path, dpi=DPI)


def _heat_map(figure: Any, axes: Any, rows: torch.Tensor) -> None:
    """Color (layers, tokens) relative differences between the smallest and the largest one."""
    differs = rows > LEAST
    colors = import_module("matplotlib").colormaps["viridis"].with_extremes(bad="0.85")
    norm = import_module("matplotlib.colors").LogNorm
    drawn = rows.masked_fill(~differs, float("nan")).numpy()
    if not differs.any():
        axes.imshow(drawn, aspect="auto", origin="lower", cmap=colors)
        return
    low, high = float(rows[differs].min()), float(rows[differs].max())
    scale = norm(low if low < high else low / 10, high if low < high else high * 10)
    image = axes.imshow(drawn, aspect="auto", origin="lower", interpolation="nearest", cmap=colors, norm=scale)
    figure.colorbar(image, ax=axes, label="relative L2 difference (gray: none)")


def _texts(axes: Any, lengths: list[int]) -> None:
    """Separate the recorded texts by lines, and number them above the map."""
    end = 0
    for number, length in enumerate(lengths, 1):
        if len(lengths) > 1:
            axes.annotate(
                f"text {number}",
                (end + length / 2 - 0.5, 1.0),
                xycoords=("data", "axes fraction"),
                ha="center",
                va="bottom",
            )
        end += length
        if number < len(lengths):
            axes.axvline(end - 0.5, color="white", linewidth=1.5)
