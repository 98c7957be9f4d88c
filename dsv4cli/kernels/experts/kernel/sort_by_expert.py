"""Groups the pairs (token, place) of a step by expert, on the device: a counting sort that also cuts tiles."""

from dataclasses import dataclass

import torch
import triton.language as tl

from dsv4cli.kernels.experts.kernel.few_tokens_prepare import packed_chunk
from dsv4cli.kernels.launch import cdiv, launched, next_power_of_2

# pairs that a program counts and places; it compares each with all others (7 us for 64 tokens, 24 us for 4,096)
CHUNK = 128
# chunks whose counts a program adds at a time
ROWS = 32
# number of counters: 16 bytes
TURNS = 4


@dataclass(frozen=True)
class Groups:
    """Pairs by expert, cut into tiles of one expert each: int32 tensors on the device."""

    order: torch.Tensor  # [P] the pair t * k + place at each position
    position: torch.Tensor  # [P] of each pair
    row: torch.Tensor  # [tiles] the row of a tile's expert in the stacks
    start: torch.Tensor  # [tiles] its first position
    rows: torch.Tensor  # [tiles] its number of pairs, 0 for a tile that is not needed
    # int64 [tiles] the same three in a word, as `few_tokens_prepare.chunk_parts` reads it, if a tile has < 256 pairs
    words: torch.Tensor
    count: torch.Tensor  # [1] the number of tiles with pairs, which come first
    turns: torch.Tensor  # [TURNS] zeros: counters for programs that take tiles in turn, one counter per launch


def group(experts: torch.Tensor, rows: torch.Tensor | None, count: int, size: int) -> Groups:
    """Sort pairs by expert, in ascending order of pairs, and cut them into tiles of up to `size` pairs.

    The number of tiles is the most that T and k allow; tiles that are not needed have no rows.

    Args:
        experts: int64 [T, k], each below `count`.
        rows: int64 [count], each expert's row in the stacks, or None.
    """
    pairs = experts.numel()
    tiles, chunks = min(pairs // size + count, pairs), cdiv(pairs, CHUNK)
    bins = max(16, next_power_of_2(count))

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=experts.device)

    zeros, counts = ints(TURNS + tiles), ints(chunks, bins)
    words = torch.empty(tiles, dtype=torch.int64, device=experts.device)
    groups = Groups(
        ints(pairs), ints(pairs), ints(tiles), ints(tiles), zeros[TURNS:], words, ints(1), zeros[:TURNS]
    )  # fmt: skip
    given = experts.contiguous()
    _count[(max(chunks, cdiv(len(zeros), CHUNK)),)](given, counts, zeros, pairs, len(zeros), bins, CHUNK)
    _place[(chunks,)](
        given, rows, counts, groups.order, groups.position, groups.row, groups.start, groups.rows,
        groups.words, groups.count, pairs, chunks, bins, CHUNK, ROWS, size, num_warps=8,
    )  # fmt: skip
    return groups


@launched(do_not_specialize=["pairs", "length"])
def _count(
    experts,  # int64 [pairs]
    counts,  # [chunks, BINS]
    zeros,  # [length], set to 0
    pairs,
    length,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    tl.store(zeros + index, 0, index < length)
    if chunk * CHUNK < pairs:
        inside = index < pairs
        expert = tl.load(experts + index, inside, other=0).to(tl.int32)
        tl.store(counts + chunk * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS, mask=inside))


@launched(do_not_specialize=["pairs", "chunks"])
def _place(
    experts,  # int64 [pairs]
    stacked,  # int64 [E] the row of each expert, or None
    counts,  # [chunks, BINS]
    order,  # [pairs]
    positions,  # [pairs]
    tile_row,  # [tiles], and the two below
    tile_start,
    tile_rows,
    tile_words,  # int64
    count,  # [1] the number of tiles with pairs
    pairs,
    chunks,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    chunk = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)  # pairs of each expert in the chunks before this one
    for block in range(0, chunks, ROWS):
        row = block + tl.arange(0, ROWS)[:, None]
        some = tl.load(counts + row * BINS + bins[None], row < chunks, other=0)
        total += tl.sum(some, 0)
        before += tl.sum(tl.where(row < chunk, some, 0), 0)
    tiles = (total + (SIZE - 1)) // SIZE
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = index < pairs
    expert = tl.load(experts + index, inside, other=0).to(tl.int32)
    other = chunk * CHUNK + tl.arange(0, CHUNK)
    theirs = tl.load(experts + other, other < pairs, other=-1).to(tl.int32)
    earlier = (theirs[None] == expert[:, None]) & (other[None] < index[:, None])
    rank = tl.gather(before, expert, 0) + tl.sum(earlier.to(tl.int32), 1)  # among the pairs of its expert
    position = tl.gather(tl.cumsum(total, 0) - total, expert, 0) + rank
    tl.store(order + position, index, inside)
    tl.store(positions + index, position, inside)
    # the first pair of a tile stores the tile's data
    first = inside & (rank % SIZE == 0)
    tile = tl.gather(tl.cumsum(tiles, 0) - tiles, expert, 0) + rank // SIZE
    own = expert if stacked is None else tl.load(stacked + expert, first, other=0).to(tl.int32)
    tl.store(tile_row + tile, own, first)
    tl.store(tile_start + tile, position, first)
    size = tl.minimum(tl.gather(total, expert, 0) - rank, SIZE)
    tl.store(tile_rows + tile, size, first)
    tl.store(tile_words + tile, packed_chunk(own, position, size), first)
    tl.store(count, tl.sum(tiles), chunk == 0)
