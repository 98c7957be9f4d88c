"""Device functions that load and store the metadata of tokens and groups."""

import triton
import triton.language as tl

from dsv4cli.kernels.step_metadata.types import WITH_PREVIOUS

PREVIOUS = tl.constexpr(WITH_PREVIOUS)


@triton.jit
def owner_of(sizes, number):
    """Return the run of each number (int32 [m]) and the run's first number; runs of `sizes` (int32 [n]) are
    consecutive.
    """
    before = tl.cumsum(sizes, 0)[None] <= number[:, None]
    return tl.sum(before.to(tl.int32), 1), tl.sum(tl.where(before, sizes[None], 0), 1)


@triton.jit
def picked(numbers, owner, sequences):
    """Load the numbers (int64 [sequences] in memory) of these sequences as int32; 0 past the end."""
    return tl.load(numbers + owner, owner < sequences, other=0).to(tl.int32)


@triton.jit
def store_numbers(out, row, numbers, known):
    tl.store(out + row, numbers.to(tl.int64), known)


@triton.jit
def store_turns(turns, row, known, position, frequencies, PAIRS: tl.constexpr, TURNS: tl.constexpr):
    """Store cosine and sine of each pair at these positions (int32 [n]); turns: fp32 [., PAIRS, 2]."""
    pair, column = tl.arange(0, TURNS), tl.arange(0, 2 * TURNS)[None]
    angle = position.to(tl.float32)[:, None] * tl.load(frequencies + pair, pair < PAIRS, other=0.0)[None]
    both = tl.interleave(tl.cos(angle), tl.sin(angle))
    tl.store(turns + row[:, None] * (2 * PAIRS) + column, both, known[:, None] & (column < 2 * PAIRS))


@triton.jit
def chunk_of(row, sizes, slots, starts, counts, sequences):
    """Return the chunk of each row (int32 [n]): its sequence, first row, first position, token count and slot."""
    owner, offset = owner_of(sizes, row)
    size, ring = picked(counts, owner, sequences), picked(slots, owner, sequences)
    return owner, offset, picked(starts, owner, sequences), size, ring


@triton.jit
def columns_before(first, size, owner, fewest, sequences, WINDOW: tl.constexpr):
    """Return how many columns of a token's list precede its entries."""
    # the official code lists as many window rows as the prompt has tokens in prefill, and a full window in decode
    least = tl.maximum(size, picked(fewest, owner, sequences))
    return tl.where(first == 0, tl.minimum(least, WINDOW), WINDOW)


@triton.jit
def window_row(
    column,
    position,
    first,
    offset,
    owner,
    ring,
    sequences,
    WINDOW: tl.constexpr,
    CAPACITY: tl.constexpr,
    IN_RINGS: tl.constexpr,
):
    """Return the rows of the window's keys in these columns of a token's list (int32 [1, m]), -1 if there is none.

    Arguments per token, int32 [n]: its position, and the first position, first row, sequence and slot of its chunk.
    """
    seen = tl.maximum(position - WINDOW + 1, 0)[:, None] + column
    cell = seen % CAPACITY
    if IN_RINGS:
        rows = ring[:, None] * CAPACITY + cell
    else:
        fresh = sequences * CAPACITY + (offset - first)[:, None] + seen
        rows = tl.where(seen >= first[:, None], fresh, owner[:, None] * CAPACITY + cell)
    return tl.where(seen <= position[:, None], rows, -1)


@triton.jit
def entry_cell(blocks, sequence, entry, known, stride, PER_BLOCK: tl.constexpr):
    """Return the cells of a sequence's entries, int32."""
    place = blocks + sequence.to(tl.int64) * stride + entry // PER_BLOCK
    return tl.load(place, known, other=0).to(tl.int32) * PER_BLOCK + entry % PER_BLOCK


@triton.jit
def store_groups(
    groups,  # int64 [., 5]
    entries,  # int64 [.]
    turns,  # fp32 [., PAIRS, 2]
    row,  # int32 [n]
    sizes,  # int32 [SEQUENCES]: the token count of each chunk
    slots,
    starts,
    counts,
    sequences,
    blocks,
    block_stride,
    frequencies,
    total,
    RATIO: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    TURNS: tl.constexpr,
):
    new = (sizes + RATIO - 1) // RATIO
    new += tl.where(tl.arange(0, sizes.shape[0]) == sequences - 1, total - tl.sum(new, 0), 0)
    known = row < total
    owner, offset = owner_of(new, row)
    first = picked(starts, owner, sequences)
    end = first + picked(counts, owner, sequences)
    before = tl.arange(0, sizes.shape[0])[None] < owner[:, None]
    group = row - offset + first // RATIO
    place = groups + row * 5
    store_numbers(place, 0, picked(slots, owner, sequences), known)
    store_numbers(place, 1, group * RATIO - (RATIO if RATIO == PREVIOUS else 0), known)
    store_numbers(place, 2, first, known)
    store_numbers(place, 3, end, known)
    store_numbers(place, 4, tl.sum(tl.where(before, sizes[None], 0), 1), known)
    complete = known & (group < end // RATIO)
    cell = entry_cell(blocks, owner, group, complete, block_stride, PER_BLOCK)
    store_numbers(entries, row, tl.where(complete, cell, -1), known)
    store_turns(turns, row, known, group * RATIO, frequencies, PAIRS, TURNS)


@triton.jit
def store_table(table, blocks, sequence, entry, columns, block_stride, PER_BLOCK: tl.constexpr):
    """Store the cells of these entries (int32 [n]) of a sequence; table: int64 [., columns * PER_BLOCK]."""
    known = entry < columns * PER_BLOCK
    cell = entry_cell(blocks, sequence, entry, known, block_stride, PER_BLOCK)
    store_numbers(table + sequence.to(tl.int64) * columns * PER_BLOCK, entry, cell, known)
