"""`dsv4 eval`: how many questions of a file a model has right, and whether it is as good as another."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from dsv4cli.commands.eval.asking import (
    Asking,
    EvalOptions,
    ModelResults,
    ask_all,
    asked_of,
    beside,
    stored_results,
)
from dsv4cli.commands.eval.report import report
from dsv4cli.commands.job import Job, open_job, report_lookalikes
from dsv4cli.commands.run.ranks import Work, in_ranks
from dsv4cli.errors import UsageError
from dsv4cli.options import JsonOpt, ModelOptions, QuietOpt, TorchrunOpt, TpOpt, takes_model_options
from dsv4cli.output import Output, counted

FileArg = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="The questions: our JSON lines, gsm8k, math500, humaneval, mmlu, gpqa or official continuations as they "
        "were published; nano: 200 that come with the program.",
    ),
]
AgainstOpt = Annotated[
    str | None,
    typer.Option(
        metavar="OTHER", help="Another model, or its file of results: which answers differ, by chance or not?"
    ),
]
OutOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help="Write each result to this file as it is there; the same command continues with the others.",
    ),
]
LimitOpt = Annotated[int | None, typer.Option(min=1, help="Ask the first so many questions only.")]
ChoicesOpt = Annotated[
    Literal["likelihood", "answer"] | None,
    typer.Option(
        help="Judge choices by how likely each is, or by the letter in an answer. If absent, by likelihood without "
        "thinking and by the answer with it."
    ),
]


@takes_model_options(file="model", choices="think", tp="backend")
def evaluate(
    context: typer.Context,
    options: ModelOptions,
    file: FileArg = "nano",
    against: AgainstOpt = None,
    out: OutOpt = None,
    limit: LimitOpt = None,
    choices: ChoicesOpt = None,
    tp: TpOpt = None,
    torchrun: TorchrunOpt = None,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Ask a model questions whose answers are known.

    The score goes to stdout. With --against the same questions are asked of two models, and the answer is no (exit
    code 3) when the first is significantly worse. Without FILE nano answers 200 questions.
    """
    from dsv4cli.engine.evaluation.results import is_results
    from dsv4cli.engine.settings import check_device

    check_device(options.device)
    options = replace(options, seed=options.seed or 0)  # so that the same command draws the same answers
    job = open_job(Output(context.obj, as_json, quiet), options)
    by_answer = (options.think != "off") if choices is None else choices == "answer"
    given, stored, second = EvalOptions(file, limit, by_answer, out), None, None
    if against is not None and is_results(Path(against)):
        stored = Path(against)
    elif against is not None:
        second = _second(job, replace(options, model=against), given, torchrun is not None)
    found = _results(job, tp, torchrun is not None, lambda: _first(job, given, stored))
    if found is None:  # a rank of torchrun's that follows
        return
    if second is not None:
        other, asking = second
        found = replace(found, others=_results(other, tp, False, lambda: asking))
    if report(job, found) == "worse":
        raise typer.Exit(3)


def _first(job: Job, given: EvalOptions, stored: Path | None) -> Asking:
    """What the model is asked; its results stand against those that are `stored`, if any."""
    asking = asked_of(job, given)
    questions = asking.results.questions
    job.out.status(f"{questions.name}: {counted(len(questions.items), 'question')}, read as {questions.form}")
    report_lookalikes(job.out, list(dict.fromkeys(text for one in asking.posed for text in one.lookalikes)))
    if stored is not None:
        asking.results.others = stored_results(stored, questions)
    return asking


def _second(job: Job, options: ModelOptions, given: EvalOptions, started: bool) -> tuple[Job, Asking]:
    """The other model and what it is asked, in the same way, also where it would ask for another; read before the
    first is asked, so that what is wrong is said at once."""
    if started:
        raise UsageError(
            "torchrun shares one model among its ranks, and --against names a second",
            "use --tp; or store the results of each with --out, and compare with --against FILE.jsonl",
        )
    other = replace(open_job(job.out, options), sampling=job.sampling)
    return other, asked_of(other, replace(given, out=beside(given.out)))


def _results(job: Job, tp: int | None, started: bool, read: Callable[[], Asking]) -> ModelResults | None:
    """What the model's answers come to; None in a rank that only follows."""
    from dsv4cli.engine.system.device import free_unused

    found: list[ModelResults] = []

    def work() -> Work:
        return ask_all, read()._replace(into=found)

    in_ranks(job, tp, started, work)
    free_unused()  # another model may come
    return found[0] if found else None
