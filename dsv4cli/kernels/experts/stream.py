"""Routed experts, alone or with the shared one, for few tokens: weights are streamed once, in three launches.

`prepare` rounds and arranges the inputs, sorts the pairs (token, expert) by expert and cuts them into chunks of one
expert and a few tokens. A program of `_up` or `_down` computes some rows of a matrix (w1 and w3; w2) for a chunk. What
needs several programs is done by the last of them, which a counter tells: the rounding of 128 inner values, the sum of
a token's experts. So nothing depends on the order of programs.
"""

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.experts import prepare
from dsv4cli.kernels.experts.codes import fp4_products, fp8_products, row_in_load_order
from dsv4cli.kernels.experts.prepare import arranged, as_input
from dsv4cli.kernels.experts.products import gated_values

if TYPE_CHECKING:
    from dsv4cli.kernels.experts import ExpertWeights

# tokens of the shared expert in a program: the least that the tensor core takes
SHARED_TOKENS = 8


def mixture(
    x: torch.Tensor,
    weights: "ExpertWeights",
    shared: "ExpertWeights | None",
    experts: torch.Tensor,
    routing: torch.Tensor,
    limit: float,
    round_inputs: bool,
) -> torch.Tensor:
    """The routed experts' sum in fp32, or with the shared expert in x's dtype."""
    (tokens, width), (_, per_token), inner_width = x.shape, experts.shape, weights.w1.shape[-2]
    pairs, shared_tokens = experts.numel(), tokens if shared else 0
    shared_width = shared.w1.shape[-2] if shared else 0
    shared_chunks = triton.cdiv(shared_tokens, SHARED_TOKENS)
    chunk, up_rows, down_rows, splits, each, stages = _blocks(tokens)
    steps = math.gcd(width // 128, inner_width // 128, shared_width // 128)
    splits = math.gcd(splits, steps)
    each = math.gcd(each, steps // splits)
    sums = tokens * (width // down_rows)
    counts = pairs * (inner_width // 128) + shared_chunks * (shared_width // 128) + sums

    def new(*shape: int, dtype: torch.dtype = x.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    y = new(tokens, width, dtype=x.dtype if shared else torch.float32)
    order, place, chunks, counters = (new(n, dtype=torch.int32) for n in (pairs, pairs, pairs, counts))
    inputs, shared_inputs = new(tokens, width), new(shared_tokens, width)
    others = max(triton.cdiv(counts, prepare.COUNTERS), triton.cdiv(pairs, prepare.PAIRS))
    prepare.prepare[(tokens * triton.cdiv(width, prepare.COLUMNS) + others,)](
        x, experts, inputs, shared_inputs, order, place, chunks, counters, tokens, pairs, counts, x.stride(0), width,
        chunk, shared is not None, round_inputs, prepare.COLUMNS, prepare.PAIRS, prepare.OTHERS,
        prepare.COUNTERS,
    )  # fmt: skip
    inner, shared_inner = new(2, pairs, inner_width), new(2, shared_tokens, shared_width)
    one, numbers = shared or weights, (order, chunks, tokens, pairs, shared_chunks)
    _up[(max(inner_width, shared_width) // up_rows, shared_chunks + pairs)](
        inputs, shared_inputs, *_stored(weights.w1, weights.w1_scale), *_stored(weights.w3, weights.w3_scale),
        *_stored(one.w1, one.w1_scale), *_stored(one.w3, one.w3_scale), routing, inner, shared_inner, counters,
        *numbers, limit, width, inner_width, shared_width, per_token, chunk, SHARED_TOKENS, round_inputs, up_rows,
        splits, each, stages, num_warps=splits,
    )  # fmt: skip
    parts, shared_parts = new(pairs, width), new(shared_tokens, width)
    _down[(width // down_rows, shared_chunks + pairs)](
        inner, shared_inner, *_stored(weights.w2, weights.w2_scale), *_stored(one.w2, one.w2_scale), parts,
        shared_parts, counters[counts - sums :], place, y, *numbers, width, inner_width, shared_width, per_token, chunk,
        SHARED_TOKENS, down_rows, splits, each, stages, num_warps=splits,
    )  # fmt: skip
    return y


def _blocks(tokens: int) -> tuple[int, int, int, int, int, int]:
    """Tokens of a chunk; rows of w1 and as many of w3, rows of w2 in a program; its warps; steps at a time, stages.

    Measured on an H200 with 6 of 256 experts of 4096-2048-4096.
    """
    return (2, 16, 32, 2, 4, 2) if tokens == 1 else (2, 16, 32, 1, 4, 2)


def _stored(weight: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as int32 words of codes; its scales as bytes, or of FP4 four in a word."""
    assert scale is not None
    return weight.view(torch.int32), scale.view(torch.int32 if weight.dtype == torch.int8 else torch.uint8)


@triton.jit
def _fp4_rows(w, scale, matrix, first, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    """Pointers to rows first .. first + ROWS - 1 of a matrix [N, K] of several, for fp4_products."""
    start = matrix.to(tl.int64) * N + first
    words = w + (start + row_in_load_order(ROWS)[:, None]) * (K // 8) + tl.arange(0, 16)[None]
    return words, scale + (start + tl.arange(0, ROWS)) * (K // 128)


@triton.jit
def _fp8_rows(w, scale, first, K: tl.constexpr, ROWS: tl.constexpr):
    """The same of a single matrix, for fp8_products."""
    words = w + (first + row_in_load_order(ROWS)[:, None]).to(tl.int64) * (K // 4) + tl.arange(0, 16)[None]
    return words, scale + first // 128 * ((K + 127) // 128)


@triton.jit
def _gate(
    gate,  # fp32 [ROWS, TOKENS] w1 x
    up,  # w3 x
    factor,  # fp32 [TOKENS]
    position,  # int64 [TOKENS] of inner, >= 0
    real,  # bool [TOKENS]
    inner,  # bf16 [INNER] at each position: inputs of products
    raw,  # the same before rounding
    counter,  # of programs that have stored their part of 128 inner values
    first,
    limit,
    INNER: tl.constexpr,
    ROUND: tl.constexpr,
    H: tl.constexpr,  # of the products
):
    ROWS: tl.constexpr = gate.shape[0]
    gate, up = gate.to(tl.bfloat16).to(tl.float32), up.to(tl.bfloat16).to(tl.float32)
    values = (factor[None] * gated_values(gate, up, limit)).to(tl.bfloat16)
    row = first + tl.arange(0, ROWS)
    if not ROUND:
        place = position[None] * INNER + arranged(row, H)[:, None]
        tl.store(inner + place, as_input(values.to(tl.float32), False), real[None])
    else:
        tl.store(raw + position[None] * INNER + row[:, None], values, real[None])
        tl.debug_barrier()  # before the counter says that the values are there
        if tl.atomic_add(counter, 1, sem="acq_rel") == 128 // ROWS - 1:
            column = first // 128 * 128 + tl.arange(0, 128)
            place = position[:, None] * INNER + column[None]
            block = tl.load(raw + place, real[:, None], other=0.0, cache_modifier=".cg").to(tl.float32)
            place = position[:, None] * INNER + arranged(column, H)[None]
            tl.store(inner + place, as_input(block, True), real[:, None])


@triton.jit(do_not_specialize=["tokens", "pairs", "shared_chunks"])
def _up(
    inputs, shared_inputs,  # as prepare leaves them
    w1, w1_scale, w3, w3_scale,  # FP4 [E, INNER, D], as words of codes and of scales
    shared_w1, shared_w1_scale, shared_w3, shared_w3_scale,  # FP8 [SHARED_INNER, D]
    routing,  # fp32 [pairs]
    inner,  # [2, pairs, INNER]: inputs of w2 by position, before that values not rounded
    shared_inner,  # [2, tokens, SHARED_INNER]
    counters,  # [pairs, INNER / 128], then [shared_chunks, SHARED_INNER / 128]
    order, chunks, tokens, pairs, shared_chunks,  # as prepare leaves them
    limit,
    D: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr, PER_TOKEN: tl.constexpr,
    CHUNK: tl.constexpr, SHARED_CHUNK: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, EACH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first, number = tl.program_id(0) * ROWS, tl.program_id(1)
    token = tl.arange(0, CHUNK)
    begin, size, expert = number - shared_chunks, 0, 0
    if (begin >= 0) & (first < INNER):
        chunk = tl.load(chunks + begin)
        expert, size = chunk // 16, chunk % 16
    if size > 0:
        owner = tl.arange(0, 16 * CHUNK) // 16
        pair = tl.load(order + begin + owner, owner < size, other=0)
        first_rows, first_scales = _fp4_rows(w1, w1_scale, expert, first, INNER, D, ROWS)
        second_rows, second_scales = _fp4_rows(w3, w3_scale, expert, first, INNER, D, ROWS)
        gate, up = fp4_products(
            (first_rows, second_rows), (first_scales, second_scales), inputs,
            (pair // PER_TOKEN).to(tl.int64) * D, owner < size, D, CHUNK, SPLITS, EACH, STAGES,
        )  # fmt: skip
        pair = tl.load(order + begin + token, token < size, other=0)
        factor = tl.load(routing + pair, token < size, other=0.0)
        _gate(
            gate, up, factor, (begin + token).to(tl.int64), token < size, inner,
            inner + pairs.to(tl.int64) * INNER, counters + begin * (INNER // 128) + first // 128, first, limit,
            INNER, ROUND, 4,
        )  # fmt: skip
    if SHARED_INNER > 0 and (begin < 0) & (first < SHARED_INNER):
        user = number * SHARED_CHUNK + tl.arange(0, SHARED_CHUNK)
        owner = number * SHARED_CHUNK + tl.arange(0, 4 * SHARED_CHUNK) // 4
        first_rows, first_scales = _fp8_rows(shared_w1, shared_w1_scale, first, D, ROWS)
        second_rows, second_scales = _fp8_rows(shared_w3, shared_w3_scale, first, D, ROWS)
        gate, up = fp8_products(
            (first_rows, second_rows), (first_scales, second_scales), shared_inputs, owner.to(tl.int64) * D,
            owner < tokens, D, SHARED_CHUNK, SPLITS, EACH, STAGES,
        )  # fmt: skip
        counter = pairs * (INNER // 128) + number * (SHARED_INNER // 128) + first // 128
        _gate(
            gate, up, tl.full((SHARED_CHUNK,), 1.0, tl.float32), user.to(tl.int64), user < tokens, shared_inner,
            shared_inner + tokens.to(tl.int64) * SHARED_INNER, counters + counter, first, limit, SHARED_INNER,
            ROUND, 2,
        )  # fmt: skip


@triton.jit
def _add(
    token,
    row,
    parts,
    shared_parts,
    place,
    y,
    D: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Adds what the programs before have stored for a token: its experts in ascending order, then the shared one."""
    total = tl.zeros(row.shape, tl.float32)
    last = -1
    places: tl.constexpr = triton.next_power_of_2(PER_TOKEN)
    slot = tl.arange(0, places)
    positions = tl.load(place + token * PER_TOKEN + slot, slot < PER_TOKEN, other=0x7FFFFFFF)
    for _ in tl.static_range(PER_TOKEN):
        last = tl.min(tl.where(positions > last, positions, 0x7FFFFFFF), 0)
        total += tl.load(parts + last.to(tl.int64) * D + row, cache_modifier=".cg").to(tl.float32)
    if SHARED:
        total += tl.load(shared_parts + token.to(tl.int64) * D + row, cache_modifier=".cg").to(tl.float32)
    tl.store(y + token.to(tl.int64) * D + row, total.to(y.dtype.element_ty))


@triton.jit(do_not_specialize=["tokens", "pairs", "shared_chunks"])
def _down(
    inner, shared_inner,  # as _up leaves them
    w2, w2_scale,  # FP4 [E, D, INNER]
    shared_w2, shared_w2_scale,  # FP8 [D, SHARED_INNER]
    parts,  # bf16 [pairs, D] w2's results by position
    shared_parts,  # bf16 [tokens, D]
    counters,  # [tokens, D / ROWS] of parts that are stored
    place,  # as prepare leaves it
    y,  # [tokens, D]
    order, chunks, tokens, pairs, shared_chunks,
    D: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr, PER_TOKEN: tl.constexpr,
    CHUNK: tl.constexpr, SHARED_CHUNK: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, EACH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first, number = tl.program_id(0) * ROWS, tl.program_id(1)
    row = first + tl.arange(0, ROWS)
    needed: tl.constexpr = PER_TOKEN + (SHARED_INNER > 0)
    begin, size, expert = number - shared_chunks, 0, 0
    if begin >= 0:
        chunk = tl.load(chunks + begin)
        expert, size = chunk // 16, chunk % 16
    if size > 0:
        owner = tl.arange(0, 16 * CHUNK) // 16
        rows, scales = _fp4_rows(w2, w2_scale, expert, first, D, INNER, ROWS)
        (sums,) = fp4_products(
            (rows,), (scales,), inner, (begin + owner).to(tl.int64) * INNER, owner < size, INNER, CHUNK, SPLITS, EACH,
            STAGES,
        )  # fmt: skip
        token = tl.arange(0, CHUNK)
        to = parts + (begin + token).to(tl.int64)[None] * D + row[:, None]
        tl.store(to, sums.to(tl.bfloat16), (token < size)[None])
    if SHARED_INNER > 0 and begin < 0:
        token = number * SHARED_CHUNK + tl.arange(0, SHARED_CHUNK)
        owner = number * SHARED_CHUNK + tl.arange(0, 4 * SHARED_CHUNK) // 4
        rows, scales = _fp8_rows(shared_w2, shared_w2_scale, first, SHARED_INNER, ROWS)
        (sums,) = fp8_products(
            (rows,), (scales,), shared_inner, owner.to(tl.int64) * SHARED_INNER, owner < tokens, SHARED_INNER,
            SHARED_CHUNK, SPLITS, EACH, STAGES,
        )  # fmt: skip
        to = shared_parts + token.to(tl.int64)[None] * D + row[:, None]
        tl.store(to, sums.to(tl.bfloat16), (token < tokens)[None])
        size = tl.minimum(tokens - number * SHARED_CHUNK, SHARED_CHUNK)
    tl.debug_barrier()  # before the counters say that the part is there
    for i in range(size):
        token = number * SHARED_CHUNK + i
        if begin >= 0:
            token = tl.load(order + begin + i) // PER_TOKEN
        counter = counters + token * (D // ROWS) + first // ROWS
        if tl.atomic_add(counter, 1, sem="acq_rel") == needed - 1:
            _add(token, row, parts, shared_parts, place, y, D, PER_TOKEN, SHARED_INNER > 0)
