"""Numbers as tensors without dimensions, for plain PyTorch."""

from functools import cache

import torch


@cache
def scalar(value: float) -> torch.Tensor:
    """Return a number as an fp32 tensor of the CPU, for operations on fp32 tensors of any device.

    On a CPU an operation of a few values takes 0.9 us with it and 2.0 us with a Python number, of which PyTorch makes a
    tensor each time. The result has the same bits.
    """
    with torch.inference_mode(False):  # else no gradient could be recorded with it
        return torch.tensor(value, dtype=torch.float32, device="cpu")
