"""Sums over ranks through each other's memory: interpreted in processes that share their buffers.

On GPUs tests/engine/parallel/test_parallel_gpu.py has them.
"""

import random
import signal
import time
from functools import partial

import pytest
import torch
from torch import multiprocessing

from dsv4cli.kernels.all_reduce import SymmetricBuffers, all_gather, all_reduce, reduce_scatter
from dsv4cli.kernels.shares import share_of
from tests.support.forked import output_of

RANKS = 3
# one that waits for a word which has been lost waits for ever
SECONDS = 30
# of an inbox: programs, words of a program
BOX = (6, 2, RANKS, 256)
# rows and columns, dtype of the parts and of the sum: programs of other words from sum to sum, and none
SUMS = [
    ((1, 256), torch.float32, torch.bfloat16),
    ((3, 190), torch.bfloat16, torch.bfloat16),
    ((1, 2), torch.bfloat16, torch.float32),
    ((1, 514), torch.float32, torch.float32),
    ((1, 1500), torch.float32, torch.bfloat16),
    ((0, 64), torch.float32, torch.float32),
    ((5, 202), torch.bfloat16, torch.bfloat16),
    ((5, 202), torch.bfloat16, torch.float32),
    ((1, 2), torch.float32, torch.float32),
]
# likewise, of rows that the ranks share: with more words than all programs have together, 1,536, and with fewer; equal
# shares, a last one with less, and one with nothing
SHARED = [
    ((3, 256), torch.float32, torch.bfloat16),
    ((3 * 10, 600), torch.float32, torch.bfloat16),
    ((5, 190), torch.bfloat16, torch.bfloat16),
    ((3 * 23 - 2, 514), torch.bfloat16, torch.bfloat16),
    ((0, 64), torch.float32, torch.float32),
    ((4, 2), torch.bfloat16, torch.float32),
    ((1, 256), torch.float32, torch.float32),
    ((3 * 9 - 1, 600), torch.float32, torch.float32),
]
# rows, and of tensors that are gathered together their other dimensions and dtypes
GATHERED = [
    (1, [((2,), torch.bfloat16)]),
    (3 * 13 - 1, [((256,), torch.bfloat16), ((1, 300), torch.float32), ((4, 6), torch.float32)]),
    (9, [((64,), torch.float32)] * 7),
    (7, [((90,), torch.int64), ((3,), torch.float32), ((1,), torch.int64)]),
    (4, [((64,), torch.float32), ((2,), torch.bfloat16)]),
    (0, [((64,), torch.float32), ((2,), torch.bfloat16)]),
]


def given(number, cases=SUMS):
    """The parts of all ranks, and their sum in their order, rounded once."""
    shape, dtype, rounded = cases[number]
    parts = torch.randn(RANKS, *shape, generator=torch.Generator().manual_seed(number)).to(dtype)
    parts[:, ::2, 1::7] = 0.0
    parts[:, ::2, 3::7] = -0.0
    return parts, (parts[0].float() + parts[1].float() + parts[2].float()).to(rounded)


def late():
    """Lets this rank come late to whatever the others have sent."""
    from triton.runtime.interpreter import InterpreterBuilder

    load = InterpreterBuilder.create_masked_load

    def call(self, *given):
        time.sleep(0.001 * given[-1])  # volatile
        return load(self, *given)

    InterpreterBuilder.create_masked_load = call


def numbers(shape, dtype):
    generator = torch.Generator().manual_seed(shape[0])
    if dtype is not torch.int64:
        return torch.randn(shape, generator=generator).to(dtype)
    given = torch.randint(1 - 2**31, 2**31, shape, generator=generator)
    given[::2] %= 600
    given[:, 1::3] = -1
    return given


def work(rank, buffers, wrong):
    symmetric = SymmetricBuffers(rank, buffers, torch.zeros(BOX[0], dtype=torch.int32))
    pauses = random.Random(rank)
    for number in (*range(len(SUMS)), 0, 0):
        parts, expected = given(number)
        time.sleep(pauses.choice((0, 0.01)))
        y = all_reduce(parts[rank], expected.dtype, symmetric)
        wrong[rank] += not same(y, expected)


def work_in_shares(rank, buffers, wrong, few=False):
    """Shares of sums and what is gathered, between sums of all rows. few: every second of them."""
    symmetric = SymmetricBuffers(rank, buffers, torch.zeros(BOX[0], dtype=torch.int32))
    pauses = random.Random(rank)
    for number in range(few, len(SHARED), 1 + few):
        parts, expected = given(number, SHARED)
        time.sleep(pauses.choice((0, 0.01)))
        own = reduce_scatter(parts[rank], expected.dtype, symmetric)
        wrong[rank] += not same(own, expected[share_of(len(expected), rank, RANKS)])
        wrong[rank] += not same(all_gather([own], len(expected), symmetric)[0], expected)
        parts, expected = given(number % 2)
        wrong[rank] += not same(all_reduce(parts[rank], expected.dtype, symmetric), expected)
    for rows, others in GATHERED[few :: 1 + few]:
        every = [numbers((rows, *shape), dtype) for shape, dtype in others]
        own = [one[share_of(rows, rank, RANKS)].clone() for one in every]
        wrong[rank] += not all(map(same, all_gather(own, rows, symmetric), every))


def enter(rank, work, buffers, wrong):
    signal.alarm(SECONDS)
    if rank == RANKS - 1:
        late()
    work(rank, buffers, wrong)


def same(ours, expected):
    """Whether two tensors are alike in every bit."""
    alike = ours.dtype == expected.dtype and ours.shape == expected.shape
    return alike and torch.equal(ours.view(torch.int16), expected.view(torch.int16))


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize(
    "work",
    [
        pytest.param(work, id="all rows"),
        pytest.param(partial(work_in_shares, few=True), id="few shares"),
        pytest.param(work_in_shares, id="shares", marks=pytest.mark.slow),
    ],
)
def test_each_rank_holds_the_sum_of_all_parts(triton_backend, work):
    if triton_backend != "interpreter":
        pytest.skip("one process has one GPU's memory")
    # fork: the shared memory lies at the same addresses
    buffers = tuple(torch.zeros(BOX, dtype=torch.int32).share_memory_() for _ in range(RANKS))
    wrong = torch.zeros(RANKS, dtype=torch.int32).share_memory_()
    multiprocessing.start_processes(enter, (work, buffers, wrong), nprocs=RANKS, start_method="fork")
    assert wrong.tolist() == [0] * RANKS
    assert not any(buffer.any() for buffer in buffers)  # all that came has been taken


def test_what_goes_to_another_gpu_goes_in_four_words(tmp_path):
    """In single ones the gathering of a prompt's lists and inputs took twice as long."""
    stores = output_of("-m", "tests.support.gathers", TRITON_INTERPRET=None, TRITON_CACHE_DIR=str(tmp_path))
    assert stores.split("\n")[:-1] == ["st.global.v4.b32"] * 3
