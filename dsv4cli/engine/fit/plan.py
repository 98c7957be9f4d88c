"""Whether a model fits a machine: on one device, on several GPUs, on a GPU beside host memory; no torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dsv4cli.engine.capacity import MAX_SLOTS
from dsv4cli.engine.config import ModelConfig
from dsv4cli.engine.fit.machine import Device, Machine
from dsv4cli.engine.fit.memory import Load, Weights, cache_bytes, refused_by, weigh, workspace_bytes
from dsv4cli.engine.layout import Formats, TensorSpec, expected_tensors
from dsv4cli.engine.settings import Limits, require
from dsv4cli.errors import UnsupportedHardware

# the CUDA context, loaded kernels and the workspaces of cuBLAS: 0.75 GB on an H200 with torch 2.13
GPU_RESERVE = 10**9
# Python, PyTorch's libraries and the tokenizer
CPU_RESERVE = 5 * 10**8
# the host holds twice what a GPU lacks, for experts that may move lie there too; and the GPU keeps a quarter of them
HOST_TIMES, HOST_SHARE = 2, 0.75
# tokens of a prompt in a step, the default first; smaller ones take less memory
CHUNKS = (Limits.prefill_chunk, 2048, 1024, 512, 256, 128, 64)


@dataclass(frozen=True)
class Share:
    """What one of `ranks` devices holds, in bytes.

    devices: those that would hold the model. whole: the part of the weights that every rank holds. available: what the
    fullest of the devices has free. chunk: the most tokens of a prompt in a step.
    """

    devices: tuple[Device, ...]
    chunk: int
    weights: int
    whole: int
    cache: int
    workspace: int
    reserve: int
    available: int

    @property
    def ranks(self) -> int:
        """How many devices share the model."""
        return len(self.devices)

    @property
    def needed(self) -> int:
        """Bytes on each device."""
        return self.weights + self.cache + self.workspace + self.reserve

    @property
    def fits(self) -> bool:
        """Whether each device has that much free."""
        return self.needed <= self.available


@dataclass(frozen=True)
class Fit:
    """The answer for sequences of `context` tokens, `batch` at once.

    shares: one GPU, then each number of GPUs that divides the model, then the CPU. whole: bytes that every GPU holds,
    by family. runs: the one device that holds all of it, None if none is large enough. largest_context at this batch
    and largest_batch at this context are those of that device, or else of the largest one; 0 for not even one token.
    shorter, fewer: that device's share at each of the two, None at 0. layers: how many of the first layers the largest
    device can run, None where it runs all of them. together: the smallest number of GPUs above one that hold the model
    by its size, or the largest number where it is the load that does not fit; context_together: the largest context at
    this batch there. beside: the emptiest GPU's share of all, where it is too large, but experts beyond it find room in
    host memory (engine/host_experts.py decides it exactly).
    """

    context: int
    batch: int
    shares: tuple[Share, ...]
    whole: dict[str, int]
    runs: Share | None
    largest_context: int
    largest_batch: int
    shorter: Share | None
    fewer: Share | None
    layers: int | None
    together: Share | None
    context_together: int
    beside: Share | None


def plan_fit(config: ModelConfig, formats: Formats, machine: Machine, *, context: int, batch: int) -> Fit:
    """Whether the model fits, with what each device would hold.

    Raises UsageError for a context or a batch that the engine does not take, UnsupportedHardware for a machine of which
    nothing is known.
    """
    longest = config.max_position_embeddings
    require(1 <= context <= longest, "--context", f"{context:,}", f"use a number from 1 to {longest:,}")
    require(1 <= batch <= MAX_SLOTS, "--batch", batch, f"use a number from 1 to {MAX_SLOTS}, more wait for a place")
    if not machine.gpus and machine.cpu is None:
        raise UnsupportedHardware("this system does not say how much memory it has", "name the GPUs: --gpus 1x80GB")
    model = _Model(config, formats, list(expected_tensors(config, formats).values()))
    shares = tuple(model.shares(machine, context, batch))
    together, context_together = _together(model, shares, batch)
    single = [share for share in shares if share.ranks == 1]
    runs = next((share for share in single if share.fits), None)
    best = (runs or max(single, key=lambda share: share.available)).devices
    longer = _largest(longest, lambda count: model.share(best, count, batch).fits)
    more = _largest(MAX_SLOTS, lambda count: model.share(best, context, count).fits)
    return Fit(
        context=context,
        batch=batch,
        shares=shares,
        whole=model.weights(1).whole,
        runs=runs,
        largest_context=longer,
        largest_batch=more,
        shorter=model.share(best, longer, batch) if longer else None,
        fewer=model.share(best, context, more) if more else None,
        layers=None if runs else _largest(config.num_hidden_layers, lambda count: model.first(count, best, context)),
        together=together,
        context_together=context_together,
        beside=_beside(model, machine, shares),
    )


def _beside(model: "_Model", machine: Machine, shares: Sequence[Share]) -> Share | None:
    first = shares[0]
    lacking, experts = (
        first.needed - first.available,
        sum(weigh([s], 1).nbytes for s in model.specs if s.expert is not None),
    )
    room = machine.cpu is not None and HOST_TIMES * lacking <= machine.cpu.free and lacking <= HOST_SHARE * experts
    return first if first.devices[0].is_gpu and not first.fits and room else None


def _together(model: "_Model", shares: Sequence[Share], batch: int) -> tuple[Share | None, int]:
    several = [share for share in shares if share.ranks > 1]
    chosen = next((share for share in several if share.fits), several[-1] if several else None)
    if chosen is None:
        return None, 0
    devices, longest = chosen.devices, model.config.max_position_embeddings
    context = _largest(longest, lambda count: model.share(devices, count, batch).fits)
    return (chosen, context) if context else (None, 0)


class _Model:
    """A model whose shares on different devices are asked for."""

    def __init__(self, config: ModelConfig, formats: Formats, specs: Sequence[TensorSpec]) -> None:
        self.config = config
        self.formats = formats
        self.specs = specs
        self._weights: dict[int, Weights] = {}

    def weights(self, ranks: int) -> Weights:
        """One rank's weights, added up once."""
        if ranks not in self._weights:
            self._weights[ranks] = weigh(self.specs, ranks)
        return self._weights[ranks]

    def shares(self, machine: Machine, context: int, batch: int) -> Iterator[Share]:
        """One for each way to use the machine that divides the model; of unequal GPUs the emptiest are taken."""
        gpus = sorted(machine.gpus, key=lambda gpu: -gpu.free)
        for ranks in range(1, len(gpus) + 1):
            if ranks == 1 or not refused_by(self.config, self.specs, ranks):
                yield self.share(tuple(gpus[:ranks]), context, batch)
        if machine.cpu is not None:
            yield self.share((machine.cpu,), context, batch)

    def share(self, devices: tuple[Device, ...], context: int, batch: int) -> Share:
        """One device's part of the whole model."""
        return _share(self.config, self.formats, self.weights(len(devices)), devices, context, batch)

    def first(self, layers: int, devices: tuple[Device, ...], context: int) -> bool:
        """Whether the model of the first `layers` layers, drafter included, fits with one sequence."""
        kept = self.config.layer_ratios[:layers] + self.config.compress_ratios[self.config.num_hidden_layers :]
        config = replace(self.config, num_hidden_layers=layers, compress_ratios=kept)
        nbytes = sum(size for layer, size in self.by_layer.items() if layer < layers)
        return _share(config, self.formats, Weights(1, nbytes, {}), devices, context, 1).fits

    @cached_property
    def by_layer(self) -> Mapping[int, int]:
        """Bytes of each main layer, and under -1 of everything else."""
        parts: dict[int, list[TensorSpec]] = {}
        for spec in self.specs:
            layer = int(spec.name.split(".", 2)[1]) if spec.name.startswith("layers.") else -1
            parts.setdefault(layer, []).append(spec)
        return {layer: weigh(specs, 1).nbytes for layer, specs in parts.items()}


def _share(
    config: ModelConfig, formats: Formats, weights: Weights, devices: tuple[Device, ...], context: int, batch: int
) -> Share:
    """The share with the largest chunk that fits; with the default chunk where none does."""
    on_gpu = devices[0].is_gpu
    shares = []
    for chunk in CHUNKS:
        load = Load(context, batch, chunk)
        share = Share(
            devices=devices,
            chunk=chunk,
            weights=weights.nbytes,
            whole=sum(weights.whole.values()),
            cache=cache_bytes(config, load),
            workspace=workspace_bytes(config, formats, load, len(devices), on_gpu),
            reserve=GPU_RESERVE if on_gpu else CPU_RESERVE,
            available=min(device.free for device in devices),
        )
        if share.fits:
            return share
        shares.append(share)
    return shares[0]


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` for which `fits`, which holds up to some number; 0 where there is none."""
    if fits(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
