"""`--tp N`: this process as rank 0 of N on this machine, and the entry point of the other ranks."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import typer

from dsv4cli.commands.job import Job, LocalProcess
from dsv4cli.commands.terminal import leave_pastes, terminal_as_it_was
from dsv4cli.errors import RankLost
from dsv4cli.output import Output, ReaderGone

if TYPE_CHECKING:
    from dsv4cli.engine.model.transformer import Transformer
    from dsv4cli.engine.parallel.world import World

T = TypeVar("T")
# fields of a job that are sent to follower ranks
SHARED = ("source", "think", "special_tokens", "limits", "sampling", "drafting", "execution", "plan")


@contextmanager
def leading_ranks(job: Job, size: int, remedy: str) -> Iterator[Job]:
    """Start the other ranks with the same model, and yield the job as rank 0 runs it.

    Raises:
        UsageError, CheckpointError, UnsupportedHardware: This number of ranks does not suit the model or the machine.
    """
    job.out.status(f"starting {size} ranks")
    check_shares(job, size)
    from dsv4cli.engine.parallel.followers import leading
    from dsv4cli.engine.parallel.processes import check_devices

    check_devices(size, job.device)
    command = ["follow", str(os.getpid()), str(job.device)]
    with leading(size, command, job.device, _report_lost_rank(job.out), remedy) as (world, device, followers):
        job.out.status(f"{size} ranks; all-reduce uses {world.reduce_backend}")
        world.broadcast_object({name: getattr(job, name) for name in SHARED})
        try:
            own = replace(job.process, device_name=str(device), world=world, followers=followers)
            yield replace(job, process=own)
        except ReaderGone:
            os._exit(0)  # the other ranks end with this process


@contextmanager
def opened_in_ranks(
    job: Job, size: int, remedy: str, open_it: "Callable[[Job, Transformer], AbstractContextManager[T]]"
) -> Iterator[T]:
    """Load the job's model in this process, or in `size` ranks led by it, and yield what `open_it` returns for it.

    SIGINT and SIGTERM end the process while several ranks load. Inside the block, the caller handles signals.
    """
    if size == 1:
        with job.model() as model, open_it(job, model) as opened:
            yield opened
        return
    from dsv4cli.engine.system.ending import ends_soon

    with ExitStack() as stack:
        starting = stack.enter_context(ExitStack())
        starting.enter_context(ends_soon(left_by(job.out)))
        led = stack.enter_context(leading_ranks(job, size, remedy))
        model = stack.enter_context(led.model())
        opened = stack.enter_context(open_it(led, model))
        starting.close()
        yield opened


def _report_lost_rank(out: Output) -> Callable[[RankLost], None]:
    """Return a function that reports a lost rank. It first restores the terminal to its current state."""
    restore = terminal_as_it_was()

    def report(error: RankLost) -> None:
        restore()
        leave_pastes()
        out.new_line()
        out.error(error)

    return report


def left_by(out: Output) -> Callable[[int], None]:
    """Return a function that restores the terminal when a signal ends this process while it waits in C code."""
    restore = terminal_as_it_was()

    def leave(number: int) -> None:
        restore()
        leave_pastes()
        if number == signal.SIGINT:
            out.new_line()

    return leave


def follow(context: typer.Context, leader: int, device: str, port: int, rank: int, size: int) -> None:
    """Follow another process as a rank: run its steps silently until there are none left."""
    from dsv4cli.engine.system.ending import end_with_parent

    end_with_parent(leader)
    # service managers signal every process; the leader finishes its answers, which need this rank, and then ends it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    import torch

    from dsv4cli.engine.parallel.processes import RendezvousAddress, joined

    with joined(torch.device(device), RendezvousAddress(port, rank, size)) as (world, own):
        given = world.broadcast_object(None)
        assert given is not None
        follow_leader(Job(out=Output(context.obj.colours), process=LocalProcess(str(own), world), **given), world)


def follow_leader(job: Job, world: "World") -> None:
    """Load this rank's part of the model and run the leader's steps, silently."""
    from dsv4cli.engine.runtime.follower import follow

    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        if world.receive_orders() is None:  # the leader has nothing to compute
            return
        with job.model() as model, nullcontext() if job.plan is None else job.plan.observed(model, world.rank):
            follow(model, job.device, world.receive_orders)


def check_shares(job: Job, size: int) -> None:
    """Raise UsageError or CheckpointError if the model cannot be split over this number of ranks."""
    from dsv4cli.engine.checkpoint.gguf.loading import split_tensors
    from dsv4cli.engine.checkpoint.sharding import check_ranks

    identity = job.source.identity
    check_ranks(identity.config, split_tensors(identity).values(), size, rounds=job.execution.dtype == "auto")
