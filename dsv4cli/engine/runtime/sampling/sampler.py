"""Samples a token from logits: greedy, or at a temperature with top-k, min-p and top-p."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from dsv4cli.engine.settings import Sampling
from dsv4cli.engine.system.device import upload
from dsv4cli.errors import UnsoundResult
from dsv4cli.kernels.sampling import draw, draw_nucleus, gap_of, greedy, keep_likeliest, limit_of, noise


def check_finite(logits: torch.Tensor) -> None:
    """Raise UnsoundResult if any of the logits fp32 [R, V] is not finite. Waits for the device."""
    if not bool(logits.isfinite().all()):
        raise not_finite()


def not_finite() -> UnsoundResult:
    """Return the error for logits that are not finite."""
    return UnsoundResult(
        "the model's logits are not finite: its weights or this machine's arithmetic are wrong",
        "compare the checksums of the weight files with the publisher's, or try another --device or --dtype",
    )


# the largest top-k that is passed on: more than any vocabulary has
MOST_COUNT = 2**31 - 1
Kind = Literal["greedy", "draw", "nucleus", "filtered"]


@dataclass(frozen=True)
class Draws:
    """How each row of a step is sampled. The numbers are on the device, so that a graph can hold them.

    Attributes:
        seeds: int64 [R].
        positions: int64 [R], the number of tokens before the sampled one.
        temperatures: fp32 [R]; 0 is greedy.
        limits: int64 [R], of each row's nucleus (kernels/sampling.limit_of).
        counts: int64 [R], each row's top-k, and
        gaps: fp32 [R], what follows from its min-p (both: kernels/sampling.keep_likeliest).
        kind: what the rows need together: "greedy" if all are greedy, "draw" if none has a nucleus, "filtered" if any
            has top-k or min-p.
    """

    seeds: torch.Tensor
    positions: torch.Tensor
    temperatures: torch.Tensor
    limits: torch.Tensor
    counts: torch.Tensor
    gaps: torch.Tensor
    kind: Kind

    @classmethod
    def of(cls, samplings: Sequence[Sampling], positions: Sequence[int], device: torch.device | str) -> "Draws":
        """Return the draws of rows with these samplings, copied to the device without waiting."""
        return cls.within(upload(packed(samplings, positions), device), kind_of(samplings))

    @classmethod
    def within(cls, numbers: torch.Tensor, kind: Kind) -> "Draws":
        """Return the draws that view these numbers, int64 [5, R], in the layout of `packed`."""
        temperatures, gaps = numbers[4].view(torch.float32).view(2, -1)
        return cls(numbers[0], numbers[1], temperatures, numbers[2], numbers[3], gaps, kind)


def packed(samplings: Sequence[Sampling], positions: Sequence[int]) -> torch.Tensor:
    """Return the numbers of rows on the host: int64 [5, R].

    They are seeds, positions, limits, counts, and as fp32 all temperatures, then all gaps. Counts and gaps are 0, and
    not to be used, if no row has top-k or min-p.
    """
    seeds, limits = [one.seed for one in samplings], [limit_of(one.top_p) for one in samplings]
    counts, reals = [0] * len(samplings), [one.temperature for one in samplings]
    if any(one.top_k or one.min_p for one in samplings):
        # above any vocabulary all counts mean the same; a greedy row needs no filter
        counts = [min(one.top_k, MOST_COUNT) if one.temperature else 0 for one in samplings]
        reals += [gap_of(one.min_p if one.temperature else 0.0, one.temperature) for one in samplings]
    none = [0] * len(samplings)
    numbers = torch.tensor([seeds, [*positions], limits, counts, none], dtype=torch.int64, device="cpu")
    numbers[4].view(torch.float32)[: len(reals)] = torch.tensor(reals, dtype=torch.float32, device="cpu")
    return numbers


def kind_of(samplings: Iterable[Sampling]) -> Kind:
    """Return the kind of sampling that rows with these samplings need together."""
    warm = [one for one in samplings if one.temperature > 0]
    if not warm:
        return "greedy"
    if any(one.filters for one in warm):
        return "filtered"
    return "nucleus" if any(one.top_p < 1 for one in warm) else "draw"


def sample(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Sample one token per row: fp32 [R, V] -> int64 [R].

    Gumbel-max as in the official generate.py: argmax(probability / exponential noise). A row's token depends only on
    its
    own logits and numbers, not on other rows or on the device.
    """
    if draws.kind == "greedy":
        return greedy(logits)
    made = noise(draws.seeds, draws.positions, logits.shape[1])
    if draws.kind == "draw":
        return draw(logits, made, draws.temperatures)
    if draws.kind == "filtered":
        logits = keep_likeliest(logits, draws.counts, draws.gaps)
    return draw_nucleus(logits, made, draws.temperatures, draws.limits)
