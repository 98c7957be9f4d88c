"""The lines of `run --prompts`: what is asked, under which label, and how this line wants to be answered; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.engine.text.inputs import BadLine, asked_in, read_lines
from dsv4cli.engine.text.prompt import Message
from dsv4cli.errors import UsageError

LABELS = ("id", "custom_id")
# an OpenAI batch request, but for its label
_ENVELOPE = {"method", "url", "body"}
_PATH = "/v1/chat/completions"
_CHAT = {"messages", "tools", "prompt"}
# of an API's request, what says nothing about the answer
_IDLE = {"model", "user", "metadata", "store", "service_tier", "stream", "stream_options", "parallel_tool_calls"}
# what would change the answer, with the value at which it does not
_NEUTRAL: Mapping[str, object] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "logprobs": False,
    "top_logprobs": 0,
}
# an odd number spreads the seeds of a prompt's samples over all there are, each once
_NEXT_SAMPLE = 0x9E3779B9


@dataclass(frozen=True)
class Question:
    """Line `line` of the file, the `index`th that is not empty; None where it leaves a choice to the command.

    labels: its id and custom_id, if it has them. model: that it names, and that is ignored.
    """

    line: int
    index: int
    messages: list[Message]
    labels: dict[str, Any] = field(default_factory=dict)
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stops: tuple[str, ...] | None = None
    samples: int | None = None
    model: str | None = None

    def sampling(self, usual: Sampling, sample: int) -> Sampling:
        """How its answer `sample` is drawn; `usual` is for the first answer of the first line."""
        chosen = usual.chosen(self.temperature, self.top_p, usual.seed if self.seed is None else self.seed)
        return sample_of(chosen, sample).plus(0 if self.seed is not None else self.index)

    def limits(self, usual: Limits) -> Limits:
        """When its answer ends at the latest."""
        stops = usual.stops if self.stops is None else self.stops
        return replace(usual, max_tokens=self.max_tokens or usual.max_tokens, stops=stops)


def sample_of(sampling: Sampling, sample: int) -> Sampling:
    """The sampling of another answer to the same prompt, the 0th being this one's."""
    return sampling.plus(sample * _NEXT_SAMPLE)


def read_questions(path: Path, system: str | None) -> tuple[list[Question], list[BadLine]]:
    """The questions of a JSON-lines file, each {"prompt": text}, {"messages": [...], "tools": [...]} with a label and
    the keys of sampling beside them, or an OpenAI batch request; and the lines that are none."""
    lines, bad = read_lines(path, lambda value: _question(value, system))
    order = {number: index for index, number in enumerate(sorted([n for n, _ in lines] + [one.number for one in bad]))}
    return [replace(one, line=number, index=order[number]) for number, one in lines], bad


def _question(value: dict[str, Any], system: str | None) -> Question:
    labels = {key: _label(key, value[key]) for key in LABELS if value.get(key) is not None}
    rest = {key: item for key, item in value.items() if key not in LABELS}
    if "body" in rest:
        rest = _body(rest)
    for key, neutral in _NEUTRAL.items():
        if rest.pop(key, None) not in (None, neutral):
            raise UsageError(f'"{key}" is not supported here', "leave it out")
    model = rest.get("model")
    rest = {key: item for key, item in rest.items() if key not in _IDLE}
    wishes = {name: wish(rest.pop(key)) for key, (name, wish) in _WISHES.items() if rest.get(key) is not None}
    rest = {key: item for key, item in rest.items() if key not in _WISHES}
    chat = {key: item for key, item in rest.items() if key not in _CHAT or item is not None}
    return Question(0, 0, asked_in(chat, system), labels, model=model if isinstance(model, str) else None, **wishes)


def _body(value: dict[str, Any]) -> dict[str, Any]:
    """The body of a batch request."""
    unknown = set(value) - _ENVELOPE
    if unknown:
        raise UsageError(f"unknown key {min(unknown)!r} beside body", "write an OpenAI batch request")
    if value.get("method", "POST") != "POST" or value.get("url", _PATH) != _PATH:
        asked = f"{value.get('method', 'POST')} {value.get('url', _PATH)}"
        raise UsageError(f"{asked!r} cannot be answered", f"ask for POST {_PATH}")
    if not isinstance(value["body"], dict):
        raise UsageError('"body" is not a JSON object', "write the request as for the OpenAI chat API")
    return value["body"]


def _label(key: str, value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(f'"{key}" is neither a text nor a number', "give one")
    return value


def _number(key: str, check: Any) -> Any:
    """What reads a number, 1 and 1.0 alike."""

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f'"{key}" is not a number', "give one")
        _try(key, value, lambda: check(float(value)))
        return float(value)

    return read


def _count(key: str, check: Any) -> Any:
    """What reads a whole number."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f'"{key}" is not a whole number', "give one")
        _try(key, value, lambda: check(value))
        return value

    return read


def _try(key: str, value: object, check: Any) -> None:
    """Raises the check's UsageError in the words of a file."""
    try:
        check()
    except UsageError as error:
        raise UsageError(f'"{key}" cannot be {value}', error.remedy) from None


def _stops(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise UsageError('"stop" is neither a text nor a list of texts', "give the texts that end an answer")
    return tuple(texts)


def check_samples(count: int) -> None:
    """Raises UsageError for a number of answers that cannot be."""
    if count < 1:
        raise UsageError(f"--samples cannot be {count}", "use at least 1")


# the key of a line: the field of the question, and what reads its value
_WISHES: Mapping[str, tuple[str, Any]] = {
    "temperature": ("temperature", _number("temperature", lambda value: Sampling(temperature=value))),
    "top_p": ("top_p", _number("top_p", lambda value: Sampling(top_p=value))),
    "seed": ("seed", _count("seed", lambda value: Sampling(seed=value))),
    "max_tokens": ("max_tokens", _count("max_tokens", lambda value: Limits(max_tokens=value))),
    "max_completion_tokens": ("max_tokens", _count("max_completion_tokens", lambda value: Limits(max_tokens=value))),
    "stop": ("stops", _stops),
    "n": ("samples", _count("n", check_samples)),
}
