"""Offload routed experts that do not fit on the GPU, and the embedding, to host memory.

The first experts of each layer are resident on the GPU, the others are in pinned host memory. GPU slots cache the most
recently used of the latter. Experts that get no slot in a step, as in a long prefill, are copied to staging rows that
all layers share. Kernels manage the cache, so nothing waits for the host. The expert kernels compute in order of expert
numbers wherever the weights are, so results do not depend on the placement.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import nn

from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.model.linear import MatrixParameters
from dsv4cli.engine.system.pinned import host_block, pin, unpin, whole_pages
from dsv4cli.engine.weights.fill import TORCH_DTYPES
from dsv4cli.engine.weights.placement import Division
from dsv4cli.engine.weights.sizes import EMBEDDING, expert_layers, expert_part, is_drafter
from dsv4cli.kernels import expert_cache
from dsv4cli.kernels.expert_cache import ExpertCache
from dsv4cli.kernels.experts import ExpertWeights
from dsv4cli.kernels.ggml.types import BLOCK_DTYPES
from dsv4cli.kernels.stored_matrix import BlockMatrix, StoredMatrix

FEWER = "use more GPUs (--tp)"
# the matrices of an expert, in the order of `ExpertWeights`
MATRICES = ("w1", "w2", "w3")


@dataclass(frozen=True)
class OffloadPlan:
    """The weights of a model that are offloaded to host memory.

    Attributes:
        layers: modules whose experts are divided; all have the same shapes and dtypes.
        parts: shape and dtype of each matrix and scale of an expert, by name.
        embedding: shape and dtype of the embedding.
        block_types: GGUF type of the parts that are rows of blocks, and under EMBEDDING that of the embedding.
    """

    layers: tuple[str, ...]
    parts: dict[str, tuple[tuple[int, ...], torch.dtype]]
    division: Division
    embedding: tuple[tuple[int, ...], torch.dtype]
    block_types: Mapping[str, str] = field(default_factory=dict)

    @property
    def host_bytes(self) -> int:
        """Host memory needed, in bytes."""
        experts = len(self.layers) * self.division.offloaded * expert_bytes(self.parts)
        return experts + expert_bytes({EMBEDDING: self.embedding})


def expert_bytes(parts: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    """Return the bytes of one expert."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in parts.values())


def plan_of(specs: Iterable[TensorSpec], division: Division, ranks: int) -> OffloadPlan:
    """Return the offload plan for a table of tensors; the drafter's experts are not offloaded."""
    table = [spec for spec in specs if not is_drafter(spec)]
    layers, form = expert_layers(table, ranks)
    parts = {part: (shape, TORCH_DTYPES[dtype]) for part, (shape, dtype) in form.items()}
    embedding = next(spec for spec in table if spec.name == EMBEDDING)
    dtypes = {part: dtype for part, (_, dtype) in form.items()} | {EMBEDDING: embedding.dtype}
    kinds = {part: BLOCK_DTYPES[dtype] for part, dtype in dtypes.items() if dtype in BLOCK_DTYPES}
    return OffloadPlan(layers, parts, division, (embedding.shape, TORCH_DTYPES[embedding.dtype]), kinds)


