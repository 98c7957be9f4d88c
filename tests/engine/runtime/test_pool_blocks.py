"""Blocks of all pools of a model, copied, read and written: those that were asked for, and no others."""

import pytest
import torch

from dsv4cli.engine.config.presets import FLASH, shortened
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime.state.cache import Cache
from tests.support.cache_state import same

BLOCKS = 6
# its layers have windows only, and both ratios twice
CONFIG = parse_config(shortened(FLASH, 6, 8), "flash")


@pytest.fixture(params=["made at once", "grown"])
def filled(request) -> tuple[Cache, list[torch.Tensor]]:
    """A cache whose entries are anything, and what each of its pools has: [blocks, rows, D]."""
    one = Cache(CONFIG, Numerics.reference(), slots=2)
    if request.param == "grown":
        one.provide(2)
        one.provide(BLOCKS)
    else:
        one.bound(BLOCKS)
    for pool in pools(one):
        pool.data.copy_(torch.randint(0, 99, pool.data.shape))
    return one, contents(one)


def pools(one: Cache):
    return [pool for layer in one.layers for pool in layer.pools()]


def contents(one: Cache) -> list[torch.Tensor]:
    return [pool.data.unflatten(0, (-1, pool.per_block)).clone() for pool in pools(one)]


def test_a_copy_changes_one_block(filled):
    one, before = filled
    one.entries.copy(4, 1)
    for ours, expected in zip(contents(one), before, strict=True):
        expected[1] = expected[4]
        assert same(ours, expected)


def test_what_was_read_is_written_where_it_is_wanted(filled):
    one, before = filled
    copies = one.entries.read(torch.tensor([5, 0, 2]))
    assert copies.shape == (3, one.block_bytes)
    one.entries.write(torch.tensor([1, 2, 4]), copies)
    for ours, expected in zip(contents(one), before, strict=True):
        expected[[1, 2, 4]] = expected[[5, 0, 2]]
        assert same(ours, expected)


def test_pools_of_a_kind_that_are_made_at_once_lie_in_one_piece(filled):
    one, _ = filled
    kinds = {(pool.per_block, pool.data.shape[1], pool.data.dtype) for pool in pools(one)}
    assert len(pools(one)) > len(kinds)
    expected = len(kinds) if one.bounded else len(pools(one))
    assert len(one.entries._parts()) == expected
