"""Summary of a model's results: the score, its standard error and the NLL of continuations. No torch."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dsv4cli.engine.evaluation.judge import Ruling
from dsv4cli.engine.evaluation.outcome import Outcome
from dsv4cli.engine.evaluation.statistics import Mean, mean_of


@dataclass(frozen=True)
class ScoreSummary:
    """A summary of results.

    Attributes:
        rulings: number of items by ruling.
        score: share of correct answers among those that are judged and complete.
        tokens: tokens generated or scored.
        continuations: number of scored continuations.
        nll: mean NLL per token of the continuations, in nats.
        first_token: continuations whose first token is the model's likeliest.
        common_prefix: sum of the continuations' common prefixes, in tokens.
        continuation_tokens: sum of the continuations' lengths, in tokens.
    """

    items: int
    rulings: Counter[Ruling]
    score: Mean
    tokens: int
    prompt_tokens: int
    continuations: int
    nll: Mean
    first_token: int
    common_prefix: int
    continuation_tokens: int

    @property
    def judged(self) -> int:
        """The number of items that count for the score."""
        return self.rulings["correct"] + self.rulings["wrong"]

    def record(self) -> dict[str, Any]:
        """Return the summary as a JSON object."""
        counts = {name: self.rulings[name] for name in ("correct", "wrong", "cut", "unjudged")}
        found: dict[str, Any] = (
            {"items": self.items} | counts | {"score": self.score.value, "stderr": self.score.stderr}
        )
        if self.continuations:
            found |= {
                "continuations": {
                    "items": self.continuations,
                    "nll": self.nll.value,
                    "stderr": self.nll.stderr,
                    "first_token": self.first_token / self.continuations,
                    "common_prefix": self.common_prefix / self.continuations,
                    "tokens": self.continuation_tokens / self.continuations,
                }
            }
        return found


def summary_of(outcomes: Iterable[Outcome]) -> ScoreSummary:
    """Summarize results."""
    found = list(outcomes)
    continued = [one for one in found if one.score == "continuation"]
    return ScoreSummary(
        items=len(found),
        rulings=Counter(one.ruling for one in found),
        score=mean_of([float(one.ruling == "correct") for one in found if one.ruling in ("correct", "wrong")]),
        tokens=sum(one.tokens for one in found),
        prompt_tokens=sum(one.prompt_tokens for one in found),
        continuations=len(continued),
        nll=mean_of([one.nll for one in continued if one.nll is not None]),
        first_token=sum(bool(one.common_prefix) for one in continued),
        common_prefix=sum(one.common_prefix or 0 for one in continued),
        continuation_tokens=sum(one.tokens for one in continued),
    )


def by_task(outcomes: Iterable[Outcome]) -> dict[str, ScoreSummary]:
    """Summarize each task, in order of first appearance. Empty if no item names a task."""
    groups: dict[str, list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault(one.task, []).append(one)
    return {} if set(groups) == {""} else {task: summary_of(found) for task, found in groups.items()}
