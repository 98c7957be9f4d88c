"""The router for a few tokens in one launch: some programs sum logits, and one per token selects its experts."""

import triton
import triton.language as tl

from dsv4cli.kernels.cross_program import leave, take
from dsv4cli.kernels.gemm.kernel.dequant import add_exact_products
from dsv4cli.kernels.launch import launched
from dsv4cli.kernels.pdl import wait_for_inputs
from dsv4cli.kernels.routing.kernel.topk import best_of, score_of, store_choice

# the most tokens for a single launch: one tile of the tensor cores
FEW = 16


@triton.jit
def with_products(sums, factors, values):
    """Add the products of factors [E, K] and values [T, K], which are exact, to fp32 sums [E, T]."""
    if values.dtype == tl.bfloat16 and factors.dtype == tl.float16:
        sums = add_exact_products(factors, tl.trans(values), sums)
    else:
        if values.dtype != factors.dtype:
            values, factors = values.to(tl.float32), factors.to(tl.float32)
        sums = tl.dot(factors, tl.trans(values), sums, input_precision="ieee")
    return sums


@triton.jit
def _logit_of_each(
    program, x, weight, routed, parts, count, stride,
    NUMBER: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute each token's partial logit of one expert."""
    expert, split = program // SPLITS, program % SPLITS
    column = split * BLOCK + tl.arange(0, BLOCK)[None]
    factors = tl.load(weight + expert * WIDTH + column, column < WIDTH, other=0.0)
    wait_for_inputs(OVERLAP)
    for token in range(count):
        row = token if routed is None else tl.load(routed + token)
        values = tl.load(x + row * stride + column, column < WIDTH, other=0.0)
        total = tl.sum(factors.to(tl.float32) * values.to(tl.float32), 1)
        leave(parts + (token * SPLITS + split) * NUMBER + expert + tl.arange(0, 1), total, tl.arange(0, 1) == 0)


@triton.jit
def _logits_of_few(
    program, x, weight, routed, parts, count, stride,
    NUMBER: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute all tokens' partial logits of EXPERTS experts."""
    split, first = program % SPLITS, program // SPLITS * EXPERTS
    expert, column = first + tl.arange(0, EXPERTS)[:, None], split * BLOCK + tl.arange(0, BLOCK)[None]
    factors = tl.load(weight + expert * WIDTH + column, (expert < NUMBER) & (column < WIDTH), other=0.0)
    token = tl.arange(0, TOKENS)[:, None]
    row = token if routed is None else tl.load(routed + token, token < count, other=0, cache_modifier=".cg")
    wait_for_inputs(OVERLAP)
    values = tl.load(x + row * stride + column, (token < count) & (column < WIDTH), other=0.0)
    sums = tl.trans(with_products(tl.zeros([EXPERTS, TOKENS], tl.float32), factors, values))
    expert = first + tl.arange(0, EXPERTS)[None]
    leave(parts + (token * SPLITS + split) * NUMBER + expert, sums, (token < count) & (expert < NUMBER))


@triton.jit
def _choose(
    token, parts, bias, experts, weights, route_scale,
    NUMBER: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, ALL: tl.constexpr,
    PLACES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    expert, split = tl.arange(0, ALL), tl.arange(0, PARTS)[:, None]
    extra = tl.load(bias + expert, expert < NUMBER, other=0.0)
    place, inside = parts + (token * SPLITS + split) * NUMBER + expert[None], (split < SPLITS) & (expert < NUMBER)[None]
    wait_for_inputs(OVERLAP)
    scores = score_of(tl.sum(take(place, inside), 0))
    chosen, values = best_of(scores, scores + extra, NUMBER, K, PLACES)
    store_choice(experts, weights, token, chosen, values, route_scale, K)


@launched(do_not_specialize=["count"])
def fused_route(
    x,  # [count, WIDTH]
    weight,  # [NUMBER, WIDTH]
    bias,  # [NUMBER]
    parts,  # int32 [FEW, SPLITS, NUMBER], zeros
    routed,  # int64 [count] the row of x of each token, or None
    experts,  # [count, K]
    weights,  # [count, K]
    count,
    stride,
    route_scale,
    NUMBER: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,  # SPLITS, rounded up
    K: tl.constexpr,
    ALL: tl.constexpr,  # NUMBER, rounded up
    PLACES: tl.constexpr,  # K, rounded up
    TOKENS: tl.constexpr,  # per program that sums logits; 1: one after another
    EXPERTS: tl.constexpr,  # per program that sums logits
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    program, adding = tl.program_id(0), (NUMBER + EXPERTS - 1) // EXPERTS * SPLITS
    if program >= adding:
        _choose(
            program - adding, parts, bias, experts, weights, route_scale,
            NUMBER, SPLITS, PARTS, K, ALL, PLACES, OVERLAP,
        )  # fmt: skip
    elif TOKENS == 1:
        _logit_of_each(program, x, weight, routed, parts, count, stride, NUMBER, WIDTH, SPLITS, BLOCK, OVERLAP)
    else:
        _logits_of_few(
            program, x, weight, routed, parts, count, stride, NUMBER, WIDTH, SPLITS, EXPERTS, TOKENS, BLOCK, OVERLAP
        )
