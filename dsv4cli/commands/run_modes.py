"""What `dsv4 run` does with its input: show the prompt, answer one or many, score."""

import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from dsv4cli.commands.run_experts import division_sentence, tell_traffic
from dsv4cli.errors import UsageError
from dsv4cli.output import Output, counted, size_text

if TYPE_CHECKING:
    import torch

    from dsv4cli.engine.answer import Answer
    from dsv4cli.engine.answers import Pieces
    from dsv4cli.engine.backend import Backend
    from dsv4cli.engine.dialogue import Dialogue
    from dsv4cli.engine.fit.planner import MemoryLimits
    from dsv4cli.engine.host_experts import HostExperts
    from dsv4cli.engine.inputs import ScoreItem
    from dsv4cli.engine.model import Transformer
    from dsv4cli.engine.parallel import World
    from dsv4cli.engine.prompt import Message
    from dsv4cli.engine.settings import Limits, Sampling
    from dsv4cli.engine.source import FolderSource, RandomSource


@dataclass(frozen=True)
class Job:
    """What every mode needs; `device`, `dtype` and `backend` are the options' words, memory what it may take; world is
    None in one process; loaded is called once the model is there."""

    out: Output
    source: "FolderSource | RandomSource"
    think: str
    device: str
    dtype: str
    backend: "Backend"
    limits: "Limits"
    sampling: "Sampling"
    memory: "MemoryLimits | None" = None
    world: "World | None" = None
    loaded: Callable[[], None] = lambda: None

    @cached_property
    def dialogue(self) -> "Dialogue":
        """The model's prompt format."""
        from dsv4cli.engine.dialogue import open_dialogue

        return open_dialogue(self.source, self.think)

    @cached_property
    def place(self) -> "torch.device":
        """The device that the option names."""
        from dsv4cli.engine.device import resolve_device

        return resolve_device(self.device)

    @cached_property
    def kernels(self) -> 'Literal["triton", "torch"]':
        """The backend that computes there."""
        from dsv4cli.engine.backend import resolve_backend

        return resolve_backend(self.backend, self.place)

    @contextmanager
    def model(self) -> "Iterator[Transformer]":
        """The model on its device, loaded with progress on a terminal; what runs inside computes with its backend."""
        from dsv4cli.engine.backend import use

        with use(self.kernels):
            model = self._load()
            self.loaded()
            yield model

    def _load(self) -> "Transformer":
        import torch

        from dsv4cli.engine.loading import load_model
        from dsv4cli.engine.numerics import Numerics
        from dsv4cli.engine.parallel import SINGLE
        from dsv4cli.engine.source import BUILT_IN, RandomSource

        device, world = self.place, self.world or SINGLE
        numerics = Numerics.reference() if self.dtype == "auto" else Numerics.plain(getattr(torch, self.dtype))
        start = perf_counter()
        with self.out.progress("loading") as progress:
            model = load_model(self.source, numerics, device=device, world=world, progress=progress, limits=self.memory)
        seconds, held = perf_counter() - start, model.host_experts
        size = sum(parameter.nbytes for parameter in model.parameters()) + (held.nbytes if held else 0)
        loaded = f"{self.source.name} on {device}: {size_text(size)} in {seconds:.1f} s"
        if isinstance(self.source, RandomSource):
            self.out.status(loaded)
            self.out.status("its weights are random: the text means nothing")
        else:
            self.out.status(f"{loaded}, {size / seconds / 1e9:.2f} GB/s")
        if held is not None:
            self.out.status(division_sentence(held))
        if self.source.name == BUILT_IN:
            self.out.status("nano is the small model that is built in; --model names another")
        return model


def conversation(prompt: str | None, messages: Path | None, system: str | None) -> "list[Message]":
    """The conversation of --messages, or of the prompt and the text piped in."""
    from dsv4cli.engine.inputs import from_prompt, read_messages

    if messages is not None:
        return read_messages(messages)
    piped = _read_stdin(demanded=prompt == "-")
    parts = [part for part in ("" if prompt == "-" else prompt or "", piped) if part]
    if not parts:
        raise UsageError("there is no prompt", 'give one: dsv4 run "What is 17 + 25?"')
    return from_prompt("\n\n".join(parts), system)


def _read_stdin(demanded: bool) -> str:
    """What was piped in or redirected; nothing where stdin is a terminal or a device, unless it is demanded."""
    from dsv4cli.engine.inputs import not_utf8

    if sys.stdin is None:
        return ""
    mode = os.fstat(sys.stdin.fileno()).st_mode
    if not demanded and not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
        return ""
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise not_utf8("stdin", error) from None


def show_prompt(job: Job, talk: "list[Message]") -> None:
    """Prints the exact text and ids of a prompt."""
    prompt = job.dialogue.prompt(talk)
    job.out.document({"text": prompt.text, "ids": prompt.ids})
    job.out.stream(f"{prompt.text}\n")
    job.out.line(" ".join(map(str, prompt.ids)))


def show_prompts(job: Job, talks: "Sequence[list[Message]]") -> None:
    """Prints the exact text and ids of each prompt as a JSON line."""
    for talk in talks:
        prompt = job.dialogue.prompt(talk)
        job.out.record({"text": prompt.text, "ids": prompt.ids})


