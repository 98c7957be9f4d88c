"""Whether a result is the truth rounded once: the bound that a second rounding breaks."""

import torch

# of one fp32 operation: half a unit of 24 bits
FP32 = 2.0**-24


def assert_rounded_once(ours: torch.Tensor, exact: torch.Tensor, error: torch.Tensor | float) -> None:
    """`ours` lies between the roundings, to its own dtype, of exact - error and exact + error; exact in fp64."""
    assert ours.shape == exact.shape
    low, high = (exact - error).to(ours.dtype), (exact + error).to(ours.dtype)
    outside = (ours < low) | (ours > high) | ours.isnan()
    assert not outside.any(), f"{int(outside.sum())} of {outside.numel()}, worst by {(ours - exact).abs().max():.3g}"
