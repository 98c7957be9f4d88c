"""Blocks arranged in tiles on the device where they are, and damaged ones among them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.weights.tile_arranger import StoredRows, TileArranger
from dsv4cli.errors import CheckpointError
from dsv4cli.kernels.ggml.types import BLOCK_DTYPES, TYPES, block_dtype, to_tiles
from tests.support.ggml_blocks import random_rows
from tests.support.peak import Peak


def spec(name: str, kind: str) -> TensorSpec:
    return TensorSpec(name, block_dtype(kind), (), "test", 0)


@pytest.mark.parametrize("kind", BLOCK_DTYPES.values())
def test_rows_get_the_tiles_that_host_threads_make(kind):
    # several of a shape together, another number of rows, other columns, and another height of tiles
    shapes = [(16, 2, 8), (16, 2, 8), (16, 2, 8), (8, 2, 8), (8, 3, 8), (8, 3, 4)]
    given = [random_rows(kind, rows, blocks, seed) for seed, (rows, blocks, _) in enumerate(shapes)]
    parameters = [torch.from_numpy(rows.copy()) for rows in given]
    arranger = TileArranger()
    arranger.arrange(
        StoredRows(spec("w", kind), rows, height) for rows, (_, _, height) in zip(parameters, shapes, strict=True)
    )
    arranger.raise_if_damaged()
    for found, rows, (_, _, height) in zip(parameters, given, shapes, strict=True):
        np.testing.assert_array_equal(found, to_tiles(kind, rows, height))


def test_memory_for_two_copies_is_enough():
    rows = [torch.from_numpy(random_rows("Q2_K", 64, 8, seed)) for seed in range(4)]
    nbytes = sum(one.nbytes for one in rows[:2])
    arranger = TileArranger()
    with Peak("cpu") as peak:
        arranger.arrange(StoredRows(spec("w", "Q2_K"), one, 8) for one in rows[:2])
        arranger.arrange(StoredRows(spec("w", "Q2_K"), one, 8) for one in rows[2:])
        arranger.raise_if_damaged()
    # and four masks of one byte per block of 84
    assert peak.most <= (2 + 4 / 84) * nbytes + 100


@pytest.mark.parametrize("damaged", range(5))
def test_the_tensor_with_a_damaged_block_is_named(damaged):
    rows = [torch.from_numpy(random_rows("Q4_K", 8, 2, seed)) for seed in range(5)]
    block = TYPES["Q4_K"].nbytes
    # dmin of the last block
    rows[damaged][7, block + 2 : block + 4] = torch.tensor([0, 0xFC])
    arranger, stored = TileArranger(), [StoredRows(spec(f"w{n}", "Q4_K"), one, 8) for n, one in enumerate(rows)]
    arranger.arrange(stored[:3])
    arranger.arrange([replace(stored[3], height=4), stored[4]])
    with pytest.raises(CheckpointError, match=rf"^w{damaged} \(Q4_K\) holds a block whose scale is NaN or infinite"):
        arranger.raise_if_damaged()


def test_nothing_to_arrange_is_not_damaged():
    arranger = TileArranger()
    arranger.arrange([])
    arranger.raise_if_damaged()
