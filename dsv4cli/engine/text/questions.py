"""Lines of `dsv4 run --prompts`: the conversation, its labels, and options for its answers. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsv4cli.engine.settings import MORE_SAMPLING, WHOLE, Limits, Part, Sampling
from dsv4cli.engine.text.inputs import BadLine, asked_in, read_lines
from dsv4cli.engine.text.prompt import Message
from dsv4cli.errors import UsageError

LABELS = ("id", "custom_id")
# keys of an OpenAI batch request, without its label
_ENVELOPE = {"method", "url", "body"}
_PATH = "/v1/chat/completions"
_CHAT = {"messages", "tools", "prompt"}
# keys of an API request that do not affect the answer
_IDLE = {"model", "user", "metadata", "store", "service_tier", "stream", "stream_options", "parallel_tool_calls"}
# unsupported keys that would affect the answer, with the value at which they do not
_NEUTRAL: Mapping[str, object] = {
    "logit_bias": {},
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "logprobs": False,
    "top_logprobs": 0,
}
# added to the seed for each further sample; odd, so that no seed repeats
_NEXT_SAMPLE = 0x9E3779B9


@dataclass(frozen=True)
class Question:
    """A line of a prompts file. A field that is None uses the command's value.

    Attributes:
        line: its line number.
        index: its position among the lines that are not empty.
        labels: its `id` and `custom_id`, if present.
        model: the model that it names, which is ignored.
    """

    line: int
    index: int
    messages: list[Message]
    labels: dict[str, Any] = field(default_factory=dict)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stops: tuple[str, ...] | None = None
    samples: int | None = None
    model: str | None = None

    def sampling(self, defaults: Sampling, sample: int) -> Sampling:
        """Return the sampling parameters of answer number `sample`.

        Args:
            defaults: the parameters for the first answer of the first line.
        """
        seed, more = (
            defaults.seed if self.seed is None else self.seed,
            {name: getattr(self, name) for name in MORE_SAMPLING},
        )
        chosen = defaults.chosen(self.temperature, self.top_p, seed, more)
        return sample_of(chosen, sample).plus(0 if self.seed is not None else self.index)

    def limits(self, defaults: Limits) -> Limits:
        """Return the limits of its answers, with the command's limits as defaults."""
        stops = defaults.stops if self.stops is None else self.stops
        return replace(defaults, max_tokens=self.max_tokens or defaults.max_tokens, stops=stops)


def sample_of(sampling: Sampling, sample: int) -> Sampling:
    """Return the sampling parameters of answer number `sample` to the same prompt; number 0 has those of `sampling`."""
    return sampling.plus(sample * _NEXT_SAMPLE)


def read_questions(path: Path, system: str | None, part: Part = WHOLE) -> tuple[list[Question], list[BadLine]]:
    """Read a JSON-lines file of prompts. Return the questions of a part, and all invalid lines.

    A line is {"prompt": text} or {"messages": [...], "tools": [...]}, with an optional label and sampling options, or
    an OpenAI batch request.
    """
    lines, bad = read_lines(path, lambda value: _question(value, system))
    order = {number: index for index, number in enumerate(sorted([n for n, _ in lines] + [one.number for one in bad]))}
    return [replace(one, line=number, index=order[number]) for number, one in lines if part.has(order[number])], bad


def _question(value: dict[str, Any], system: str | None) -> Question:
    labels = {key: _label(key, value[key]) for key in LABELS if value.get(key) is not None}
    rest = {key: item for key, item in value.items() if key not in LABELS}
    if "body" in rest:
        rest = _body(rest)
    for key, neutral in _NEUTRAL.items():
        if rest.pop(key, None) not in (None, neutral):
            raise UsageError(f'"{key}" is not supported here', "remove it")
    model = rest.get("model")
    rest = {key: item for key, item in rest.items() if key not in _IDLE}
    wishes = {name: wish(rest.pop(key)) for key, (name, wish) in _WISHES.items() if rest.get(key) is not None}
    rest = {key: item for key, item in rest.items() if key not in _WISHES}
    chat = {key: item for key, item in rest.items() if key not in _CHAT or item is not None}
    return Question(0, 0, asked_in(chat, system), labels, model=model if isinstance(model, str) else None, **wishes)


def _body(value: dict[str, Any]) -> dict[str, Any]:
    """Return the body of an OpenAI batch request. Raises UsageError."""
    unknown = set(value) - _ENVELOPE
    if unknown:
        raise UsageError(f"unknown key {min(unknown)!r} next to body", "write an OpenAI batch request")
    if value.get("method", "POST") != "POST" or value.get("url", _PATH) != _PATH:
        asked = f"{value.get('method', 'POST')} {value.get('url', _PATH)}"
        raise UsageError(f"{asked!r} is not supported", f"use POST {_PATH}")
    if not isinstance(value["body"], dict):
        raise UsageError('"body" is not a JSON object', "write the request as for the OpenAI chat API")
    return value["body"]


def _label(key: str, value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(f'"{key}" is neither a string nor a number', "use one of these")
    return value


def _number(key: str, check: Any) -> Any:
    """Return a function that reads a number; 1 and 1.0 are the same."""

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f'"{key}" is not a number', "use a number")
        _try(key, value, lambda: check(float(value)))
        return float(value)

    return read


def _count(key: str, check: Any) -> Any:
    """Return a function that reads an integer."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f'"{key}" is not a whole number', "use a whole number")
        _try(key, value, lambda: check(value))
        return value

    return read


def _try(key: str, value: object, check: Any) -> None:
    """Run a check, and reword its UsageError for a file."""
    try:
        check()
    except UsageError as error:
        raise UsageError(f'"{key}" cannot be {value}', error.remedy) from None


def _stops(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise UsageError('"stop" is neither a string nor a list of strings', "give the strings that end an answer")
    return tuple(texts)


def check_samples(count: int) -> None:
    """Raise UsageError if the number of answers per prompt is less than 1."""
    if count < 1:
        raise UsageError(f"--samples cannot be {count}", "use at least 1")


# field of `Question` and function that reads the value, by key of a line
_WISHES: Mapping[str, tuple[str, Any]] = {
    "temperature": ("temperature", _number("temperature", lambda value: Sampling(temperature=value))),
    "top_p": ("top_p", _number("top_p", lambda value: Sampling(top_p=value))),
    "top_k": ("top_k", _count("top_k", lambda value: Sampling(top_k=value))),
    "min_p": ("min_p", _number("min_p", lambda value: Sampling(min_p=value))),
    "presence_penalty": (
        "presence_penalty",
        _number("presence_penalty", lambda value: Sampling(presence_penalty=value)),
    ),
    "frequency_penalty": (
        "frequency_penalty",
        _number("frequency_penalty", lambda value: Sampling(frequency_penalty=value)),
    ),
    "repetition_penalty": (
        "repetition_penalty",
        _number("repetition_penalty", lambda value: Sampling(repetition_penalty=value)),
    ),
    "seed": ("seed", _count("seed", lambda value: Sampling(seed=value))),
    "max_tokens": ("max_tokens", _count("max_tokens", lambda value: Limits(max_tokens=value))),
    "max_completion_tokens": ("max_tokens", _count("max_completion_tokens", lambda value: Limits(max_tokens=value))),
    "stop": ("stops", _stops),
    "n": ("samples", _count("n", check_samples)),
}
