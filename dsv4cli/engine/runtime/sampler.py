"""From logits to a token: greedy, or drawn at a temperature from the nucleus of probability top_p."""

from collections.abc import Sequence

import torch

from dsv4cli.engine.settings import Sampling
from dsv4cli.errors import UnsoundResult
from dsv4cli.kernels.sampling import draw, greedy, noise


def check_finite(logits: torch.Tensor) -> None:
    """Raises UnsoundResult when a logit is not a finite number: fp32 [R, V]. Waits for the device."""
    if not bool(finite(logits).all()):
        raise not_finite()


def finite(logits: torch.Tensor) -> torch.Tensor:
    """Whether all logits of a row are finite numbers: fp32 [R, V] -> bool [R]."""
    return logits.isfinite().all(-1)


def not_finite() -> UnsoundResult:
    """What to raise about logits that are not."""
    return UnsoundResult(
        "the model's logits are not finite: its weights or this machine's arithmetic are wrong",
        "compare the checksums of the weight files with the publisher's, or try another --device or --dtype",
    )


def sample(logits: torch.Tensor, sampling: Sampling, seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """One token per row: fp32 [R, V], a seed per row and how many tokens its sequence has -> int64 [R].

    Gumbel-max as in the official generate.py: argmax(probability / exponential noise). A row's choice depends on its
    own logits, seed and position only, not on the other rows and not on the device.
    """
    if sampling.temperature == 0:
        return greedy(logits)
    numbers = torch.tensor([[*seeds], [*positions]]).to(logits.device, non_blocking=True)
    return draw(logits, noise(numbers[0], numbers[1], logits.shape[1]), sampling.temperature, sampling.top_p)
