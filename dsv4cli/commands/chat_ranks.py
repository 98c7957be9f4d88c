"""`dsv4 chat --tp N`: the model of a conversation in this process, or led by it in several."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from dsv4cli.commands.chat_input import terminal_as_it_was
from dsv4cli.commands.run_modes import Job
from dsv4cli.commands.run_ranks import check_shares, silent_but_for
from dsv4cli.errors import RankLost
from dsv4cli.output import Output

if TYPE_CHECKING:
    from dsv4cli.engine.talk import Talk

# of a job, what followers are told
SHARED = ("source", "think", "dtype", "backend", "limits", "sampling", "gpu_memory")


@contextmanager
def open_talk(job: Job, size: int) -> "Iterator[Talk]":
    """A conversation with the job's model, loaded in this process or in `size` of this machine."""
    from dsv4cli.engine.talk import Talk

    dialogue = job.dialogue  # refused before the model is loaded
    if size == 1:
        with job.model() as model, Talk(model, dialogue, job.limits, job.place) as talk:
            yield talk
        return
    from dsv4cli.engine.followers import LeadingTalk, leading
    from dsv4cli.engine.ranks import check_devices

    check_shares(job, size)
    check_devices(size, job.place)
    with leading(size, ["follow", str(job.place)], job.place, _tell_loss(job.out)) as (world, place, followers):
        job.out.status(f"{size} ranks; small sums go through {world.short_way}")
        world.share({name: getattr(job, name) for name in SHARED})
        led = replace(job, device=str(place), world=world)
        with led.model() as model, LeadingTalk(model, dialogue, job.limits, place, followers) as talk:
            yield talk


def _tell_loss(out: Output) -> Callable[[RankLost], None]:
    """Says which rank has ended, on a terminal as it is now: what changes it meanwhile does not come to its end."""
    restore = terminal_as_it_was()

    def tell(error: RankLost) -> None:
        restore()
        out.new_line()
        out.error(error)

    return tell


def follow(context: typer.Context, device: str, port: int, rank: int, size: int) -> None:
    """Take part in a conversation that another process leads: silent, until stdin has no more orders."""
    import torch

    from dsv4cli.engine import followers
    from dsv4cli.engine.ranks import Seat, end_with_launcher, joined
    from dsv4cli.engine.talk import Talk

    end_with_launcher()
    with joined(torch.device(device), Seat(port, rank, size)) as (world, place), silent_but_for(False):
        shared = world.share(None)
        assert shared is not None
        job = Job(out=Output(context.obj), device=str(place), world=world, **shared)
        with job.model() as model, Talk(model, job.dialogue, job.limits, place) as talk:
            followers.follow(talk, sys.stdin)
