"""Sampling, length and drafting settings that a user can choose, validated. No torch."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from secrets import randbelow
from types import MappingProxyType
from typing import Any, Self

from dsv4cli.errors import UsageError

MAX_SEED = 2**32 - 1
# logits divided by less overflow, and sampling returns the most likely token anyway
MIN_TEMPERATURE = 1e-6
MOST_BIAS = 100.0
# OpenAI's range of the presence and frequency penalties
MOST_PENALTY = 2.0
# range of the repetition penalty: logits stay finite, and far above the logit of a banned token
LEAST_REPETITION, MOST_REPETITION = 0.01, 100.0
# the newest token and the drafts are the rows of a step; the state can roll back as many tokens: config/capacity.py
MOST_DRAFTS = 7
DRAFT_REMEDY = f"use auto, off or a number from 1 to {MOST_DRAFTS}"
DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?", re.ASCII)
# fields of `Sampling` that are set by name, besides temperature, top_p and seed
MORE_SAMPLING = ("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
NOTHING: Mapping[str, Any] = MappingProxyType({})
UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def require(holds: bool, option: str, value: object, remedy: str) -> None:
    """Raise UsageError, naming the option, unless its value is valid."""
    if not holds:
        raise UsageError(f"{option} cannot be {value}", remedy)


def check_device(name: str) -> None:
    """Raise UsageError unless a text is a device name, whether or not this machine has the device."""
    require(DEVICE.fullmatch(name) is not None, "--device", repr(name), "use auto, cpu, cuda or cuda:N")


def parse_size(option: str, text: str) -> int:
    """Return the bytes of a size such as 5GB, 500MB or 4.5GiB. Raises UsageError."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)\s*([kmgt]i?b)", text.strip().lower(), re.ASCII)
    size = round(float(match[1]) * UNITS[match[2]]) if match else 0
    if not size:
        raise UsageError(f"{option} {text!r} is not a size", "give a number and kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return size


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Raises UsageError for invalid values.

    Attributes:
        temperature: 0 for greedy.
        top_p: tokens are sampled from the smallest set of most likely tokens with at least this total probability.
        logit_bias: token ids and the biases, from -100 to 100, that are added to their logits before that.
        top_k: tokens are sampled from this many of the most likely; 0 for all.
        min_p: tokens are sampled from those at least this many times as likely as the most likely one; 0 for all.
        presence_penalty: subtracted from the logit of each token that the completion has.
        frequency_penalty: subtracted from the logit of a token for each time that the completion has it.
        repetition_penalty: what makes each token of the prompt and completion less likely: a positive logit is divided
            by it, any other multiplied; 1 for no change.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        warm = math.isfinite(self.temperature) and self.temperature >= MIN_TEMPERATURE
        greedy = self.temperature == 0
        remedy = f"use 0 for the most likely token, or at least {MIN_TEMPERATURE:f}"
        require(greedy or warm, "--temperature", self.temperature, remedy)
        require(0 < self.top_p <= 1, "--top-p", self.top_p, "use a number above 0 and up to 1")
        require(self.top_k >= 0, "--top-k", self.top_k, "use a positive whole number, or 0 for no limit")
        require(0 <= self.min_p <= 1, "--min-p", self.min_p, "use a number from 0 to 1")
        remedy = f"use a number from -{MOST_PENALTY:g} to {MOST_PENALTY:g}"
        for name in ("presence", "frequency"):
            penalty = getattr(self, f"{name}_penalty")
            require(-MOST_PENALTY <= penalty <= MOST_PENALTY, f"--{name}-penalty", penalty, remedy)
        repetition, remedy = self.repetition_penalty, f"use a number from {LEAST_REPETITION} to {MOST_REPETITION:g}"
        require(LEAST_REPETITION <= repetition <= MOST_REPETITION, "--repetition-penalty", repetition, remedy)
        require(0 <= self.seed <= MAX_SEED, "--seed", self.seed, f"use a whole number from 0 to {MAX_SEED}")
        remedy = f"use numbers from -{MOST_BIAS:.0f} to {MOST_BIAS:.0f}"
        for _, bias in self.logit_bias:
            require(-MOST_BIAS <= bias <= MOST_BIAS, "logit_bias", bias, remedy)
        ids = [token for token, _ in self.logit_bias]
        require(len(ids) == len(set(ids)), "logit_bias", ids, "name each token once")

    @property
    def penalizes(self) -> bool:
        """Whether any penalty changes logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def filters(self) -> bool:
        """Whether top-k or min-p may exclude tokens."""
        return bool(self.top_k or self.min_p)

    def plus(self, number: int) -> "Sampling":
        """Return a copy with the seed of the answer `number` places after this one."""
        return replace(self, seed=(self.seed + number) % (MAX_SEED + 1))

    def chosen(
        self, temperature: float | None, top_p: float | None, seed: int | None, more: Mapping[str, Any] = NOTHING
    ) -> Self:
        """Return a copy with the values that are not None, and with a random seed if `seed` is None.

        Args:
            more: values of fields in `MORE_SAMPLING`, by name; may have others, which are ignored.
        """
        others = {name: more[name] for name in MORE_SAMPLING if more.get(name) is not None}
        return replace(
            self,
            **others,
            temperature=self.temperature if temperature is None else temperature,
            top_p=self.top_p if top_p is None else top_p,
            seed=randbelow(MAX_SEED + 1) if seed is None else seed,
        )


@dataclass(frozen=True)
class Limits:
    """Limits of an answer. Raises UsageError for invalid values.

    Attributes:
        max_tokens: tokens of the answer.
        max_context: tokens of prompt and answer; None for the model's own limit.
        prefill_chunk: tokens of one prompt in a step; None for as many as fit.
        logprobs: number of alternatives to report for each token, at most the vocabulary size.
        stops: texts that end an answer.
    """

    max_tokens: int = 4096
    max_context: int | None = None
    prefill_chunk: int | None = None
    logprobs: int = 0
    stops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.max_tokens > 0, "--max-tokens", self.max_tokens, "use at least 1")
        require(self.max_context is None or self.max_context > 1, "--max-context", self.max_context, "use at least 2")
        require(
            self.prefill_chunk is None or self.prefill_chunk > 0,
            "--prefill-chunk",
            self.prefill_chunk,
            "use at least 1",
        )
        require(self.logprobs >= 0, "--logprobs", self.logprobs, "use a number from 0 to the size of the vocabulary")
        require(all(self.stops), "--stop", "an empty string", "give the text that ends an answer")


@dataclass(frozen=True)
class Drafting:
    """How many draft tokens a drafter adds to each step of a request.

    Attributes:
        most: maximum number of draft tokens; 0 for none, None for as many as pay off.
        always: draft that many tokens in every step, even if they do not pay off.
    """

    most: int | None = 0
    always: bool = False

    def __post_init__(self) -> None:
        require(self.most is None or 0 <= self.most <= MOST_DRAFTS, "--draft", self.most, DRAFT_REMEDY)

    @property
    def required(self) -> bool:
        """Whether a number was specified, which requires a drafter."""
        return bool(self.most)


AUTO_DRAFTING, NO_DRAFTS = Drafting(None), Drafting(0)


def parse_drafting(text: str) -> Drafting:
    """Parse `auto`, `off` or a number of draft tokens, at least 1. Raises UsageError."""
    if text in ("auto", "off"):
        return Drafting(None if text == "auto" else 0)
    require(re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII) is not None, "--draft", repr(text), DRAFT_REMEDY)
    return Drafting(int(text))


@dataclass(frozen=True)
class Part:
    """A part of a shared job: number `index` of `count`, counted from 1."""

    index: int = 1
    count: int = 1

    def has(self, number: int) -> bool:
        """Return whether an item of a list belongs to the part, by its number from 0: every `count`th does."""
        return number % self.count == self.index - 1


WHOLE = Part()


def parse_part(text: str) -> Part:
    """Parse a part such as `2/8`. Raises UsageError."""
    match = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text, re.ASCII)
    part = Part(int(match[1]), int(match[2])) if match else Part(0, 0)
    if not 1 <= part.index <= part.count:
        raise UsageError(f"--shard {text!r} is not a valid part", "give I/N with I from 1 to N, for example 2/8")
    return part
