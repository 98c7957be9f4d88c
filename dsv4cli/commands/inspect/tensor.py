"""`dsv4 inspect` with `--tensor NAME`, `--layer N` or `--tree`: one tensor, one layer, or the whole model."""

import sys
import textwrap
from typing import TYPE_CHECKING

from dsv4cli.errors import UsageError
from dsv4cli.harmless import brief_line
from dsv4cli.output import Output, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dsv4cli.engine.checkpoint.identify import Identity
    from dsv4cli.engine.inspection.sources import Inspectable
    from dsv4cli.engine.inspection.tensor_tree import Entry, Layers, Tree
    from dsv4cli.engine.inspection.tensor_view import MatrixValues, TensorView

# width in columns of the longest histogram bar, and of the text to the right of a label
BAR, VALUE_WIDTH = 40, 68
EIGHTHS = " ▏▎▍▌▋▊▉█"
BRANCH, LAST, STEM = "├─ ", "└─ ", "│  "
ASCII = str.maketrans("├└─│█", "|`-|#")


def show_tensor(out: Output, source: "Inspectable", identity: "Identity | None", name: str) -> bool:
    """Find, read and print a tensor; return whether its values have no errors. identity: None for a single file."""
    from dsv4cli.engine.checkpoint.identify import FolderIdentity
    from dsv4cli.engine.inspection.sources import FileSource, RemoteSource
    from dsv4cli.engine.inspection.tensor_view import tensor_section, view_header, view_tensor

    if isinstance(identity, FolderIdentity):
        with out.progress(f"reading {name}") as progress:
            view = view_tensor(identity, name, None if isinstance(source, RemoteSource) else progress)
    elif isinstance(source, FileSource):
        view = view_header(source.checkpoint, name)
    else:
        raise UsageError(
            f"{source.name} has no files to read a tensor from", "use --layer or --tree, which need no files"
        )
    out.document(tensor_section(view))
    report_tensor(out, view)
    return not (view.values and any(finding.severity == "wrong" for finding in view.values.findings))


def report_tensor(out: Output, view: "TensorView") -> None:
    """Print where a tensor is and how it is stored; then its values, if they were read."""
    out.line(brief_line(view.name) + (f"  ({view.family})" if view.family else ""), strong=True)
    rows = [("format", f"{view.form}, values {list(view.shape)}")]
    for part in view.parts:
        whole = f"{part.dtype} {list(part.shape)}" + (f", {part.note}" if part.note else "")
        extent = f"{part.file.name}, bytes {part.begin:,} to {part.end:,}"
        rows += [(part.role.replace("_", " "), whole), ("", extent)]
        if part.name not in (view.name, f"{view.name.removesuffix('.weight')}.{part.role}"):
            rows.append(("", f"as {part.name}"))
    if view.holds:
        names = f"{len(view.holds):,} tensors, from {view.holds[0]} to {view.holds[-1]}"
        rows += _wrapped("holds", names)
    elif not view.family:
        rows.append(("", "the model has no such tensor"))
    if view.values:
        rows += _values(view.values)
    out.table(rows)
    if view.values:
        _bars(out, "values", [(f"{low:.3g}", f"{high:.3g}", count) for low, high, count in view.values.histogram])
        _bars(out, "scales", [(f"2^{power}", "", count) for power, count in view.values.exponents.items()])
        for finding in view.values.findings:
            out.line()
            out.paragraph(f"{finding.severity}: {finding.message}", strong=finding.severity == "wrong")


def _values(values: "MatrixValues") -> "Iterator[tuple[str, str]]":
    found = values.statistics
    yield "values", f"{found.count:,}, {found.zeros:,} of them zero"
    if found.not_finite:
        yield "", f"{found.not_finite:,} NaN or infinite"
    if found.finite:
        yield "", f"from {found.low:.4g} to {found.high:.4g}, mean |x| {found.mean_magnitude:.4g}, rms {found.rms:.4g}"
    yield from _wrapped("first", " ".join(f"{value:.6g}" for value in values.first))


