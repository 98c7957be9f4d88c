"""The share of a model that each of several equal devices holds; no torch."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

from dsv4cli.engine.checkpoint.layout import TensorSpec, loaded_tensors
from dsv4cli.engine.checkpoint.sharding import divides
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.inspection.fit.machine import Device
from dsv4cli.engine.inspection.fit.memory import weigh
from dsv4cli.engine.weights.placement import FreeMemory, Placement, decide
from dsv4cli.engine.weights.reserve import Reserve, Workload, reserves
from dsv4cli.engine.weights.sizes import RankSizes, is_drafter, measure
from dsv4cli.errors import NotEnoughMemory

# memory of the CUDA context before loading queries the free memory: 0.65 GB on an H200 with torch 2.11
CUDA_CONTEXT = 65 * 10**7
# Python, PyTorch's libraries and the tokenizer
CPU_RESERVE = 5 * 10**8


@dataclass(frozen=True)
class Share:
    """The bytes that one of `ranks` devices holds.

    Attributes:
        devices: the devices that would hold the model.
        placement: where its weights are placed, None if they do not fit.
        weights: bytes on each device.
        whole: the replicated part of the weights.
        available: free bytes on the fullest of the devices.
        chunk: largest prefill chunk in tokens.
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

    @property
    def ranks(self) -> int:
        """Number of devices that share the model."""
        return len(self.devices)

    @property
    def on_gpu(self) -> bool:
        """Whether the devices are GPUs."""
        return self.devices[0].is_gpu

    @property
    def host(self) -> int:
        """Bytes of experts in host memory, per rank."""
        return 0 if self.placement is None else self.placement.host

    @property
    def drafts(self) -> bool:
        """Whether a drafter is loaded."""
        return self.placement is not None and self.placement.drafter

    @property
    def needed(self) -> int:
        """Bytes needed on each device."""
        return self.weights + self.cache + self.workspace + self.reserve

    @property
    def missing(self) -> int:
        """Bytes that each device lacks."""
        return max(0, self.needed - self.available)

    @property
    def fits(self) -> bool:
        """Whether each device has enough memory."""
        return self.placement is not None and not self.missing


class SharedModel:
    """A model to be split over devices, with `host` bytes of free host memory (None for unlimited).

    table: the tensors that are loaded, if they are not those of the formats.
    """

    def __init__(
        self,
        config: ModelConfig,
        formats: Formats,
        host: int | None,
        table: Mapping[str, TensorSpec] | None = None,
    ) -> None:
        self.config = config
        self.formats = formats
        self.host = host
        self._table = list((loaded_tensors(config, formats) if table is None else table).values())
        # one tensor per kind: the many experts are alike
        self._kinds = list({(spec.dtype, spec.shape, spec.shard): spec for spec in self._table}.values())
        self._sizes: dict[int, RankSizes] = {}
        self._whole: dict[bool, dict[str, int]] = {}

    def divides(self, ranks: int) -> bool:
        """Return whether `ranks` divides the model."""
        return ranks == 1 or divides(self.config, self._kinds, ranks)

    def sizes(self, ranks: int) -> RankSizes:
        """Return the sizes of one rank's part, cached."""
        if ranks not in self._sizes:
            self._sizes[ranks] = measure(self._table, self.config.num_experts_per_tok, ranks)
        return self._sizes[ranks]

    def whole(self, drafter: bool) -> dict[str, int]:
        """Return the replicated bytes, by family."""
        if drafter not in self._whole:
            uncut = [spec for spec in self._table if spec.shard is None and (drafter or not is_drafter(spec))]
            self._whole[drafter] = weigh(uncut, 1).whole
        return self._whole[drafter]

    def share(self, devices: tuple[Device, ...], context: int, batch: int) -> Share:
        """Return one device's part of the model, placed as in loading for `batch` sequences of `context` tokens.

        If that does not fit, the smallest prefill chunk is used.
        """
        ranks, on_gpu, free = len(devices), devices[0].is_gpu, min(device.free for device in devices)
        sizes, load = self.sizes(ranks), Workload(context, batch)
        reserved = reserves(self.config, self.formats, load, ranks, on_gpu=on_gpu, gguf=sizes.gguf)
        placement = self._placement(ranks, free, reserved, on_gpu)
        one = next((one for one in reserved if placement is not None and one.chunk == placement.chunk), reserved[-1])
        drafter = placement is not None and placement.drafter
        return Share(
            devices=devices,
            chunk=one.chunk,
            placement=placement,
            weights=sizes.main if placement is None else placement.device,
            whole=sum(self.whole(drafter).values()),
            cache=one.cache,
            workspace=one.step,
            reserve=one.overhead + CUDA_CONTEXT if on_gpu else CPU_RESERVE,
            available=free,
        )

    def with_any_host(self) -> "SharedModel":
        """Return the same model with unlimited host memory."""
        other = copy(self)
        other.host = None
        return other

    def first(self, layers: int) -> "SharedModel":
        """Return the model of the first `layers` layers, on one device."""
        other, sizes = copy(self), self.sizes(1)
        kept = self.config.layer_ratios[:layers] + self.config.compress_ratios[self.config.num_hidden_layers :]
        other.config = replace(self.config, num_hidden_layers=layers, compress_ratios=kept)
        left_out = [one for layer, one in self._by_layer.items() if layer >= layers]
        total = sizes.total - sum(one.total for one in left_out)
        dequantized = sizes.dequantized - sum(one.dequantized for one in left_out)
        other._sizes = {1: replace(sizes, total=total, dequantized=dequantized, layers=layers)}
        return other

    @cached_property
    def _by_layer(self) -> Mapping[int, RankSizes]:
        """The sizes of each main layer."""
        parts: dict[int, list[TensorSpec]] = {}
        for spec in self._table:
            if spec.name.startswith("layers."):
                parts.setdefault(int(spec.name.split(".", 2)[1]), []).append(spec)
        return {layer: measure(specs, self.config.num_experts_per_tok, 1) for layer, specs in parts.items()}

    def _placement(self, ranks: int, free: int, reserved: Sequence[Reserve], on_gpu: bool) -> Placement | None:
        if on_gpu:
            memory = FreeMemory(max(free - CUDA_CONTEXT, 0), self.host, ranks)
        else:
            memory = FreeMemory(None, max(free - CPU_RESERVE, 0))
        try:
            return decide(self.sizes(ranks), memory, reserved)
        except NotEnoughMemory:
            return None
