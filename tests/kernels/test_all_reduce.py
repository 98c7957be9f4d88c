"""Sums over ranks through each other's memory: interpreted in processes that share their buffers.

On GPUs tests/engine/parallel/test_parallel_gpu.py has them.
"""

import random
import time

import pytest
import torch
from torch import multiprocessing

from dsv4cli.kernels.all_reduce import SymmetricBuffers, all_reduce

RANKS = 3
# of an inbox: programs, words of a program
BOX = (20, 2, RANKS, 256)
# rows and columns, dtype of the parts and of the sum: programs of other words from sum to sum, and none
SUMS = [
    ((1, 256), torch.float32, torch.bfloat16),
    ((3, 190), torch.bfloat16, torch.bfloat16),
    ((1, 2), torch.bfloat16, torch.float32),
    ((1, 514), torch.float32, torch.float32),
    ((1, 5000), torch.float32, torch.bfloat16),
    ((0, 64), torch.float32, torch.float32),
    ((5, 202), torch.bfloat16, torch.bfloat16),
    ((5, 202), torch.bfloat16, torch.float32),
    ((1, 2), torch.float32, torch.float32),
]


def given(number):
    """The parts of all ranks, and their sum in their order, rounded once."""
    shape, dtype, rounded = SUMS[number]
    parts = torch.randn(RANKS, *shape, generator=torch.Generator().manual_seed(number)).to(dtype)
    parts[:, ::2, 1::7] = 0.0
    parts[:, ::2, 3::7] = -0.0
    return parts, (parts[0].float() + parts[1].float() + parts[2].float()).to(rounded)


def work(rank, buffers, wrong):
    symmetric = SymmetricBuffers(rank, buffers, torch.zeros(BOX[0], dtype=torch.int32))
    pauses = random.Random(rank)
    for number in (*range(len(SUMS)), 0, 0):
        parts, expected = given(number)
        time.sleep(pauses.choice((0, 0.01)))
        y = all_reduce(parts[rank], expected.dtype, symmetric)
        same = y.dtype == expected.dtype and y.shape == expected.shape
        wrong[rank] += not (same and torch.equal(y.view(torch.int16), expected.view(torch.int16)))


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_each_rank_holds_the_sum_of_all_parts(triton_backend):
    if triton_backend != "interpreter":
        pytest.skip("one process has one GPU's memory")
    # fork: the shared memory lies at the same addresses
    buffers = tuple(torch.zeros(BOX, dtype=torch.int32).share_memory_() for _ in range(RANKS))
    wrong = torch.zeros(RANKS, dtype=torch.int32).share_memory_()
    multiprocessing.start_processes(work, (buffers, wrong), nprocs=RANKS, start_method="fork")
    assert wrong.tolist() == [0] * RANKS
    assert not any(buffer.any() for buffer in buffers)  # all that came has been taken
