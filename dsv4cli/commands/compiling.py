"""Kernels that are compiled while a model is loaded: what starts that, and the process that does it."""

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING

import typer

from dsv4cli.output import Output, counted, duration_text

if TYPE_CHECKING:
    from dsv4cli.engine.compiling.pool import Counts
    from dsv4cli.engine.compiling.workload import Workload
    from dsv4cli.kernels.card import Card


@contextmanager
def compiled_meanwhile(out: Output, workload: "Workload", card: "Card") -> Iterator[Callable[[], None]]:
    """Compiles in the background what a workload launches; what this gives waits for the rest of it."""
    from dsv4cli.engine.compiling.ahead import Ahead, compiled_before

    exactly, model = compiled_before(workload, card)
    if exactly:
        yield lambda: None
        return
    start = perf_counter()
    with Ahead(workload, card) as ahead:

        def finish() -> None:
            with out.counting("compiling kernels") as show:
                counts = ahead.wait(lambda counts: show(counts.done, counts.found, ""), for_all=not model)
            report_compiled(out, counts, perf_counter() - start)

        yield finish


def report_compiled(out: Output, counts: "Counts", seconds: float) -> None:
    """Says how many kernels were compiled, and which were not."""
    if counts.compiled:
        rest = f", {counts.present:,} were there" if counts.present else ""
        out.status(f"{counted(counts.compiled, 'kernel')} compiled in {duration_text(seconds)}{rest}")
    if counts.failed:
        out.warning(
            f"{counted(len(counts.failed), 'kernel')} not compiled ahead, but where launched: {counts.failed[0]}"
        )


def compile_ahead(context: typer.Context, parent: int) -> None:
    """Compile what the process that has started this one will launch."""
    from dsv4cli.engine.system.ending import end_with_parent

    end_with_parent(parent)
    from dsv4cli.engine.compiling.ahead import compile_all

    out = Output(context.obj)
    workload, card = pickle.loads(bytes.fromhex(sys.stdin.read()))  # noqa: S301 - the parent has written it
    compile_all(workload, card, lambda counts: out.record(asdict(counts)))
