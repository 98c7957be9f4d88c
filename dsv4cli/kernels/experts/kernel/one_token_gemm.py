"""Routed experts, with or without the shared one, for one token, which needs no sorting.

A program of `down` computes complete sums of its rows: each of its warps computes one expert, in ascending order. `up`
starts once all programs of `prepare` have waited for the previous kernels, so it knows the experts while `prepare`
runs.
"""

import triton
import triton.language as tl

from dsv4cli.kernels.experts.kernel.dequant_mma import (
    FP4_TOKENS,
    FP8_TOKENS,
    by_scale_2,
    columns_of,
    first_steps,
    fp4_products,
    fp4_rows,
    fp8_products,
    fp8_rows,
    input_threads,
    of_program,
    parts_of,
    row_numbers,
)
from dsv4cli.kernels.experts.kernel.few_tokens_prepare import store_inner
from dsv4cli.kernels.launch import launched
from dsv4cli.kernels.pdl import wait_for_inputs

# columns of a product for tokens; only the first is used
_TOKENS, _SHARED_TOKENS = tl.constexpr(FP4_TOKENS), tl.constexpr(FP8_TOKENS)


@triton.jit
def _only(values):
    """Return column 0 of [.., 2]."""
    first, _ = tl.split(values)
    return first


@triton.jit
def _row_of(expert, rows):
    """Return the experts' rows in the stacks. rows: the row of each expert; None if row and expert number are equal."""
    return expert if rows is None else tl.load(rows + expert, cache_modifier=".cg")


