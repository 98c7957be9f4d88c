"""Launches that overlap: the next kernel is set up, and may load what never changes, while the one before it ends.

NVIDIA calls it programmatic dependent launch (PTX ISA, griddepcontrol), from sm_90 on.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def overlap(x: torch.Tensor) -> dict[str, Any]:
    """Launch options of a kernel over x that calls `wait_for_inputs`: for GPUs that can, overlapped."""
    if x.device.type == "cuda" and _can_overlap(x.device):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@cache
def _can_overlap(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Returns when the kernels before have ended. Every program calls it once, before it loads what an earlier kernel
    may have written and before it stores anything."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
