"""The expert cache in Triton: one program decides which experts to copy, then many programs copy them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.launch import launched, next_power_of_2
from dsv4cli.kernels.pdl import overlap, wait_for_inputs

if TYPE_CHECKING:
    from dsv4cli.kernels.expert_cache import ExpertCache

# pairs (token, expert) counted at a time, in decode steps and in prefill
FEW, MANY = 128, 1024
# programs that copy, and the 8-byte words that each has in flight: 16 kB, 2 MB in all, far more than PCIe needs
PROGRAMS, WORDS = 128, 2048
MATRICES = 9

_NEVER = tl.constexpr(2**62)


def fetch(
    chosen: torch.Tensor, cache: "ExpertCache", host: Sequence[torch.Tensor], stacks: Sequence[torch.Tensor]
) -> torch.Tensor:
    experts, waiting, slots, pairs = len(cache.row_of_expert), len(host[0]), len(cache.expert_of_slot), chosen.numel()
    copies = [_words(source, stack) for source, stack in zip(host, stacks, strict=True)]
    rows = torch.empty_like(cache.row_of_expert)
    jobs = cache.row_of_expert.new_empty(1 + 2 * waiting)
    _decide[(1,)](
        chosen.contiguous(), cache.row_of_expert, cache.expert_of_slot, cache.last_used, cache.steps, cache.counts,
        rows, jobs, pairs, len(chosen), cache.first_slot_row, cache.first_staging_row, experts - waiting, slots,
        experts, next_power_of_2(experts), next_power_of_2(slots), FEW if pairs <= FEW else MANY,
        **overlap(chosen),
    )  # fmt: skip
    copies += [(*copies[0][:2], 0)] * (MATRICES - len(copies))
    sources, targets, words = zip(*copies, strict=True)
    _copy[(PROGRAMS,)](jobs, *sources, *targets, *words, WORDS, **overlap(chosen), num_warps=4)
    return rows


def _words(source: torch.Tensor, stack: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return both tensors as rows of words, and the number of words in a row."""
    if not (source.is_contiguous() and stack.is_contiguous()):
        raise KernelUnsupported("the Triton expert cache requires contiguous tensors")
    nbytes = stack[0].nbytes
    dtype = torch.int64 if nbytes % 8 == 0 else torch.uint8
    source, stack = (tensor.view(len(tensor), -1).view(torch.uint8).view(dtype) for tensor in (source, stack))
    return source, stack, nbytes // dtype.itemsize


@triton.jit
def _wanted(chosen, pairs, EXPERTS: tl.constexpr, PAIRS: tl.constexpr):
    """Return whether each expert is chosen: bool [EXPERTS]."""
    uses = tl.zeros([EXPERTS], tl.int32)
    for begin in range(0, pairs, PAIRS):
        pair = begin + tl.arange(0, PAIRS)
        expert = tl.load(chosen + pair, pair < pairs, other=0).to(tl.int32)
        uses += tl.histogram(expert, EXPERTS, mask=pair < pairs)
    return uses > 0


