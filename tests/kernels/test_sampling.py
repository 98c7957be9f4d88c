"""Sampling against its definition, written out in pure Python with exact fractions."""

from fractions import Fraction

import pytest
import torch

from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.sampling import draw, greedy, ref

# rows, vocabulary; the last is that of the model, in more than a hundred parts
SHAPES = [(0, 7), (1, 1), (3, 7), (5, 1024), (2, 1025), (2, 5003), (1, 129_280)]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_is_the_first_of_the_largest(shape):
    logits = torch.randn(shape).mul(4).round()  # many of them equal
    chosen = greedy(logits)
    assert chosen.dtype == torch.int64
    assert chosen.tolist() == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.usefixtures("backend")
def test_greedy_of_a_slice_and_of_infinities():
    logits = torch.randn(4, 3000)
    assert torch.equal(greedy(logits[:, 500:2500]), greedy(logits[:, 500:2500].clone()))
    logits[0], logits[1, 7], logits[1, 9] = float("-inf"), float("inf"), float("inf")
    assert greedy(logits)[:2].tolist() == [0, 7]


def slow_nucleus(weights: list[int], top_p: float) -> list[bool]:
    """Which tokens are in the nucleus; the sums are exact."""
    kept, before, limit = [False] * len(weights), 0, Fraction(top_p) * sum(weights)
    for token in sorted(range(len(weights)), key=lambda token: -weights[token]):
        if before >= limit:
            break
        kept[token] = True
        before += weights[token]
    return kept


# chances in units of which 32 make the whole, ties among them
WEIGHTS = [pytest.param([8, 4, 4, 4, 2, 2, 4, 4], marks=pytest.mark.slow), [8] * 4, [32], [2, 6, 12, 6, 6]]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_the_edge_of_the_nucleus(weights):
    width = len(weights)
    # with the noise of row t its token t is drawn if it is in the nucleus, and one of the likeliest if not
    noise = torch.ones(width, width).masked_fill(torch.eye(width) > 0, 1e-30)
    logits = torch.tensor(weights).double().log().float().expand(width, -1).contiguous()
    # between the edges; at an edge itself only where every chance is exact
    for part in [*range(1, 32, 6), *([8, 24] if len(set(weights)) == 1 else [])]:
        drawn = draw(logits, noise, 1.0, part / 32).tolist()
        assert [place == token for place, token in enumerate(drawn)] == slow_nucleus(weights, part / 32)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("top_p", [1e-9, 0.9, 0.99999, 1.0])
@pytest.mark.parametrize("temperature", [1e-6, 2.0])
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (2, 1025)], ids=str)
def test_draws_are_those_of_the_definition(shape, temperature, top_p):
    logits, noise = torch.randn(shape) * 3, torch.empty(shape).exponential_()
    drawn = draw(logits, noise, temperature, top_p)
    assert (drawn.dtype, drawn.shape) == (torch.int64, shape[:1])
    exact = (logits / temperature).double().softmax(-1)
    for row, token in enumerate(drawn.tolist()):
        ordered, order = exact[row].sort(descending=True, stable=True)
        before = torch.zeros_like(ordered).scatter(0, order, ordered.cumsum(0) - ordered)
        # chances of fp32 are off by 1e-5 of themselves at most: exp of a difference of up to 40
        surely = before < top_p * (1 - 1e-5)
        race = exact[row] / noise[row].double()
        assert before[token] < top_p * (1 + 1e-5)
        assert race[token] >= race[surely].max() * (1 - 1e-4)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("top_p", [0.5, 0.95])
def test_draws_from_a_row_in_many_parts(top_p):
    vocabulary = 129_280 if torch.empty(0).is_cuda else 5_003  # an interpreted part takes 10 ms
    logits, noise = torch.randn(2, vocabulary) * 3, torch.empty(2, vocabulary).exponential_()
    # all equal: the nucleus ends within a part; three tokens from its edge, so that no rounding of a sum matters
    logits[1], edge = 0.0, int(vocabulary * top_p)
    noise[1, edge + 3], noise[1, edge - 3] = 1e-30, 1e-20
    drawn = draw(logits, noise, 1.0, top_p).cpu()
    assert drawn[0] == ref.draw(logits[:1].cpu(), noise[:1].cpu(), 1.0, top_p)
    assert drawn[1] == edge - 3


@pytest.mark.usefixtures("backend")
def test_noise_and_logits_of_wider_rows():
    logits, noise = torch.randn(3, 2000), torch.empty(3, 2000).exponential_()
    parts = logits[:, 100:1900], noise[:, 100:1900]
    assert torch.equal(draw(*parts, 0.8, 0.9), draw(*(part.clone() for part in parts), 0.8, 0.9))


@pytest.mark.usefixtures("triton_backend")
def test_what_the_kernel_does_not_take():
    with pytest.raises(KernelUnsupported, match="fp32"):
        greedy(torch.zeros(2, 3).bfloat16())
    with pytest.raises(KernelUnsupported, match="consecutive"):
        draw(torch.zeros(2, 3), torch.ones(3, 2).T, 1.0, 0.5)
