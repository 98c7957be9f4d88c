"""Rows of an embedding in any format, wherever it is stored: the same values."""

import pytest
import torch

from dsv4cli.kernels import embedding
from dsv4cli.kernels.ggml.types import TYPES
from dsv4cli.kernels.stored_matrix import BlockMatrix, StoredMatrix
from tests.support.ggml_blocks import block_matrix, random_rows
from tests.support.slow import slow, slow_rows

pytestmark = pytest.mark.usefixtures("backend")


def looked_up(ids: torch.Tensor, table: StoredMatrix, dtype: torch.dtype) -> torch.Tensor:
    """The rows, which are the same with the table in host memory, and by the family's kernel."""
    held = table.weight.cpu().pin_memory() if ids.is_cuda else table.weight
    elsewhere = BlockMatrix.of(held, table.block_type) if table.block_type else StoredMatrix(held)
    found = embedding.embed(ids, table, dtype)
    for rows in (embedding.embed(ids, elsewhere, dtype), embedding.choose(ids, embedding.ref).embed(ids, table, dtype)):
        assert (rows.device, rows.dtype) == (ids.device, dtype)
        assert torch.equal(rows, found)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stored", [torch.float32, *slow(torch.bfloat16, torch.float16)])
@pytest.mark.parametrize(("tokens", "width"), [(0, 64), (1, 7), (5, 1024), (3, 1500)])
def test_rows_are_those_of_the_table(tokens, width, stored, dtype):
    ids, table = torch.randint(0, 9, (tokens,)), torch.randn(9, width).to(stored)
    assert torch.equal(looked_up(ids, StoredMatrix(table), dtype), table[ids].to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)])
@pytest.mark.parametrize(("kind", "width"), [("Q8_0", 1056), *slow_rows(("Q4_K", 2304), ("IQ3_S", 256))])
def test_blocks_are_decoded_and_rounded_once(kind, width, dtype):
    rows = torch.from_numpy(random_rows(kind, 16, width // TYPES[kind].values, 1, 0.02))
    table, ids = block_matrix(rows.to(torch.get_default_device()), kind), torch.tensor([9, 0, 3, 9])
    assert torch.equal(looked_up(ids, table, dtype), table.values()[ids].to(dtype))
