"""Teacher-forced scoring: how likely the model finds a given text, token by token."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dsv4cli.engine.generate import Alternatives, top_logprobs
from dsv4cli.engine.model import Transformer
from dsv4cli.engine.sampler import check_finite
from dsv4cli.engine.schedule import Chunk, Schedule, Stream
from dsv4cli.engine.settings import Limits

# rows of logits at once: 256 x 129,280 in fp32 are 132 MB
LOGIT_ROWS = 256


@dataclass
class Score:
    """Of sequence `number`: the log-probability of each token given those before (None for the first), and after each
    token the `logprobs` likeliest next ones."""

    number: int
    ids: list[int]
    logprobs: list[float | None] = field(default_factory=lambda: [None])
    top: list[Alternatives] = field(default_factory=list)

    @property
    def perplexity(self) -> float | None:
        """exp of the mean negative log-probability; None for a single token or beyond the range of floats."""
        known = [value for value in self.logprobs if value is not None]
        if not known:
            return None
        mean = -sum(known) / len(known)
        return math.exp(mean) if mean < math.log(1e300) else None


@torch.no_grad()
def score(
    model: Transformer,
    sequences: Sequence[list[int]],
    limits: Limits,
    device: torch.device | str,
) -> Iterator[Score]:
    """Scores sequences, many in a step; yields each when it is complete.

    A prefill chunk of 1 feeds token by token, the path of decoding. Raises UsageError for an empty sequence or an id
    outside the vocabulary.
    """
    schedule = Schedule(model, streams=len(sequences), prefill_chunk=limits.prefill_chunk, device=device)
    scores = [Score(number, list(ids)) for number, ids in enumerate(sequences)]
    for one in scores:
        schedule.add(Stream(one.number, one.ids))
    while schedule.busy:
        chunks, streams = schedule.step()
        for chunk in chunks:
            one = scores[chunk.stream.number]
            _extend(model, one, chunk, streams[chunk.row : chunk.row + chunk.end - chunk.first], limits.logprobs)
            if chunk.stream.caught_up:
                schedule.remove(chunk.stream)
                yield one


def _extend(model: Transformer, one: Score, chunk: Chunk, streams: torch.Tensor, count: int) -> None:
    """Adds what the rows of a chunk say; row i predicts token first + i + 1."""
    first = chunk.first
    for rows in streams.split(LOGIT_ROWS):
        logits = model.logits(rows)
        check_finite(logits)
        logprobs = logits.log_softmax(-1)
        following = torch.tensor(one.ids[first + 1 : first + 1 + len(rows)], dtype=torch.int64, device=rows.device)
        known = logprobs[: len(following)].gather(-1, following[:, None])[:, 0]
        one.logprobs += known.tolist()
        if count:
            one.top += top_logprobs(logprobs, count)
        first += len(rows)
