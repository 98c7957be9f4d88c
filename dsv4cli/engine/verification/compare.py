"""Compares two answers to the same prompt: equal, equal up to rounding, or different. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dsv4cli.engine.verification.chat_answer import AnswerToken, ChatAnswer

# Rounding in FP8 and bf16 sums moves log-probabilities of likely tokens by hundredths of a nat and rarely by more than
# a tenth, so two tokens can only change places if they are closer than this, in nats.
ROUNDING = 0.25
# a log-probability is not compared if the token is less likely than this, in nats: its relative error is larger
UNLIKELY = -6.0


@dataclass(frozen=True)
class AnswerDifference:
    """How two answers to the same prompt differ.

    Attributes:
        at: the position of the first different token, or of the token with the largest drift.
        drift: the largest difference of log-probabilities before that token, in nats.
        margin: how much less likely one answer's token is in the other answer, in nats; None if it is not known.
        text: both answers at that place, for evidence.
    """

    at: int
    drift: float
    margin: float | None
    text: Sequence[str]

    def size(self) -> float:
        """Return the largest known difference in nats; infinite if a token differs and no margin is known."""
        return max(self.drift, float("inf") if self.margin is None else self.margin)


def difference(one: ChatAnswer, other: ChatAnswer) -> AnswerDifference | None:
    """Return how two answers differ; None if their texts, calls and log-probabilities are equal."""
    same = _words(one) == _words(other)
    tokens = list(zip(one.tokens, other.tokens, strict=False))
    drift, at = max(((abs(a.logprob - b.logprob), n) for n, (a, b) in _alike(tokens)), default=(0.0, 0))
    if same:
        return AnswerDifference(at, drift, 0.0, _shown(one, other, at)) if drift else None
    place = next((n for n, (a, b) in enumerate(tokens) if a.text != b.text), None)
    if place is None:
        return AnswerDifference(len(tokens), drift, None, [f"one: {_short(one)}", f"other: {_short(other)}"])
    a, b = tokens[place]
    margins = [margin for margin in (_margin(a, b), _margin(b, a)) if margin is not None]
    return AnswerDifference(place, drift, min(margins, default=None), _shown(one, other, place))


def _alike(tokens: Sequence[tuple[AnswerToken, AnswerToken]]) -> Iterator[tuple[int, tuple[AnswerToken, AnswerToken]]]:
    """Yield the pairs of equal, not too unlikely tokens before the first different ones, with their positions."""
    for number, (a, b) in enumerate(tokens):
        if a.text != b.text:
            return
        if max(a.logprob, b.logprob) > UNLIKELY:
            yield number, (a, b)


def _margin(one: AnswerToken, other: AnswerToken) -> float | None:
    """Return how much less likely than its own token one answer rates the other's token, in nats; None if unknown."""
    if not one.top:
        return None
    # a token that is not listed is less likely than all that are
    return one.logprob - one.top.get(other.text, min(one.top.values()))


def _words(one: ChatAnswer) -> tuple[object, ...]:
    calls = [(call.name, call.arguments) for call in one.calls]
    return one.content or "", one.reasoning, calls, one.finish


def _short(one: ChatAnswer) -> str:
    return repr((one.reasoning + (one.content or "") + "".join(call.arguments for call in one.calls))[:120])


def _shown(one: ChatAnswer, other: ChatAnswer, at: int) -> list[str]:
    lines = []
    for name, answer in (("one", one), ("other", other)):
        token = answer.tokens[at]
        before = "".join(earlier.text for earlier in answer.tokens[max(at - 8, 0) : at])
        likely = ", ".join(f"{text!r} {logprob:.3f}" for text, logprob in list(token.top.items())[:3])
        lines.append(
            f"{name}: token {at} after {before!r} is {token.text!r} ({token.logprob:.3f}; likeliest: {likely})"
        )
    return lines
