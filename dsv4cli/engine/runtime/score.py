"""Teacher-forced scoring: how likely the model finds a given text, token by token."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.orders import Followers
from dsv4cli.engine.runtime.request import Alternatives, Request
from dsv4cli.engine.settings import Limits, Sampling


@dataclass
class Score:
    """The scores of sequence `number`: each token's log-probability given those before it (None for the first), and the
    likeliest next tokens after each.
    """

    number: int
    ids: list[int]
    logprobs: list[float | None] = field(default_factory=lambda: [None])
    top: list[Alternatives] = field(default_factory=list)

    @property
    def perplexity(self) -> float | None:
        """exp of the mean negative log-probability; None for a single token, or if a float cannot hold it."""
        known = [value for value in self.logprobs if value is not None]
        if not known:
            return None
        mean = -sum(known) / len(known)
        return math.exp(mean) if mean < math.log(1e300) else None


def score(
    model: Transformer,
    sequences: Sequence[list[int]],
    limits: Limits,
    device: torch.device | str,
    followers: Followers | None = None,
) -> Iterator[Score]:
    """Score sequences, many per step, and yield each when it is complete.

    With a prefill chunk of 1, tokens take the path of decoding.

    Raises:
        UsageError: a sequence is empty, too long, or has token ids outside the vocabulary.
        UnsoundResult: logits are not finite.
        NotEnoughMemory: a step needs more memory than there is.
    """
    requests = [Request(ids, Sampling(), limits, scored=True, name="the text") for ids in sequences]
    scores = {request: Score(number, list(request.prompt)) for number, request in enumerate(requests)}
    with Engine.of(model, requests, device, followers) as engine:
        while engine.busy:
            for result in engine.step():
                assert result.scores is not None
                one = scores[result.request]
                one.logprobs += result.scores.logprobs
                one.top += result.scores.top
                if result.request.caught_up:
                    one.logprobs.pop()  # nothing follows the last token
                    yield one