@dataclass
class Clock:
    """When tokens came: seconds from the start. experts: those whose way from host memory took part of the time."""

    start: float = 0.0
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    experts: "HostExperts | None" = None

    def tick(self) -> None:
        """Counts one token."""
        self.last = perf_counter() - self.start
        self.first = self.first or self.last
        self.tokens += 1

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first one."""
        return (self.tokens - 1) / (self.last - self.first) if self.last > self.first else None

    def sentence(self) -> str:
        """For people."""
        rate = f", then {self.rate:.1f} tokens/s" if self.rate else ""
        return f"{counted(self.tokens, 'token')}; first token after {self.first:.2f} s{rate}"


def _answers(job: Job, talks: "Sequence[list[Message]]", clock: Clock) -> "Iterator[tuple[int, Answer, Pieces]]":
    from dsv4cli.engine.dialogue import rooms

    dialogue = job.dialogue
    prompts = [dialogue.prompt(talk).ids for talk in talks]
    rooms(prompts, dialogue.config, job.limits)  # refuses a prompt that is too long before the model is loaded
    with job.model() as model:
        from dsv4cli.engine.answers import generate_answers

        clock.start, clock.experts = perf_counter(), model.host_experts
        for number, answer, pieces in generate_answers(model, dialogue, prompts, job.sampling, job.limits, job.place):
            clock.tick()
            yield number, answer, pieces


def answer_one(job: Job, talk: "list[Message]") -> None:
    """Streams the answer to one conversation, or prints it as one document."""
    clock = Clock()
    answer = _stream_answer(job, _answers(job, [talk], clock))
    if answer.complaint:
        job.out.warning(answer.complaint)
    if answer.finish == "length":
        job.out.hint("the answer was cut off at its limit; raise --max-tokens or --max-context")
    tell_traffic(job.out, clock.experts)
    job.out.status(f"{clock.sentence()}; seed {job.sampling.seed}")
    job.out.document(
        {"schema": "dsv4.run/1", "model": job.source.name, "backend": job.kernels}
        | _record(job, answer)
        | {"seed": job.sampling.seed, "seconds_to_first_token": clock.first, "tokens_per_second": clock.rate}
    )


def _stream_answer(job: Job, steps: "Iterator[tuple[int, Answer, Pieces]]") -> "Answer":
    """Shows the text as it comes, then the tool calls; a line that is left open is ended, but not after Ctrl-C, where
    the boundary does so."""
    answer, calls = None, ""
    try:
        for _, answer, pieces in steps:  # noqa: B007 - the last one is used
            for kind, text in pieces:
                if kind == "content":
                    job.out.stream(text)
                elif kind == "reasoning":
                    job.out.aside(text)
                else:
                    calls += text
        assert answer is not None
        tool_calls = answer.record()["tool_calls"]
        if not tool_calls:
            job.out.stream(calls)  # cut off or malformed: as the model wrote it
    except KeyboardInterrupt:
        raise
    except BaseException:
        job.out.end_line()
        raise
    job.out.end_line()
    for call in tool_calls:
        job.out.line(f"{call['function']['name']}({call['function']['arguments']})")
    return answer


def answer_many(job: Job, talks: "Sequence[list[Message]]") -> None:
    """Prints the answers as JSON lines in the order of the prompts, each as soon as those before it are done."""
    clock, lines = Clock(), InOrder(job.out)
    for number, answer, _ in _answers(job, talks, clock):
        if answer.finish:
            lines.add(number, {"index": number} | _record(job, answer))
    tell_traffic(job.out, clock.experts)
    job.out.status(f"{counted(len(talks), 'answer')}, {clock.sentence()}; seed {job.sampling.seed}")


def _record(job: Job, answer: "Answer") -> dict[str, Any]:
    return answer.record() | ({"logprobs": answer.logprobs()} if job.limits.logprobs else {})


@dataclass
class InOrder:
    """Prints records by number, each as soon as those before it are there."""

    out: Output
    waiting: dict[int, dict[str, Any]] = field(default_factory=dict)
    shown: int = 0

    def add(self, number: int, record: dict[str, Any]) -> None:
        """Takes a record, and prints all that can be."""
        self.waiting[number] = record
        while self.shown in self.waiting:
            self.out.record(self.waiting.pop(self.shown))
            self.shown += 1


def score_texts(job: Job, items: "Sequence[ScoreItem]") -> None:
    """Prints the scores as JSON lines in the order of the items."""
    from dsv4cli.engine.dialogue import check_texts

    sequences = [item.ids or _ids(job, item) for item in items]
    check_texts(sequences, job.source.identity.config, job.limits)
    with job.model() as model:
        from dsv4cli.engine.score import score

        start, lines = perf_counter(), InOrder(job.out)
        for one in score(model, sequences, job.limits, job.place):
            top = {"top": one.top} if job.limits.logprobs else {}
            record = {"index": one.number, "ids": one.ids, "logprobs": one.logprobs, "perplexity": one.perplexity}
            lines.add(one.number, record | top)
        tell_traffic(job.out, model.host_experts)
    seconds, tokens = perf_counter() - start, sum(map(len, sequences))
    what = f"{counted(len(items), 'text')}, {counted(tokens, 'token')}"
    job.out.status(f"{what} in {seconds:.2f} s: {tokens / seconds:,.1f} tokens/s")


def _ids(job: Job, item: "ScoreItem") -> list[int]:
    dialogue = job.dialogue
    return dialogue.tokenizer.encode(item.text) if item.text else dialogue.prompt(item.messages or []).ids
