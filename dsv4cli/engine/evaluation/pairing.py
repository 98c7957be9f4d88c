"""Paired comparison of two models on the same items: is one worse than the other? No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dsv4cli.engine.evaluation.outcome import Outcome
from dsv4cli.engine.evaluation.statistics import LEVEL, MIN_PAIRS, Mean, mcnemar, mean_of, student_p

# NLL per token, in nats: rounding error of an fp32 log-softmax; equal weights differ by no more
ROUNDING = 1e-6
# same: all answers and NLLs; different: some differ beyond rounding; worse, better: significantly
PairingVerdict = Literal["same", "different", "worse", "better"]


@dataclass(frozen=True)
class Pairing:
    """A paired comparison of this model with another on the same items.

    Attributes:
        compared: items for which both models have a complete, judged answer.
        gained: items that only this model answered correctly.
        lost: items that only the other model answered correctly.
        changed: pairs of outcomes with different answers.
        difference: mean difference in score.
        nll_items: items for which both models have an NLL.
        nll_difference: mean difference in NLL per token, in nats.
        numbers: NLLs that differ by more than `ROUNDING`.
        largest: largest absolute difference in NLL, in nats.
    """

    compared: int
    gained: int
    lost: int
    changed: list[tuple[Outcome, Outcome]]
    difference: Mean
    nll_items: int
    nll_difference: Mean
    numbers: int
    largest: float

    @property
    def answers_p(self) -> float:
        """The p-value of the difference in scores, if both models were equally good."""
        return mcnemar(self.gained, self.lost)

    @property
    def nll_p(self) -> float | None:
        """The p-value of the mean difference in NLL, if both models were equally good; None if too few items differ."""
        if 0 < self.numbers < MIN_PAIRS:
            return None
        return student_p(self.nll_difference, self.nll_items) if self.numbers else 1.0

    @property
    def level(self) -> float:
        """The significance level of each test. Tests that have enough pairs share `LEVEL`, so the verdict keeps it."""
        tests = (self.gained + self.lost >= MIN_PAIRS) + (self.numbers >= MIN_PAIRS)
        return LEVEL / max(tests, 1)

    @property
    def verdict(self) -> PairingVerdict:
        """The verdict of both tests on this model; the worse of the two counts."""
        signs: list[float] = []
        if self.answers_p < self.level:
            signs.append(self.gained - self.lost)
        if self.nll_p is not None and self.nll_p < self.level and self.nll_difference.value is not None:
            signs.append(-self.nll_difference.value)
        if signs:
            return "worse" if min(signs) < 0 else "better"
        return "different" if self.changed or self.numbers else "same"

    def record(self) -> dict[str, Any]:
        """Return the comparison as a JSON object."""
        return {
            "verdict": self.verdict,
            "level": self.level,
            "min_pairs": MIN_PAIRS,
            "compared": self.compared,
            "gained": self.gained,
            "lost": self.lost,
            "difference": self.difference.value,
            "stderr": self.difference.stderr,
            "p": self.answers_p,
            "nll": {
                "items": self.nll_items,
                "difference": self.nll_difference.value,
                "stderr": self.nll_difference.stderr,
                "p": self.nll_p,
                "changed": self.numbers,
                "largest": self.largest,
            },
            "changed": [
                {"id": one.id, "ruling": [one.ruling, other.ruling], "given": [one.given, other.given]}
                for one, other in self.changed
            ],
        }


def pair(own: Sequence[Outcome], others: Sequence[Outcome]) -> Pairing:
    """Compare the results of two models on the same items, which must be in the same order."""
    pairs = list(zip(own, others, strict=True))
    judged = [
        (one.ruling == "correct") - (other.ruling == "correct")
        for one, other in pairs
        if {one.ruling, other.ruling} <= {"correct", "wrong"}
    ]
    nlls = [one.nll - other.nll for one, other in pairs if one.nll is not None and other.nll is not None]
    return Pairing(
        compared=len(judged),
        gained=judged.count(1),
        lost=judged.count(-1),
        changed=[(one, other) for one, other in pairs if not one.same_answer(other)],
        difference=mean_of(judged),
        nll_items=len(nlls),
        nll_difference=mean_of(nlls),
        numbers=sum(abs(one) > ROUNDING for one in nlls),
        largest=max(map(math.fabs, nlls), default=0.0),
    )
