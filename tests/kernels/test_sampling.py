"""Sampling against its definition, written out in pure Python with exact fractions."""

import math
from fractions import Fraction

import pytest
import torch

from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.sampling import draw, greedy, noise, ref
from tests.kernels.rounding import assert_rounded_once

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
    before, smallest, limit = 0, max(weights), (Fraction(top_p) - Fraction(1, 2**16)) * sum(weights)
    for weight in sorted(weights, reverse=True):
        smallest = smallest if before >= limit else weight
        before += weight
    return [weight >= smallest for weight in weights]


# chances in units, ties among them; how many units are asked for: between the edges, and at edges that fp32 misses by
# its last bits in one direction or the other
NUCLEI = [
    ([16, 16], [1, 16]), ([32], [31]), ([4, 16, 6, 6], [16, 19, 28]), ([1] * 5, [2, 3]), ([3, 3, 1, 1, 1, 1], [6, 7]),
    *(pytest.param(weights, range(1, 32), marks=pytest.mark.slow)
      for weights in ([8, 4, 4, 4, 2, 2, 4, 4], [2, 6, 12, 6, 6], [7, 1, 7, 1, 7, 3, 3, 3])),
    pytest.param([8] * 4, [7, 8, 13, 16, 19, 24, 25], marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("weights", "parts"), NUCLEI, ids=str)
def test_the_edge_of_the_nucleus(weights, parts):
    width = len(weights)
    # with the noise of row t its token t is drawn if it is in the nucleus, and one of the likeliest if not
    noise = torch.ones(width, width).masked_fill(torch.eye(width) > 0, 1e-30)
    logits = torch.tensor(weights).double().log().float().expand(width, -1).contiguous()
    for part in parts:
        drawn = draw(logits, noise, 1.0, part / sum(weights)).tolist()
        assert [index == token for index, token in enumerate(drawn)] == slow_nucleus(weights, part / sum(weights))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("temperature", "top_p"),
    [
        *((2.0, top_p) for top_p in (1e-9, 0.9, 0.99999, 1.0)),
        *(pytest.param(1e-6, top_p, marks=pytest.mark.slow) for top_p in (1e-9, 0.99999, 1.0)),
        (1e-6, 0.9),
    ],
)
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (1, 1025)], ids=str)
def test_draws_are_those_of_the_definition(shape, temperature, top_p):
    logits, noise = torch.randn(shape) * 3, torch.empty(shape).exponential_()
    drawn = draw(logits, noise, temperature, top_p)
    assert (drawn.dtype, drawn.shape) == (torch.int64, shape[:1])
    exact = (logits / temperature).double().softmax(-1)
    for row, token in enumerate(drawn.tolist()):
        ordered, order = exact[row].sort(descending=True, stable=True)
        before = torch.zeros_like(ordered).scatter(0, order, ordered.cumsum(0) - ordered)
        # chances of fp32 are off by 1e-5 of themselves at most: exp of a difference of up to 40
        surely = before < max(top_p * (1 - 1e-5) - 2.0**-16, 1e-12)
        race = exact[row] / noise[row].double()
        assert before[token] < top_p * (1 + 1e-5)
        assert race[token] >= race[surely].max() * (1 - 1e-4)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("top_p", [pytest.param(0.5, marks=pytest.mark.slow), 0.95])
def test_draws_from_a_row_in_many_parts(top_p):
    vocabulary = 129_280 if torch.empty(0).is_cuda else 5_003  # an interpreted part takes 10 ms
    logits, noise = torch.randn(2, vocabulary) * 3, torch.empty(2, vocabulary).exponential_()
    # a token that holds top_p, and equals of which the nucleus has none or all
    logits[1] = 0.0
    logits[1, 7] = math.log(top_p / (1 - top_p) * (vocabulary - 1))
    noise[1, -1] = 1e-30
    drawn = draw(logits, noise, 1.0, top_p).cpu()
    assert drawn[0] == ref.draw(logits[:1].cpu(), noise[:1].cpu(), 1.0, top_p)
    assert drawn[1] == 7
    assert draw(logits[1:], noise[1:], 1.0, top_p + 1e-4).item() == vocabulary - 1


