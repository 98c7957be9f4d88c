"""Overlapping launches: a kernel starts up, and may load data that never changes, while the previous kernel finishes.

NVIDIA calls this programmatic dependent launch (PTX ISA, griddepcontrol); it needs sm_90 or newer.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4cli.kernels.card import HOPPER, is_from

# most tokens for which overlap helps kernels with many programs per token (H200, queries and keys of 4,096 tokens:
# 163 us overlapped, 132 us not)
FEW = 64


def overlap(x: torch.Tensor) -> dict[str, Any]:
    """Return the launch options of a kernel over x that calls `wait_for_inputs`: overlapped if the GPU supports it."""
    if x.device.type == "cuda" and is_from(x.device, HOPPER):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


def overlap_of_few(x: torch.Tensor, tokens: int) -> dict[str, Any]:
    """Return the options of `overlap` for up to FEW tokens; more are not overlapped."""
    return overlap(x) if tokens <= FEW else {"OVERLAP": False}


def overlap_beside(x: torch.Tensor, registers: int) -> dict[str, Any]:
    """Return the options of `overlap`, with at most this many registers per thread.

    If that leaves registers free on every multiprocessor, one program of the next kernel starts there next to each
    program of this one. The next kernel's programs then do not crowd the multiprocessors that finish first.
    """
    options = overlap(x)
    return options | {"maxnreg": registers} if options["OVERLAP"] else options


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Wait until the previous kernels have finished, then let the next kernel start.

    Every program calls this once, before it stores anything and before it loads anything that the previous kernel may
    have written. The next kernel starts after all programs have returned from here; an earlier start would take the
    multiprocessors of programs that have not started yet. A kernel may therefore load, before it waits itself, what the
    kernels before the previous one have written, if it bypasses a cache that may be stale (`.cg`).
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
