"""Launches that overlap: the next kernel is set up, and may load what never changes, while the one before it ends.

NVIDIA calls it programmatic dependent launch (PTX ISA, griddepcontrol), from sm_90 on.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4cli.kernels.card import HOPPER, is_from

# up to how many tokens it pays for kernels that have many programs for a token (H200: queries and keys of 4,096 tokens
# 163 us overlapped, 132 not)
FEW = 64


def overlap(x: torch.Tensor) -> dict[str, Any]:
    """Launch options of a kernel over x that calls `wait_for_inputs`: overlapped on GPUs that can."""
    if x.device.type == "cuda" and is_from(x.device, HOPPER):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


def overlap_of_few(x: torch.Tensor, tokens: int) -> dict[str, Any]:
    """The same, not overlapped over more than FEW tokens."""
    return overlap(x) if tokens <= FEW else {"OVERLAP": False}


def overlap_beside(x: torch.Tensor, registers: int) -> dict[str, Any]:
    """The same for a kernel whose programs take no more registers a thread: where that leaves room on every
    multiprocessor, the next kernel's programs start one beside each, and do not crowd where the first of these end."""
    options = overlap(x)
    return options | {"maxnreg": registers} if options["OVERLAP"] else options


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Waits until the kernels before this one have ended, then lets the next one start.

    Every program calls it once, before it stores anything and before it loads what the kernel just before may have
    written. The next kernel starts when all programs have returned from here, and not earlier, for it would take the
    place of programs that are still to start. So even before it waits itself it may load what the kernels up to the
    last but one have written, if it passes by a cache that may be older (`.cg`).
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
