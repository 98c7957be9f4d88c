"""Products of few tokens, sorted by expert: a program computes some rows of a matrix for a chunk of tokens.
 A chunk of up to two tokens, the usual case, uses the narrowest tensor-core instruction; a larger chunk uses one of
twice the width. The warps of a program have the same inputs: if each computes different rows, the inputs come from L2
once for all of them.

Several programs compute a block of 128 inner values. The last one to finish, determined by a counter, rounds the block.
A token's experts are summed in a separate launch. So the results do not depend on the order of programs.
"""

import triton
import triton.language as tl

from dsv4cli.kernels.experts.kernel.dequant_mma import (
    FP4_TOKENS,
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
from dsv4cli.kernels.experts.kernel.few_tokens_prepare import chunk_parts, store_inner
from dsv4cli.kernels.launch import launched
from dsv4cli.kernels.pdl import wait_for_inputs

_SMALL = tl.constexpr(FP4_TOKENS)


@triton.jit
def _up_routed(
    inputs, w1, w1_scale, w3, w3_scale, w1_scale_2, w3_scale_2, routing, inner, counters, order, expert, begin, size,
    pairs, first, limit,
    D: tl.constexpr, INNER: tl.constexpr, PER_TOKEN: tl.constexpr, CHUNK: tl.constexpr, ROUND: tl.constexpr,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Run a program of `up` for the chunk of `size` pairs of an expert that starts at position `begin`."""
    row, part = expert.to(tl.int64) * INNER + first + row_numbers(ROWS, SPLITS), parts_of(D, ROWS, SPLITS)
    words, scales = fp4_rows(w1, w1_scale, row, part, D, EACH)
    more_words, more_scales = fp4_rows(w3, w3_scale, row, part, D, EACH)
    words, scales = (words, more_words), (scales, more_scales)
    tiles, factors = first_steps(words, scales, AHEAD, EACH)
    owner = input_threads(4 * CHUNK) // 16
    pair = tl.load(order + begin + owner, owner < size, other=0)
    gate, up = fp4_products(
        words, scales, tiles, factors, inputs, (pair // PER_TOKEN).to(tl.int64) * D, part, owner < size,
        columns_of(D, ROWS, SPLITS), CHUNK, EACH,
    )  # fmt: skip
    gate = by_scale_2(of_program(gate, ROWS), w1_scale_2, expert)
    up = by_scale_2(of_program(up, ROWS), w3_scale_2, expert)
    token = tl.arange(0, CHUNK)
    pair = tl.load(order + begin + token, token < size, other=0)
    factor = tl.load(routing + pair, token < size, other=0.0)
    store_inner(
        gate, up, factor, (begin + token).to(tl.int64), token < size, inner,
        inner + pairs.to(tl.int64) * INNER, counters + begin * (INNER // 128) + first // 128, first, limit,
        INNER, ROUND, 4,
    )  # fmt: skip


@launched(do_not_specialize=["tokens", "pairs", "shared_chunks"])
def up(
    inputs, shared_inputs,  # as prepare leaves them
    w1, w1_scale, w3, w3_scale,  # FP4 [E, INNER, D], as words of codes and of scales
    shared_w1, shared_w1_scale, shared_w3, shared_w3_scale,  # FP8 [SHARED_INNER, D]
    w1_scale_2, w3_scale_2,  # fp32 [E] of NVFP4, or None
    routing,  # fp32 [pairs]
    inner,  # [2, pairs, INNER]: inputs of w2 by position, before that values not rounded
    shared_inner,  # [2, tokens, SHARED_INNER]
    counters,  # [pairs, INNER / 128], then [shared_chunks, SHARED_INNER / 128]
    order, chunks, tokens, pairs, shared_chunks,  # as prepare leaves them
    limit,
    D: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr, PER_TOKEN: tl.constexpr,
    CHUNK: tl.constexpr, SHARED_CHUNK: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, AHEAD: tl.constexpr, EACH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    program, ahead = tl.program_id(0), shared_chunks * (SHARED_INNER // ROWS)
    if program >= ahead:
        number, first = (program - ahead) // (INNER // ROWS), (program - ahead) % (INNER // ROWS) * ROWS
        wait_for_inputs(OVERLAP)
        expert, begin, size = chunk_parts(tl.load(chunks + number))
        if CHUNK > _SMALL and size > _SMALL:
            _up_routed(
                inputs, w1, w1_scale, w3, w3_scale, w1_scale_2, w3_scale_2, routing, inner, counters, order, expert,
                begin, size, pairs, first, limit, D, INNER, PER_TOKEN, CHUNK, ROUND, ROWS, SPLITS, AHEAD, EACH,
            )  # fmt: skip
        elif size > 0:
            _up_routed(
                inputs, w1, w1_scale, w3, w3_scale, w1_scale_2, w3_scale_2, routing, inner, counters, order, expert,
                begin, size, pairs, first, limit, D, INNER, PER_TOKEN, _SMALL, ROUND, ROWS, SPLITS, AHEAD, EACH,
            )  # fmt: skip
    elif SHARED_INNER > 0:
        number, first = program // (SHARED_INNER // ROWS), program % (SHARED_INNER // ROWS) * ROWS
        part = parts_of(D, ROWS, SPLITS)
        words, scales = fp8_rows(shared_w1, shared_w1_scale, first, part, D, ROWS, SPLITS)
        more_words, more_scales = fp8_rows(shared_w3, shared_w3_scale, first, part, D, ROWS, SPLITS)
        words, scales = (words, more_words), (scales, more_scales)
        tiles, factors = first_steps(words, scales, AHEAD, EACH)
        wait_for_inputs(OVERLAP)
        owner = number * SHARED_CHUNK + input_threads(SHARED_CHUNK) // 4
        gate, up = fp8_products(
            words, scales, tiles, factors, shared_inputs, owner.to(tl.int64) * D, part, owner < tokens,
            columns_of(D, ROWS, SPLITS), SHARED_CHUNK, EACH,
        )  # fmt: skip
        user = number * SHARED_CHUNK + tl.arange(0, SHARED_CHUNK)
        counter = pairs * (INNER // 128) + number * (SHARED_INNER // 128) + first // 128
        store_inner(
            of_program(gate, ROWS), of_program(up, ROWS), tl.full((SHARED_CHUNK,), 1.0, tl.float32),
            user.to(tl.int64), user < tokens, shared_inner, shared_inner + tokens.to(tl.int64) * SHARED_INNER,
            counters + counter, first, limit, SHARED_INNER, ROUND, 2,
        )  # fmt: skip


@triton.jit
def _down_routed(
    rows, scales, tiles, factors, scale_2, inner, parts, begin, expert, size, row,
    D: tl.constexpr, INNER: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Run a program of `down` for the chunk of `size` pairs that starts at position `begin`."""
    ROWS: tl.constexpr = row.shape[0]
    owner = input_threads(4 * CHUNK) // 16
    (sums,) = fp4_products(
        (rows,), (scales,), tiles, factors, inner, (begin + owner).to(tl.int64) * INNER, parts_of(INNER, ROWS, SPLITS),
        owner < size, columns_of(INNER, ROWS, SPLITS), CHUNK, EACH,
    )  # fmt: skip
    token = tl.arange(0, CHUNK)
    to = parts + (begin + token).to(tl.int64)[None] * D + row[:, None]
    sums = by_scale_2(of_program(sums, ROWS), scale_2, expert)
    tl.store(to, sums.to(tl.bfloat16), (token < size)[None])


@launched(do_not_specialize=["tokens", "shared_chunks"])
def down(
    inner, shared_inner,  # as up leaves them
    w2, w2_scale,  # FP4 [E, D, INNER]
    shared_w2, shared_w2_scale,  # FP8 [D, SHARED_INNER]
    w2_scale_2,  # fp32 [E] of NVFP4, or None
    parts,  # bf16 [pairs, D] w2's results by position
    shared_part,  # bf16 [tokens, D]
    chunks, tokens, shared_chunks,
    D: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr, CHUNK: tl.constexpr,
    SHARED_CHUNK: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr, EACH: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    first, number = tl.program_id(0) * ROWS, tl.program_id(1)
    row = first + tl.arange(0, ROWS)
    if number >= shared_chunks:
        # `prepare` has finished, see `wait_for_inputs`; bypass L1, which may be stale
        expert, begin, size = chunk_parts(tl.load(chunks + number - shared_chunks, cache_modifier=".cg"))
        # for an empty chunk, of an arbitrary expert
        expert_row = expert * D + first + row_numbers(ROWS, SPLITS)
        rows, row_scales = fp4_rows(w2, w2_scale, expert_row, parts_of(INNER, ROWS, SPLITS), INNER, EACH)
        if size > 0:
            tiles, factors = first_steps((rows,), (row_scales,), AHEAD, EACH)
            wait_for_inputs(OVERLAP)
            if CHUNK > _SMALL and size > _SMALL:
                _down_routed(
                    rows, row_scales, tiles, factors, w2_scale_2, inner, parts, begin, expert, size, row, D, INNER,
                    CHUNK, SPLITS, EACH,
                )  # fmt: skip
            else:
                _down_routed(
                    rows, row_scales, tiles, factors, w2_scale_2, inner, parts, begin, expert, size, row, D, INNER,
                    _SMALL, SPLITS, EACH,
                )  # fmt: skip
        else:
            wait_for_inputs(OVERLAP)
    elif SHARED_INNER > 0:
        part = parts_of(SHARED_INNER, ROWS, SPLITS)
        words, scales = fp8_rows(shared_w2, shared_w2_scale, first, part, SHARED_INNER, ROWS, SPLITS)
        first_tiles, first_factors = first_steps((words,), (scales,), AHEAD, EACH)
        wait_for_inputs(OVERLAP)
        owner = number * SHARED_CHUNK + input_threads(SHARED_CHUNK) // 4
        (sums,) = fp8_products(
            (words,), (scales,), first_tiles, first_factors, shared_inner, owner.to(tl.int64) * SHARED_INNER,
            part, owner < tokens, columns_of(SHARED_INNER, ROWS, SPLITS), SHARED_CHUNK, EACH,
        )  # fmt: skip
        token = number * SHARED_CHUNK + tl.arange(0, SHARED_CHUNK)
        to = shared_part + token.to(tl.int64)[None] * D + row[:, None]
        tl.store(to, of_program(sums, ROWS).to(tl.bfloat16), (token < tokens)[None])


@launched
def add(
    parts, shared_part,  # as down leaves them
    place,  # as prepare leaves it
    y,  # [tokens, D]
    D: tl.constexpr, PER_TOKEN: tl.constexpr, HAS_SHARED: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sum a token's experts in ascending order, then add the shared one."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    places: tl.constexpr = triton.next_power_of_2(PER_TOKEN)
    slot = tl.arange(0, places)
    total = tl.zeros((COLUMNS,), tl.float32)
    # pairs were sorted before the previous launch
    positions = tl.load(
        place + token * PER_TOKEN + slot, slot < PER_TOKEN, other=0x7FFFFFFF, cache_modifier=".cg"
    )  # fmt: skip
    last, ascending = -1, ()
    for _ in tl.static_range(PER_TOKEN):
        last = tl.min(tl.where(positions > last, positions, 0x7FFFFFFF), 0)
        ascending += (last.to(tl.int64),)
    wait_for_inputs(OVERLAP)
    for number in tl.static_range(PER_TOKEN):
        total += tl.load(parts + ascending[number] * D + column).to(tl.float32)
    if HAS_SHARED:
        total += tl.load(shared_part + token * D + column).to(tl.float32)
    tl.store(y + token * D + column, total.to(y.dtype.element_ty))
