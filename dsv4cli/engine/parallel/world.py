"""The collectives of a tensor-parallel run."""

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
    """This process's rank and the collectives among `size` ranks; with one rank each is the identity.

    All ranks call every operation in the same order.

    Attributes:
        symmetric_buffers: buffers for all-reduce through peer memory; None if NCCL or gloo does it.
        ranks_here: largest number of ranks on one machine, which share its host memory.
        orders: process group in which rank 0 sends orders; followers wait there without a timeout.
        divides_from: smallest number of tokens for which a step's rows of the streams are sharded; None for never.
    """

    rank: int = 0
    size: int = 1
    symmetric_buffers: SymmetricBuffers | None = None
    ranks_here: int = 1
    orders: "torch.distributed.ProcessGroup | None" = None
    divides_from: int | None = None

    @property
    def reduce_backend(self) -> str:
        """The name of the all-reduce backend, for reports."""
        return torch.distributed.get_backend() if self.symmetric_buffers is None else "each other's memory"

    def sum_rounded(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the all-reduced sum of x (fp32 or bf16), added in fp32 and rounded once to `dtype`.

        The result is bit-identical on all ranks. x may be overwritten.
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
        """Return the rows of the streams that this rank holds in a step of `tokens` tokens: all, or its share."""
        if self.divides_from is None or tokens < self.divides_from:
            return slice(0, tokens)
        return share_of(tokens, self.rank, self.size)

    def rows_held(self, rows: int, tokens: int) -> slice:
        """Return which of the `tokens` rows of a step a tensor with `rows` rows holds: all, or this rank's share."""
        return slice(0, tokens) if rows == tokens else self.own_rows(tokens)

    def sum_rows(self, x: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's rows [rows, D] of the all-reduced x [T, D] (reduce-scatter); rounds as `sum_rounded`."""
        if rows == len(x):
            return self.sum_rounded(x, dtype)
        if self._through_memory(x):
            assert self.symmetric_buffers is not None
            return reduce_scatter(x, dtype, self.symmetric_buffers)
        return self.sum_rounded(x, dtype)[share_of(len(x), self.rank, self.size)]

    def gather_rows(self, parts: Sequence[torch.Tensor], tokens: int) -> list[torch.Tensor]:
        """All-gather this rank's rows [rows, ...] of each tensor; return all `tokens` rows [T, ...] of the step."""
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
        """All-gather x [R, V / size] along the columns; returns [R, V] on every rank."""
        if self.size == 1:
            return x
        rows, columns = x.shape
        parts = x.new_empty(self.size * rows, columns)
        _all_gather(parts, x.contiguous())
        return parts.view(self.size, rows, columns).transpose(0, 1).flatten(1)

    def broadcast_from_leader(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite x on every rank with rank 0's x, and return it."""
        if self.size > 1 and x.numel():
            torch.distributed.broadcast(x, 0)
        return x

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value on every rank; for setup, not for steps."""
        values = [value]
        if self.size > 1:
            torch.distributed.broadcast_object_list(values, 0, device=torch.device("cpu"))
        return values[0]

    def send_orders(self, orders: Any) -> None:
        """Send JSON-serializable orders from rank 0 to all other ranks, which wait in `receive_orders`."""
        words = torch.frombuffer(bytearray(json.dumps(orders).encode()), dtype=torch.uint8)
        message = torch.zeros(max(MESSAGE, LENGTH + len(words)), dtype=torch.uint8, device="cpu")
        message[:LENGTH] = torch.tensor([len(words)], device="cpu").view(torch.uint8)
        message[LENGTH : LENGTH + len(words)] = words
        for part in message.split([MESSAGE, len(message) - MESSAGE]):
            if len(part):
                torch.distributed.broadcast(part, 0, self.orders)

    def receive_orders(self) -> Any:
        """Return the next orders of rank 0; wait without a timeout."""
        message = torch.zeros(MESSAGE, dtype=torch.uint8, device="cpu")
        torch.distributed.broadcast(message, 0, self.orders)
        length = int(message[:LENGTH].view(torch.int64))
        if LENGTH + length > MESSAGE:
            rest = torch.zeros(LENGTH + length - MESSAGE, dtype=torch.uint8, device="cpu")
            torch.distributed.broadcast(rest, 0, self.orders)
            message = torch.cat((message, rest))
        return json.loads(message[LENGTH : LENGTH + length].numpy().tobytes())

    def least(self, numbers: Sequence[int | None]) -> list[int | None]:
        """Return the minimum over all ranks of each number; None where no rank has one."""
        if self.size == 1:
            return list(numbers)
        every = torch.tensor(
            [NONE if number is None else number for number in numbers], dtype=torch.int64, device="cpu"
        )
        torch.distributed.all_reduce(every, torch.distributed.ReduceOp.MIN)
        return [None if number == NONE else number for number in every.tolist()]


SINGLE = World()


def lost_others(error: BaseException) -> bool:
    """Return whether an error means that another rank is gone."""
    # gloo has no specific error class for this
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and "onnection" in str(error)
    )
