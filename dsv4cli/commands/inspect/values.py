"""`dsv4 inspect --values`: read the weights and report errors."""

from typing import TYPE_CHECKING

from dsv4cli.output import Output, count_text, duration_text, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsv4cli.engine.checkpoint.identify import FolderIdentity
    from dsv4cli.engine.inspection.checks.findings import ValueFinding
    from dsv4cli.engine.inspection.checks.survey import Depth, ValueReport

# maximum findings of one rule listed on a terminal; --json has all
SHOWN = 4
DEPTHS = {"sample": "first, middle and last rows of each tensor", "full": "every byte"}


def show_values(out: Output, identity: "FolderIdentity", depth: "Depth") -> bool:
    """Read and check the weights, print the report and return whether the values have no errors."""
    from dsv4cli.engine.inspection.checks.survey import check_values, value_section

    with out.progress("reading values") as progress:
        report = check_values(identity, depth, progress)
    out.document(value_section(report))
    report_values(out, report)
    return not report.wrong


def report_values(out: Output, report: "ValueReport") -> None:
    """Print errors, suspicious values and a table of statistics."""
    part = "" if report.nbytes == report.nbytes_all else f" of {size_text(report.nbytes_all)}"
    out.line(f"values: {DEPTHS[report.depth]}, {size_text(report.nbytes)}{part}, {report.tensors:,} tensors")
    if report.absent:
        out.line(f"  {report.absent:,} tensors are missing and were not read")
    _findings(out, report)
    out.line()
    out.table([("  family", "values", "mean |x|", "rms", "min", "max", "zeros"), *_rows(report)], numbers=True)
    scales = list(_scales(report))
    if scales:
        out.line()
        out.paragraph("scales: " + ", ".join(scales), "  ")
    rate = report.nbytes / max(report.seconds, 1e-9)
    out.status(f"read {size_text(report.nbytes)} in {duration_text(report.seconds)}, {size_text(int(rate))}/s")


def _findings(out: Output, report: "ValueReport") -> None:
    groups: dict[tuple[str, str], list[ValueFinding]] = {}
    for finding in report.findings:
        groups.setdefault((finding.severity, finding.check), []).append(finding)
    if not groups:
        out.line("  no errors, nothing suspicious", strong=True)
    for (severity, _), findings in groups.items():
        for finding in findings[:SHOWN]:
            out.paragraph(f"{severity}: {finding.message}", "  ", strong=severity == "wrong")
        if len(findings) > SHOWN:
            out.line(f"    and {len(findings) - SHOWN:,} more like these; --json lists them all")


def _rows(report: "ValueReport") -> "Iterator[tuple[str, ...]]":
    for family in report.families:
        found = family.statistics
        if found.finite:
            numbers = (found.mean_magnitude, found.rms, found.low, found.high)
            zeros = f"{found.zeros / found.finite:.1%}"
            yield f"  {family.name}", count_text(found.count), *(f"{number:.3g}" for number in numbers), zeros


def _scales(report: "ValueReport") -> "Iterator[str]":
    for family in report.families:
        if family.exponents:
            low, high = family.exponents
            yield f"{family.name} 2^{low} to 2^{high}"
