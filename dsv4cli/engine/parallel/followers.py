"""Several ranks on one machine: rank 0 (the leader) is the user's process and starts and ends the followers.

The leader sends the engine's orders to the followers; within a step the ranks communicate as in any run.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from typing import Any

import torch

from dsv4cli.engine.parallel.processes import joined, rendezvous_addresses
from dsv4cli.engine.parallel.world import World
from dsv4cli.errors import RankLost

# seconds that dismissed followers have to exit
GRACE_SECONDS = 5


class Followers:
    """The other ranks, started by another launcher such as torchrun; this process is rank 0."""

    def __init__(self, world: World) -> None:
        self.world = world

    def send_orders(self, orders: list[Any] | None) -> None:
        """Send orders to the followers, None to end them. Raises RankLost if a rank has ended."""
        self.world.send_orders(orders)

    def rest(self) -> None:
        """Mark the followers as idle, waiting for the next orders."""

    def say_farewell(self, farewell: Callable[[RankLost], None]) -> None:
        """Call `farewell` before a lost follower ends this process. Another launcher ends it without a call."""

    def dismiss(self) -> None:
        """Tell the followers that there are no more orders."""
        self.send_orders(None)


class StartedFollowers(Followers):
    """The followers that this process has started.

    If a follower ends while busy (also during startup), this process exits with the same code from a separate thread,
    because the main thread may be blocked on a GPU. For a follower that was killed, `lost` is called first; any other
    has printed its own error. After `say_farewell`, this also happens if a follower ends while idle. Only the first
    follower that ends is reported.
    """

    def __init__(
        self,
        processes: Sequence["subprocess.Popen[bytes]"],
        lost: Callable[[RankLost], None],
        remedy: str,
    ) -> None:
        """Start to watch the processes. remedy: advice in RankLost. `world` is set once the ranks have met."""
        super().__init__(World())
        self._processes = processes
        self._lost, self._remedy = lost, remedy
        self._farewell: Callable[[RankLost], None] | None = None
        self._busy, self._dismissed = True, False
        self._first_loss = Lock()  # held once a follower is lost, until this process exits
        for rank, process in enumerate(processes, 1):
            Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def send_orders(self, orders: list[Any] | None) -> None:
        """Send orders to all followers, which are busy until `rest`. Raises RankLost if one has ended."""
        self._busy = True
        for rank, process in enumerate(self._processes, 1):
            code = process.poll()
            if code is not None:
                raise self._loss(rank, code)
        super().send_orders(orders)

    def rest(self) -> None:
        """Mark the followers as idle, waiting for the next orders."""
        self._busy = False

    def say_farewell(self, farewell: Callable[[RankLost], None]) -> None:
        """Call `farewell`, in another thread, before a lost follower ends this process."""
        self._farewell = farewell

    def dismiss(self) -> None:
        """Tell the followers that there are no more orders."""
        self._dismissed = True
        super().dismiss()

    def end(self) -> None:
        """Kill the followers that still run; those that were dismissed get `GRACE_SECONDS` first."""
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
        if self._dismissed or not (self._busy or self._farewell):
            return
        # others may end because of the first one
        if not self._first_loss.acquire(blocking=False):
            return
        loss = self._loss(rank, code)
        if self._farewell is not None:
            self._farewell(loss)
        if code <= 0:
            self._lost(loss)
        os._exit(code if code > 0 else 1)

    def _loss(self, rank: int, code: int) -> RankLost:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "has ended"
        return RankLost(f"rank {rank} {how}", self._remedy)


@contextmanager
def leading(
    size: int, command: Sequence[str], device: torch.device, lost: Callable[[RankLost], None], remedy: str
) -> Iterator[tuple[World, torch.device, Followers]]:
    """Run this process as rank 0 of `size` on this machine; the others run `dsv4 command… PORT RANK SIZE`.

    The followers end when the block ends, and Ctrl-C does not reach them. lost, remedy: as in `StartedFollowers`.
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
