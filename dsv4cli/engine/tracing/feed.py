"""Replaces a block's input streams by recorded or perturbed ones, and computes the size of rounding errors."""

import torch

from dsv4cli.engine.tracing.manifest import TraceManifest
from dsv4cli.engine.tracing.observer import Mover, Watched
from dsv4cli.engine.tracing.recording import Recording


class Jitter:
    """Perturbs numbers by up to `size`, relative, as differently rounded sums would.

    Results are rounded stochastically to the dtype.
    """

    def __init__(self, size: float, seed: int = 0) -> None:
        self.size, self.seed = size, seed
        self._generator: torch.Generator | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, bf16 or fp32 of any shape, perturbed, in its dtype."""
        moved = x.float() * (1 + self.size * (2 * self._random(x) - 1))
        if x.dtype == torch.float32:
            return moved
        # bf16 is the upper half of fp32; the lower half is the fraction towards the next bf16 value
        bits = moved.view(torch.int32) + (self._random(x) * 2**16).int()
        return (bits & ~0xFFFF).view(torch.float32).to(x.dtype)

    def _random(self, x: torch.Tensor) -> torch.Tensor:
        if self._generator is None:
            self._generator = torch.Generator(x.device).manual_seed(self.seed)  # the same numbers on every rank
        return torch.rand(x.shape, generator=self._generator, device=x.device)


class RecordedStreams:
    """Feeds the streams of a recording for its tokens, so that each half of a block is compared independently."""

    def __init__(self, recording: Recording, jitter: Jitter | None = None, short: Mover | None = None) -> None:
        self.recording, self.jitter, self.short = recording, jitter, short
        self._ids = [torch.tensor(text.ids, device="cpu") for text in recording.manifest.texts]

    def streams(self, layer: int, stage: str, own: torch.Tensor, watched: Watched) -> torch.Tensor:
        """Return own [T, N, D] with the recorded rows in place. Rows of rejected draft tokens are kept."""
        if stage not in self.recording.stages(layer):
            return own
        manifest, (start, count) = self.recording.manifest, (watched.position, watched.count)
        first = start + sum(manifest.rows_of(text, "token", layer) for text in manifest.texts[: watched.text])
        rows = self.recording.rows(layer, stage, first, first + count).to(own)
        rows = rows if self.jitter is None else self.jitter(rows)
        known = self._ids[watched.text][start : start + count].to(own.device)
        same = (known == watched.ids) | (known < 0)  # below 0: a sampled token, not known in advance
        streams = own.clone()
        streams[watched.rows] = torch.where(same[:, None, None], rows, own[watched.rows])
        return streams


class MovedStreams:
    """Feeds a block's own streams, perturbed by a jitter, to show how far rounding errors grow in a whole forward pass.

    This perturbs them more than short sums do.
    """

    short = None

    def __init__(self, jitter: Jitter) -> None:
        self.jitter = jitter

    def streams(self, layer: int, stage: str, own: torch.Tensor, watched: Watched) -> torch.Tensor:
        """Return own [T, N, D], perturbed."""
        return self.jitter(own)


# half a step, relative, of the formats that are coarser than the rounding error of sums
HALF_STEPS = {"bfloat16": 2**-9, "float16": 2**-12}


def format_rounding(manifest: TraceManifest) -> float:
    """Return the relative error of one more rounding to the dtype of activations."""
    return max(HALF_STEPS.get(manifest.dtype, 0.0), sum_rounding(manifest))


def sum_rounding(manifest: TraceManifest) -> float:
    """Return the relative difference of fp32 sums in different orders, over a block's longest row.

    Each of the K additions rounds by up to 2^-24, and the errors add up as √K.
    """
    return float((manifest.streams * manifest.hidden) ** 0.5 * 2**-24)


def rounding_between(one: TraceManifest, other: TraceManifest) -> float:
    """Return the relative rounding difference between two numerics.

    If only one of them rounds to a format, it is half a step of that format.
    """
    if (one.simulate, one.rounded) != (other.simulate, other.rounded):
        return 2**-4  # half a step of e4m3, which has three mantissa bits
    if one.dtype != other.dtype:
        return HALF_STEPS["bfloat16"]
    return sum_rounding(one)
