"""What of a model's weights lies on the GPU and what in host memory: decided here alone; no torch.

Loading asks with what it finds, `inspect --fit` with the machine that it describes. Sizes are those of one rank's part.
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod

from dsv4cli.engine.checkpoint.headers import DTYPE_BITS
from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.sharding import part_shape
from dsv4cli.engine.settings import AUTO_DRAFTING, Drafting
from dsv4cli.errors import NotEnoughMemory

# of a GPU's free memory: the cache, a step of 4,096 tokens, graphs, what CUDA and Triton load
RESERVE = 7 * 10**9
# of free host memory so many eighths may be pinned for experts
HOST_EIGHTHS = 7
# shape and dtype (as a safetensors header names it) of each matrix and scale of an expert
Form = dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class RankSizes:
    """Bytes of one rank's part of a model.

    total: all tensors. drafter: those of the drafter. layers: how many have `experts` routed experts of `expert` bytes
    each that may lie in host memory. chosen: how many of them a token takes.
    """

    total: int
    drafter: int
    layers: int
    experts: int
    expert: int
    chosen: int

    @property
    def main(self) -> int:
        """Without the drafter."""
        return self.total - self.drafter

    @property
    def rest(self) -> int:
        """What lies on the device in any case."""
        return self.main - self.layers * self.experts * self.expert


@dataclass(frozen=True)
class MemoryLimits:
    """What a user allows, in bytes: of weights on each GPU, of host memory for all ranks of a machine. None: what is
    free, but for a reserve."""

    gpu: int | None = None
    host: int | None = None


@dataclass(frozen=True)
class FreeMemory:
    """The memory that each rank finds, in bytes.

    gpu: free on its GPU once CUDA is there; None: the model lies in host memory. host: free on its machine, None where
    the system does not tell. ranks_here: how many ranks share that.
    """

    gpu: int | None
    host: int | None
    ranks_here: int = 1
    limits: MemoryLimits = MemoryLimits()

    @property
    def device_weights(self) -> int | None:
        """The most bytes of weights on the GPU."""
        if self.limits.gpu is not None or self.gpu is None:
            return self.limits.gpu
        return most_weights(self.gpu)

    @property
    def host_experts(self) -> int | None:
        """The most bytes of experts in host memory."""
        if self.limits.host is not None or self.host is None:
            return self.limits.host
        return self.host * HOST_EIGHTHS // 8

    @property
    def host_weights(self) -> int | None:
        """The most bytes of weights where all of them lie in host memory."""
        return self.host if self.limits.host is None else self.limits.host


@dataclass(frozen=True)
class Division:
    """How `experts` of each layer are divided: `rows` of them lie on the device, `slots` of these rows change hands.

    There are as many slots as experts without a row, so that the host holds no more than twice what must lie there; but
    enough for a token, no more than rows, and fewer where host memory is short: what is in no slot stays for good.
    """

    experts: int
    rows: int
    slots: int

    @property
    def resident(self) -> int:
        """Experts that lie on the device for good."""
        return self.rows - self.slots

    @property
    def offloaded(self) -> int:
        """Experts in host memory."""
        return self.experts - self.resident

    @property
    def staging(self) -> int:
        """Rows that all layers share: for all experts that find no slot."""
        return self.experts - self.rows


@dataclass(frozen=True)
class Placement:
    """Where one rank's weights lie. drafter: whether one is loaded. division: None where all experts lie on the device.
    device, host: bytes of weights on the device, of experts in host memory."""

    drafter: bool
    division: Division | None
    device: int
    host: int = 0


def most_weights(free: int) -> int:
    """The most bytes of weights on a GPU that has so many free: a small one keeps half for all else."""
    return max(free - RESERVE, free // 2)


def measure(specs: Iterable[TensorSpec], chosen: int, ranks: int) -> RankSizes:
    """Adds up one rank's part of a table, of which a token takes `chosen` experts of a layer.

    Raises CheckpointError for a tensor that the ranks do not divide.
    """
    table = list(specs)
    # experts are many and alike
    kinds = Counter((spec.dtype, spec.shape, spec.shard, is_drafter(spec)) for spec in table)
    examples = {(spec.dtype, spec.shape, spec.shard): spec for spec in table}
    total = drafter = 0
    for (dtype, shape, shard, drafts), count in kinds.items():
        nbytes = count * prod(part_shape(examples[dtype, shape, shard], ranks)) * DTYPE_BITS[dtype] // 8
        total += nbytes
        drafter += nbytes * drafts
    layers, form = expert_layers((spec for spec in table if not is_drafter(spec)), ranks)
    return RankSizes(
        total=total,
        drafter=drafter,
        layers=len(layers),
        experts=1 + max((spec.expert for spec in table if spec.expert is not None), default=-1),
        expert=sum(prod(shape) * DTYPE_BITS[dtype] // 8 for shape, dtype in form.values()),
        chosen=chosen,
    )


def is_drafter(spec: TensorSpec) -> bool:
    """Whether it is a tensor of the drafter."""
    return spec.name.startswith("mtp.")


def expert_layers(specs: Iterable[TensorSpec], ranks: int) -> tuple[tuple[str, ...], Form]:
    """The modules whose experts are of the form of the first module's, and this form."""
    forms: dict[str, Form] = {}
    for spec in specs:
        if spec.expert == 0:
            module, part = expert_part(spec)
            forms.setdefault(module, {})[part] = (part_shape(spec, ranks), spec.dtype)
    first = next(iter(forms.values()), {})
    return tuple(module for module, form in forms.items() if form == first), first