@launched(do_not_specialize=["pairs", "tokens", "first_slot_row", "first_staging_row", "stays", "slots"])
def _decide(
    chosen,  # int64 [pairs]
    row_of_expert,  # int64 [COUNT]
    expert_of_slot,  # int64 [slots], as all below
    last_used,
    steps,
    counts,
    rows,  # [COUNT] the result
    jobs,  # their number, then of each the row in host memory and that in the stacks
    pairs,
    tokens,
    first_slot_row,
    first_staging_row,
    stays,  # experts that never leave; how many follows from the memory that is free
    slots,
    COUNT: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    SLOTS_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    expert, slot = tl.arange(0, EXPERTS_BLOCK), tl.arange(0, SLOTS_BLOCK)
    real, here = expert < COUNT, slot < slots
    wait_for_inputs(OVERLAP)
    wanted = _wanted(chosen, pairs, EXPERTS_BLOCK, PAIRS)
    rows_of_experts = tl.load(row_of_expert + expert, real, other=0)
    experts_of_slots = tl.load(expert_of_slot + slot, here, other=0)
    last = tl.load(last_used + slot, here, other=0)
    now = tl.load(steps) + 1
    missing = wanted & (rows_of_experts < 0)
    number = tl.sum(missing.to(tl.int32), 0)
    rank = tl.cumsum(missing.to(tl.int32), 0) - 1
    in_use = here & (tl.gather(wanted.to(tl.int32), experts_of_slots.to(tl.int32), 0) > 0)
    last = tl.where(in_use, now, last)
    age = tl.where(here & (in_use == 0), last, _NEVER)  # of slots that can be evicted
    row = tl.maximum(rows_of_experts, 0)
    staged = tl.full([], 0, tl.int64)
    for i in range(number):
        new = tl.sum(tl.where(missing & (rank == i), expert, 0), 0).to(tl.int64)
        oldest = tl.min(age, 0)
        none = oldest == _NEVER
        taken = tl.min(tl.where((age == oldest) & (age < _NEVER), slot, SLOTS_BLOCK), 0)
        target = tl.where(none, first_staging_row + staged, first_slot_row + taken.to(tl.int64))
        here_now = slot == taken  # nowhere if there is none
        old = tl.sum(tl.where(here_now, experts_of_slots, 0), 0)
        rows_of_experts = tl.where((expert == old) & (none == 0), -1, rows_of_experts)
        rows_of_experts = tl.where((expert == new) & (none == 0), target, rows_of_experts)
        row = tl.where(expert == new, target, row)
        experts_of_slots = tl.where(here_now, new, experts_of_slots)
        last = tl.where(here_now, now, last)
        age = tl.where(here_now, _NEVER, age)
        staged += none.to(tl.int64)
        tl.store(jobs + 1 + 2 * i, new - stays)
        tl.store(jobs + 2 + 2 * i, target)
    tl.store(jobs, number.to(tl.int64))
    tl.store(rows + expert, row, real)
    tl.store(row_of_expert + expert, rows_of_experts, real)
    tl.store(expert_of_slot + slot, experts_of_slots, here)
    tl.store(last_used + slot, last, here)
    tl.store(steps, now)
    found = tl.sum(wanted.to(tl.int32), 0)
    tl.store(counts, tl.load(counts) + tokens)
    tl.store(counts + 1, tl.load(counts + 1) + found)
    tl.store(counts + 2, tl.load(counts + 2) + found - number)


@triton.jit
def _copy_row(source, target, N: tl.constexpr, BLOCK: tl.constexpr):
    """Copy this program's blocks of a row of N words."""
    for block in range(tl.program_id(0), (N + BLOCK - 1) // BLOCK, tl.num_programs(0)):
        word = block * BLOCK + tl.arange(0, BLOCK)
        if N % BLOCK == 0:
            tl.store(target + word, tl.load(source + word))
        else:
            tl.store(target + word, tl.load(source + word, word < N, other=0), word < N)


@launched
def _copy(
    jobs,  # as _decide leaves them
    h0, h1, h2, h3, h4, h5, h6, h7, h8,  # rows of words in host memory
    s0, s1, s2, s3, s4, s5, s6, s7, s8,  # and in the stacks
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, N4: tl.constexpr, N5: tl.constexpr,
    N6: tl.constexpr, N7: tl.constexpr, N8: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    for i in range(tl.load(jobs)):
        source, target = tl.load(jobs + 1 + 2 * i), tl.load(jobs + 2 + 2 * i)
        _copy_row(h0 + source * N0, s0 + target * N0, N0, BLOCK)
        _copy_row(h1 + source * N1, s1 + target * N1, N1, BLOCK)
        _copy_row(h2 + source * N2, s2 + target * N2, N2, BLOCK)
        _copy_row(h3 + source * N3, s3 + target * N3, N3, BLOCK)
        _copy_row(h4 + source * N4, s4 + target * N4, N4, BLOCK)
        _copy_row(h5 + source * N5, s5 + target * N5, N5, BLOCK)
        _copy_row(h6 + source * N6, s6 + target * N6, N6, BLOCK)
        _copy_row(h7 + source * N7, s7 + target * N7, N7, BLOCK)
        _copy_row(h8 + source * N8, s8 + target * N8, N8, BLOCK)
