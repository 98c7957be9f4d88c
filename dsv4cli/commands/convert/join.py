"""After a conversion: join its parts (`--finish`), check an output again (`--check`), and suggest the next command."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from dsv4cli.errors import UsageError
from dsv4cli.harmless import shell_word
from dsv4cli.output import Output, counted, duration_text, size_text

if TYPE_CHECKING:
    from dsv4cli.engine.conversion.check import Checked
    from dsv4cli.engine.conversion.finish import Against
    from dsv4cli.engine.conversion.verify import Verification
    from dsv4cli.engine.system.threads import Progress

SCHEMA = "dsv4.convert/1"
# maximum problems listed on a terminal
SHOWN = 10


@dataclass(frozen=True)
class ComparisonOptions:
    """Options of the comparison with a source, as typed.

    Attributes:
        against: The source to compare with, if any.
        check: How much to compare.
        workers: Number of threads; None for the default.
    """

    against: str | None
    check: Literal["sample", "full", "off"]
    workers: int | None


def join(out: Output, finish: Path | None, look: Path | None, comparison: ComparisonOptions, others: list[Any]) -> None:
    """Run `--finish DST` or `--check DST`.

    Args:
        finish: Output folder of `--finish`; None for `--check`.
        look: Output folder of `--check`.
        others: Values of the options that neither accepts, None if not given.

    Raises:
        UsageError: an option cannot be combined with these, or the folder is not suitable.
        Exit: with code 3, if `--check` finds a difference.
    """
    option, folder = ("--finish", finish) if finish is not None else ("--check", look)
    assert folder is not None
    others = [*others, look if finish is not None else None]
    if any(other is not None for other in others):
        raise UsageError(
            f"{option} accepts only the output folder, --against, --verify and --max-workers",
            f"for example: dsv4 convert {option} OUT --against SRC",
        )
    if comparison.check == "off" or (comparison.check == "full" and comparison.against is None):
        reason = "compares nothing" if comparison.check == "off" else "needs a source to compare with"
        raise UsageError(
            f"{option} with --verify {comparison.check} {reason}",
            f"for example: dsv4 convert {option} OUT --against SRC --verify full",
        )
    (_finish if finish is not None else _check)(out, folder, comparison)


@contextmanager
def _checking(out: Output, comparison: ComparisonOptions) -> Iterator[tuple["Against | None", int, "Progress"]]:
    """Show a progress bar, and yield what to compare with, the number of threads, and the bar's callback."""
    from dsv4cli.engine.conversion.options import default_workers, prepare_comparison

    workers = comparison.workers or default_workers()
    with out.progress("checking") as progress:
        against = None
        if comparison.against is not None:
            assert comparison.check != "off"
            against = prepare_comparison(comparison.against, comparison.check, workers, progress)
        yield against, workers, progress


def _finish(out: Output, folder: Path, comparison: ComparisonOptions) -> None:
    from dsv4cli.engine.conversion.finish import finish, joined_before

    if joined_before(folder):
        out.status(f"{folder} is already finished; checking it")
        _check(out, folder, comparison)
        return
    with _checking(out, comparison) as how:
        done = finish(folder, *how)
    nbytes = sum(file["nbytes"] for file in done.files.values())
    out.document(
        {
            "schema": SCHEMA, "event": "finished", "output": str(folder), "bytes": nbytes, "files": dict(done.files),
            "verified": facts(done.found), "not_compared": done.cut,
        }
    )  # fmt: skip
    out.line(f"{folder} is complete: {counted(len(done.files), 'file')}, {size_text(nbytes)}", strong=True)
    if done.found is not None:
        out.line(verdict(done.found))
    if done.cut:
        out.warning("matrices split across parts have not been compared with the source")
        out.hint(f"to compare them: dsv4 convert --check {shell_word(folder)} --against SRC")
    out.hint(next_step(folder, done.to))


