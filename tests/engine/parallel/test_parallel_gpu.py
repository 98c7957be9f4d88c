"""What two GPUs tell each other: through each other's memory and through NCCL, in CUDA graphs too."""

import math
import os
import random
import socket

import pytest
import torch
from torch import distributed, multiprocessing

from dsv4cli.engine.parallel.processes import joined
from dsv4cli.engine.parallel.world import World
from dsv4cli.kernels.all_reduce import PROGRAMS, WORDS
from dsv4cli.kernels.shares import share_of

RANKS = 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs"),
]
SHAPES = [(1, 4096), (3, 7168), (16, 4096), (64, 4096), (5, 12), (1, 2), (3, 1), (0, 4096), (300, 4096)]
REPLAYS = 2000


def part(rank, shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(shape, generator=generator).to("cuda", dtype)


def total(parts, dtype):
    """The parts added up in their order, in fp32, and rounded once."""
    wide = parts[0].float()
    for other in parts[1:]:
        wide = wide + other.float()
    return wide.to(dtype)


def differ(first, second):
    """Whether two tensors differ in any bit: a flag on the device."""
    return (first.contiguous().view(torch.int16) != second.contiguous().view(torch.int16)).any()


def check_sums(world):
    """Each sum, by whichever way, is to the last bit that of the parts in the order of the ranks."""
    assert world.symmetric_buffers is not None
    other_way = World(world.rank, world.size)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            parts = [part(rank, shape, dtype) for rank in range(RANKS)]
            mine = parts[world.rank]
            assert world.symmetric_buffers.takes(mine) == (mine.nbytes <= PROGRAMS * WORDS * 4 and mine.nbytes % 4 == 0)
            for rounded in (torch.float32, torch.bfloat16):
                expected = total(parts, rounded)
                assert not differ(world.sum_rounded(mine.clone(), rounded), expected)
                assert not differ(other_way.sum_rounded(mine.clone(), rounded), expected)
        wide = [part(rank, (4, 64), dtype) for rank in range(RANKS)]
        expected, mine = total(wide, dtype), wide[world.rank]
        for columns in (slice(0, 32), slice(3, 35), slice(1, 3)):
            assert torch.equal(world.sum_rounded(mine[:, columns], dtype), expected[:, columns])
        assert torch.equal(world.sum_rounded(mine[1:, 1:], dtype), expected[1:, 1:])
        assert torch.equal(world.sum_rounded(mine.flatten()[3:], dtype), expected.flatten()[3:])


def check_shares(world):
    """Each rank's share of a sum, and what is gathered of shares, by whichever way: bit for bit."""
    other_way = World(world.rank, world.size)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in [(256, 4096), (1001, 7168), (8192, 512), (3, 64)]:
            parts = [part(rank, shape, dtype) for rank in range(RANKS)]
            own = share_of(shape[0], world.rank, world.size)
            rows, expected = own.stop - own.start, total(parts, torch.bfloat16)
            for one in (world, other_way):
                share = one.sum_rows(parts[world.rank].clone(), rows, torch.bfloat16)
                assert not differ(share, expected[own])
                wide = parts[0][own, :6].contiguous()
                listed = torch.arange(-1, shape[0] * 3 - 1, device="cuda").view(-1, 3) % 600 - 1
                every, narrow, lists = one.gather_rows([share, wide, listed[own]], shape[0])
                assert not differ(every, expected)
                assert not differ(narrow, parts[0][:, :6])
                assert torch.equal(lists, listed)


def check_shared_replays(world):
    """Shares of sums, gathered, between sums of all rows, in a graph: thousands of replays, never a wrong bit."""
    step, wrong = (torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2))

    def run():
        for number, shape in enumerate([(512, 4096), (16, 4096), (300, 512), (64, 4096), (1001, 512)]):
            dtype = (torch.bfloat16, torch.float32)[number % 2]
            parts = [numbers(rank, step, shape, dtype) for rank in range(RANKS)]
            mine, expected = parts[world.rank].clone(), total(parts, torch.bfloat16)
            if number % RANKS == world.rank:
                torch.cuda._sleep(20_000)
            own = share_of(shape[0], world.rank, RANKS)
            share = world.sum_rows(mine, own.stop - own.start, torch.bfloat16)
            wrong.add_(differ(share, expected[own]))
            for every in world.gather_rows([share] * 5, shape[0]):
                wrong.add_(differ(every, expected))
            wrong.add_(differ(world.sum_rounded(mine[:64], torch.bfloat16), expected[:64]))
        step.add_(1)

    replay(world, captured(run))
    assert (step.item(), wrong.item()) == (REPLAYS + 1, 0)
    assert not world.symmetric_buffers.buffers[world.rank].any()  # all that came has been taken


def replay(world, graph):
    """Thousands of times, the ranks delayed at random."""
    pauses = random.Random(world.rank)
    for _ in range(REPLAYS):
        if pauses.random() < 0.3:
            torch.cuda._sleep(pauses.randrange(200_000))
        graph.replay()


def numbers(rank, step, shape, dtype):
    """A rank's part in a step that only the device knows."""
    index = torch.arange(math.prod(shape), device="cuda")
    bits = index * 6364136223846793005 + (RANKS * step + rank) * 1442695040888963407
    return ((bits * 2862933555777941757 >> 40).float() / 2**20).to(dtype).view(shape)


def check_replays(world):
    """Sums of both kinds in a graph, thousands of replays, the ranks delayed at random: never a wrong bit."""
    step, wrong = (torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2))

    def run():
        for number, shape in enumerate([(1, 4096), (16, 4096), (1, 4096), (64, 4096), (5, 12), (300, 4096)]):
            dtype = (torch.bfloat16, torch.float32)[number % 2]
            parts = [numbers(rank, step, shape, dtype) for rank in range(RANKS)]
            mine, expected = parts[world.rank].clone(), total(parts, torch.bfloat16)
            if number % RANKS == world.rank:
                torch.cuda._sleep(20_000)
            given = world.sum_rounded(mine, torch.bfloat16)
            again = world.sum_rounded(given, torch.float32)
            wrong.add_(differ(given, expected))
            wrong.add_(differ(again, total([expected] * RANKS, torch.float32)))
        step.add_(1)

    replay(world, captured(run))
    assert (step.item(), wrong.item()) == (REPLAYS + 1, 0)
    assert not world.symmetric_buffers.buffers[world.rank].any()  # all that came has been taken


def captured(run):
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph


def check_gathering(world):
    """A graph that holds a sum and a gathering gives what they give, at every replay."""
    rows = part(world.rank, (1, 4096), torch.float32)
    given = []

    def run():
        given[:] = world.sum_rounded(rows * 2, rows.dtype), world.gather_columns(rows)

    graph = captured(run)
    for seed in range(1, 40):
        rows.copy_(part(world.rank, rows.shape, rows.dtype, seed))
        graph.replay()
        parts = [part(rank, rows.shape, rows.dtype, seed) for rank in range(RANKS)]
        expected = [total(parts, rows.dtype) * 2, torch.cat(parts, -1)]
        assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


def work(rank, port):
    # as torchrun does
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="localhost", MASTER_PORT=port
    )
    with joined(torch.device("cuda")) as (world, device):
        assert (world.rank, world.size, device) == (rank, RANKS, torch.device("cuda", rank))
        check_sums(world)
        check_gathering(world)
        check_replays(world)
        check_shares(world)
        check_shared_replays(world)
        distributed.barrier()


def test_small_sums_through_each_others_memory_equal_nccl():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    multiprocessing.spawn(work, (port,), nprocs=RANKS)
