"""Scores over FP4 keys for many tokens of a sequence in Triton: a tile of keys is unpacked once for several tokens."""

import triton.language as tl

from dsv4cli.kernels.indexer.kernel.fp4_keys import as_keys, key_tile, twice_sum
from dsv4cli.kernels.launch import launched


@launched
def prepare_queries(
    q,  # bf16 [T, H, D]
    weights,  # bf16 [T, H]
    weight_scale,
    out,  # bf16 or e4m3 [T, HEADS, D]
    out_weights,  # bf16 [T, HEADS]
    q_stride,
    weight_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Reorder the queries' columns like the keys', and pad with zero heads.

    A power of two moves from each head to its weight, so that the head's values fit e4m3: at most 1.5 * 2 ** 8.
    """
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS), tl.arange(0, D)[None]
    place = q + token * q_stride + head[:, None] * D + column
    query = as_keys(tl.load(place, head[:, None] < H, other=0.0)).to(tl.float32)
    weight = tl.load(weights + token * weight_stride + head, head < H, other=0.0).to(tl.float32)
    weight = (weight * weight_scale).to(tl.bfloat16).to(tl.float32)
    exponent = tl.maximum(tl.max(tl.abs(query), 1).to(tl.int32, bitcast=True) >> 23, 9)
    factor = ((262 - exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((exponent - 8) << 23).to(tl.float32, bitcast=True)
    tl.store(out + (token * HEADS + head[:, None]) * D + column, (query * factor[:, None]).to(out.dtype.element_ty))
    tl.store(out_weights + token * HEADS + head, (weight * inverse).to(tl.bfloat16))


@launched(do_not_specialize=["tokens", "entries"])
def scores_of_many_tokens(
    q,  # [tokens, HEADS, D], with weights as `prepare_queries` makes them
    weights,  # [tokens, HEADS]
    keys,  # int32 [cells, D / 8]
    key_scale,  # uint8 [cells, D / 32]
    table,  # [B, entries]
    sequence,  # [tokens]
    visible,  # [tokens]
    out,  # [tokens, entries], out_stride apart
    tokens,
    entries,
    table_stride,
    out_stride,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):
    entry = tl.program_id(0) * M + tl.arange(0, M)
    start, end = tl.program_id(1) * TOKENS, tl.minimum(tl.program_id(1) * TOKENS + TOKENS, tokens)
    token = start + tl.arange(0, TOKENS)
    owner = tl.load(sequence + token, token < tokens, other=-1)
    seen = tl.max(tl.load(visible + token, token < tokens, other=0), 0)
    if seen <= tl.program_id(0) * M:
        hidden = tl.full([TOKENS, M], float("-inf"), tl.float32).to(tl.bfloat16)
        place = token[:, None].to(tl.int64) * out_stride + entry[None]
        tl.store(out + place, hidden, (token[:, None] < tokens) & (entry[None] < entries))
    else:
        head, column = tl.arange(0, HEADS), tl.arange(0, D)[None]
        word, block = tl.arange(0, D // 8)[None], tl.arange(0, D // 32)[None]
        ones = tl.full([HEADS, 16], 1.0, tl.float32).to(tl.bfloat16)
        while start < end:
            # the tokens of one sequence share their keys
            mine = tl.load(sequence + start)
            stop = tl.min(tl.where((token > start) & (owner != mine), token, end), 0)
            cells = tl.load(table + mine * table_stride + entry, entry < entries, other=0)[:, None]
            words, scale = tl.load(keys + cells * (D // 8) + word), tl.load(key_scale + cells * (D // 32) + block)
            tile, size = key_tile(words, scale)
            if q.dtype.element_ty == tl.float8e4nv:
                # at most 6 * 2 ** 6; values 2 ** 14 times smaller are rounded
                tile, size = (tile.to(tl.float32) * 64.0).to(tl.float8e4nv), size * 2.0**-6
            for number in tl.range(start, stop, num_stages=STAGES):
                place = tl.cast(number, tl.int64) * HEADS + head
                query = tl.load(q + place[:, None] * D + column)
                weight = tl.load(weights + place)
                score = twice_sum(tl.dot(tile, query.T), weight, ones) * (0.5 * size)
                score = tl.where(entry < tl.load(visible + number), score, float("-inf")).to(tl.bfloat16)
                tl.store(out + tl.cast(number, tl.int64) * out_stride + entry, score, entry < entries)
            start = stop
