"""The result of one evaluation item. No torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from dsv4cli.engine.evaluation.items import Scoring
from dsv4cli.engine.evaluation.judge import Ruling


@dataclass(frozen=True)
class Outcome:
    """The result of one evaluation item.

    Attributes:
        index, id, task, score: copied from the item.
        ruling: the verdict on the answer.
        given: what was taken as the answer: the number, the choice, or the beginning of the continuation that the model
            would have written too.
        prompt_tokens: tokens of the prompt.
        tokens: tokens generated or scored after the prompt.
        content, reasoning_content, finish_reason, seed: the generated answer's, if there is one.
        logprobs: log-probability of each choice, if choices were scored.
        nll: mean negative log-probability per token of the continuation or of the right choice, in nats.
        common_prefix: leading tokens of the continuation that are each the model's likeliest token (temperature 0).
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
        """Return a JSON object without absent values."""
        return {key: value for key, value in asdict(self).items() if value is not None or key == "score"}

    def same_answer(self, other: "Outcome") -> bool:
        """Return whether both models answered alike: the same text, choice and common prefix of the continuation."""
        return (self.ruling, self.given, self.content, self.common_prefix) == (
            other.ruling,
            other.given,
            other.content,
            other.common_prefix,
        )


def outcome_of(record: Mapping[str, Any]) -> Outcome:
    """Parse what `Outcome.record` wrote. Raises ValueError for anything else."""
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
