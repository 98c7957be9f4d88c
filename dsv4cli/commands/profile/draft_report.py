"""Report of `dsv4 profile step --draft`: the cost of rows, of the drafter, and per token."""

from typing import Any

from dsv4cli.commands.profile.report import time_text, warn_of_spreads
from dsv4cli.output import Output, counted

ROWS = ("rows", "time", "vs 1 row", "per extra row", "sampling")
LENGTHS = ("accepted length", "per token", "tokens/s", "faster")


def show_drafts(out: Output, draft: dict[str, Any]) -> None:
    """Print the step with drafts, one line per number of rows, and one per accepted length."""
    rows, drafting = draft["rows"], draft["drafting"]
    last = rows[-1]
    parts = [time_text(part["median"]) for part in (last["seconds"], last["sampling"], drafting["seconds"])]
    out.line()
    out.table(
        [
            ("drafts", f"{draft['drafter']}, {draft['drafts']} per step, temperature {draft['temperature']:g}"),
            ("step", f"{counted(last['rows'], 'row')} of each sequence in {time_text(draft['step_seconds'])}"),
            ("", f"verifying {parts[0]}, sampling {parts[1]}, drafting {parts[2]}"),
            ("", f"drafting is {drafting['share']:.1%} of it"),
            *_launches(last["launches"], drafting["launches"]),
            ("break-even", _break_even(draft)),
        ]
    )
    out.line()
    out.table([ROWS, *(_row(line, rows[0]) for line in rows)], numbers=True)
    out.line()
    lengths = [(f"{line['accepted']:g}", line) for line in draft["seconds_per_token"]]
    lengths = [("no drafts", draft["without"]), *lengths]
    out.table([LENGTHS, *(_length(name, line) for name, line in lengths)], numbers=True)
    out.line()
    out.paragraph(
        "The rows are random tokens, which share few experts. Rows of text share more, so a row costs at most this."
    )
    warn_of_spreads(out, [*rows, drafting])


def _launches(model: dict[str, Any] | None, drafter: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the row with the number of kernels, or nothing on a CPU, where there are none."""
    if not model or not drafter:
        return []
    return [("kernels", f"{model['count']:,} to verify, {drafter['count']:,} to draft")]


def _break_even(draft: dict[str, Any]) -> str:
    length, most = draft["break_even"], draft["drafts"] + 1
    if length > most:
        return f"{length:.2f} tokens per step, but the maximum is {most}: these drafts never pay"
    return f"{length:.2f} tokens per step; drafts pay above that"


def _row(line: dict[str, Any], first: dict[str, Any]) -> tuple[str, ...]:
    """Return the table row for a number of rows. A step may compute more: only some numbers are captured."""
    seconds, one, rows = line["seconds"]["median"], first["seconds"]["median"], line["rows"]
    return (
        f"{rows}" if line["computed"] == rows else f"{rows}, computed as {line['computed']}",
        time_text(seconds),
        f"{seconds / one:.2f}x",
        time_text((seconds - one) / (rows - 1)) if rows > 1 else "-",
        time_text(line["sampling"]["median"]),
    )


def _length(name: str, line: dict[str, Any]) -> tuple[str, ...]:
    return name, time_text(line["seconds"]), f"{line['tokens_per_second']:,.1f}", f"{line['speedup']:.2f}x"
