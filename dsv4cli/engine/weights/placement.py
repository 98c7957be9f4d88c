"""Decide which of a model's weights go to the GPU and which to host memory; no torch.

Loading decides with the memory it finds, `inspect --fit` with the machine that the user describes. Sizes are per rank.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from dsv4cli.engine.config.capacity import CPU_CHUNK, DEFAULT_CHUNK
from dsv4cli.engine.settings import AUTO_DRAFTING, Drafting
from dsv4cli.engine.weights.reserve import Reserve
from dsv4cli.engine.weights.sizes import RankSizes
from dsv4cli.errors import NotEnoughMemory

# the smallest prefill chunk, in tokens, that is worth accepting to fit a drafter
DRAFTER_CHUNK = 1024
# eighths of free host memory that may be pinned for experts
HOST_EIGHTHS = 7
# on a CPU, weights are dequantized at load if they then take at most 1 / DEQUANTIZED_PART of free memory: small models
# get faster, and other programs keep their memory
DEQUANTIZED_PART = 4


@dataclass(frozen=True)
class MemoryLimits:
    """The user's limits, in bytes: weights on each GPU, and host memory for all ranks of a machine.

    None: use free memory, less what everything else needs.
    """

    gpu: int | None = None
    host: int | None = None


@dataclass(frozen=True)
class FreeMemory:
    """The memory available to each rank, in bytes.

    Attributes:
        gpu: free on its GPU once CUDA is initialized; None if the model runs on the CPU.
        host: free on its machine, which `ranks_here` ranks share; None if the system does not report it.
        as_stored: whether weights also keep their storage format on a CPU.
    """

    gpu: int | None
    host: int | None
    ranks_here: int = 1
    limits: MemoryLimits = MemoryLimits()
    as_stored: bool = False

    @property
    def on_cpu(self) -> bool:
        """Whether the model runs on the CPU."""
        return self.gpu is None and self.limits.gpu is None

    @property
    def each(self) -> int | None:
        """Memory for one rank on the device that computes."""
        if self.gpu is not None:
            return self.gpu
        return None if self.host_weights is None else self.host_weights // self.ranks_here

    def weights(self, reserved: Reserve) -> int:
        """Return the largest number of bytes of weights on the GPU."""
        if self.limits.gpu is None:
            return (self.gpu or 0) - reserved.total
        return self.limits.gpu

    @property
    def host_experts(self) -> int | None:
        """The largest number of bytes of offloaded experts in host memory."""
        if self.limits.host is not None or self.host is None:
            return self.limits.host
        return self.host * HOST_EIGHTHS // 8

    @property
    def host_weights(self) -> int | None:
        """The largest number of bytes of weights if all of them are in host memory."""
        return self.host if self.limits.host is None else self.limits.host


@dataclass(frozen=True)
class Division:
    """The division of each layer's `experts`: `rows` of them are on the GPU, and `slots` of these rows are a cache.

    There are as many slots as experts without a row, so that host memory holds at most twice the necessary minimum; but
    enough for one token, at most `rows`, and fewer if host memory is short. Rows that are not slots hold resident
    experts.
    """

    experts: int
    rows: int
    slots: int

    @property
    def resident(self) -> int:
        """Experts that always stay on the GPU."""
        return self.rows - self.slots

    @property
    def offloaded(self) -> int:
        """Experts in host memory."""
        return self.experts - self.resident

    @property
    def staging(self) -> int:
        """Rows shared by all layers, enough for all experts that find no slot."""
        return self.experts - self.rows


@dataclass(frozen=True)
class Placement:
    """The placement of one rank's weights, `device` bytes on its device and `host` bytes in host memory.

    Attributes:
        drafter: whether the drafter is loaded.
        division: None if all weights are on the device; else the division of the experts (the embedding is offloaded
            too).
        chunk: largest prefill chunk, in tokens.
        dequantized: whether all weights are fp32 after loading.
    """

    drafter: bool
    division: Division | None
    device: int
    host: int = 0
    chunk: int = DEFAULT_CHUNK
    dequantized: bool = False


def decide(
    sizes: RankSizes, memory: FreeMemory, reserved: Sequence[Reserve], drafting: Drafting = AUTO_DRAFTING
) -> Placement:
    """Return the placement of each rank's weights.

    If all weights fit on the device, the prefill chunk is the largest that fits with them; otherwise experts are
    offloaded. The drafter is loaded if it fits with all other weights. With offloaded experts it is loaded only if
    `drafting` requires it, because drafting does not pay off there.

    Args:
        reserved: memory reserved besides weights, for each possible chunk size, the preferred one first.

    Raises NotEnoughMemory.
    """
    if memory.on_cpu:
        reserved = _up_to(CPU_CHUNK, reserved)
    without = replace(sizes, total=sizes.main, drafter=0)
    wanted = drafting.most != 0 and sizes.drafter > 0
    large = [one for one in reserved if one.chunk >= DRAFTER_CHUNK]
    found = _whole(sizes, memory, reserved if drafting.required else large or reserved) if wanted else None
    if found is not None and (drafting.required or _leaves_space(found, memory, reserved)):
        found = replace(found, drafter=True)
    else:
        found = _whole(without, memory, reserved) or _divided(without, memory, reserved)
    if drafting.required and wanted and not found.drafter:
        found = _with_drafter(sizes, memory, reserved, found)
    if memory.gpu is not None and found.device > memory.gpu:
        raise NotEnoughMemory(
            f"the weights on the GPU take {found.device / 1e9:.4g} GB, but only {memory.gpu / 1e9:.4g} GB are free",
            "lower --gpu-memory, or leave it out",
        )
    return _dequantized(found, sizes, memory, reserved)


def _dequantized(found: Placement, sizes: RankSizes, memory: FreeMemory, reserved: Sequence[Reserve]) -> Placement:
    """Return the placement with fp32 weights if they fit in a CPU's memory; drafter and chunk stay the same.

    The weights may use 1 / DEQUANTIZED_PART of free memory, or with --host-memory all that it allows.
    """
    if memory.each is None or not memory.on_cpu or memory.as_stored:
        return found
    most = memory.each
    if memory.limits.host is None:
        one = next(one for one in reserved if one.chunk == found.chunk)
        most = min(memory.each // DEQUANTIZED_PART, memory.each - one.total)
    size = sizes.dequantized - (0 if found.drafter else sizes.dequantized_drafter)
    return replace(found, dequantized=True, device=size) if size <= most else found


def _with_drafter(sizes: RankSizes, memory: FreeMemory, reserved: Sequence[Reserve], without: Placement) -> Placement:
    """Return the placement with the drafter and offloaded experts. Raises NotEnoughMemory."""
    if without.division is not None:
        with suppress(NotEnoughMemory):
            return replace(_divided(replace(sizes, drafter=0), memory, reserved), drafter=True)
    raise NotEnoughMemory(
        f"the drafter takes {sizes.drafter / 1e9:.4g} GB and does not fit with the other weights",
        "use --draft off, a higher --gpu-memory, more GPUs (--tp), or a machine with more memory",
    )


def _whole(sizes: RankSizes, memory: FreeMemory, reserved: Sequence[Reserve]) -> Placement | None:
    """Return the placement with all weights on the device; None if they and the memory reserve do not fit."""
    if memory.on_cpu:
        fitting = reserved if memory.each is None or sizes.total <= memory.each else []
    else:
        fitting = [one for one in reserved if sizes.total <= memory.weights(one)]
    return (
        Placement(False, None, sizes.total, chunk=_with_space(fitting, sizes.total, memory).chunk) if fitting else None
    )


def _leaves_space(found: Placement, memory: FreeMemory, reserved: Sequence[Reserve]) -> bool:
    """Return whether the reserve also fits. A user's limit covers weights alone: with one, this is not checked."""
    one = next(one for one in reserved if one.chunk == found.chunk)
    unlimited = (memory.limits.gpu, memory.limits.host) == (None, None)
    return not unlimited or memory.each is None or found.device + one.total <= memory.each


