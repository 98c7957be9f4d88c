"""Embedding lookup in Triton: each program copies a part of one row."""

import torch
import triton.language as tl

from dsv4cli.kernels.launch import cdiv, launched
from dsv4cli.kernels.pdl import overlap, wait_for_inputs

# values of a row per program
BLOCK = 1024


def embed(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    width = table.shape[1]
    rows = torch.empty(len(ids), width, dtype=table.dtype, device=ids.device)
    if rows.numel():
        _embed[(len(ids), cdiv(width, BLOCK))](
            ids.contiguous(), table.contiguous(), rows, width, BLOCK, num_warps=4, **overlap(ids)
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
    tl.store(rows + token * WIDTH + column, values, column < WIDTH)
