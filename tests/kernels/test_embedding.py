"""Rows of an embedding, wherever it lies: the same bits."""

import pytest
import torch


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "width"), [(0, 64), (1, 7), (5, 1024), (3, 1500)])
def test_rows_are_those_of_the_table(tokens, width, dtype):
    from dsv4cli.kernels import embedding

    ids = torch.randint(0, 9, (tokens,))
    table = torch.randn(9, width, dtype=dtype, device="cpu")
    table = table.pin_memory() if ids.is_cuda else table
    for kernels in (embedding, embedding.choose(ids, embedding.ref)):
        found = kernels.embed(ids, table)
        assert found.device == ids.device
        assert torch.equal(found.cpu(), table[ids.cpu()])
