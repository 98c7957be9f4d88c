"""Routed experts that do not fit on the device: which lie there, which in host memory, and the way from there.

The first experts of a layer lie on the device for good, the others in pinned host memory; of these as many as there are
slots lie on the device too, those used last. What gets no slot in a step, as in a long prompt, lies in staging, rows
that all layers share. Kernels decide all of this, and nothing waits for the host. The experts' kernels compute in order
of expert numbers, wherever these lie, so that no bit of a result depends on the memory.
"""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from dsv4cli.engine.config import ModelConfig
from dsv4cli.engine.device import free_memory
from dsv4cli.engine.layout import TensorSpec
from dsv4cli.engine.parallel import World
from dsv4cli.engine.weights import TORCH_DTYPES, local_shape, total_bytes
from dsv4cli.errors import NotEnoughMemory
from dsv4cli.kernels import residency
from dsv4cli.kernels.experts import ExpertWeights
from dsv4cli.kernels.residency import Residency

# of free memory: the cache, a step of 4,096 tokens, graphs, what CUDA and Triton load
RESERVE = 7 * 10**9
# of an expert, as `ExpertWeights` has them
PARTS = ("w1.weight", "w1.scale", "w2.weight", "w2.scale", "w3.weight", "w3.scale")


@dataclass(frozen=True)
class Division:
    """How `experts` of each layer are divided: `rows` of them lie on the device, `slots` of these rows change hands.

    There are as many slots as experts without a row, so that the host holds no more than twice what must lie there, but
    enough for a token, and no more than rows.
    """

    experts: int
    rows: int
    slots: int

    @property
    def staying(self) -> int:
        """Experts that lie on the device for good."""
        return self.rows - self.slots

    @property
    def waiting(self) -> int:
        """Experts in host memory."""
        return self.experts - self.staying

    @property
    def staging(self) -> int:
        """Rows that all layers share: for all experts that find no slot."""
        return self.experts - self.rows


@dataclass(frozen=True)
class Plan:
    """What of a model's weights lies in host memory. layers: the modules whose experts are divided, equal in form;
    parts: shape and dtype of an expert's matrices and scales, by name."""

    layers: tuple[str, ...]
    parts: dict[str, tuple[tuple[int, ...], torch.dtype]]
    division: Division

    @property
    def host_bytes(self) -> int:
        """The host memory that it takes."""
        return len(self.layers) * self.division.waiting * expert_bytes(self.parts)


