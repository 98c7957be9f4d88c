"""Teacher-forced scoring: how likely the model finds a given text, token by token."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.generate import Alternatives
from dsv4cli.engine.runtime.limits import check_texts
from dsv4cli.engine.runtime.sampler import check_finite
from dsv4cli.engine.runtime.scheduler import Chunk, Schedule, Stream
from dsv4cli.engine.settings import Limits
from dsv4cli.engine.system.device import step_memory

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


def score(
    model: Transformer,
    sequences: Sequence[list[int]],
    limits: Limits,
    device: torch.device | str,
) -> Iterator[Score]:
    """Scores sequences, many in a step; yields each when it is complete.

    A prefill chunk of 1 feeds token by token, the path of decoding. Raises UsageError for a sequence that is empty, too
    long or has ids outside the vocabulary, UnsoundResult for logits that are not finite, NotEnoughMemory.
    """
    check_texts(sequences, model.config, limits)
    schedule = Schedule(model, streams=len(sequences), prefill_chunk=limits.prefill_chunk, device=device)
    scores = [Score(number, list(ids)) for number, ids in enumerate(sequences)]
    for one in scores:
        schedule.add(Stream(one.number, one.ids))
    while schedule.busy:
        with step_memory(device):
            chunks, streams = schedule.step()
            known, tops = _judge(model, streams, _following(chunks, streams.device), limits.logprobs)
        for chunk in chunks:
            one = scores[chunk.stream.number]
            one.logprobs += known[chunk.row : chunk.last_row + 1]
            one.top += tops[chunk.row : chunk.last_row + 1]
            if chunk.stream.caught_up:
                one.logprobs.pop()  # nothing follows the last token
                schedule.remove(chunk.stream)
                yield one


def _following(chunks: Sequence[Chunk], device: torch.device) -> torch.Tensor:
    """The token after each row of a step, 0 after the last of a sequence: int64 [T]."""
    padded = [[*chunk.stream.ids[chunk.first + 1 : chunk.end + 1], 0] for chunk in chunks]
    ids = [token for ids, chunk in zip(padded, chunks, strict=True) for token in ids[: chunk.end - chunk.first]]
    return torch.tensor(ids, dtype=torch.int64, device=device)


@torch.no_grad()
def _judge(
    model: Transformer, streams: torch.Tensor, following: torch.Tensor, count: int
) -> tuple[list[float], list[Alternatives]]:
    """For each row of [T, N, D]: the log-probability of the token that follows it, and the `count` likeliest."""
    known: list[float] = []
    tops: list[Alternatives] = []
    for rows, tokens in zip(streams.split(LOGIT_ROWS), following.split(LOGIT_ROWS), strict=True):
        logits = model.logits(rows)
        check_finite(logits)
        logprobs = logits.log_softmax(-1)
        known += logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
        tops += top_logprobs(logprobs, count)
    return known, tops


def top_logprobs(logprobs: torch.Tensor, count: int) -> list[Alternatives]:
    """The `count` likeliest tokens of each row, best first: fp32 [R, V]."""
    best = logprobs.topk(min(count, logprobs.shape[-1]), -1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [list(zip(ids, values, strict=True)) for ids, values in pairs]
