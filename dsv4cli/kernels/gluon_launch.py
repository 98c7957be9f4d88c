"""Launches of kernels in Gluon, Triton's language in which a kernel says itself what each warp does.

Gluon is experimental: what imports this asks `launch.takes_gluon` first.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dsv4cli.kernels.launch import KINDS, Kernel

# of what descriptors describe
NAMES = {torch.float8_e4m3fn: "float8e4nv", torch.bfloat16: "bfloat16"}


def gluon_launched(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`launch.launched` of a kernel in Gluon."""
    return partial(gluon_launched, **options) if function is None else GluonKernel(function, **options)


class GluonKernel(Kernel, GluonJITFunction):  # type: ignore[misc] # Triton has no types
    """A kernel in Gluon, and the ways in which it was called so far."""

    # what a descriptor's layout is follows from its dtype and block, which the kernel is known by
    kinds = KINDS | {TensorDescriptor: "descriptor"}


def gluon_described(matrix: torch.Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """`launch.described` of a matrix with consecutive columns: its blocks lie in shared memory as tensor cores read
    them."""
    found = TensorDescriptor.__new__(TensorDescriptor)
    found.base, found.shape, found.strides, found.block_shape = matrix, matrix.shape, matrix.stride(), [*block]
    found.layout = _layout(matrix.dtype, block)
    return found


@cache
def _layout(dtype: torch.dtype, block: tuple[int, int]) -> Any:
    return gl.NVMMASharedLayout.get_default_for([*block], getattr(gl, NAMES[dtype]))
