"""One step's tokens, flat: which sequence and position each has, and where everything it reads and writes lies.

What depends only on the batch is computed here, once a step; layers index with it.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from dsv4cli.engine.cache import BLOCK_TOKENS, Cache, Sequence
from dsv4cli.engine.rope import rotation
from dsv4cli.kernels.compressor import Plan


@dataclass(frozen=True)
class CompressStep:
    """What a step does with compressed entries of one ratio.

    plan: the entries that it may complete, as many as for any step with the same numbers of tokens.
    visible int64 [T]: how many entries a token sees. table int64 [B, E]: the cell of each entry of each sequence; cell
    0 where a sequence has fewer than E.
    """

    plan: Plan
    visible: torch.Tensor
    table: torch.Tensor
    sequence: torch.Tensor

    @cached_property
    def every_entry(self) -> torch.Tensor:
        """The cells of all entries that each token sees, oldest first: int64 [T, E], -1 where there are fewer."""
        hidden = torch.arange(self.table.shape[1], device=self.table.device) >= self.visible[:, None]
        return self.table[self.sequence].masked_fill(hidden, -1)

    def chosen_entries(self, numbers: torch.Tensor) -> torch.Tensor:
        """The cells of the entries `numbers` int64 [T, k] of each token's sequence; -1 stays -1."""
        cells = self.table[self.sequence[:, None], numbers.clamp_min(0)]
        return torch.where(numbers >= 0, cells, -1)


