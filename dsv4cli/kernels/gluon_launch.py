"""Launches of kernels in Gluon, the Triton dialect in which a kernel specifies the work of each warp.

Gluon is experimental: check `launch.takes_gluon` before you import this module.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dsv4cli.kernels.launch import KINDS, Kernel

# Gluon's names of the dtypes that descriptors support
NAMES = {
    torch.float8_e4m3fn: "float8e4nv", torch.bfloat16: "bfloat16", torch.int8: "int8", torch.int32: "int32",
    torch.float16: "float16", torch.float32: "float32",
}  # fmt: skip


def gluon_launched(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate a Gluon kernel as `launch.launched` does a Triton kernel."""
    return partial(gluon_launched, **options) if function is None else GluonKernel(function, **options)


class GluonKernel(Kernel, GluonJITFunction):  # type: ignore[misc] # Triton has no types
    """A Gluon kernel and its call signatures so far."""

    # a descriptor's layout follows from its dtype and block shape, which are part of the kernel's key
    kinds = KINDS | {TensorDescriptor: "descriptor"}


def gluon_described(matrix: torch.Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """Return `launch.described` of a matrix with consecutive columns, in the shared-memory layout of tensor cores."""
    found = TensorDescriptor.__new__(TensorDescriptor)
    found.base, found.shape, found.strides, found.block_shape = matrix, matrix.shape, matrix.stride(), [*block]
    found.layout = gluon_layout(matrix.dtype, block)
    return found


@cache
def gluon_layout(dtype: torch.dtype, block: tuple[int, int]) -> Any:
    """Return the shared-memory layout of tensor cores for blocks of a matrix."""
    return gl.NVMMASharedLayout.get_default_for([*block], getattr(gl, NAMES[dtype]))
