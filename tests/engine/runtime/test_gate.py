"""How many drafts are made and verified, with the times of a step of an H200 and drafts that are worth something or
not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest

from dsv4cli.engine.config.capacity import MAX_SLOTS
from dsv4cli.engine.runtime.drafts.draft_controller import PROBE, DraftController, StepCosts
from dsv4cli.engine.runtime.step_sizes import batch_size
from tests.support.slow import slow, slow_except, slow_rows

# milliseconds of a step by its rows, and of making drafts: what the drafter takes in of each step, and each draft
ROWS = {1: 5.0, 2: 6.1, 4: 8.1, 8: 11.5, 16: 17.0, 32: 27.0, 64: 45.0}
ABSORBING, DRAFT = 0.05, 0.28
# how much a measured time is off
JITTER = 0.03


def verifying(rows: int) -> float:
    """Between the rows that were measured, in proportion."""
    if rows in ROWS:
        return ROWS[rows]
    low, high = next(pair for pair in pairwise(ROWS) if pair[0] < rows < pair[1])
    return ROWS[low] + (ROWS[high] - ROWS[low]) * (rows - low) / (high - low)


@dataclass
class Simulation:
    """Steps of some sequences, whose drafts are right with the chances that `truth` gives for each place, and of which
    the drafter says what `reports` makes of that."""

    gate: DraftController
    truth: Callable[[int], Sequence[float]]
    sequences: int = 1
    reports: Callable[[float], float] = lambda chance: chance
    random: Random = field(default_factory=lambda: Random(1))
    rows: Callable[[int], float] = verifying
    verified: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    milliseconds: float = 0.0
    tokens: int = 0

    def __post_init__(self) -> None:
        self._chances: list[list[float]] = [[] for _ in range(self.sequences)]

    def step(self) -> None:
        number, gate, count = len(self.verified), self.gate, self.sequences
        drafts, following = gate.drafts(count, self._chances), gate.count(count)
        assert count * (1 + drafts) <= MAX_SLOTS
        assert batch_size(count) * (1 + following) <= MAX_SLOTS
        drafts = min(drafts, max(map(len, self._chances)))
        for chances in self._chances:
            own = min(drafts, len(chances))
            right = [self.random.random() < chance for chance in self.truth(number)[:own]]
            accepted = next((place for place, good in enumerate(right) if not good), own)
            gate.note_drafts(chances, own, accepted)
            self.tokens += 1 + accepted
        times = self.rows(count * (1 + drafts)), ABSORBING + DRAFT * following
        noisy = [value * self.random.uniform(1 - JITTER, 1 + JITTER) for value in times]
        gate.verifying.note(count, 1 + drafts, noisy[0] / 1e3)
        gate.drafting.note(count, following, noisy[1] / 1e3)
        self.milliseconds += sum(times)
        self._chances = [
            [self.reports(chance) for chance in self.truth(number + 1)[:following]] for _ in range(self.sequences)
        ]
        self.verified.append(drafts)
        self.made.append(following)

    def run(self, steps: int) -> "Simulation":
        for _ in range(steps):
            self.step()
        return self

    @property
    def speed(self) -> float:
        """Against the same without drafts."""
        return self.tokens / self.milliseconds / (self.sequences / self.rows(self.sequences))


def always(*chances: float) -> Callable[[int], Sequence[float]]:
    return lambda number: chances


# of each place, given that those before were right
PROSE = always(0.58, 0.45 / 0.58, 0.32 / 0.45, 0.6, 0.5, 0.5, 0.5)
GOOD, WRONG = always(*[0.9] * 7), always(*[0.0] * 7)
BOTH = pytest.mark.parametrize("most", [3, 5, 7], ids=["mtp", "dspark", "all"])


def sure(chance: float) -> float:
    """What a drafter says that trusts itself too much."""
    return 0.9


def fixed(truth: Callable[[int], Sequence[float]], count: int, most: int = 7) -> float:
    """The speed of so many drafts in every step, against none."""
    tokens = survival = 1.0
    for chance in truth(0)[:count]:
        survival *= chance
        tokens += survival
    return tokens / (verifying(1 + count) + ABSORBING + DRAFT * count) * ROWS[1]


@BOTH
@pytest.mark.parametrize("sequences", [1, *slow(4, 8, 64)])
@pytest.mark.parametrize("reports", [sure, lambda chance: chance], ids=["sure", "honest"])
def test_it_closes_where_nothing_is_accepted(most, sequences, reports):
    one = Simulation(DraftController(most), WRONG, sequences, reports).run(500)
    assert one.speed >= 0.97
    # what it makes from then on is to see
    assert sum(one.made[25:]) <= 500 // PROBE + 1


@BOTH
def test_it_opens_again(most):
    """Drafts become right, though the drafter has said that of wrong ones too."""
    gate = DraftController(most)
    one = Simulation(gate, lambda number: (WRONG if number < 400 else GOOD)(number), reports=sure).run(400)
    assert sum(one.verified[200:]) <= 4
    one.run(200)
    one.tokens = one.milliseconds = 0
    assert one.run(200).speed > 0.9 * max(fixed(GOOD, count) for count in range(most + 1))
    # and closes once more
    one.truth = WRONG
    one.run(100)
    one.tokens = one.milliseconds = 0
    assert one.run(400).speed >= 0.96


@BOTH
@pytest.mark.parametrize(("truth", "few", "many"), [*slow_rows((PROSE, 2, 3)), (GOOD, 4, 7)], ids=["prose", "code"])
def test_as_many_drafts_as_pay(most, truth, few, many):
    one = Simulation(DraftController(most), truth).run(200)
    one.tokens = one.milliseconds = 0
    one.run(2000)
    best = max(fixed(truth, count) for count in range(most + 1))
    # of what the tokens of 2,000 steps differ by chance, and times by their noise
    assert one.speed == pytest.approx(best, rel=0.05)
    late = one.verified[-500:]
    assert sum(min(few, most) <= count <= many for count in late) > 400


def test_an_acceptance_is_of_the_draft_that_was_accepted():
    """Of two drafts the first is always accepted, the second never: each chance is believed by its own record."""
    gate = DraftController(2)
    for _ in range(200):
        gate.note_drafts([0.3, 0.9], verified=2, accepted=1)
    assert gate.believed(0.3) > 0.9
    assert gate.believed(0.9) < 0.1


@BOTH
@pytest.mark.parametrize("says", [0.05, pytest.param(0.3, marks=pytest.mark.slow), 0.95])
@pytest.mark.parametrize("truth", [*slow(PROSE, WRONG), GOOD], ids=["prose", "wrong", "code"])
def test_what_a_drafter_says_is_calibrated(most, says, truth):
    one = Simulation(DraftController(most), truth, reports=lambda chance: says).run(300)
    expected = sum(truth(0)[:3]) / 3
    assert one.gate.believed(says) == pytest.approx(expected, abs=0.25)
    one.tokens = one.milliseconds = 0
    assert one.run(500).speed > 0.93 * max(fixed(truth, count) for count in range(most + 1))


@pytest.mark.parametrize("sequences", slow_except([1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 63, 64], range(1, 65)))
def test_no_more_rows_than_graphs_hold(sequences):
    """As captured steps have them, with times and without; what fits is used."""
    one = Simulation(DraftController(7), GOOD, sequences, rows=lambda rows: 5.0).run(12)
    assert max(one.made) == min(7, MAX_SLOTS // batch_size(sequences) - 1)
    # more sequences than there were drafts for
    assert one.gate.drafts(64, [[0.9] * 7] * 64) == one.gate.count(64) == 0


def test_sequences_that_all_cost_more_than_they_give():
    """32 sequences whose rows each cost as much as a step of one: drafts of nine in ten do not pay, two rows do."""
    heavy = Simulation(DraftController(7), GOOD, 32, rows=lambda rows: 5.0 * rows).run(500)
    assert sum(heavy.verified[100:]) <= 8
    assert heavy.speed > 0.95
    light = Simulation(DraftController(7), GOOD, 32, rows=lambda rows: 5.0).run(100)
    assert light.speed > 1.7


@pytest.mark.parametrize("slow", [1, 2, 4])
def test_the_first_time_of_a_step_may_be_off(slow):
    """It may have waited for a disk or a cache; what is not tried again would never be known better."""
    left = [slow]

    def cold(rows: int) -> float:
        return verifying(rows) * (20 if rows in left and not left.remove(rows) else 1)

    one = Simulation(DraftController(7), GOOD, rows=cold).run(200)
    one.tokens = one.milliseconds = 0
    assert one.run(500).speed > 0.9 * max(fixed(GOOD, count) for count in range(8))


def test_one_step_that_waited_hardly_counts():
    costs = StepCosts()
    for seconds in (9.0, 1.0, 100.0):
        costs.note(1, 1, seconds)
    assert costs.guess(1, 1) == pytest.approx(1.1)


def test_rows_of_a_step_may_be_fewer():
    gate = DraftController(7, rows=8)
    assert [gate.count(sequences) for sequences in (1, 2, 4, 8, 64)] == [7, 3, 1, 0, 0]
    assert [gate.drafts(sequences, [[1.0] * 7] * sequences) for sequences in (1, 2, 3, 8)] == [7, 3, 1, 0]


def test_steps_without_drafts_are_tried_where_one_draft_hardly_pays():
    """Measured on two H200, where a row more costs more than guessed; the drafter trusts itself too much."""
    verifying, drafting, gate = (
        {1: 3.85, 2: 5.52, 3: 6.1, 4: 6.62},
        {0: 0.07, 1: 0.36, 2: 0.62, 3: 0.88},
        DraftController(3),
    )
    chances, made, seen, random = [], [], set(), Random(1)
    for _ in range(60):
        drafts = gate.drafts(1, [chances])
        following = gate.count(1)
        # so many first drafts are right, and no other
        gate.note_drafts(chances, drafts, int(drafts > 0 and random.random() < 0.38))
        parts = {("verify", drafts), ("draft", following)}
        if parts <= seen:  # else a graph is captured
            gate.verifying.note(1, 1 + drafts, verifying[1 + drafts] / 1e3)
            gate.drafting.note(1, following, drafting[following] / 1e3)
        seen |= parts
        chances = [0.6] * following
        made.append(following)
    assert sum(made[30:]) <= 1
