"""Questions of `dsv4 eval`: ask a model those that have no stored result, and show progress."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from dsv4cli.commands.clock import TOKENS_BETWEEN, Clock
from dsv4cli.commands.draft_report import report_drafts
from dsv4cli.commands.job import Job
from dsv4cli.commands.offload_report import report_traffic
from dsv4cli.commands.reading import each
from dsv4cli.errors import UsageError
from dsv4cli.harmless import shell_word
from dsv4cli.output import Output, counted

if TYPE_CHECKING:
    from dsv4cli.engine.evaluation.eval_request import EvalRequest
    from dsv4cli.engine.evaluation.items import EvalSet
    from dsv4cli.engine.evaluation.outcome import Outcome
    from dsv4cli.engine.runtime.request import Token
    from dsv4cli.engine.settings import Part


@dataclass(frozen=True)
class EvalOptions:
    """The options that select questions and results.

    Attributes:
        limit: maximum number of questions; None for all.
        by_answer: whether multiple-choice questions are answered in text, not by likelihood.
        out: results file.
        part: which of the questions to ask.
    """

    file: str
    limit: int | None
    by_answer: bool
    out: Path | None
    part: "Part"


@dataclass
class ModelResults:
    """Results of one model, in the order of the items.

    Attributes:
        header: The model and the settings, as on the first line of a results file.
        asked: Number of questions asked in this run.
        seconds: Time of this run.
    """

    questions: "EvalSet"
    header: dict[str, Any]
    outcomes: "list[Outcome]" = field(default_factory=list)
    asked: int = 0
    seconds: float = 0.0


class Asking(NamedTuple):
    """The requests of an evaluation, the results file, the results, and the list that receives them at the end."""

    requests: "list[EvalRequest]"
    out: Path | None
    results: ModelResults
    into: list[ModelResults]


def second_results(out: Path | None) -> Path | None:
    """Return the results file of the other model."""
    return None if out is None else out.with_name(f"{out.stem}.against{out.suffix}")


def questions_of(given: EvalOptions) -> "EvalSet":
    """Return the questions to ask. Raises UsageError that names every invalid one."""
    from dsv4cli.engine.evaluation.forms import read_set

    return read_set(given.file, given.by_answer).first(given.limit)


def described(questions: "EvalSet", part: "Part") -> str:
    """Return the sentence on the questions that were read, and on the part that is asked."""
    some = len([index for index in range(len(questions.items)) if part.has(index)])
    which = f"; part {part.index} of {part.count} has {some:,}" if part.count > 1 else ""
    return f"{questions.name}: {counted(len(questions.items), 'question')} in the format {questions.form}{which}"


def build_asking(job: Job, given: EvalOptions, questions: "EvalSet") -> Asking:
    """Build and check the requests to a model.

    Raises UsageError that names every question that the model cannot process, and for a results file of another
    evaluation.
    """
    from dsv4cli.engine.evaluation.results import ResultsFile, header_of

    header = header_of(job.source, questions, _settings(job, given))
    requests = [one for one in _eval_requests(job, questions, given.by_answer) if given.part.has(one.index)]
    if given.out is not None:
        ResultsFile(given.out, header).close()
    return Asking(requests, given.out, ModelResults(questions, header), [])


def _settings(job: Job, given: EvalOptions) -> dict[str, Any]:
    """Return the settings that affect the results, except the model and the questions."""
    from dsv4cli.engine.evaluation.judge import RULES
    from dsv4cli.engine.settings import MORE_SAMPLING, Sampling

    sampling, usual, limits = job.sampling, Sampling(), job.limits
    return {
        "think": job.think,
        "choices": "answer" if given.by_answer else "likelihood",
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        **{name: getattr(sampling, name) for name in MORE_SAMPLING if getattr(sampling, name) != getattr(usual, name)},
        "seed": sampling.seed,
        "max_tokens": limits.max_tokens,
        "max_context": limits.max_context,
        "stop": list(limits.stops),
        "special_tokens": job.special_tokens,
        "dtype": job.execution.dtype,
        "exact": job.execution.exact,
        "backend": job.kernels,
        "rules": RULES,
    }


def stored_results(path: Path, asked: "EvalSet") -> ModelResults:
    """Return the results in a file. Raises UsageError if they are for other questions or incomplete."""
    from dsv4cli.engine.evaluation.results import read_results

    header, outcomes = read_results(path)
    if header["digest"] != asked.digest:
        raise UsageError(
            f"the results in {path} are for other questions, not for {asked.name}",
            "ask both models the same questions, with the same --limit and --choices",
        )
    if set(outcomes) != set(range(len(asked.items))):
        raise UsageError(
            f"{path} has {len(outcomes):,} of {counted(len(asked.items), 'result')}",
            f"finish it first: run `dsv4 eval` for {header['model']} again with --out {shell_word(path)}",
        )
    return ModelResults(asked, header, [outcomes[index] for index in sorted(outcomes)])


def _eval_requests(job: Job, asked: "EvalSet", by_answer: bool) -> "list[EvalRequest]":
    from dsv4cli.engine.evaluation.eval_request import build_request

    requests, bad = [], []
    for index, item in enumerate(each(job.out, asked.items, "reading questions")):
        try:
            requests.append(build_request(index, item, job.dialogue, job.sampling, job.limits, by_answer))
        except UsageError as error:
            bad.append((item.id, error))
    if bad:
        details = [f"{id_}: {error.message}" for id_, error in bad]
        raise UsageError(f"{counted(len(bad), 'question')} of {asked.name} cannot be asked", bad[0][1].remedy, details)
    return requests


def ask_all(job: Job, asking: Asking) -> None:
    """Ask the questions that have no result yet, and pass on all results."""
    results, clock = asking.results, Clock()
    with results_sink(job.out, asking.out, asking.results.header, len(asking.requests)) as (known, take):
        missing = [one for one in asking.requests if one.index not in known]
        results.asked = len(missing)
        if missing:
            for outcome in _outcomes(job, missing, len(asking.requests), clock):
                known[outcome.index] = outcome
                take(outcome)
            results.seconds = perf_counter() - clock.start
    results.outcomes = [known[one.index] for one in asking.requests]
    before = len(asking.requests) - len(missing)
    if before:
        job.out.status(f"{asking.out} already had {counted(before, 'result')}")
    if missing:
        report_traffic(job.out, clock.experts)
        report_drafts(job.out, clock.drafts)
    asking.into.append(results)


def _outcomes(job: Job, missing: "list[EvalRequest]", total: int, clock: Clock) -> "Iterator[Outcome]":
    done, sampled = total - len(missing), any(one.sampled for one in missing)
    lengths = [len(request.prompt) for one in missing for request in one.requests]
    with job.model(lengths, sampled=sampled) as model, job.out.counting("questions") as show:
        from dsv4cli.engine.evaluation.eval_request import carry_out
        from dsv4cli.engine.weights.offload import offload_of

        def show_progress(waiting: bool = False) -> None:
            show(done, total, clock.activity(waiting))

        def note(token: "Token", later: bool) -> None:
            clock.tick(token.prepared, later=later)
            if clock.tokens % TOKENS_BETWEEN == 0:
                show_progress()

        clock.start, clock.experts = perf_counter(), offload_of(model)
        show_progress()
        for outcome in carry_out(
            model, missing, job.device, on_token=note, on_preparing=show_progress, followers=job.process.followers,
            drafting=job.drafting, on_end=clock.note_end,
        ):  # fmt: skip
            done += 1
            yield outcome
            show_progress()


@contextmanager
def results_sink(
    out: Output, path: Path | None, header: dict[str, Any], total: int
) -> "Iterator[tuple[dict[int, Outcome], Callable[[Outcome], None]]]":
    """Yield the existing results by index, and a function that stores a new one.

    Args:
        path: the results file, if there is one.
        total: number of questions.
    """
    if path is None:
        yield {}, lambda outcome: None
        return
    from dsv4cli.engine.evaluation.results import ResultsFile

    file = ResultsFile(path, header)
    try:
        yield dict(file.outcomes), file.add
        file.order()
    except BaseException:
        of = counted(total, "result")
        out.status(f"{len(file.outcomes):,} of {of} are in {path}; run the same command again to continue")
        raise
    finally:
        file.close()
