"""Blocks arranged on the device where they are, in tiles or as FP4, and damaged ones among them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dsv4cli.engine.checkpoint.gguf.blocks import mxfp4_codes, mxfp4_scales
from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.weights.block_arranger import BlockArranger, StoredRows
from dsv4cli.engine.weights.block_layouts import Fp4Layout, TileLayout
from dsv4cli.errors import CheckpointError
from dsv4cli.kernels.ggml.types import BLOCK_DTYPES, TYPES, block_dtype, to_tiles
from tests.support.ggml_blocks import random_rows
from tests.support.peak import Peak


def spec(name: str, kind: str) -> TensorSpec:
    return TensorSpec(name, block_dtype(kind), (), "test", 0)


def in_tiles(name: str, kind: str, rows: torch.Tensor, height: int) -> StoredRows:
    return StoredRows(TileLayout(kind, height), (spec(name, kind),), (rows,))


def as_fp4(name: str, rows: np.ndarray) -> StoredRows:
    """The bytes of rows of MXFP4 in memory for their codes and scales."""
    count, nbytes = rows.shape
    stored, codes = torch.from_numpy(rows.copy()).view(-1), count * nbytes // 17 * 16
    specs = TensorSpec(name, "I8", (), "test", 0), TensorSpec(f"{name} scale", "F8_E8M0", (), "test", 0, role="scale")
    return StoredRows(
        Fp4Layout(), specs, (stored[:codes].clone().view(count, -1), stored[codes:].clone().view(count, -1))
    )


@pytest.mark.parametrize("kind", BLOCK_DTYPES.values())
def test_rows_get_the_tiles_that_host_threads_make(kind):
    # several of a shape together, another number of rows, other columns, and another height of tiles
    shapes = [(16, 2, 8), (16, 2, 8), (16, 2, 8), (8, 2, 8), (8, 3, 8), (8, 3, 4)]
    given = [random_rows(kind, rows, blocks, seed) for seed, (rows, blocks, _) in enumerate(shapes)]
    parameters = [torch.from_numpy(rows.copy()) for rows in given]
    arranger = BlockArranger()
    arranger.arrange(in_tiles("w", kind, rows, height) for rows, (_, _, height) in zip(parameters, shapes, strict=True))
    arranger.raise_if_damaged()
    for found, rows, (_, _, height) in zip(parameters, given, shapes, strict=True):
        np.testing.assert_array_equal(found, to_tiles(kind, rows, height))


def test_memory_for_two_copies_is_enough():
    rows = [torch.from_numpy(random_rows("Q2_K", 64, 8, seed)) for seed in range(4)]
    nbytes = sum(one.nbytes for one in rows[:2])
    arranger = BlockArranger()
    with Peak("cpu") as peak:
        arranger.arrange(in_tiles("w", "Q2_K", one, 8) for one in rows[:2])
        arranger.arrange(in_tiles("w", "Q2_K", one, 8) for one in rows[2:])
        arranger.raise_if_damaged()
    # and four masks of one byte per block of 84
    assert peak.most <= (2 + 4 / 84) * nbytes + 100


@pytest.mark.parametrize("damaged", range(5))
def test_the_tensor_with_a_damaged_block_is_named(damaged):
    rows = [torch.from_numpy(random_rows("Q4_K", 8, 2, seed)) for seed in range(5)]
    block = TYPES["Q4_K"].nbytes
    # dmin of the last block
    rows[damaged][7, block + 2 : block + 4] = torch.tensor([0, 0xFC])
    arranger, stored = BlockArranger(), [in_tiles(f"w{n}", "Q4_K", one, 8) for n, one in enumerate(rows)]
    arranger.arrange(stored[:3])
    arranger.arrange([replace(stored[3], layout=TileLayout("Q4_K", 4)), stored[4]])
    with pytest.raises(CheckpointError, match=rf"^w{damaged} \(Q4_K\) holds a block whose scale is NaN or infinite"):
        arranger.raise_if_damaged()


def test_mxfp4_becomes_the_codes_and_scales_that_host_threads_make():
    # several of a shape together, another number of rows, other columns, and tiles between them
    shapes = [(5, 3), (5, 3), (5, 3), (2, 3), (2, 8), (2, 8)]
    given = [random_rows("MXFP4", rows, blocks, seed) for seed, (rows, blocks) in enumerate(shapes)]
    arranger, fp4 = BlockArranger(), [as_fp4("w", rows) for rows in given]
    tiles = torch.from_numpy(given[5].copy())
    arranger.arrange([*fp4[:5], in_tiles("w", "MXFP4", tiles, 2), fp4[5]])
    arranger.raise_if_damaged()
    np.testing.assert_array_equal(tiles, to_tiles("MXFP4", given[5], 2))
    for found, rows in zip(fp4, given, strict=True):
        codes, scales = found.places
        np.testing.assert_array_equal(codes, mxfp4_codes(rows))
        np.testing.assert_array_equal(scales, mxfp4_scales(rows))


def test_memory_for_two_copies_is_enough_for_fp4():
    given = [as_fp4("w", random_rows("MXFP4", 64, 8, seed)) for seed in range(2)]
    nbytes = sum(place.nbytes for one in given for place in one.places)
    arranger = BlockArranger()
    with Peak("cpu") as peak:
        arranger.arrange(given)
        arranger.raise_if_damaged()
    assert peak.most <= 2 * nbytes + 100


@pytest.mark.parametrize("damaged", range(4))
def test_the_scale_with_a_damaged_byte_is_named(damaged):
    rows = [random_rows("MXFP4", 8, 2, seed) for seed in range(4)]
    rows[damaged][7, 17] = 255
    arranger = BlockArranger()
    arranger.arrange(as_fp4(f"w{n}", one) for n, one in enumerate(rows))
    with pytest.raises(CheckpointError, match=rf"^w{damaged} scale holds the scale byte 255 \(not a number\)"):
        arranger.raise_if_damaged()


def test_nothing_to_arrange_is_not_damaged():
    arranger = BlockArranger()
    arranger.arrange([])
    arranger.raise_if_damaged()
