"""The part of `dsv4 inspect --fit` that compares the forms in which a release can be downloaded."""

import textwrap
from typing import TYPE_CHECKING

from dsv4cli.output import Output, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsv4cli.engine.inspection.fit.compare import FormFit
    from dsv4cli.engine.inspection.fit.speed import Range

WIDTH = 80
HEADS = ["form", "weights", "fits", "context", "1 seq.", "16 seq.", "prefill"]


def show_forms(out: Output, forms: "list[FormFit]", context: int) -> None:
    """Print a table of the forms, with estimated throughput in tokens/s, and what the numbers mean."""
    out.line()
    out.line(f"forms of this release, for {context:,} tokens; estimated tokens/s")
    out.table([HEADS, *(_row(one) for one in forms)], numbers=True)
    for note in _notes(forms):
        for line in textwrap.wrap(note, WIDTH):
            out.line(line)


def _row(one: "FormFit") -> list[str]:
    speed = one.speed
    rates = [*speed.decode.values(), speed.prefill] if speed else []
    return [
        one.form.name,
        size_text(one.nbytes),
        _where(one),
        f"{one.context:,}" if one.share else "",
        *([_range(rate) for rate in rates] or [""] * 3),
    ]


def _where(one: "FormFit") -> str:
    share = one.share
    if share is None:
        return "no"
    if not share.on_gpu:
        return "in RAM"
    gpus = f"{share.ranks} GPU{'s' * (share.ranks > 1)}"
    return f"{gpus} + host" if share.host else gpus


def _range(rate: "Range") -> str:
    return f"{_rounded(rate.low):,}–{_rounded(rate.high):,}"


def _rounded(rate: float) -> int:
    """Return a rate rounded to two digits: estimates have no more."""
    digits = max(len(str(int(rate))) - 2, 0)
    return round(rate / 10**digits) * 10**digits


def _notes(forms: "list[FormFit]") -> "Iterator[str]":
    speeds = [one.speed for one in forms if one.speed]
    if any(one.share and one.share.host for one in forms):
        yield "+ host: some experts stay in host memory."
    for speed in speeds[:1]:
        basis = "calibrated to measurements on it" if speed.calibrated else "by published numbers, not measured"
        yield f"Estimates for {speed.card}: {basis}. With 16 sequences, throughput is the sum over all."
        if speed.calibrated and not all(one.calibrated for one in speeds):
            yield f"GGUF was not measured on {speed.card}: its ranges are wider."
    if not speeds and any(one.share and one.share.on_gpu for one in forms):
        yield "The bandwidth of these GPUs is unknown: name the card, as in --gpus 2xH100, for estimates."
