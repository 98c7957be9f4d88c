"""`dsv4 inspect --fit`: whether the model runs on this machine, or on the GPUs of --gpus, and with which command."""

import textwrap
from typing import TYPE_CHECKING

from dsv4cli.commands.inspect.forms import show_forms
from dsv4cli.output import UNIT_NOTE, Output, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsv4cli.engine.inspection.fit.answer import FitAnswer
    from dsv4cli.engine.inspection.fit.plan import Fit
    from dsv4cli.engine.inspection.fit.share import Share
    from dsv4cli.engine.inspection.report import Inspection

WIDTH = 80
# maximum devices side by side in a terminal of 80 columns
COLUMNS = 4
# maximum tensor families listed on a terminal; --json has all
SHOWN = 5


def show_fit(
    out: Output,
    result: "Inspection",
    *,
    gpus: str | None,
    ram: str | None,
    context: int,
    batch: int,
) -> bool:
    """Print whether the model runs on this machine, or on `gpus` (such as 2x141GB) with `ram`. Return the answer.

    Raises the errors of `answer_fit` and `parse_machine`.
    """
    from dsv4cli.engine.inspection.fit.answer import answer_fit, fit_document
    from dsv4cli.engine.inspection.fit.machine import parse_machine

    answer = answer_fit(result, parse_machine(gpus, ram), context=context, batch=batch)
    out.document(fit_document(answer))
    _report(out, answer)
    if answer.forms:
        show_forms(out, answer.forms, context)
    return answer.runs


def _report(out: Output, answer: "FitAnswer") -> None:
    """Print the answer, the bytes for each number of GPUs, the limits, and what to do."""
    fit = answer.fit
    shares = _shown(fit)
    out.line(f"{answer.model} {_answer(answer)}", strong=True)
    out.line(f"for {fit.context:,} tokens" + (f" each, {fit.batch} concurrent sequences" if fit.batch > 1 else ""))
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


def _answer(answer: "FitAnswer") -> str:
    fit, best = answer.fit, answer.fit.best
    machine = "this machine" if fit.machine.is_here else "that machine"
    if best is None:
        several = len(fit.machine.gpus) > 1
        where = machine if fit.machine.cpu is not None else "these GPUs" if several else "one GPU"
        each = " each" if fit.nearest.ranks > 1 else ""
        return f"does not fit {where}: {_name(fit.nearest)} lack{'' if each else 's'} {size_text(fit.missing)}{each}"
    if not best.on_gpu:
        words = f"fits {machine}'s RAM" + (", but none of its GPUs" if fit.machine.automatic != "cpu" else "")
    elif best.ranks > 1:
        words = f"fits {best.ranks} GPUs together"
    else:
        words = f"fits {best.devices[0].torch_name} ({best.devices[0].name})"
    if best.host:
        words += " with experts in host memory"
    return words if answer.runs else "would fit, but dsv4 would not load it"


def _name(share: "Share") -> str:
    if not share.on_gpu:
        return "the CPU"
    return f"{share.ranks} GPUs" if share.ranks > 1 else share.devices[0].torch_name


def _shown(fit: "Fit") -> "list[Share]":
    """Return the shares to show: one GPU, larger numbers of GPUs up to the best one, and the CPU."""
    cpu = [share for share in fit.shares if not share.on_gpu]
    gpus = [share for share in fit.shares if share.on_gpu]
    chosen = gpus[: gpus.index(fit.best) + 1] if fit.best in gpus else gpus
    width = COLUMNS - len(cpu)
    return [*chosen[:1], *chosen[1:][-(width - 1) :], *cpu]


def _rows(shares: "list[Share]") -> list[list[str]]:
    def row(label: str, values: list[int]) -> list[str]:
        return [label, *(size_text(value) for value in values)]

    heads = [f"{share.ranks} GPU{'s' * (share.ranks > 1)}" if share.on_gpu else "RAM" for share in shares]
    rows = [["", *heads], row("  weights", [share.weights for share in shares])]
    if any(share.ranks > 1 for share in shares):
        rows.append(row("    replicated", [share.whole for share in shares]))
    return [
        *rows,
        row("  cache", [share.cache for share in shares]),
        row("  workspace", [share.workspace for share in shares]),
        row("  reserve", [share.reserve for share in shares]),
        row("  needed", [share.needed for share in shares]),
        row("  free", [share.available for share in shares]),
        *([row("  in host memory", [share.host for share in shares])] if any(share.host for share in shares) else []),
        ["  fits", *("yes" if share.fits else "no" for share in shares)],
    ]


def _notes(fit: "Fit", shares: "list[Share]") -> "Iterator[str]":
    for gpu in fit.machine.older:
        yield (
            f"{gpu.torch_name} ({gpu.name}) is not used: it has compute capability {gpu.capability}, and the kernels "
            "need 8.0 or newer."
        )
    if any(share.ranks > 1 for share in shares):
        parts = ", ".join(f"{family} {size_text(size)}" for family, size in list(fit.whole.items())[:SHOWN])
        yield f"Replicated on every GPU: the KV cache and these weights: {parts}."
    best = fit.best or shares[0]
    yield (
        f"Workspace: peak memory of a step's tensors, with prefill chunks of {best.chunk:,} tokens. "
        "Reserve: CUDA, Python, libraries."
    )
    if fit.best is not None:
        yield from _of_the_best(fit, fit.best)


def _of_the_best(fit: "Fit", best: "Share") -> "Iterator[str]":
    placement = best.placement
    assert placement is not None
    where = f"On {_name(best)}"
    if placement.division is not None:
        division = placement.division
        yield (
            f"{where} {division.rows} of each layer's {division.experts} experts fit; {division.offloaded} "
            f"stay in host memory, {size_text(best.host * best.ranks)} with the embedding."
        )
    if placement.dequantized:
        yield f"{where} the weights are dequantized to FP32 at load time, for speed."
    if fit.drafter == "none":
        yield "The model has no drafter, so drafts are off."
    elif placement.drafter:
        yield f"{where} drafts are on; the weights include the drafter."
    elif placement.division is not None:
        yield f"{where} drafts are off: they do not pay with experts in host memory."
    else:
        yield f"{where} drafts are off: the drafter does not fit next to the other weights."
    batch = "this batch" if fit.batch > 1 else "one sequence"
    longest, most = fit.largest_context, fit.largest_batch
    yield f"{where} the largest context for {batch} is {longest:,} tokens; {most} sequences fit at this context."