@dataclass(frozen=True)
class Batch:
    """T tokens of B sequences, each sequence's tokens together and in order.

    ids, positions, sequence: int64 [T] (sequence counts from 0 within the batch); slots int64 [B]; last int64 [B], the
    row of each sequence's final token. window_index int64 [T, window]: rows of [rings of the step's sequences, fresh
    rows] (window_rows in all) that a token sees, oldest first, then -1; window_columns int64 [T]: how many of its
    columns come before compressed entries in a token's list; window_cells int64 [T]: where a token's key goes in the
    flat rings, -1 for nowhere. rotations: complex64 [T, .] by ratio. compress: by ratio.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    sequence: torch.Tensor
    slots: torch.Tensor
    last: torch.Tensor
    window_index: torch.Tensor
    window_columns: torch.Tensor
    window_rows: int
    window_cells: torch.Tensor
    rotations: dict[int, torch.Tensor]
    compress: dict[int, CompressStep]

    @cached_property
    def every_entry(self) -> torch.Tensor:
        """The lists of HCA layers: window rows and all entries that a token sees, int64 [T, window + E]."""
        return self.listed(self.compress[128].every_entry)

    def listed(self, cells: torch.Tensor) -> torch.Tensor:
        """The lists of window rows and then compressed entries (cells int64 [T, K], -1 for none): [T, window + K].

        A cell counts from window_rows on. Entries start right behind the window's columns, as in the official lists.
        """
        tokens, count = cells.shape
        lists = torch.cat((self.window_index, cells.new_full((tokens, count), -1)), 1)
        columns = self.window_columns[:, None] + torch.arange(count, device=cells.device)
        return lists.scatter(1, columns, torch.where(cells >= 0, cells + self.window_rows, -1))

    def with_ids(self, ids: torch.Tensor) -> "Batch":
        """The same places with other token ids int64 [T] (the drafter reads the token after each position)."""
        return replace(self, ids=ids)


@dataclass(frozen=True)
class _Spans:
    """The chunk of each sequence: its first position, its token count, its first row, its slot; all int64 [B]."""

    starts: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    slots: torch.Tensor

    def rows_of(self, sequence: torch.Tensor, positions: torch.Tensor, capacity: int) -> torch.Tensor:
        """Rows in [rings of B sequences, fresh rows] of these positions, which may be before the chunk or in it."""
        fresh = self.slots.numel() * capacity + self.offsets[sequence] + positions - self.starts[sequence]
        return torch.where(positions >= self.starts[sequence], fresh, sequence * capacity + positions % capacity)


def make_batch(cache: Cache, work: Items[tuple[Sequence, Items[int]]]) -> Batch:
    """The batch of a step: for each sequence its next tokens (at least one). Reserves their blocks."""
    for one, ids in work:
        cache.reserve(one, len(ids))
    device = cache.device
    table = [[one.slot, one.length, len(ids)] for one, ids in work]
    slots, starts, counts = torch.tensor(table, dtype=torch.int64, device=device).unbind(1)
    spans = _Spans(starts, counts, counts.cumsum(0) - counts, slots)
    sequence = torch.arange(len(work), device=device).repeat_interleave(counts)
    total = sequence.numel()
    positions = torch.arange(total, device=device) - spans.offsets[sequence] + starts[sequence]
    window = cache.config.sliding_window
    capacity = window + cache.rollback
    # the official code lists as many window rows as a prompt is long, and a full window when it decodes
    columns = torch.where(starts == 0, counts.clamp_max(window), window)
    ratios = sorted(set(cache.config.compress_ratios))
    blocks = _block_table([one.blocks for one, _ in work], device)
    return Batch(
        ids=torch.tensor([token for _, ids in work for token in ids], dtype=torch.int64, device=device),
        positions=positions,
        sequence=sequence,
        slots=slots,
        last=spans.offsets + counts - 1,
        window_index=_window_index(spans, sequence, positions, window, capacity),
        window_columns=columns[sequence],
        window_rows=len(work) * capacity + total,
        window_cells=_kept(spans, sequence, positions, capacity),
        rotations={ratio: rotation(positions, cache.frequencies[ratio]) for ratio in ratios},
        compress={r: _compress_step(cache, spans, sequence, positions, blocks, r) for r in ratios if r},
    )


def _block_table(blocks: list[list[int]], device: torch.device) -> torch.Tensor:
    longest = max(map(len, blocks))
    rows = [[*row, *([0] * (longest - len(row)))] for row in blocks]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _window_index(
    spans: _Spans, sequence: torch.Tensor, positions: torch.Tensor, window: int, capacity: int
) -> torch.Tensor:
    first = (positions - window + 1).clamp_min(0)
    listed = first[:, None] + torch.arange(window, device=positions.device)
    rows = spans.rows_of(sequence[:, None].expand_as(listed), listed, capacity)
    return rows.masked_fill(listed > positions[:, None], -1)


def _kept(spans: _Spans, sequence: torch.Tensor, positions: torch.Tensor, capacity: int) -> torch.Tensor:
    """The cell of each token in flat rings, -1 before the last `capacity` of a chunk: no two rows meet in a cell."""
    ends = spans.starts + spans.counts
    cells = spans.slots[sequence] * capacity + positions % capacity
    return cells.masked_fill(positions < (ends - capacity)[sequence], -1)


def _compress_step(
    cache: Cache,
    spans: _Spans,
    sequence: torch.Tensor,
    positions: torch.Tensor,
    blocks: torch.Tensor,
    ratio: int,
) -> CompressStep:
    device, per_block = positions.device, BLOCK_TOKENS // ratio
    before = ratio if ratio == 4 else 0  # overlap: the previous group's tokens join
    ends = (spans.starts + spans.counts) // ratio
    # as many as the tokens of a chunk can complete, wherever it begins
    new = (spans.counts + ratio - 1) // ratio
    owner = torch.arange(new.numel(), device=device).repeat_interleave(new)
    group = torch.arange(owner.numel(), device=device) - (new.cumsum(0) - new)[owner] + (spans.starts // ratio)[owner]
    starts = spans.starts[owner]
    groups = (spans.slots[owner], group * ratio - before, starts, starts + spans.counts[owner], spans.offsets[owner])
    entry = torch.arange(blocks.shape[1] * per_block, device=device)
    table = blocks.repeat_interleave(per_block, 1) * per_block + entry % per_block
    most = int(ends.max())
    return CompressStep(
        plan=Plan(
            groups=torch.stack(groups, 1),
            entries=torch.where(group < ends[owner], table[owner, group], -1),
            rotation=rotation(group * ratio, cache.frequencies[ratio]),
            positions=positions,
        ),
        visible=(positions + 1) // ratio,
        table=table[:, :most],
        sequence=sequence,
    )