class ExpertOffload:
    """The experts of all layers: stacked matrices on the GPU, and the offloaded rows in host memory."""

    def __init__(self, plan: OffloadPlan, device: torch.device) -> None:
        """Allocate GPU and host memory. Raises NotEnoughMemory."""
        self.plan = plan
        division, layers = plan.division, len(plan.layers)
        rows = layers * division.rows + division.staging
        self.stacks = {
            part: torch.empty(rows, *shape, dtype=dtype, device=device) for part, (shape, dtype) in plan.parts.items()
        }
        nbytes = sum(map(whole_pages, self._offloaded_bytes().values()))
        # one block per layer: a single large allocation fails if the memory is not free right now
        self._blocks = [
            host_block(nbytes, "experts of a layer", f"lower --host-memory, or {FEWER}") for _ in plan.layers
        ]
        self.host = [self._cut(block) for block in self._blocks]
        shape, dtype = plan.embedding
        self._blocks.append(host_block(prod(shape) * dtype.itemsize, "the embedding", FEWER))
        self.embedding = nn.Parameter(self._blocks[-1].view(dtype).view(shape), requires_grad=False)
        numbers = torch.arange(division.experts, device="cpu").repeat(layers, 1)
        at = numbers + torch.arange(layers, device="cpu")[:, None] * division.rows
        self._row_of_expert = torch.where(numbers < division.rows, at, -1).to(device)
        self._expert_of_slot = numbers[:, division.resident : division.rows].contiguous().to(device)
        self._used = torch.zeros_like(self._expert_of_slot)
        self._clock = torch.zeros(layers, 1, dtype=torch.int64, device=device)
        self._counts = torch.zeros(layers, 3, dtype=torch.int64, device=device)

    def _offloaded_bytes(self) -> dict[str, int]:
        """Return the bytes of each part of one layer's offloaded experts."""
        offloaded = self.plan.division.offloaded
        return {part: offloaded * prod(shape) * dtype.itemsize for part, (shape, dtype) in self.plan.parts.items()}

    def _cut(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of one layer's offloaded experts in its block, by part, [offloaded, ...] each."""
        sizes, start, found = self._offloaded_bytes(), 0, {}
        for part, (shape, dtype) in self.plan.parts.items():
            found[part] = block[start : start + sizes[part]].view(dtype).view(-1, *shape)
            start += whole_pages(sizes[part])
        return found

    def install(self, model: nn.Module) -> None:
        """Replace the experts and the embedding of a model with these."""
        for number, module in enumerate(self.plan.layers):
            model.set_submodule(module, self.layer(number))
        embed = model.get_submodule(EMBEDDING.rpartition(".")[0])
        assert isinstance(embed, MatrixParameters)
        embed.weight, embed.block_type = self.embedding, self.plan.block_types.get(EMBEDDING)

    def destinations(self, specs: Iterable[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and destination of each tensor of the embedding and the experts."""
        yield EMBEDDING, self.embedding.data
        division, numbers = self.plan.division, {module: number for number, module in enumerate(self.plan.layers)}
        for spec in specs:
            if spec.expert is None:
                continue
            module, part = expert_part(spec)
            if module not in numbers:
                continue
            if spec.expert < division.resident:
                yield spec.name, self.stacks[part][numbers[module] * division.rows + spec.expert]
            else:
                yield spec.name, self.host[numbers[module]][part][spec.expert - division.resident]

    def finish_loading(self) -> None:
        """Pin the host memory and fill the slots, after all weights are loaded.

        Raises:
            NotEnoughMemory: the system cannot pin a block. Blocks already pinned are unpinned with this object.
        """
        division = self.plan.division
        if self._row_of_expert.is_cuda:
            addresses: list[int] = []
            weakref.finalize(self, unpin, addresses).atexit = False
            # pin after reading: reading faults pages in with several threads, pinning with only one
            for block in self._blocks:
                addresses.append(pin(block, FEWER))
        for layer, host in enumerate(self.host):
            first = layer * division.rows + division.resident
            for part, stack in self.stacks.items():
                stack[first : first + division.slots] = host[part][: division.slots]

    def layer(self, number: int) -> "LayerExperts":
        """Return the experts of one layer."""
        division = self.plan.division
        state = ExpertCache(
            row_of_expert=self._row_of_expert[number],
            expert_of_slot=self._expert_of_slot[number],
            last_used=self._used[number],
            steps=self._clock[number],
            counts=self._counts[number],
            first_slot_row=number * division.rows + division.resident,
            first_staging_row=len(self.plan.layers) * division.rows,
        )
        return LayerExperts(self, number, state)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts, each counted once."""
        return len(self.plan.layers) * self.plan.division.experts * expert_bytes(self.plan.parts)

    def traffic(self) -> "Traffic":
        """Return the traffic from host memory so far. Synchronizes with the device."""
        tokens, chosen, found = self._counts.sum(0).tolist()
        return Traffic(tokens // len(self.plan.layers), chosen, found, (chosen - found) * expert_bytes(self.plan.parts))


@dataclass(frozen=True)
class Traffic:
    """Counts of the expert cache.

    Attributes:
        tokens: tokens that went through the model.
        chosen: experts that steps used, summed over layers; each counts once per step and layer.
        found: those that were on the GPU (hits).
        nbytes: bytes copied for the others (misses).
    """

    tokens: int
    chosen: int
    found: int
    nbytes: int


class LayerExperts(nn.Module):
    """The routed experts of one layer of an offloaded model; it has no parameters."""

    def __init__(self, experts: ExpertOffload, number: int, state: ExpertCache) -> None:
        super().__init__()
        self.offload, self._state = experts, state
        self._host = list(experts.host[number].values())
        self._matrices = [
            _matrix(name, experts.stacks, experts.plan.block_types.get(f"{name}.weight")) for name in MATRICES
        ]

    def fetch(self, chosen: torch.Tensor) -> ExpertWeights:
        """Return the experts. Those in `chosen`, int64 [T, k], stay on the GPU until the next call for any layer."""
        rows = expert_cache.fetch(chosen, self._state, self._host, list(self.offload.stacks.values()))
        w1, w2, w3 = self._matrices
        return ExpertWeights(w1, w2, w3, rows)

    @property
    def bytes_per_expert(self) -> int:
        """Bytes of one expert."""
        return expert_bytes(self.offload.plan.parts)


def _matrix(name: str, stacks: dict[str, torch.Tensor], block_type: str | None) -> StoredMatrix:
    """Return one matrix of all experts from the stacks of its parts."""
    if block_type is not None:
        return BlockMatrix.of(stacks[f"{name}.weight"], block_type)
    parts = (part.split(".") for part in stacks)
    return StoredMatrix(**{role: stacks[f"{name}.{role}"] for matrix, role in parts if matrix == name})


def offload_of(model: nn.Module) -> ExpertOffload | None:
    """Return the offload of a loaded model, or None if all its experts are on its device."""
    return next((module.offload for module in model.modules() if isinstance(module, LayerExperts)), None)
