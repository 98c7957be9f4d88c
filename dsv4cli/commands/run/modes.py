"""Modes of `dsv4 run` for one conversation: show its prompt, or answer it."""

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from dsv4cli.commands.clock import Clock
from dsv4cli.commands.draft_report import report_drafts
from dsv4cli.commands.job import Job, report_lookalikes
from dsv4cli.commands.offload_report import report_traffic
from dsv4cli.commands.run.show import limit_met, show_answer, show_reading, stream_answer
from dsv4cli.output import counted

if TYPE_CHECKING:
    from dsv4cli.engine.chat.answer import Answer, Pieces
    from dsv4cli.engine.model.transformer import Transformer
    from dsv4cli.engine.runtime.graphs.compile_watch import OnPreparing
    from dsv4cli.engine.runtime.request import Request
    from dsv4cli.engine.text.prompt import Message


def show_prompt(job: Job, messages: "list[Message]") -> None:
    """Print the exact text and token ids of a prompt."""
    prompt = job.dialogue.prompt(messages)
    report_lookalikes(job.out, prompt.lookalikes)
    job.out.document({"text": prompt.text, "ids": prompt.ids})
    job.out.stream(f"{prompt.text}\n")
    job.out.line(" ".join(map(str, prompt.ids)))


def answers(
    job: Job, requests: "Sequence[Request]", clock: Clock, on_preparing: "OnPreparing"
) -> "Iterator[tuple[int, Answer, Pieces]]":
    """Load the model and yield the growing answer to each request."""
    with job.model([len(one.prompt) for one in requests]) as model:
        yield from show_reading(job.out, requests, model_answers(job, model, requests, clock, on_preparing))


def model_answers(
    job: Job, model: "Transformer", requests: "Sequence[Request]", clock: Clock, on_preparing: "OnPreparing"
) -> "Iterator[tuple[int, Answer, Pieces]]":
    """Yield the growing answer to each request with a loaded model, and before its first token each prefill step."""
    from dsv4cli.engine.chat.answers import generate_answers
    from dsv4cli.engine.weights.offload import offload_of

    clock.start, clock.experts = perf_counter(), offload_of(model)
    for number, answer, pieces in generate_answers(
        model, job.dialogue, requests, job.device, on_preparing=on_preparing, followers=job.process.followers,
        drafting=job.drafting, on_end=clock.note_end,
    ):  # fmt: skip
        if answer.tokens:
            clock.tick(answer.tokens[-1].prepared, later=len(answer.tokens) > 1)
        yield number, answer, pieces


def prompt_ids(job: Job, messages: "list[Message]") -> list[int]:
    """Return the token ids of a prompt. Raises UsageError if the context cannot hold the prompt and an answer."""
    from dsv4cli.engine.runtime.limits import max_new_tokens

    prompt = job.dialogue.prompt(messages)
    max_new_tokens(prompt.ids, job.dialogue.config, job.limits)
    report_lookalikes(job.out, prompt.lookalikes)
    return prompt.ids


def answer_one(job: Job, messages: "list[Message]") -> None:
    """Stream the answer to one conversation, or print it as one JSON document."""
    from dsv4cli.engine.runtime.request import Request

    clock, request = Clock(), Request(prompt_ids(job, messages), job.sampling, job.limits)
    answer = stream_answer(job.out, answers(job, [request], clock, job.out.compiling))
    if answer.complaint:
        job.out.warning(answer.complaint)
    if answer.finish == "length":
        job.out.hint(f"the answer was cut off {limit_met(job, answer)}")
    report_traffic(job.out, clock.experts)
    report_drafts(job.out, clock.drafts)
    job.out.status(f"{clock.sentence()}; seed {job.sampling.seed}")
    job.out.document(
        {"schema": "dsv4.run/1", "model": job.source.name, "backend": job.kernels}
        | record_of(job, answer, request)
        | {"seed": job.sampling.seed, **clock.record()}
    )


class Samples(NamedTuple):
    """A conversation, and the number of answers to generate."""

    messages: "list[Message]"
    wanted: int


def answer_samples(job: Job, samples: Samples) -> None:
    """Print several answers to one conversation in order, or as one JSON document."""
    from dsv4cli.engine.runtime.request import Request
    from dsv4cli.engine.text.questions import sample_of

    ids, clock = prompt_ids(job, samples.messages), Clock()
    requests = [Request(ids, sample_of(job.sampling, nth), job.limits) for nth in range(samples.wanted)]
    done: dict[int, Answer] = {}
    shown = 0
    for number, answer, _ in answers(job, requests, clock, job.out.compiling):
        if answer.finish:
            done[number] = answer
        while shown in done:
            if shown:
                job.out.line()
            job.out.status(f"answer {shown + 1} of {samples.wanted}, seed {requests[shown].sampling.seed}")
            show_answer(job.out, done[shown])
            shown += 1
    report_traffic(job.out, clock.experts)
    report_drafts(job.out, clock.drafts)
    job.out.status(f"{counted(samples.wanted, 'answer')}, {clock.sentence()}")
    records = [record_of(job, done[n], one) | {"seed": one.sampling.seed} for n, one in enumerate(requests)]
    job.out.document(
        {"schema": "dsv4.run/1", "model": job.source.name, "backend": job.kernels, "answers": records} | clock.record()
    )


def record_of(job: Job, answer: "Answer", request: "Request") -> dict[str, Any]:
    """Return the fields of an answer for JSON output."""
    prompt, completion = len(request.prompt), len(answer.tokens)
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return answer.record() | {"usage": usage} | ({"logprobs": answer.logprobs()} if job.limits.logprobs else {})
