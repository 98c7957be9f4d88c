"""Entries in Triton: pooled, then normed, rotated and rounded."""

import triton
import triton.language as tl

from dsv4cli.kernels.block_scale.kernel import FP4_FLOOR, FP4_LARGEST, butterflies, code_blocks, e2m1_pairs
from dsv4cli.kernels.compressor.kernel.pool import keep_rows, plan_of, pooled_of
from dsv4cli.kernels.formats import FP4_BLOCK
from dsv4cli.kernels.launch import launched
from dsv4cli.kernels.norm.kernel import normed
from dsv4cli.kernels.pdl import wait_for_inputs
from dsv4cli.kernels.qk_norm_rope.kernel import rounded_key
from dsv4cli.kernels.rope.kernel import turned, turns_of

# format of an entry: its rounding after norm and rotation
NOTHING, FP8, FP4, PACKED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FP4_COLUMNS = tl.constexpr(FP4_BLOCK)


@launched
def make_entries(
    kv,  # [T, CHANNELS]
    score,
    ape,  # [RATIO, CHANNELS]
    ring_kv,  # [slots, CAPACITY, CHANNELS]
    ring_score,
    weight,  # [WIDTH]
    results,  # [cells, WIDTH], or e2m1 codes [cells, WIDTH / 2]
    scales,  # e8m0 [cells, WIDTH / 32]
    kv_2,  # BOTH: this and the next seven of the second compressor
    score_2,
    ape_2,
    ring_kv_2,
    ring_score_2,
    weight_2,
    results_2,
    scales_2,
    groups,  # int64 [G, 5]
    entries,  # int64 [G]
    turns,  # [G, TURNED, 2]: cosine, sine
    turn_stride,
    eps,
    KV_STRIDE: tl.constexpr,
    SCORE_STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    FORM: tl.constexpr,
    COLUMNS: tl.constexpr,
    KV_STRIDE_2: tl.constexpr,
    SCORE_STRIDE_2: tl.constexpr,
    CHANNELS_2: tl.constexpr,
    WIDTH_2: tl.constexpr,
    FORM_2: tl.constexpr,
    COLUMNS_2: tl.constexpr,
    BOTH: tl.constexpr,
    CAPACITY: tl.constexpr,
    CAPACITY_2: tl.constexpr,
    RATIO: tl.constexpr,
    MEMBERS: tl.constexpr,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if BOTH and tl.program_id(1) == 1:
        entries_of(
            kv_2, score_2, ape_2, ring_kv_2, ring_score_2, weight_2, results_2, scales_2, groups, entries, turns,
            turn_stride, eps, KV_STRIDE_2, SCORE_STRIDE_2, CHANNELS_2, WIDTH_2, FORM_2, COLUMNS_2, CAPACITY_2, RATIO,
            MEMBERS, TURNED, ROWS, KEPT, OVERLAP,
        )  # fmt: skip
    else:
        entries_of(
            kv, score, ape, ring_kv, ring_score, weight, results, scales, groups, entries, turns, turn_stride, eps,
            KV_STRIDE, SCORE_STRIDE, CHANNELS, WIDTH, FORM, COLUMNS, CAPACITY, RATIO, MEMBERS, TURNED, ROWS, KEPT,
            OVERLAP,
        )  # fmt: skip


@triton.jit
def entries_of(
    kv,
    score,
    ape,
    ring_kv,
    ring_score,
    weight,
    results,
    scales,
    groups,
    entries,
    turns,
    turn_stride,
    eps,
    KV_STRIDE: tl.constexpr,
    SCORE_STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    FORM: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAPACITY: tl.constexpr,
    RATIO: tl.constexpr,
    MEMBERS: tl.constexpr,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute one compressor's part of a program. Arguments as in `make_entries`."""
    group, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    factor = tl.load(weight + column, column < WIDTH, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    cell = tl.load(entries + group)
    slot, first, start, end, row = plan_of(groups, group)
    own = first + MEMBERS - RATIO  # the group's own first position
    leads = own <= start  # the sequence's first group
    fresh_kv, fresh_score = kv + (row - start) * KV_STRIDE, score + (row - start) * SCORE_STRIDE
    old_kv, old_score = ring_kv + slot * CAPACITY * CHANNELS, ring_score + slot * CAPACITY * CHANNELS
    if leads | (first >= start):
        # with overlap, the second group also reads the rings if its members begin before the step
        second = leads & (own < start) & (MEMBERS > RATIO) & (own + 2 * RATIO <= end)
        for extra in range(1 + second.to(tl.int32)):
            if cell >= 0:
                turn = turns + (group + extra) * turn_stride
                cosine, sine = turns_of(turn, tl.full([1, 1], True, tl.int1), 1.0, TURNED, WIDTH, COLUMNS)
                if first + extra * RATIO >= start:
                    values = pooled_of(
                        fresh_kv, fresh_score, ape, old_kv, old_score, first + extra * RATIO, start, column, KV_STRIDE,
                        SCORE_STRIDE, CAPACITY, RATIO, MEMBERS, CHANNELS, WIDTH, True, ROWS,
                    )  # fmt: skip
                else:
                    values = pooled_of(
                        fresh_kv, fresh_score, ape, old_kv, old_score, first + extra * RATIO, start, column, KV_STRIDE,
                        SCORE_STRIDE, CAPACITY, RATIO, MEMBERS, CHANNELS, WIDTH, False, ROWS,
                    )  # fmt: skip
                values = tl.where(column < WIDTH, values, 0.0)[None]
                store_entry(values, factor[None], cosine, sine, results, scales, cell, eps, WIDTH, TURNED, FORM)
            cell = tl.load(entries + group + extra + 1, extra < second.to(tl.int32), other=-1)
        if leads:
            channel = tl.arange(0, COLUMNS * (CHANNELS // WIDTH))
            keep_rows(
                fresh_kv, fresh_score, ape, old_kv, old_score, start, end, channel, KV_STRIDE, SCORE_STRIDE,
                CAPACITY, RATIO, CHANNELS, KEPT,
            )  # fmt: skip


@launched
def store_pooled(
    pooled,
    entries,  # this and the next four as in `make_entries`
    weight,
    turns,
    results,
    scales,
    turn_stride,
    eps,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    FORM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    cell, column = tl.load(entries + group), tl.arange(0, COLUMNS)[None]
    factor = tl.load(weight + column, column < WIDTH, other=0.0).to(tl.float32)
    turn = turns + group * turn_stride
    cosine, sine = turns_of(turn, tl.full([1, 1], True, tl.int1), 1.0, TURNED, WIDTH, COLUMNS)
    values = tl.load(pooled + group * WIDTH + column, column < WIDTH, other=0.0)
    if cell >= 0:
        store_entry(values, factor, cosine, sine, results, scales, cell, eps, WIDTH, TURNED, FORM)


@triton.jit
def store_entry(
    values,  # [1, columns], 0 past WIDTH
    factor,
    cosine,
    sine,
    results,
    scales,
    cell,
    eps,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    FORM: tl.constexpr,
):
    """Norm, rotate and round a pooled entry, and store it in its cell."""
    COLUMNS: tl.constexpr = values.shape[1]
    dtype: tl.constexpr = tl.bfloat16 if FORM == PACKED else results.dtype.element_ty
    column = tl.arange(0, COLUMNS)[None]
    values = normed(values.to(dtype).to(tl.float32), factor, eps, WIDTH).to(dtype).to(tl.float32)
    values = turned(values, cosine, sine, TURNED, WIDTH).to(dtype).to(tl.float32)
    if FORM == FP8:
        values = rounded_key(values, TURNED, WIDTH)
    if FORM >= FP4:
        values = (butterflies(values, WIDTH.bit_length() - 1) * WIDTH**-0.5).to(dtype).to(tl.float32)
        blocks = tl.reshape(values, [COLUMNS // FP4_COLUMNS, FP4_COLUMNS])
        codes, scale = code_blocks(blocks, FP4_FLOOR, FP4_LARGEST, 1, 0)
        if FORM == PACKED:
            place = results + cell * (WIDTH // 2) + tl.arange(0, COLUMNS // 2)[None]
            tl.store(place, e2m1_pairs(tl.reshape(codes, [1, COLUMNS])).to(tl.int8))
            place = scales + cell * (WIDTH // FP4_COLUMNS) + tl.arange(0, COLUMNS // FP4_COLUMNS)[:, None]
            tl.store(place, (scale >> 23).to(tl.uint8))
        values = tl.reshape(codes * scale.to(tl.float32, bitcast=True), [1, COLUMNS])
    if FORM != PACKED:
        tl.store(results + cell * WIDTH + column, values.to(dtype), column < WIDTH)
