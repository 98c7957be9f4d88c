"""`dsv4 run`: answer prompts, or compute the log-probabilities of given texts with --score."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from dsv4cli.commands.compiling import early_compiler
from dsv4cli.commands.job import Job, open_job
from dsv4cli.commands.run.many import Source, answer_many, read_many, score_texts, show_prompts
from dsv4cli.commands.run.modes import Samples, answer_one, answer_samples, show_prompt
from dsv4cli.commands.run.prompt import conversation
from dsv4cli.commands.run.ranks import Work, in_ranks
from dsv4cli.commands.run.remote import TOKEN_OPTIONS, RemoteRun
from dsv4cli.commands.server_options import (
    CONCURRENCY,
    AnswerConcurrencyOpt,
    AnswerKeyOpt,
    AnswerUrlOpt,
    ServerChoice,
    check_server,
    open_server,
)
from dsv4cli.errors import UsageError
from dsv4cli.options import (
    JsonOpt,
    ModelOptions,
    QuietOpt,
    SystemOpt,
    TpOpt,
    argument_text,
    is_given,
    takes_model_options,
)
from dsv4cli.output import Output

PromptArg = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT",
        help="Prompt to answer. Piped text is appended to it; - uses the piped text alone.",
        callback=argument_text,
    ),
]
MessagesOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json",
        help="Conversation in the format of the OpenAI API: messages and, optionally, tools; - reads stdin.",
    ),
]
PromptsOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help='Answer many prompts, one JSON object per line: {"prompt": …}, {"messages": […]} or an OpenAI batch '
        "request. Answers are printed as JSON lines.",
    ),
]
ScoreOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help="Print the log-probabilities of given texts instead of generating. One JSON object per line: "
        '{"ids": […]}, {"text": …} or {"messages": […]}.',
    ),
]
FileOpt = Annotated[
    list[Path] | None,
    typer.Option(
        "--file", "-f", metavar="FILE", help="Text file to append to the prompt; may be repeated; - reads stdin."
    ),
]
OutOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help="With --prompts: write each answer to this file as soon as it ends. To continue after an "
        "interruption, run the same command again.",
    ),
]
ShardOpt = Annotated[
    str | None,
    typer.Option(
        metavar="I/N",
        help="With --prompts: answer part I of N, which is every Nth line, to split the work over N machines.",
    ),
]
SkipBadOpt = Annotated[bool, typer.Option("--skip-bad", help="With --prompts: skip lines that cannot be answered.")]
SamplesOpt = Annotated[
    int, typer.Option("--samples", "-n", help="Number of answers per prompt, each with its own seed.")
]
LogprobsOpt = Annotated[
    int, typer.Option(help="Number of alternatives to report for each token; requires JSON output.")
]
ShowPromptOpt = Annotated[
    bool, typer.Option("--show-prompt", help="Print the exact prompt and its token ids, and exit.")
]
# options of answers, which --score does not generate
FOR_ANSWERS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop",
)  # fmt: skip
RUN_EXAMPLES = (
    'dsv4 run "What is 17 + 25?"',
    "dsv4 run --model flash --think high 'Prove it.' < theorem.txt",
    "dsv4 run --model flash --prompts questions.jsonl > answers.jsonl",
    "dsv4 run --url http://localhost:8000 --prompts q.jsonl --out a.jsonl",
    "dsv4 run --model flash --score texts.jsonl --prefill-chunk 1",
)


@takes_model_options()
def run(
    context: typer.Context,
    options: ModelOptions,
    prompt: PromptArg = None,
    file: FileOpt = None,
    messages: MessagesOpt = None,
    prompts: PromptsOpt = None,
    out: OutOpt = None,
    skip_bad: SkipBadOpt = False,
    shard: ShardOpt = None,
    score: ScoreOpt = None,
    system: SystemOpt = None,
    samples: SamplesOpt = 1,
    logprobs: LogprobsOpt = 0,
    tp: TpOpt = None,
    only_show: ShowPromptOpt = False,
    url: AnswerUrlOpt = None,
    api_key_file: AnswerKeyOpt = None,
    concurrency: AnswerConcurrencyOpt = CONCURRENCY,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Send a prompt to the model and stream its answer.

    The answer goes to stdout; reasoning, progress and timing go to stderr. Without --model, the answer comes from
    nano, a small DeepSeek-V4 model that ships with dsv4.
    """
    torchrun: bool = context.obj.torchrun
    given = Inputs(prompt, file or [], messages, prompts, score, system, samples, skip_bad, options.seed, out, shard)
    printed, choice = Output(context.obj.colours, as_json, quiet), ServerChoice(url, api_key_file, concurrency)
    if check_server(context, choice, TOKEN_OPTIONS):
        _check(context, given, options.device, only_show, as_json, logprobs)
        _ask(RemoteRun(printed, open_server(context, printed, choice, options), concurrency), given)
        return
    compiler = None if only_show or torchrun else early_compiler(options)
    job = open_job(printed, options, logprobs, compiler)
    _check(context, given, options.device, only_show, as_json, logprobs)
    ranks = (None, False) if only_show else (tp, torchrun)
    in_ranks(_without_drafts(job) if score else job, *ranks, lambda: _work(job, given, only_show))


