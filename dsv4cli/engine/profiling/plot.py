"""Draws the roofline: each operation's rate against its FLOP per byte, under the measured ceilings."""

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from dsv4cli.engine.profiling.output_file import check_writable
from dsv4cli.errors import UsageError

SUFFIXES = (".png", ".svg")
SIZE, DPI, FRAME = (13.0, 8.0), 120, (0.06, 0.08, 0.73, 0.86)
POINTS, WIDTH_OF_LETTER = 7.0, 0.64
# markers by number of tokens, smallest first
SHAPES = "osD^vP*X<>"


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    low: float
    right: float
    high: float

    def meets(self, other: "Box") -> bool:
        """Return whether the boxes overlap. A shared edge does not count."""
        beside = self.right <= other.left or other.right <= self.left
        return not (beside or self.high <= other.low or other.high <= self.low)


def check_plot(path: Path) -> None:
    """Raise UsageError if a plot cannot be written: wrong suffix, no write permission, or matplotlib is missing."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--plot {path} does not end with {' or '.join(SUFFIXES)}", "name a .png or .svg file")
    check_writable("--plot", path)
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed", "install it: pip install 'dsv4[plot]'")


def draw_roofline(document: Mapping[str, Any], path: Path) -> None:
    """Plot a document of `profile kernels`.

    Each family has a color and each number of tokens a marker. A labeled line connects the points of an operation.
    """
    figure = import_module("matplotlib.figure").Figure(figsize=SIZE, dpi=DPI)
    axes = figure.add_axes(FRAME)
    measured = [line for line in document["results"] if line["flops"] and line["seconds"]]
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s")
    axes.set_title(f"{document['model']} on {document['machine']['device']}")
    _ceilings(axes, document["ceilings"], [_place(line)[0] for line in measured])
    _points(axes, measured)
    _names(axes, measured)
    figure.savefig(path, dpi=DPI)


def _place(line: Mapping[str, Any]) -> tuple[float, float]:
    return line["flops"] / line["bytes"], line["flops_per_second"] / 1e12


def _ceilings(axes: Any, ceilings: Mapping[str, Any], intensities: Sequence[float]) -> None:
    bandwidth = max(ceilings["copy_bytes_per_second"], ceilings["read_bytes_per_second"])
    low, high = min(intensities, default=1) / 4, max(intensities, default=1) * 4
    for (name, rate), dash in zip(ceilings["matmul_flops"].items(), ("-", "--", "-.", ":"), strict=False):
        corners = [low, max(low, min(rate / bandwidth, high)), high]
        rates = [min(rate, bandwidth * x) / 1e12 for x in corners]
        axes.plot(corners, rates, dash, color="black", linewidth=1, label=f"ceiling, {name}")


def _points(axes: Any, measured: Sequence[Mapping[str, Any]]) -> None:
    colours = import_module("matplotlib").colormaps["tab20"].colors
    families = list(dict.fromkeys(line["family"] for line in measured))
    # the saturated half of tab20 first
    colour = {family: colours[(2 * i + i // 10) % 20] for i, family in enumerate(families)}
    counts = sorted({line["tokens"] for line in measured})
    shape = {count: SHAPES[i % len(SHAPES)] for i, count in enumerate(counts)}
    for lines in _operations(measured):
        axes.plot(*zip(*map(_place, lines), strict=True), color=colour[lines[0]["family"]], linewidth=0.6, alpha=0.6)
    for line in measured:
        axes.plot(*_place(line), shape[line["tokens"]], color=colour[line["family"]], markersize=5)
    for family in families:
        axes.plot([], [], "s", color=colour[family], label=family)
    for count in counts:
        axes.plot([], [], shape[count], color="grey", label=f"{count:,} token" + "s" * (count != 1))
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, fontsize=8)


def _operations(measured: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the lines of each operation, fewest tokens first."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for line in sorted(measured, key=lambda line: line["tokens"]):
        found.setdefault(line["name"], []).append(line)
    return list(found.values())


def _names(axes: Any, measured: Sequence[Mapping[str, Any]]) -> None:
    """Label each operation at its last point, or nearby with a line to the point."""
    axes.autoscale_view()  # without it, pixels are those of an empty plot
    pixels = [tuple(axes.transData.transform(_place(line))) for line in measured]
    last = {line["name"]: (_place(line), place) for line, place in zip(measured, pixels, strict=True)}
    pixel = 72 / DPI  # size of a pixel in points: SVG pixels differ
    height = POINTS / pixel
    boxes = places([(name, place) for name, (_, place) in last.items()], pixels, height)
    for (name, (point, (x, y))), box in zip(last.items(), boxes, strict=True):
        right, up = (box.left + box.right) / 2 - x, (box.low + box.high) / 2 - y
        line = {"arrowstyle": "-", "linewidth": 0.4, "color": "grey"} if abs(up) > 1.5 * height else None
        axes.annotate(
            name, point, (right * pixel, up * pixel), textcoords="offset points",
            fontsize=POINTS, ha="center", va="center", arrowprops=line,
        )  # fmt: skip


def places(
    names: Sequence[tuple[str, tuple[float, float]]], points: Sequence[tuple[float, float]], height: float
) -> list[Box]:
    """Return a box for each label. Boxes do not overlap each other and, if possible, do not cover points."""
    dots = [Box(x - 3, y - 3, x + 3, y + 3) for x, y in points]
    taken: list[Box] = []
    for name, point in names:
        boxes = list(_around(point, len(name) * WIDTH_OF_LETTER * height, height))
        clear = (box for box in boxes if not _hit(box, taken) and not _hit(box, dots))
        taken.append(next(clear, None) or next(box for box in boxes if not _hit(box, taken)))
    return taken


def _hit(box: Box, others: Sequence[Box]) -> bool:
    return any(box.meets(other) for other in others)


def _around(point: tuple[float, float], width: float, height: float) -> Iterator[Box]:
    """Yield boxes to the right and left of a point, at increasing distance above and below it."""
    for step in range(200):
        for up in (step, -step):
            for side in (0.0, 1.0, 0.5):
                left, low = point[0] + 7 - side * (width + 14), point[1] + (0.6 * up - 0.5) * height * 1.3
                yield Box(left, low, left + width, low + 1.2 * height)
