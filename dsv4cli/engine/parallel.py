"""The ranks of a tensor-parallel run: the one file that talks to another process."""

from dataclasses import dataclass

import torch

from dsv4cli.engine.config import ModelConfig
from dsv4cli.errors import UsageError


@dataclass(frozen=True)
class World:
    """This process's place among `size` ranks; with one rank every operation is the identity."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over all ranks, in x's dtype."""
        if self.size == 1:
            return x
        # gloo sums the wrong numbers of a view with gaps, without a word
        x = x.contiguous()
        torch.distributed.all_reduce(x)
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' [R, V / size] beside each other: [R, V] on every rank."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        torch.distributed.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    def check_divides(self, config: ModelConfig) -> None:
        """Raises UsageError naming the first dimension that the number of ranks does not divide."""
        dimensions = {
            "num_attention_heads": config.num_attention_heads,
            "o_groups": config.o_groups,
            "index_n_heads": config.index_n_heads,
            "moe_intermediate_size": config.moe_intermediate_size,
            "vocab_size": config.vocab_size,
        }
        for name, count in dimensions.items():
            if count % self.size:
                raise UsageError(f"{self.size} ranks do not divide {name} = {count}", "use 1, 2, 4 or 8 ranks")


SINGLE = World()
