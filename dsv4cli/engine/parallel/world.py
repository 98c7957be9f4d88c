"""The ranks of a tensor-parallel run: what they tell each other while the model computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from dsv4cli.kernels.all_reduce import SymmetricBuffers, all_reduce
from dsv4cli.kernels.dispatch import chosen

# the name from torch 2.13 on, and the name before
_all_gather = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)
T = TypeVar("T")
NONE = 2**63 - 1


@dataclass(frozen=True)
class World:
    """This process's place among `size` ranks; with one rank every operation is the identity.

    Each operation is called by all ranks, in one order. symmetric_buffers: carry small
    sums, None where NCCL or gloo does.
    ranks_here: the most ranks that one machine has, which share its memory.
    """

    rank: int = 0
    size: int = 1
    symmetric_buffers: SymmetricBuffers | None = None
    ranks_here: int = 1

    @property
    def short_way(self) -> str:
        """What carries small sums, in words."""
        return torch.distributed.get_backend() if self.symmetric_buffers is None else "each other's memory"

    def sum_rounded(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum of x, fp32 or bf16, over all ranks: added in fp32, rounded once to dtype, the same bits on each.

        x may be overwritten.
        """
        if self.size == 1:
            return x.to(dtype)
        # gloo sums the wrong numbers of a view with gaps, without a word
        x = x.contiguous()
        if self.symmetric_buffers is not None and self.symmetric_buffers.takes(x) and chosen() != "torch":
            return all_reduce(x, dtype, self.symmetric_buffers)
        # a sum of two is rounded once in any dtype
        total = x if self.size == 2 and x.dtype == dtype else x.float()
        torch.distributed.all_reduce(total)
        return total.to(dtype)

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' [R, V / size] beside each other: [R, V] on every rank."""
        if self.size == 1:
            return x
        rows, columns = x.shape
        parts = x.new_empty(self.size * rows, columns)
        _all_gather(parts, x.contiguous())
        return parts.view(self.size, rows, columns).transpose(0, 1).flatten(1)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x, on every rank: for what decides the way, as drawn tokens do; x is overwritten."""
        if self.size > 1:
            torch.distributed.broadcast(x, 0)
        return x

    def agree(self, here: bool) -> bool:
        """What rank 0 has here: for what may come to one rank at any time, as Ctrl-C does."""
        if self.size == 1:
            return here
        said = torch.tensor([here], dtype=torch.uint8)
        torch.distributed.broadcast(said, 0)
        return bool(said)

    def share(self, value: T) -> T:
        """Rank 0's value, on every rank; for what happens once, not in a step."""
        values = [value]
        if self.size > 1:
            torch.distributed.broadcast_object_list(values, 0, device=torch.device("cpu"))
        return values[0]

    def least(self, numbers: Sequence[int | None]) -> list[int | None]:
        """The smallest that any rank has of each number; None where none has one."""
        if self.size == 1:
            return list(numbers)
        every = torch.tensor([NONE if number is None else number for number in numbers], dtype=torch.int64)
        torch.distributed.all_reduce(every, torch.distributed.ReduceOp.MIN)
        return [None if number == NONE else number for number in every.tolist()]


SINGLE = World()
