"""The processes of a tensor-parallel run: their GPUs, their rendezvous and their end."""

import atexit
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import sleep
from typing import Any

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined] # its own types leave it out
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from dsv4cli.engine.config.capacity import divides_from
from dsv4cli.engine.parallel.world import World, lost_others
from dsv4cli.errors import RankLost, UnsupportedHardware, UsageError
from dsv4cli.kernels.all_reduce import PROGRAMS, SymmetricBuffers, buffer_shape

# seconds that a rank waits after another rank's failure, so that its launcher sees that rank's exit first
GRACE_SECONDS = 10
# how long a rank waits for its next order
FOR_EVER = timedelta(days=1000)


def check_devices(size: int, device: torch.device) -> None:
    """Raise UsageError if one GPU is named for several ranks, UnsupportedHardware if there are too few GPUs."""
    if device.index is not None:
        raise UsageError(f"--device {device} is one GPU, but each rank needs its own", "use --device cuda")
    count = torch.cuda.device_count()
    if device.type == "cuda" and size > count:
        raise UnsupportedHardware(
            f"{size} ranks need {size} GPUs, and PyTorch sees {count}", f"use at most {count} ranks, or --device cpu"
        )


@dataclass(frozen=True)
class RendezvousAddress:
    """The local port where one of `size` ranks meets the others. store: the listening store, on rank 0 only."""

    port: int
    rank: int
    size: int
    store: TCPStore | None = None


def rendezvous_addresses(size: int) -> list[RendezvousAddress]:
    """Return an address for each of `size` ranks; the first, for this process, already listens on the port."""
    store = TCPStore("localhost", 0, size, True, default_pg_timeout, wait_for_workers=False)
    others = [RendezvousAddress(store.port, rank, size) for rank in range(1, size)]
    return [RendezvousAddress(store.port, 0, size, store), *others]


@contextmanager
def joined(device: torch.device, address: RendezvousAddress | None = None) -> Iterator[tuple[World, torch.device]]:
    """Join the ranks at an address, or at the one in the environment; yield the World and this rank's device.

    With CUDA, each rank has its own GPU. A rank that fails inside the block exits at once, and only the first one to
    fail
    reports its error. The block must release its CUDA graphs before it ends: the process group waits for graphs that
    hold NCCL launches.
    """
    local = distributed.get_node_local_rank() if address is None else address.rank
    if device.type == "cuda":
        check_devices(local + 1, device)
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    store, rank, size = _met(address)
    try:
        backend, gpu = ("cpu:gloo,cuda:nccl", device) if device.type == "cuda" else ("gloo", None)
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=gpu)
        yield _world(local, device), device
        distributed.destroy_process_group()
    except BaseException as error:
        # an orderly end of the interpreter, as of a graph whose step is under way, may wait for what the other ranks
        # still owe this one: nothing that the error holds goes before the process does
        atexit.register(_leave, _exit_code(error), error)
        lost = lost_others(error)
        if lost:
            sleep(GRACE_SECONDS)
        if store.add("failed", 1) > 1:
            sleep(GRACE_SECONDS)  # until the first has spoken and left
            sys.exit(_exit_code(error))
        if lost:
            raise RankLost(f"rank {rank} lost the connection to another rank", "see how the others ended") from error
        raise


def _met(address: RendezvousAddress | None) -> tuple[Any, int, int]:
    """Return the rendezvous store, this rank and the number of ranks."""
    if address is not None and address.store is not None:
        return address.store, address.rank, address.size
    url = address and f"tcp://localhost:{address.port}?rank={address.rank}&world_size={address.size}"
    return next(rendezvous(url or "env://"))


def _leave(code: int, held: BaseException) -> None:
    os._exit(code)


def _exit_code(error: BaseException) -> int:
    """Return the exit code of this process for an uncaught error."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", 1)
    return code if isinstance(code, int) else 1


def interruptible() -> None:
    """Let signals end this rank at once from now on, even while it waits for the others; it has nothing to clean up."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _world(local: int, device: torch.device) -> World:
    """Return this process's World. local: its rank on this machine."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    orders = distributed.new_group(backend="gloo", timeout=FOR_EVER)
    numbers = _gathered(local)
    ranks_here = max(numbers) + 1
    if device.type == "cuda":
        buffers = _symmetric_buffers(rank, numbers, device)
        return World(rank, size, buffers, ranks_here, orders, None if buffers is None else divides_from(size))
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks_here))
    return World(rank, size, None, ranks_here, orders)


def _symmetric_buffers(rank: int, numbers: list[int], device: torch.device) -> SymmetricBuffers | None:
    """Return the buffers of the symmetric-memory all-reduce; all ranks decide alike.

    None for several machines, or for GPUs without peer access.
    """
    from torch.distributed import _symmetric_memory

    one_machine = numbers == list(range(len(numbers)))
    others = [number for number in numbers if number != device.index]
    if not one_machine or not all(_gathered(all(torch.cuda.can_device_access_peer(device, other) for other in others))):
        return None
    assert distributed.group.WORLD is not None
    shape = buffer_shape(len(numbers))
    buffers: tuple[torch.Tensor, ...] = ()
    try:
        own = _symmetric_memory.empty(shape, dtype=torch.int32, device=device)
        own.zero_()
        torch.cuda.synchronize()
        mapped = _symmetric_memory.rendezvous(own, distributed.group.WORLD.group_name)
        buffers = tuple(own if rank == number else mapped.get_buffer(number, shape, own.dtype) for number in numbers)
    except RuntimeError:  # memory that the driver does not share
        pass
    sums = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
    # no rank sends before every rank has reported that its buffer exists
    return SymmetricBuffers(rank, buffers, sums) if all(_gathered(bool(buffers))) else None


def _gathered(mine: int) -> list[int]:
    """Return the value of every rank, in rank order."""
    values = [0] * distributed.get_world_size()
    distributed.all_gather_object(values, mine)
    return values
