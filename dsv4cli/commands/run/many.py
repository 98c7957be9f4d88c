"""Modes of `dsv4 run` for a file of lines: answer each, show the prompts, or score the texts."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from dsv4cli.commands.clock import TOKENS_BETWEEN, Clock
from dsv4cli.commands.draft_report import report_drafts
from dsv4cli.commands.job import Job, report_lookalikes
from dsv4cli.commands.offload_report import report_traffic
from dsv4cli.commands.reading import each
from dsv4cli.commands.run.modes import model_answers, record_of
from dsv4cli.commands.run.show import InOrder
from dsv4cli.errors import UsageError
from dsv4cli.output import Output, ReaderGone, counted

if TYPE_CHECKING:
    from dsv4cli.engine.chat.answer_file import AnswerFile, AnswerKey
    from dsv4cli.engine.settings import Part, Sampling
    from dsv4cli.engine.text.inputs import BadLine, ScoreItem
    from dsv4cli.engine.text.questions import Question


class WantedAnswer(NamedTuple):
    """An answer to generate.

    Attributes:
        sample: Its number; None if the question has one answer.
        request: the engine's `Request`, or a `RemoteRequest`; both have the `sampling`.
        digest: Hash of the prompt and the options.
    """

    question: "Question"
    sample: int | None
    request: Any
    digest: str

    @property
    def key(self) -> "AnswerKey":
        """The question's index and the number of the sample."""
        return self.question.index, self.sample or 0

    def head(self) -> dict[str, Any]:
        """Return the first fields of the answer's record."""
        sample = {} if self.sample is None else {"sample": self.sample}
        return {"index": self.question.index} | sample | self.question.labels


class AnswerBatch(NamedTuple):
    """The answers to generate, of `total` including existing ones. out: the file for answers; None for stdout."""

    answers: list[WantedAnswer]
    total: int
    seed: int
    out: Path | None


# accepts an answer and its record, None if the answer is left out
Take = Callable[[WantedAnswer, dict[str, Any] | None], None]


class Source(NamedTuple):
    """The file of questions, and the options for answering them.

    Attributes:
        seed: None if it was not given.
        part: which of the questions to answer.
    """

    path: Path
    system: str | None
    samples: int
    skip_bad: bool
    seed: int | None
    out: Path | None
    part: "Part"


def read_many(job: Job, source: Source) -> AnswerBatch:
    """Return the answers that are still missing in the --out file. Raises UsageError that names every invalid line."""
    from dsv4cli.engine.chat.answer_file import AnswerFile

    questions, prompts = _prompts(job, source)
    named = sorted({one.model for one in questions if one.model is not None})
    if named:
        job.out.status(f"some lines ask for the model {', '.join(named)}; {job.source.name} answers them")
    if source.out is None:
        answers = _answers_of(job, source, questions, prompts, job.sampling)
        return AnswerBatch(answers, len(answers), job.sampling.seed, None)
    file = AnswerFile(source.out)
    try:
        defaults = seeded(file, source, questions, job.sampling)
        answers = _answers_of(job, source, questions, prompts, defaults)
        return AnswerBatch(missing_answers(file, answers), len(answers), defaults.seed, source.out)
    finally:
        file.close()


def _prompts(job: Job, source: Source) -> "tuple[list[Question], list[list[int]]]":
    """Return the valid questions of the file, and the token ids of their prompts."""
    from dsv4cli.engine.runtime.limits import max_new_tokens
    from dsv4cli.engine.text.inputs import BadLine
    from dsv4cli.engine.text.questions import read_questions

    questions, bad = read_questions(source.path, source.system, source.part)
    good, prompts, lookalikes = [], [], dict[str, None]()
    for question in each(job.out, questions, "reading prompts"):
        try:
            prompt = job.dialogue.prompt(question.messages)
            max_new_tokens(prompt.ids, job.dialogue.config, question.limits(job.limits))
        except UsageError as error:
            bad.append(BadLine(question.line, error))
            continue
        good.append(question)
        prompts.append(prompt.ids)
        lookalikes.update(dict.fromkeys(prompt.lookalikes))
    leave_out(job.out, source, bad, any_good=bool(good))
    report_lookalikes(job.out, list(lookalikes))
    return good, prompts


