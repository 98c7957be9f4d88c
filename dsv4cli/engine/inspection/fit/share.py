"""What each of some equal devices holds of a model; no torch."""

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

from dsv4cli.engine.checkpoint.layout import TensorSpec, loaded_tensors
from dsv4cli.engine.checkpoint.sharding import divides
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.inspection.fit.machine import Device
from dsv4cli.engine.inspection.fit.memory import Workload, cache_bytes, weigh, workspace_bytes
from dsv4cli.engine.settings import Limits
from dsv4cli.engine.weights.placement import (
    FreeMemory,
    MemoryLimits,
    Placement,
    RankSizes,
    decide,
    is_drafter,
    measure,
    most_weights,
)
from dsv4cli.errors import NotEnoughMemory

# the CUDA context, loaded kernels and the workspaces of cuBLAS: 0.75 GB on an H200 with torch 2.13
GPU_RESERVE = 10**9
# what of it is taken before loading asks how much is free
CUDA_CONTEXT = 5 * 10**8
# CUDA graphs, NCCL, gaps: what loading leaves beside the estimate, and a command that limits the weights leaves too
GPU_MARGIN = 15 * 10**8
# Python, PyTorch's libraries and the tokenizer
CPU_RESERVE = 5 * 10**8
# tokens of a prompt in a step, the default first; smaller ones take less memory
CHUNKS = (Limits.prefill_chunk, 2048, 1024, 512, 256, 128, 64)
MB = 10**6


@dataclass(frozen=True)
class Share:
    """What one of `ranks` devices holds, in bytes.

    devices: those that would hold the model. placement: where its weights lie, None where they find no room. weights:
    on each device. whole: the part of them that every rank holds. available: what the fullest of the devices has free.
    chunk: the most tokens of a prompt in a step. gpu_memory: the most weights on the device, where more room has to be
    left than loading leaves by itself.
    """

    devices: tuple[Device, ...]
    chunk: int
    placement: Placement | None
    weights: int
    whole: int
    cache: int
    workspace: int
    reserve: int
    available: int
    gpu_memory: int | None

    @property
    def ranks(self) -> int:
        """How many devices share the model."""
        return len(self.devices)

    @property
    def on_gpu(self) -> bool:
        """Whether they are GPUs."""
        return self.devices[0].is_gpu

    @property
    def host(self) -> int:
        """Bytes of experts in host memory, of each rank."""
        return 0 if self.placement is None else self.placement.host

    @property
    def drafts(self) -> bool:
        """Whether a drafter is loaded."""
        return self.placement is not None and self.placement.drafter

    @property
    def needed(self) -> int:
        """Bytes on each device."""
        return self.weights + self.cache + self.workspace + self.reserve

    @property
    def missing(self) -> int:
        """Bytes that each device lacks."""
        unplaced = self.placement is None and self.on_gpu
        return max(0, self.needed + GPU_MARGIN * unplaced - self.available)

    @property
    def fits(self) -> bool:
        """Whether each device has room for all of it."""
        return self.placement is not None and not self.missing


