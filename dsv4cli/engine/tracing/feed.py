"""What blocks are given in place of what the block before has computed, and how far one rounding moves it."""

import torch

from dsv4cli.engine.tracing.manifest import TraceManifest
from dsv4cli.engine.tracing.observer import Mover, Watched
from dsv4cli.engine.tracing.recording import Recording


class Jitter:
    """Moves numbers as far as sums that are rounded otherwise would: by `size`, relative, and then to a neighbour in
    their own format as often as that is nearer."""

    def __init__(self, size: float, seed: int = 0) -> None:
        self.size, self.seed = size, seed
        self._generator: torch.Generator | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x of any shape, bf16 or fp32, in its dtype."""
        moved = x.float() * (1 + self.size * (2 * self._random(x) - 1))
        if x.dtype == torch.float32:
            return moved
        # bf16 is the upper half of fp32: the lower half says how near the next one is
        bits = moved.view(torch.int32) + (self._random(x) * 2**16).int()
        return (bits & ~0xFFFF).view(torch.float32).to(x.dtype)

    def _random(self, x: torch.Tensor) -> torch.Tensor:
        if self._generator is None:
            self._generator = torch.Generator(x.device).manual_seed(self.seed)  # the same numbers on every rank
        return torch.rand(x.shape, generator=self._generator, device=x.device)


class RecordedStreams:
    """The streams of a recording, for tokens that it has at that place: each half of a block is then compared by
    itself."""

    def __init__(self, recording: Recording, jitter: Jitter | None = None, short: Mover | None = None) -> None:
        self.recording, self.jitter, self.short = recording, jitter, short
        self._ids = [torch.tensor(text.ids, device="cpu") for text in recording.manifest.texts]

    def streams(self, layer: int, stage: str, own: torch.Tensor, watched: Watched) -> torch.Tensor:
        """own [T, N, D] with the recorded rows in it. A draft that was wrong keeps its own."""
        if stage not in self.recording.stages(layer):
            return own
        manifest, (start, count) = self.recording.manifest, (watched.position, watched.count)
        first = start + sum(manifest.rows_of(text, "token", layer) for text in manifest.texts[: watched.text])
        rows = self.recording.rows(layer, stage, first, first + count).to(own)
        rows = rows if self.jitter is None else self.jitter(rows)
        known = self._ids[watched.text][start : start + count].to(own.device)
        same = (known == watched.ids) | (known < 0)  # below 0: what is drawn, not known beforehand
        streams = own.clone()
        streams[watched.rows] = torch.where(same[:, None, None], rows, own[watched.rows])
        return streams


class MovedStreams:
    """A block's own streams, moved by a jitter: how far rounding comes in a whole forward pass. That moves them further
    than short sums do."""

    short = None

    def __init__(self, jitter: Jitter) -> None:
        self.jitter = jitter

    def streams(self, layer: int, stage: str, own: torch.Tensor, watched: Watched) -> torch.Tensor:
        """own [T, N, D], moved."""
        return self.jitter(own)


# half a step, relative, of formats that are coarser than a sum's own rounding
HALF_STEPS = {"bfloat16": 2**-9, "float16": 2**-12}


def format_rounding(manifest: TraceManifest) -> float:
    """How far, relative, one more rounding to the activations' format moves a value."""
    return max(HALF_STEPS.get(manifest.dtype, 0.0), sum_rounding(manifest))


def sum_rounding(manifest: TraceManifest) -> float:
    """How far, relative, fp32 sums over a block's longest row lie apart when they are taken in another order: each of
    its K additions rounds by up to 2^-24, and their errors add up as √K."""
    return float((manifest.streams * manifest.hidden) ** 0.5 * 2**-24)


def rounding_between(one: TraceManifest, other: TraceManifest) -> float:
    """The same for two numerics: where only one of them rounds to a format, that format's half step."""
    if (one.simulate, one.rounded) != (other.simulate, other.rounded):
        return 2**-4  # e4m3: three bits behind the first
    if one.dtype != other.dtype:
        return HALF_STEPS["bfloat16"]
    return sum_rounding(one)
