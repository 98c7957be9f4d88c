"""The generation loop: prompts in, tokens out as they are drawn, many sequences at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.limits import max_new_tokens
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.sampler import finite, not_finite, sample
from dsv4cli.engine.runtime.scheduler import Schedule, Stream
from dsv4cli.engine.system.device import step_memory

# (token id, natural logarithm of its probability at temperature 1)
Alternatives = list[tuple[int, float]]
# a token, its log-probability and the alternatives
Drawn = tuple[int, float, Alternatives]


@dataclass(frozen=True)
class Step:
    """A drawn token of prompt `number`, its log-probability at temperature 1, the `logprobs` likeliest tokens there;
    finish says why the sequence ends with it: "stop" at the end token, "length" at its limit. prepared: the step took
    time to compile kernels or to capture a graph, which others do not."""

    number: int
    token: int
    logprob: float
    top: Alternatives
    finish: Literal["stop", "length"] | None
    prepared: bool = False


class Generator:
    """Carries out requests; `steps` yields tokens of all of them in the order in which they are drawn.

    What a request draws does not depend on the others. Prompts are read in chunks of the smallest that is asked for.
    """

    def __init__(self, model: Transformer, requests: Sequence[Request], device: torch.device | str) -> None:
        """Raises UsageError for a prompt that is empty, fills the context or has ids outside the vocabulary."""
        self.model = model
        self.requests = requests
        names = [f"prompt {number}" for number in range(len(requests))] if len(requests) > 1 else ["the prompt"]
        rooms = [
            max_new_tokens(one.ids, model.config, one.limits, name) for one, name in zip(requests, names, strict=False)
        ]
        self.ends = [len(one.ids) + room for one, room in zip(requests, rooms, strict=True)]
        self.schedule = Schedule(
            model,
            streams=len(requests),
            prefill_chunk=min((one.limits.prefill_chunk for one in requests), default=1),
            device=device,
            longest=max(self.ends, default=1),
        )
        self._logprobs = max((one.limits.logprobs for one in requests), default=0)
        self._streams = [Stream(number, list(one.ids)) for number, one in enumerate(requests)]
        for stream in self._streams:
            self.schedule.add(stream)

    def steps(self) -> Iterator[Step]:
        """Draws until every sequence has finished or was stopped; then it can draw no more. Raises UnsoundResult for
        logits that are not finite, NotEnoughMemory."""
        while self.schedule.busy:
            with step_memory(self.schedule.cache.device):
                ready, logits = self.schedule.logits()
                drawn = [] if logits is None else self._draw(ready, logits)
            for stream, (token, logprob, top) in zip(ready, drawn, strict=True):
                stream.ids.append(token)
                finish = self._finish(stream, token)
                if finish:
                    self.schedule.remove(stream)
                count = self.requests[stream.number].limits.logprobs
                prepared = self.schedule.preparing.happened
                yield Step(stream.number, token, logprob, top[:count], finish, prepared)
        self.schedule.close()

    def stop(self, number: int) -> None:
        """Ends a sequence from outside, at a stop string for instance; harmless when it has ended already."""
        stream = self._streams[number]
        if stream.sequence is not None:
            self.schedule.remove(stream)

    def _draw(self, ready: list[Stream], logits: torch.Tensor) -> list[Drawn]:
        alike: dict[tuple[float, float], list[int]] = {}
        for row, stream in enumerate(ready):
            sampling = self.requests[stream.number].sampling
            alike.setdefault((sampling.temperature, sampling.top_p), []).append(row)
        if len(alike) == 1:
            tokens = self._sample(ready, logits)
        else:
            tokens = torch.empty(len(ready), dtype=torch.int64, device=logits.device)
            for rows in alike.values():
                tokens[rows] = self._sample([ready[row] for row in rows], logits[rows])
        return taken(self.model, logits, tokens, self._logprobs)

    def _sample(self, streams: list[Stream], logits: torch.Tensor) -> torch.Tensor:
        """The next tokens of streams that share temperature and top_p."""
        samplings = [self.requests[stream.number].sampling for stream in streams]
        places = [len(stream.ids) for stream in streams]
        return sample(logits, samplings[0], [one.seed for one in samplings], places)

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