def leave_out(out: Output, source: Source, bad: "list[BadLine]", *, any_good: bool) -> None:
    """Warn of each invalid line. Raises UsageError unless --skip-bad is set and some lines are valid."""
    from dsv4cli.engine.text.inputs import name_of, refuse

    if not source.skip_bad or not (any_good or source.part.count > 1):
        refuse(source.path, bad, "" if source.skip_bad else ", or skip them with --skip-bad")
    for one in sorted(bad, key=lambda one: one.number):
        out.warning(f"{name_of(source.path)}, line {one.number} is skipped: {one.error.message}")


def _answers_of(
    job: Job, source: Source, questions: "list[Question]", prompts: list[list[int]], defaults: "Sampling"
) -> list[WantedAnswer]:
    from dsv4cli.engine.runtime.request import Request

    answers = []
    for question, ids in each(job.out, [*zip(questions, prompts, strict=True)], "preparing prompts"):
        count, limits = question.samples or source.samples, question.limits(job.limits)
        for sample in range(count):
            sampling = question.sampling(defaults, sample)
            settings = asdict(sampling) | asdict(limits) | {"model": job.source.name, "ids": ids}
            settings["dtype"] = job.execution.dtype
            del settings["seed"], settings["prefill_chunk"]
            digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
            answers.append(
                WantedAnswer(question, sample if count > 1 else None, Request(ids, sampling, limits), digest)
            )
    return answers


def seeded(file: "AnswerFile", source: Source, questions: "list[Question]", defaults: "Sampling") -> "Sampling":
    """Return the default sampling. Without --seed, it has the seed that the answers in the file were sampled with."""
    from dsv4cli.engine.settings import MAX_SEED
    from dsv4cli.engine.text.questions import sample_of

    own = {one.index for one in questions if one.seed is None}
    known = next((key for key in file.records if key[0] in own), None)
    if source.seed is not None or known is None:
        return defaults
    offset = sample_of(defaults.chosen(None, None, 0), known[1]).seed + known[0]
    return defaults.chosen(None, None, (file.records[known]["seed"] - offset) % (MAX_SEED + 1))


def missing_answers(file: "AnswerFile", answers: list[WantedAnswer]) -> list[WantedAnswer]:
    """Return the answers that the file lacks. Raises UsageError if the file has answers to other prompts or options."""
    wanted = {one.key: one for one in answers}
    for key, record in file.records.items():
        one = wanted.get(key)
        if one is None or (record["request"], record["seed"]) != (one.digest, one.request.sampling.seed):
            what = f"the answer with index {key[0]}"
            raise UsageError(
                f"{file.path} has answers of another command: {what} is for another prompt or other options",
                "use another file for --out, or remove this one",
            )
    return [one for one in answers if one.key not in file.records]


def answer_many(job: Job, many: AnswerBatch) -> None:
    """Generate the answers as JSON lines.

    Without a file, they are printed in the order of the prompts, each as soon as those before it are complete. A file
    gets each answer at once, and is sorted at the end.
    """
    clock, before = Clock(), many.total - len(many.answers)
    with answer_sink(job.out, many, writes=not _is_follower(job)) as take:
        if many.answers:
            _answer(job, many, clock, take)
    if not many.answers:
        job.out.status(all_there(many))
        return
    report_traffic(job.out, clock.experts)
    report_drafts(job.out, clock.drafts)
    job.out.status(f"{counted(len(many.answers), 'answer')}, {clock.sentence()}; seed {many.seed}")
    if before:
        job.out.status(f"{many.out} already had {counted(before, 'answer')}")


def all_there(many: AnswerBatch) -> str:
    """Return the sentence for a batch without missing answers."""
    if not many.total:
        return "no prompt belongs to this part"
    return f"{many.out} already has all {counted(many.total, 'answer')}"


