"""`dsv4 inspect --for PROGRAM`: whether another program would load the model, why not, and what would help."""

from typing import TYPE_CHECKING

from dsv4cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from dsv4cli.engine.inspection.consumers.judge import Consumer, ConsumerVerdict
    from dsv4cli.engine.inspection.report import Inspection

ANSWERS = {True: "would load", False: "would not load", None: "may or may not load"}


def show_verdict(
    out: Output,
    result: "Inspection",
    consumer: "Consumer",
    *,
    folder: "Path | None" = None,
    files: "Collection[str] | None" = None,
) -> bool:
    """Print whether another program would load the model. Return the answer; unknown counts as False.

    Args:
        folder: for a hub repository, the local folder with its configuration.
        files: for a hub repository, its file names.

    Raises UsageError for a single file and for random weights.
    """
    from dsv4cli.engine.inspection.consumers.examine import judge
    from dsv4cli.engine.inspection.consumers.judge import verdict_document

    found = judge(result, consumer, folder=folder, files=files)
    out.document(verdict_document(result.source.name, found))
    _report(out, result.source.name, found)
    return found.loads is True


def _report(out: Output, name: str, found: "ConsumerVerdict") -> None:
    """Print the answer, its reasons, notes, and a command."""
    out.line(f"{found.version} {ANSWERS[found.loads]} {name}", strong=True)
    for reason in found.reasons:
        out.paragraph(reason if found.loads is False else f"not known: {reason}", "  ")
    for note in found.notes:
        out.paragraph(f"note: {note}", "  ")
    step = found.command or found.remedy
    if step:
        out.line(f"→ {step}")
