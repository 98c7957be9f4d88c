"""Index scores with every rounding written out, and the choice of entries against a sort in pure Python."""

import pytest
import torch

from dsv4cli.kernels.indexer import index_scores, top_entries


def rounded(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().bfloat16().item()


def slow_score(q: list[list[float]], weights: list[float], key: list[float]) -> float:
    total = 0.0
    for head, weight in zip(q, weights, strict=True):
        dot = rounded(sum(a * b for a, b in zip(head, key, strict=True)))
        total += rounded(max(dot, 0.0) * weight)
    return rounded(total)


# tokens, heads, width, entries of each sequence: none, one, a block of 64, one more
SHAPES = [(0, 4, 32, 3), (1, 1, 32, 0), (1, 4, 128, 1), (3, 16, 32, 64), (5, 4, 32, 65), (2, 3, 64, 131)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_round_each_step(shape):
    tokens, heads, width, entries = shape
    # halves up to 6, as FP4 leaves them: dots are exact, their roundings those of the true values
    q, keys = (torch.randint(-12, 13, size).div(2).bfloat16() for size in ((tokens, heads, width), (200, width)))
    weights = torch.randn(tokens, heads).bfloat16()
    table = torch.randint(0, 200, (2, entries))
    sequence = torch.arange(tokens) * 2 // max(tokens, 1)
    scores = index_scores(q, weights, keys, table, sequence)
    assert (scores.shape, scores.dtype) == ((tokens, entries), torch.bfloat16)
    for token in range(tokens):
        for entry, cell in enumerate(table[sequence[token]].tolist()):
            expected = slow_score(q[token].tolist(), weights[token].tolist(), keys[cell].tolist())
            assert scores[token, entry].item() == expected, (token, entry)


def test_scores_in_fp32_are_not_rounded():
    q, weights, keys = torch.randn(3, 4, 32), torch.randn(3, 4), torch.randn(70, 32)
    scores = index_scores(q, weights, keys, torch.arange(70)[None], torch.zeros(3, dtype=torch.int64))
    dots = torch.einsum("thd,ed->the", q.double(), keys.double())
    # sums of 32 products of normal numbers in fp32
    torch.testing.assert_close(scores.double(), (dots.relu() * weights[..., None]).sum(1), rtol=0, atol=5e-5)


def test_negative_heads_do_not_cancel_positive_ones():
    # relu stands before the sum over heads
    q = torch.tensor([[[1.0], [-1.0]]])
    assert index_scores(q, torch.ones(1, 2), torch.ones(1, 1), torch.zeros(1, 1).long(), torch.zeros(1).long()) == 1


def slow_top(scores: list[float], visible: int, k: int) -> list[int]:
    order = sorted(range(visible), key=lambda entry: (-scores[entry], entry))[:k]
    return order + [-1] * (min(k, len(scores)) - len(order))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "entries", "k"), [(0, 5, 2), (1, 0, 3), (7, 1, 1), (31, 67, 8), (5, 8, 8), (9, 3, 8)]
)
def test_top_entries_breaks_ties_by_number(tokens, entries, k, dtype):
    scores = torch.randint(-3, 4, (tokens, entries)).to(dtype)  # few values: ties everywhere
    visible = torch.randint(0, entries + 1, (tokens,))
    chosen = top_entries(scores, visible, k)
    assert (chosen.shape, chosen.dtype) == ((tokens, min(k, entries)), torch.int64)
    rows = zip(scores.tolist(), visible.tolist(), strict=True)
    assert chosen.tolist() == [slow_top(row, count, k) for row, count in rows]


def test_hidden_entries_never_win():
    scores = torch.tensor([[-1.0, -2.0, 9.0, 9.0]])
    assert top_entries(scores, torch.tensor([2]), 3).tolist() == [[0, 1, -1]]
    assert top_entries(scores, torch.tensor([0]), 3).tolist() == [[-1, -1, -1]]
