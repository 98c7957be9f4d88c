"""RMS norms in Triton: each program processes one or a few whole rows."""

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.launch import cdiv, launched
from dsv4cli.kernels.pdl import overlap, wait_for_inputs
from dsv4cli.kernels.rows import rows, tile


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    given, y = rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count, width = given.shape
    per_program, columns, warps = tile(width)
    if count:
        _rms_norm[(cdiv(count, per_program),)](
            given, weight.contiguous(), y, count, given.stride(0), eps, width, per_program, columns,
            num_warps=warps, **overlap(x),
        )  # fmt: skip
    return y


@triton.jit
def normed(values, factor, eps, WIDTH: tl.constexpr):
    """Norm rows of WIDTH values (fp32 [n, columns], padded with zeros) and multiply by factor, without rounding."""
    mean = tl.sum(values * values, 1, keep_dims=True) * (1.0 / WIDTH)
    return factor * (values * tl.rsqrt(mean + eps))


@triton.jit
def normed_head(values, eps, WIDTH: tl.constexpr, dtype: tl.constexpr):
    """Norm rows without a factor, rounding each operation except the last product to dtype."""
    square = (values * values).to(dtype).to(tl.float32)
    mean = (tl.sum(square, 1, keep_dims=True) * (1.0 / WIDTH)).to(dtype).to(tl.float32)
    return values * tl.rsqrt((mean + eps).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)


@launched(do_not_specialize=["count"])
def _rms_norm(
    x,  # [count, WIDTH]
    weight,  # [WIDTH]
    y,  # as x, contiguous
    count,
    stride,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None]
    inside = (row < count) & (column < WIDTH)
    factor = tl.load(weight + column, column < WIDTH, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    values = tl.load(x + row * stride + column, inside, other=0.0).to(tl.float32)  # [ROWS, COLUMNS]
    tl.store(y + row * WIDTH + column, normed(values, factor, eps, WIDTH).to(y.dtype.element_ty), inside)


def head_norm(q: torch.Tensor, eps: float) -> torch.Tensor:
    given, y = rows(q), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    count, width = given.shape
    per_program, columns, warps = tile(width)
    if count:
        _head_norm[(cdiv(count, per_program),)](
            given, y, count, given.stride(0), eps, width, per_program, columns, num_warps=warps, **overlap(q)
        )
    return y


@launched(do_not_specialize=["count"])
def _head_norm(
    q,  # [count, WIDTH]
    y,  # as q, contiguous
    count,
    stride,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None]
    inside = (row < count) & (column < WIDTH)
    wait_for_inputs(OVERLAP)
    values = tl.load(q + row * stride + column, inside, other=0.0).to(tl.float32)  # [ROWS, COLUMNS]
    dtype = y.dtype.element_ty
    tl.store(y + row * WIDTH + column, normed_head(values, eps, WIDTH, dtype).to(dtype), inside)
