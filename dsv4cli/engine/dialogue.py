"""Between a conversation and the model's tokens: prompts written, replies read; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from dsv4cli.engine.config import ModelConfig
from dsv4cli.engine.identify import describe, identify
from dsv4cli.engine.layout import Formats
from dsv4cli.engine.prompt import Message, Release, encode_messages, think_options
from dsv4cli.engine.settings import Limits
from dsv4cli.engine.source import FolderSource, RandomSource
from dsv4cli.engine.tokenizer import Tokenizer
from dsv4cli.errors import UsageError


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
    """The prompt format of a model. Raises what `identify` raises, CheckpointError without a tokenizer, UsageError for
    an effort that the release does not have."""
    if isinstance(source, RandomSource):
        identity, tokenizer = describe(source.config, Formats()), Tokenizer.byte_level()
    else:
        identity = identify(source.folder)
        tokenizer = Tokenizer.from_file(source.folder / "tokenizer.json")
    thinking, effort = think_options(identity.release, think)
    return Dialogue(identity.config, identity.release, tokenizer, thinking, effort)


def rooms(prompts: Sequence[list[int]], config: ModelConfig, limits: Limits) -> list[int]:
    """How many tokens each prompt may be answered with. Raises UsageError for a prompt that fills the context."""
    context = min(limits.max_context or config.max_position_embeddings, config.max_position_embeddings)
    for number, ids in enumerate(prompts):
        if len(ids) >= context:
            which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
            raise UsageError(
                f"{which} has {len(ids):,} tokens, which leaves no room for an answer in a context of {context:,}",
                "shorten it or raise --max-context",
            )
    return [min(limits.max_tokens, context - len(ids)) for ids in prompts]
