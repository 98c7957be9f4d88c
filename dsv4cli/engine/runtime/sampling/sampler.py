"""Samples a token from logits: greedy, or at a temperature from the top-p nucleus."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from dsv4cli.engine.settings import Sampling
from dsv4cli.engine.system.device import upload
from dsv4cli.errors import UnsoundResult
from dsv4cli.kernels.sampling import draw, draw_nucleus, greedy, limit_of, noise


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


Kind = Literal["greedy", "draw", "nucleus"]


@dataclass(frozen=True)
class Draws:
    """How each row of a step is sampled. The numbers are on the device, so that a graph can hold them.

    Attributes:
        seeds: int64 [R].
        positions: int64 [R], the number of tokens before the sampled one.
        temperatures: fp32 [R]; 0 is greedy.
        limits: int64 [R], of each row's nucleus (kernels/sampling.limit_of).
        kind: what the rows need together: "greedy" if all are greedy, "draw" if none has a nucleus.
    """

    seeds: torch.Tensor
    positions: torch.Tensor
    temperatures: torch.Tensor
    limits: torch.Tensor
    kind: Kind

    @classmethod
    def of(cls, samplings: Sequence[Sampling], positions: Sequence[int], device: torch.device | str) -> "Draws":
        """Return the draws of rows with these samplings, copied to the device without waiting."""
        return cls.within(upload(packed(samplings, positions), device), kind_of(samplings))

    @classmethod
    def within(cls, numbers: torch.Tensor, kind: Kind) -> "Draws":
        """Return the draws that view these numbers, int64 [4, R], in the layout of `packed`."""
        temperatures = numbers[3].view(torch.float32)[: numbers.shape[1]]
        return cls(numbers[0], numbers[1], temperatures, numbers[2], kind)


def packed(samplings: Sequence[Sampling], positions: Sequence[int]) -> torch.Tensor:
    """Return the numbers of rows on the host: int64 [4, R], seeds, positions, limits, and temperatures as fp32."""
    seeds, limits = [one.seed for one in samplings], [limit_of(one.top_p) for one in samplings]
    numbers = torch.tensor([seeds, [*positions], limits, [0] * len(samplings)], dtype=torch.int64, device="cpu")
    numbers[3].view(torch.float32)[: len(samplings)] = torch.tensor(
        [one.temperature for one in samplings], device="cpu"
    )
    return numbers


def kind_of(samplings: Iterable[Sampling]) -> Kind:
    """Return the kind of sampling that rows with these samplings need together."""
    warm = [one for one in samplings if one.temperature > 0]
    if not warm:
        return "greedy"
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
    return draw_nucleus(logits, made, draws.temperatures, draws.limits)