def _check(out: Output, folder: Path, comparison: ComparisonOptions) -> None:
    from dsv4cli.engine.conversion.check import check

    with _checking(out, comparison) as how:
        checked = check(folder, *how)
    _report(out, folder, checked, comparison.against)
    if not checked.sound:
        raise typer.Exit(3)


def _report(out: Output, folder: Path, checked: "Checked", against: str | None) -> None:
    wrong = checked.found.wrong if checked.found else []
    out.document(
        {
            "schema": SCHEMA, "event": "checked", "output": str(folder), "sound": checked.sound, "files": checked.files,
            "bytes": checked.nbytes, "missing": list(checked.missing), "changed": list(checked.changed),
            "wrong": wrong, "verified": facts(checked.found),
        }
    )  # fmt: skip
    problems = [f"{name} is missing" for name in checked.missing]
    problems += [f"{name} has changed: its sha256 differs" for name in checked.changed]
    problems += [f"{name} differs from the source's" for name in wrong]
    if problems:
        what = "has changed since it was written" if not wrong else f"differs from {against}"
        out.line(f"{folder} {what}", strong=True)
        for problem in problems[:SHOWN]:
            out.line(f"  {problem}")
        if len(problems) > SHOWN:
            out.line(f"  and {len(problems) - SHOWN:,} more")
        other = "if it was made from another source, name that one; else " if wrong else ""
        out.hint(f"{other}remove it with `rm -r {shell_word(folder)}` and convert again")
        return
    if checked.files:
        size = f"{counted(checked.files, 'file')}, {size_text(checked.nbytes)}"
        out.line(f"{folder} is unchanged: {size}, every sha256 matches", strong=True)
    if checked.found is not None:
        out.line(verdict(checked.found))


def facts(found: "Verification | None") -> dict[str, Any] | None:
    """Return a comparison as JSON values."""
    if found is None:
        return None
    return {"values": found.values, "compared": found.compared, "exact": len(found.exact), "inexact": found.errors}


def verdict(found: "Verification | None") -> str:
    """Return a comparison as text."""
    if found is None:
        return "not compared with the source (--verify off)"
    if not found.values:
        return "nothing to compare with the source: this part has no whole tensor"
    share = (
        f"{found.compared / max(found.values, 1):.0%} of the values of" if found.compared < found.values else "all of"
    )
    text = f"compared with the source: {share} {len(found.exact) + len(found.errors):,} tensors; "
    if not found.errors:
        return text + "all are exact, bit for bit"
    name, error = next(iter(found.errors.items()))
    return text + f"{len(found.exact):,} are exact, the others within {error:.2g} (relative, {name})"


def next_step(output: Path, to: str, part: int = 1, parts: int = 1) -> str:
    """Suggest what to do with an output, as text with a command."""
    from dsv4cli.engine.checkpoint.names import folder_word

    if parts > 1:
        return f"when all {parts} parts are there: `dsv4 convert --finish {shell_word(output)}`"
    folder = folder_word(output)
    # the program that each layout is for; dsv4 runs all of them
    readers = {"nvfp4": "vllm", "transformers": "transformers", "mp": "official", "gguf": "llama.cpp"}
    if to not in readers:
        return f"look at it with `dsv4 inspect {folder}`"
    here = f"run it here: `dsv4 run --model {folder}`"
    return f"see what loads it with `dsv4 inspect {folder} --for {readers[to]}`, or {here}"


def notes(out: Output, sentences: Iterable[str]) -> None:
    """Print each note about an output as a warning."""
    for sentence in sentences:
        out.warning(sentence)


def time_text(missing: int, rate: float) -> str:
    """Return how long writing `missing` bytes takes at `rate` bytes per second, as text."""
    if not missing or not isfinite(rate):
        return "nothing to write"
    seconds = duration_text(missing / rate)
    return f"at least {seconds} at {size_text(round(rate))}/s, tried for a second without the disk"
