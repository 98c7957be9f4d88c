"""`dsv4 run` in several ranks: led from here with --tp, or joined where torchrun has started them."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dsv4cli.commands.job import Job
from dsv4cli.commands.ranks import check_shares, follow_leader, leading_ranks, left_by
from dsv4cli.errors import UsageError
from dsv4cli.output import ReaderGone, counted

# what a mode is called with, and the mode
Work = tuple[Callable[[Job, Any], None], Any]
# how a rank of torchrun ends when its reader has gone: it must not look well, or the others would wait for it
READER_GONE = 141


def in_ranks(job: Job, size: int | None, started: bool, read: Callable[[], Work]) -> None:
    """Carries out what `read` gives: in this process, in one of those that torchrun has `started`, or in this one and
    the others of `size`, which are started here."""
    if started:
        _take_part(job, size, read)
    elif size is not None and size > 1:
        _lead(job, size, read())
    else:
        _carry_out(job, read())


def _carry_out(job: Job, work: Work) -> None:
    mode, inputs = work
    mode(job, inputs)


def _lead(job: Job, size: int, work: Work) -> None:
    """Carries out the work as rank 0 of `size` on this machine."""
    from dsv4cli.engine.system.ending import ends_soon

    with ends_soon(left_by(job.out)), leading_ranks(job, size, "check whether the machine ran out of memory") as led:
        _carry_out(led, work)


def _take_part(job: Job, size: int | None, read: Callable[[], Work]) -> None:
    """One rank's part: rank 0 reads what to do, and alone speaks. Raises UsageError when torchrun has started other
    than `size` ranks."""
    from dsv4cli.engine.system.ending import end_with_parent

    end_with_parent(os.getppid())
    from dsv4cli.engine.parallel.followers import Followers
    from dsv4cli.engine.parallel.processes import interruptible, joined

    with joined(job.device) as (world, device):
        if size not in (None, world.size):
            raise UsageError(
                f"--tp {size} does not match torchrun, which started {counted(world.size, 'rank')}", "remove --tp"
            )
        check_shares(job, world.size)
        own = replace(job, device_name=str(device), world=world, loaded=interruptible)
        if world.rank > 0:
            follow_leader(own, world)  # its files may lie elsewhere on another machine
            return
        work = read()
        job.out.status(f"{world.size} ranks; all-reduce uses {world.reduce_backend}")
        followers = Followers(world)
        try:
            _carry_out(replace(own, followers=followers), work)
        except ReaderGone:
            os._exit(READER_GONE)
        followers.dismiss()
