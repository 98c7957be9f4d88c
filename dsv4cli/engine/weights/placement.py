"""What of a model's weights lies on the GPU and what in host memory: decided here alone; no torch.

Loading asks with what it finds, `inspect --fit` with the machine that it describes. Sizes are those of one rank's part.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from dsv4cli.engine.config.capacity import CPU_CHUNK, USUAL_CHUNK
from dsv4cli.engine.settings import AUTO_DRAFTING, Drafting
from dsv4cli.engine.weights.reserve import Reserve
from dsv4cli.engine.weights.sizes import RankSizes
from dsv4cli.errors import NotEnoughMemory

# the smallest chunks of prompts that a drafter beside the other weights is worth
DRAFTER_CHUNK = 1024
# of free host memory so many eighths may be pinned for experts
HOST_EIGHTHS = 7
# on a CPU weights are dequantized at load if they then take at most 1 / DEQUANTIZED_PART of the free memory: steps of
# small models become faster, and other programs keep their memory
DEQUANTIZED_PART = 4


@dataclass(frozen=True)
class MemoryLimits:
    """What a user allows, in bytes: of weights on each GPU, of host memory for all ranks of a machine. None: what is
    free, but for what else needs it."""

    gpu: int | None = None
    host: int | None = None


@dataclass(frozen=True)
class FreeMemory:
    """The memory that each rank finds, in bytes.

    gpu: free on its GPU once CUDA is there; None: the model lies in host memory. host: free on its machine, None where
    the system does not tell. ranks_here: how many ranks share that. as_stored: the weights keep their storage format
    on a CPU too.
    """

    gpu: int | None
    host: int | None
    ranks_here: int = 1
    limits: MemoryLimits = MemoryLimits()
    as_stored: bool = False

    @property
    def on_cpu(self) -> bool:
        """Whether no GPU computes."""
        return self.gpu is None and self.limits.gpu is None

    @property
    def each(self) -> int | None:
        """What a rank has where it computes."""
        if self.gpu is not None:
            return self.gpu
        return None if self.host_weights is None else self.host_weights // self.ranks_here

    def weights(self, beside: Reserve) -> int:
        """The most bytes of weights on the GPU."""
        if self.limits.gpu is None:
            return (self.gpu or 0) - beside.total
        return self.limits.gpu

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
    """Where one rank's weights lie. drafter: whether one is loaded. division: None where all experts lie on the device;
    else the embedding lies in host memory too. device, host: bytes of weights there. chunk: how many tokens of a prompt
    a step may have. dequantized: whether all weights are fp32 once they are loaded."""

    drafter: bool
    division: Division | None
    device: int
    host: int = 0
    chunk: int = USUAL_CHUNK
    dequantized: bool = False


def decide(
    sizes: RankSizes, room: FreeMemory, beside: Sequence[Reserve], drafting: Drafting = AUTO_DRAFTING
) -> Placement:
    """Where the weights of each rank lie: all on the device, with the largest chunks of prompts that there is room for,
    else with experts in host memory. The drafter is loaded where it fits beside all other weights; beside experts in
    host memory only if a number of drafts is asked for, as drafts do not pay there.

    beside: what a GPU holds beside weights, for each chunk that may be, the most wanted first. Raises NotEnoughMemory.
    """
    if room.on_cpu:
        beside = _up_to(CPU_CHUNK, beside)
    without = replace(sizes, total=sizes.main, drafter=0)
    wanted = drafting.most != 0 and sizes.drafter > 0
    large = [one for one in beside if one.chunk >= DRAFTER_CHUNK]
    found = _whole(sizes, room, beside if drafting.required else large or beside) if wanted else None
    if found is not None and (drafting.required or _leaves_room(found, room, beside)):
        found = replace(found, drafter=True)
    else:
        found = _whole(without, room, beside) or _divided(without, room, beside)
    if drafting.required and wanted and not found.drafter:
        found = _with_drafter(sizes, room, beside, found)
    if room.gpu is not None and found.device > room.gpu:
        raise NotEnoughMemory(
            f"the weights on the GPU take {found.device / 1e9:.4g} GB, and {room.gpu / 1e9:.4g} GB of it are free",
            "lower --gpu-memory, or leave it out",
        )
    return _dequantized(found, sizes, room, beside)


def _dequantized(found: Placement, sizes: RankSizes, room: FreeMemory, beside: Sequence[Reserve]) -> Placement:
    """The placement with fp32 weights, on a CPU whose memory has room for them; drafter and chunk stay the same.

    Without --host-memory that is DEQUANTIZED_PART of the free memory, with it all of what it allows.
    """
    if room.each is None or not room.on_cpu or room.as_stored:
        return found
    most = room.each
    if room.limits.host is None:
        one = next(one for one in beside if one.chunk == found.chunk)
        most = min(room.each // DEQUANTIZED_PART, room.each - one.total)
    size = sizes.dequantized - (0 if found.drafter else sizes.dequantized_drafter)
    return replace(found, dequantized=True, device=size) if size <= most else found


def _with_drafter(sizes: RankSizes, room: FreeMemory, beside: Sequence[Reserve], without: Placement) -> Placement:
    """The placement with the drafter beside experts in host memory. Raises NotEnoughMemory."""
    if without.division is not None:
        with suppress(NotEnoughMemory):
            return replace(_divided(replace(sizes, drafter=0), room, beside), drafter=True)
    raise NotEnoughMemory(
        f"the drafter takes {sizes.drafter / 1e9:.4g} GB and finds no room beside the other weights",
        "give --draft off, or make room: a higher --gpu-memory, more GPUs (--tp), a machine with more memory",
    )


def _whole(sizes: RankSizes, room: FreeMemory, beside: Sequence[Reserve]) -> Placement | None:
    """All weights on the device; None where they, or what is needed beside them, find no room there."""
    if room.on_cpu:
        fitting = beside if room.each is None or sizes.total <= room.each else []
    else:
        fitting = [one for one in beside if sizes.total <= room.weights(one)]
    return Placement(False, None, sizes.total, chunk=_roomy(fitting, sizes.total, room).chunk) if fitting else None


def _leaves_room(found: Placement, room: FreeMemory, beside: Sequence[Reserve]) -> bool:
    """Whether what is needed beside the weights finds room too. A limit of host memory is of weights alone."""
    one = next(one for one in beside if one.chunk == found.chunk)
    unlimited = (room.limits.gpu, room.limits.host) == (None, None)
    return not unlimited or room.each is None or found.device + one.total <= room.each


def _roomy(beside: Sequence[Reserve], weights: int, room: FreeMemory) -> Reserve:
    """The first that has room beside so many bytes of weights; else the last."""
    return next((one for one in beside if room.each is None or weights + one.total <= room.each), beside[-1])


def _up_to(chunk: int, beside: Sequence[Reserve]) -> Sequence[Reserve]:
    """Those that are tried where larger chunks do not pay: on a CPU, and beside experts in host memory."""
    return [one for one in beside if one.chunk <= chunk] or beside


def _divided(sizes: RankSizes, room: FreeMemory, beside: Sequence[Reserve]) -> Placement:
    """The placement with experts in host memory, with the first chunk that leaves room for those of a token."""
    if room.on_cpu:
        raise _host_is_short(sizes.total, room)
    usual = _up_to(USUAL_CHUNK, beside)
    one = next((one for one in usual if most_rows(sizes, room.weights(one)) >= sizes.chosen), usual[-1])
    most = room.weights(one)
    rows = most_rows(sizes, most)
    if rows < sizes.chosen:
        raise NotEnoughMemory(
            f"{max(most, 0) / 1e9:.4g} GB of GPU memory are too few for the weights",
            f"from --gpu-memory {-(-least_on_gpu(sizes) // 10**6)}MB on they run; more GPUs share them (--tp)",
        )
    division, device = Division(sizes.experts, rows, _slots(sizes, room, rows)), on_gpu(sizes, rows)
    host = sizes.layers * division.offloaded * sizes.expert + sizes.embedding
    return Placement(
        False, division, device, host, (one if room.limits.gpu is None else _roomy(usual, device, room)).chunk
    )


def _host_is_short(needed: int, room: FreeMemory) -> NotEnoughMemory:
    """What the ranks of a machine are answered with that do not find `needed` bytes of it each."""
    assert room.host_weights is not None
    ranks = f" of {room.ranks_here} ranks" if room.ranks_here > 1 else ""
    return NotEnoughMemory(
        f"the weights{ranks} take {needed * room.ranks_here / 1e9:.2f} GB and cpu has "
        f"{room.host_weights / 1e9:.2f} GB free",
        "use a machine with more memory, or fewer layers of random weights: random:flash,layers=4,experts=16",
    )


def _slots(sizes: RankSizes, room: FreeMemory, rows: int) -> int:
    """How many rows change hands. Raises NotEnoughMemory where host memory has no room for what that takes."""
    slots, limit = max(sizes.chosen, min(rows, sizes.experts - rows)), room.host_experts
    if limit is None:
        return slots
    waiting = (limit // room.ranks_here - sizes.embedding) // (sizes.layers * sizes.expert)
    slots = min(slots, waiting + rows - sizes.experts)
    if slots < sizes.chosen:
        each = least_in_host(sizes, rows)
        ranks = f" by {room.ranks_here} ranks" if room.ranks_here > 1 else ""
        raise NotEnoughMemory(
            f"experts need at least {each * room.ranks_here / 1e9:.4g} GB of host memory{ranks}, and may have "
            f"{limit / 1e9:.4g} GB of it",
            "use more GPUs (--tp) or a machine with more memory; where the system reports less than there is, "
            "give --host-memory SIZE",
        )
    return slots


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
    """The fewest bytes in host memory when so many experts of each layer lie on the device."""
    return sizes.layers * (sizes.experts - rows + sizes.chosen) * sizes.expert + sizes.embedding
