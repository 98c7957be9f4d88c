"""What all routes share: the model's prompt format, the usual choices, the engine, the log."""

from asyncio import Semaphore
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from secrets import randbelow

from dsv4cli.engine.chat.constraints import Without
from dsv4cli.engine.chat.dialogue import Dialogue
from dsv4cli.engine.chat.grammar import Grammars
from dsv4cli.engine.chat.thinking import Thinking
from dsv4cli.engine.runtime.limits import context_of
from dsv4cli.engine.server.async_engine import AsyncEngine
from dsv4cli.engine.server.efforts import Effort
from dsv4cli.engine.server.metrics import Metrics
from dsv4cli.engine.server.refusals import Refusal
from dsv4cli.engine.settings import MAX_SEED, Limits, Sampling
from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.prompt import Message, think_options
from dsv4cli.engine.text.tokenizer import TooManyTokens

# names of fields that were said to be ignored are kept, so that each is said once
MOST_NAMES = 200
# long bodies that are read and encoded at once, so that one that takes seconds does not hold up all others
MOST_READING = 2


@dataclass(frozen=True)
class RequestDefaults:
    """What holds where a request does not say otherwise. think: a level. seed: None draws one for each request.
    reasoning_fields: under which names answers carry their reasoning."""

    think: str
    sampling: Sampling
    seed: int | None
    limits: Limits
    reasoning_fields: tuple[str, ...] = ("reasoning_content", "reasoning")


@dataclass(frozen=True)
class Service:
    """names: of the model, the first is that of answers. log: takes a line about the server; log_prompts: whether
    prompts may be in it. reading: Admits the long bodies that are read and encoded at once."""

    dialogue: Dialogue
    names: tuple[str, ...]
    usual: RequestDefaults
    engine: AsyncEngine
    metrics: Metrics
    log: Callable[[str], None]
    log_prompts: bool = False
    reading: Semaphore = field(default_factory=lambda: Semaphore(MOST_READING))
    _said: set[str] = field(default_factory=set)

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer: the model's, or the cache's."""
        context = context_of(self.dialogue.config, self.usual.limits)
        return context if self.engine.room is None else min(context, self.engine.room)

    def dialogue_of(self, effort: Effort) -> Dialogue:
        """The prompt format for a client's effort."""
        thinking, level = think_options(self.dialogue.release, effort.level)
        return replace(self.dialogue, thinking=thinking, effort=level)

    @property
    def most_tokens(self) -> int:
        """The most tokens of a text that are counted: a prompt that is only somewhat too long is refused with its
        length."""
        return 2 * self.context

    @property
    def most_prompt_bytes(self) -> int:
        """The bytes of the longest text that can be a prompt."""
        return self.context * self.dialogue.tokenizer.longest

    def room(self, ids: list[int]) -> int:
        """How many tokens a prompt leaves for an answer. Raises `Refusal` where there is none."""
        if len(ids) >= self.context:
            raise self.too_long(f"{len(ids):,}")
        return self.context - len(ids)

    def too_long(self, tokens: str) -> Refusal:
        """Return what is said of a prompt of so many tokens."""
        return Refusal(
            400,
            f"the prompt has {tokens} tokens, and the context has room for {self.context - 1:,} and an answer: "
            "leave out earlier messages",
            code="context_length_exceeded",
        )

    def prompt(self, dialogue: Dialogue, messages: list[Message]) -> list[int]:
        """Return the ids of a checked conversation. Raises `Refusal` where they are more than `most_tokens`."""
        with self._counting():
            prompt = dialogue.prompt(messages, self.most_tokens)
        self.say_prompt(prompt.text)
        return prompt.ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of a raw text, as `prompt`."""
        with self._counting():
            return self.dialogue.tokenizer.encode(text, self.most_tokens)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        except TooManyTokens:
            raise self.too_long(f"more than {self.most_tokens:,}") from None

    def thinking(self, ids: list[int], room: int, budget: int | None) -> Thinking:
        """What follows the thinking of an answer of at most `room` tokens, and ends it in time."""
        end = self.dialogue.tokenizer.token_id(tokens.THINK_END)
        assert end is not None
        return Thinking(self.thinks(ids), room, budget, end, self.dialogue.config.eos_token_ids)

    def thinks(self, ids: list[int]) -> bool:
        """Whether what follows a prompt begins with thinking."""
        return ids[-1] == self.dialogue.tokenizer.token_id(tokens.THINK_START)

    def seed(self, given: int | None) -> int:
        """The seed of a request; one that is too large or negative counts from the other end."""
        if given is None:
            given = randbelow(MAX_SEED + 1) if self.usual.seed is None else self.usual.seed
        return given % (MAX_SEED + 1)

    @cached_property
    def grammars(self) -> Grammars:
        """What makes grammars of this model's answers."""
        config = self.dialogue.config
        return Grammars(self.dialogue.tokenizer, config.vocab_size, config.eos_token_ids)

    def no_calls(self) -> Without:
        """What keeps calls of tools out of an answer."""
        dsml = self.dialogue.tokenizer.token_id(tokens.DSML)
        assert dsml is not None
        return Without([dsml], self.dialogue.config.vocab_size)

    def say_ignored(self, names: Iterable[str]) -> None:
        """Logs fields that are ignored, each once."""
        for name in names:
            if name not in self._said and len(self._said) < MOST_NAMES:
                self._said.add(name)
                self.log(f"the field {name} is ignored")

    def say_repaired(self, words: Sequence[str]) -> None:
        """Log that an answer was damaged; what was repaired or left out only where texts may be logged."""
        if words:
            shown = f": {'; '.join(words)}" if self.log_prompts else ""
            self.log(f"the markup of an answer was damaged, and repaired or left out{shown}")

    def say_prompt(self, prompt: str | list[int]) -> None:
        """Logs a prompt, where that was asked for."""
        if self.log_prompts:
            self.log(f"prompt: {prompt}")
