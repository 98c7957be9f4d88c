"""Sampling against its definition, written out in pure Python with exact fractions."""

import math
from fractions import Fraction

import pytest
import torch

from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.sampling import chance_of, draw, draw_nucleus, greedy, limit_of, logsumexp, noise, ref
from tests.kernels.rounding import assert_rounded_once
from tests.support.slow import slow, slow_rows

# rows, vocabulary; the last is that of the model, in more than a hundred parts
SHAPES = [(0, 7), (1, 1), (3, 7), (5, 1024), (2, 1025), (2, 5003), *slow((1, 129_280))]


def every(rows: int, number: float) -> torch.Tensor:
    return torch.full((rows,), number)


def drawn_with(logits: torch.Tensor, noise: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """All rows with the same numbers; those without a nucleus through `draw`."""
    if top_p == 1:
        return draw(logits, noise, every(len(logits), temperature))
    return draw_nucleus(logits, noise, every(len(logits), temperature), every(len(logits), limit_of(top_p)))


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
    ([32], [31]), ([3, 3, 1, 1, 1, 1], [6, 7]),
    *slow_rows(([16, 16], [1, 16]), ([4, 16, 6, 6], [16, 19, 28]), ([1] * 5, [2, 3])),
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
        drawn = drawn_with(logits, noise, 1.0, part / sum(weights)).tolist()
        assert [index == token for index, token in enumerate(drawn)] == slow_nucleus(weights, part / sum(weights))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("temperature", "top_p"),
    [
        *((2.0, top_p) for top_p in (1e-9, 0.9, 1.0)),
        *slow_rows((2.0, 0.99999), *((1e-6, top_p) for top_p in (1e-9, 0.99999, 1.0))),
        (1e-6, 0.9),
    ],
)
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (1, 1025)], ids=str)
def test_draws_are_those_of_the_definition(shape, temperature, top_p):
    logits, noise = torch.randn(shape) * 3, torch.empty(shape).exponential_()
    drawn = drawn_with(logits, noise, temperature, top_p)
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
    drawn = drawn_with(logits, noise, 1.0, top_p).cpu()
    one = torch.ones(1, device="cpu"), torch.tensor([limit_of(top_p)], device="cpu")
    assert drawn[0] == ref.draw_nucleus(logits[:1].cpu(), noise[:1].cpu(), *one)
    assert drawn[1] == 7
    assert drawn_with(logits[1:], noise[1:], 1.0, top_p + 1e-4).item() == vocabulary - 1


