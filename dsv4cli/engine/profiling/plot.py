"""Roofline plot: the rate of each operation by its FLOP per byte, below the measured ceilings."""

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from dsv4cli.engine.profiling.output_file import check_writable
from dsv4cli.errors import UsageError, extra_remedy

SUFFIXES = (".png", ".svg")
SIZE, DPI = (14.0, 7.5), 120  # inches, dots per inch
# position of the panels as fractions of the figure; title, axis labels and legend are outside
PANELS = {"left": 0.06, "right": 0.78, "bottom": 0.09, "top": 0.89, "wspace": 0.06, "hspace": 0.24}
MAX_COLUMNS = 3  # panels side by side
# the size of a number in points, and the width of a digit as a fraction of it
POINTS, WIDTH_OF_DIGIT = 8.0, 0.62
MAX_KEY_ROWS = 34  # operations in one column of the key


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    low: float
    right: float
    high: float

    def meets(self, other: "Box") -> bool:
        """Return whether both share more than an edge."""
        apart = self.right <= other.left or other.right <= self.left
        return not (apart or self.high <= other.low or other.high <= self.low)


def check_plot(path: Path) -> None:
    """Raise UsageError if the plot cannot be written: unknown suffix, no write permission, or no matplotlib."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--plot {path} does not end with {' or '.join(SUFFIXES)}", "use a .png or .svg file")
    check_writable("--plot", path)
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed", extra_remedy("plot"))


def draw_roofline(document: Mapping[str, Any], path: Path) -> None:
    """Draw the results of a document of `profile kernels`, one panel for each number of tokens.

    Operations are numbered in all panels alike and colored by family; the key on the right has their names.
    """
    figure = import_module("matplotlib.figure").Figure(figsize=SIZE, dpi=DPI)
    measured = [line for line in document["results"] if line["flops"] and line["seconds"]]
    families = list(dict.fromkeys(line["family"] for line in measured))
    operations = sorted(
        {(line["family"], line["name"]) for line in measured}, key=lambda one: (families.index(one[0]), one)
    )
    numbers = {name: number for number, (_, name) in enumerate(operations, 1)}
    colors = _colors(families)
    for axes, lines in _panels(figure, measured):
        axes.set(xscale="log", yscale="log", xlim=_span(measured, 0), ylim=_span(measured, 1, document["ceilings"]))
        axes.grid(alpha=0.25, linewidth=0.5)
        _ceilings(axes, document["ceilings"])
        for line in lines:
            axes.plot(*_point(line), "o", color=colors[line["family"]], markersize=6, markeredgecolor="white")
        _numbers(axes, lines, numbers, colors)
    figure.suptitle(
        f"{document['model']} on {document['machine']['device']}: roofline of each operation", y=0.97, fontsize=14
    )
    figure.supxlabel("arithmetic intensity, FLOP per byte", x=0.42)
    figure.supylabel("TFLOP/s")
    _key(figure, operations, colors)
    figure.savefig(path, dpi=DPI)


def _colors(families: Sequence[str]) -> dict[str, Any]:
    shades = import_module("matplotlib").colormaps["tab20"].colors
    # the ten dark shades come first
    return {family: shades[(2 * i + i // 10) % 20] for i, family in enumerate(families)}


def _panels(figure: Any, measured: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Any, list[Mapping[str, Any]]]]:
    counts = sorted({line["tokens"] for line in measured})
    columns = min(max(len(counts), 1), MAX_COLUMNS)
    rows = -(-max(len(counts), 1) // columns)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True, gridspec_kw=PANELS)
    for axes, count in zip(grid.flat, counts, strict=False):
        axes.set_title(f"{count:,} token" + "s" * (count != 1), fontsize=11)
        yield axes, [line for line in measured if line["tokens"] == count]
    for axes in grid.flat[len(counts) :]:
        axes.set_axis_off()


def _point(line: Mapping[str, Any]) -> tuple[float, float]:
    return line["flops"] / line["bytes"], line["flops_per_second"] / 1e12


def _bandwidth(ceilings: Mapping[str, Any]) -> float:
    return float(max(ceilings["copy_bytes_per_second"], ceilings["read_bytes_per_second"]))


def _span(
    measured: Sequence[Mapping[str, Any]], axis: int, ceilings: Mapping[str, Any] | None = None
) -> tuple[float, float]:
    """Return the limits of an axis that all panels share; the highest ceiling is within them."""
    values = [_point(line)[axis] for line in measured] or [1.0]
    highest = max(ceilings["matmul_flops"].values(), default=1e12) / 1e12 if ceilings else max(values)
    return min(values) / 2, max(*values, highest) * 2.5


def _ceilings(axes: Any, ceilings: Mapping[str, Any]) -> None:
    low, high = axes.get_xlim()
    for (name, rate), dash in zip(ceilings["matmul_flops"].items(), ("-", "--", "-.", ":"), strict=False):
        knee = min(max(low, rate / _bandwidth(ceilings)), high)
        rates = [min(rate, _bandwidth(ceilings) * x) / 1e12 for x in (low, knee, high)]
        axes.plot((low, knee, high), rates, dash, color="black", linewidth=1)
        axes.annotate(
            f"{name} {rate / 1e12:,.0f} TFLOP/s",
            (high, rates[-1]),
            (-3, 3),
            textcoords="offset points",
            fontsize=POINTS,
            ha="right",
        )
    axes.annotate(
        f"memory {_bandwidth(ceilings) / 1e12:.2f} TB/s",
        (0.02, 0.97),
        xycoords="axes fraction",
        fontsize=POINTS,
        va="top",
    )


def _numbers(
    axes: Any, lines: Sequence[Mapping[str, Any]], numbers: Mapping[str, int], colors: Mapping[str, Any]
) -> None:
    """Write each operation's number as near to its point as the other numbers leave space, joined where far."""
    pixels = [tuple(axes.transData.transform(_point(line))) for line in lines]
    pixel = 72 / DPI  # in points: an SVG has other pixels
    height = POINTS / pixel
    boxes = places([(str(numbers[line["name"]]), at) for line, at in zip(lines, pixels, strict=True)], pixels, height)
    for line, (x, y), box in zip(lines, pixels, boxes, strict=True):
        right, up = (box.left + box.right) / 2 - x, (box.low + box.high) / 2 - y
        color = colors[line["family"]]
        join = {"arrowstyle": "-", "linewidth": 0.5, "color": color} if abs(up) > 1.5 * height else None
        axes.annotate(
            str(numbers[line["name"]]), _point(line), (right * pixel, up * pixel), textcoords="offset points",
            fontsize=POINTS, color=color, ha="center", va="center", arrowprops=join,
        )  # fmt: skip


