"""Between a conversation and the model's tokens: prompts written, lengths and ids checked; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from dsv4cli.engine.config import ModelConfig
from dsv4cli.engine.prompt import Message, Release, encode_messages, think_options
from dsv4cli.engine.settings import Limits
from dsv4cli.engine.source import FolderSource, RandomSource
from dsv4cli.engine.tokenizer import Tokenizer
from dsv4cli.errors import CheckpointError, UsageError


@dataclass(frozen=True)
class Prompt:
    """The exact text that the model reads and its tokens."""

    text: str
    ids: list[int]


@dataclass(frozen=True)
class Dialogue:
    """A model's prompt format: its release, its vocabulary, and whether and how hard it is asked to think."""

    config: ModelConfig
    release: Release
    tokenizer: Tokenizer
    thinking: bool
    effort: str | None

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """The prompt of a checked conversation."""
        text = encode_messages(list(messages), release=self.release, thinking=self.thinking, effort=self.effort)
        return Prompt(text, self.tokenizer.encode(text))


def open_dialogue(source: FolderSource | RandomSource, think: str) -> Dialogue:
    """The prompt format of a model.

    Raises what `identify` raises, CheckpointError for a tokenizer that is missing, damaged or another model's,
    UsageError for an effort that the release does not have.
    """
    identity = source.identity
    thinking, effort = think_options(identity.release, think)
    return Dialogue(identity.config, identity.release, _tokenizer(source, identity.config), thinking, effort)


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
    _check(texts, config, context_of(config, limits), "text", "")


def rooms(prompts: Sequence[list[int]], config: ModelConfig, limits: Limits) -> list[int]:
    """How many tokens each prompt may be answered with. Raises UsageError as `check_texts`, and for a full context."""
    context = context_of(config, limits)
    _check(prompts, config, context - 1, "prompt", " and an answer")
    return [min(limits.max_tokens, context - len(ids)) for ids in prompts]


def context_of(config: ModelConfig, limits: Limits) -> int:
    """The most tokens of a prompt and its answer."""
    return min(limits.max_context or config.max_position_embeddings, config.max_position_embeddings)


def _check(sequences: Sequence[list[int]], config: ModelConfig, most: int, what: str, more: str) -> None:
    """`most` tokens fit into a sequence, with `more` behind it."""
    for number, ids in enumerate(sequences):
        which = f"{what} {number}" if len(sequences) > 1 else f"the {what}"
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
