"""One step's tokens, flat: which sequence and position each has, and where everything it reads and writes lies.

What depends only on the batch is computed here, once a step; layers index with it.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from dsv4cli.engine.cache import Cache, Sequence
from dsv4cli.engine.capacity import BLOCK_TOKENS
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
    row of each sequence's final token. window_index int64 [T, window]: rows of the window's keys (window_rows in all)
    that a token sees, oldest first, then -1. With in_rings these keys are the flat rings, which take the step's keys
    first; else they are [rings of the step's sequences as they were, fresh rows]. window_columns int64 [T]: how many of
    its columns come before compressed entries in a token's list; window_cells int64 [T]: where a token's key goes in
    the flat rings, -1 for nowhere. rotations: complex64 [T, .] by ratio. compress: by ratio.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    sequence: torch.Tensor
    slots: torch.Tensor
    last: torch.Tensor
    in_rings: bool
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
class Numbers:
    """What a step is made of: for each sequence its slot, its first position and its token count, int64 [B]; the ids of
    all tokens int64 [T]; the blocks of each sequence int64 [B, L], any block where it has fewer."""

    slots: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    ids: torch.Tensor
    blocks: torch.Tensor


@dataclass(frozen=True)
class Extent:
    """How large a step is, which the host knows. groups: the entries of each ratio that the chunks can complete,
    wherever they begin; entries: the most that a sequence has afterwards, or more."""

    longest: int
    groups: dict[int, int]
    entries: dict[int, int]


@dataclass(frozen=True)
class _Spans:
    """The chunk of each sequence: its first position, its token count, its first row, its slot; all int64 [B].

    capacity: of the rings. in_rings: as in Batch."""

    starts: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    slots: torch.Tensor
    capacity: int
    in_rings: bool

    def rows_of(self, sequence: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows of the window's keys that hold these positions, which may be before the chunk or in it."""
        cells = positions % self.capacity
        if self.in_rings:
            return self.slots[sequence] * self.capacity + cells
        fresh = self.slots.numel() * self.capacity + self.offsets[sequence] + positions - self.starts[sequence]
        return torch.where(positions >= self.starts[sequence], fresh, sequence * self.capacity + cells)


def make_batch(cache: Cache, work: Items[tuple[Sequence, Items[int]]]) -> Batch:
    """The batch of a step: for each sequence its next tokens (at least one). Reserves their blocks.

    Nothing here waits for the device.
    """
    for one, ids in work:
        cache.reserve(one, len(ids))
    counts = [len(ids) for _, ids in work]
    ends = [one.length + count for (one, _), count in zip(work, counts, strict=True)]
    ratios = [ratio for ratio in (4, 128) if ratio in cache.config.compress_ratios]
    extent = Extent(
        longest=max(counts),
        groups={ratio: sum(-(-count // ratio) for count in counts) for ratio in ratios},
        entries={ratio: max(ends) // ratio for ratio in ratios},
    )
    columns = [
        [one.slot for one, _ in work],
        [one.length for one, _ in work],
        counts,
        [token for _, ids in work for token in ids],
    ]
    longest = max(len(one.blocks) for one, _ in work)
    columns += [[*one.blocks, *([0] * (longest - len(one.blocks)))] for one, _ in work]
    flat = torch.tensor([number for column in columns for number in column], dtype=torch.int64)
    slots, starts, sizes, ids, blocks = flat.to(cache.device).split(
        [len(work), len(work), len(work), sum(counts), len(work) * longest]
    )
    return place(cache, Numbers(slots, starts, sizes, ids, blocks.view(len(work), longest)), extent)


def place(cache: Cache, numbers: Numbers, extent: Extent) -> Batch:
    """The batch of numbers that lie on the device; shapes depend on the extent and on theirs only."""
    starts, counts, slots = numbers.starts, numbers.counts, numbers.slots
    window = cache.config.sliding_window
    # a ring has room for the tokens of a step beside all rows that the first of them sees
    in_rings = extent.longest <= cache.rollback + 1
    spans = _Spans(starts, counts, counts.cumsum(0) - counts, slots, window + cache.rollback, in_rings)
    sequence = _owners(counts, numbers.ids.numel())
    positions = torch.arange(sequence.numel(), device=cache.device) - spans.offsets[sequence] + starts[sequence]
    # the official code lists as many window rows as a prompt is long, and a full window when it decodes
    columns = torch.where(starts == 0, counts.clamp_max(window), window)
    rings = cache.slots if in_rings else slots.numel()
    ratios = sorted(set(cache.config.compress_ratios))
    return Batch(
        ids=numbers.ids,
        positions=positions,
        sequence=sequence,
        slots=slots,
        last=spans.offsets + counts - 1,
        in_rings=in_rings,
        window_index=_window_index(spans, sequence, positions, window),
        window_columns=columns[sequence],
        window_rows=rings * spans.capacity + (0 if in_rings else sequence.numel()),
        window_cells=_kept(spans, sequence, positions),
        rotations={ratio: rotation(positions, cache.frequencies[ratio]) for ratio in ratios},
        compress={r: _compress_step(cache, spans, sequence, positions, numbers.blocks, extent, r) for r in ratios if r},
    )


def _owners(counts: torch.Tensor, total: int) -> torch.Tensor:
    """0 counts[0] times, then 1 counts[1] times and so on: int64 [total]."""
    return torch.arange(counts.numel(), device=counts.device).repeat_interleave(counts, output_size=total)


def _window_index(spans: _Spans, sequence: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
    first = (positions - window + 1).clamp_min(0)
    listed = first[:, None] + torch.arange(window, device=positions.device)
    rows = spans.rows_of(sequence[:, None].expand_as(listed), listed)
    return rows.masked_fill(listed > positions[:, None], -1)


def _kept(spans: _Spans, sequence: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The cell of each token in flat rings, -1 before the last `capacity` of a chunk: no two rows meet in a cell."""
    ends = spans.starts + spans.counts
    cells = spans.slots[sequence] * spans.capacity + positions % spans.capacity
    return cells.masked_fill(positions < (ends - spans.capacity)[sequence], -1)


def _compress_step(
    cache: Cache,
    spans: _Spans,
    sequence: torch.Tensor,
    positions: torch.Tensor,
    blocks: torch.Tensor,
    extent: Extent,
    ratio: int,
) -> CompressStep:
    device, per_block = positions.device, BLOCK_TOKENS // ratio
    before = ratio if ratio == 4 else 0  # overlap: the previous group's tokens join
    ends = (spans.starts + spans.counts) // ratio
    new = (spans.counts + ratio - 1) // ratio
    owner = _owners(new, extent.groups[ratio])
    group = torch.arange(owner.numel(), device=device) - (new.cumsum(0) - new)[owner] + (spans.starts // ratio)[owner]
    starts = spans.starts[owner]
    groups = (spans.slots[owner], group * ratio - before, starts, starts + spans.counts[owner], spans.offsets[owner])
    entry = torch.arange(blocks.shape[1] * per_block, device=device)
    table = blocks.repeat_interleave(per_block, 1) * per_block + entry % per_block
    return CompressStep(
        plan=Plan(
            groups=torch.stack(groups, 1),
            entries=torch.where(group < ends[owner], table[owner, group], -1),
            rotation=rotation(group * ratio, cache.frequencies[ratio]),
            positions=positions,
        ),
        visible=(positions + 1) // ratio,
        table=table[:, : extent.entries[ratio]],
        sequence=sequence,
    )