def _key(figure: Any, operations: Sequence[tuple[str, str]], colors: Mapping[str, Any]) -> None:
    line_of = import_module("matplotlib.lines").Line2D
    handles = [line_of([], [], marker="o", linestyle="", color=colors[family]) for family, _ in operations]
    names = [f"{number}  {name}" for number, (_, name) in enumerate(operations, 1)]
    columns = -(-max(len(names), 1) // MAX_KEY_ROWS)
    figure.legend(
        handles, names, loc="upper left", bbox_to_anchor=(0.785, 0.91), fontsize=POINTS / columns**0.3, ncols=columns,
        frameon=False, handletextpad=0.2, labelspacing=0.35, columnspacing=0.5,
    )  # fmt: skip


def places(
    names: Sequence[tuple[str, tuple[float, float]]], points: Sequence[tuple[float, float]], height: float
) -> list[Box]:
    """Return a box for the label of each point. Boxes never overlap, and avoid points where there is space."""
    dots = [Box(x - 3, y - 3, x + 3, y + 3) for x, y in points]
    taken: list[Box] = []
    for name, point in names:
        boxes = list(_around(point, len(name) * WIDTH_OF_DIGIT * height, height))
        clear = (box for box in boxes if not _hit(box, taken) and not _hit(box, dots))
        taken.append(next(clear, None) or next(box for box in boxes if not _hit(box, taken)))
    return taken


def _hit(box: Box, others: Sequence[Box]) -> bool:
    return any(box.meets(other) for other in others)


def _around(point: tuple[float, float], width: float, height: float) -> Iterator[Box]:
    """Yield candidate boxes to the right and left of the point, in growing distance above and below."""
    for step in range(200):
        for up in (step, -step):
            for side in (0.0, 1.0, 0.5):
                left, low = point[0] + 7 - side * (width + 14), point[1] + (0.6 * up - 0.5) * height * 1.3
                yield Box(left, low, left + width, low + 1.2 * height)