def _with_space(reserved: Sequence[Reserve], weights: int, memory: FreeMemory) -> Reserve:
    """Return the first reserve that fits with this many bytes of weights, or the last."""
    return next((one for one in reserved if memory.each is None or weights + one.total <= memory.each), reserved[-1])


def _up_to(chunk: int, reserved: Sequence[Reserve]) -> Sequence[Reserve]:
    """Return the reserves up to this chunk size; on a CPU and with offloaded experts larger chunks do not pay off."""
    return [one for one in reserved if one.chunk <= chunk] or reserved


def _divided(sizes: RankSizes, memory: FreeMemory, reserved: Sequence[Reserve]) -> Placement:
    """Return the placement with offloaded experts, with the first chunk that leaves memory for a token's experts."""
    if memory.on_cpu:
        raise _host_is_short(sizes.total, memory)
    default = _up_to(DEFAULT_CHUNK, reserved)
    one = next((one for one in default if most_rows(sizes, memory.weights(one)) >= sizes.chosen), default[-1])
    most = memory.weights(one)
    rows = most_rows(sizes, most)
    if rows < sizes.chosen:
        raise NotEnoughMemory(
            f"{max(most, 0) / 1e9:.4g} GB of GPU memory is not enough for the weights",
            f"use at least --gpu-memory {-(-least_on_gpu(sizes) // 10**6)}MB, or more GPUs (--tp)",
        )
    division, device = Division(sizes.experts, rows, _slots(sizes, memory, rows)), on_gpu(sizes, rows)
    host = sizes.layers * division.offloaded * sizes.expert + sizes.embedding
    return Placement(
        False,
        division,
        device,
        host,
        (one if memory.limits.gpu is None else _with_space(default, device, memory)).chunk,
    )


