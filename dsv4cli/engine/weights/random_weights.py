"""Random weights for any table of tensors: deterministic, well scaled, in the stored formats.

A tensor depends only on its name and the seed, so two models have the same values in the tensors that they share.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from zlib import crc32

import torch

from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.config.formats import STORAGE
from dsv4cli.engine.weights.fill import TORCH_DTYPES
from dsv4cli.kernels.formats import E2M1_VALUES, E8M0_BIAS

# length of the pattern that large tensors repeat, in values (a prime, so that rows do not align with it)
PATTERN = 1_000_003
E2M1_STD = (sum(value * value for value in E2M1_VALUES) / len(E2M1_VALUES)) ** 0.5
# standard deviation of FP8 codes, far from both ends of e4m3's range
E4M3_STD = 32.0
# e4m3 code of 0.5
E4M3_HALF = 0x30
# bytes of a value -> an integer dtype of that size
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def random_tensors(
    specs: Iterable[TensorSpec], seed: int, experts: int, device: torch.device | str = "cpu"
) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Yield a tensor for each spec, in its stored dtype and shape.

    Args:
        experts: number of experts that a hash table selects from.
    """
    source = _Source(seed, torch.device(device))
    for spec in specs:
        yield spec, source.draw(spec, experts)


class RandomRows:
    """The tensors of `random_tensors`, a few rows at a time. Thread-safe."""

    def __init__(self, seed: int, experts: int) -> None:
        self.experts = experts
        self._source = _Source(seed, torch.device("cpu"))
        # enough for the tensors that threads work on; a period has up to 4 MB
        self._period = lru_cache(16)(self._source.period)

    def rows(self, spec: TensorSpec, rows: slice) -> torch.Tensor:
        """Return rows of a tensor in its stored dtype. `rows` indexes the first dimension and has no step."""
        if spec.dtype == "I64" or not spec.shape:
            return self._source.draw(spec, self.experts)[rows]
        start, stop, _ = rows.indices(spec.shape[0])
        width = torch.Size(spec.shape[1:]).numel()
        period = self._period(spec)
        first, count = start * width % PATTERN, (stop - start) * width
        bits = period.view(BITS[period.itemsize])
        flat = bits.repeat(-(-(first + count) // PATTERN))[first : first + count] if count else bits[:0]
        return flat.view(stop - start, *spec.shape[1:]).view(TORCH_DTYPES[spec.dtype])


class _Source:
    """Random values on a device. Tensors of one kind repeat one pattern, from an offset that their name determines."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.device = device

    def draw(self, spec: TensorSpec, experts: int) -> torch.Tensor:
        """Return the tensor of a spec."""
        if spec.dtype == "I64":
            generator = torch.Generator().manual_seed(crc32(spec.name.encode()) ^ self.seed)
            first = torch.randint(0, experts, (spec.shape[0], 1), generator=generator, device="cpu")
            return (first + torch.arange(spec.shape[1], device="cpu")) % experts  # distinct experts in a row
        return _tiled(spec, self.period(spec))

    def period(self, spec: TensorSpec) -> torch.Tensor:
        """Return the values that a float or byte tensor repeats, in its stored dtype or as its bytes."""
        if spec.is_scale:
            return self._scale(spec)
        if spec.dtype in ("I8", "U8"):
            return _period(self._bytes, spec)
        mean, deviation = _moments(spec)
        return (_period(self._normal, spec) * deviation + mean).to(TORCH_DTYPES[spec.dtype])

    def _scale(self, spec: TensorSpec) -> torch.Tensor:
        """Return scales that give the rows of a matrix about unit length.

        E8M0: powers of two that vary by one step up or down between blocks. fp32: any mantissa. NVFP4: e4m3 numbers
        from 0.5 to 1.9 per block, and one fp32 number per matrix.
        """
        assert spec.form is not None
        deviation = (E4M3_STD if STORAGE[spec.form].codes == 1 else E2M1_STD) * spec.columns**0.5
        if not spec.shape:
            return torch.full((1,), 1 / deviation, device=self.device)
        drawn = _period(self._bytes, spec)
        if spec.dtype == "F32":
            return (1 + drawn / 256) / deviation
        if spec.dtype == "F8_E4M3":
            return drawn % 16 + E4M3_HALF
        exponent = -round(torch.tensor(deviation, device="cpu").log2().item()) + E8M0_BIAS
        return drawn % 3 + (exponent - 1)

    @cached_property
    def _bytes(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(0, 256, (PATTERN,), generator=generator, dtype=torch.uint8, device="cpu").to(self.device)

    @cached_property
    def _normal(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(PATTERN, generator=generator, device="cpu").to(self.device)


def _period(pattern: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return as many values of a pattern, from the tensor's offset on, as the tensor has; at most one period."""
    start = crc32(spec.name.encode()) % PATTERN
    end = start + min(torch.Size(spec.shape).numel(), PATTERN)
    return torch.cat((pattern[start:end], pattern[: max(0, end - PATTERN)]))


def _tiled(spec: TensorSpec, period: torch.Tensor) -> torch.Tensor:
    """Return the tensor in its stored dtype by repeating a period, without other allocations of its size."""
    count = torch.Size(spec.shape).numel()
    bits = period.view(BITS[period.itemsize])  # integers, which every device can repeat
    return bits.repeat(-(-count // PATTERN))[:count].view(spec.shape).view(TORCH_DTYPES[spec.dtype])


def _moments(spec: TensorSpec) -> tuple[float, float]:
    """Return the mean and standard deviation for a kind of tensor."""
    leaf = spec.name.removesuffix(".weight").rpartition(".")[2]
    if spec.dtype == "F8_E4M3":
        return 0.0, E4M3_STD
    if leaf.endswith("norm"):
        return 1.0, 0.1
    if leaf.endswith("_scale"):
        return 1.0, 0.1
    if leaf == "embed":
        return 0.0, 1.0
    if leaf == "bias":
        return 0.0, 0.1
    if len(spec.shape) == 2 and leaf != "ape":
        return 0.0, spec.shape[1] ** -0.5
    return 0.0, 0.5
