"""Background compilation of kernels while a model loads, and the process that compiles them."""

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING

import typer

from dsv4cli.options import ModelOptions
from dsv4cli.output import Output, counted, duration_text

if TYPE_CHECKING:
    from subprocess import Popen

    import torch

    from dsv4cli.engine.compiling.compile_ahead import Compilation
    from dsv4cli.engine.compiling.demand import Demand
    from dsv4cli.engine.compiling.pool import Counts


class NoCompilation:
    """Does nothing: no kernels are compiled while a model loads."""

    def note(self) -> str:
        """Return the text for the progress bar of loading."""
        return ""

    def finish(self) -> None:
        """Wait until all kernels are compiled."""


class Compiled(NoCompilation):
    """Background compilation of kernels while a model loads."""

    def __init__(self, out: Output, ahead: "Compilation") -> None:
        self._out, self._ahead, self._start = out, ahead, perf_counter()

    def note(self) -> str:
        """Return the number of compiled kernels, as text for the progress bar."""
        counts = self._ahead.counts
        return f", {counts.done} of {counted(counts.found, 'kernel')} compiled" if counts.compiled else ""

    def finish(self) -> None:
        """Wait with a progress bar, then report how many kernels were compiled."""
        with self._out.counting("compiling kernels") as show:
            counts = self._ahead.wait(lambda counts: show(counts.done, counts.found, ""))
        report_compiled(self._out, counts, perf_counter() - self._start)


def early_compiler(options: ModelOptions) -> "Popen[str] | None":
    """Start a process that waits for kernels to compile, or return None if these options need no Triton kernels."""
    from dsv4cli.engine.compiling.process import start_early

    return None if options.device == "cpu" or options.backend == "torch" else start_early()


@contextmanager
def compiled_in_background(
    out: Output, demand: "Demand", device: "torch.device", process: "Popen[str] | None"
) -> Iterator[NoCompilation]:
    """Compile the kernels of a demand in the background, unless Triton's cache has them, and load them.

    Args:
        process: a process from `early_compiler`, if there is one.
    """
    import torch

    from dsv4cli.engine.compiling.card import card_of
    from dsv4cli.engine.compiling.compile_ahead import Compilation

    with Compilation(demand, card_of(device), torch.cuda.current_device(), process) as ahead:
        yield Compiled(out, ahead)


def report_compiled(out: Output, counts: "Counts", seconds: float) -> None:
    """Print how many kernels were compiled, and warn of those that were not."""
    if counts.compiled:
        out.status(compiled_sentence(counts, seconds))
    if counts.failed:
        out.warning(f"some kernels cannot be compiled in advance, only at their first launch: {counts.failed[0]}")


def compiled_sentence(counts: "Counts", seconds: float) -> str:
    """Return the number of compiled kernels, the time, and the number already in the cache, as text."""
    there = f"; {counts.present:,} were in the cache" if counts.present else ""
    return f"{counted(counts.compiled, 'kernel')} compiled in {duration_text(seconds)}{there}"


def compile_ahead(context: typer.Context, parent: int) -> None:
    """Compile the kernels that the parent process will launch."""
    from dsv4cli.engine.system.ending import end_with_parent

    end_with_parent(parent)
    from dsv4cli.engine.compiling.process import start_hashing

    hashing = start_hashing()
    from dsv4cli.engine.compiling.compile_ahead import compile_all, prepare
    from dsv4cli.engine.compiling.pool import Counts

    out = Output(context.obj.colours)
    prepare()
    hashing.join()  # fork with a single thread
    given = sys.stdin.read()
    if not given:
        return
    demand, card = pickle.loads(bytes.fromhex(given))
    try:
        compile_all(
            demand,
            card,
            lambda counts: out.record({"counts": asdict(counts)}),
            lambda launch: out.record({"ready": pickle.dumps(launch).hex()}),
        )
    except Exception as error:  # noqa: BLE001 - the parent reports it: nobody reads this stderr
        out.record({"counts": asdict(Counts(failed=[f"{type(error).__name__}: {error}"]))})
    out.record({"done": True})
