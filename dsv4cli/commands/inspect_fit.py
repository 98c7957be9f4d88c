"""`dsv4 inspect --fit`: does the model run on this machine, or on the GPUs of --gpus, and with which command."""

import textwrap
from typing import TYPE_CHECKING

from dsv4cli.output import UNIT_NOTE, Output, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsv4cli.engine.fit.answer import Answer
    from dsv4cli.engine.fit.plan import Fit, Share
    from dsv4cli.engine.inspection import Inspection

WIDTH = 80
# devices whose numbers stand beside each other in a terminal of 80 columns
COLUMNS = 4
# families of tensors that a person reads at once; --json has all
SHOWN = 5


def show_fit(
    out: Output,
    result: "Inspection",
    *,
    gpus: str | None,
    context: int,
    batch: int,
) -> bool:
    """Answers and reports whether the inspected model runs on this machine, or on `gpus` as in 2x141GB.

    Raises what answer_fit and parse_gpus raise.
    """
    from dsv4cli.engine.fit.answer import answer_fit, fit_document
    from dsv4cli.engine.fit.machine import parse_gpus, this_machine

    machine = parse_gpus(gpus) if gpus is not None else this_machine()
    answer = answer_fit(result, machine, context=context, batch=batch)
    out.document(fit_document(answer))
    _report(out, answer)
    return answer.runs


def _report(out: Output, answer: "Answer") -> None:
    """The answer, the bytes of each way to use the machine, the limits, and what to do."""
    fit = answer.fit
    shares = _shown(fit)
    out.line(f"{answer.model} {_answer(answer)}", strong=True)
    out.line(f"for {fit.context:,} tokens" + (f" each, {fit.batch} sequences at once" if fit.batch > 1 else ""))
    out.line()
    out.line(f"bytes on each device ({UNIT_NOTE})")
    out.table(_rows(shares), numbers=True)
    out.line()
    for note in _notes(fit, shares):
        for line in textwrap.wrap(note, WIDTH):
            out.line(line)
    for step in answer.steps:
        out.line()
        for line in textwrap.wrap(step.why, WIDTH):
            out.line(line)
        out.line(f"→ {step.command}")


def _answer(answer: "Answer") -> str:
    fit, runs = answer.fit, answer.fit.runs
    has_gpus = any(share.devices[0].is_gpu for share in fit.shares)
    first = fit.shares[0].devices[0]
    if runs is not None and runs.devices[0].is_gpu:
        words = f"fits {runs.devices[0].torch_name} ({runs.devices[0].name})"
    elif fit.together is not None and fit.together.fits:
        words = f"fits {fit.together.ranks} GPUs together"
    elif fit.beside is not None:
        words = f"fits {first.torch_name} ({first.name}) with experts in host memory"
    elif runs is not None:
        words = "fits this machine's RAM" + (", but none of its GPUs" if has_gpus else "")
    else:
        return "does not fit one GPU" if has_gpus else "does not fit this machine"
    return words if answer.runs else "would fit, but dsv4 would not load it"


def _shown(fit: "Fit") -> "list[Share]":
    """One GPU, the numbers of GPUs up to the first that is enough, and the CPU."""
    cpu = [share for share in fit.shares if not share.devices[0].is_gpu]
    gpus = [share for share in fit.shares if share.devices[0].is_gpu]
    enough = next((number for number, share in enumerate(gpus) if share.fits), len(gpus) - 1)
    chosen = gpus[: enough + 1]
    room = COLUMNS - len(cpu)
    return [*chosen[:1], *chosen[1:][-(room - 1) :], *cpu]


def _rows(shares: "list[Share]") -> list[list[str]]:
    def row(label: str, values: list[int]) -> list[str]:
        return [label, *(size_text(value) for value in values)]

    heads = [f"{share.ranks} GPU{'s' * (share.ranks > 1)}" if share.devices[0].is_gpu else "RAM" for share in shares]
    rows = [["", *heads], row("  weights", [share.weights for share in shares])]
    if any(share.ranks > 1 for share in shares):
        rows.append(row("    whole on each", [share.whole for share in shares]))
    return [
        *rows,
        row("  cache", [share.cache for share in shares]),
        row("  workspace", [share.workspace for share in shares]),
        row("  reserve", [share.reserve for share in shares]),
        row("  needed", [share.needed for share in shares]),
        row("  free", [share.available for share in shares]),
        ["  fits", *("yes" if share.fits else "no" for share in shares)],
    ]


def _notes(fit: "Fit", shares: "list[Share]") -> "Iterator[str]":
    if any(share.ranks > 1 for share in shares):
        parts = ", ".join(f"{family} {size_text(size)}" for family, size in list(fit.whole.items())[:SHOWN])
        yield f"Whole on every GPU: the cache, and of the weights {parts}."
    chunk = (fit.runs or shares[0]).chunk
    yield (
        f"Workspace: the most that the tensors of a step take, with prompts in chunks of {chunk:,} tokens. "
        "Reserve: CUDA, Python, libraries."
    )
    if fit.largest_context:
        batch = "this batch" if fit.batch > 1 else "one sequence"
        longest, most = fit.largest_context, fit.largest_batch
        yield f"Largest context at {batch}: {longest:,} tokens. Most sequences at this context: {most}."
