"""Linears over GGUF blocks, decoded in registers: for few rows each block is decoded once, for more once per tile.

For many bf16 rows, `ggml_fp16` decodes each matrix once to memory.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
import triton.language as tl

from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.gemm.kernel import ggml_fp16
from dsv4cli.kernels.gemm.kernel.dequant import first_programs, one_of
from dsv4cli.kernels.ggml import int8
from dsv4cli.kernels.ggml.kernel.octets import KernelBlocks, blocks_of, has_codes
from dsv4cli.kernels.ggml.kernel.products import GROUP, ROWS, few_products, many_products, operand_rows, operand_tokens
from dsv4cli.kernels.launch import cdiv, launched
from dsv4cli.kernels.pdl import overlap
from dsv4cli.kernels.stored_matrix import StoredMatrix

# most rows of x that are multiplied as few
FEW = ggml_fp16.LEAST - 1
# warps of all programs for few rows together; most warps of a program, which share the columns; groups of 32 columns
# that each loads at a time
ALL_WARPS, WARPS, EACH = 3072, 16, 8
# rows, warps and octets at a time of a program for many rows
TILE_ROWS, TILE_WARPS, TILE_OCTETS = 64, 4, 8


def linears(x: torch.Tensor, matrices: Sequence[StoredMatrix], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Return ref.linear of x [T, K] and each matrix in its dtype of `dtypes`: that of x, or fp32.

    Matrices of one type are multiplied in one launch.
    """
    return [y[:, 0] for y in _multiply(x[:, None], matrices, dtypes)]


def grouped_linear(x: torch.Tensor, matrix: StoredMatrix) -> torch.Tensor:
    """Return ref.grouped_linear of x [T, G, K] and a matrix [G * N, K]."""
    return _multiply(x, [matrix], [x.dtype])[0]


def _multiply(x: torch.Tensor, matrices: Sequence[StoredMatrix], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    tokens, groups, width = x.shape
    if x.dtype not in (torch.bfloat16, torch.float32) or x.stride(-1) != 1:
        raise KernelUnsupported(f"the Triton linear supports bf16 and fp32 rows, not {x.dtype} {tuple(x.shape)}")
    assert all(matrix.columns == width for matrix in matrices)
    ys = [
        x.new_empty(tokens, groups, matrix.weight.shape[0] // groups, dtype=dtype)
        for matrix, dtype in zip(matrices, dtypes, strict=True)
    ]
    if not tokens:
        return ys
    alike = defaultdict[tuple[str, int], list[tuple[KernelBlocks, torch.Tensor]]](list)
    for matrix, y in zip(matrices, ys, strict=True):
        blocks = blocks_of(matrix)
        alike[blocks.kind, blocks.height].append((blocks, y))
    for (kind, _), pairs in alike.items():
        if suits_few(x, kind) and int8.takes(x, width):
            from dsv4cli.kernels.gemm.kernel import ggml_int8  # needs Gluon

            ggml_int8.multiply(x, kind, pairs)
        elif suits_few(x, kind) and tokens <= FEW:
            _multiply_few(x, kind, pairs)
        elif ggml_fp16.takes(x):
            ggml_fp16.multiply(x, pairs)
        else:
            for blocks, y in pairs:
                _multiply_many(x, blocks, y)
    return ys


def suits_few(x: torch.Tensor, kind: str) -> bool:
    """Return whether `few_products` supports blocks of this type for x [.., K]."""
    return x.dtype == torch.bfloat16 and bool(has_codes(kind)) and x.shape[-1] % GROUP == 0


def splits(width: int, programs: int) -> tuple[int, int]:
    """Return the warps of each of this many programs, and groups at a time, for rows of this width."""
    groups, warps = width // GROUP, WARPS
    while warps > 1 and (programs * warps > ALL_WARPS or groups % warps):
        warps //= 2
    return warps, math.gcd(groups // warps, EACH)


def _multiply_few(x: torch.Tensor, kind: str, pairs: Sequence[tuple[KernelBlocks, torch.Tensor]]) -> None:
    (tokens, groups, width), numbers = x.shape, tuple(y.shape[-1] for _, y in pairs)
    starts = first_programs(cdiv(n, ROWS) for n in numbers)
    warps, each = splits(width, groups * starts[-1])
    _few[(starts[-1], groups)](
        x, tuple(blocks.rows for blocks, _ in pairs), pairs[0][0].table, tuple(y for _, y in pairs), tokens,
        x.stride(0), x.stride(1), starts, numbers, width, kind, pairs[0][0].height, 8 if tokens <= 8 else 16,
        warps, each, num_warps=warps, **overlap(x),
    )  # fmt: skip


def _multiply_many(x: torch.Tensor, blocks: KernelBlocks, y: torch.Tensor) -> None:
    tokens, groups, width = x.shape
    rows, together = y.shape[-1], 16 if tokens <= 16 else 32 if tokens <= 32 else 64 if tokens <= 64 else 128
    _many[(cdiv(tokens, together), cdiv(rows, TILE_ROWS), groups)](
        x, blocks.rows, blocks.table, y, tokens, x.stride(0), x.stride(1), rows, width, blocks.kind, blocks.height,
        TILE_ROWS, together, math.gcd(width // 8, TILE_OCTETS), num_warps=TILE_WARPS,
    )  # fmt: skip


@launched(do_not_specialize=["tokens"])
def _few(
    x,  # [tokens, G, K]
    weights,  # of each product: blocks [G * N, K]
    table,
    ys,  # [tokens, G, N]
    tokens,
    x_row,
    x_group,
    STARTS: tl.constexpr,  # the first program of each product, and of none
    NS: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    HEIGHT: tl.constexpr,
    TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
    EACH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    program, group = tl.program_id(0), tl.program_id(1)
    weight = one_of(weights, program, STARTS, 0, len(NS))
    n = one_of(NS, program, STARTS, 0, len(NS))
    first = (program - one_of(STARTS, program, STARTS, 0, len(NS))) * 16
    # missing tokens and rows repeat the last one
    offset = tl.minimum(operand_tokens(TOKENS, WARPS), tokens - 1).to(tl.int64) * x_row + group * x_group
    own = group * n + tl.minimum(first + operand_rows(WARPS), n - 1)
    (sums,) = few_products(x, offset, (weight,), (table,), own, K, (KIND,), (HEIGHT,), WARPS, EACH, OVERLAP)
    row, token = first + tl.arange(0, 16)[:, None], tl.arange(0, TOKENS)[None]
    place, inside = (token.to(tl.int64) * tl.num_programs(1) + group) * n + row, (row < n) & (token < tokens)
    for i in tl.static_range(len(NS)):
        if (program >= STARTS[i]) & (program < STARTS[i + 1]):
            tl.store(ys[i] + place, sums.to(ys[i].dtype.element_ty), inside)


@launched(do_not_specialize=["tokens"])
def _many(
    x,  # [tokens, G, K]
    weight,  # blocks [G * N, K]
    table,
    y,  # [tokens, G, N]
    tokens,
    x_row,
    x_group,
    N: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    HEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    OCTETS: tl.constexpr,
):
    token, group = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER), tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    place = tl.minimum(token, tokens - 1).to(tl.int64) * x_row + group * x_group
    total = many_products(x, place, weight, table, group * N + tl.minimum(row, N - 1), K, KIND, HEIGHT, OCTETS)
    to = y + (token.to(tl.int64)[:, None] * tl.num_programs(2) + group) * N + row[None]
    tl.store(to, tl.trans(total).to(y.dtype.element_ty), (token < tokens)[:, None] & (row < N)[None])
