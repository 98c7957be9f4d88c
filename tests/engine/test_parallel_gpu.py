"""What two GPUs tell each other: the short way of small sums against NCCL, in CUDA graphs as well."""

import os
import socket

import pytest
import torch
from torch import distributed, multiprocessing

from dsv4cli.engine.parallel import SMALL_BYTES, World
from dsv4cli.engine.ranks import joined

RANKS = 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs"),
]
SHAPES = [(1, 4096), (3, 7168), (32, 4096), (64, 4096), (5, 12), (1, 2), (0, 4096)]


def part(rank, shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(shape, generator=generator).to("cuda", dtype)


def total(shape, dtype, seed=0):
    """The parts of all ranks, added up in their order."""
    first, *others = (part(rank, shape, dtype, seed) for rank in range(RANKS))
    for other in others:
        first += other
    return first


def check_sums(world):
    """Each sum, by whichever way, is to the last bit that of the parts in the order of the ranks."""
    assert world.peers is not None
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            mine = part(world.rank, shape, dtype)
            assert world.peers.takes(mine) == (mine.nbytes <= SMALL_BYTES and mine.nbytes % 16 == 0)
            alone = World(world.rank, world.size).all_reduce(mine.clone())
            assert torch.equal(alone, total(shape, dtype))
            assert torch.equal(world.all_reduce(mine), alone)
        wide = part(world.rank, (4, 64), dtype)
        expected = total((4, 64), dtype)
        for columns in (slice(0, 32), slice(3, 35)):
            assert torch.equal(world.all_reduce(wide[:, columns].clone()), expected[:, columns])
            assert torch.equal(world.all_reduce(wide[:, columns]), expected[:, columns])
        assert torch.equal(world.all_reduce(wide[1:, 1:]), expected[1:, 1:])


def check_graph(world):
    """A graph that holds sums of both kinds, a gathering and a broadcast gives what they give, at every replay."""
    small, large = part(world.rank, (1, 4096), torch.float32), part(world.rank, (64, 4096), torch.float32)
    tokens = torch.zeros(4, dtype=torch.int64, device="cuda")

    def step():
        sums = [world.all_reduce(small), world.all_reduce(large.clone()), world.all_reduce(small * 2)]
        return [*sums, world.gather_columns(small), world.first(tokens.clone())]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = step()
    for seed in range(1, 40):
        small.copy_(part(world.rank, small.shape, small.dtype, seed))
        large.copy_(part(world.rank, large.shape, large.dtype, seed))
        tokens.fill_(seed + world.rank)
        graph.replay()
        expected = [total(small.shape, small.dtype, seed), total(large.shape, large.dtype, seed)]
        expected.append(expected[0] * 2)
        expected.append(torch.cat([part(rank, small.shape, small.dtype, seed) for rank in range(RANKS)], -1))
        expected.append(torch.full_like(tokens, seed))
        assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


def work(rank, port):
    # as torchrun does
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="localhost", MASTER_PORT=port
    )
    with joined(torch.device("cuda")) as (world, device):
        assert (world.rank, world.size, device) == (rank, RANKS, torch.device("cuda", rank))
        check_sums(world)
        check_graph(world)
        distributed.barrier()


def test_small_sums_through_each_others_memory_equal_nccl():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    multiprocessing.spawn(work, (port,), nprocs=RANKS)
