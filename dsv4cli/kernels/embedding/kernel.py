"""Embedding lookup in Triton: each program copies or decodes a part of one row."""

import torch
import triton.language as tl

from dsv4cli.kernels.ggml.kernel.fields import blocks, tile_rows
from dsv4cli.kernels.ggml.kernel.octet_values import octet_values
from dsv4cli.kernels.ggml.kernel.octets import blocks_of
from dsv4cli.kernels.launch import cdiv, launched
from dsv4cli.kernels.pdl import overlap, wait_for_inputs
from dsv4cli.kernels.stored_matrix import StoredMatrix

# values of a row per program, and octets of them
BLOCK = 1024
OCTETS = BLOCK // 8


def embed(ids: torch.Tensor, table: StoredMatrix, dtype: torch.dtype) -> torch.Tensor:
    width = table.columns
    rows = torch.empty(len(ids), width, dtype=dtype, device=ids.device)
    if not rows.numel():
        return rows
    grid = len(ids), cdiv(width, BLOCK)
    if table.block_type is None:
        _embed[grid](ids.contiguous(), table.weight.contiguous(), rows, width, BLOCK, num_warps=4, **overlap(ids))
    else:
        held = blocks_of(table, ids.device)
        _embed_blocks[grid](
            ids.contiguous(),
            held.rows,
            held.table,
            rows,
            width,
            held.kind,
            held.height,
            OCTETS,
            num_warps=4,
            **overlap(ids),
        )
    return rows


@launched
def _embed(
    ids,  # int64 [T]
    table,  # [V, WIDTH]
    rows,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(OVERLAP)
    values = tl.load(table + tl.load(ids + token) * WIDTH + column, column < WIDTH)
    tl.store(rows + token * WIDTH + column, values.to(rows.dtype.element_ty), column < WIDTH)


@launched
def _embed_blocks(
    ids,  # int64 [T]
    table,  # blocks [V, WIDTH]
    codebook,
    rows,  # [T, WIDTH]
    WIDTH: tl.constexpr,  # a multiple of 8
    KIND: tl.constexpr,
    HEIGHT: tl.constexpr,
    OCTETS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    octet = tl.program_id(1) * OCTETS + tl.arange(0, OCTETS)[None]
    wait_for_inputs(OVERLAP)
    found = tile_rows(table, tl.load(ids + token) + tl.zeros([1, 1], tl.int64), WIDTH, KIND, HEIGHT)
    # octets beyond the row's end repeat its last one
    given = tl.minimum(octet, WIDTH // 8 - 1)
    values = octet_values(found, given, codebook, KIND, blocks(KIND, WIDTH), HEIGHT)
    column = octet[:, :, None] * 8 + tl.arange(0, 8)[None, None]
    tl.store(rows + token * WIDTH + column, values.to(rows.dtype.element_ty), column < WIDTH)
