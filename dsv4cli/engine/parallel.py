"""The ranks of a tensor-parallel run: what they tell each other while the model computes."""

from dataclasses import dataclass
from typing import TypeVar

import torch

from dsv4cli.engine.config import ModelConfig
from dsv4cli.errors import UsageError

# up to here a sum takes one launch that reads every rank's part, beyond NCCL is faster
SMALL_BYTES = 512 * 1024
# what the one-shot kernel moves at once
VECTOR_BYTES = 16
# the name from torch 2.13 on, and the name before
_all_gather = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)
T = TypeVar("T")


@dataclass(frozen=True)
class PeerMemory:
    """Memory of this GPU that all ranks of one machine have mapped; buffer: uint8 [SMALL_BYTES].

    The kernel copies a rank's part into its buffer, waits for the others, and adds up all parts in the order of the
    ranks, so that every rank holds the same bits; nobody leaves it before all have read. It may stand in a CUDA graph.
    Source: torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu, one_shot_all_reduce.
    """

    buffer: torch.Tensor
    group: str

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x, which has no gaps, is small enough, and of a dtype and at an address that the kernel knows."""
        known = x.is_cuda and x.dtype in (torch.float32, torch.bfloat16)
        aligned = x.nbytes % VECTOR_BYTES == 0 and x.storage_offset() * x.itemsize % VECTOR_BYTES == 0
        return known and aligned and x.nbytes <= SMALL_BYTES

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over all ranks, in x's dtype: a new tensor. Every rank gives the same shape, on one stream."""
        mine = self.buffer[: x.nbytes].view(x.dtype).view(x.shape)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(mine, x, "sum", self.group)


@dataclass(frozen=True)
class World:
    """This process's place among `size` ranks; with one rank every operation is the identity.

    Each operation is called by all ranks, in one order. peers: the short way of small sums, None where there is none.
    """

    rank: int = 0
    size: int = 1
    peers: PeerMemory | None = None

    @property
    def short_way(self) -> str:
        """What carries small sums, in words."""
        return torch.distributed.get_backend() if self.peers is None else "each other's memory"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over all ranks, in x's dtype, the same bits on each; x may be overwritten."""
        if self.size == 1:
            return x
        # gloo sums the wrong numbers of a view with gaps, without a word
        x = x.contiguous()
        if self.peers is not None and self.peers.takes(x):
            return self.peers.sum(x)
        torch.distributed.all_reduce(x)
        return x

    def sum_rounded(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over all ranks, added in fp32 and rounded once to x's dtype; x may be overwritten."""
        # a sum of two is rounded once in any dtype
        return self.all_reduce(x) if self.size <= 2 else self.all_reduce(x.float()).to(x.dtype)

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

    def share(self, value: T) -> T:
        """Rank 0's value, on every rank; for what happens once, not in a step."""
        values = [value]
        if self.size > 1:
            torch.distributed.broadcast_object_list(values, 0, device=torch.device("cpu"))
        return values[0]

    def check_divides(self, config: ModelConfig) -> None:
        """Raises UsageError naming the first dimension that the number of ranks does not divide."""
        dimensions = {
            "num_attention_heads": config.num_attention_heads,
            "o_groups": config.o_groups,
            "moe_intermediate_size": config.moe_intermediate_size,
            "vocab_size": config.vocab_size,
        }
        for name, count in dimensions.items():
            if count % self.size:
                raise UsageError(f"{self.size} ranks do not divide {name} = {count}", "use 1, 2, 4 or 8 ranks")


SINGLE = World()