def most_weights(free: int) -> int:
    """The most bytes of weights on a device that has so many free: a small one keeps half for all else."""
    return max(free - RESERVE, free // 2)


def expert_bytes(parts: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    """Bytes of an expert."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in parts.values())


def plan_experts(specs: dict[str, TensorSpec], config: ModelConfig, world: World, budget: int | None) -> Plan | None:
    """The plan for at most `budget` bytes of weights on the device; None where all of them may lie there.

    Raises NotEnoughMemory for a budget that is too small for it and for a host that has no room.
    """
    total = total_bytes(specs, world)
    if budget is None or total <= budget:
        return None
    layers, parts = _layers(specs, world)
    count, nbytes = config.n_routed_experts, expert_bytes(parts)
    rest = total - len(layers) * count * nbytes
    # every layer has its rows, and all share the staging: layers * rows + (count - rows)
    rows = min(((budget - rest) // nbytes - count) // (len(layers) - 1), count - 1) if len(layers) > 1 else 0
    least = config.num_experts_per_tok
    if rows < least:
        needed = min(rest + (len(layers) * least + count - least) * nbytes, total)
        raise NotEnoughMemory(
            f"{budget / 1e9:.4g} GB of GPU memory are too few for the weights",
            f"from --gpu-memory {-(-needed // 10**6)}MB on they run; more GPUs share them (--tp)",
        )
    plan = Plan(layers, parts, Division(count, rows, max(least, min(rows, count - rows))))
    free = free_memory(torch.device("cpu"))
    if free is not None and plan.host_bytes > free:
        raise NotEnoughMemory(
            f"experts of {plan.host_bytes / 1e9:.4g} GB stay in host memory, which has {free / 1e9:.4g} GB free",
            "use more GPUs (--tp), or a machine with more memory",
        )
    return plan


def _layers(
    specs: dict[str, TensorSpec], world: World
) -> tuple[tuple[str, ...], dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """The modules with experts of the form of the first, and this form."""
    forms: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
    for spec in specs.values():
        if spec.expert == 0:
            module, part = _split(spec)
            forms.setdefault(module, {})[part] = (local_shape(spec, world), TORCH_DTYPES[spec.dtype])
    first = next(iter(forms.values()))
    return tuple(module for module, form in forms.items() if form == first), first


def _split(spec: TensorSpec) -> tuple[str, str]:
    """The module of an expert's tensor, and which part of the expert it is."""
    module, matrix, role = spec.parameter.rsplit(".", 2)
    return module, f"{matrix}.{role}"


class HostExperts:
    """The experts of all layers: stacks on the device, rows of the others in host memory."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        """Raises NotEnoughMemory."""
        self.plan = plan
        division, layers = plan.division, len(plan.layers)
        rows, waiting = layers * division.rows + division.staging, layers * division.waiting
        self.stacks = {
            part: torch.empty(rows, *shape, dtype=dtype, device=device) for part, (shape, dtype) in plan.parts.items()
        }
        self.host = {
            part: torch.empty(waiting, *shape, dtype=dtype, device="cpu") for part, (shape, dtype) in plan.parts.items()
        }
        numbers = torch.arange(division.experts).repeat(layers, 1)
        at = numbers + torch.arange(layers)[:, None] * division.rows
        self._place = torch.where(numbers < division.rows, at, -1).to(device)
        self._owner = numbers[:, division.staying : division.rows].contiguous().to(device)
        self._used = torch.zeros_like(self._owner)
        self._clock = torch.zeros(layers, 1, dtype=torch.int64, device=device)
        self._counts = torch.zeros(layers, 3, dtype=torch.int64, device=device)

    def places(self, specs: Iterable[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        """Where the tensors of experts go, by name."""
        division, numbers = self.plan.division, {module: number for number, module in enumerate(self.plan.layers)}
        for spec in specs:
            if spec.expert is None:
                continue
            module, part = _split(spec)
            if module in numbers:
                stays = spec.expert < division.staying
                stack, each = (self.stacks[part], division.rows) if stays else (self.host[part], division.waiting)
                yield spec.name, stack[numbers[module] * each + spec.expert - (0 if stays else division.staying)]

    def settle(self) -> None:
        """Pins the host memory and fills the slots, once everything has its place. Raises NotEnoughMemory."""
        division = self.plan.division
        if self._place.is_cuda:
            # what loading has left unused: the memory of graphs is not taken from it
            torch.cuda.empty_cache()
            # not before: pinning alone gives memory its pages one after another, reading by several threads at once
            weakref.finalize(self, _unpin, [_pin(tensor) for tensor in self.host.values()]).atexit = False
        for part, stack in self.stacks.items():
            for layer in range(len(self.plan.layers)):
                first, source = layer * division.rows + division.staying, layer * division.waiting
                stack[first : first + division.slots] = self.host[part][source : source + division.slots]

    def layer(self, number: int) -> "LayerExperts":
        """The experts of a layer."""
        division = self.plan.division
        state = Residency(
            place=self._place[number],
            owner=self._owner[number],
            used=self._used[number],
            clock=self._clock[number],
            counts=self._counts[number],
            first=number * division.rows + division.staying,
            staging=len(self.plan.layers) * division.rows,
        )
        return LayerExperts(self, number, state)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts, each once."""
        return len(self.plan.layers) * self.plan.division.experts * expert_bytes(self.plan.parts)

    def traffic(self) -> "Traffic":
        """What has come from host memory so far; waits for the device."""
        tokens, chosen, found = self._counts.sum(0).tolist()
        return Traffic(tokens // len(self.plan.layers), chosen, found, (chosen - found) * expert_bytes(self.plan.parts))


@dataclass(frozen=True)
class Traffic:
    """tokens that went through the model; experts that steps have chosen in all layers, each counted once a step; those
    of them that lay on the device; bytes of the others."""

    tokens: int
    chosen: int
    found: int
    nbytes: int


class LayerExperts(nn.Module):
    """The routed experts of one layer of a model that does not fit; no parameters."""

    def __init__(self, experts: HostExperts, number: int, state: Residency) -> None:
        super().__init__()
        waiting = experts.plan.division.waiting
        self._all, self._state = experts, state
        self._host = [tensor[number * waiting : (number + 1) * waiting] for tensor in experts.host.values()]

    def at_hand(self, chosen: torch.Tensor) -> ExpertWeights:
        """The experts, those chosen int64 [T, k] on the device until this is called again for any layer."""
        stacks = self._all.stacks
        rows = residency.fetch(chosen, self._state, self._host, list(stacks.values()))
        w1, w1_scale, w2, w2_scale, w3, w3_scale = (stacks.get(part) for part in PARTS)
        assert w1 is not None
        assert w2 is not None
        assert w3 is not None
        return ExpertWeights(w1, w1_scale, w2, w2_scale, w3, w3_scale, rows)

    @property
    def each(self) -> int:
        """Bytes of an expert."""
        return expert_bytes(self._all.plan.parts)


def _pin(tensor: torch.Tensor) -> int:
    """Pins memory as it is, for kernels that read it in place: torch's own pinned memory takes a power of two."""
    address = tensor.data_ptr()
    if int(torch.cuda.cudart().cudaHostRegister(address, tensor.nbytes, 0)):
        raise NotEnoughMemory(
            f"the system does not pin {tensor.nbytes / 1e9:.2f} GB of host memory for the GPU",
            "raise the limit of locked memory (ulimit -l), or use more GPUs (--tp)",
        )
    return address


def _unpin(addresses: list[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
