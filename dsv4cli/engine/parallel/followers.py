"""Several ranks on one machine: rank 0 is the process that the user has started, and starts and ends the others.

It tells them what its engine does, and within a step the ranks meet as those of any run do.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import torch

from dsv4cli.engine.parallel.processes import joined, rendezvous_addresses
from dsv4cli.engine.parallel.world import World
from dsv4cli.errors import RankLost

# how long followers that have been dismissed may take to end
GRACE_SECONDS = 5


class Followers:
    """The other ranks, started by whoever it was; this one is rank 0."""

    def __init__(self, world: World) -> None:
        self.world = world

    def tell(self, orders: list[Any] | None) -> None:
        """Sends orders; None: there are no more. Raises RankLost when a rank has ended."""
        self.world.tell(orders)

    def rest(self) -> None:
        """They wait for the next orders."""

    def dismiss(self) -> None:
        """There are no more orders."""
        self.tell(None)


class StartedFollowers(Followers):
    """The ranks that this process has started.

    When one ends by itself while they are busy, as they are from the start, this process ends with the same code, from
    a thread of its own: it may wait on a GPU, where nothing reaches it. Before, `lost` is called for a rank that was
    killed; any other has said why it ends.
    """

    def __init__(
        self,
        processes: Sequence["subprocess.Popen[bytes]"],
        lost: Callable[[RankLost], None],
        remedy: str,
    ) -> None:
        """remedy: what a RankLost advises. `world` is set when the ranks have met."""
        super().__init__(World())
        self._processes = processes
        self._lost, self._remedy = lost, remedy
        self._busy, self._dismissed = True, False
        for rank, process in enumerate(processes, 1):
            Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def tell(self, orders: list[Any] | None) -> None:
        """Sends orders to all, who are busy with them until `rest`. Raises RankLost when one has ended."""
        self._busy = True
        for rank, process in enumerate(self._processes, 1):
            code = process.poll()
            if code is not None:
                raise self._loss(rank, code)
        super().tell(orders)

    def rest(self) -> None:
        """They wait for the next orders."""
        self._busy = False

    def dismiss(self) -> None:
        """There are no more orders."""
        self._dismissed = True
        super().dismiss()

    def end(self) -> None:
        """Ends those that have not ended, at once unless they have been dismissed."""
        for process in self._processes:
            if self._dismissed:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_SECONDS)
        self._dismissed = True
        for process in self._processes:
            process.kill()
            process.wait()

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        code = process.wait()
        if self._busy and not self._dismissed:
            if code <= 0:
                self._lost(self._loss(rank, code))
            os._exit(code if code > 0 else 1)

    def _loss(self, rank: int, code: int) -> RankLost:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "has ended"
        return RankLost(f"rank {rank} {how}", self._remedy)


@contextmanager
def leading(
    size: int, command: Sequence[str], device: torch.device, lost: Callable[[RankLost], None], remedy: str
) -> Iterator[tuple[World, torch.device, Followers]]:
    """This process as rank 0 of `size` on this machine, the others running `dsv4 command… PORT RANK SIZE`.

    They end with what runs inside, and see no Ctrl-C. lost, remedy: as of `StartedFollowers`.
    """
    own, *others = rendezvous_addresses(size)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "dsv4cli", *command, str(address.port), str(address.rank), str(address.size)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        for address in others
    ]
    followers = StartedFollowers(processes, lost, remedy)
    try:
        with joined(device, own) as (world, own_device):
            followers.world = world
            yield world, own_device, followers
            followers.dismiss()
    finally:
        followers.end()