class SharedModel:
    """A model whose shares on devices are asked for, beside `host` bytes of free host memory, None for any number."""

    def __init__(self, config: ModelConfig, formats: Formats, host: int | None) -> None:
        self.config = config
        self.formats = formats
        self.host = host
        self._table = list(loaded_tensors(config, formats).values())
        # of experts, which are many and alike, one
        self._kinds = list({(spec.dtype, spec.shape, spec.shard): spec for spec in self._table}.values())
        self._sizes: dict[int, RankSizes] = {}
        self._whole: dict[bool, dict[str, int]] = {}

    def divides(self, ranks: int) -> bool:
        """Whether so many ranks can share the model."""
        return ranks == 1 or divides(self.config, self._kinds, ranks)

    def sizes(self, ranks: int) -> RankSizes:
        """One rank's part, added up once."""
        if ranks not in self._sizes:
            self._sizes[ranks] = measure(self._table, self.config.num_experts_per_tok, ranks)
        return self._sizes[ranks]

    def whole(self, drafter: bool) -> dict[str, int]:
        """Bytes that every rank holds, by family."""
        if drafter not in self._whole:
            uncut = [spec for spec in self._table if spec.shard is None and (drafter or not is_drafter(spec))]
            self._whole[drafter] = weigh(uncut, 1).whole
        return self._whole[drafter]

    def share(self, devices: tuple[Device, ...], context: int, batch: int) -> Share:
        """One device's part of the model.

        With all experts there and the largest chunk that fits; else with experts in host memory; where neither fits,
        with the smallest chunk.
        """
        loads = [Workload(context, batch, chunk) for chunk in CHUNKS]
        found = next((share for share in self._ways(devices, loads) if share.fits), None)
        return found or self._share(devices, loads[-1])

    def _ways(self, devices: tuple[Device, ...], loads: list[Workload]) -> Iterator[Share]:
        """The best first: as loading divides by itself, if not at all; all weights there with less room for the rest;
        experts in host memory."""
        for load in loads:
            share = self._share(devices, load)
            if share.host:
                break
            yield share
        if not devices[0].is_gpu:
            return
        free, main = min(device.free for device in devices), self.sizes(len(devices)).main
        rooms = [(load, self._room_for_weights(devices, load)) for load in loads]
        for load, room in rooms:
            if room >= main:
                yield self._share(devices, load, room)
        for load, room in rooms:
            yield self._share(devices, load, room if room < most_weights(free - CUDA_CONTEXT) else None)

    def with_any_host(self) -> "SharedModel":
        """The same beside any amount of host memory."""
        other = copy(self)
        other.host = None
        return other

    def first(self, layers: int) -> "SharedModel":
        """The model of the first `layers` layers, on one device."""
        other, sizes = copy(self), self.sizes(1)
        kept = self.config.layer_ratios[:layers] + self.config.compress_ratios[self.config.num_hidden_layers :]
        other.config = replace(self.config, num_hidden_layers=layers, compress_ratios=kept)
        left_out = sum(nbytes for layer, nbytes in self._by_layer.items() if layer >= layers)
        other._sizes = {1: replace(sizes, total=sizes.total - left_out, layers=layers)}
        return other

    @cached_property
    def _by_layer(self) -> Mapping[int, int]:
        """Bytes of each main layer."""
        parts: dict[int, list[TensorSpec]] = {}
        for spec in self._table:
            if spec.name.startswith("layers."):
                parts.setdefault(int(spec.name.split(".", 2)[1]), []).append(spec)
        return {layer: weigh(specs, 1).nbytes for layer, specs in parts.items()}

    def _room_for_weights(self, devices: tuple[Device, ...], load: Workload) -> int:
        """The bytes, whole MB, that a GPU has for weights beside such a load."""
        config, free = self.config.without_drafter(), min(device.free for device in devices)
        beside = cache_bytes(config, load) + workspace_bytes(config, self.formats, load, len(devices), on_gpu=True)
        return max(free - beside - GPU_RESERVE - GPU_MARGIN, MB) // MB * MB

    def _share(self, devices: tuple[Device, ...], load: Workload, gpu_memory: int | None = None) -> Share:
        ranks, on_gpu, free = len(devices), devices[0].is_gpu, min(device.free for device in devices)
        placement, sizes = self._placement(ranks, free, gpu_memory, on_gpu), self.sizes(ranks)
        drafter = placement is not None and placement.drafter
        config = self.config if drafter else self.config.without_drafter()
        return Share(
            devices=devices,
            chunk=load.chunk,
            placement=placement,
            weights=sizes.main if placement is None else placement.device,
            whole=sum(self.whole(drafter).values()),
            cache=cache_bytes(config, load),
            workspace=workspace_bytes(config, self.formats, load, ranks, on_gpu),
            reserve=GPU_RESERVE if on_gpu else CPU_RESERVE,
            available=free,
            gpu_memory=gpu_memory,
        )

    def _placement(self, ranks: int, free: int, gpu_memory: int | None, on_gpu: bool) -> Placement | None:
        if on_gpu:
            room = FreeMemory(max(free - CUDA_CONTEXT, 0), self.host, ranks, MemoryLimits(gpu=gpu_memory))
        else:
            room = FreeMemory(None, free)
        try:
            return decide(self.sizes(ranks), room)
        except NotEnoughMemory:
            return None
