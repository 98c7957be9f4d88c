"""How far an operation may be from its reference in fp32 on the same inputs, and why."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Bound:
    """limit: of the relative L2 error; 0 means equal, bit for bit."""

    limit: float
    reason: str


EXACT = Bound(0.0, "codes or indices: equal")
FP32 = Bound(1e-5, "fp32 sums in another order; TF32 would be off by 5e-4")
ONE_ROUNDING = Bound(2**-8, "one rounding to bf16 is at most 2^-9 of each value; the rest is the order of sums")
FOUR_ROUNDINGS = Bound(2**-7, "four roundings to bf16, each at most 2^-9 of the value")
ATTENTION = Bound(2**-7, "probabilities and output are rounded to bf16, each at most 2^-9 of the value")
ENTRIES = Bound(2**-4, "a value at the edge of two codes falls either way, a third apart in e2m1: one in a hundred")
ROTATIONS = Bound(2**-21, "indices: equal; sines and cosines of the same fp32 angles: two units of the last bit each")
NOISE = Bound(2**-23, "logarithms in fp64, rounded once to fp32: a unit of the last bit")
SCORES = Bound(2**-6, "each head's product is rounded twice, and heads of both signs cancel")
# measured 0.007 to 0.021 at the shapes of tiny, nano and Flash
EXPERTS = Bound(2**-5, "inputs of w2 at the edge of two e4m3 codes, an eighth apart, fall either way: one in thirty")


def deviation(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], bound: Bound) -> float:
    """The largest relative L2 error of the outputs; where they must be equal, as integers always must, 0 or infinity.

    NaN stays NaN.
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
