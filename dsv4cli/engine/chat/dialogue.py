"""Between a conversation and the model's tokens: prompts written, lengths and ids checked; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.presets import Release
from dsv4cli.engine.settings import Limits
from dsv4cli.engine.text.prompt import Message, encode_messages, think_options
from dsv4cli.engine.text.tokenizer import Tokenizer
from dsv4cli.engine.text.tokens import Given
from dsv4cli.errors import CheckpointError, UsageError


@dataclass(frozen=True)
class Prompt:
    """The exact text that the model reads and its tokens; `lookalikes` are the special tokens' texts that messages
    hold, which are read as text."""

    text: str
    ids: list[int]
    lookalikes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Dialogue:
    """A model's prompt format: its release, its vocabulary, and whether and how hard it is asked to think.

    special_tokens: a special token's text in a message is that token, as in the official encoder.
    """

    config: ModelConfig
    release: Release
    tokenizer: Tokenizer
    thinking: bool
    effort: str | None
    special_tokens: bool = False

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """The prompt of a checked conversation."""
        parts = encode_messages(list(messages), release=self.release, thinking=self.thinking, effort=self.effort)
        text = "".join(parts)
        ids, lookalikes = self.tokenizer.encode_parts([text] if self.special_tokens else parts)
        return Prompt(text, ids, lookalikes)

    def text_ids(self, text: str) -> list[int]:
        """The tokens of a text in a message."""
        return self.tokenizer.encode_parts([text if self.special_tokens else Given(text)])[0]


def open_dialogue(source: FolderSource | RandomSource, think: str, special_tokens: bool = False) -> Dialogue:
    """The prompt format of a model.

    Raises what `identify` raises, CheckpointError for a tokenizer that is missing, damaged or another model's,
    UsageError for an effort that the release does not have.
    """
    identity = source.identity
    thinking, effort = think_options(identity.release, think)
    tokenizer = _tokenizer(source, identity.config)
    return Dialogue(identity.config, identity.release, tokenizer, thinking, effort, special_tokens)


def _tokenizer(source: FolderSource | RandomSource, config: ModelConfig) -> Tokenizer:
    if isinstance(source, RandomSource):
        return Tokenizer.byte_level()
    path = source.folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(path)
    if tokenizer.eos_id not in config.eos_token_ids:
        named = ", ".join(map(str, config.eos_token_ids))
        raise CheckpointError(
            f"{path} has the end token at id {tokenizer.eos_id}, config.json at {named}",
            "download both files from one revision",
        )
    return tokenizer


def check_texts(texts: Sequence[list[int]], config: ModelConfig, limits: Limits) -> None:
    """Raises UsageError for a text that has no token, an id outside the vocabulary, or more than the context holds."""
    for number, ids in enumerate(texts):
        _check(ids, config, context_of(config, limits), f"text {number}" if len(texts) > 1 else "the text", "")


def room_of(prompt: list[int], config: ModelConfig, limits: Limits, which: str = "the prompt") -> int:
    """How many tokens the prompt may be answered with. Raises UsageError as `check_texts`, and for a full context."""
    context = context_of(config, limits)
    _check(prompt, config, context - 1, which, " and an answer")
    return min(limits.max_tokens, context - len(prompt))


def context_of(config: ModelConfig, limits: Limits) -> int:
    """The most tokens of a prompt and its answer."""
    return min(limits.max_context or config.max_position_embeddings, config.max_position_embeddings)


def _check(ids: list[int], config: ModelConfig, most: int, which: str, more: str) -> None:
    """`most` tokens fit into a sequence, with `more` behind it."""
    if not ids:
        raise UsageError(f"{which} has no tokens", "give at least one")
    strange = next((token for token in ids if not 0 <= token < config.vocab_size), None)
    if strange is not None:
        raise UsageError(
            f"{which} has the token id {strange}, the model's vocabulary is 0 to {config.vocab_size - 1:,}",
            "use ids of the tokenizer.json that belongs to the model",
        )
    if len(ids) > most:
        raise UsageError(
            f"{which} has {len(ids):,} tokens: the context has room for {most:,}{more}",
            "shorten it" if most + 1 >= config.max_position_embeddings else "shorten it or raise --max-context",
        )
