"""The places of a step against their definition, written out in pure Python, token by token."""

from dataclasses import replace

import pytest
import torch

from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.step_metadata import Chunks, Layout, ref, step_metadata
from tests.support.slow import slow_rows

BLOCK = 128
# window, rows of a ring beside it, slots
WINDOW, SPARE, SLOTS = 6, 3, 70
FREQUENCIES = [1.0, 0.749894, 0.01, 1.3e-4]


def step(chunks, in_rings, ratios=(4, 128), window=WINDOW, spare=0, fewest=0):
    """The numbers of a step whose chunks are (first position, tokens), with blocks and slots in no order."""
    starts, counts = torch.tensor(chunks).T.contiguous()
    total, capacity = int(counts.sum()), window + SPARE
    longest = -(-int((starts + counts).max()) // BLOCK) + spare
    blocks = torch.randperm(len(chunks) * longest).view(len(chunks), longest)
    layout = Layout(
        tokens=total,
        window=window,
        capacity=capacity,
        in_rings=in_rings,
        rows=SLOTS * capacity if in_rings else len(chunks) * capacity + total,
        block=BLOCK,
        groups={ratio: int((-(-counts // ratio)).sum()) for ratio in ratios},
        entries={ratio: int((starts + counts).max()) // ratio + spare for ratio in ratios},
    )
    return Chunks(torch.randperm(SLOTS)[: len(chunks)], starts, counts, torch.full_like(counts, fewest), blocks), layout


def window_row(chunks, layout, sequence, offset, position):
    """The row of the window's keys that holds a position of a sequence."""
    start, cell = int(chunks.starts[sequence]), position % layout.capacity
    if layout.in_rings:
        return int(chunks.slots[sequence]) * layout.capacity + cell
    if position >= start:
        return len(chunks.slots) * layout.capacity + offset + position - start
    return sequence * layout.capacity + cell


def cell_of(chunks, sequence, entry, ratio):
    per_block = BLOCK // ratio
    return int(chunks.blocks[sequence, entry // per_block]) * per_block + entry % per_block


def token(chunks, layout, sequence, offset, position):
    """What each token has: by the name of the output."""
    start, count = int(chunks.starts[sequence]), int(chunks.counts[sequence])
    kept = position >= start + count - layout.capacity
    first = max(0, position - layout.window + 1)
    rows = [window_row(chunks, layout, sequence, offset, seen) for seen in range(first, position + 1)]
    columns = min(layout.window, max(count, int(chunks.fewest[sequence]))) if start == 0 else layout.window
    entries = layout.entries.get(128, 0)
    cells = [cell_of(chunks, sequence, entry, 128) + layout.rows for entry in range((position + 1) // 128)] * (
        entries > 0
    )
    before = (rows + [-1] * layout.window)[: columns if entries else layout.window]
    return {
        "sequence": sequence,
        "positions": position,
        "window_index": rows + [-1] * (layout.window - len(rows)),
        "window_columns": columns,
        "window_cells": int(chunks.slots[sequence]) * layout.capacity + position % layout.capacity if kept else -1,
        "every_entry": before + cells + [-1] * (layout.window + entries - len(before) - len(cells)),
    }


def groups_of(chunks, ratio, sequence, offset):
    """The groups of a sequence that a step touches and perhaps the next: their rows of a plan and their cells."""
    slot, start, count = (int(x[sequence]) for x in (chunks.slots, chunks.starts, chunks.counts))
    numbers = range(start // ratio, start // ratio - (-count // ratio))
    rows = [[slot, n * ratio - (ratio if ratio == 4 else 0), start, start + count, offset] for n in numbers]
    return (
        rows,
        [cell_of(chunks, sequence, n, ratio) if (n + 1) * ratio <= start + count else -1 for n in numbers],
        numbers,
    )


def assert_turns(turns, positions, frequencies):
    # the angle is rounded to fp32
    angles = (torch.tensor(positions, device="cpu").float()[:, None] * frequencies.cpu()).double()
    exact = torch.polar(torch.ones_like(angles), angles)
    # one unit of fp32 for the functions, a half for the rounding
    assert (torch.view_as_real(turns.cpu() - exact).abs() <= 1.5 * 2.0**-24).all()


# chunks, and whether the window's keys are in the rings
STEPS = {
    "one token": ([(0, 1)], True),
    "decoding": ([(7, 1), (0, 1), (515, 1), (127, 1), (128, 1)], True),
    "decoding, rings apart": ([(7, 1), (0, 1), (515, 1)], False),
    "a prompt": ([(0, 67)], False),
    "short prompts": ([(0, 4), (0, 9)], True),
    "chunks": ([(130, 61), (0, 5), (3, 1), (126, 13), (4, 8)], False),
    "far away": ([(20_000, 1)], True),
}


@pytest.fixture
def few_programs(backend, monkeypatch):
    """Interpreted, from six tokens on as many in a program as for many tokens, and of 67 and more 64."""
    if backend == "interpreter":
        from dsv4cli.kernels.step_metadata import kernel

        sizes = ((5, (1, 256, 2)), (66, (8, 256, 4)), (1 << 30, (64, 256, 4)))
        monkeypatch.setattr(
            kernel, "metadata_tiles", lambda tokens: next(size for most, size in sizes if tokens <= most)
        )


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("name", "fewest"),
    [*((name, 0) for name in STEPS), *slow_rows(("short prompts", 5), ("short prompts", WINDOW)), ("chunks", WINDOW)],
)
def test_places_are_those_of_the_definition(name, fewest):
    work, in_rings = STEPS[name]
    chunks, layout = step(work, in_rings, spare=len(name) % 3, fewest=fewest)
    plain = torch.tensor(FREQUENCIES)
    made = step_metadata(chunks, layout, {0: plain, 4: plain / 3, 128: plain / 3})
    expected, last, offset = {}, [], 0
    found = {ratio: ([], [], []) for ratio in layout.groups}
    for sequence, (start, count) in enumerate(work):
        for position in range(start, start + count):
            for key, value in token(chunks, layout, sequence, offset, position).items():
                expected.setdefault(key, []).append(value)
        for ratio, parts in found.items():
            for part, more in zip(parts, groups_of(chunks, ratio, sequence, offset), strict=True):
                part.extend(more)
        offset += count
        last.append(offset - 1)
    for key, value in expected.items():
        assert getattr(made, key).dtype == torch.int64
        assert getattr(made, key).tolist() == value, key
    assert made.last.tolist() == last
    positions = expected["positions"]
    for ratio, turns in made.rotations.items():
        assert_turns(turns, positions, plain / 3 if ratio else plain)
    for ratio, (groups, cells, numbers) in found.items():
        entries = made.entries[ratio]
        assert (entries.groups.tolist(), entries.cells.tolist()) == (groups, cells)
        assert_turns(entries.rotation, [number * ratio for number in numbers], plain / 3)
        assert entries.visible.tolist() == [(position + 1) // ratio for position in positions]
        number = range(layout.entries[ratio])
        assert entries.table.tolist() == [[cell_of(chunks, s, n, ratio) for n in number] for s in range(len(last))]


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(("of_4", "of_128"), [(7, 40), *slow_rows((0, 0), (0, 3), (3, 0))])
def test_groups_that_are_too_many_are_the_last_ones(of_4, of_128):
    """Behind its own, so that they complete nothing and keep no rows; sequences without tokens have none."""
    chunks, layout = step([(130, 9), (0, 5), (0, 0), (0, 0), (0, 30)], False)
    turns = dict.fromkeys((0, 4, 128), torch.tensor(FREQUENCIES))
    some = [0, 1, 4]
    without = Chunks(
        chunks.slots[some], chunks.starts[some], chunks.counts[some], chunks.fewest[some], chunks.blocks[some]
    )
    own = ref.step_metadata(without, layout, turns)
    more = replace(layout, groups={4: layout.groups[4] + of_4, 128: layout.groups[128] + of_128})
    made = step_metadata(chunks, more, turns)
    assert made.last[some].tolist() == own.last.tolist()
    assert made.sequence.tolist() == torch.tensor(some)[own.sequence].tolist()
    assert torch.equal(made.every_entry, step_metadata(chunks, layout, turns).every_entry)
    for ratio, entries in made.entries.items():
        expected, count = own.entries[ratio], len(own.entries[ratio].groups)
        assert (len(entries.groups), len(entries.cells)) == (more.groups[ratio],) * 2
        assert torch.equal(entries.groups[:count], expected.groups)
        assert torch.equal(entries.cells[:count], expected.cells)
        assert entries.cells[count:].tolist() == [-1] * (more.groups[ratio] - count)
        before, ends = (ratio if ratio == 4 else 0), [int(chunks.slots[4]), 0, 30, 14]
        numbers = range(-(-30 // ratio), -(-30 // ratio) + more.groups[ratio] - count)
        assert entries.groups[count:].tolist() == [[ends[0], number * ratio - before, *ends[1:]] for number in numbers]


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("ratios", [(), (4,), (128,)], ids=str)
def test_a_model_without_some_ratio(ratios):
    chunks, layout = step([(130, 9), (0, 5)], True, ratios)
    made = step_metadata(chunks, layout, dict.fromkeys((0, *ratios), torch.tensor(FREQUENCIES)))
    assert (set(made.rotations), set(made.entries)) == ({0, *ratios}, set(ratios))
    # all else is as in a model with both ratios
    both = replace(layout, groups={4: 5, 128: 2}, entries={4: 34, 128: 1})
    whole = ref.step_metadata(chunks, both, dict.fromkeys((0, 4, 128), torch.tensor(FREQUENCIES)))
    for name in ("sequence", "positions", "last", "window_index", "window_columns", "window_cells"):
        assert torch.equal(getattr(made, name), getattr(whole, name))
    for ratio, entries in made.entries.items():
        for name in ("groups", "cells", "visible", "table"):
            assert torch.equal(getattr(entries, name), getattr(whole.entries[ratio], name))
    assert torch.equal(made.every_entry, whole.every_entry if 128 in ratios else whole.window_index)


@pytest.mark.usefixtures("few_programs")
def test_the_window_and_the_pairs_of_the_model():
    chunks, layout = step([(1000, 9), (0, 130)], False, window=128)
    frequencies = 1e4 ** -(torch.arange(32) / 32)
    made = step_metadata(chunks, layout, {4: frequencies, 128: frequencies})
    assert made.window_index[8].tolist() == [
        *[position % 131 for position in range(881, 1000)],
        *range(262, 271),
    ]
    assert made.window_index[9 + 129].tolist() == [*range(262 + 9 + 2, 262 + 9 + 130)]
    assert made.every_entry[9 + 129, 128:].tolist() == [layout.rows + int(chunks.blocks[1, 0]), *[-1] * 6]
    assert_turns(made.rotations[4], made.positions.tolist(), frequencies)


@pytest.mark.usefixtures("backend")
def test_large_angles():
    positions = [65_535, 105_617, 1_000_003, 1_048_575]
    chunks, layout = step([(position, 1) for position in positions], True, ())
    chunks = replace(chunks, blocks=chunks.blocks[:, :1])
    frequencies = torch.logspace(0, -7, 32)
    assert_turns(step_metadata(chunks, layout, {0: frequencies}).rotations[0], positions, frequencies)


@pytest.mark.usefixtures("triton_backend")
def test_what_the_kernel_does_not_take():
    chunks, layout = step([(0, 4)], True)
    with pytest.raises(KernelUnsupported, match="int64"):
        step_metadata(
            replace(chunks, counts=chunks.counts.int()), layout, dict.fromkeys((0, 4, 128), torch.tensor(FREQUENCIES))
        )
