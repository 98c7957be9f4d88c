"""Sums over the ranks of one machine whose GPUs write into each other's memory: one launch, also in a CUDA graph.

The twin in plain PyTorch is torch.distributed.all_reduce; engine/parallel/world.py calls it where this does not serve.
"""

from dataclasses import dataclass
from importlib import import_module

import torch

# programs of a launch at most, and 4-byte words of each. On two H200s 2 MB take 8 us, and NCCL 32; other words of a
# program are no more than 5 % faster
PROGRAMS, WORDS = 1024, 512


@dataclass(frozen=True)
class SymmetricBuffers:
    """Where the ranks leave their parts of a sum for each other.

    buffers: each rank's int32 [PROGRAMS, 2, ranks, WORDS] as this GPU has it mapped, zeros before the first sum. A
        program's parts of one sum go to the first of two halves and those of its next sum to the second: a rank that
        sends the next but one has the others' parts of the next, which they sent after taking the one before.
    sums: int32 [PROGRAMS], of this rank alone: how many sums each program has made.
    """

    rank: int
    buffers: tuple[torch.Tensor, ...]
    sums: torch.Tensor

    def takes(self, x: torch.Tensor) -> bool:
        """Whether `all_reduce` takes x, which has no gaps: few whole words of bf16 or fp32."""
        words, rest = divmod(x.nbytes, 4)
        aligned = not rest and x.storage_offset() * x.itemsize % 4 == 0
        return x.dtype in (torch.float32, torch.bfloat16) and aligned and words <= PROGRAMS * WORDS


def buffer_shape(ranks: int) -> tuple[int, int, int, int]:
    """The shape of a rank's buffer."""
    return PROGRAMS, 2, ranks, WORDS


def all_reduce(x: torch.Tensor, dtype: torch.dtype, symmetric: SymmetricBuffers) -> torch.Tensor:
    """The sum of all ranks' x in their order, in fp32, rounded once to dtype, which is bf16 or fp32.

    x: fp32 or bf16 without gaps, as `SymmetricBuffers.takes`. Every rank calls it with the same shape, in one order, on
    CUDA streams that follow one another. Returns a new tensor, the same bits on every rank except where x is not a
    number.
    """
    return import_module(".kernel", __package__).all_reduce(x, dtype, symmetric)
