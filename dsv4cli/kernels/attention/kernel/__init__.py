"""Sparse attention in Triton: a program computes some heads of one token over its list.

With too few tokens to fill the GPU, several programs share a token: `two_pass_decode`, or `split_kv` for long lists.
With many tokens on Hopper, the warps of a program have different tasks: `warp_specialized`.
"""

import math
from dataclasses import dataclass

import torch
import triton.language as tl

from dsv4cli.kernels.attention.kernel import hopper, split_kv, two_pass_decode
from dsv4cli.kernels.attention.kernel.gather import LOG2E, attend_rows, unrotated
from dsv4cli.kernels.card import has_tensor_memory, shared_memory
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.launch import cdiv, launched, next_power_of_2
from dsv4cli.kernels.pdl import overlap, wait_for_inputs
from dsv4cli.kernels.rows import planned_rows, rows

# longest row: 64 heads of it in fp32 fill half of a multiprocessor's registers
LONGEST = 512
# programs that fill an H200 with tiles of 64 heads, one per multiprocessor
PROGRAMS = 132
# inside `exact_rows`, up to ROWS_EXACT tokens use the summation order of this many tokens (H200, a step at 4K context:
# 0.1 % slower than the fastest order for one token, 1.1 % for eight)
PLANNED = 2
# longest list that is never split into parts; most parts of longer lists
SHORT, MOST_PARTS = 256, 32


@dataclass(frozen=True)
class SplitTiles:
    """What a program holds: heads, rows at a time, warps. span: columns of a list in one part."""

    heads: int
    rows: int
    warps: int
    span: int


def plan(q: torch.Tensor, length: int) -> SplitTiles | two_pass_decode.TwoPassTiles:
    """Return the tiles for lists of this length."""
    tokens, heads, _ = q.shape
    tokens = planned_rows(tokens, PLANNED)
    few, bf16 = tokens * cdiv(heads, 16), q.dtype == torch.bfloat16
    two_pass = bf16 and 0 < few <= two_pass_decode.MOST and 0 < length <= two_pass_decode.LONGEST and roomy(q.device)
    return (two_pass_decode.tiles(few, length) if two_pass else None) or tiles(tokens, heads, length, q)


def tiles(tokens: int, heads: int, length: int, x: torch.Tensor) -> SplitTiles:
    """Return the tiles for lists of this length if `two_pass_decode` is not used.

    Measured on an H200 with rows of 512 bf16, 1 to 64 tokens, lists of 128 to 8,320.
    """
    few, blocks = tokens * cdiv(heads, 16), cdiv(length, 64)
    if x.dtype == torch.float32:
        held, rows_held, warps = 16, 16, 4
    elif heads <= 16 or not _holds_64(x.device) or (few <= PROGRAMS and pays(few, blocks)):
        # 64 rows and 16 heads of 512 bf16, and 4 KiB per warp: 112 KiB with eight warps, 88 KiB with four
        held, rows_held, warps = 16, 64, 8 if shared_memory(x.device) >= 112 << 10 else 4
    else:
        held, rows_held, warps = 64, 64, 8
    parts = min(PROGRAMS // max(tokens * cdiv(heads, held), 1), MOST_PARTS)
    # two parts are not worth three launches
    parts = 1 if parts < 3 or length <= SHORT else parts
    # for bf16, whole blocks of 64 columns as in the reference, whose rounding depends on the maximum up to the block
    span = cdiv(cdiv(length, parts), rows_held) * rows_held
    return SplitTiles(held, rows_held, warps, max(span, rows_held))


def pays(few: int, blocks: int) -> bool:
    """Return whether programs of 16 heads, which read each row more often, are faster than programs of 64 heads.

    They are if lists are short, if all blocks can be read at once, or if there are enough programs for whole lists.
    """
    return blocks < 7 or few * blocks <= 2 * PROGRAMS or 2 * few > PROGRAMS


def roomy(device: torch.device) -> bool:
    """Return whether shared memory fits 64 heads and two times 64 rows of 512 bf16: 200 KiB, as on Hopper."""
    return shared_memory(device) >= 200 << 10


def _holds_64(device: torch.device) -> bool:
    """Return whether a program can hold 64 heads.

    With tensor memory it cannot: their sums and scores would need 576 columns of 512.
    """
    return roomy(device) and not has_tensor_memory(device)


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
    return attended(q, rows(window), rows(entries), index, sink, scale, turns, plan(q, index.shape[1]))


def sparse_mqa_sink(
    q: torch.Tensor, kv: torch.Tensor, topk_indices: torch.Tensor, attn_sink: torch.Tensor, scale: float
) -> torch.Tensor:
    pool = rows(kv)
    return attended(q, pool, pool[:0], topk_indices, attn_sink, scale, None, plan(q, topk_indices.shape[1]))


def attended(
    q: torch.Tensor,
    window: torch.Tensor,
    entries: torch.Tensor,
    index: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    turns: torch.Tensor | None,
    tile: SplitTiles | two_pass_decode.TwoPassTiles,
) -> torch.Tensor:
    """Run attention with these tiles, and the inverse rotation if `turns` is given.

    window and entries: [rows, d]; index and sink: evenly spaced.
    """
    given, o = rows(q), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    (tokens, heads, width), length = q.shape, index.shape[1]
    if width > LONGEST or width % 2:
        raise KernelUnsupported(f"the Triton attention requires rows of pairs, up to {LONGEST} values, not {width}")
    if not o.numel():
        return o
    columns = max(next_power_of_2(width), 32)
    turned = 0 if turns is None else turns.shape[1]
    index, sink = index.contiguous(), sink.contiguous()
    inputs = (given, window, entries, index, given.stride(0), len(window), length, scale * math.log2(math.e))
    shape = (window.stride(0), entries.stride(0), heads, width)
    if isinstance(tile, two_pass_decode.TwoPassTiles):
        two_pass_decode.attended(inputs, sink, turns, o, turned, shape, columns, tile)
        return o
    if hopper.suits(q, window, entries, turned):
        hopper.attended(inputs, sink, turns, o, turned, shape)
        return o
    shape = (*shape, columns // 2, tile.heads, tile.rows)
    count, groups = max(cdiv(length, tile.span), 1), cdiv(heads, tile.heads)
    if count == 1:
        _whole[tokens * groups,](*inputs, sink, turns, o, turned, *shape, num_warps=tile.warps, **overlap(q))
        return o
    split_kv.attended(inputs, sink, turns, o, turned, shape, count, tile.span, tile.warps)
    return o


@launched(do_not_specialize=["window_rows", "length"])
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
    OVERLAP: tl.constexpr,
):
    groups: tl.constexpr = (TOTAL + HEADS - 1) // HEADS
    token = (tl.program_id(0) // groups).to(tl.int64)
    head = (tl.program_id(0) % groups) * HEADS + tl.arange(0, HEADS)[:, None]
    listed = index + token * length
    wait_for_inputs(OVERLAP)
    maximum, denominator, left, right = attend_rows(
        q, window, entries, listed, sink, 0, token, head, 0, length, q_stride,
        window_rows, scale, WINDOW_STRIDE, ENTRIES_STRIDE, TOTAL, WIDTH, ROWS, HALF, 1024,
    )  # fmt: skip
    denominator += tl.exp2(tl.load(sink + head, head < TOTAL, other=0.0).to(tl.float32) * LOG2E - maximum)
    # the denominator is at least 1 if a row is listed
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