def _without_drafts(job: Job) -> Job:
    """Return the job without drafting, because scoring samples no tokens."""
    from dsv4cli.engine.settings import NO_DRAFTS

    return replace(job, drafting=NO_DRAFTS)


class Inputs(NamedTuple):
    """The options that select the prompts, and the file for answers. None for options that are not set."""

    prompt: str | None
    files: list[Path]
    messages: Path | None
    prompts: Path | None
    score: Path | None
    system: str | None
    samples: int
    skip_bad: bool
    seed: int | None
    out: Path | None
    shard: str | None


def _work(job: Job, given: Inputs, only_show: bool) -> Work:
    """Return the mode to run and its inputs, which are read here."""
    from dsv4cli.engine.text.inputs import read_scores

    if given.score is not None:
        return score_texts, read_scores(given.score)
    if given.prompts is not None:
        lines = _lines(given.prompts, given)
        return (show_prompts, lines) if only_show else (answer_many, read_many(job, lines))
    messages = conversation(given.prompt, given.files, given.messages, given.system)
    if given.samples > 1:
        return answer_samples, Samples(messages, given.samples)
    return show_prompt if only_show else answer_one, messages


def _ask(remote: RemoteRun, given: Inputs) -> None:
    """Let a server answer."""
    if given.prompts is not None:
        remote.answer_many(_lines(given.prompts, given))
        return
    messages = conversation(given.prompt, given.files, given.messages, given.system)
    if given.samples > 1:
        remote.answer_samples(messages, given.samples)
    else:
        remote.answer_one(messages)


def _lines(path: Path, given: Inputs) -> Source:
    from dsv4cli.engine.settings import WHOLE, parse_part

    part = WHOLE if given.shard is None else parse_part(given.shard)
    return Source(path, given.system, given.samples, given.skip_bad, given.seed, given.out, part)


def _check(context: typer.Context, given: Inputs, device: str, only_show: bool, as_json: bool, logprobs: int) -> None:
    """Raise UsageError for invalid options, or options that cannot be combined."""
    from dsv4cli.engine.settings import check_device, parse_part
    from dsv4cli.engine.text.questions import check_samples

    check_device(device)
    if given.shard is not None:
        parse_part(given.shard)
    check_samples(given.samples)
    _check_modes(given)
    idle = next((name for name in FOR_ANSWERS if is_given(context, name)), None)
    if given.score is not None and idle is not None:
        raise UsageError(
            f"--{idle.replace('_', '-')} has no effect with --score, which generates nothing", "remove one of them"
        )
    if only_show:
        _refuse_together(
            "--show-prompt", {"--score": given.score, "--samples": given.samples > 1 or None, "--out": given.out}
        )
    if logprobs and not (as_json or given.score or given.prompts):
        raise UsageError("--logprobs needs JSON output", "add --json")


def _check_modes(given: Inputs) -> None:
    modes = {"--messages": given.messages, "--prompts": given.prompts, "--score": given.score}
    own = {"a prompt": given.prompt, "--file": given.files or None}
    names = [name for name, value in modes.items() if value is not None]
    if len(names) > 1:
        raise UsageError(f"{names[0]} and {names[1]} cannot be combined", "use one of them")
    for name in names:
        _refuse_together(name, own)
    if given.system is not None and names and names[0] in ("--messages", "--score"):
        raise UsageError(f"--system and {names[0]} cannot be combined", "put the system message into the file")
    if given.score is not None:
        _refuse_together("--score", {"--samples": given.samples > 1 or None})
    lines_only = {"--out": given.out, "--skip-bad": given.skip_bad or None, "--shard": given.shard}
    unused = [name for name, value in lines_only.items() if value is not None]
    if given.prompts is None and unused:
        raise UsageError(f"{unused[0]} works only with --prompts", "add --prompts FILE.jsonl")


def _refuse_together(option: str, others: Mapping[str, object]) -> None:
    """Raise UsageError if one of the others is set in addition to this option."""
    for name, value in others.items():
        if value is not None:
            raise UsageError(f"{name} and {option} cannot be combined", "use one of them")