@pytest.mark.usefixtures("backend")
def test_noise_and_logits_of_wider_rows():
    logits, noise = torch.randn(2, 1200), torch.empty(2, 1200).exponential_()
    parts = logits[:, 100:1150], noise[:, 100:1150]
    assert torch.equal(draw(*parts, 0.8, 0.9), draw(*(part.clone() for part in parts), 0.8, 0.9))


def splitmix(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def test_the_generator_is_splitmix64():
    # the first numbers of seed 0, published with the generator of java.util.SplittableRandom
    assert [splitmix(n * 0x9E3779B97F4A7C15) for n in range(2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (3, 1025)], ids=str)
def test_noise_is_that_of_its_definition(shape):
    rows, width = shape
    seeds, positions = [2**32 + 1, 0, 17][:rows], [0, 1_048_576, 5][:rows]
    made = noise(torch.tensor(seeds, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64), width)
    step, expected = 0x9E3779B97F4A7C15, torch.zeros(shape, dtype=torch.float64)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        state = splitmix(splitmix(seed) + step * position)
        bits = [splitmix(state + step * column) for column in range(width)]
        expected[row] = torch.tensor([-math.log(((k >> 12) + 0.5) / 2**52) for k in bits], dtype=torch.float64)
    assert (made.dtype, made.shape) == (torch.float32, shape)
    # rounded once, from a logarithm that may be off by a few units of fp64
    expected = expected.to(made.device)
    assert_rounded_once(made, expected, expected * 2.0**-50)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.flatten(), b.flatten()))).abs()[0, 1])


def uneven(share: torch.Tensor, bins: int = 64) -> float:
    """Chi-square of evenness of numbers between 0 and 1, in standard deviations."""
    counts = (share * bins).long().flatten().bincount(minlength=bins).double()
    mean = share.numel() / bins
    return float(((counts - mean) ** 2 / mean).sum() - (bins - 1)) / math.sqrt(2 * (bins - 1))


# seeds and positions of rows that must have nothing in common: a batch of prompts, one prompt's positions, both at once
ROWS = {
    "seeds": (torch.arange(200), torch.full((200,), 12)),
    "positions": (torch.full((200,), 3), torch.arange(200)),
    "both": (torch.arange(200), torch.arange(200)),
    "against": (torch.arange(200), 200 - torch.arange(200)),
}


@pytest.mark.parametrize("rows", ROWS)
def test_noise_is_exponential_and_independent(rows):
    made = noise(*ROWS[rows], 1000).double()
    count, share = made.numel(), torch.exp(-made)
    # five standard deviations: of a mean, of a variance (the fourth moment about the mean is 9), of a correlation
    assert abs(made.mean() - 1) < 5 / math.sqrt(count)
    assert abs(made.var() - 1) < 5 * math.sqrt(8 / count)
    assert abs(uneven(share)) < 5
    # across columns, and across rows, of which the worst of a few hundred
    assert max(abs(uneven(column, 10)) for column in share.T[:200]) < 7
    assert max(abs(uneven(row)) for row in share) < 7
    for apart in (1, 2, 3, 64):
        assert correlation(share[apart:], share[:-apart]) < 5 / math.sqrt(count)
        assert correlation(share[:, apart:], share[:, :-apart]) < 5 / math.sqrt(count)
        assert correlation(share[apart:, apart:], share[:-apart, :-apart]) < 5 / math.sqrt(count)
        assert correlation(share[apart:, :-apart], share[:-apart, apart:]) < 5 / math.sqrt(count)
    assert made.unique().numel() > 0.98 * count  # nothing comes again but numbers that fp32 rounds together


@pytest.mark.usefixtures("triton_backend")
def test_what_the_kernel_does_not_take():
    with pytest.raises(KernelUnsupported, match="fp32"):
        greedy(torch.zeros(2, 3).bfloat16())
    with pytest.raises(KernelUnsupported, match="consecutive"):
        draw(torch.zeros(2, 3), torch.ones(3, 2).T, 1.0, 0.5)
    with pytest.raises(KernelUnsupported, match="int64"):
        noise(torch.zeros(2), torch.zeros(2, dtype=torch.int64), 5)
