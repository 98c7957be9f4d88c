"""How the rows of a matrix are cut for work: steps of writing, and the pieces that a sample compares."""

from itertools import pairwise

import pytest

from dsv4cli.engine.checkpoint import compare
from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.engine.config.presets import TINY
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.conversion.plan import Item, chunks
from dsv4cli.engine.conversion.verify import SAMPLE, _pieces


@pytest.mark.parametrize("rows", [(0, 1), (0, 128), (0, 1000), (64, 1000), (100, 130)])
@pytest.mark.parametrize("step", [1, 4000, 40000, 10**6])
def test_steps_end_where_blocks_of_scales_do(rows, step):
    start, stop = rows
    steps = list(chunks(Item("matrix", rows, (), 40 * (stop - start)), step))
    assert (steps[0][0], steps[-1][1]) == rows
    assert all(end == begin for (_, end), (begin, _) in pairwise(steps))
    assert all(end % 128 == 0 for _, end in steps[:-1])
    assert all(end - begin <= max(128, step // 40) for begin, end in steps)


def test_a_sample_takes_other_rows_of_each_matrix(monkeypatch):
    monkeypatch.setattr(compare, "CHUNK", 1)  # pieces of 128 rows
    weight = expected_tensors(parse_config(TINY, "tiny"), Formats())["layers.0.attn.wq_b.weight"]
    pieces = list(_pieces(weight, None))
    assert 1 < len(pieces) < SAMPLE
    assert [list(_pieces(weight, number)) for number in range(len(pieces) + 1)] == [
        [one] for one in [*pieces, pieces[0]]
    ]