def _answer(job: Job, many: AnswerBatch, clock: Clock, take: Take) -> None:
    done = many.total - len(many.answers)
    lengths = [len(one.request.prompt) for one in many.answers]
    with job.model(lengths) as model, job.out.counting("answers") as show:

        def show_progress(waiting: bool = False) -> None:
            show(done, many.total, clock.activity(waiting))

        show_progress()
        for number, answer, _ in model_answers(job, model, [one.request for one in many.answers], clock, show_progress):
            if answer.finish:
                one, done = many.answers[number], done + 1
                take(one, one.head() | record_of(job, answer, one.request) | {"seed": one.request.sampling.seed})
            if answer.finish or clock.tokens % TOKENS_BETWEEN == 0:
                show_progress()


def _is_follower(job: Job) -> bool:
    return job.process.world is not None and job.process.world.rank > 0


@contextmanager
def answer_sink(out: Output, many: AnswerBatch, *, writes: bool = True) -> Iterator[Take]:
    """Yield a function that accepts finished answers. None of them is lost if the block raises."""
    if many.out is None:
        lines = InOrder(out, [one.key for one in many.answers])
        try:
            yield lambda one, record: lines.add(one.key, record)
        except ReaderGone:
            raise
        except BaseException:
            lines.rest()
            raise
        return
    if not writes:
        yield lambda one, record: None
        return
    from dsv4cli.engine.chat.answer_file import AnswerFile

    file = AnswerFile(many.out)
    try:
        yield lambda one, record: None if record is None else file.add(record | {"request": one.digest})
        file.order()
    except BaseException:
        there, verb = f"{len(file.records):,} of {counted(many.total, 'answer')}", "is" if many.total == 1 else "are"
        out.status(f"{there} {verb} in {many.out}; run the same command again to continue")
        raise
    finally:
        file.close()


def show_prompts(job: Job, source: Source) -> None:
    """Print the exact text and token ids of each prompt as a JSON line."""
    from dsv4cli.engine.text.questions import read_questions

    questions, bad = read_questions(source.path, source.system, source.part)
    leave_out(job.out, source, bad, any_good=bool(questions))
    for question in questions:
        prompt = job.dialogue.prompt(question.messages)
        report_lookalikes(job.out, prompt.lookalikes)
        job.out.record({"text": prompt.text, "ids": prompt.ids} | question.labels)


def score_texts(job: Job, items: "Sequence[ScoreItem]") -> None:
    """Print the scores as JSON lines in the order of the items."""
    from dsv4cli.engine.runtime.limits import check_texts

    sequences = [item.ids or _ids(job, item) for item in each(job.out, items, "reading texts")]
    check_texts(sequences, job.source.identity.config, job.limits)
    with job.model([len(ids) for ids in sequences], sampled=False) as model:
        from dsv4cli.engine.runtime.score import score
        from dsv4cli.engine.weights.offload import offload_of

        start, lines = perf_counter(), InOrder(job.out, [(number, 0) for number in range(len(items))])
        for one in score(model, sequences, job.limits, job.device, job.process.followers):
            top = {"top": one.top} if job.limits.logprobs else {}
            record = {"index": one.number, "ids": one.ids, "logprobs": one.logprobs, "perplexity": one.perplexity}
            lines.add((one.number, 0), record | top)
        report_traffic(job.out, offload_of(model))
    seconds, tokens = perf_counter() - start, sum(map(len, sequences))
    what = f"{counted(len(items), 'text')}, {counted(tokens, 'token')}"
    job.out.status(f"{what} in {seconds:.2f} s: {tokens / seconds:,.1f} tokens/s")


def _ids(job: Job, item: "ScoreItem") -> list[int]:
    """Return the token ids of a text or conversation. Special tokens in a text become tokens: it is raw model input."""
    dialogue = job.dialogue
    return dialogue.tokenizer.encode(item.text) if item.text else dialogue.transcript(item.messages or []).ids
