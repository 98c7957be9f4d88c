"""What a user can choose about a generation, checked; no torch."""

import math
import re
from array import array
from dataclasses import dataclass, replace
from functools import cached_property
from secrets import randbelow
from typing import Self

from dsv4cli.errors import UsageError

MAX_SEED = 2**32 - 1
# logits divided by less overflow; what it draws is the likeliest token anyway
MIN_TEMPERATURE = 1e-6
MOST_BIAS = 100.0
# the newest token and these are the rows of a step; the model's state takes back as many: config/capacity.py
MOST_DRAFTS = 7
DRAFT_REMEDY = f"use auto, off or a number from 1 to {MOST_DRAFTS}"
DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?", re.ASCII)
UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def require(holds: bool, option: str, value: object, remedy: str) -> None:
    """Raises UsageError naming an option whose value cannot be."""
    if not holds:
        raise UsageError(f"{option} cannot be {value}", remedy)


def check_device(name: str) -> None:
    """Raises UsageError for what no device is called, whether or not this machine has it."""
    require(DEVICE.fullmatch(name) is not None, "--device", repr(name), "use auto, cpu, cuda or cuda:N")


def parse_size(option: str, text: str) -> int:
    """Bytes of a size as in 5GB, 500MB or 4.5GiB. Raises UsageError."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)\s*([kmgt]i?b)", text.strip().lower(), re.ASCII)
    size = round(float(match[1]) * UNITS[match[2]]) if match else 0
    if not size:
        raise UsageError(f"{option} {text!r} is not a size", "give a number and kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return size


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. top_p: the smallest set of likeliest tokens with at least this probability is drawn
    from. logit_bias: token ids, and what is added to their logits before that, from -100 to 100."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        warm = math.isfinite(self.temperature) and self.temperature >= MIN_TEMPERATURE
        greedy = self.temperature == 0
        remedy = f"use 0 for the likeliest token, or at least {MIN_TEMPERATURE:f}"
        require(greedy or warm, "--temperature", self.temperature, remedy)
        require(0 < self.top_p <= 1, "--top-p", self.top_p, "use a number above 0 and up to 1")
        require(0 <= self.seed <= MAX_SEED, "--seed", self.seed, f"use a whole number from 0 to {MAX_SEED}")
        remedy = f"use numbers from -{MOST_BIAS:.0f} to {MOST_BIAS:.0f}"
        for _, bias in self.logit_bias:
            require(-MOST_BIAS <= bias <= MOST_BIAS, "logit_bias", bias, remedy)
        ids = [token for token, _ in self.logit_bias]
        require(len(ids) == len(set(ids)), "logit_bias", ids, "name each token once")

    @cached_property
    def packed_bias(self) -> "array[float]":
        """The ids of `logit_bias`, then what is added to each, packed: fp64 holds both exactly."""
        return array("d", [*(token for token, _ in self.logit_bias), *(bias for _, bias in self.logit_bias)])

    def plus(self, number: int) -> "Sampling":
        """The same with the seed of the answer that comes `number` after this one's."""
        return replace(self, seed=(self.seed + number) % (MAX_SEED + 1))

    def chosen(self, temperature: float | None, top_p: float | None, seed: int | None) -> Self:
        """Return a copy with the values that are not None, and with a random seed if `seed` is None."""
        return replace(
            self,
            temperature=self.temperature if temperature is None else temperature,
            top_p=self.top_p if top_p is None else top_p,
            seed=randbelow(MAX_SEED + 1) if seed is None else seed,
        )


@dataclass(frozen=True)
class Limits:
    """max_tokens: of an answer. max_context: of prompt and answer, None for the model's own. prefill_chunk: tokens of
    one prompt in a step, None for as many as have room. logprobs: alternatives to report for each token, at most the
    vocabulary. stops: texts that end an answer."""

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
        require(all(self.stops), "--stop", "an empty text", "give the text that ends an answer")


@dataclass(frozen=True)
class Drafting:
    """most: how many tokens a drafter may guess ahead of each step of a request: 0 for none, None for as many as
    pay. always: so many in every step, whether or not they pay."""

    most: int | None = 0
    always: bool = False

    def __post_init__(self) -> None:
        require(self.most is None or 0 <= self.most <= MOST_DRAFTS, "--draft", self.most, DRAFT_REMEDY)

    @property
    def required(self) -> bool:
        """Whether a number was asked for, so that there must be a drafter."""
        return bool(self.most)


AUTO_DRAFTING, NO_DRAFTS = Drafting(None), Drafting(0)


def parse_drafting(text: str) -> Drafting:
    """What `auto`, `off` or a number of drafts from 1 on asks for. Raises UsageError."""
    if text in ("auto", "off"):
        return Drafting(None if text == "auto" else 0)
    require(re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII) is not None, "--draft", repr(text), DRAFT_REMEDY)
    return Drafting(int(text))
