"""Step metadata in plain PyTorch."""

from dataclasses import dataclass

import torch

from dsv4cli.kernels.step_metadata.types import ALL_LISTED, WITH_PREVIOUS, Chunks, Entries, Layout, StepMetadata


@dataclass(frozen=True)
class Tokens:
    """The step's tokens: sequence and position of each, int64 [T], and each sequence's first row, int64 [B]."""

    sequence: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor


def step_metadata(chunks: Chunks, layout: Layout, frequencies: dict[int, torch.Tensor]) -> StepMetadata:
    starts, counts = chunks.starts, chunks.counts
    offsets = counts.cumsum(0) - counts
    sequence = owners(counts, layout.tokens)
    positions = torch.arange(layout.tokens, device=starts.device) - offsets[sequence] + starts[sequence]
    tokens = Tokens(sequence, positions, offsets)
    # the official code lists as many window rows as the prompt has tokens in prefill, and a full window in decode
    columns = torch.where(starts == 0, counts.maximum(chunks.fewest).clamp_max(layout.window), layout.window)[sequence]
    index = window_index(chunks, layout, tokens)
    entries = {ratio: entries_of(chunks, layout, tokens, frequencies[ratio], ratio) for ratio in layout.groups}
    return StepMetadata(
        sequence=sequence,
        positions=positions,
        last=offsets + counts - 1,
        window_index=index,
        window_columns=columns,
        window_cells=window_cells(chunks, layout, tokens),
        rotations={ratio: rotation(positions, table) for ratio, table in frequencies.items()},
        entries=entries,
        every_entry=lists(index, columns, entries[ALL_LISTED], sequence, layout.rows)
        if ALL_LISTED in entries
        else index,
    )


def rotation(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Return exp(i * position * frequency) in complex64 [n, R], from int64 [n] and fp32 [R]; the angle is fp32."""
    angles = positions.float()[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def owners(counts: torch.Tensor, total: int) -> torch.Tensor:
    """Return each index i repeated counts[i] times: int64 [total]."""
    return torch.arange(counts.numel(), device=counts.device).repeat_interleave(counts, output_size=total)


def window_index(chunks: Chunks, layout: Layout, tokens: Tokens) -> torch.Tensor:
    """Return the rows of the window's keys visible to each token: int64 [T, window]."""
    first = (tokens.positions - layout.window + 1).clamp_min(0)
    seen = first[:, None] + torch.arange(layout.window, device=first.device)
    cells = seen % layout.capacity
    if layout.in_rings:
        rows = chunks.slots[tokens.sequence, None] * layout.capacity + cells
    else:
        start = chunks.starts[tokens.sequence, None]
        fresh = chunks.slots.numel() * layout.capacity + tokens.offsets[tokens.sequence, None] + seen - start
        rows = torch.where(seen >= start, fresh, tokens.sequence[:, None] * layout.capacity + cells)
    return rows.masked_fill(seen > tokens.positions[:, None], -1)


def window_cells(chunks: Chunks, layout: Layout, tokens: Tokens) -> torch.Tensor:
    """Return the cell of each token's key in the flat rings, or -1: int64 [T]."""
    ends = chunks.starts + chunks.counts
    cells = chunks.slots[tokens.sequence] * layout.capacity + tokens.positions % layout.capacity
    return cells.masked_fill(tokens.positions < (ends - layout.capacity)[tokens.sequence], -1)


def entries_of(chunks: Chunks, layout: Layout, tokens: Tokens, frequencies: torch.Tensor, ratio: int) -> Entries:
    """Return the entries of one ratio in this step."""
    device, per_block = chunks.starts.device, layout.block // ratio
    before = ratio if ratio == WITH_PREVIOUS else 0
    ends = (chunks.starts + chunks.counts) // ratio
    new = (chunks.counts + ratio - 1) // ratio
    new[-1:] += layout.groups[ratio] - new.sum()
    owner = owners(new, layout.groups[ratio])
    group = torch.arange(owner.numel(), device=device) - (new.cumsum(0) - new)[owner] + (chunks.starts // ratio)[owner]
    starts = chunks.starts[owner]
    groups = (chunks.slots[owner], group * ratio - before, starts, starts + chunks.counts[owner], tokens.offsets[owner])
    entry = torch.arange(chunks.blocks.shape[1] * per_block, device=device)
    table = chunks.blocks.repeat_interleave(per_block, 1) * per_block + entry % per_block
    return Entries(
        groups=torch.stack(groups, 1),
        cells=torch.where(group < ends[owner], table[owner, group.clamp_max(table.shape[1] - 1)], -1),
        rotation=rotation(group * ratio, frequencies),
        visible=(tokens.positions + 1) // ratio,
        table=table[:, : layout.entries[ratio]],
    )


def lists(
    index: torch.Tensor, columns: torch.Tensor, entries: Entries, sequence: torch.Tensor, rows: int
) -> torch.Tensor:
    """Return window rows followed by all visible entries, in the order of the official code: int64 [T, window + E]."""
    count = entries.table.shape[1]
    number = torch.arange(count, device=index.device)
    cells = torch.where(number < entries.visible[:, None], entries.table[sequence] + rows, -1)
    whole = torch.cat((index, index.new_full((len(index), count), -1)), 1)
    return whole.scatter(1, columns[:, None] + number, cells)
