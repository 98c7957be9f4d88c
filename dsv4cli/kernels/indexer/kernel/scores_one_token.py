"""Scores over FP4 keys for few tokens in Triton: each program processes every n-th tile of keys for one token."""

import triton.language as tl

from dsv4cli.kernels.indexer.kernel.fp4_keys import as_keys, key_tile, twice_sum
from dsv4cli.kernels.launch import launched
from dsv4cli.kernels.pdl import wait_for_inputs


@launched(do_not_specialize=["entries", "splits"])
def scores_of_one_token(
    q,  # [T, H, D]
    weights,  # [T, H]
    weight_scale,
    keys,  # int32 [cells, D / 8]
    key_scale,  # uint8 [cells, D / 32]
    table,  # [B, entries]
    sequence,  # [T]
    visible,  # [T]
    out,  # [T, entries], out_stride apart
    peaks,  # PEAKS: [T, .], the largest score of each eight with a visible one
    counts,  # PEAKS: [T], set to 0
    entries,
    splits,
    q_stride,
    weight_stride,
    table_stride,
    out_stride,
    peak_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    M: tl.constexpr,
    PEAKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, row = tl.arange(0, HEADS), tl.arange(0, M)
    word, block = tl.arange(0, D // 8)[None], tl.arange(0, D // 32)[None]
    place = q + token * q_stride + head[:, None] * D + tl.arange(0, D)[None]
    if not PEAKS:
        wait_for_inputs(OVERLAP)
    seen = tl.minimum(tl.load(visible + token, cache_modifier=".cg"), entries).to(tl.int32)
    tiles, scored = tl.cdiv(entries, M), tl.cdiv(seen, M)
    cells_of = table + tl.load(sequence + token, cache_modifier=".cg") * table_stride
    cells = tl.load(cells_of + split * M + row, split * M + row < seen, other=0, cache_modifier=".cg")
    if PEAKS:
        # nothing loaded so far is written by the previous kernel
        wait_for_inputs(OVERLAP)
        tl.store(counts + token, 0, split == 0)
    if split < scored:
        # software pipeline: unpack a tile while the next tile's words and the cells of the one after it are loading
        query = as_keys(tl.load(place, head[:, None] < H, other=0.0))
        weight = tl.load(weights + token * weight_stride + head, head < H, other=0.0).to(tl.float32)
        weight = (weight * weight_scale).to(tl.bfloat16)
        ones = tl.full([HEADS, 16], 1.0, tl.float32).to(tl.bfloat16)
        scale = tl.load(key_scale + cells[:, None] * (D // 32) + block)
        tile, size = key_tile(tl.load(keys + cells[:, None] * (D // 8) + word), scale)
        entry = (split + splits) * M + row
        cells = tl.load(cells_of + entry, entry < seen, other=0)
        scale = tl.load(key_scale + cells[:, None] * (D // 32) + block)
        words = tl.load(keys + cells[:, None] * (D // 8) + word)
        entry = (split + 2 * splits) * M + row
        cells = tl.load(cells_of + entry, entry < seen, other=0)
        for number in tl.range(split, scored, splits, num_stages=1):
            score = twice_sum(tl.dot(tile, query.T), weight, ones) * (0.5 * size)
            entry = number * M + row
            score = tl.where(entry < seen, score, float("-inf"))
            tl.store(out + token * out_stride + entry, score.to(tl.bfloat16), entry < entries)
            if PEAKS:
                eight = number * (M // 8) + tl.arange(0, M // 8)
                highest = tl.max(tl.reshape(score, [M // 8, 8]), 1)
                tl.store(peaks + token * peak_stride + eight, highest.to(tl.bfloat16), eight * 8 < seen)
            tile, size = key_tile(words, scale)
            scale = tl.load(key_scale + cells[:, None] * (D // 32) + block)
            words = tl.load(keys + cells[:, None] * (D // 8) + word)
            entry = (number + 3 * splits) * M + row
            cells = tl.load(cells_of + entry, entry < seen, other=0)
    for number in range(split + tl.cdiv(tl.maximum(scored - split, 0), splits) * splits, tiles, splits):
        rest = number * M + row
        hidden = tl.full([M], float("-inf"), tl.float32)
        tl.store(out + token * out_stride + rest, hidden.to(tl.bfloat16), rest < entries)
