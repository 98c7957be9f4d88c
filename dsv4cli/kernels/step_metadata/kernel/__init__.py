"""Step metadata in Triton: one launch whose programs divide tokens, groups, lists and tables among them.

Computes in 32 bits and stores 64.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import triton.language as tl

from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.launch import cdiv, launched, next_power_of_2
from dsv4cli.kernels.pdl import overlap, wait_for_inputs
from dsv4cli.kernels.step_metadata.kernel.rows import (
    chunk_of,
    columns_before,
    entry_cell,
    store_groups,
    store_numbers,
    store_table,
    store_turns,
    window_row,
)
from dsv4cli.kernels.step_metadata.types import ALL_LISTED, Chunks, Entries, Layout, StepMetadata

LISTED = tl.constexpr(ALL_LISTED)


def step_metadata(chunks: Chunks, layout: Layout, frequencies: dict[int, torch.Tensor]) -> StepMetadata:
    numbers = (chunks.slots, chunks.starts, chunks.counts, chunks.fewest, chunks.blocks)
    if any(x.dtype != torch.int64 or (x.stride(-1) != 1 and x.shape[-1] > 1) for x in numbers):
        raise KernelUnsupported("the Triton kernel requires contiguous int64 numbers")
    (sequences, columns), ratios = chunks.blocks.shape, tuple(layout.groups)
    made, pairs = empty_metadata(chunks, layout, frequencies), next(iter(frequencies.values())).numel()
    entries, listing = [made.entries[ratio] for ratio in ratios], ALL_LISTED in ratios
    rows, across, warps = metadata_tiles(layout.tokens)
    tiles, lists = cdiv(layout.tokens, rows), made.every_entry.shape[1]
    programs = tiles * (1 + len(frequencies) + len(ratios) + (cdiv(lists, across) if listing else 0))
    programs += sum(sequences * cdiv(columns * (layout.block // ratio), across) for ratio in ratios)
    if tiles:
        _step_metadata[(programs,)](
            *numbers, tuple(frequencies.values()), tuple(frequencies[ratio] for ratio in ratios),
            made.sequence, made.positions, made.last, made.window_index, made.window_columns, made.window_cells,
            made.every_entry, tuple(map(torch.view_as_real, made.rotations.values())),
            tuple(one.groups for one in entries), tuple(one.cells for one in entries),
            tuple(torch.view_as_real(one.rotation) for one in entries), tuple(one.visible for one in entries),
            tuple(one.table for one in entries),
            layout.tokens, sequences, columns, chunks.blocks.stride(0), lists, layout.rows,
            *(*layout.groups.values(), 0, 0)[:2],
            ratios, layout.window, layout.capacity, layout.in_rings, layout.block, pairs,
            next_power_of_2(sequences), next_power_of_2(layout.window), next_power_of_2(pairs),
            rows, across, num_warps=warps, **overlap(chunks.slots),
        )  # fmt: skip
    seen = {r: replace(one, table=one.table[:, : layout.entries[r]]) for r, one in made.entries.items()}
    return replace(made, entries=seen)


class MetadataTiles(NamedTuple):
    """Tokens per program, columns of their lists per program, and warps."""

    tokens: int
    columns: int
    warps: int


def metadata_tiles(tokens: int) -> MetadataTiles:
    """Return the fastest tile sizes measured."""
    # H200: 64 tokens at 8K 2.3 us, 2.8 with four warps; 8,192 tokens 16 us, 22 with four tokens per program
    return MetadataTiles(1, 256, 2) if tokens <= 64 else MetadataTiles(8, 256, 4)


def empty_metadata(chunks: Chunks, layout: Layout, frequencies: dict[int, torch.Tensor]) -> StepMetadata:
    """Allocate the outputs. Tables have a column for each entry that the blocks hold."""
    device, tokens, (sequences, columns) = chunks.slots.device, layout.tokens, chunks.blocks.shape
    pairs = next(iter(frequencies.values())).numel()

    def whole(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)

    def turns(count: int) -> torch.Tensor:
        return torch.empty(count, pairs, dtype=torch.complex64, device=device)

    def entries(ratio: int) -> Entries:
        groups = layout.groups[ratio]
        table = whole(sequences, columns * (layout.block // ratio))
        return Entries(whole(groups, 5), whole(groups), turns(groups), whole(tokens), table)

    index = whole(tokens, layout.window)
    listed = layout.window + layout.entries.get(ALL_LISTED, 0)
    return StepMetadata(
        sequence=whole(tokens),
        positions=whole(tokens),
        last=whole(sequences),
        window_index=index,
        window_columns=whole(tokens),
        window_cells=whole(tokens),
        rotations={ratio: turns(tokens) for ratio in frequencies},
        entries={ratio: entries(ratio) for ratio in layout.groups},
        every_entry=whole(tokens, listed) if ALL_LISTED in layout.groups else index,
    )


@launched(
    do_not_specialize=[
        "tokens",
        "sequences",
        "columns",
        "block_stride",
        "lists",
        "window_rows",
        "first_groups",
        "second_groups",
    ],
    do_not_specialize_on_alignment=["slots", "starts", "counts", "fewest", "blocks"],
)
def _step_metadata(
    slots,  # this and the next three int64 [sequences]
    starts,
    counts,
    fewest,
    blocks,  # int64 [sequences, columns]
    frequencies,  # fp32 [PAIRS] of each ratio with rotations
    group_frequencies,  # of each of RATIOS
    sequence,  # the outputs, as in StepMetadata
    positions,
    last,
    window_index,
    window_columns,
    window_cells,
    every_entry,
    rotations,
    groups,  # this and the next four: one of each of RATIOS
    cells,
    group_rotations,
    visible,
    tables,
    tokens,
    sequences,
    columns,
    block_stride,
    lists,  # columns of every_entry
    window_rows,
    first_groups,  # number of groups of each of RATIOS
    second_groups,
    RATIOS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPACITY: tl.constexpr,
    IN_RINGS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    SEQUENCES: tl.constexpr,  # this and the next two are powers of two
    WINDOWS: tl.constexpr,
    TURNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    program, tiles, number = tl.program_id(0), tl.cdiv(tokens, ROWS), tl.arange(0, SEQUENCES)
    wait_for_inputs(OVERLAP)
    sizes = tl.load(counts + number, number < sequences, other=0).to(tl.int32)
    if program < tiles:
        row = program * ROWS + tl.arange(0, ROWS)
        owner, offset, first, size, ring = chunk_of(row, sizes, slots, starts, counts, sequences)
        known, position = row < tokens, row - offset + first
        store_numbers(sequence, row, owner, known)
        store_numbers(positions, row, position, known)
        store_numbers(last + owner, 0, row, known & (row == offset + size - 1))
        store_numbers(window_columns, row, columns_before(first, size, owner, fewest, sequences, WINDOW), known)
        kept = position >= first + size - CAPACITY
        store_numbers(window_cells, row, tl.where(kept, ring * CAPACITY + position % CAPACITY, -1), known)
        for one in tl.static_range(len(RATIOS)):
            store_numbers(visible[one], row, (position + 1) // RATIOS[one], known)
        column = tl.arange(0, WINDOWS)[None]
        rows = window_row(column, position, first, offset, owner, ring, sequences, WINDOW, CAPACITY, IN_RINGS)
        store_numbers(window_index + row[:, None] * WINDOW, column, rows, known[:, None] & (column < WINDOW))
    program -= tiles
    for one in tl.static_range(len(frequencies)):
        if (program >= 0) & (program < tiles):
            row = program * ROWS + tl.arange(0, ROWS)
            owner, offset, first, size, ring = chunk_of(row, sizes, slots, starts, counts, sequences)
            store_turns(rotations[one], row, row < tokens, row - offset + first, frequencies[one], PAIRS, TURNS)
        program -= tiles
    for one in tl.static_range(len(RATIOS)):
        if (program >= 0) & (program < tiles):
            row = program * ROWS + tl.arange(0, ROWS)
            store_groups(
                groups[one], cells[one], group_rotations[one], row, sizes, slots, starts, counts, sequences, blocks,
                block_stride, group_frequencies[one], first_groups if one == 0 else second_groups, RATIOS[one],
                BLOCK // RATIOS[one], PAIRS, TURNS,
            )  # fmt: skip
        program -= tiles
        across = tl.cdiv(columns * (BLOCK // RATIOS[one]), COLUMNS)
        if (program >= 0) & (program < sequences * across):
            entry = program % across * COLUMNS + tl.arange(0, COLUMNS)
            store_table(tables[one], blocks, program // across, entry, columns, block_stride, BLOCK // RATIOS[one])
        program -= sequences * across
    if program >= 0:
        across = tl.cdiv(lists, COLUMNS)
        row = program // across * ROWS + tl.arange(0, ROWS)
        column = program % across * COLUMNS + tl.arange(0, COLUMNS)[None]
        owner, offset, first, size, ring = chunk_of(row, sizes, slots, starts, counts, sequences)
        position, inside = row - offset + first, (row < tokens)[:, None] & (column < lists)
        rows = window_row(column, position, first, offset, owner, ring, sequences, WINDOW, CAPACITY, IN_RINGS)
        entry = column - columns_before(first, size, owner, fewest, sequences, WINDOW)[:, None]
        seen = inside & (entry >= 0) & (entry < ((position + 1) // LISTED)[:, None])
        cell = entry_cell(blocks, owner[:, None], entry, seen, block_stride, BLOCK // LISTED)
        place = every_entry + row[:, None].to(tl.int64) * lists
        store_numbers(place, column, tl.where(seen, window_rows + cell, rows), inside)
