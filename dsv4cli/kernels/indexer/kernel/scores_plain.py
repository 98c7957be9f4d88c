"""Scores over keys in the queries' dtype in Triton: each program processes one tile of keys for one token."""

import triton.language as tl

from dsv4cli.kernels.launch import launched
from dsv4cli.kernels.pdl import wait_for_inputs


@launched(do_not_specialize=["entries"])
def scores_of_plain_keys(
    q,  # [T, H, D]
    weights,  # [T, H]
    weight_scale,
    keys,  # [cells, D]
    table,  # [B, entries]
    sequence,  # [T]
    visible,  # [T]
    out,  # [T, entries], out_stride apart
    entries,
    q_stride,
    weight_stride,
    table_stride,
    out_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * M + tl.arange(0, M)
    wait_for_inputs(OVERLAP)
    seen = tl.load(visible + token)
    dtype = out.dtype.element_ty
    if seen <= tl.program_id(1) * M:
        hidden = tl.full([M], float("-inf"), tl.float32)
        tl.store(out + token * out_stride + entry, hidden.to(dtype), entry < entries)
    else:
        cells = tl.load(table + tl.load(sequence + token) * table_stride + entry, entry < entries, other=0)
        head, column = tl.arange(0, HEADS), tl.arange(0, WIDTH)[None]
        inside = (head[:, None] < H) & (column < D)
        query = tl.load(q + token * q_stride + head[:, None] * D + column, inside, other=0.0)
        weight = tl.load(weights + token * weight_stride + head, head < H, other=0.0).to(tl.float32)
        weight = (weight * weight_scale).to(dtype).to(tl.float32)
        tile = tl.load(keys + cells[:, None] * D + column, column < D, other=0.0)
        dots = tl.dot(tile, query.T, input_precision="ieee").to(dtype).to(tl.float32)
        parts = (tl.maximum(dots, 0.0) * weight[None]).to(dtype).to(tl.float32)
        score = tl.where(entry < seen, tl.sum(parts, 1), float("-inf"))
        tl.store(out + token * out_stride + entry, score.to(dtype), entry < entries)
