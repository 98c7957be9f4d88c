"""The ranks of a tensor-parallel run: what they tell each other while the model computes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dsv4cli.kernels.all_reduce import SymmetricBuffers, all_gather, all_reduce, reduce_scatter
from dsv4cli.kernels.dispatch import chosen
from dsv4cli.kernels.shares import rows_each, share_of

# the name from torch 2.13 on, and the name before
_all_gather = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)
T = TypeVar("T")
NONE = 2**63 - 1
# bytes of a message that is sent at once, and of them those of its length
MESSAGE, LENGTH = 1024, 8


@dataclass(frozen=True)
class World:
    """This process's rank among `size`; with one rank every operation is the identity.

    Each operation is called by all ranks, in one order. symmetric_buffers: what carries sums, None where NCCL or
    gloo does. ranks_here: the most ranks that one machine has, which share its memory. orders: the group in which rank
    0 tells the others what to do; they wait there for as long as people do. divides_from: from so many tokens of a step
    on the ranks divide the rows of its streams among them, None for never.
    """

    rank: int = 0
    size: int = 1
    symmetric_buffers: SymmetricBuffers | None = None
    ranks_here: int = 1
    orders: "torch.distributed.ProcessGroup | None" = None
    divides_from: int | None = None

    @property
    def reduce_backend(self) -> str:
        """What carries sums, in words."""
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

    def own_rows(self, tokens: int) -> slice:
        """The rows of the streams that this rank holds in a step of so many tokens: all of them, or its share."""
        if self.divides_from is None or tokens < self.divides_from:
            return slice(0, tokens)
        return share_of(tokens, self.rank, self.size)

    def rows_held(self, rows: int, tokens: int) -> slice:
        """Which rows of a step of so many tokens a tensor of `rows` rows has: all, or this rank's share."""
        return slice(0, tokens) if rows == tokens else self.own_rows(tokens)

    def sum_rows(self, x: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """As `sum_rounded` of x [T, D], but of this rank's `rows` rows only: [rows, D]."""
        if rows == len(x):
            return self.sum_rounded(x, dtype)
        if self._through_memory(x):
            assert self.symmetric_buffers is not None
            return reduce_scatter(x, dtype, self.symmetric_buffers)
        return self.sum_rounded(x, dtype)[share_of(len(x), self.rank, self.size)]

    def gather_rows(self, parts: Sequence[torch.Tensor], tokens: int) -> list[torch.Tensor]:
        """Of tensors that have this rank's rows of a step of so many tokens, [rows, ...], all rows [T, ...]."""
        if len(parts[0]) == tokens:
            return list(parts)
        if self._through_memory(*parts):
            assert self.symmetric_buffers is not None
            return all_gather(parts, tokens, self.symmetric_buffers)
        return [self._gathered(x, tokens) for x in parts]

    def _gathered(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        each = rows_each(tokens, self.size)
        mine = x.new_zeros(each, *x.shape[1:])
        mine[: len(x)] = x  # the last rank has fewer
        every = x.new_empty(self.size * each, *x.shape[1:])
        _all_gather(every, mine)
        return every[:tokens]

    def _through_memory(self, *parts: torch.Tensor) -> bool:
        buffers = self.symmetric_buffers
        return buffers is not None and buffers.carries(*parts) and chosen() != "torch"

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' [R, V / size] beside each other: [R, V] on every rank."""
        if self.size == 1:
            return x
        rows, columns = x.shape
        parts = x.new_empty(self.size * rows, columns)
        _all_gather(parts, x.contiguous())
        return parts.view(self.size, rows, columns).transpose(0, 1).flatten(1)

    def broadcast_from_leader(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x on every rank, whose own is overwritten."""
        if self.size > 1 and x.numel():
            torch.distributed.broadcast(x, 0)
        return x

    def broadcast_object(self, value: T) -> T:
        """Rank 0's value, on every rank; for what happens once, not in a step."""
        values = [value]
        if self.size > 1:
            torch.distributed.broadcast_object_list(values, 0, device=torch.device("cpu"))
        return values[0]

    def tell(self, orders: Any) -> None:
        """Sends orders, what JSON can hold, from rank 0 to all others, which wait in `hear`."""
        words = torch.frombuffer(bytearray(json.dumps(orders).encode()), dtype=torch.uint8)
        message = torch.zeros(max(MESSAGE, LENGTH + len(words)), dtype=torch.uint8, device="cpu")
        message[:LENGTH] = torch.tensor([len(words)], device="cpu").view(torch.uint8)
        message[LENGTH : LENGTH + len(words)] = words
        for part in message.split([MESSAGE, len(message) - MESSAGE]):
            if len(part):
                torch.distributed.broadcast(part, 0, self.orders)

    def hear(self) -> Any:
        """The next orders of rank 0, however long that takes."""
        message = torch.zeros(MESSAGE, dtype=torch.uint8, device="cpu")
        torch.distributed.broadcast(message, 0, self.orders)
        length = int(message[:LENGTH].view(torch.int64))
        if LENGTH + length > MESSAGE:
            rest = torch.zeros(LENGTH + length - MESSAGE, dtype=torch.uint8, device="cpu")
            torch.distributed.broadcast(rest, 0, self.orders)
            message = torch.cat((message, rest))
        return json.loads(message[LENGTH : LENGTH + length].numpy().tobytes())

    def least(self, numbers: Sequence[int | None]) -> list[int | None]:
        """The smallest that any rank has of each number; None where none has one."""
        if self.size == 1:
            return list(numbers)
        every = torch.tensor(
            [NONE if number is None else number for number in numbers], dtype=torch.int64, device="cpu"
        )
        torch.distributed.all_reduce(every, torch.distributed.ReduceOp.MIN)
        return [None if number == NONE else number for number in every.tolist()]


SINGLE = World()


def lost_others(error: BaseException) -> bool:
    """Whether an error says that another rank is gone."""
    # gloo has no class of its own for it
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and "onnection" in str(error)
    )
