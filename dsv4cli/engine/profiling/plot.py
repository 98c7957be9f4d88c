"""The roofline as a picture: each operation's rate over its FLOP per byte, under the measured ceilings."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dsv4cli.errors import UsageError

SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Raises UsageError for a file that cannot be drawn: another suffix, no such folder, no matplotlib."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--plot {path} ends with neither {' nor '.join(SUFFIXES)}", "name a .png or .svg file")
    if not path.parent.is_dir():
        raise UsageError(f"--plot: there is no folder {path.parent}", "make it, or name another")
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed", "install it: pip install matplotlib")


def draw_roofline(document: Mapping[str, Any], path: Path) -> None:
    """Draws the results of a document of `profile kernels`."""
    figure = import_module("matplotlib.figure").Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    measured = [line for line in document["results"] if line["flops"] and line["seconds"]]
    ceilings = document["ceilings"]
    bandwidth = max(ceilings["copy_bytes_per_second"], ceilings["read_bytes_per_second"])
    intensities = [line["flops"] / line["bytes"] for line in measured]
    low, high = min(intensities, default=1) / 4, max(intensities, default=1) * 4
    for name, rate in ceilings["matmul_flops"].items():
        corners = [low, max(low, min(rate / bandwidth, high)), high]
        axes.plot(corners, [min(rate, bandwidth * x) / 1e12 for x in corners], label=f"ceiling, {name}")
    for line, intensity in zip(measured, intensities, strict=True):
        rate = line["flops_per_second"] / 1e12
        axes.plot(intensity, rate, "k.")
        axes.annotate(f"{line['name']} x{line['tokens']}", (intensity, rate), fontsize=6)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s")
    axes.set_title(f"{document['model']} on {document['machine']['device']}")
    axes.legend()
    figure.savefig(path)
