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
    """Returns when the kernels before have ended. Every program calls it once, before it stores anything and before it
    loads what the kernel just before may have written.

    The next kernel starts when all programs have returned from here: what was written before the kernel just before it
    is there for it, if it is not taken from a cache that may be older (`.cg`). Were it started earlier, its programs
    would take the places of some that are still to start.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
