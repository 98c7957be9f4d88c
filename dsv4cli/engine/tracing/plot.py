"""How far two recordings lie apart as a picture: a row for what each layer gives, a column for each token."""

from importlib import import_module
from pathlib import Path

import torch

from dsv4cli.engine.tracing.report import TraceComparison
from dsv4cli.engine.tracing.stages import STREAMS
from dsv4cli.errors import UsageError

SIZE, DPI = (13.0, 7.0), 120
# what is drawn as no difference
LEAST = 1e-8


def draw_differences(comparison: TraceComparison, path: Path) -> None:
    """Draws the relative L2 of each token's streams behind each layer, by powers of ten. Raises UsageError where the
    recordings have none."""
    found = [one.difference for one in comparison.verdicts if one.difference.stage == STREAMS]
    if not found:
        raise UsageError("--plot draws the streams of blocks, and the recordings have none", "record --what block too")
    figure = import_module("matplotlib.figure").Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    rows = torch.stack([one.rows.nan_to_num(posinf=1.0) for one in found]).clamp_min(LEAST).log10()
    image = axes.imshow(rows.numpy(), aspect="auto", origin="lower", interpolation="nearest", vmin=-8, vmax=0)
    figure.colorbar(image, ax=axes, label="relative L2, power of ten")
    names = ["embedding" if not one.layer else f"layer {one.layer - 1}" for one in found]
    step = -(-len(found) // 24)
    axes.set_yticks(range(0, len(found), step), names[::step])
    ends, first = [0], comparison.first
    for text in comparison.one.manifest.texts:
        ends.append(ends[-1] + len(text.ids))
    for end in ends[1:-1]:
        axes.axvline(end - 0.5, color="white", linewidth=1)
    axes.set(xlabel="token", ylabel="streams behind")
    axes.set_title("rounding explains every difference" if first is None else first.place)
    figure.savefig(path, dpi=DPI)
