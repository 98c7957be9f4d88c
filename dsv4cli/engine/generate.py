"""The generation loop: prompts in, tokens out as they are drawn, many sequences at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from dsv4cli.engine.device import step_memory
from dsv4cli.engine.dialogue import rooms
from dsv4cli.engine.model import Transformer
from dsv4cli.engine.sampler import finite, not_finite, sample
from dsv4cli.engine.schedule import Schedule, Stream
from dsv4cli.engine.settings import Limits, Sampling

# (token id, natural logarithm of its probability at temperature 1)
Alternatives = list[tuple[int, float]]
# a token, its log-probability and the alternatives
Drawn = tuple[int, float, Alternatives]


@dataclass(frozen=True)
class Step:
    """A drawn token of prompt `number`, its log-probability at temperature 1, the `logprobs` likeliest tokens there;
    finish says why the sequence ends with it: "stop" at the end token, "length" at its limit."""

    number: int
    token: int
    logprob: float
    top: Alternatives
    finish: Literal["stop", "length"] | None


class Generator:
    """Generates from prompts; `steps` yields tokens of all of them in the order in which they are drawn."""

    def __init__(
        self,
        model: Transformer,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        limits: Limits,
        device: torch.device | str,
    ) -> None:
        """Raises UsageError for a prompt that is empty, fills the context or has ids outside the vocabulary."""
        room = rooms(prompts, model.config, limits)
        self.model = model
        self.sampling = sampling
        self.logprobs = limits.logprobs
        self.ends = [len(prompt) + count for prompt, count in zip(prompts, room, strict=True)]
        self.schedule = Schedule(
            model,
            streams=len(prompts),
            prefill_chunk=limits.prefill_chunk,
            device=device,
            longest=max(self.ends, default=1),
        )
        self._streams = [Stream(number, list(prompt)) for number, prompt in enumerate(prompts)]
        for stream in self._streams:
            self.schedule.add(stream)

    def steps(self) -> Iterator[Step]:
        """Draws until every sequence has finished or was stopped; then it can draw no more. Raises UnsoundResult for
        logits that are not finite, NotEnoughMemory."""
        try:
            while self.schedule.busy:
                with step_memory(self.schedule.cache.device):
                    ready, logits = self.schedule.logits()
                    drawn = [] if logits is None else self._draw(ready, logits)
                for stream, (token, logprob, top) in zip(ready, drawn, strict=True):
                    stream.ids.append(token)
                    finish = self._finish(stream, token)
                    if finish:
                        self.schedule.remove(stream)
                    yield Step(stream.number, token, logprob, top, finish)
        finally:
            self.schedule.close()

    def stop(self, number: int) -> None:
        """Ends a sequence from outside, at a stop string for instance; harmless when it has ended already."""
        stream = self._streams[number]
        if stream.sequence is not None:
            self.schedule.remove(stream)

    def _draw(self, ready: list[Stream], logits: torch.Tensor) -> list[Drawn]:
        seeds = [self.sampling.seed + stream.number for stream in ready]
        tokens = sample(logits, self.sampling, seeds, [len(stream.ids) for stream in ready])
        return taken(self.model, logits, tokens, self.logprobs)

    def _finish(self, stream: Stream, token: int) -> Literal["stop", "length"] | None:
        if token in self.model.config.eos_token_ids:
            return "stop"
        return "length" if len(stream.ids) >= self.ends[stream.number] else None


@torch.no_grad()
def taken(model: Transformer, logits: torch.Tensor, tokens: torch.Tensor, count: int) -> list[Drawn]:
    """What is known of the tokens that go on after these logits fp32 [R, V]: int64 [R], `count` alternatives each.

    The one place of a step that waits for the device.
    """
    tokens = model.world.first(tokens)  # ranks that go on with different tokens would wait for ever
    total = logits.logsumexp(-1, keepdim=True)
    best = logits.topk(min(count, logits.shape[-1]), -1)
    # fp64 holds all of it exactly
    columns = [tokens[:, None], logits.gather(-1, tokens[:, None]) - total, finite(logits)[:, None]]
    columns += [best.indices, best.values - total]
    table = torch.cat([column.double() for column in columns], 1).tolist()
    if not all(row[2] for row in table):
        raise not_finite()
    middle = 3 + best.indices.shape[1]
    tops = [list(zip(map(int, row[3:middle]), row[middle:], strict=True)) for row in table]
    return [(int(row[0]), row[1], top) for row, top in zip(table, tops, strict=True)]
