"""`dsv4 run` with several ranks: started here with --tp, or by torchrun."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dsv4cli.commands.job import Job, LocalProcess
from dsv4cli.commands.ranks import check_shares, follow_leader, leading_ranks, left_by
from dsv4cli.errors import UsageError
from dsv4cli.output import ReaderGone, counted

# a mode, and its inputs
Work = tuple[Callable[[Job, Any], None], Any]
# exit code of a torchrun rank when the reader of stdout is gone (128 + SIGPIPE): with 0, the other ranks would wait
READER_GONE = 141


def in_ranks(job: Job, size: int | None, started: bool, read: Callable[[], Work]) -> None:
    """Run the work that `read` returns.

    Args:
        size: the value of --tp. If it is above 1, the other ranks are started here.
        started: whether torchrun started this process as one of the ranks.
    """
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
    """Run the work as rank 0 of `size` ranks on this machine."""
    from dsv4cli.engine.system.ending import ends_soon

    with ends_soon(left_by(job.out)), leading_ranks(job, size, "check whether the machine ran out of memory") as led:
        _carry_out(led, work)


def _take_part(job: Job, size: int | None, read: Callable[[], Work]) -> None:
    """Run as one of torchrun's ranks. Only rank 0 reads the inputs and prints.

    Raises UsageError if torchrun started a number of ranks other than `size`.
    """
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
        process = LocalProcess(str(device), world, loaded=interruptible)
        if world.rank > 0:
            follow_leader(replace(job, process=process), world)  # on another machine, its files may have other paths
            return
        work = read()
        job.out.status(f"{world.size} ranks; all-reduce uses {world.reduce_backend}")
        followers = Followers(world)
        try:
            _carry_out(replace(job, process=replace(process, followers=followers)), work)
        except ReaderGone:
            os._exit(READER_GONE)
        followers.dismiss()
