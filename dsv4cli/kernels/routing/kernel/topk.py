"""Router scores, top-k experts and their weights."""

import triton
import triton.language as tl


@triton.jit
def score_of(logits):
    """Return sqrt(softplus(logits)); softplus is linear above 20, as in torch."""
    small = tl.minimum(logits, 20.0)
    # log(1 + u) = u * log(w) / (w - 1) with w the rounded sum: the rounding cancels (W. Kahan)
    power = tl.exp(small)
    above = 1.0 + power
    soft = tl.where(above == 1.0, power, tl.log(above) * (power / tl.where(above == 1.0, 1.0, above - 1.0)))
    return tl.sqrt(tl.where(logits > 20.0, logits, soft))


@triton.jit
def _ordered(x):
    """Return int32 values that compare like the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def best_of(scores, biased, NUMBER: tl.constexpr, K: tl.constexpr, PLACES: tl.constexpr):
    """Return the experts with the highest of NUMBER biased scores [EXPERTS], best first, and their scores: [PLACES]."""
    EXPERTS: tl.constexpr = scores.shape[0]
    expert, place = tl.arange(0, EXPERTS), tl.arange(0, PLACES)
    chosen, values = tl.zeros([PLACES], tl.int32), tl.zeros([PLACES], tl.int32)
    order = tl.where(expert < NUMBER, _ordered(biased), -0x80000000)
    for taken in tl.static_range(K):
        best = tl.min(tl.where(order == tl.max(order, 0), expert, EXPERTS), 0)
        # compare as integers, which a warp reduces in one instruction; no score is negative
        value = tl.max(tl.where(expert == best, scores.to(tl.int32, bitcast=True), 0), 0)
        chosen, values = tl.where(place == taken, best, chosen), tl.where(place == taken, value, values)
        order = tl.where(expert == best, -0x80000000, order)
    return chosen, values.to(tl.float32, bitcast=True)


@triton.jit
def store_choice(experts, weights, token, chosen, values, route_scale, K: tl.constexpr):
    """Store a token's experts [PLACES], and their scores [PLACES] normalized to sum to route_scale."""
    place = tl.arange(0, chosen.shape[0])
    values = tl.where(place < K, values, 0.0)
    tl.store(experts + token * K + place, chosen.to(tl.int64), place < K)
    tl.store(weights + token * K + place, values / tl.sum(values, 0) * route_scale, place < K)
