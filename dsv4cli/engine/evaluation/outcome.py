"""What an item of an evaluation came to; no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from dsv4cli.engine.evaluation.items import Scoring
from dsv4cli.engine.evaluation.judge import Ruling


@dataclass(frozen=True)
class Outcome:
    """index, id, task, score: of the item. ruling: what it is worth. given: what was taken for the answer: the last
    number, the choice, the beginning of a continuation that the model would have written too.

    content, reasoning_content, finish_reason, seed: of an answer that was drawn.
    logprobs: of each choice where these were judged by likelihood.
    nll: the mean negative log-probability of a token of the continuation or the right choice, in nats.
    common_prefix: how many tokens of the continuation the model writes itself, one after another, at temperature 0.
    prompt_tokens, tokens: that were read, and that were drawn or scored behind them.
    note: what went wrong in judging.
    """

    index: int
    id: str
    task: str
    score: Scoring | None
    ruling: Ruling
    given: str
    prompt_tokens: int
    tokens: int
    content: str | None = None
    reasoning_content: str | None = None
    finish_reason: str | None = None
    seed: int | None = None
    logprobs: list[float] | None = None
    nll: float | None = None
    common_prefix: int | None = None
    note: str | None = None

    def record(self) -> dict[str, Any]:
        """As JSON has it: what there is."""
        return {key: value for key, value in asdict(self).items() if value is not None or key == "score"}

    def same_answer(self, other: "Outcome") -> bool:
        """Whether both models said the same: what was drawn, the choice, the beginning of a continuation."""
        return (self.ruling, self.given, self.content, self.common_prefix) == (
            other.ruling,
            other.given,
            other.content,
            other.common_prefix,
        )


def outcome_of(record: Mapping[str, Any]) -> Outcome:
    """What `Outcome.record` has written. Raises ValueError for anything else."""
    known = {field.name for field in fields(Outcome)}
    try:
        found = Outcome(**{str(key): value for key, value in record.items()})
    except (TypeError, AttributeError):
        raise ValueError(f"not the keys {', '.join(sorted(known))}") from None
    whole = all(isinstance(one, int) for one in (found.index, found.prompt_tokens, found.tokens))
    texts = all(isinstance(one, str) for one in (found.id, found.task, found.given, found.content or ""))
    numbers = all(isinstance(one, float | int) for one in (found.nll or 0, found.common_prefix or 0))
    if not (whole and texts and numbers) or found.ruling not in get_args(Ruling):
        raise ValueError("not the result of an item")
    return found
