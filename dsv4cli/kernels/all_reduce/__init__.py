"""Sums over the ranks of one machine whose GPUs write into each other's memory: one launch, also in a CUDA graph.

Of small sums every rank gets all rows. Of large ones it gets its share of the rows, and what it makes of them is
gathered later. The twins in plain PyTorch are those of torch.distributed; engine/parallel/world.py calls them where
these do not serve.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import torch

# programs of a launch at most, all of which an H200 has room for at once, and 4-byte words that each sends at once. On
# two H200s a share of 134 MB takes 211 us, and NCCL 299; with 1,024 programs 258, with 512 of four times the words 214
PROGRAMS, WORDS = 2048, 512


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

    def carries(self, *parts: torch.Tensor) -> bool:
        """Whether `all_gather` takes these, each without gaps: rows of whole words; `reduce_scatter` takes no int64."""
        return all(
            x.dtype in (torch.float32, torch.bfloat16, torch.int64)
            and x[:1].nbytes % 4 == 0
            and x.storage_offset() * x.itemsize % 4 == 0
            for x in parts
        )


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


def reduce_scatter(x: torch.Tensor, dtype: torch.dtype, symmetric: SymmetricBuffers) -> torch.Tensor:
    """This rank's share of the rows of the sum of all ranks' x in their order, in fp32, rounded once to dtype.

    x: [T, ...], as `SymmetricBuffers.carries`; dtype and calls as of `all_reduce`. Returns [R, ...], see `shares`.
    """
    return import_module(".kernel", __package__).reduce_scatter(x, dtype, symmetric)


def all_gather(parts: Sequence[torch.Tensor], tokens: int, symmetric: SymmetricBuffers) -> list[torch.Tensor]:
    """All rows of several tensors of which each rank has its share.

    parts: [R, ...] each, this rank's of so many tokens (`shares`), as `SymmetricBuffers.carries`, int64 between
    -2 ** 31 and 2 ** 31; calls as of `all_reduce`. Returns [tokens, ...] of each, the same bits on every rank except
    where they are not a number.
    """
    return import_module(".kernel", __package__).all_gather(parts, tokens, symmetric)
