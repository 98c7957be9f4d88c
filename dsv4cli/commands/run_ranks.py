"""`dsv4 run` in several ranks: started here with --tp, or joined where torchrun has started them."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import Any

import typer

from dsv4cli.commands.run_modes import Job
from dsv4cli.errors import UsageError
from dsv4cli.output import ReaderGone, counted

# what a mode is called with, and the mode
Work = tuple[Callable[[Job, Any], None], Any]
# how a rank ends when its reader has gone: it must not look well, or the others would wait for it
READER_GONE = 141


def in_ranks(job: Job, size: int | None, started: bool, read: Callable[[], Work]) -> None:
    """Carries out what `read` gives: in this process, in one of those that torchrun has `started`, or in `size` that
    are started here."""
    if started:
        _take_part(job, size, read)
    elif size is not None and size > 1:
        _start(job, size)
    else:
        _carry_out(job, read())


def _carry_out(job: Job, work: Work) -> None:
    mode, inputs = work
    mode(job, inputs)


def _start(job: Job, size: int) -> None:
    """Runs this very command in `size` processes of this machine, once it is sure that they can run the model."""
    from dsv4cli.engine.ranks import check_devices, launch

    check_shares(job, size)
    check_devices(size, job.place)
    code = launch(size, ["-m", "dsv4cli", *sys.argv[1:]])
    if code == READER_GONE:
        raise ReaderGone
    raise typer.Exit(code)


def _take_part(job: Job, size: int | None, read: Callable[[], Work]) -> None:
    """One rank's part: rank 0 reads what to do, and alone speaks. Raises UsageError when torchrun has started other
    than `size` ranks."""
    from dsv4cli.engine.ranks import end_with_launcher, interruptible, joined

    end_with_launcher()
    with joined(job.place) as (world, place):
        if size not in (None, world.size):
            raise UsageError(f"--tp {size}, and torchrun has started {counted(world.size, 'rank')}", "leave out --tp")
        check_shares(job, world.size)
        with silent_but_for(world.rank == 0):
            task = world.share((read(), job.sampling) if world.rank == 0 else None)
            assert task is not None
            work, sampling = task
            job.out.status(f"{world.size} ranks; small sums go through {world.short_way}")
            _carry_out(replace(job, device=str(place), world=world, sampling=sampling, loaded=interruptible), work)


def check_shares(job: Job, size: int) -> None:
    """Raises UsageError or CheckpointError for a model that so many ranks do not divide."""
    from dsv4cli.engine.ranks import check_degree

    identity = job.source.identity
    check_degree(size, identity.config, identity.formats, rounds=job.dtype == "auto")


@contextmanager
def silent_but_for(speaks: bool) -> Iterator[None]:
    """Prints nothing of what runs inside, unless this rank speaks."""
    if speaks:
        try:
            yield
        except ReaderGone:
            os._exit(READER_GONE)
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield
