"""Linears in Triton: gemv.py, few_rows.py and swap_ab.py stream weights for few rows, tiled.py fills tiles for many."""

from collections.abc import Sequence
from types import ModuleType

import torch

from dsv4cli.kernels.block_scale.kernel import fp8_round
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.formats import FP8_BLOCK
from dsv4cli.kernels.gemm.kernel import few_rows, gemv, ggml, swap_ab, tiled
from dsv4cli.kernels.gemm.kernel.dequant import Norm
from dsv4cli.kernels.norm import kernel as norm
from dsv4cli.kernels.rows import planned_rows
from dsv4cli.kernels.stored_matrix import StoredMatrix

# most rows that are multiplied without tensor cores; fewer for FP4, which is decoded again for every two rows
FEW, FEW_FP4 = 16, 2


def _kernel_module(x: torch.Tensor, weight: torch.Tensor) -> ModuleType:
    """Return the module that multiplies x [T, K] or [T, G, K] by this weight."""
    if weight.dtype == torch.uint8:
        raise KernelUnsupported("the Triton linears support NVFP4 weights one at a time, with scale_2")
    if swap_ab.takes(x[:, None] if x.ndim == 2 else x, weight):
        return gemv
    return gemv if planned_rows(x.shape[0], 1) <= (FEW_FP4 if weight.dtype == torch.int8 else FEW) else tiled


def _by_blocks(x: torch.Tensor, matrix: StoredMatrix) -> bool:
    """Return whether the kernels of GGUF blocks multiply x [T, ...] by this matrix: blocks, and fp16 for many rows.

    Those have inputs in fp16, so that each weight is multiplied once and not as two bf16 numbers.
    """
    return matrix.block_type is not None or (matrix.weight.dtype == torch.float16 and planned_rows(len(x), 1) > FEW)


def linear(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    weight, scale, scale_2 = matrix
    if _by_blocks(x, matrix):
        return ggml.linears(x, [matrix], [x.dtype])[0]
    if scale_2 is not None:
        assert scale is not None
        # no known checkpoint has linears in NVFP4: this is exact, and takes as long as writing the weights in bf16
        return (linear_fp32(x, StoredMatrix(tiled.widened(weight, scale))) * scale_2).to(x.dtype)
    return _kernel_module(x, weight).linear(x, matrix)


def rounded_linear(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    if matrix.scale_2 is not None:
        return linear(fp8_round(x, FP8_BLOCK), matrix)
    return _kernel_module(x, matrix.weight).rounded_linear(x, matrix)


def linear_fp32(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    if _by_blocks(x, matrix):
        return ggml.linears(x, [matrix], [torch.float32])[0]
    return _kernel_module(x, matrix.weight).linear_fp32(x, matrix)


def grouped_linear(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    if _by_blocks(x, matrix):
        return ggml.grouped_linear(x, matrix)
    return _kernel_module(x, matrix.weight).grouped_linear(x, matrix)


def linears(
    x: torch.Tensor,
    rounded: Sequence[StoredMatrix],
    plain: Sequence[StoredMatrix],
    fp32: Sequence[StoredMatrix],
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    if any(_by_blocks(x, matrix) for matrix in (*plain, *fp32)):
        return _linears_of_blocks(x, rounded, plain, fp32)
    modules = {_kernel_module(x, one.weight) for one in (*rounded, *plain, *fp32)}
    if len(modules) == 1:
        return modules.pop().linears(x, rounded, plain, fp32)
    return (
        [rounded_linear(x, matrix) for matrix in rounded],
        [linear(x, matrix) for matrix in plain],
        [linear_fp32(x, matrix) for matrix in fp32],
    )


def _linears_of_blocks(
    x: torch.Tensor,
    rounded: Sequence[StoredMatrix],
    plain: Sequence[StoredMatrix],
    fp32: Sequence[StoredMatrix],
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Compute `linears` with some matrices that the kernels of GGUF blocks multiply."""
    blocks = [(one, x.dtype) for one in plain if _by_blocks(x, one)]
    blocks += [(one, torch.float32) for one in fp32 if _by_blocks(x, one)]
    found = iter(ggml.linears(x, *zip(*blocks, strict=True)))
    others = [[one for one in matrices if not _by_blocks(x, one)] for matrices in (plain, fp32)]
    of_rounded, *rest = linears(x, rounded, *others)
    of_plain, of_fp32 = (
        [next(found) if _by_blocks(x, one) else ys.pop(0) for one in matrices]
        for matrices, ys in zip((plain, fp32), rest, strict=True)
    )
    return of_rounded, of_plain, of_fp32


def normed_linears(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    rounded: Sequence[StoredMatrix],
    plain: Sequence[StoredMatrix],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    matrices = (*rounded, *plain)
    # otherwise every program would repeat too much of the norm (H200, wq_b of 16 rows: 35 us instead of 13 us plus the
    # launch of a norm)
    rows = planned_rows(x.shape[0])
    if any(_by_blocks(x, matrix) for matrix in matrices):
        once = False
    elif rows == 1:
        once = all(_kernel_module(x, matrix.weight) is gemv for matrix in matrices)
    else:
        once = rows > 1 and all(few_rows.takes(x[:, None], matrix) for matrix in matrices)
    if once:
        return gemv.linears(x, rounded, plain, (), Norm(norm_weight.contiguous(), eps))[:2]
    return linears(norm.rms_norm(x, norm_weight, eps), rounded, plain, ())[:2]
