"""Texts that `dsv4 trace` sends through a model."""

import random
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dsv4cli.commands.job import Job, report_lookalikes
from dsv4cli.errors import UsageError
from dsv4cli.options import argument_text

if TYPE_CHECKING:
    from dsv4cli.engine.tracing.manifest import Text

# length of the default text, in tokens: more than two sliding windows, with groups of every compression ratio
TOKENS, FIRST = 300, 3

PromptOpt = Annotated[
    str | None,
    typer.Option(help="User message. If no text is given, 300 random tokens are used.", callback=argument_text),
]
IdsOpt = Annotated[str | None, typer.Option(metavar="N,N", help="Token ids of a prompt, separated by commas.")]
PromptsOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help='Several texts: lines {"prompt": …}, {"messages": […]}, {"text": …} or {"ids": […]}.',
    ),
]
StepsOpt = Annotated[int, typer.Option(min=0, help="Number of tokens to decode after each prompt, one per step.")]


class TextOptions(NamedTuple):
    """The options that select the texts, and the number of tokens to decode."""

    prompt: str | None
    ids: str | None
    prompts: Path | None
    steps: int

    @property
    def names(self) -> list[str]:
        """The names of the options that are set and select a text."""
        named = {"--prompt": self.prompt, "--ids": self.ids, "--prompts": self.prompts}
        return [name for name, value in named.items() if value is not None]


def recorded_alone(given: TextOptions, option: str) -> None:
    """Raise UsageError if a text is given in addition to a recording, which has its own tokens."""
    if given.names:
        raise UsageError(
            f"{given.names[0]} and {option} cannot be combined: the recording has its own tokens", "use one of them"
        )


def read_texts(job: Job, given: TextOptions) -> "list[Text]":
    """Return the texts. Tokens to be sampled are -1. Raises UsageError."""
    from dsv4cli.engine.text.inputs import from_prompt
    from dsv4cli.engine.tracing.manifest import Text

    names = given.names
    if len(names) > 1:
        raise UsageError(f"{names[0]} and {names[1]} cannot be combined", "use one of them")
    if given.prompt is not None:
        prompts = [_prompt(job, from_prompt(given.prompt, None))]
    elif given.ids is not None:
        prompts = [_ids(given.ids)]
    elif given.prompts is not None:
        prompts = _lines(job, given.prompts)
    else:
        draw, vocabulary = random.Random(0), job.source.identity.config.vocab_size
        prompts = [[draw.randrange(FIRST, vocabulary) for _ in range(TOKENS)]]
    texts = [Text((*ids, *([-1] * given.steps)), len(ids)) for ids in prompts]
    check(job, texts)
    return texts


def check(job: Job, texts: "list[Text]") -> None:
    """Raise UsageError, before a model is loaded, if the model cannot process a prompt and the tokens after it."""
    from dsv4cli.engine.runtime.limits import check_texts

    # -1 is a token to be sampled
    known = [[*one.ids[: one.prompt], *(max(token, 0) for token in one.ids[one.prompt :])] for one in texts]
    check_texts(known, job.source.identity.config, job.limits)


def _prompt(job: Job, messages: list[Any]) -> list[int]:
    prompt = job.dialogue.prompt(messages)
    report_lookalikes(job.out, prompt.lookalikes)
    return prompt.ids


def _ids(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise UsageError(
            f"--ids {text!r} is not a list of token ids", "use whole numbers separated by commas, for example 5,6,7"
        )
    return [int(word) for word in words]


def _lines(job: Job, path: Path) -> list[list[int]]:
    from dsv4cli.engine.text.inputs import asked_in, read_lines, refuse, scored_in

    def convert(value: dict[str, Any]) -> list[int]:
        if "prompt" in value or "messages" in value:
            return _prompt(job, asked_in(value, None))
        item = scored_in(value)
        return item.ids or job.dialogue.tokenizer.encode(item.text or "")

    items, bad = read_lines(path, convert)
    refuse(path, bad)
    return [ids for _, ids in items]
