"""Sums over the ranks of one machine whose GPUs write into each other's memory: one launch, also in a CUDA graph.

For small sums every rank gets all rows. For large sums each rank gets its share of the rows, and the results are
gathered later. The reference is torch.distributed, which engine/parallel/world.py uses when these kernels cannot.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import torch

# most programs of a launch, which all run at once on an H200, and 4-byte words that each sends at a time. On two H200s
# a share of 134 MB takes 211 us (NCCL: 299 us; 1,024 programs: 258 us; 512 programs with four times the words: 214 us)
PROGRAMS, WORDS = 2048, 512


@dataclass(frozen=True)
class SymmetricBuffers:
    """Buffers in which the ranks exchange the parts of a sum.

    Attributes:
        buffers: each rank's int32 [PROGRAMS, 2, ranks, WORDS] as mapped on this GPU, zeros before the first sum. A
            program
            uses the two halves alternately. That is safe: when a rank sends the parts of a sum, it has received the
            others'
            parts of the sum before, which they sent after they had read the sum before that.
        sums: int32 [PROGRAMS] of this rank alone: how many sums each program has computed.
    """

    rank: int
    buffers: tuple[torch.Tensor, ...]
    sums: torch.Tensor

    def takes(self, x: torch.Tensor) -> bool:
        """Return whether `all_reduce` supports x, which is contiguous: bf16 or fp32, whole words, not too many."""
        words, rest = divmod(x.nbytes, 4)
        aligned = not rest and x.storage_offset() * x.itemsize % 4 == 0
        return x.dtype in (torch.float32, torch.bfloat16) and aligned and words <= PROGRAMS * WORDS

    def carries(self, *parts: torch.Tensor) -> bool:
        """Return whether `all_gather` supports these contiguous tensors: each row must be whole words.

        `reduce_scatter` has the same requirements, but does not support int64.
        """
        return all(
            x.dtype in (torch.float32, torch.bfloat16, torch.int64)
            and x[:1].nbytes % 4 == 0
            and x.storage_offset() * x.itemsize % 4 == 0
            for x in parts
        )


def buffer_shape(ranks: int) -> tuple[int, int, int, int]:
    """Return the shape of a rank's buffer."""
    return PROGRAMS, 2, ranks, WORDS


def all_reduce(x: torch.Tensor, dtype: torch.dtype, symmetric: SymmetricBuffers) -> torch.Tensor:
    """Return the sum of all ranks' x in rank order, in fp32, rounded once to dtype, which is bf16 or fp32.

    x: fp32 or bf16, contiguous; see `SymmetricBuffers.takes`. Every rank must make the same calls with the same shapes,
    on ordered CUDA streams. Returns a new tensor with the same bits on every rank, except for NaN.
    """
    return import_module(".kernel", __package__).all_reduce(x, dtype, symmetric)


def reduce_scatter(x: torch.Tensor, dtype: torch.dtype, symmetric: SymmetricBuffers) -> torch.Tensor:
    """Return this rank's share of the rows of `all_reduce`.

    x: [T, ...], see `SymmetricBuffers.carries`. dtype and calls: as for `all_reduce`. Returns [R, ...], see `shares`.
    """
    return import_module(".kernel", __package__).reduce_scatter(x, dtype, symmetric)


def all_gather(parts: Sequence[torch.Tensor], tokens: int, symmetric: SymmetricBuffers) -> list[torch.Tensor]:
    """Gather all rows of several tensors that are sharded by rows.

    Args:
        parts: this rank's share [R, ...] of each tensor (`shares`), see `SymmetricBuffers.carries`; int64 must be
            between
            -2 ** 31 and 2 ** 31. Calls: as for `all_reduce`.
        tokens: rows of all ranks together.

    Returns [tokens, ...] for each tensor, with the same bits on every rank, except for NaN.
    """
    return import_module(".kernel", __package__).all_gather(parts, tokens, symmetric)
