"""`dsv4 inspect A --diff B`: whether two checkpoints have the same values, and where they differ."""

from collections import Counter
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

from dsv4cli.errors import UsageError
from dsv4cli.harmless import brief_line, shell_word
from dsv4cli.output import Output, duration_text, size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dsv4cli.engine.checkpoint.identify import FolderIdentity
    from dsv4cli.engine.inspection.diff import Diff, MatrixDiff
    from dsv4cli.engine.inspection.sources import Inspectable

# maximum matrices, fields and names listed on a terminal; --json has all
SHOWN = 8
VERDICTS = {
    "identical": "with the same bytes",
    "equal": "with the same values in other bytes",
    "zero_signs": "with the same values, except the sign of zeros",
    "different": "with other values",
    "unreadable": "that cannot be compared",
}
ZERO_NOTE = "FP4 code 8 is 0 in the official table and -0 in transformers. The model's results are the same."


def show_diff(out: Output, model: str, other: str, layer: int | None = None, tensor: str | None = None) -> bool:
    """Compare two models, or one layer or tensor of them, print the result and return whether they are the same.

    Raises the errors of `resolve_inspectable` and `compare`.
    """
    from dsv4cli.engine.inspection.diff import diff_document
    from dsv4cli.engine.inspection.sources import resolve_inspectable

    found = compare(out, resolve_inspectable(model), resolve_inspectable(other), layer, tensor)
    out.document(diff_document(found))
    report_diff(out, found)
    return found.same


def compare(
    out: Output, a: "Inspectable", b: "Inspectable", layer: int | None = None, tensor: str | None = None
) -> "Diff":
    """Compare two models. Progress and read rate go to stderr.

    Raises what `recognise` raises, and UsageError for weights that are not on this machine or a part that neither model
    has.
    """
    from dsv4cli.engine.inspection.diff import diff_models
    from dsv4cli.engine.inspection.sources import FileSource

    start = monotonic()
    with out.progress("comparing") as progress:
        found = diff_models(_identity(a), _identity(b), progress, _wanted(layer, tensor))
    if not (found.matrices or found.only_a or found.only_b):
        what = f"layer {layer}" if tensor is None else f"the tensor {tensor!r}"
        raise UsageError(f"neither model has {what}", f"list the names: dsv4 inspect {shell_word(a.name)} --tree")
    seconds = max(monotonic() - start, 1e-9)
    out.status(
        f"read {size_text(found.nbytes)} in {duration_text(seconds)}, {size_text(int(found.nbytes / seconds))}/s"
    )
    # tensors outside a single file are not missing
    only_a = () if isinstance(b, FileSource) else found.only_a
    only_b = () if isinstance(a, FileSource) else found.only_b
    return replace(found, only_a=only_a, only_b=only_b)


def _identity(source: "Inspectable") -> "FolderIdentity":
    from dsv4cli.engine.checkpoint.source import FolderSource
    from dsv4cli.engine.inspection.sources import FileSource, RemoteSource

    if isinstance(source, FolderSource):
        return source.recognised
    if isinstance(source, FileSource):
        return source.identity
    remedy = "use a folder, a file or a downloaded model"
    if isinstance(source, RemoteSource):
        remedy = f"download them: dsv4 download {shell_word(source.repository)}"
    raise UsageError(f"{source.name} has no weights on this machine to compare", remedy)


def _wanted(layer: int | None, tensor: str | None) -> "Callable[[str], bool]":
    """Return a filter of the matrices to compare, by official name."""
    prefix = "" if layer is None else f"layers.{layer}."
    matrix = None if tensor is None else tensor.removesuffix(".weight").removesuffix(".scale")
    return lambda name: name.startswith(prefix) and matrix in (None, name, name.removesuffix(".weight"))


def report_diff(out: Output, found: "Diff") -> None:
    """Print whether both are the same model, how they compare, and what differs, worst first."""
    out.table([(side, str(one.checkpoint.folder), one.layout) for side, one in (("A", found.a), ("B", found.b))])
    count, bad = len(found.matrices), len(found.worst)
    if found.same:
        out.line(f"the same model: {_how_equal(found)}", strong=True)
    elif bad:
        out.line(f"not the same: {bad:,} of {count:,} matrices differ", strong=True)
    else:
        out.line(f"not the same, but the {count:,} matrices that both have are equal", strong=True)
    for verdict, number in found.counts.items():
        if number:
            out.line(f"  {number:,} {VERDICTS[verdict]}")
    if found.counts["zero_signs"]:
        out.paragraph(ZERO_NOTE, "  ")
    _sides(out, found)
    if bad:
        _worst(out, found)


def _how_equal(found: "Diff") -> str:
    if found.counts["identical"] == len(found.matrices):
        return f"all {len(found.matrices):,} matrices, byte for byte"
    signs = ", except the sign of zeros" if found.counts["zero_signs"] else ""
    return f"all {len(found.matrices):,} matrices have the same values{signs}"


def _sides(out: Output, found: "Diff") -> None:
    """Print configuration fields that differ, and names that only one model has."""
    for field in found.fields[:SHOWN]:
        out.paragraph(f"{field.name}: {field.a} in A, {field.b} in B", "  ")
    if len(found.fields) > SHOWN:
        out.line(f"  and {len(found.fields) - SHOWN:,} more configuration fields; --json lists them all")
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        if names:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            out.paragraph(f"{len(names):,} only in {side}: {shown}", "  ")


def _worst(out: Output, found: "Diff") -> None:
    worst = found.worst
    patterns = Counter(matrix.pattern for matrix in worst if matrix.pattern)
    for words, number in patterns.most_common(SHOWN) if len(worst) > 1 else []:
        out.paragraph(f"{number:,} of them: {words}", "  ")
    out.line()
    out.line("worst first")
    for matrix in worst[:SHOWN]:
        out.line(f"  {brief_line(matrix.name)}  {matrix.forms[0]} in A, {matrix.forms[1]} in B")
        for line in _numbers(matrix):
            out.paragraph(line, "    ")
    if len(worst) > SHOWN:
        out.line(f"  and {len(worst) - SHOWN:,} more; --json lists them all")


def _numbers(matrix: "MatrixDiff") -> "Iterator[str]":
    if matrix.first is None:
        yield matrix.problem
        return
    share = f"{matrix.different:,} of {matrix.values:,} values"
    yield f"relative error {matrix.relative_error:.2e}, largest {matrix.largest:.3g}, {share}"
    first = matrix.first
    yield f"first at [{first.row}, {first.column}]: {first.first:.9g} in A, {first.second:.9g} in B"
    if matrix.pattern:
        yield matrix.pattern
