"""Attention over listed rows in Triton: a program takes heads of one token and a part of its list.

Where there are too few tokens for the machine, lists are cut into parts: a first launch finds the maxima of the scores,
so that a part rounds probabilities relative to the maximum that the reference has there, and a third puts the parts
together.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.attention.over_rows import FLOOR, over_rows, places, queries, scored, unrotated
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.rows import rows

# the longest row: 64 heads of it in fp32 are half of a multiprocessor's registers
LONGEST = 512
# programs that fill an H200 with tiles of 64 heads, one on a multiprocessor
PROGRAMS = 132
# a list that is never cut into parts; parts of another
SHORT, MOST_PARTS = 256, 32
# partial results in fp32 that a program puts together: 64 a thread
BUDGET = 8192
LOG2E = tl.constexpr(math.log2(math.e))


@dataclass(frozen=True)
class Tiles:
    """What a program holds: heads, rows at a time, warps; span: columns of a list in one part."""

    heads: int
    rows: int
    warps: int
    span: int


def tiles(tokens: int, heads: int, length: int, x: torch.Tensor) -> Tiles:
    """For lists of this length; measured on an H200 with rows of 512 bf16, 1 to 64 tokens, lists of 128 to 8,320."""
    few, blocks = tokens * triton.cdiv(heads, 16), triton.cdiv(length, 64)
    if x.dtype == torch.float32:
        held, rows_held, warps = 16, 16, 4
    elif heads <= 16 or not roomy(x.device) or (few <= PROGRAMS and pays(few, blocks)):
        held, rows_held, warps = 16, 64, 8
    else:
        held, rows_held, warps = 64, 64, 8
    parts = min(PROGRAMS // max(tokens * triton.cdiv(heads, held), 1), MOST_PARTS)
    # two halves are not worth three launches
    parts = 1 if parts < 3 or length <= SHORT else parts
    # of bf16 whole blocks of 64 columns, as the reference has them: what it rounds depends on the maximum up to there
    span = triton.cdiv(triton.cdiv(length, parts), rows_held) * rows_held
    return Tiles(held, rows_held, warps, max(span, rows_held))


def pays(few: int, blocks: int) -> bool:
    """Whether programs of 16 heads, which read each row more often, are faster than those of 64: where lists are short,
    where all blocks can be read at once, and where this many programs are enough for whole lists."""
    return blocks < 7 or few * blocks <= 2 * PROGRAMS or 2 * few > PROGRAMS


@cache
def roomy(device: torch.device) -> bool:
    """Whether shared memory holds 64 heads and two times 64 rows of 512 bf16, 200 KiB, as Hopper's does."""
    if device.type != "cuda":
        return True  # interpreted
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) >= 200 << 10


def sparse_attention(
    q: torch.Tensor,
    window: torch.Tensor,
    entries: torch.Tensor,
    index: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    rotation: torch.Tensor,
) -> torch.Tensor:
    turns = torch.view_as_real(rotation.resolve_conj()).contiguous()  # [T, R, 2]
    tile = tiles(q.shape[0], q.shape[1], index.shape[1], q)
    return attended(q, rows(window), rows(entries), index, sink, scale, turns, tile)


def sparse_mqa_sink(
    q: torch.Tensor, kv: torch.Tensor, topk_indices: torch.Tensor, attn_sink: torch.Tensor, scale: float
) -> torch.Tensor:
    pool = rows(kv)
    tile = tiles(q.shape[0], q.shape[1], topk_indices.shape[1], q)
    return attended(q, pool, pool[:0], topk_indices, attn_sink, scale, None, tile)


