"""`dsv4 eval`: how many questions of a file a model has right, and whether it is as good as another."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from dsv4cli.commands.eval.asking import EvalOptions, ModelResults, ask_all, beside, results_in
from dsv4cli.commands.eval.report import report
from dsv4cli.commands.job import Job, open_job
from dsv4cli.commands.run.ranks import in_ranks
from dsv4cli.errors import UsageError
from dsv4cli.options import JsonOpt, ModelOptions, QuietOpt, TorchrunOpt, TpOpt, takes_model_options
from dsv4cli.output import Output

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
    own = EvalOptions(file, limit, by_answer, out)
    other = None
    if against is not None and not is_results(Path(against)):
        if torchrun is not None:
            raise UsageError(
                "torchrun shares one model among its ranks, and --against names a second",
                "use --tp; or store the results of each with --out, and compare with --against FILE.jsonl",
            )
        other = _as(job, replace(options, model=against))
    found = _results(job, own, tp, torchrun is not None, against if other is None else None)
    if found is None:  # a rank of torchrun's that follows
        return
    if other is not None:
        others = _results(other, replace(own, out=beside(out)), tp, False, None)
        assert others is not None
        found = replace(found, others=others)
    if report(job, found) == "worse":
        raise typer.Exit(3)


def _as(job: Job, options: ModelOptions) -> Job:
    """The same with another model, which is asked in the same way, also where it would ask for another."""
    return replace(open_job(job.out, options), sampling=job.sampling)


def _results(job: Job, given: EvalOptions, tp: int | None, started: bool, against: str | None) -> ModelResults | None:
    """What the model's answers come to, beside those of a file; None in a rank that only follows."""
    from dsv4cli.engine.system.device import free_unused

    found: list[ModelResults] = []
    in_ranks(job, tp, started, lambda: (ask_all, results_in(job, given, against, found)))
    free_unused()  # another model may come
    return found[0] if found else None
