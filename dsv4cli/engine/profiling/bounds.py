"""Error bounds: how far an operation may deviate from its fp32 reference on the same inputs, and why."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Bound:
    """A limit on the relative L2 error, and the reason for its value. A limit of 0 means bit-exact."""

    limit: float
    reason: str


EXACT = Bound(0.0, "codes and indices must be equal")
FP32 = Bound(1e-5, "fp32 sums in a different order; TF32 would deviate by 5e-4")
ONE_ROUNDING = Bound(2**-8, "one rounding to bf16: at most 2^-9 of each value; the rest is summation order")
FOUR_ROUNDINGS = Bound(2**-7, "four roundings to bf16, each at most 2^-9 of the value")
ATTENTION = Bound(2**-7, "probabilities and output are rounded to bf16, each at most 2^-9 of the value")
ENTRIES = Bound(2**-4, "1 % of values are near the midpoint of two e2m1 codes, a third apart, and round either way")
ROTATIONS = Bound(2**-21, "indices must be equal; sines and cosines of the same fp32 angles may differ by 2 ulp each")
NOISE = Bound(2**-23, "fp64 logarithms, rounded once to fp32: 1 ulp")
SCORES = Bound(2**-6, "each head's product is rounded twice, and heads of opposite signs cancel")
# measured: 0.007 to 0.021 at the shapes of tiny, nano and Flash
EXPERTS = Bound(
    2**-5, "3 % of w2 inputs are near the midpoint of two e4m3 codes, an eighth apart, and round either way"
)


def deviation(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], bound: Bound) -> float:
    """Return the largest relative L2 error of the outputs.

    Outputs that must be equal (integers, or a limit of 0) count as 0 if they are and as infinity if not. An output that
    is not finite counts as infinity.
    """
    assert len(actual) == len(expected)
    return max((_one(ours, theirs, bound) for ours, theirs in zip(actual, expected, strict=True)), default=0.0)


def _one(actual: torch.Tensor, expected: torch.Tensor, bound: Bound) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    if not bound.limit or not actual.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else float("inf")
    ours, theirs = actual.double(), expected.double()
    if not bool(ours.isfinite().all()):
        return float("inf")
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-30)).item()