@pytest.mark.parametrize("period", [2250, pytest.param(4500, marks=pytest.mark.slow)])
def test_programs_that_take_several_parts_find_the_same_nucleus(triton_backend, monkeypatch, period):
    from dsv4cli.kernels.sampling import kernel

    # five parts of a row, two of which a program takes
    monkeypatch.setattr(kernel, "PROGRAMS", 7)
    assert [kernel.together(rows, 5) for rows in (1, 2, 3, 64)] == [1, 1, 2, 46]
    # with the shorter period the second half of the row is like the first
    logits, noise = (torch.randn(1, period) * 2).repeat(3, 4500 // period), torch.ones(3, 4500)
    chances = logits[:1].softmax(-1)
    inside = ref.nucleus(chances, torch.tensor([limit_of(0.95)], device=logits.device)) > 0
    # races that the least likely token of the nucleus wins, twice, and one that the likeliest outside would
    edge = [chances.masked_fill(~inside, 2.0).argmin().item(), chances.masked_fill(inside, 0.0).argmax().item()]
    edge = [edge[0] % period, edge[0] % period + 4500 - period, edge[1]]
    noise[[0, 1, 2], edge] = 1e-30
    assert drawn_with(logits, noise, 1.0, 0.95).tolist() == [*edge[:2], chances.argmax().item()]


@pytest.mark.usefixtures("backend")
def test_noise_and_logits_of_wider_rows():
    logits, noise = torch.randn(2, 1200), torch.empty(2, 1200).exponential_()
    parts = logits[:, 100:1150], noise[:, 100:1150]
    for top_p in (0.9, 1.0):
        copies = (part.clone() for part in parts)
        assert torch.equal(drawn_with(*parts, 0.8, top_p), drawn_with(*copies, 0.8, top_p))


def test_limits_are_exact():
    for top_p in (1e-9, 0.1, 0.5, 0.9, 0.95, 0.99999, 1 - 2.0**-53):
        assert limit_of(top_p) == max(math.floor(Fraction(top_p) * 2**62) - 2**46, 1)
    assert limit_of(1.0) == torch.iinfo(torch.int64).max


# temperature, top_p of rows of one batch
MIXED = [(1.0, 1.0), (0.0, 1.0), (0.7, 0.9), (1e-6, 1.0), (0.0, 0.5), (2.0, 0.3), (1.0, 0.99999)]


def close_races(width: int) -> tuple[torch.Tensor, ...]:
    """Rows of MIXED whose races the last bits of chances decide: logits, noise, temperatures, limits."""
    temperatures = torch.tensor([temperature for temperature, _ in MIXED])
    limits = torch.tensor([limit_of(top_p) for _, top_p in MIXED])
    logits = torch.randn(len(MIXED), width) * 3
    chances = (logits / temperatures.clamp(min=1e-6)[:, None]).double().softmax(-1)
    # below 1e-30 fp32 has too few bits for a race
    return logits, chances.float().masked_fill(chances < 1e-30, 1.0), temperatures, limits


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("width", [7, pytest.param(1025, marks=pytest.mark.slow)])
def test_a_row_of_a_mixed_batch_is_drawn_as_alone(width):
    logits, noise, temperatures, limits = close_races(width)
    drawn = draw_nucleus(logits, noise, temperatures, limits).tolist()
    whole = draw(logits, noise, temperatures).tolist()
    for row, (temperature, top_p) in enumerate(MIXED):
        alone = slice(row, row + 1)
        numbers = logits[alone], noise[alone], temperatures[alone]
        assert draw(*numbers).tolist() == [whole[row]]
        assert draw_nucleus(*numbers, limits[alone]).tolist() == [drawn[row]]
        if temperature == 0:
            assert [drawn[row]] == [whole[row]] == greedy(logits[alone]).tolist()
        elif top_p == 1:
            assert drawn[row] == whole[row]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("number", [5, *(pytest.param(number, marks=pytest.mark.slow) for number in (2, 4, 17))])
def test_a_row_is_drawn_alike_among_any_number_of_rows(number):
    logits, noise, temperatures, limits = close_races(1000)
    rows = [2] * number
    alone = draw_nucleus(logits[2:3], noise[2:3], temperatures[2:3], limits[2:3]).tolist()
    assert draw_nucleus(logits[rows], noise[rows], temperatures[rows], limits[rows]).tolist() == alone * number
    alone = draw(logits[2:3], noise[2:3], temperatures[2:3]).tolist()
    assert draw(logits[rows], noise[rows], temperatures[rows]).tolist() == alone * number


@pytest.mark.usefixtures("backend")
def test_a_greedy_row_takes_the_first_of_equals_and_no_noise():
    logits, limits = torch.randn(3, 1300).mul(4).round(), every(3, limit_of(0.5))
    # one that is less by so little that exp does not tell them apart, and its noise is the least
    logits[2], logits[2, 1200], logits[2, 3] = -50.0, 1e-9, 0.0
    noise = torch.ones(3, 1300)
    noise[2, 3] = 1e-30
    for drawn in (draw(logits, noise, torch.zeros(3)), draw_nucleus(logits, noise, torch.zeros(3), limits)):
        assert drawn.tolist() == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (3, 7), (2, 1025)], ids=str)
def test_the_chance_of_a_token(shape):
    logits = torch.randn(shape) * 4
    tokens = torch.arange(shape[0]) * 311 % shape[1]
    chances = chance_of(logits, tokens)
    assert (chances.dtype, chances.shape) == (torch.float32, shape[:1])
    # of fp32, exp of a difference of up to 40
    expected = logits.double().softmax(-1).gather(-1, tokens[:, None])[:, 0].float()
    torch.testing.assert_close(chances, expected, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (3, 7), (2, 1025)], ids=str)
def test_the_sum_of_all_chances(shape):
    logits = torch.randn(shape) * 4
    totals = logsumexp(logits)
    assert (totals.dtype, totals.shape) == (torch.float32, shape[:1])
    torch.testing.assert_close(totals, logits.double().logsumexp(-1).float(), rtol=2e-6, atol=2e-6)  # a few roundings


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_with_a_logit_that_is_not_finite_has_no_sum(value):
    logits = torch.randn(4, 2500)
    for row, column in ((0, 0), (1, 1300), (3, 2499)):
        logits[row, column] = value
    assert logsumexp(logits).isnan().tolist() == [True, True, False, True]


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
        draw(torch.zeros(2, 3), torch.ones(3, 2).T, torch.ones(2))
    with pytest.raises(KernelUnsupported, match="float32"):
        draw(torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2).double())
    with pytest.raises(KernelUnsupported, match="requires contiguous"):
        draw_nucleus(torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2), torch.ones(2, 2, dtype=torch.int64)[:, 0])
    with pytest.raises(KernelUnsupported, match="int64"):
        chance_of(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(KernelUnsupported, match="int64"):
        noise(torch.zeros(2), torch.zeros(2, dtype=torch.int64), 5)
