"""`dsv4 inspect org/name` for a repository with several GGUF models: a list of them."""

from typing import TYPE_CHECKING

from dsv4cli.harmless import brief_line
from dsv4cli.output import UNIT_NOTE, Output, counted, size_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsv4cli.engine.inspection.sources import RemoteSource
    from dsv4cli.engine.inspection.variants import VariantReport

# maximum tensor types shown of a model; --json has all
SHOWN = 2
# share of the bytes below which a type is not shown
LEAST = 0.02
WORD = 60


def show_variants(out: Output, source: "RemoteSource") -> None:
    """Print the GGUF models of a repository with their sizes and the memory that each needs."""
    from dsv4cli.engine.inspection.variants import CONTEXT, inspect_variants, variants_document

    out.status(f"reading the headers of {counted(len(source.variants), 'GGUF model')} over the network")
    reports = inspect_variants(source)
    out.document(variants_document(source, reports))
    out.line(f"{source.repository} has {len(reports)} GGUF models", strong=True)
    out.line()
    out.table([("  name", "files", "size", "needs", "experts", "other tensors"), *map(_row, reports)], numbers=True)
    out.line()
    out.paragraph(f"needs: GPU memory for all weights and {CONTEXT:,} tokens of context ({UNIT_NOTE}).")
    for report in reports:
        if report.problem:
            out.paragraph(f"{brief_line(report.name, WORD)}: {brief_line(report.problem.message)}")
    fitting = next((report for report in reports if report.problem is None), None)
    if fitting:
        out.hint(f"dsv4 inspect {source.repository}:{fitting.name} --fit")
        out.hint(f"dsv4 run -m {source.repository}:{fitting.name} 'What is 17 + 25?'")


def _row(report: "VariantReport") -> tuple[str, ...]:
    needs = "does not run" if report.needed is None else size_text(report.needed)
    words = (_types(report.experts), _types(report.others) + (", drafter" if report.drafter else ""))
    return f"  {brief_line(report.name, WORD)}", f"{len(report.files)}", size_text(report.nbytes), needs, *words


def _types(sums: "Mapping[str, int]") -> str:
    """Return the types with most bytes."""
    total = sum(sums.values())
    large = [kind for kind, nbytes in sums.items() if nbytes >= LEAST * total]
    return ", ".join(large[:SHOWN]) + (", …" if len(large) > SHOWN else "")
