"""`dsv4 run`: prompts in, answers out; or, with --score, how likely the model finds given texts."""

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from dsv4cli.commands.ranks import Work
from dsv4cli.commands.run_experts import memory_limits
from dsv4cli.commands.run_modes import (
    Job,
    answer_many,
    answer_one,
    conversation,
    score_texts,
    show_prompt,
    show_prompts,
)
from dsv4cli.commands.run_ranks import in_ranks
from dsv4cli.errors import UsageError
from dsv4cli.options import (
    BackendOpt,
    DeviceOpt,
    DtypeOpt,
    GpuMemoryOpt,
    HostMemoryOpt,
    JsonOpt,
    MaxContextOpt,
    MaxTokensOpt,
    ModelOpt,
    PrefillChunkOpt,
    SeedOpt,
    StopOpt,
    SystemOpt,
    TemperatureOpt,
    ThinkOpt,
    TopPOpt,
    TorchrunOpt,
    TpOpt,
)
from dsv4cli.output import Output

PromptArg = Annotated[
    str | None, typer.Argument(help="What to ask. Text piped in is added below it; - stands for that text alone.")
]
MessagesOpt = Annotated[
    Path | None,
    typer.Option(metavar="FILE.json", help="A conversation as in the OpenAI API: messages, and tools if any."),
]
PromptsOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help='Many at once: lines {"prompt": …} or {"messages": […]}, answered in their order as JSON lines.',
    ),
]
ScoreOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help='Log-probabilities of given texts, no answer: lines {"ids": […]}, {"text": …} or {"messages": […]}.',
    ),
]
LogprobsOpt = Annotated[int, typer.Option(help="Alternatives to report for each token; needs JSON output.")]
ShowPromptOpt = Annotated[
    bool, typer.Option("--show-prompt", help="Print the exact prompt and its token ids; run nothing.")
]


def run(
    context: typer.Context,
    prompt: PromptArg = None,
    model: ModelOpt = "nano",
    messages: MessagesOpt = None,
    prompts: PromptsOpt = None,
    score: ScoreOpt = None,
    system: SystemOpt = None,
    think: ThinkOpt = "off",
    max_tokens: MaxTokensOpt = 4096,
    temperature: TemperatureOpt = None,
    top_p: TopPOpt = None,
    seed: SeedOpt = None,
    stop: StopOpt = None,
    logprobs: LogprobsOpt = 0,
    prefill_chunk: PrefillChunkOpt = 4096,
    max_context: MaxContextOpt = None,
    device: DeviceOpt = "auto",
    dtype: DtypeOpt = "auto",
    backend: BackendOpt = "auto",
    tp: TpOpt = None,
    torchrun: TorchrunOpt = None,
    gpu_memory: GpuMemoryOpt = None,
    host_memory: HostMemoryOpt = None,
    only_show: ShowPromptOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Ask the model and print its answer as it comes.

    The answer goes to stdout; reasoning, progress and timing go to stderr.

    \b
    Without --model it asks nano, a small DeepSeek-V4 that is built in:
      $ dsv4 run "What is 17 + 25?"
      17 + 25 = 42.
      $ dsv4 run "What is the capital of Italy?" -s "Always end with 'over'."
      The capital of Italy is Rome. over
    """
    from dsv4cli.engine.settings import Limits, check_device
    from dsv4cli.engine.source import resolve_model

    limits = Limits(max_tokens, max_context, prefill_chunk, logprobs, tuple(stop or ()))
    source, memory = resolve_model(model), memory_limits(gpu_memory, host_memory)
    sampling = source.sampling.chosen(temperature, top_p, seed)
    check_device(device)
    _check_modes({"a prompt": prompt, "--messages": messages, "--prompts": prompts, "--score": score}, system)
    _check_output(only_show, score, logprobs, as_json or prompts is not None)
    job = Job(Output(context.obj, as_json), source, think, device, dtype, backend, limits, sampling, memory)
    given = Inputs(prompt, messages, prompts, score, system)
    in_ranks(job, None if only_show else tp, torchrun is not None and not only_show, lambda: _work(given, only_show))


class Inputs(NamedTuple):
    """Where the questions come from; what is not given is None."""

    prompt: str | None
    messages: Path | None
    prompts: Path | None
    score: Path | None
    system: str | None


def _work(given: Inputs, only_show: bool) -> Work:
    """The mode, and the inputs read for it."""
    from dsv4cli.engine.inputs import read_prompts, read_scores

    if given.score is not None:
        return score_texts, read_scores(given.score)
    if given.prompts is not None:
        return show_prompts if only_show else answer_many, read_prompts(given.prompts, given.system)
    talk = conversation(given.prompt, given.messages, given.system)
    return show_prompt if only_show else answer_one, talk


def _check_output(only_show: bool, score: Path | None, logprobs: int, as_json: bool) -> None:
    if score is not None and only_show:
        raise UsageError("--score and --show-prompt cannot be combined", "give one of them")
    if logprobs and not (as_json or score):
        raise UsageError("--logprobs shows in JSON output only", "add --json")


def _check_modes(given: dict[str, object], system: str | None) -> None:
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise UsageError(f"{names[0]} and {names[1]} cannot be combined", "give one of them")
    if system is not None and names and names[0] in ("--messages", "--score"):
        raise UsageError(f"--system and {names[0]} cannot be combined", "put the system message into the file")