def _host_is_short(needed: int, memory: FreeMemory) -> NotEnoughMemory:
    """Return the error for ranks of a machine that lacks `needed` bytes for each of them."""
    assert memory.host_weights is not None
    ranks = f" of {memory.ranks_here} ranks" if memory.ranks_here > 1 else ""
    needs, free = (f"{nbytes / 1e9:.2f} GB" for nbytes in (needed * memory.ranks_here, memory.host_weights))
    smaller = "use a machine with more memory, or fewer layers of random weights: random:flash,layers=4,experts=16"
    if memory.limits.host is not None:
        return NotEnoughMemory(
            f"the weights{ranks} take {needs} of host memory, and --host-memory allows {free}",
            f"raise --host-memory; if the memory is not there, {smaller}",
        )
    return NotEnoughMemory(f"the weights{ranks} take {needs} and cpu has {free} free", smaller)


def _slots(sizes: RankSizes, memory: FreeMemory, rows: int) -> int:
    """Return the number of slots per layer. Raises NotEnoughMemory if host memory is too small."""
    slots, limit = max(sizes.chosen, min(rows, sizes.experts - rows)), memory.host_experts
    if limit is None:
        return slots
    waiting = (limit // memory.ranks_here - sizes.embedding) // (sizes.layers * sizes.expert)
    slots = min(slots, waiting + rows - sizes.experts)
    if slots < sizes.chosen:
        each = least_in_host(sizes, rows)
        ranks = f" for {memory.ranks_here} ranks" if memory.ranks_here > 1 else ""
        raise NotEnoughMemory(
            f"experts need at least {each * memory.ranks_here / 1e9:.4g} GB of host memory{ranks}, but only "
            f"{limit / 1e9:.4g} GB may be used",
            "use more GPUs (--tp) or a machine with more memory; if the system reports too little memory, "
            "set --host-memory SIZE",
        )
    return slots


def most_rows(sizes: RankSizes, most: int) -> int:
    """Return how many experts of each layer fit on a device with `most` bytes for weights."""
    if sizes.layers < 2:
        return 0
    # every layer has its own rows, and all share the staging rows: layers * rows + (experts - rows)
    return min(((most - sizes.rest) // sizes.expert - sizes.experts) // (sizes.layers - 1), sizes.experts - 1)


def on_gpu(sizes: RankSizes, rows: int) -> int:
    """Return the bytes of weights on the device if `rows` experts of each layer are there."""
    return sizes.rest + (sizes.layers * rows + sizes.experts - rows) * sizes.expert


def least_on_gpu(sizes: RankSizes) -> int:
    """Return the fewest bytes of weights on the device with which the model runs."""
    return min(on_gpu(sizes, sizes.chosen), sizes.main)


def least_in_host(sizes: RankSizes, rows: int) -> int:
    """Return the fewest bytes in host memory if `rows` experts of each layer are on the device."""
    return sizes.layers * (sizes.experts - rows + sizes.chosen) * sizes.expert + sizes.embedding
