"""The state that all routes share: the model's prompt format, the server's defaults, the engine and the log."""

from asyncio import Semaphore
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from secrets import randbelow

from dsv4cli.engine.chat.constraints import Without
from dsv4cli.engine.chat.dialogue import Dialogue
from dsv4cli.engine.chat.grammar import Grammars
from dsv4cli.engine.runtime.limits import context_of
from dsv4cli.engine.server.async_engine import AsyncEngine
from dsv4cli.engine.server.efforts import Effort
from dsv4cli.engine.server.metrics import Metrics
from dsv4cli.engine.server.refusals import PromptTooLong
from dsv4cli.engine.server.response_seal import Seal
from dsv4cli.engine.server.response_store import ResponseStore
from dsv4cli.engine.settings import MAX_SEED, Limits, Sampling
from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.prompt import Message, think_options
from dsv4cli.engine.text.tokenizer import TooManyTokens

# ignored fields whose names are remembered, so that each is logged only once
MOST_NAMES = 200
# long bodies that are processed at once, so that one that takes seconds does not block all others
MOST_READING = 2


@dataclass(frozen=True)
class RequestDefaults:
    """The server's defaults, for whatever a request does not specify.

    Attributes:
        think: the thinking level.
        seed: the seed of all requests; None for a random seed per request.
        reasoning_fields: names of the fields that carry an answer's reasoning.
    """

    think: str
    sampling: Sampling
    seed: int | None
    limits: Limits
    reasoning_fields: tuple[str, ...] = ("reasoning_content", "reasoning")


@dataclass(frozen=True)
class Service:
    """The state that all routes share.

    Attributes:
        names: the model's names; responses use the first.
        log: called with each log line.
        log_prompts: whether the log may contain prompts.
        responses: the stored responses, None if the server stores none.
        seal: seals reasoning that clients return.
        reading: limits how many long bodies are parsed and encoded at once.
    """

    dialogue: Dialogue
    names: tuple[str, ...]
    defaults: RequestDefaults
    engine: AsyncEngine
    metrics: Metrics
    log: Callable[[str], None]
    log_prompts: bool = False
    responses: ResponseStore | None = field(default_factory=ResponseStore)
    seal: Seal = field(default_factory=Seal)
    reading: Semaphore = field(default_factory=lambda: Semaphore(MOST_READING))
    _said: set[str] = field(default_factory=set)

    @property
    def context(self) -> int:
        """The context length in tokens, including the answer: the model's, or the KV cache's if that is smaller."""
        context = context_of(self.dialogue.config, self.defaults.limits)
        return context if self.engine.max_request_tokens is None else min(context, self.engine.max_request_tokens)

    def dialogue_of(self, effort: Effort) -> Dialogue:
        """Return the prompt format for a client's thinking effort."""
        thinking, level = think_options(self.dialogue.release, effort.level)
        return replace(self.dialogue, thinking=thinking, effort=level)

    @property
    def most_tokens(self) -> int:
        """The maximum number of tokens to encode.

        A prompt that is only somewhat too long is refused with its exact length.
        """
        return 2 * self.context

    @property
    def most_prompt_bytes(self) -> int:
        """Upper bound for the size of a prompt's text in bytes."""
        return self.context * self.dialogue.tokenizer.longest

    def tokens_left(self, ids: list[int]) -> int:
        """Return how many tokens a prompt leaves for the answer. Raises `Refusal` if it leaves none."""
        if len(ids) >= self.context:
            raise PromptTooLong(len(ids), self.context)
        return self.context - len(ids)

    def prompt(self, dialogue: Dialogue, messages: list[Message]) -> list[int]:
        """Return the token ids of a validated conversation. Raises `Refusal` if there are more than `most_tokens`."""
        with self._counting():
            prompt = dialogue.prompt(messages, self.most_tokens)
        self.say_prompt(prompt.text)
        return prompt.ids

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a raw text. Raises `Refusal` if there are more than `most_tokens`."""
        with self._counting():
            return self.dialogue.tokenizer.encode(text, self.most_tokens)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        except TooManyTokens:
            raise PromptTooLong(self.most_tokens, self.context, counted=False) from None

    def seed(self, given: int | None) -> int:
        """Return the seed of a request. One outside the valid range wraps around."""
        if given is None:
            given = randbelow(MAX_SEED + 1) if self.defaults.seed is None else self.defaults.seed
        return given % (MAX_SEED + 1)

    @cached_property
    def grammars(self) -> Grammars:
        """The compiler of grammars for this model's answers."""
        config = self.dialogue.config
        return Grammars(self.dialogue.tokenizer, config.vocab_size, config.eos_token_ids)

    def no_calls(self) -> Without:
        """Return the constraint that prevents tool calls in an answer."""
        dsml = self.dialogue.tokenizer.token_id(tokens.DSML)
        assert dsml is not None
        return Without([dsml], self.dialogue.config.vocab_size)

    def say_ignored(self, names: Iterable[str]) -> None:
        """Log the names of ignored fields, each only once."""
        for name in names:
            self.say_once(f"ignoring the unknown field {name}")

    def say_once(self, text: str) -> None:
        """Log a line that contains a client's words, unless it was logged before."""
        if text not in self._said and len(self._said) < MOST_NAMES:
            self._said.add(text)
            self.log(text)

    def say_repaired(self, words: Sequence[str]) -> None:
        """Log that an answer's markup was damaged. The log describes the repairs only if it may contain prompts."""
        if words:
            shown = f": {'; '.join(words)}" if self.log_prompts else ""
            self.log(f"the markup of an answer was damaged, and was repaired or removed{shown}")

    def say_prompt(self, prompt: str | list[int]) -> None:
        """Log a prompt, if the log may contain prompts."""
        if self.log_prompts:
            self.log(f"prompt: {prompt}")