def attended(
    q: torch.Tensor,
    window: torch.Tensor,
    entries: torch.Tensor,
    index: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    turns: torch.Tensor | None,
    tile: Tiles,
) -> torch.Tensor:
    """Un-rotated where there are turns; window and entries [rows, d], index and sink evenly spaced."""
    given, o = rows(q), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    (tokens, heads, width), length, span = q.shape, index.shape[1], tile.span
    if width > LONGEST or width % 2:
        raise KernelUnsupported(f"the Triton attention takes rows of pairs, up to {LONGEST} values, not {width}")
    if not o.numel():
        return o
    parts, groups = max(triton.cdiv(length, span), 1), triton.cdiv(heads, tile.heads)
    columns = max(triton.next_power_of_2(width), 32)
    turned = 0 if turns is None else turns.shape[1]
    index, sink = index.contiguous(), sink.contiguous()
    inputs = (given, window, entries, index, given.stride(0), len(window), length, scale * math.log2(math.e))
    shape = (window.stride(0), entries.stride(0), heads, width, columns // 2, tile.heads, tile.rows)
    if parts == 1:
        _whole[tokens * groups,](*inputs, sink, turns, o, turned, *shape, num_warps=tile.warps)
        return o
    # before the last part
    blocks = (parts - 1) * span // tile.rows
    early = torch.empty(tokens, blocks, heads, dtype=torch.float32, device=q.device)
    _maxima[tokens * blocks * groups,](*inputs, early, blocks, *shape, num_warps=tile.warps)
    partial = torch.empty(tokens, parts, heads, width, dtype=torch.float32, device=q.device)
    state = torch.empty(2, tokens, parts, heads, dtype=torch.float32, device=q.device)
    _part[tokens * parts * groups,](
        *inputs, early, partial, state[0], state[1], parts, blocks, span, *shape,
        num_warps=tile.warps,
    )  # fmt: skip
    at_once = triton.next_power_of_2(parts)
    chunk = min(columns, BUDGET // at_once)
    _combine[(tokens * heads * (columns // chunk),)](
        partial, state[0], state[1], sink, turns, o, parts, turned, heads, width, at_once, chunk, columns // chunk,
        num_warps=4,
    )  # fmt: skip
    return o


@triton.jit(do_not_specialize=["window_rows", "length"])
def _whole(
    q,  # [T, TOTAL, WIDTH]
    window,  # [window_rows, WIDTH]
    entries,  # [rows, WIDTH]
    index,  # [T, length]
    q_stride,
    window_rows,
    length,
    scale,  # of scores as powers of two
    sink,  # [TOTAL]
    turns,  # [T, TURNED, 2]: cosine, sine
    o,  # as q, contiguous
    TURNED: tl.constexpr,
    WINDOW_STRIDE: tl.constexpr,
    ENTRIES_STRIDE: tl.constexpr,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):
    groups: tl.constexpr = (TOTAL + HEADS - 1) // HEADS
    token = (tl.program_id(0) // groups).to(tl.int64)
    head = (tl.program_id(0) % groups) * HEADS + tl.arange(0, HEADS)[:, None]
    listed = index + token * length
    maximum, denominator, left, right = over_rows(
        q, window, entries, listed, sink, 0, token, head, 0, length, q_stride,
        window_rows, scale, WINDOW_STRIDE, ENTRIES_STRIDE, TOTAL, WIDTH, ROWS, HALF, 1024,
    )  # fmt: skip
    denominator += tl.exp2(tl.load(sink + head, head < TOTAL, other=0.0).to(tl.float32) * LOG2E - maximum)
    # at least 1 wherever a row was listed
    factor = 1.0 / tl.maximum(denominator, 1.0)
    left, right = (left * factor).to(o.dtype.element_ty), (right * factor).to(o.dtype.element_ty)
    if 2 * TURNED > WIDTH - HALF:
        left = unrotated(left, turns, token, 0, TURNED, WIDTH)
    if TURNED > 0:
        right = unrotated(right, turns, token, HALF, TURNED, WIDTH)
    column = tl.arange(0, HALF)[None]
    place = o + (token * TOTAL + head) * WIDTH + column
    tl.store(place, left, (head < TOTAL) & (column < WIDTH))
    tl.store(place + HALF, right, (head < TOTAL) & (column + HALF < WIDTH))


@triton.jit(do_not_specialize=["window_rows", "length", "blocks"])
def _maxima(
    q,  # [T, TOTAL, WIDTH]
    window,  # [window_rows, WIDTH]
    entries,  # [rows, WIDTH]
    index,  # [T, length]
    q_stride,
    window_rows,
    length,
    scale,  # of scores as powers of two
    early,  # [T, blocks, TOTAL]
    blocks,  # of ROWS columns
    WINDOW_STRIDE: tl.constexpr,
    ENTRIES_STRIDE: tl.constexpr,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):
    groups: tl.constexpr = (TOTAL + HEADS - 1) // HEADS
    place = (tl.program_id(0) // groups).to(tl.int64)  # of [T, blocks]
    token = place // blocks
    head = (tl.program_id(0) % groups) * HEADS + tl.arange(0, HEADS)[:, None]
    listed = (place % blocks).to(tl.int32) * ROWS + tl.arange(0, ROWS)
    row = tl.load(index + token * length + listed, listed < length, other=-1).to(tl.int32)
    column, some = tl.arange(0, HALF)[None], (row >= 0)[:, None]
    near = places(row, window, entries, window_rows, WINDOW_STRIDE, ENTRIES_STRIDE) + column
    keys_left = tl.load(near, some & (column < WIDTH), other=0.0)
    keys_right = tl.load(near + HALF, some & (column + HALF < WIDTH), other=0.0)
    query_left, query_right = queries(q, token, head, q_stride, TOTAL, WIDTH, HALF)
    scores = scored(query_left, query_right, keys_left, keys_right, row, scale)
    tl.store(early + place * TOTAL + head, tl.maximum(tl.max(scores, 1, keep_dims=True), FLOOR), head < TOTAL)


@triton.jit(do_not_specialize=["window_rows", "length", "parts", "blocks", "span"])
def _part(
    q,  # [T, TOTAL, WIDTH]
    window,  # [window_rows, WIDTH]
    entries,  # [rows, WIDTH]
    index,  # [T, length]
    q_stride,
    window_rows,
    length,
    scale,  # of scores as powers of two
    early,  # [T, blocks, TOTAL]: maxima of scores, each of ROWS columns
    partial,  # [T, parts, TOTAL, WIDTH]
    maxima,  # [T, parts, TOTAL]
    sums,  # [T, parts, TOTAL]
    parts,
    blocks,
    span,  # columns of a part, a multiple of ROWS
    WINDOW_STRIDE: tl.constexpr,
    ENTRIES_STRIDE: tl.constexpr,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):
    groups: tl.constexpr = (TOTAL + HEADS - 1) // HEADS
    place = (tl.program_id(0) // groups).to(tl.int64)  # of [T, parts]
    token = place // parts
    head = (tl.program_id(0) % groups) * HEADS + tl.arange(0, HEADS)[:, None]
    listed = index + token * length
    first = (place % parts).to(tl.int32) * span
    end = tl.minimum(first + span, length)
    maximum, denominator, left, right = over_rows(
        q, window, entries, listed, early + token * blocks * TOTAL, first // ROWS, token, head, first, end, q_stride,
        window_rows, scale, WINDOW_STRIDE, ENTRIES_STRIDE, TOTAL, WIDTH, ROWS, HALF, 512,
    )  # fmt: skip
    tl.store(maxima + place * TOTAL + head, maximum, head < TOTAL)
    tl.store(sums + place * TOTAL + head, denominator, head < TOTAL)
    column = tl.arange(0, HALF)[None]
    to = partial + (place * TOTAL + head) * WIDTH + column
    # what no row has added to is not read again
    some = (head < TOTAL) & (maximum > FLOOR)
    tl.store(to, left, some & (column < WIDTH))
    tl.store(to + HALF, right, some & (column + HALF < WIDTH))


@triton.jit(do_not_specialize=["parts"])
def _combine(
    partial,  # [T, parts, TOTAL, WIDTH]
    maxima,  # [T, parts, TOTAL]
    sums,  # [T, parts, TOTAL]
    sink,  # [TOTAL]
    turns,  # [T, TURNED, 2]: cosine, sine
    o,  # [T, TOTAL, WIDTH]
    parts,
    TURNED: tl.constexpr,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,  # parts or more
    COLUMNS: tl.constexpr,  # of a program
    CHUNKS: tl.constexpr,  # programs of a head
):
    row = tl.program_id(0) // CHUNKS
    token, head = (row // TOTAL).to(tl.int64), row % TOTAL
    first = tl.program_id(0) % CHUNKS * COLUMNS
    column = first + tl.arange(0, COLUMNS)[None]
    part = tl.arange(0, PARTS)[:, None]
    place = (token * parts + part) * TOTAL + head
    high = tl.load(maxima + place, part < parts, other=FLOOR)  # [PARTS, 1]
    total = tl.load(sums + place, part < parts, other=0.0)
    values = tl.load(partial + place * WIDTH + column, (part < parts) & (column < WIDTH), other=0.0)  # [PARTS, COLUMNS]
    logit = tl.load(sink + head).to(tl.float32) * LOG2E
    maximum = tl.max(high, 0, keep_dims=True)
    weight = tl.exp2(high - maximum)
    denominator = tl.sum(total * weight, 0, keep_dims=True) + tl.exp2(logit - maximum)
    weighted = tl.sum(tl.where(high > FLOOR, values * weight, 0.0), 0, keep_dims=True)
    # at least 1 wherever a row was listed
    result = (weighted * (1.0 / tl.maximum(denominator, 1.0))).to(o.dtype.element_ty)
    if TURNED > 0:
        result = unrotated(result, turns, token, first, TURNED, WIDTH)
    tl.store(o + (token * TOTAL + head) * WIDTH + column, result, column < WIDTH)
