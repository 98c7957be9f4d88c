"""Linears of one token or two over GGUF blocks on int8 tensor cores, on Hopper."""

from collections.abc import Sequence

import torch
from triton.experimental.gluon import language as gl

from dsv4cli.kernels.gemm.kernel.dequant import first_programs, one_of
from dsv4cli.kernels.ggml import int8
from dsv4cli.kernels.ggml.kernel.fields import tile_rows
from dsv4cli.kernels.ggml.kernel.int8 import operand_rows, pass_words, products
from dsv4cli.kernels.ggml.kernel.int8_codes import table_of
from dsv4cli.kernels.ggml.kernel.int8_digits import digits_of
from dsv4cli.kernels.ggml.kernel.octets import KernelBlocks
from dsv4cli.kernels.gluon_barriers import wait_for_inputs
from dsv4cli.kernels.gluon_launch import gluon_launched
from dsv4cli.kernels.launch import cdiv
from dsv4cli.kernels.pdl import overlap_beside


def multiply(x: torch.Tensor, kind: str, pairs: Sequence[tuple[KernelBlocks, torch.Tensor]]) -> None:
    """Multiply x bf16 [T, G, K] by each matrix of one type [G * N, K] into its result [T, G, N]."""
    (tokens, groups, width), numbers = x.shape, tuple(y.shape[-1] for _, y in pairs)
    tiles, parts, each = int8.shape(width, groups * sum(cdiv(n, int8.ROWS) for n in numbers))
    starts = first_programs(cdiv(n, tiles * int8.ROWS) for n in numbers)
    _linears[(starts[-1], groups)](
        x, tuple(blocks.rows for blocks, _ in pairs), table_of(pairs[0][0]), tuple(y for _, y in pairs),
        x.stride(0), x.stride(1), starts, numbers, width, kind, pairs[0][0].height, tokens,
        tiles, parts, each, num_warps=tiles * parts, **overlap_beside(x, int8.REGISTERS),
    )  # fmt: skip


@gluon_launched
def _linears(
    x,  # [tokens, G, K]
    weights,  # of each product: blocks [G * N, K]
    table,
    ys,  # [tokens, G, N]
    x_row,
    x_group,
    STARTS: gl.constexpr,  # the first program of each product, and of none
    NS: gl.constexpr,
    K: gl.constexpr,
    KIND: gl.constexpr,
    HEIGHT: gl.constexpr,
    COUNT: gl.constexpr,
    TILES: gl.constexpr,
    PARTS: gl.constexpr,
    EACH: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    program, group = gl.program_id(0), gl.program_id(1)
    weight = one_of(weights, program, STARTS, 0, len(NS))
    n = one_of(NS, program, STARTS, 0, len(NS))
    first = (program - one_of(STARTS, program, STARTS, 0, len(NS))) * (TILES * 16)
    places, tokens = (), ()
    for token in gl.static_range(COUNT):
        places += (gl.to_tensor(token).to(gl.int64) * x_row + group * x_group,)
        tokens += (token,)
    # missing rows repeat the last one
    own = group * n + gl.minimum(first + operand_rows(TILES, PARTS), n - 1)
    rows = tile_rows(weight, own, K, KIND, HEIGHT)
    words = pass_words(rows, 0, K, KIND, HEIGHT, TILES, PARTS, EACH)
    wait_for_inputs(OVERLAP)
    digits = digits_of(x, places, K, TILES, PARTS, EACH, "")
    sums = products(words, rows, digits, tokens, table, K, KIND, HEIGHT, TILES, PARTS, EACH)
    held: gl.constexpr = sums.type.layout
    row = first + gl.expand_dims(gl.arange(0, TILES * 16, gl.SliceLayout(1, held)), 1)
    token = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, held)), 0)
    place, inside = (token.to(gl.int64) * gl.num_programs(1) + group) * n + row, (row < n) & (token < COUNT)
    for i in gl.static_range(len(NS)):
        if (program >= STARTS[i]) & (program < STARTS[i + 1]):
            gl.store(ys[i] + place, sums.to(ys[i].dtype.element_ty), inside)
