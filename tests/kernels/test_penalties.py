"""Penalties, top-k and min-p on logits, against their definitions in pure Python."""

import math
from fractions import Fraction

import pytest
import torch

from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.sampling import BANNED, IN_PROMPT, OCCURRENCE, gap_of, keep_likeliest, penalize
from tests.support.slow import slow

# rows, vocabulary; the last is that of the model, in more than a hundred parts
SHAPES = [(0, 7), (1, 1), (3, 7), (2, 1025), *slow((2, 5003), (1, 129_280))]


def rounded(value: Fraction) -> float:
    """A value in fp32, through fp64."""
    return torch.tensor(float(value), dtype=torch.float64, device="cpu").float().item()


def slow_penalty(logit: float, in_prompt: bool, times: int, penalties: list[float]) -> float:
    """One logit by the definition: the quotient is rounded to fp64, all else is exact until the end."""
    repetition, frequency, presence = penalties
    value = Fraction(logit)
    if in_prompt or times:
        value = Fraction(logit / repetition) if logit > 0 else value * Fraction(repetition)
    return rounded(value - times * Fraction(frequency) - (times > 0) * Fraction(presence))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_penalties_are_those_of_the_definition(shape, drafts):
    rows, width = shape
    logits = torch.randn(shape) * 5
    sequences = 3
    seen = torch.randint(0, 4, (sequences, width)).mul(torch.randint(0, 2, (sequences, width))).int()
    places = torch.tensor([row % 4 - 1 for row in range(rows)][::-1], dtype=torch.int64)  # the first row may have none
    drafted = torch.randint(-1, width, (drafts, rows))
    # eighths: their products and sums are exact
    penalties = torch.randint(-8, 9, (3, rows)).float() / 8
    penalties[0] = torch.tensor([[1.0, 1.25, 0.75][row % 3] for row in range(rows)])
    found = penalize(logits, seen, places, drafted, penalties).tolist()
    for row, place in enumerate(places.tolist()):
        if place < 0:
            assert found[row] == logits[row].tolist()
            continue
        own, more = seen[place].tolist(), drafted[:, row].tolist()
        times = [count // OCCURRENCE + more.count(token) for token, count in enumerate(own)]
        expected = [
            slow_penalty(logit, count % OCCURRENCE == IN_PROMPT, many, penalties[:, row].tolist())
            for logit, count, many in zip(logits[row].tolist(), own, times, strict=True)
        ]
        assert found[row] == expected


@pytest.mark.usefixtures("backend")
def test_penalties_that_are_no_fractions_of_two_are_rounded_once():
    logits, none = torch.tensor([[0.1, -0.1, 3.3, 7.0]]), torch.zeros(0, 1, dtype=torch.int64)
    seen = torch.tensor([[0, IN_PROMPT, 3 * OCCURRENCE, IN_PROMPT + OCCURRENCE]], dtype=torch.int32)
    penalties = torch.tensor([[1.1], [0.3], [0.7]])
    repetition, frequency, presence = penalties.double()[:, 0].tolist()
    given = logits.double()[0].tolist()
    expected = [
        given[0],
        given[1] * repetition,
        given[2] / repetition - 3 * frequency - presence,
        given[3] / repetition - frequency - presence,
    ]
    found = penalize(logits, seen, torch.zeros(1, dtype=torch.int64), none, penalties)
    assert torch.equal(found, torch.tensor([expected], dtype=torch.float64).float())


def slow_kept(logits: list[float], count: int, gap: float) -> list[float]:
    """A row by the definition. The sum of the largest logit and the gap is rounded to fp32."""
    ordered = sorted(logits, reverse=True)
    nth = ordered[min(count or len(logits), len(logits)) - 1]
    least = rounded(Fraction(ordered[0]) - Fraction(gap)) if math.isfinite(gap) else -math.inf
    banned = torch.tensor(BANNED).item()
    return [logit if logit >= max(nth, least) else banned for logit in logits]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_likeliest_are_those_of_the_definition(shape):
    rows, width = shape
    logits = torch.randn(shape) * 5
    if rows:
        logits[0] = logits[0].round()  # many of them equal, zeros of both signs among them
    for counts, min_p in ((0, 0.0), (1, 0.0), (3, 0.2), (40, 0.001), (0, 1.0), (width - 1, 0.0), (width + 5, 0.5)):
        gap = torch.full((rows,), gap_of(min_p, 0.7))
        found = keep_likeliest(logits, torch.full((rows,), counts), gap)
        pairs = zip(logits.tolist(), gap.tolist(), strict=True)
        assert found.tolist() == [slow_kept(row, counts, edge) for row, edge in pairs]


@pytest.mark.usefixtures("backend")
def test_each_row_keeps_its_own_number_of_tokens():
    logits = torch.randn(5, 300).sort(descending=True)[0]
    logits[4, 10:] = BANNED  # fewer than its count are left
    counts, gaps = torch.tensor([0, 7, 1, 0, 20]), torch.tensor([math.inf, math.inf, 2.0, 0.0, math.inf])
    found = keep_likeliest(logits, counts, gaps)
    assert (found > BANNED / 2).sum(1).tolist() == [300, 7, 1, 1, 10]
    assert torch.equal(found[0], logits[0])
    for row in range(5):
        alone = keep_likeliest(logits[row : row + 1], counts[row : row + 1], gaps[row : row + 1])
        assert torch.equal(alone[0], found[row])


@pytest.mark.usefixtures("backend")
def test_zeros_of_both_signs_are_equal():
    logits = torch.tensor([[0.0, -0.0, 1.0, -1.0], [-0.0, 0.0, 1.0, -1.0]])
    found = keep_likeliest(logits, torch.tensor([2, 2]), torch.full((2,), math.inf))
    assert (found > BANNED / 2).tolist() == [[True, True, True, False]] * 2


def test_the_gap_is_the_logarithm_of_a_ratio_of_probabilities():
    logits = torch.tensor([2.0, 2.0 - gap_of(0.25, 1.5)], dtype=torch.float64)
    likely, rare = (logits / 1.5).softmax(-1).tolist()
    assert rare / likely == pytest.approx(0.25)
    assert gap_of(0.0, 1.0) == math.inf
    assert gap_of(1.0, 1.0) == 0


def test_inputs_that_the_kernels_do_not_support(triton_backend):
    logits, place = torch.randn(1, 8), torch.zeros(1, dtype=torch.int64)
    none, penalties = torch.zeros(0, 1, dtype=torch.int64), torch.ones(3, 1)
    with pytest.raises(KernelUnsupported):
        penalize(logits.half(), torch.zeros(1, 8, dtype=torch.int32), place, none, penalties)
    with pytest.raises(KernelUnsupported):
        penalize(logits, torch.zeros(1, 8, dtype=torch.int64), place, none, penalties)
    with pytest.raises(KernelUnsupported):
        keep_likeliest(logits, place.int(), torch.zeros(1))
