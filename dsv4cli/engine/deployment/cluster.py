"""The machines that an engine runs on."""

from dataclasses import dataclass
from typing import Literal

Architecture = Literal["older", "hopper", "blackwell"]


@dataclass(frozen=True)
class Cluster:
    """A number of equal machines with equal GPUs.

    Attributes:
        nodes: number of machines.
        gpus: number of GPUs in each.
        card: the kind of GPU, as in `H200`, or its memory, as in `80GB`.
        memory: bytes of each GPU.
        architecture: of the GPUs; None if it is unknown.
    """

    nodes: int
    gpus: int
    card: str
    memory: int
    architecture: Architecture | None = None

    @property
    def total(self) -> int:
        """Number of GPUs in all machines."""
        return self.nodes * self.gpus

    def __str__(self) -> str:
        """Return the cluster as `--gpus` names it: `2x8xH200`, `8xH100`."""
        machine = f"{self.gpus}x{self.card}"
        return machine if self.nodes == 1 else f"{self.nodes}x{machine}"
