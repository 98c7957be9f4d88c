"""Attention over listed rows against a softmax in fp64, and its one inner rounding written out."""

import math

import pytest
import torch

from dsv4cli.kernels.attention import sparse_attention

NEVER = float("-inf")


def slow_attention(q, window, entries, index, sink, scale) -> torch.Tensor:
    rows = torch.cat((window, entries)).double()
    result = torch.zeros(q.shape, dtype=torch.float64)
    for token in range(q.shape[0]):
        listed = rows[[row for row in index[token].tolist() if row >= 0]]
        for head in range(q.shape[1]):
            scores = listed @ q[token, head].double() * scale
            top = max(scores.max().item(), sink[head].item())
            shares = (scores - top).exp()
            result[token, head] = shares @ listed / (shares.sum() + math.exp(sink[head].item() - top))
    return result


def lists(tokens: int, length: int, rows: int) -> torch.Tensor:
    """Rows in any order, holes anywhere behind the first column."""
    index = torch.randint(0, rows, (tokens, length))
    index[:, 1:][torch.rand(tokens, length - 1) < 0.3] = -1
    return index


# tokens, heads, width, length of the lists: one row, a block of 64, one more, a prime over two blocks
SHAPES = [(0, 2, 8, 5), (1, 1, 4, 1), (3, 4, 16, 64), (5, 2, 16, 65), (2, 3, 32, 131)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pool", [0, 1, 40])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_softmax_over_listed_rows(shape, pool, dtype):
    tokens, heads, width, length = shape
    q, window, entries = (torch.randn(*size, width).to(dtype) for size in ((tokens, heads), (30,), (pool,)))
    index, sink = lists(tokens, length, 30 + pool), torch.randn(heads)
    o = sparse_attention(q, window, entries, index, sink, width**-0.5)
    assert (o.shape, o.dtype) == (q.shape, dtype)
    exact = slow_attention(q, window, entries, index, sink, width**-0.5)
    # bf16: probabilities and the result are rounded, 2 ** -9 of values below 4 each; fp32: sums of up to 131 rows
    torch.testing.assert_close(o.double(), exact, rtol=0, atol=2**-6 if dtype == torch.bfloat16 else 2e-6)


def test_one_row_without_a_sink_is_that_row():
    window, entries = torch.randn(3, 8).bfloat16(), torch.randn(2, 8).bfloat16()
    q, sink = torch.randn(5, 2, 8).bfloat16(), torch.full((2,), NEVER)
    index = torch.full((5, 70), -1)
    index[:, 0] = torch.arange(5)
    o = sparse_attention(q, window, entries, index, sink, 1.0)
    assert torch.equal(o, torch.cat((window, entries))[:, None].expand(-1, 2, -1))


def test_sink_only_joins_the_denominator_and_is_not_scaled():
    rows = torch.arange(1.0, 7.0)[:, None].expand(-1, 4).contiguous()  # [6, 4]
    q, sink = torch.zeros(1, 2, 4), torch.tensor([math.log(2), NEVER])
    o = sparse_attention(q, rows, rows[:0], torch.tensor([[0, 1, -1, 5]]), sink, 1e-3)
    # scores 0: each row counts 1, the sink 2 or nothing
    assert o[0, :, 0].tolist() == pytest.approx([9 / 5, 9 / 3], rel=1e-6)


def test_probabilities_are_rounded_for_the_product_only():
    seen_apart = 0
    for step in range(50):
        # scores 0 and -scale; the second row alone has a value in the second dim
        scale, rows = 0.1 + step / 10, torch.tensor([[0.0, 0.0], [-1.0, 1.0]]).bfloat16()
        q, sink = torch.tensor([[[1.0, 0.0]]]).bfloat16(), torch.tensor([NEVER])
        o = sparse_attention(q, rows, rows[:0], torch.tensor([[0, 1]]), sink, scale)
        chance = math.exp(-torch.tensor(scale).item())
        product = torch.tensor(chance).bfloat16().item()
        expected = [torch.tensor(part / (1 + chance)).bfloat16().item() for part in (product, chance)]
        assert o[0, 0, 1].item() == expected[0]
        seen_apart += expected[0] != expected[1]
    assert seen_apart > 5


@pytest.mark.parametrize("first", [1e4, -1e4])
def test_maximum_runs_from_block_to_block(first):
    # the first 64 rows score far above or far below the others: nothing overflows, nothing is lost
    rows = torch.zeros(66, 2)
    rows[:64, 0], rows[:, 1] = first, torch.arange(66.0)
    index, sink = torch.arange(66)[None], torch.tensor([0.0])
    o = sparse_attention(torch.tensor([[[1.0, 0.0]]]), rows, rows[:0], index, sink, 1.0)
    expected = sum(range(64)) / 64 if first > 0 else (64 + 65) / 3
    assert o[0, 0, 1].item() == pytest.approx(expected, rel=1e-6)


def test_the_sink_may_be_far_above_every_row():
    o = sparse_attention(
        torch.zeros(1, 1, 2), torch.ones(1, 2), torch.ones(0, 2), torch.tensor([[0]]), torch.tensor([80.0]), 1.0
    )
    assert o[0, 0, 0].item() == pytest.approx(math.exp(-80), rel=1e-5)


def test_an_empty_later_block_changes_nothing():
    q, rows, sink = torch.randn(3, 2, 8), torch.randn(9, 8), torch.randn(2)
    index = lists(3, 64, 9)
    padded = torch.cat((index, torch.full((3, 100), -1)), 1)
    assert torch.equal(*(sparse_attention(q, rows, rows[:0], item, sink, 0.3) for item in (index, padded)))
