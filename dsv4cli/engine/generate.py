"""The generation loop: prompts in, tokens out as they are drawn, many sequences at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from dsv4cli.engine.device import step_memory
from dsv4cli.engine.dialogue import rooms
from dsv4cli.engine.model import Transformer
from dsv4cli.engine.sampler import check_finite, sample
from dsv4cli.engine.schedule import Schedule, Stream
from dsv4cli.engine.settings import Limits, Sampling

# (token id, natural logarithm of its probability at temperature 1)
Alternatives = list[tuple[int, float]]


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
        self.schedule = Schedule(model, streams=len(prompts), prefill_chunk=limits.prefill_chunk, device=device)
        self.random = [torch.Generator().manual_seed(sampling.seed + number) for number in range(len(prompts))]
        self._streams = [Stream(number, list(prompt)) for number, prompt in enumerate(prompts)]
        for stream in self._streams:
            self.schedule.add(stream)

    def steps(self) -> Iterator[Step]:
        """Draws until every sequence has finished or was stopped. Raises UnsoundResult for logits that are not finite,
        NotEnoughMemory."""
        while self.schedule.busy:
            with step_memory(self.schedule.cache.device):
                chunks, streams = self.schedule.step()
                ready = [chunk for chunk in chunks if chunk.stream.caught_up]
                rows = torch.tensor([chunk.last_row for chunk in ready], dtype=torch.int64, device=streams.device)
                drawn = self._draw([chunk.stream for chunk in ready], streams[rows]) if ready else []
            for stream, token, logprob, top in drawn:
                stream.ids.append(token)
                finish = self._finish(stream, token)
                if finish:
                    self.schedule.remove(stream)
                yield Step(stream.number, token, logprob, top, finish)

    def stop(self, number: int) -> None:
        """Ends a sequence from outside, at a stop string for instance; harmless when it has ended already."""
        stream = self._streams[number]
        if stream.sequence is not None:
            self.schedule.remove(stream)

    @torch.no_grad()
    def _draw(self, ready: list[Stream], streams: torch.Tensor) -> list[tuple[Stream, int, float, Alternatives]]:
        """A token for each stream with its log-probability and the alternatives; streams [R, N, D]."""
        logits = self.model.logits(streams)
        check_finite(logits)
        drawn = sample(logits, self.sampling, [self.random[stream.number] for stream in ready])
        logprobs = logits.log_softmax(-1)
        tokens, chosen = drawn.tolist(), logprobs.gather(-1, drawn[:, None])[:, 0].tolist()
        tops = top_logprobs(logprobs, self.logprobs)
        return list(zip(ready, tokens, chosen, tops, strict=True))

    def _finish(self, stream: Stream, token: int) -> Literal["stop", "length"] | None:
        if token == self.model.config.eos_token_id:
            return "stop"
        return "length" if len(stream.ids) >= self.ends[stream.number] else None


def top_logprobs(logprobs: torch.Tensor, count: int) -> list[Alternatives]:
    """The `count` likeliest tokens of each row, best first: fp32 [R, V]."""
    best = logprobs.topk(min(count, logprobs.shape[-1]), -1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [list(zip(ids, values, strict=True)) for ids, values in pairs]
