"""From logits to a token: greedy, temperature, nucleus, seeds."""

from dataclasses import replace

import pytest
import torch

from dsv4cli.engine.runtime.sampling.sampler import Draws, check_finite, kind_of, sample
from dsv4cli.engine.settings import MIN_TEMPERATURE, Sampling
from dsv4cli.errors import UnsoundResult
from dsv4cli.kernels.sampling import draw, greedy, limit_of, noise
from dsv4cli.kernels.sampling.ref import nucleus
from tests.support.plain_sampling import plain_chances, plain_nucleus

ROWS, VOCABULARY = 2000, 7


def origins(count: int, first: int = 0) -> tuple[list[int], list[int]]:
    """A seed of its own for each row, and positions."""
    return [first + number for number in range(count)], [7 + number // 3 for number in range(first, first + count)]


def drawn(logits: torch.Tensor, sampling: Sampling, seeds: list[int], positions: list[int]) -> torch.Tensor:
    samplings = [replace(sampling, seed=seed) for seed in seeds]
    return sample(logits, Draws.of(samplings, positions, logits.device))


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.51, 0.999, 1.0])
@pytest.mark.parametrize("vocabulary", [1, 2, 101])
def test_the_nucleus_is_that_of_the_definition(vocabulary, top_p):
    chances = (torch.randn(5, vocabulary) * 2).softmax(-1)
    chances[0] = 1 / vocabulary  # all equal
    if vocabulary > 1:
        chances[1] = 0.0
        chances[1, vocabulary // 2] = 1.0  # all in one
    for ours, row in zip(nucleus(chances, torch.full((5,), limit_of(top_p))), chances, strict=True):
        assert torch.equal(ours, torch.tensor(plain_nucleus(row.tolist(), top_p)))
        assert (ours > 0).any()


def test_greedy_is_the_first_of_the_best():
    logits = torch.randn(50, VOCABULARY)
    logits[0] = 1.0
    assert torch.equal(drawn(logits, Sampling(temperature=0), *origins(50)), logits.argmax(-1))
    for sampling in (Sampling(temperature=MIN_TEMPERATURE), Sampling(top_p=1e-9)):
        assert torch.equal(drawn(logits[1:] * 50, sampling, *origins(49)), logits[1:].argmax(-1))


def test_noise_is_that_of_a_seed_at_a_place():
    logits, seeds, positions = torch.randn(4, 100), [3, 3, 5, 7], [5, 7, 3, 3]
    expected = draw(logits, noise(torch.tensor(seeds), torch.tensor(positions), 100), torch.ones(4))
    assert torch.equal(drawn(logits, Sampling(), seeds, positions), expected)


@pytest.mark.parametrize(
    "sampling",
    [
        *(Sampling(temperature, top_p) for temperature, top_p in ((1.0, 1.0), (0.5, 1.0), (3.0, 1.0), (1.0, 0.6))),
        Sampling(1.0, top_k=3),
        Sampling(3.0, min_p=0.6),
        # top-p of what top-k and min-p leave: 0.75 of all would be three of these four
        Sampling(2.0, 0.75, top_k=5, min_p=0.5),
    ],
    ids=str,
)
def test_draws_follow_the_probabilities(sampling):
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -3.0, 1.5])
    chances = torch.tensor(plain_chances(logits.tolist(), [], [], sampling))
    found = drawn(logits.expand(ROWS, -1), sampling, *origins(ROWS))
    frequencies = found.bincount(minlength=VOCABULARY) / ROWS
    # four standard deviations of a frequency
    assert ((frequencies - chances).abs() <= 4 * (chances * (1 - chances) / ROWS).sqrt()).all()


def test_a_row_depends_on_its_own_seed_and_place_only():
    logits, sampling = torch.randn(6, 300), Sampling(0.9, 0.95)
    seeds, positions = origins(6)
    together = drawn(logits, sampling, seeds, positions).tolist()
    assert together == [drawn(logits[row : row + 1], sampling, *origins(1, row)).item() for row in range(6)]
    assert drawn(logits, sampling, [seed + 50 for seed in seeds], positions).tolist() != together
    assert drawn(logits, sampling, seeds, [position + 1 for position in positions]).tolist() != together


# the samplings of a batch, and what they need together
KINDS = [
    ([Sampling(0.0), Sampling(0.0, 0.5, 3)], "greedy"),
    ([Sampling(1.0), Sampling(0.0, 0.5), Sampling(0.3, seed=9)], "draw"),
    ([Sampling(0.0), Sampling(0.3, seed=9), Sampling(1.0, 0.4, 5)], "nucleus"),
    ([Sampling(0.0, top_k=2), Sampling(0.0, min_p=0.5)], "greedy"),
    ([Sampling(0.0, min_p=1.0), Sampling(0.3, 0.8, 9, top_k=2**40), Sampling(1.5, seed=5, top_k=3)], "filtered"),
    ([Sampling(1.0), Sampling(2.0, 0.4, min_p=0.1), Sampling(1.0, 0.4, 5)], "filtered"),
]


@pytest.mark.parametrize(("samplings", "kind"), KINDS, ids=[f"{kind}{n}" for n, (_, kind) in enumerate(KINDS)])
def test_rows_of_one_batch_have_numbers_of_their_own(samplings, kind):
    logits, positions = torch.randn(len(samplings), 300), [5, 7, 2**20][: len(samplings)]
    draws = Draws.of(samplings, positions, logits.device)
    assert kind_of(samplings) == draws.kind == kind
    assert [one.tolist() for one in (draws.seeds, draws.positions)] == [[one.seed for one in samplings], positions]
    assert torch.equal(draws.temperatures, torch.tensor([one.temperature for one in samplings]))
    assert draws.limits.tolist() == [limit_of(one.top_p) for one in samplings]
    together = sample(logits, draws).tolist()
    for row, sampling in enumerate(samplings):
        alone = logits[row : row + 1]
        assert sample(alone, Draws.of([sampling], [positions[row]], logits.device)).tolist() == [together[row]]
        if sampling.temperature == 0:
            assert greedy(alone).tolist() == [together[row]]


def test_positions_of_the_device_take_the_place_of_those_of_the_host():
    logits, samplings = torch.randn(3, 300), [Sampling(0.9, 0.9, seed) for seed in (1, 2, 3)]
    draws = replace(Draws.of(samplings, [0, 0, 0], "cpu"), positions=torch.tensor([4, 5, 6]))
    assert torch.equal(sample(logits, draws), sample(logits, Draws.of(samplings, [4, 5, 6], "cpu")))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite(value):
    logits = torch.zeros(2, 3)
    check_finite(logits)
    logits[1, 2] = value
    with pytest.raises(UnsoundResult, match="not finite"):
        check_finite(logits)
