"""`dsv4 eval`: score a model on a file of questions, and compare it with another model."""

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
    build_asking,
    described,
    questions_of,
    second_results,
    stored_results,
)
from dsv4cli.commands.eval.remote import RemoteEval
from dsv4cli.commands.eval.report import report
from dsv4cli.commands.job import Job, open_job, report_lookalikes
from dsv4cli.commands.run.ranks import Work, in_ranks
from dsv4cli.commands.server_options import (
    CONCURRENCY,
    AnswerConcurrencyOpt,
    AnswerKeyOpt,
    AnswerUrlOpt,
    ServerChoice,
    check_server,
    open_server,
)
from dsv4cli.commands.starting import import_torch
from dsv4cli.errors import UsageError
from dsv4cli.model_names import complete_model
from dsv4cli.options import JsonOpt, ModelOptions, QuietOpt, TpOpt, takes_model_options
from dsv4cli.output import Output

FileArg = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="Questions: JSON lines in dsv4's format; gsm8k, math500, humaneval, mmlu, mmlu_pro, gpqa or "
        "the official continuations as published; or nano, 200 built-in questions.",
    ),
]
AgainstOpt = Annotated[
    str | None,
    typer.Option(
        metavar="OTHER",
        autocompletion=complete_model,
        help="Another model, or a file of its results, to compare with. Shows which answers differ, and "
        "whether the difference is significant.",
    ),
]
OutOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help="Write each result to this file as soon as it is known. To continue after an interruption, "
        "run the same command again.",
    ),
]
LimitOpt = Annotated[int | None, typer.Option(min=1, help="Ask only the first N questions.")]
ShardOpt = Annotated[
    str | None,
    typer.Option(
        metavar="I/N",
        help="Ask only part I of N, which is every Nth question, to split the work over N machines.",
    ),
]
ChoicesOpt = Annotated[
    Literal["likelihood", "answer"] | None,
    typer.Option(
        help="How to judge multiple-choice questions: by the likelihood of each choice, or by the letter "
        "in the answer. Defaults to likelihood without thinking and to answer with thinking."
    ),
]
EVAL_EXAMPLES = (
    "dsv4 eval",
    "dsv4 eval gsm8k_test.jsonl --model flash --out gsm8k.jsonl",
    "dsv4 eval gsm8k_test.jsonl --model OUT --against gsm8k.jsonl",
    "dsv4 eval gsm8k_test.jsonl --url http://localhost:8000 --out gsm8k.jsonl",
    "dsv4 eval flash/manifest.tsv --model OUT --against flash-0731",
)


@takes_model_options()
def evaluate(
    context: typer.Context,
    options: ModelOptions,
    file: FileArg = "nano",
    against: AgainstOpt = None,
    out: OutOpt = None,
    limit: LimitOpt = None,
    shard: ShardOpt = None,
    choices: ChoicesOpt = None,
    tp: TpOpt = None,
    url: AnswerUrlOpt = None,
    api_key_file: AnswerKeyOpt = None,
    concurrency: AnswerConcurrencyOpt = CONCURRENCY,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Evaluate a model on questions with known answers.

    The score goes to stdout. With --against, two models answer the same questions, and the exit code is 3 if the first
    is significantly worse. Without FILE, the model answers the 200 built-in questions.
    """
    from dsv4cli.engine.evaluation.results import is_results
    from dsv4cli.engine.settings import WHOLE, check_device, parse_part

    check_device(options.device)
    part = WHOLE if shard is None else parse_part(shard)
    if shard is not None and against is not None:
        raise UsageError("--against does not work with --shard", "join the parts first, and compare their results")
    options = replace(options, seed=options.seed or 0)  # the same command samples the same answers
    by_answer = (options.think != "off") if choices is None else choices == "answer"
    given, printed = EvalOptions(file, limit, by_answer, out, part), Output(context.obj.colours, as_json, quiet)
    stored = against is None or is_results(Path(against))
    found: tuple[ModelResults, ModelResults | None] | None
    if check_server(context, choice := ServerChoice(url, api_key_file, concurrency)):
        if not stored:
            raise UsageError(
                "--against with a second model does not work with --url",
                "evaluate each model with --out, and compare with --against FILE.jsonl",
            )
        server = open_server(context, printed, choice, options)
        found = RemoteEval(printed, server, options, concurrency).results(given, against)
    elif stored:
        found = _one(open_job(printed, options), given, against, tp, context.obj.torchrun)
    else:
        assert against is not None
        job = open_job(printed, options)
        found = _both(job, replace(options, model=against), given, tp, context.obj.torchrun)
    # None in a follower rank of torchrun
    if found is not None and report(printed, *found) == "worse":
        raise typer.Exit(3)


def _one(
    job: Job, given: EvalOptions, stored: str | None, tp: int | None, started: bool
) -> tuple[ModelResults, ModelResults | None] | None:
    """Return the model's results, and the stored results to compare with, if any."""
    others: list[ModelResults | None] = []

    def read() -> Asking:
        asking = build_asking(job, given, questions_of(given))
        others.append(None if stored is None else stored_results(Path(stored), asking.results.questions))
        _report_questions(job, given, asking)
        return asking

    found = _results(job, tp, started, read)
    return None if found is None else (found, others[0])


def _both(
    job: Job, options: ModelOptions, given: EvalOptions, tp: int | None, started: bool
) -> tuple[ModelResults, ModelResults | None] | None:
    """Return the results of two models on the same questions.

    The second model uses the sampling defaults of the first, not its own. The inputs of both are checked before the
    first model is loaded.
    """
    if started:
        raise UsageError(
            "--against with a second model does not work under torchrun",
            "use --tp; or evaluate each model with --out, and compare with --against FILE.jsonl",
        )
    other, questions = replace(open_job(job.out, options), sampling=job.sampling), questions_of(given)
    first = build_asking(job, given, questions)
    second = build_asking(other, replace(given, out=second_results(given.out)), questions)
    _report_questions(job, given, first)
    found = _results(job, tp, False, lambda: first)
    return None if found is None else (found, _results(other, tp, False, lambda: second))


def _report_questions(job: Job, given: EvalOptions, asking: Asking) -> None:
    """Report which questions were read and how, and warn of text that looks like special tokens."""
    job.out.status(described(asking.results.questions, given.part))
    report_lookalikes(job.out, list(dict.fromkeys(text for one in asking.requests for text in one.lookalikes)))


def _results(job: Job, tp: int | None, started: bool, read: Callable[[], Asking]) -> ModelResults | None:
    """Return the results of the model; None in a follower rank."""
    import_torch(job.out)
    from dsv4cli.engine.system.device import free_unused

    found: list[ModelResults] = []

    def work() -> Work:
        return ask_all, read()._replace(into=found)

    in_ranks(job, tp, started, work)
    free_unused()  # for a second model
    return found[0] if found else None