@launched
def up(
    inputs, shared_inputs,  # as prepare leaves them
    w1, w1_scale, w3, w3_scale,  # FP4 [E, INNER, D], as words of codes and of scales
    shared_w1, shared_w1_scale, shared_w3, shared_w3_scale,  # FP8 [SHARED_INNER, D]
    w1_scale_2, w3_scale_2,  # fp32 [E] of NVFP4, or None
    experts,  # int64 [pairs]
    rows,  # int64 [E] of the stacks, or None
    routing,  # fp32 [pairs]
    inner,  # [2, pairs, INNER]: inputs of w2, before that values not rounded
    shared_inner,  # [2, SHARED_INNER]
    counters,  # [pairs, INNER / 128], then [SHARED_INNER / 128]
    limit,
    D: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr, PAIRS: tl.constexpr, ROUND: tl.constexpr,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr, EACH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    program, ahead = tl.program_id(0), SHARED_INNER // ROWS
    if program >= ahead:
        pair, first = (program - ahead) // (INNER // ROWS), (program - ahead) % (INNER // ROWS) * ROWS
        # the kernels before `prepare` have finished, see `wait_for_inputs`; bypass L1, which may be stale
        expert = _row_of(tl.load(experts + pair, cache_modifier=".cg"), rows)
        row, part = expert * INNER + first + row_numbers(ROWS, SPLITS), parts_of(D, ROWS, SPLITS)
        words, scales = fp4_rows(w1, w1_scale, row, part, D, EACH)
        more_words, more_scales = fp4_rows(w3, w3_scale, row, part, D, EACH)
        words, scales = (words, more_words), (scales, more_scales)
        tiles, factors = first_steps(words, scales, AHEAD, EACH)
        wait_for_inputs(OVERLAP)
        real = input_threads(4 * _TOKENS) < 16
        gates, ups = fp4_products(
            words, scales, tiles, factors, inputs, real.to(tl.int64) * 0, part, real, columns_of(D, ROWS, SPLITS),
            _TOKENS, EACH,
        )  # fmt: skip
        token = tl.arange(0, _TOKENS)
        gates = by_scale_2(of_program(gates, ROWS), w1_scale_2, expert)
        ups = by_scale_2(of_program(ups, ROWS), w3_scale_2, expert)
        store_inner(
            gates, ups, tl.load(routing + pair + token * 0), (pair + token).to(tl.int64), token < 1, inner,
            inner + PAIRS * INNER, counters + pair * (INNER // 128) + first // 128, first, limit, INNER, ROUND, 4,
        )  # fmt: skip
    elif SHARED_INNER > 0:
        first, part = program * ROWS, parts_of(D, ROWS, SPLITS)
        gate_words, gate_scales = fp8_rows(shared_w1, shared_w1_scale, first, part, D, ROWS, SPLITS)
        up_words, up_scales = fp8_rows(shared_w3, shared_w3_scale, first, part, D, ROWS, SPLITS)
        own_tiles, own_factors = first_steps((gate_words, up_words), (gate_scales, up_scales), AHEAD, EACH)
        wait_for_inputs(OVERLAP)
        column = input_threads(_SHARED_TOKENS)
        own_gates, own_ups = fp8_products(
            (gate_words, up_words), (gate_scales, up_scales), own_tiles, own_factors, shared_inputs,
            column.to(tl.int64) * 0, part, column < 4, columns_of(D, ROWS, SPLITS), _SHARED_TOKENS, EACH,
        )  # fmt: skip
        place = tl.arange(0, _SHARED_TOKENS)
        store_inner(
            of_program(own_gates, ROWS), of_program(own_ups, ROWS), tl.full((_SHARED_TOKENS,), 1.0, tl.float32),
            place.to(tl.int64), place < 1, shared_inner, shared_inner + SHARED_INNER,
            counters + PAIRS * (INNER // 128) + first // 128, first, limit, SHARED_INNER, ROUND, 2,
        )  # fmt: skip


@triton.jit
def _sorted(experts, PAIRS: tl.constexpr, PLACES: tl.constexpr):
    """Return the pair and its expert at each place in ascending order of experts: int32 [PLACES].

    Places beyond the last pair repeat it.
    """
    pair = tl.arange(0, PLACES)
    expert = tl.load(experts + pair, pair < PAIRS, other=0x7FFFFFFF, cache_modifier=".cg").to(tl.int32)
    before = (expert[None] < expert[:, None]) | ((expert[None] == expert[:, None]) & (pair[None] < pair[:, None]))
    rank = tl.sum(before.to(tl.int32), 1)
    here = rank[None] == tl.minimum(pair, PAIRS - 1)[:, None]
    return tl.sum(tl.where(here, pair[None], 0), 1), tl.sum(tl.where(here, expert[None], 0), 1)


@triton.jit
def _ascending_sum(parts, PAIRS: tl.constexpr, LEVELS: tl.constexpr):
    """Sum the first PAIRS of parts [2 ** LEVELS, ROWS], one after another: [ROWS]."""
    ROWS: tl.constexpr = parts.shape[1]
    pieces = (tl.permute(parts, (1, 0)),)
    for level in tl.static_range(LEVELS):
        halves = ()
        for number in tl.static_range(2**level):
            two = tl.reshape(pieces[number], (ROWS, 2, 2 ** (LEVELS - 1 - level)))
            halves += tl.split(tl.permute(two, (0, 2, 1)))
        pieces = halves
    total = tl.zeros((ROWS,), tl.float32)
    for number in tl.static_range(PAIRS):
        total += tl.reshape(pieces[number], (ROWS,))
    return total


@launched
def down(
    inner, shared_inner,  # as up leaves them
    w2, w2_scale,  # FP4 [E, D, INNER]
    shared_w2, shared_w2_scale,  # FP8 [D, SHARED_INNER]
    w2_scale_2,  # fp32 [E] of NVFP4, or None
    experts,  # int64 [T, PAIRS]
    rows,  # int64 [E] of the stacks, or None
    place,  # int32 [T, PAIRS] the position of each pair in inner; None: of one token its number
    y,  # [T, D] the sum
    D: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr, PAIRS: tl.constexpr, PLACES: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr, EACH: tl.constexpr, SHARED_AHEAD: tl.constexpr,
    SHARED_EACH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    first, token = tl.program_id(0) * ROWS, tl.program_id(1).to(tl.int64)
    experts += token * PAIRS
    if SHARED_INNER > 0:
        part = parts_of(SHARED_INNER, ROWS, SPLITS)
        own_words, own_scales = fp8_rows(shared_w2, shared_w2_scale, first, part, SHARED_INNER, ROWS, SPLITS)
        own_tiles, own_factors = first_steps((own_words,), (own_scales,), SHARED_AHEAD, SHARED_EACH)
    pair, expert = _sorted(experts, PAIRS, PLACES)
    if place is not None:
        # `prepare` has finished
        pair = tl.load(place + token * PAIRS + pair, cache_modifier=".cg")
    expert = _row_of(expert, rows)
    row = expert[None, :, None].to(tl.int64) * D + first + row_numbers(ROWS, 1)
    words, scales = fp4_rows(w2, w2_scale, row, tl.zeros((1, PLACES, 1), tl.int32), INNER, EACH)
    tiles, factors = first_steps((words,), (scales,), AHEAD, EACH)
    wait_for_inputs(OVERLAP)
    to = first + tl.arange(0, ROWS)
    if SHARED_INNER > 0:
        column = input_threads(_SHARED_TOKENS)
        (sums,) = fp8_products(
            (own_words,), (own_scales,), own_tiles, own_factors, shared_inner + token * SHARED_INNER,
            column.to(tl.int64) * 0, part, column < 4, columns_of(SHARED_INNER, ROWS, SPLITS), _SHARED_TOKENS,
            SHARED_EACH,
        )  # fmt: skip
        sums = of_program(sums, ROWS)
        own = tl.sum(tl.where(tl.arange(0, _SHARED_TOKENS)[None] == 0, sums, 0.0), 1).to(tl.bfloat16)
    real = input_threads(4 * _TOKENS) < 16
    (parts,) = fp4_products(
        (words,), (scales,), tiles, factors, inner, real.to(tl.int64) * 0, pair[None, :, None] * INNER,
        real, INNER, _TOKENS, EACH,
    )  # fmt: skip
    parts = by_scale_2(parts, w2_scale_2, expert[:, None, None])
    total = _ascending_sum(_only(parts).to(tl.bfloat16).to(tl.float32), PAIRS, PLACES.bit_length() - 1)
    if SHARED_INNER > 0:
        total += own.to(tl.float32)
    tl.store(y + token * D + to, total.to(y.dtype.element_ty))