def expert_part(spec: TensorSpec) -> tuple[str, str]:
    """The module of an expert's tensor, and which part of the expert it is."""
    module, matrix, role = spec.parameter.rsplit(".", 2)
    return module, f"{matrix}.{role}"


def decide(sizes: RankSizes, room: FreeMemory, drafting: Drafting = AUTO_DRAFTING) -> Placement:
    """Where the weights of each rank lie: all on the device, else with experts in host memory. The drafter is loaded
    where it fits beside all other weights; beside experts in host memory only if a number of drafts is asked for, as
    drafts do not pay there. Raises NotEnoughMemory."""
    without = replace(sizes, total=sizes.main, drafter=0)
    found = _place(without, room)
    if drafting.most != 0 and sizes.drafter:
        found = _with_drafter(sizes, room, found, drafting)
    if room.gpu is not None and found.device > room.gpu:
        raise NotEnoughMemory(
            f"the weights on the GPU take {found.device / 1e9:.4g} GB, and {room.gpu / 1e9:.4g} GB of it are free",
            "lower --gpu-memory, or leave it out",
        )
    return found


def _with_drafter(sizes: RankSizes, room: FreeMemory, without: Placement, drafting: Drafting) -> Placement:
    """The placement with the drafter where it has room; else the one `without` it, or NotEnoughMemory."""
    found = None
    if without.division is None or drafting.required:
        with suppress(NotEnoughMemory):
            found = replace(_place(replace(sizes, drafter=0), room), drafter=True)
    if found is not None and (found.division is None or without.division is not None):
        return found
    if drafting.required:
        raise NotEnoughMemory(
            f"the drafter takes {sizes.drafter / 1e9:.4g} GB and finds no room beside the other weights",
            "give --draft off, or make room: a higher --gpu-memory, more GPUs (--tp), a machine with more memory",
        )
    return without


def _place(sizes: RankSizes, room: FreeMemory) -> Placement:
    """Where weights lie of which none can be left out. Raises NotEnoughMemory."""
    most = room.device_weights
    if most is None:
        _check_host(sizes.total, room)
        return Placement(False, None, sizes.total)
    if sizes.total <= most:
        return Placement(False, None, sizes.total)
    return _divided(sizes, room, most)


def _check_host(needed: int, room: FreeMemory) -> None:
    """Raises NotEnoughMemory where the ranks of a machine do not find `needed` bytes of it each."""
    free = room.host_weights
    if free is not None and needed * room.ranks_here > free:
        ranks = f" of {room.ranks_here} ranks" if room.ranks_here > 1 else ""
        raise NotEnoughMemory(
            f"the weights{ranks} take {needed * room.ranks_here / 1e9:.2f} GB and cpu has {free / 1e9:.2f} GB free",
            "use a machine with more memory, or fewer layers of random weights: random:flash,layers=4,experts=16",
        )


def _divided(sizes: RankSizes, room: FreeMemory, most: int) -> Placement:
    rows = most_rows(sizes, most)
    if rows < sizes.chosen:
        raise NotEnoughMemory(
            f"{most / 1e9:.4g} GB of GPU memory are too few for the weights",
            f"from --gpu-memory {-(-least_on_gpu(sizes) // 10**6)}MB on they run; more GPUs share them (--tp)",
        )
    slots, limit = max(sizes.chosen, min(rows, sizes.experts - rows)), room.host_experts
    if limit is not None:
        waiting = limit // room.ranks_here // (sizes.layers * sizes.expert)
        slots = min(slots, waiting + rows - sizes.experts)
    if slots < sizes.chosen:
        assert limit is not None
        each = least_in_host(sizes, rows)
        ranks = f" by {room.ranks_here} ranks" if room.ranks_here > 1 else ""
        raise NotEnoughMemory(
            f"experts need at least {each * room.ranks_here / 1e9:.4g} GB of host memory{ranks}, and may have "
            f"{limit / 1e9:.4g} GB of it",
            "use more GPUs (--tp) or a machine with more memory; where the system reports less than there is, "
            "give --host-memory SIZE",
        )
    division = Division(sizes.experts, rows, slots)
    return Placement(False, division, on_gpu(sizes, rows), sizes.layers * division.offloaded * sizes.expert)


def most_rows(sizes: RankSizes, most: int) -> int:
    """How many experts of a layer lie on a device that has room for `most` bytes of weights."""
    if sizes.layers < 2:
        return 0
    # every layer has its rows, and all share the staging: layers * rows + (experts - rows)
    return min(((most - sizes.rest) // sizes.expert - sizes.experts) // (sizes.layers - 1), sizes.experts - 1)


def on_gpu(sizes: RankSizes, rows: int) -> int:
    """Bytes of weights on the device with so many experts of each layer there."""
    return sizes.rest + (sizes.layers * rows + sizes.experts - rows) * sizes.expert


def least_on_gpu(sizes: RankSizes) -> int:
    """The fewest bytes of weights on the device with which the model runs."""
    return min(on_gpu(sizes, sizes.chosen), sizes.main)


def least_in_host(sizes: RankSizes, rows: int) -> int:
    """The fewest bytes of experts in host memory when so many of each layer lie on the device."""
    return sizes.layers * (sizes.experts - rows + sizes.chosen) * sizes.expert