def _wrapped(label: str, text: str) -> "list[tuple[str, str]]":
    lines = textwrap.wrap(brief_line(text), VALUE_WIDTH, break_on_hyphens=False)
    return list(zip([label, *[""] * len(lines)], lines, strict=False))


def _bars(out: Output, title: str, steps: "Sequence[tuple[str, str, int]]") -> None:
    """Print a histogram: bounds, bar and count of each bin on one line."""
    most = max((count for _, _, count in steps), default=0)
    if not most:
        return
    out.line()
    out.line(title)
    left, right = max(len(low) for low, _, _ in steps), max(len(high) for _, high, _ in steps)
    for low, high, count in steps:
        bounds = f"{low:>{left}}" + (f" .. {high:>{right}}" if high else "")
        out.line(f"  {bounds}  {_bar(count / most):<{BAR}}  {count:,}")


def _bar(share: float) -> str:
    eighths = round(share * BAR * 8)
    if not _draws():
        return "#" * round(eighths / 8)
    return (EIGHTHS[-1] * (eighths // 8) + EIGHTHS[eighths % 8]).rstrip()


def _draws() -> bool:
    """Return whether stdout can print box-drawing characters."""
    return (sys.stdout.encoding or "").lower() in ("utf-8", "utf8")


def show_layer(out: Output, identity: "Identity", name: str) -> bool:
    """Print the tensors of one layer. Always returns True."""
    from dsv4cli.engine.checkpoint.layout import expected_tensors
    from dsv4cli.engine.inspection.tensor_tree import layers_section, one_layer

    layers = one_layer(identity.config, expected_tensors(identity.config, identity.formats).values(), name)
    out.document(layers_section(layers))
    report_layer(out, layers)
    return True


def report_layer(out: Output, layers: "Layers") -> None:
    """Print the tensors of one layer."""
    out.line(f"{layers.title}  {layers.tensors:,} tensors, {size_text(layers.nbytes)}", strong=True)
    out.table(
        [(f"  {entry.name}", entry.dtypes[0], _shape(entry), size_text(entry.nbytes)) for entry in layers.entries]
    )


def show_tree(out: Output, identity: "Identity", name: str) -> bool:
    """Print the tensors outside the layers, and one layer of each kind. Always returns True. name: the model's name."""
    from dsv4cli.engine.checkpoint.layout import expected_tensors
    from dsv4cli.engine.inspection.tensor_tree import make_tree, tree_section

    tree = make_tree(identity.config, expected_tensors(identity.config, identity.formats).values())
    out.document(tree_section(tree))
    report_tree(out, name, tree)
    return True


def report_tree(out: Output, name: str, tree: "Tree") -> None:
    """Print the tensors outside the layers, and one layer of each kind."""
    nbytes = sum(entry.nbytes for entry in tree.outside) + sum(len(one.numbers) * one.nbytes for one in tree.layers)
    count = sum(entry.tensors for entry in tree.outside) + sum(len(one.numbers) * one.tensors for one in tree.layers)
    out.line(f"{name}: {count:,} tensors, {size_text(nbytes)}", strong=True)
    for entry in tree.outside:
        _branch(out, BRANCH + _leaf(entry))
    for layers in tree.layers:
        is_last = layers is tree.layers[-1]
        copies = f"{len(layers.numbers)} x " if len(layers.numbers) > 1 else ""
        _branch(out, f"{LAST if is_last else BRANCH}{layers.title}  {copies}{size_text(layers.nbytes)}")
        stem = "   " if is_last else STEM
        for entry in layers.entries:
            _branch(out, stem + (LAST if entry is layers.entries[-1] else BRANCH) + _leaf(entry))


def _branch(out: Output, text: str) -> None:
    out.line(text if _draws() else text.translate(ASCII))


def _leaf(entry: "Entry") -> str:
    return f"{entry.name}  {entry.dtypes[0]} {_shape(entry)}  {size_text(entry.nbytes)}"


def _shape(entry: "Entry") -> str:
    return (f"{entry.experts} x " if entry.experts else "") + str(list(entry.shape))
